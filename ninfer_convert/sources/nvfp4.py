"""NVFP4 matrices as compressed-tensors and ModelOpt store them (specs/conversion.md, Sources).

Both hold packed E2M1 codes and one E4M3FN scale per 16 columns. They differ in names and in the meaning of the global
scale: compressed-tensors stores a divisor, ModelOpt a multiplier. The names alone say which it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.checkpoint import Checkpoint, TensorRef
from ninfer_convert.problems import some_names
from ninfer_convert.sources.groups import WEIGHT, StoredGroup
from ninfer_convert.sources.logical import FloatReader, Floats, LogicalTensor
from ninfer_convert.sources.refusal import BadGroup
from ninfer_format import SourceError
from ninfer_format.numeric.nvfp4 import BLOCK, MAX_SCALE, dequantize

Bytes = NDArray[np.uint8]

_TILE_VALUES = 1 << 18
_AGAIN = "use a complete NVFP4 checkpoint, or the original BF16 one"


@dataclass(frozen=True, slots=True)
class Convention:
    """How one tool stores an NVFP4 matrix: part names by what they hold, and what its global scales mean."""

    label: str
    codes: str
    scales: str
    weight_global: str
    input_global: str
    multiplies: bool
    """Global scales multiply; otherwise they divide."""
    markers: tuple[str, ...]
    """Parts that only this convention has."""


COMPRESSED_TENSORS = Convention(
    "NVFP4 (compressed-tensors)", ".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale",
    multiplies=False, markers=(".weight_global_scale", ".input_global_scale"),
)  # fmt: skip
MODELOPT = Convention(
    "NVFP4 (ModelOpt)", WEIGHT, ".weight_scale", ".weight_scale_2", ".input_scale",
    multiplies=True, markers=(".weight_scale_2",),
)  # fmt: skip


class PackedNvfp4:
    """The stored words of one matrix [N, K]; every read checks what it returns. Safe from several threads."""

    def __init__(self, files: Checkpoint, convention: Convention, group: StoredGroup) -> None:
        self._files = files
        self._convention = convention
        self._stem = group.stem
        self._codes, self._scales = group.parts[convention.codes], group.parts[convention.scales]
        self.has_input_scale = convention.input_global in group.parts
        """Whether an activation scale is stored with the matrix."""
        self.shape = self._codes.shape[0], self._codes.shape[1] * 2

    def read_codes(self, begin: int, out: Bytes) -> None:
        """Fill C-contiguous ``out`` [n, K/2] with packed codes of the rows from ``begin``, low nibble the even column.

        SourceError and OSError as ``Checkpoint.read_into``.
        """
        self._read(self._codes, begin, out)

    def read_scales(self, begin: int, out: Bytes) -> None:
        """Fill C-contiguous ``out`` [n, K/16] with block scales in natural order; SourceError for NaN or negative."""
        self._read(self._scales, begin, out)
        if out.size and int(out.max()) > MAX_SCALE:
            row, group = np.argwhere(out > MAX_SCALE)[0]
            raise SourceError(
                f"tensor {self._scales.name!r} holds the block scale {out[row, group]:#04x} at row {begin + row}, "
                f"group {group}, which is NaN or negative; legal words are 0x00 to 0x7e, so the checkpoint is damaged"
            )

    def weight_divisor(self) -> np.float32:
        """What code times block scale is divided by; SourceError unless finite and greater than zero."""
        return self._divisor(self._convention.weight_global)

    def input_divisor(self) -> np.float32 | None:
        """The activation divisor; None where the checkpoint stores none. SourceError as ``weight_divisor``."""
        return self._divisor(self._convention.input_global) if self.has_input_scale else None

    def weight_factor(self) -> tuple[np.float32, bool]:
        """The weight's global scale as it is stored, and whether it multiplies."""
        return self._scalar(self._convention.weight_global), self._convention.multiplies

    @property
    def weight_global_name(self) -> str:
        """Name of the stored tensor that holds the weight's global scale."""
        return self._stem + self._convention.weight_global

    @property
    def input_global_name(self) -> str:
        """Name of the stored tensor that holds, or would hold, the activation's global scale."""
        return self._stem + self._convention.input_global

    def _read(self, ref: TensorRef, begin: int, out: Bytes) -> None:
        self._files.read_into(ref.name, begin * ref.shape[1], out.reshape(-1).data)

    def _divisor(self, part: str) -> np.float32:
        scale = self._scalar(part)
        if not self._convention.multiplies:
            return scale
        with np.errstate(all="ignore"):
            divisor = np.float32(1) / scale
        # A subnormal divisor is not within an ulp of the multiplier any more; 1 / subnormal may be infinite.
        if not np.finfo(np.float32).tiny <= divisor < np.inf:
            raise SourceError(f"tensor {self._stem + part!r} is {scale}; its reciprocal is no normal float32 divisor")
        return divisor

    def _scalar(self, part: str) -> np.float32:
        word = np.empty(1, "<f4")
        self._files.read_into(self._stem + part, 0, word.view(np.uint8).data)
        scale = np.float32(word[0])
        if not (np.isfinite(scale) and scale > 0):
            raise SourceError(
                f"tensor {self._stem + part!r} is {scale}, expected a finite number greater than 0; the checkpoint is "
                "damaged, or its quantizer met an all-zero or overflowing matrix"
            )
        return scale


class _Reader(FloatReader):
    """Decoded values, by the convention's own arithmetic: one rounding per value."""

    def __init__(self, name: str, packed: PackedNvfp4) -> None:
        super().__init__(name, packed.shape)
        self._packed = packed

    def read_rows(self, begin: int, out: Floats) -> None:
        """See ``FloatReader``."""
        factor, multiplies = self._packed.weight_factor()
        step = max(1, _TILE_VALUES // self.width)
        for first in range(0, len(out), step):
            part = out[first : first + step]
            codes = np.empty((len(part), self.width // 2), np.uint8)
            scales = np.empty((len(part), self.width // BLOCK), np.uint8)
            self._packed.read_codes(begin + first, codes)
            self._packed.read_scales(begin + first, scales)
            dequantize(codes, scales, np.float32(1) if multiplies else factor, part)
            if multiplies:
                with np.errstate(over="ignore"):  # infinity is refused by the encoder, with its place
                    np.multiply(part, factor, out=part)


class Nvfp4Adapter:
    """Matrices of one convention."""

    def __init__(self, convention: Convention) -> None:
        self._convention = convention

    def takes(self, group: StoredGroup) -> bool:
        """See ``Adapter``: parts that only NVFP4 has, or codes of its dtype beside E4M3 scales."""
        convention = self._convention
        if any(part in group.parts for part in convention.markers):
            return True
        return all(
            part in group.parts and group.parts[part].dtype == dtype
            for part, dtype in ((convention.codes, "U8"), (convention.scales, "F8_E4M3"))
        )

    def present(self, group: StoredGroup, files: Checkpoint) -> LogicalTensor:
        """See ``Adapter``."""
        convention = self._convention
        expected = (convention.codes, convention.scales, convention.weight_global)
        if absent := [part for part in expected if part not in group.parts]:
            found = some_names(sorted(group.parts), 6)
            message = f"stored as {convention.label}, but {some_names(absent)} is missing beside {found}"
            raise BadGroup("missing-scale" if convention.codes in group.parts else "missing-codes", message, _AGAIN)
        if WEIGHT in group.parts and convention.codes != WEIGHT:
            message = f"a plain {WEIGHT} and {convention.codes} are both stored; which one counts is not known"
            raise BadGroup("stored-twice", message, "use a checkpoint that stores every matrix once")
        _check_parts(convention, group)
        packed = PackedNvfp4(files, convention, group)
        codes = group.parts[convention.codes]
        used = [convention.codes, convention.scales, convention.weight_global, convention.input_global]
        stored = tuple(group.parts[part].name for part in used if part in group.parts)
        return LogicalTensor(
            group.name, packed.shape, codes.dtype, convention.label, stored, codes.file, codes.file_offset,
            _Reader(group.name, packed), packed,
        )  # fmt: skip


def _check_parts(convention: Convention, group: StoredGroup) -> None:
    """Dtypes and shapes of all parts, or BadGroup."""
    codes = group.parts[convention.codes]
    rows, width = codes.shape if len(codes.shape) == 2 else (0, 0)
    if codes.dtype != "U8" or not rows or width * 2 % BLOCK:
        message = f"{convention.codes} is {codes.dtype} {list(codes.shape)}, expected U8 [rows, a multiple of 8]"
        raise BadGroup("wrong-shape", message, _AGAIN)
    expected: Mapping[str, tuple[str, Sequence[tuple[int, ...]]]] = {
        convention.scales: ("F8_E4M3", [(rows, width * 2 // BLOCK)]),
        convention.weight_global: ("F32", [(1,), ()]),
        convention.input_global: ("F32", [(1,), ()]),
    }
    for part, (dtype, shapes) in expected.items():
        ref = group.parts.get(part)
        if ref is not None and (ref.dtype != dtype or ref.shape not in shapes):
            message = (
                f"{part} is {ref.dtype} {list(ref.shape)}, expected {dtype} {list(shapes[0])} beside "
                f"{convention.codes} {list(codes.shape)}"
            )
            raise BadGroup("wrong-dtype" if ref.dtype != dtype else "wrong-shape", message, _AGAIN)
