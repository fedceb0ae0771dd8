"""FP8 matrices: E4M3 codes times scales per tensor, row, block or expert (specs/conversion.md, FP8 sources).

Three ways of naming them are told apart by the stored names alone: ``weight_scale_inv`` (block FP8; despite its name it
multiplies), ``weight_scale`` (compressed-tensors, FBGEMM, ModelOpt), and ``_scale_inv`` beside an expert bank.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.checkpoint import Checkpoint, TensorRef
from ninfer_convert.problems import some_names
from ninfer_convert.sources.fp8_scales import ScaleGrid, declared_blocks, scale_grid
from ninfer_convert.sources.groups import StoredGroup
from ninfer_convert.sources.logical import FloatReader, Floats, LogicalTensor
from ninfer_convert.sources.refusal import BadGroup
from ninfer_format import SourceError
from ninfer_format.numeric.direct import widen_bf16
from ninfer_format.numeric.nvfp4 import E4M3FN

CODES = "F8_E4M3"
SCALES: Sequence[str] = (".weight_scale_inv", ".weight_scale", "_scale_inv")
"""Part names of scales that multiply the codes."""
ACTIVATIONS: Sequence[str] = (".input_scale", ".input_scale_ub", ".activation_scale", "_activation_scale")
"""Part names of scales of what the matrix is multiplied with: known, and no part of the weight."""

_TILE_VALUES = 1 << 18
_AGAIN = "use a complete FP8 checkpoint, or the original BF16 one"


def _e8m0_table() -> Floats:
    return np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan)).astype(np.float32)


E8M0 = _e8m0_table()
"""float32 value of each of the 256 E8M0 words, 2 ** (word - 127); 0xff is NaN."""
E8M0.flags.writeable = False
_SCALE_WORDS: Mapping[str, np.dtype[np.generic]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
}


def scale_values(words: NDArray[np.generic], dtype: str) -> Floats:
    """float32 values of scale ``words`` as ``_SCALE_WORDS`` has them; exact for every dtype."""
    if dtype == "BF16":
        values = np.empty(words.shape, np.float32)
        widen_bf16(words.astype(np.uint16, copy=False), values)
        return values
    if dtype in ("F8_E4M3", "F8_E8M0"):
        return (E4M3FN if dtype == "F8_E4M3" else E8M0)[words.astype(np.intp)]
    return words.astype(np.float32)


class _Reader(FloatReader):
    """float32 rows: code × scale, one rounding per value, exact where the scale has at most 20 significant bits."""

    def __init__(self, name: str, files: Checkpoint, codes: TensorRef, scales: TensorRef, grid: ScaleGrid) -> None:
        super().__init__(name, codes.shape)
        self._files, self._codes, self._scales, self._grid = files, codes, scales, grid

    def read_rows(self, begin: int, out: Floats) -> None:
        """See ``FloatReader``; SourceError for a scale that is NaN, infinite or negative.

        NaN codes become NaN values, which encoders refuse with their index.
        """
        step = max(1, _TILE_VALUES // self.width)
        for first in range(0, len(out), step):
            part = out[first : first + step]
            codes = np.empty(part.shape, np.uint8)
            self._files.read_into(self._codes.name, (begin + first) * self.width, codes.reshape(-1).data)
            np.take(E4M3FN, codes, out=part, mode="clip")  # every byte is in range; the default copies to find out
            self._multiply(part, begin + first)

    def _multiply(self, part: Floats, begin: int) -> None:
        grid = self._grid
        rows = grid.rows_of(begin, len(part))
        scales = self._read_scales(int(rows[0]), int(rows[-1]) + 1)[rows - rows[0]]
        block = grid.block[1]
        whole = self.width // block * block
        with np.errstate(over="ignore", invalid="ignore"):  # the encoder refuses infinity and NaN with their place
            if whole:
                blocks = part[:, :whole].reshape(len(part), -1, block)
                np.multiply(blocks, scales[:, : whole // block, None], out=blocks)
            if whole < self.width:
                np.multiply(part[:, whole:], scales[:, -1:], out=part[:, whole:])

    def _read_scales(self, begin: int, end: int) -> Floats:
        """Grid rows [begin, end), checked."""
        dtype, columns = _SCALE_WORDS[self._scales.dtype], self._grid.columns
        words = np.empty((end - begin, columns), dtype)
        flat_bytes = words.reshape(-1).view(np.uint8).data
        self._files.read_into(self._scales.name, begin * columns * dtype.itemsize, flat_bytes)
        values = scale_values(words, self._scales.dtype)
        good = np.isfinite(values) & ~np.signbit(values)
        if not good.all():
            row, column = np.argwhere(~good)[0]
            flat = (begin + int(row)) * columns + int(column)
            index = [int(i) for i in np.unravel_index(flat, self._scales.shape)] if self._scales.shape else []
            raise SourceError(
                f"tensor {self._scales.name!r} holds the scale {values[row, column]} at index {index}; scales are "
                "finite and not negative, so the checkpoint is damaged or its quantizer overflowed"
            )
        return values


class Fp8Adapter:
    """Matrices of FP8 codes with scales beside them."""

    def takes(self, group: StoredGroup) -> bool:
        """See ``Adapter``: codes of an FP8 dtype, with or without scales, or a scale that only FP8 has."""
        weight = group.weight
        if weight is not None and weight.dtype.startswith("F8_"):
            return True
        return ".weight_scale_inv" in group.parts or "_scale_inv" in group.parts

    def present(self, group: StoredGroup, files: Checkpoint) -> LogicalTensor:
        """See ``Adapter``."""
        codes, scales = _codes_and_scales(group)
        if scales.dtype not in _SCALE_WORDS:
            message = f"scales are {scales.dtype}, expected {', '.join(_SCALE_WORDS)}"
            raise BadGroup("wrong-dtype", message, _AGAIN)
        grid = scale_grid(group.name, codes.shape, scales.shape, declared_blocks(files.config))
        activations = [group.parts[part].name for part in ACTIVATIONS if part in group.parts]
        kind = f"FP8 (E4M3, {scales.dtype} scales {grid.label})"
        if activations:
            kind += " with activation scales, which are not part of the weight,"
        return LogicalTensor(
            group.name, codes.shape, codes.dtype, kind, (codes.name, scales.name, *activations), codes.file,
            codes.file_offset, _Reader(group.name, files, codes, scales, grid),
        )  # fmt: skip


def _codes_and_scales(group: StoredGroup) -> tuple[TensorRef, TensorRef]:
    """The two parts that make the weight, or BadGroup."""
    codes, found = group.weight, [part for part in SCALES if part in group.parts]
    if codes is None:
        message = f"{some_names(found, 1)} is stored, but the weights that it scales are missing"
        raise BadGroup("missing-codes", message, _AGAIN)
    if codes.dtype != CODES:
        message = f"the weights are {codes.dtype} beside {some_names(sorted(set(group.parts)), 3)}"
        if codes.dtype.startswith("F8_"):
            message = f"the weights are {codes.dtype}; of FP8 weights only {CODES} are known"
        elif found:
            message += f"; FP8 scales belong to {CODES} weights, and whether they have been applied is not known"
        raise BadGroup("wrong-dtype", message, _AGAIN)
    if not found:
        message = "stored as FP8 codes, and no scale is stored for them; codes without their scale are no weights"
        raise BadGroup("missing-scale", message, _AGAIN)
    if len(found) > 1:
        message = f"{some_names(found, 3)} are both stored; which one counts is not known"
        raise BadGroup("stored-twice", message, "use a checkpoint that stores every scale once")
    if not codes.n_elements:
        raise BadGroup("wrong-shape", f"the weights have shape {list(codes.shape)}, without elements", _AGAIN)
    return codes, group.parts[found[0]]
