"""What surrounds the draft layer on the device (``kernels/draft.cu``): its columns, its rows, what slots hold.

Reference: ``backends/reference/mtp.py``, ``drafting.py``. Specification: ``specs/kernels.md``, "Drafts".
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops.round_state import MAX_COLUMNS, MAX_ROWS, RoundMemory
from ninfer_runtime.backends.cuda.packing import activation_stride

MAX_DRAFTS = MAX_COLUMNS - 1
_THREADS = 256
_BUFFERS = 2
_BF16 = 2

InputsMode = Literal["round", "prompt", "chain"]
MODES: tuple[InputsMode, ...] = ("round", "prompt", "chain")  # numbered as in the kernel


def _ints(*names: str) -> list[tuple[str, Any]]:
    return [(name, np.int32) for name in names]


DRAFT_STATE = np.dtype(
    [
        *_ints("slot", "n_wanted", "n_drafts", "next_index", "column", "is_active", "n_uncounted", "reserved"),
        ("uncounted", np.int32, 16),
        ("padding", np.int32, 8),
    ]
)
"""Drafting of one row while it goes on; ``MAX_ROWS`` of them. Mirrors ``include/draft.cuh``."""

HELD_DRAFTS = np.dtype(
    [
        *_ints("index", "anchor", "n_drafts"),
        ("token_ids", np.int32, MAX_DRAFTS),
        ("has_ratio", np.int32),
        ("reserved", np.int32, 7),
    ]
)
"""What one slot holds; index -1: nothing."""

PROPOSAL_BYTES = 12 * 1024 + 8
"""What one draft was drawn from, where drafts are accepted by ratio."""

assert (DRAFT_STATE.itemsize, HELD_DRAFTS.itemsize) == (128, 64)


class DraftBeginParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("input", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("tokens", ctypes.c_uint64),
        ("outputs", ctypes.c_uint64),
        ("draft_rows", ctypes.c_uint64),
        ("states", ctypes.c_uint64),
        ("held", ctypes.c_uint64),
        ("draft_tokens", ctypes.c_uint64),
        ("n_rows", ctypes.c_int32),
        ("n_columns", ctypes.c_int32),
    )


class DraftNextParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("draft_rows", ctypes.c_uint64),
        ("states", ctypes.c_uint64),
        ("draft_tokens", ctypes.c_uint64),
        ("n_rows", ctypes.c_int32),
    )


class DraftInputsParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("final_norm", ctypes.c_uint64),
        ("embedding_norm", ctypes.c_uint64),
        ("hidden_norm", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("draft_rows", ctypes.c_uint64),
        ("hidden", ctypes.c_uint64),
        ("records", ctypes.c_uint64),
        ("last", ctypes.c_uint64),
        ("chained", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("n_columns", ctypes.c_int32),
        ("n_tokens", ctypes.c_int32),
        ("n_read", ctypes.c_int32),
        ("slot", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class DraftHiddenParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("norm", ctypes.c_uint64),
        ("states", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("eps", ctypes.c_float),
    )


class DraftSpreadParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("logits", ctypes.c_uint64),
        ("row_of", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("n_ids", ctypes.c_int32),
        ("in_stride", ctypes.c_int32),
        ("out_stride", ctypes.c_int32),
    )


class DraftFoldParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (("entries", ctypes.c_uint64), ("hidden", ctypes.c_uint64), ("records", ctypes.c_uint64))


def input_stride(hidden: int) -> int:
    """Elements between the layer's input columns: embedding and hidden row, in whole steps of the matrix."""
    return activation_stride(2 * hidden)


def hidden_bytes(hidden: int) -> int:
    """Of the last folded token's row, per slot and per snapshot."""
    return _BF16 * hidden


def record_bytes(hidden: int) -> int:
    """Rows of a slot's two record buffers."""
    return _BUFFERS * MAX_COLUMNS * hidden_bytes(hidden)


def no_drafts() -> NDArray[Any]:
    """HELD_DRAFTS of a slot that holds none."""
    none = np.zeros(1, HELD_DRAFTS)
    none["index"] = -1
    return none


def _begin_spec(name: str) -> KernelSpec:
    return KernelSpec("draft.cu", name, (), 32 * MAX_ROWS)


def _line_spec(name: str, hidden: int, mode: InputsMode = "round") -> KernelSpec:
    defines = (
        ("HIDDEN", hidden),
        ("STRIDE", input_stride(hidden)),
        ("CHAIN_STRIDE", activation_stride(hidden)),
        ("MODE", MODES.index(mode)),
    )
    return KernelSpec("draft.cu", name, defines, _THREADS)


_SPREAD = KernelSpec("draft.cu", "draft_spread", (), _THREADS)


def specs(hidden: int, *, has_own_head: bool) -> list[KernelSpec]:
    """Every variant."""
    return [
        *(_begin_spec(name) for name in ("draft_begin", "draft_next")),
        *(_line_spec("draft_inputs", hidden, mode) for mode in MODES),
        *(_line_spec(name, hidden) for name in ("draft_hidden", "draft_fold")),
        *((_SPREAD,) if has_own_head else ()),
    ]


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Device addresses, from ``draft_memory.py``.

    x        float32 [T][hidden], the layer's residual stream
    inputs   bf16 [T][input_stride]
    chained  bf16 [MAX_ROWS][activation_stride]: what a draft comes from
    last     bf16 [hidden], of a chunk's last token
    rows     ROW_STATE [MAX_ROWS] of the layer's columns; states DRAFT_STATE [MAX_ROWS]; tokens int32 of the columns
    held     HELD_DRAFTS [slots]; hidden bf16 [slots][hidden]; records bf16 [slots][2][MAX_COLUMNS][hidden]
    proposals  what held drafts were drawn from, [slots][MAX_DRAFTS]; 0 unless drafts are accepted by ratio
    """

    x: int
    inputs: int
    chained: int
    last: int
    rows: int
    states: int
    tokens: int
    held: int
    hidden: int
    records: int
    proposals: int


class DraftBegin:
    """Which columns the layer reads: behind a round's draws, and between two drafts."""

    def __init__(self, device: Device, memory: DraftMemory) -> None:
        self._begin, self._next = (device.kernel(_begin_spec(name)) for name in ("draft_begin", "draft_next"))
        self._memory = memory

    def launch(self, stream: Stream, round_memory: RoundMemory, n_rows: int, n_columns: int) -> None:
        """Columns of n_rows × (n_columns + 1)."""
        m, r = self._memory, round_memory
        params = DraftBeginParams(
            r.input, r.rows, r.tokens, r.result, m.rows, m.states, m.held, m.tokens, n_rows, n_columns
        )
        self._begin.launch((1, 1, 1), params, stream)

    def launch_next(self, stream: Stream, n_rows: int) -> None:
        """The last draft of every row that makes more."""
        m = self._memory
        self._next.launch((1, 1, 1), DraftNextParams(m.rows, m.states, m.tokens, n_rows), stream)


@dataclass(frozen=True, slots=True)
class DraftNorms:
    """Addresses of bf16 [hidden] each: the decoder's last norm, the two of the layer's inputs, the layer's last."""

    decoder: int
    embedding: int
    hidden: int
    final: int


class DraftInputs:
    """The layer's input columns, and the rows its drafts come from."""

    def __init__(self, device: Device, memory: DraftMemory, norms: DraftNorms, hidden: int, eps: float) -> None:
        self._kernels = {mode: device.kernel(_line_spec("draft_inputs", hidden, mode)) for mode in MODES}
        self._hidden, self._fold = (device.kernel(_line_spec(name, hidden)) for name in ("draft_hidden", "draft_fold"))
        self._memory, self._norms, self._eps = memory, norms, eps

    def _params(self, **fields: int) -> DraftInputsParams:
        m, n = self._memory, self._norms
        return DraftInputsParams(
            x=m.x,
            final_norm=n.decoder,
            embedding_norm=n.embedding,
            hidden_norm=n.hidden,
            draft_rows=m.rows,
            hidden=m.hidden,
            records=m.records,
            last=m.last,
            chained=m.chained,
            out=m.inputs,
            eps=self._eps,
            **fields,
        )

    def launch_round(self, stream: Stream, n_rows: int, n_columns: int, *, rows: int, residual: int) -> None:
        """Behind a round of ``rows`` with the decoder's ``residual`` stream; folds and records hidden rows."""
        params = self._params(rows=rows, residual=residual, n_columns=n_columns)
        self._kernels["round"].launch((n_rows * (n_columns + 1), 1, 1), params, stream)

    def launch_prompt(self, stream: Stream, slot: int, n_tokens: int, n_read: int, *, residual: int) -> None:
        """Behind a chunk; the last token's row goes to ``last``."""
        params = self._params(residual=residual, n_tokens=n_tokens, n_read=n_read, slot=slot)
        self._kernels["prompt"].launch((n_tokens + 1, 1, 1), params, stream)

    def launch_chain(self, stream: Stream, n_rows: int) -> None:
        """One column per row, of its last draft."""
        self._kernels["chain"].launch((n_rows, 1, 1), self._params(), stream)

    def launch_hidden(self, stream: Stream, n_rows: int) -> None:
        """``chained`` of every row that drafts now."""
        m = self._memory
        params = DraftHiddenParams(m.x, self._norms.final, m.states, m.chained, self._eps)
        self._hidden.launch((n_rows, 1, 1), params, stream)

    def launch_fold(self, stream: Stream, entries: int, n_entries: int) -> None:
        """Rows of pending records into the slots; entries as of ``gdn_decode.fold_entries``."""
        m = self._memory
        self._fold.launch((n_entries, 1, 1), DraftFoldParams(entries, m.hidden, m.records), stream)


class DraftSpread:
    """Logits of the head over frequent ids as logits of all ids."""

    def __init__(self, device: Device, row_of: int, n_ids: int) -> None:
        """``row_of``: int32 [n_ids] on the device, the head's row of every id or -1."""
        self._kernel, self._row_of, self._n_ids = device.kernel(_SPREAD), row_of, n_ids

    def launch(self, stream: Stream, n_rows: int, logits: int, in_stride: int, out: int, out_stride: int) -> None:
        """fp32 [n_rows][in_stride] → fp32 [n_rows][out_stride]."""
        params = DraftSpreadParams(logits, self._row_of, out, self._n_ids, in_stride, out_stride)
        self._kernel.launch((-(-self._n_ids // _THREADS), n_rows, 1), params, stream)


def row_of_id(ids: Sequence[int] | NDArray[np.int32], n_ids: int) -> NDArray[np.int32]:
    """int32 [n_ids]: which row of a head over ``ids`` belongs to an id, -1 for those it does not have."""
    rows = np.full(n_ids, -1, np.int32)
    rows[np.asarray(ids)] = np.arange(len(ids), dtype=np.int32)
    return rows
