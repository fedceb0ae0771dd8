"""The bytes of a round: what the host packs, what the kernels share, what comes back. Mirrors ``include/round.cuh``.

Sizes are frozen when a program starts (``RoundLayout``): the packed input is one upload, the packed result one download.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_ROWS = 8
MAX_COLUMNS = 6
MAX_STOP_IDS = 64

Structs = NDArray[Any]


def _ints(*names: str) -> list[tuple[str, Any]]:
    return [(name, np.int32) for name in names]


ROW_STATE = np.dtype(
    [
        *_ints("slot", "start", "n_columns", "rope_delta", "fold_columns", "fold_buffer", "record_buffer", "budget"),
        *_ints("verify", "status", "emitted", "accepted", "columns"),
        ("reserved", np.int32, 3),
    ]
)
"""One resolved row on the device; ``MAX_ROWS`` of them, written by ``round_begin``."""

HEADER = np.dtype([*_ints("has_previous", "verify", "has_mask", "n_top"), ("reserved", np.int32, 12)])

ROW_INPUT = np.dtype(
    [
        ("seed", np.uint64),
        *((name, np.float64) for name in ("temperature", "top_p", "min_p", "presence", "frequency")),
        *_ints("slot", "n_columns", "start", "rope_delta", "budget", "fold_columns", "fold_buffer", "record_buffer"),
        *_ints("top_k", "n_stop_ids", "bias_begin", "n_bias"),
        ("token_ids", np.int32, MAX_COLUMNS),
        ("reserved", np.int32, 2),
        ("stop_ids", np.int32, MAX_STOP_IDS),
    ]
)

BIAS_ENTRY = np.dtype([("value", np.float64), ("token_id", np.int32), ("reserved", np.int32)])

ROW_OUTPUT = np.dtype(
    [
        *_ints("status", "start", "emitted", "accepted", "columns", "budget", "empty_mask", "reserved"),
        ("token_ids", np.int32, MAX_COLUMNS),
        ("padding", np.int32, 2),
    ]
)

assert (ROW_STATE.itemsize, HEADER.itemsize, ROW_INPUT.itemsize) == (64, 64, 384)
assert (BIAS_ENTRY.itemsize, ROW_OUTPUT.itemsize) == (16, 64)


@dataclass(frozen=True, slots=True)
class RoundLayout:
    """Offsets in bytes of the packed input and the packed result.

    pages_per_row   entries of one row's page table
    n_top_limit     most likely ids that a round can return with their logprobs; more come from raw logits
    n_bias_limit    logit biases of all rows together

    Input: header, MAX_ROWS rows, page table int32 [MAX_ROWS, pages_per_row], biases (only those in use travel).
    Result: MAX_ROWS rows, then per row and emitted token chosen float32 [8, 6], top ids int32 and top float32
    [8, 6, n_top_limit].
    """

    pages_per_row: int
    n_top_limit: int = 20
    n_bias_limit: int = 8192

    rows_offset = HEADER.itemsize

    @property
    def pages_offset(self) -> int:
        """Of the page table; a kernel's pointer to it is the input's plus this."""
        return self.rows_offset + MAX_ROWS * ROW_INPUT.itemsize

    @property
    def bias_offset(self) -> int:
        """Of the bias entries."""
        return -(-(self.pages_offset + 4 * MAX_ROWS * self.pages_per_row) // 16) * 16

    @property
    def input_bytes(self) -> int:
        """Largest packed input."""
        return self.bias_offset + self.n_bias_limit * BIAS_ENTRY.itemsize

    chosen_offset = MAX_ROWS * ROW_OUTPUT.itemsize

    @property
    def top_ids_offset(self) -> int:
        """Of the most likely ids."""
        return self.chosen_offset + 4 * MAX_ROWS * MAX_COLUMNS

    @property
    def top_offset(self) -> int:
        """Of their log probabilities."""
        return self.top_ids_offset + 4 * MAX_ROWS * MAX_COLUMNS * self.n_top_limit

    @property
    def result_bytes(self) -> int:
        """Packed result."""
        return self.top_offset + 4 * MAX_ROWS * MAX_COLUMNS * self.n_top_limit
