"""From logits to what the rows of a round emit, in two launches (``kernels/sampling.cu``).

Reference: ``backends/reference/sampling.py`` and ``rounds.py``. Specification: ``specs/program.md``.
"""

import ctypes
from dataclasses import dataclass

import numpy as np

from ninfer_runtime.backends.cuda.arena import Taker
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops.round_begin import CountsMemory
from ninfer_runtime.backends.cuda.ops.round_state import MAX_COLUMNS, MAX_ROWS, RoundMemory

_MAX_CHUNKS = 1024
_SMALLEST_CHUNK = 256
_BINS = 2048
_SCAN_THREADS = 256
_DRAW_THREADS = 512
_MAX_DRAWS = MAX_ROWS * MAX_COLUMNS


class SampleParams(ctypes.Structure):
    """Mirror of the struct of the same name in the kernel; both entry points take it."""

    _fields_ = (
        ("logits", ctypes.c_uint64),
        ("input", ctypes.c_uint64),
        ("bias", ctypes.c_uint64),
        ("masks", ctypes.c_uint64),
        ("counts", ctypes.c_uint64),
        ("tokens", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("outputs", ctypes.c_uint64),
        ("states", ctypes.c_uint64),
        ("held", ctypes.c_uint64),
        ("proposals", ctypes.c_uint64),
        ("best", ctypes.c_uint64),
        ("best_ids", ctypes.c_uint64),
        ("raw_largest", ctypes.c_uint64),
        ("raw_sum", ctypes.c_uint64),
        ("scaled_sum", ctypes.c_uint64),
        ("draws", ctypes.c_uint64),
        ("arrived", ctypes.c_uint64),
        ("chosen", ctypes.c_uint64),
        ("top_ids", ctypes.c_uint64),
        ("top", ctypes.c_uint64),
        ("n_columns", ctypes.c_int32),
        ("n_ids", ctypes.c_int32),
        ("n_chunks", ctypes.c_int32),
        ("logits_stride", ctypes.c_int32),
        ("counts_stride", ctypes.c_int32),
        ("mask_words", ctypes.c_int32),
        ("n_top_limit", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class SamplerShape:
    """What the sampler is specialised for.

    n_addressable   ids that may be sampled: the first ones of a row
    logits_stride   elements between rows of logits; with a multiple of 4 (and 16-byte aligned rows) loads are wide
    capacity        candidates that can be sorted at once
    prefix          largest top_k that never looks at more of the vocabulary than it sorts; at most half of that
    """

    n_addressable: int
    logits_stride: int
    capacity: int = 2048
    prefix: int = 1024

    @property
    def chunk(self) -> int:
        """Ids per warp of the first launch: the second holds one key of every chunk in shared memory."""
        chunk = _SMALLEST_CHUNK
        while chunk * _MAX_CHUNKS < self.n_addressable:
            chunk *= 2
        return chunk

    @property
    def n_chunks(self) -> int:
        """Chunks of one column."""
        return -(-self.n_addressable // self.chunk)

    @property
    def shared_bytes(self) -> int:
        """``Selection`` of include/sample_select.cuh."""
        warps = _DRAW_THREADS // 32
        doubles = self.capacity + self.capacity // 2 + _BINS + 2 * warps + 4
        words = self.capacity + _BINS + 2 * _MAX_CHUNKS + warps + 8
        return -(-(8 * doubles + 4 * words) // 128) * 128

    def _spec(
        self, name: str, threads: int, shared_bytes: int, min_blocks: int, drafts: bool, ratio: bool
    ) -> KernelSpec:
        defines: tuple[tuple[str, int], ...] = (
            ("CHUNK", self.chunk),
            ("MAX_CHUNKS", _MAX_CHUNKS),
            ("CAPACITY", self.capacity),
            ("PREFIX", self.prefix),
            ("VECTOR_LOADS", int(self.logits_stride % 4 == 0)),
            ("SELECTION_BYTES", self.shared_bytes),
        )
        defines += (("DRAFT", 1),) if drafts else ()
        defines += (("RATIO", 1),) if ratio else ()
        return KernelSpec("sampling.cu", name, defines, threads, shared_bytes, min_blocks)

    def specs(self, *, drafts: bool = False, ratio: bool = False) -> list[KernelSpec]:
        """The two launches: a scan by many blocks, then one block per column; or those that draw drafts."""
        return [
            self._spec("sample_scan", _SCAN_THREADS, 0, 3, drafts, False),
            self._spec("sample_draw", _DRAW_THREADS, self.shared_bytes, 1, drafts, ratio),
        ]


@dataclass(frozen=True, slots=True)
class SamplerMemory:
    """Device addresses of what the first launch leaves for the second, for up to ``n_columns`` columns at once."""

    best: int
    best_ids: int
    raw_largest: int
    raw_sum: int
    scaled_sum: int
    draws: int
    arrived: int

    @classmethod
    def take(cls, taker: Taker, name: str, shape: SamplerShape, n_columns: int = _MAX_DRAWS) -> "SamplerMemory":
        """Memory for rounds of up to ``n_columns`` columns in all."""
        n = n_columns * shape.n_chunks
        sizes = (8 * n, 4 * n, 4 * n, 4 * n, 4 * n, 8 * n_columns, 4 * MAX_ROWS)
        return cls(*(taker.take(f"{name}/sampling", size) for size in sizes))


class Sampler:
    """Draws of all columns, then each row's rule; results go to ``RoundMemory.result`` and ``.rows``.

    With ``drafts`` it draws the next draft of every row that makes one: from one row of logits each, for the rows of
    ``states`` into ``held`` (addresses, ``ops/draft.py``). With ``proposals`` drafts of rows that cut their candidates
    (top_k) are accepted by ratio; other rows' are drawn as the target will draw.
    """

    def __init__(
        self,
        device: Device,
        shape: SamplerShape,
        memory: SamplerMemory,
        round_memory: RoundMemory,
        counts: CountsMemory,
        *,
        states: int = 0,
        held: int = 0,
        proposals: int = 0,
    ) -> None:
        """``states``: the sampler draws drafts; ``proposals``: PROPOSAL [slots][MAX_DRAFTS] of ``ops/draft.py``."""
        self._shape = shape
        variants = shape.specs(drafts=bool(states), ratio=bool(proposals))
        self._scan, self._draw = (device.kernel(spec) for spec in variants)
        device.upload(memory.arrived, np.zeros(MAX_ROWS, np.uint32))
        m, layout = round_memory, round_memory.layout
        self._params = SampleParams(
            input=m.input,
            bias=m.input + layout.bias_offset,
            masks=m.masks,
            counts=counts.pointer,
            tokens=m.tokens,
            rows=m.rows,
            outputs=m.result,
            states=states,
            held=held,
            proposals=proposals,
            best=memory.best,
            best_ids=memory.best_ids,
            raw_largest=memory.raw_largest,
            raw_sum=memory.raw_sum,
            scaled_sum=memory.scaled_sum,
            draws=memory.draws,
            arrived=memory.arrived,
            chosen=m.result + layout.chosen_offset,
            top_ids=m.result + layout.top_ids_offset,
            top=m.result + layout.top_offset,
            n_ids=shape.n_addressable,
            n_chunks=shape.n_chunks,
            logits_stride=shape.logits_stride,
            counts_stride=counts.stride,
            mask_words=layout.mask_words,
            n_top_limit=layout.n_top_limit,
        )

    def launch(self, stream: Stream, n_rows: int, n_columns: int, logits: int) -> None:
        """``logits`` fp32 [B · q, logits_stride] of the round that ``RoundBegin`` of the same memory began."""
        total = n_rows * n_columns
        self._params.logits, self._params.n_columns = logits, n_columns
        scan_blocks = -(-self._shape.n_chunks // (_SCAN_THREADS // 32))
        self._scan.launch((scan_blocks, total, 1), self._params, stream)
        self._draw.launch((total, 1, 1), self._params, stream)
