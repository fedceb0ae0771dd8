"""Weights on demand: decoded in row blocks by ``ninfer_format`` semantics, kept resident up to a byte budget.

What was decoded first stays; a matrix beyond the budget is decoded again on every use, so a file larger than memory
runs, slowly. Block boundaries depend on the matrix alone: results do not change with the budget.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from ninfer_format.directory import TensorEntry
from ninfer_format.errors import ArtifactError
from ninfer_format.reader import Artifact
from ninfer_runtime.config import Dtype
from ninfer_runtime.models.views import View

from .activations import ActivationFormats
from .numerics import TORCH_DTYPES

BLOCK_BYTES = 32 << 20
BLOCK_ROW_MULTIPLE = 64
DECODERS = min(4, os.cpu_count() or 1)
"""Threads that decode ahead; each holds one block."""


@dataclass(frozen=True, slots=True)
class Block:
    """Decoded rows [begin, end) of a stored matrix, [end - begin, K] in the program's dtype."""

    begin: int
    end: int
    rows: Tensor


def rows_per_block(n_columns: int) -> int:
    """Rows of one decoded block: at most BLOCK_BYTES of float32, a multiple of 64 unless a row is huge."""
    rows = BLOCK_BYTES // (4 * n_columns)
    return max(1, rows // BLOCK_ROW_MULTIPLE * BLOCK_ROW_MULTIPLE or rows)


class Weights:
    """All stored tensors of one artifact, as torch tensors on one device."""

    def __init__(self, artifact: Artifact, device: torch.device, dtype: Dtype, budget: int) -> None:
        self._artifact = artifact
        self._device = device
        self._dtype = TORCH_DTYPES[dtype]
        self._budget = budget
        self._blocks: dict[tuple[str, int, int], Tensor] = {}
        self._vectors: dict[str, Tensor] = {}
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="decode")
        self._lock = Lock()
        self.resident_bytes = 0
        self.activations = ActivationFormats(artifact)
        self.observer: Callable[[str, Tensor], None] | None = None
        """Called with every matrix's name and the rows [T, K] that are about to be multiplied by it."""

    @property
    def dtype(self) -> torch.dtype:
        """The program's dtype: float32 or bfloat16."""
        return self._dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape of a stored tensor."""
        entry = self._artifact.objects[name]
        if not isinstance(entry, TensorEntry):
            raise ArtifactError(f"{self._artifact.path}: object {name!r} is a resource, expected a tensor")
        return entry.shape

    def vector(self, view: View) -> Tensor:
        """A small tensor (norm, decay, convolution taps) in float32, always resident; its stored shape."""
        if view.name not in self._vectors:
            values = np.ascontiguousarray(self._artifact.tensor(view.name), np.float32)
            self._vectors[view.name] = torch.from_numpy(values).to(self._device)
        return self._vectors[view.name][view.begin : view.end]

    def matrix(self, view: View) -> Iterator[Block]:
        """The rows of ``view`` in consecutive blocks, numbered from the view's first row.

        While one block is in use, the next ones are decoded on other threads.
        """
        step = rows_per_block(self.shape(view.name)[1])
        spans = [(begin, min(begin + step, view.end)) for begin in range(view.begin, view.end, step)]
        pending: deque[Future[Tensor]] = deque()
        for i, (begin, end) in enumerate(spans):
            ahead = spans[i + len(pending) : i + 1 + DECODERS] if len(spans) > 1 else ()
            pending.extend(self._decoders.submit(self._block, view.name, *span) for span in ahead)
            rows = pending.popleft().result() if pending else self._block(view.name, begin, end)
            yield Block(begin - view.begin, end - view.begin, rows)

    def close(self) -> None:
        """Drop everything decoded and end the decoding threads."""
        self._decoders.shutdown(cancel_futures=True)
        self._blocks.clear()
        self._vectors.clear()

    def embed(self, view: View, token_ids: Tensor) -> Tensor:
        """Rows of an embedding matrix, [T, hidden] in the program's dtype; only these rows are read."""
        unique, inverse = np.unique(token_ids.cpu().numpy(), return_inverse=True)
        rows = np.ascontiguousarray(self._artifact.rows(view.name, unique)[inverse.reshape(-1)])
        return torch.from_numpy(rows).to(self._device).to(self._dtype)

    def _block(self, name: str, begin: int, end: int) -> Tensor:
        key = (name, begin, end)
        if (kept := self._blocks.get(key)) is not None:
            return kept
        values = np.ascontiguousarray(self._artifact.rows(name, slice(begin, end)), np.float32)
        block = torch.from_numpy(values).to(self._device).to(self._dtype)
        n_bytes = block.numel() * block.element_size()
        with self._lock:
            if self.resident_bytes + n_bytes <= self._budget:
                self._blocks[key] = block
                self.resident_bytes += n_bytes
        return block
