"""Which rows and columns of an FP8 matrix a scale covers: by its shape and the block sizes that the config declares.

A block size is never inferred from the two shapes: with partial edge blocks several sizes give the same grid.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.sources.refusal import BadGroup

BlockSize = tuple[int, int]
Shape = tuple[int, ...]

_GATE_UP = "gate_up_proj"
_ADVICE = "use a checkpoint whose scales have a documented shape, or the original BF16 one"


@dataclass(frozen=True, slots=True)
class ScaleGrid:
    """Scales [grid rows, grid columns] over a matrix [rows, width], leading dimensions flattened in both."""

    label: str
    """For people: ``per tensor``, ``per row``, ``per block of 128 × 128``, …"""
    part_rows: int
    """Rows after which blocks begin anew: those of one expert, or of one half of a fused gate and up matrix."""
    block: BlockSize
    width: int

    @property
    def columns(self) -> int:
        """Scales per grid row; the last block may be narrower."""
        return -(-self.width // self.block[1])

    def rows_of(self, begin: int, count: int) -> NDArray[np.int64]:
        """Grid row of each of the matrix rows [begin, begin + count), ascending."""
        rows = np.arange(begin, begin + count, dtype=np.int64)
        per_part = -(-self.part_rows // self.block[0])
        return rows // self.part_rows * per_part + rows % self.part_rows // self.block[0]


def declared_blocks(config: Mapping[str, Any] | None) -> tuple[BlockSize, ...]:
    """Every FP8 block size that ``config.json`` declares, without repetitions; malformed members count as none.

    ``quantization_config.weight_block_size`` (block FP8), or ``block_structure`` or ``group_size`` of the weights of a
    config group (compressed-tensors); the section may also be called ``compression_config`` or lie in ``text_config``.
    """
    root = config or {}
    text = root.get("text_config")
    sections = [root.get("quantization_config"), root.get("compression_config")]
    if isinstance(text, dict):
        sections.append(text.get("quantization_config"))
    found = (_block(value) for section in sections if isinstance(section, dict) for value in _declarations(section))
    return tuple(dict.fromkeys(block for block in found if block is not None))


def _declarations(section: Mapping[str, Any]) -> Iterator[Any]:
    yield section.get("weight_block_size")
    groups = section.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("strategy") == "block":
            yield weights.get("block_structure")
        elif isinstance(weights, dict) and weights.get("strategy") == "group":
            yield [1, weights.get("group_size")]


def _block(value: Any) -> BlockSize | None:
    """Two positive integers, also as text like ``128x128``, which older compressed-tensors wrote."""
    if isinstance(value, str):
        value = [int(part) if part.isdecimal() else part for part in value.split("x")]
    if isinstance(value, list) and len(value) == 2 and all(type(v) is int and v > 0 for v in value):
        return value[0], value[1]
    return None


def scale_grid(name: str, weight: Shape, scale: Shape, declared: tuple[BlockSize, ...]) -> ScaleGrid:
    """How scales of shape ``scale`` cover the matrix, or bank of matrices [experts, rows, width], called ``name``.

    BadGroup for every shape that is neither per tensor, per row, nor the grid of a declared block size.
    """
    *banks, rows, width = weight if len(weight) > 1 else (1, *weight)
    matrices = int(np.prod(banks, dtype=np.int64))
    per_tensor = ScaleGrid("per tensor", matrices * rows, (matrices * rows, width), width)
    if scale in ((), (1,)):
        return per_tensor
    lead = (matrices,) if len(weight) > 2 else ()
    if len(weight) in (2, 3):
        if lead and scale in (lead, (*lead, 1, 1)):
            return ScaleGrid("per expert", rows, (rows, width), width)
        if grid := _block_grid(name, (*lead, rows, width), scale, declared):
            return grid
        if scale in ((*lead, rows), (*lead, rows, 1)):
            return ScaleGrid("per row", rows, (1, width), width)
    raise BadGroup("wrong-scale-shape", _unexpected(weight, scale, declared), _ADVICE)


def _block_grid(name: str, weight: Shape, scale: Shape, declared: tuple[BlockSize, ...]) -> ScaleGrid | None:
    """The grid of the declared block size whose scales have this shape; None if there is none."""
    *lead, rows, width = weight
    fitting: list[ScaleGrid] = []
    for block in declared:
        # In a bank of fused gate and up rows, blocks may begin anew where the up rows do.
        halves = (rows, rows // 2) if lead and name.endswith(_GATE_UP) and rows % 2 == 0 else (rows,)
        for part_rows in halves:
            if part_rows != rows and part_rows % block[0] == 0:
                continue  # the same grid as over both halves
            label = f"per block of {block[0]} × {block[1]}" + (", gate and up apart" if part_rows != rows else "")
            grid = ScaleGrid(label, part_rows, block, width)
            if scale == (*lead, rows // part_rows * -(-part_rows // block[0]), grid.columns):
                fitting.append(grid)
    if len(fitting) > 1:
        readings = " or ".join(grid.label for grid in fitting)
        message = f"scales {list(scale)} of weights {list(weight)} can be {readings}; nothing says which"
        raise BadGroup("ambiguous-scale", message, _ADVICE)
    return fitting[0] if fitting else None


def _unexpected(weight: Shape, scale: Shape, declared: tuple[BlockSize, ...]) -> str:
    *lead, rows, width = weight if len(weight) > 1 else (1, *weight)
    grids = [f"{[*lead, -(-rows // b[0]), -(-width // b[1])]} for blocks of {b[0]} × {b[1]}" for b in declared]
    blocks = ", ".join(grids) if grids else "no block grid, because config.json declares no block size"
    return (
        f"scales have shape {list(scale)} beside FP8 weights {list(weight)}; "
        f"expected one scale, {[*lead, rows, 1]} for one per row, or {blocks}"
    )
