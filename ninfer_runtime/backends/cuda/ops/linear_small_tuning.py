"""Launch geometry of linear_small per card: ``tuning/<arch>-<SMs>.json``, or a rule for cards without a file."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ninfer_format.errors import UnsupportedError
from ninfer_runtime.backends.cuda.device import Device
from ninfer_runtime.backends.cuda.packing import TileFormat

FOLDER = Path(__file__).parent.parent / "tuning"


@dataclass(frozen=True, slots=True)
class LinearSmallTuning:
    """Geometry for up to ``columns`` columns of a launch with at least ``min_tile_rows`` tile rows.

    warps          per block
    tile_rows      tile rows (16 output rows) per warp
    blocks_per_sm  blocks of the grid per SM; all of them resident at once
    min_blocks     blocks per SM that registers are limited for: twice blocks_per_sm lets the next launch begin early
    shared_bytes   limit of shared memory per block
    max_stages     limit of ring stages
    phases         warps that share a tile row and take its steps in turn, a power of two
    group_sums     up to 8 columns: 1: sums of a group's activations, which biased codes need, are made once per block;
                   0: with every group's products
    x_ahead        1: activations go from global memory (L1) to registers a step, above 8 columns a group, ahead of use
    shared_x       above 8 columns: 1: the warps of a block share activations in shared memory, a barrier per step
    release_early  1: the launch behind may begin while this one still waits for the one ahead
    one_format     1: only for launches with matrices of one format, whose code takes fewer registers
    only_nvfp4     1: only for launches with NVFP4 matrices, which take more instructions per byte than others
    """

    columns: int
    min_tile_rows: int
    warps: int
    tile_rows: int
    blocks_per_sm: int
    min_blocks: int
    shared_bytes: int
    max_stages: int
    phases: int = 1
    group_sums: int = 0
    x_ahead: int = 1
    shared_x: int = 0
    release_early: int = 1
    one_format: int = 0
    only_nvfp4: int = 0


@cache
def tuning_rows(arch: str, n_sms: int, shared_per_sm: int) -> tuple[LinearSmallTuning, ...]:
    """All rows of a card, the first that fits a launch counts. UnsupportedError for a file that is none."""
    file = FOLDER / f"{arch}-{n_sms}.json"
    if not file.exists():
        # Two blocks on an SM, this launch's and the next one's; 1 KB of each is the system's.
        whole = min(101_376, shared_per_sm - 1024)
        half = min(101_376, shared_per_sm // 2 - 1024)
        return (
            LinearSmallTuning(16, 0, 8, 1, 1, 2, half, 12),
            LinearSmallTuning(32, 0, 8, 1, 1, 1, whole, 12),
            LinearSmallTuning(48, 0, 8, 1, 1, 1, whole, 12, x_ahead=0, shared_x=1),
        )
    try:
        return tuple(LinearSmallTuning(**row) for row in json.loads(file.read_text(encoding="utf-8"))["linear_small"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(f"{file.name} is no tuning file of linear_small: {error}") from None


def linear_small_tuning(
    device: Device, columns: int, n_tile_rows: int, formats: frozenset[TileFormat]
) -> LinearSmallTuning:
    """Geometry for up to ``columns`` columns and matrices of ``formats``, ``n_tile_rows`` tile rows together."""
    has_nvfp4 = any(f.floating for f in formats)
    for row in tuning_rows(device.arch, device.n_sms, device.shared_per_sm):
        fits = row.columns >= columns and row.min_tile_rows <= n_tile_rows
        if fits and not (row.one_format and len(formats) > 1) and not (row.only_nvfp4 and not has_nvfp4):
            return row
    raise UnsupportedError(
        f"no tuning of linear_small for {columns} columns and {n_tile_rows} tile rows on {device.name}"
    )
