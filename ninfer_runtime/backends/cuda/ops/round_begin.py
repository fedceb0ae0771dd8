"""The start of a round, and the occurrence counts of generated tokens (``kernels/round_begin.cu``).

Reference: ``backends/reference/program.py`` ``_task`` and ``_commit``, ``book.py`` ``continuation``.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from ninfer_runtime.backends.cuda.arena import Taker
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops.gdn_state import Carrying
from ninfer_runtime.backends.cuda.ops.round_state import MAX_COLUMNS, MAX_ROWS, RoundMemory

_INT = 4
_LIST_THREADS = 256


class RoundBeginParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("input", ctypes.c_uint64),
        ("previous", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("tokens", ctypes.c_uint64),
        ("counts", ctypes.c_uint64),
        ("held", ctypes.c_uint64),
        ("carried", ctypes.c_uint64),
        ("carried_stride", ctypes.c_uint64),
        ("n_carried", ctypes.c_int32),
        ("counts_stride", ctypes.c_int32),
        ("n_rows", ctypes.c_int32),
        ("n_columns", ctypes.c_int32),
    )


class CountTokensParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (
        ("counts", ctypes.c_uint64),
        ("counts_stride", ctypes.c_int32),
        ("n_rows", ctypes.c_int32),
        ("slots", ctypes.c_int32 * MAX_ROWS),
        ("n_tokens", ctypes.c_int32 * MAX_ROWS),
        ("token_ids", ctypes.c_int32 * MAX_COLUMNS * MAX_ROWS),
    )


class CountListParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel."""

    _fields_ = (("counts", ctypes.c_uint64), ("token_ids", ctypes.c_uint64), ("n_tokens", ctypes.c_int32))


ROUND_BEGIN = KernelSpec("round_begin.cu", "round_begin", (), 32 * MAX_ROWS)
COUNT_ROWS = KernelSpec("round_begin.cu", "count_rows", (), 32 * MAX_ROWS)
COUNT_LIST = KernelSpec("round_begin.cu", "count_list", (), _LIST_THREADS)


def specs() -> list[KernelSpec]:
    """Every variant of this file."""
    return [ROUND_BEGIN, COUNT_ROWS, COUNT_LIST]


@dataclass(frozen=True, slots=True)
class CountsMemory:
    """int32 [n_slots][stride], how often each slot generated each token; the stride is a multiple of 4."""

    pointer: int
    n_slots: int
    stride: int

    @classmethod
    def take(cls, taker: Taker, n_slots: int, vocab_rows: int) -> "CountsMemory":
        """Memory for every slot, undefined until ``Counts`` is made."""
        stride = -(-vocab_rows // 4) * 4
        return cls(taker.take("state/counts", _INT * n_slots * stride), n_slots, stride)

    def slot(self, slot: int) -> int:
        """Address of one slot's counts."""
        return self.pointer + _INT * slot * self.stride


class Counts:
    """What the host asks of the counts; rounds that follow another count by themselves."""

    def __init__(self, device: Device, memory: CountsMemory, stream: Stream) -> None:
        self.memory = memory
        self._device = device
        self._rows, self._list = device.kernel(COUNT_ROWS), device.kernel(COUNT_LIST)
        device.fill(memory.pointer, 0, _INT * memory.n_slots * memory.stride, stream)

    def reset(self, stream: Stream, slot: int) -> None:
        """No occurrences."""
        self._device.fill(self.memory.slot(slot), 0, _INT * self.memory.stride, stream)

    def add_list(self, stream: Stream, slot: int, token_ids: int, n_tokens: int) -> None:
        """Count ``n_tokens`` ids at device address ``token_ids`` int32."""
        if n_tokens:
            params = CountListParams(self.memory.slot(slot), token_ids, n_tokens)
            self._list.launch((-(-n_tokens // _LIST_THREADS), 1, 1), params, stream)

    def add_rows(self, stream: Stream, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Count up to 6 tokens in each of up to 8 distinct slots: a commit that the host decided."""
        if not any(len(tokens) for tokens in token_ids):
            return
        params = CountTokensParams(self.memory.pointer, self.memory.stride, len(slots))
        for b, (slot, tokens) in enumerate(zip(slots, token_ids, strict=True)):
            params.slots[b], params.n_tokens[b] = int(slot), len(tokens)
            for i, token in enumerate(tokens):
                params.token_ids[b][i] = int(token)
        self._rows.launch((1, 1, 1), params, stream)


class RoundBegin:
    """First kernel of every round: resolves rows and inputs, counts what the previous round emitted."""

    def __init__(
        self,
        device: Device,
        memory: RoundMemory,
        counts: CountsMemory,
        held: int = 0,
        carrying: Carrying | None = None,
    ) -> None:
        """``held``: HELD_DRAFTS [slots] of ``ops/draft.py``; 0 for programs that do not draft.

        ``carrying``: when states are written back; None where rounds have no recurrent layer.
        """
        self._kernel = device.kernel(ROUND_BEGIN)
        self._memory, self._counts, self._held, self._carrying = memory, counts, held, carrying

    def launch(self, stream: Stream, n_rows: int, n_columns: int) -> None:
        """Packed input (and, if it says so, the result of the round before) → ``rows`` and ``tokens`` [B · q]."""
        m, c = self._memory, self._carrying
        params = RoundBeginParams(
            input=m.input,
            previous=m.result,
            rows=m.rows,
            tokens=m.tokens,
            counts=self._counts.pointer,
            held=self._held,
            carried=0 if c is None else c.pointer,
            carried_stride=0 if c is None else c.stride,
            n_carried=0 if c is None else c.limit(n_rows, n_columns),
            counts_stride=self._counts.stride,
            n_rows=n_rows,
            n_columns=n_columns,
        )
        self._kernel.launch((1, 1, 1), params, stream)
