"""Launch geometry of linear_small per card: ``tuning/<arch>-<SMs>.json``, or a rule for cards without a file."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ninfer_format.errors import UnsupportedError
from ninfer_runtime.backends.cuda.device import Device

FOLDER = Path(__file__).parent.parent / "tuning"
TOKEN_TILE = 8


@dataclass(frozen=True, slots=True)
class LinearSmallTuning:
    """Geometry for up to ``columns`` columns.

    warps          per block
    tile_rows      tile rows (16 output rows) per warp
    x_columns      activation columns staged at a time, a multiple of 128
    blocks_per_sm  blocks of the grid per SM; all of them resident at once
    min_blocks     blocks per SM that registers are limited for: twice blocks_per_sm lets the next launch begin early
    shared_bytes   limit of shared memory per block
    max_stages     limit of ring stages
    direct         1: activations from global memory straight to registers instead
    """

    columns: int
    warps: int
    tile_rows: int
    x_columns: int
    blocks_per_sm: int
    min_blocks: int
    shared_bytes: int
    max_stages: int
    direct: int = 0


@cache
def _rows(arch: str, n_sms: int, shared_per_sm: int) -> tuple[LinearSmallTuning, ...]:
    file = FOLDER / f"{arch}-{n_sms}.json"
    if not file.exists():
        # Two blocks on an SM, this launch's and the next one's; 1 KB of each is the system's.
        shared = min(101_376, shared_per_sm // 2 - 1024)
        return (
            LinearSmallTuning(8, 8, 1, 256, 1, 2, shared, 12, 1),
            LinearSmallTuning(16, 8, 1, 128, 1, 2, shared, 12),
            LinearSmallTuning(48, 8, 1, 128, 1, 1, min(101_376, shared_per_sm - 1024), 12),
        )
    try:
        return tuple(LinearSmallTuning(**row) for row in json.loads(file.read_text(encoding="utf-8"))["linear_small"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(f"{file.name} is no tuning file of linear_small: {error}") from None


def linear_small_tuning(device: Device, tiles: int) -> LinearSmallTuning:
    """Geometry for 8 · ``tiles`` columns on this device: the first row of its table with as many."""
    rows = _rows(device.arch, device.n_sms, device.shared_per_sm)
    for row in rows:
        if row.columns >= TOKEN_TILE * tiles:
            return row
    raise UnsupportedError(f"no tuning of linear_small for {TOKEN_TILE * tiles} columns on {device.name}")
