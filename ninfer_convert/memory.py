"""How much memory a build needs: a bound that ``plan`` prints and ``build`` stays below.

Model: one object is quantized while the one before it is written, so at most two payloads are held, in whatever order
objects are made; each worker has one chunk of rows in flight; the process has a base.
"""

import os
from typing import Literal

from ninfer_format import Inventory

CHUNK_BYTES = 1 << 20
"""Default size of a quantization chunk, in bytes of BF16 words; a chunk has at least one row."""
BASE_BYTES = 400 << 20
"""Interpreter, numpy and torch: 239 MB measured after the first operations with torch 2.13 (CPU build), doubled in part
for what planning a large tokenizer leaves behind and for the allocator's pools."""
CUDA_BASE_BYTES = 3 << 30
"""On top of it, allowance for the host side of a CUDA context and its libraries."""
CHUNK_FACTOR = 16
"""Working bytes of a worker per byte of BF16 words in its chunk: words, float32 values twice, codes, packed planes."""
_MIN_WORKER_BYTES = 8 << 20


def worker_count(jobs: int) -> int:
    """``jobs``, or one worker per CPU that this process may use if it is 0."""
    return jobs or len(os.sched_getaffinity(0))


def peak_memory(
    inventory: Inventory, jobs: int = 0, chunk_bytes: int = CHUNK_BYTES, device: Literal["cpu", "cuda"] = "cpu"
) -> int:
    """Bound in bytes on the resident memory of a build with ``jobs`` workers and chunks of ``chunk_bytes``.

    base + resources + the two largest payloads + workers × chunk × factor.
    """
    payloads = sorted((entry.n_bytes for entry in inventory.tensors), reverse=True)
    widest = max((entry.shape[-1] for entry in inventory.tensors if entry.shape), default=0)
    worker = max(_MIN_WORKER_BYTES, CHUNK_FACTOR * max(chunk_bytes, 2 * widest))
    base = BASE_BYTES + (CUDA_BASE_BYTES if device == "cuda" else 0)
    held = sum(payloads[:2]) + sum(entry.n_bytes for entry in inventory.resources)
    return base + held + worker_count(jobs) * worker
