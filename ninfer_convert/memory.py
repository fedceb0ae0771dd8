"""How much memory a build needs: a bound that ``plan`` prints and ``build`` stays below.

Model: one object is quantized while the one before it is written, so at most two payloads are held, in whatever order
objects are made; every worker has one piece of rows in flight; the process has a base.
"""

import os
from collections.abc import Mapping
from typing import Literal

from ninfer_format import Inventory

Device = Literal["cpu", "cuda"]

BASE_BYTES: Mapping[Device, int] = {"cpu": 640 << 20, "cuda": 1280 << 20}
"""Interpreter, numpy, torch and its compiled encoder; with CUDA also the host side of a context.

Measured peaks beyond the payloads, MiB: CPU build of torch 2.13, 2 workers, 243; CUDA build of torch 2.11, 4 workers,
545 with device cpu and 895 with device cuda on an H200. A large tokenizer adds some 100 MiB while it is parsed.
"""
WORKER_BYTES: Mapping[Device, int] = {"cpu": 32 << 20, "cuda": 128 << 20}
"""A worker's words, gathered rows and encoder buffers; measured 12 MiB (CPU) and 33 MiB (CUDA)."""
ROW_FACTOR = 16
"""The same for a single row, in bytes per element: a row is never split."""
NVFP4_ROW_FACTOR = 1024
"""The same for the 128 rows of a tile, in bytes per column: NVFP4 is made in whole tiles."""
FLOAT_BYTES: Mapping[Device, int] = {"cpu": 16 << 20, "cuda": 160 << 20}
"""More for a worker whose rows are made by dequantizing: float32 in place of words, gathered rows, a tile of each."""


def worker_count(jobs: int) -> int:
    """``jobs``, or one worker per CPU that this process may use if it is 0."""
    return jobs or len(os.sched_getaffinity(0))


def peak_memory(inventory: Inventory, jobs: int = 0, device: Device = "cpu", *, dequantizes: bool = False) -> int:
    """Bound in bytes on the resident memory of a build with ``jobs`` workers.

    base + resources + the two largest payloads + workers × (piece, longest row or tile). ``dequantizes``: some values
    are not stored plain.
    """
    payloads = sorted((entry.n_bytes for entry in inventory.tensors), reverse=True)
    widest = max((entry.shape[-1] for entry in inventory.tensors if entry.shape), default=0)
    widest_tile = max((entry.shape[-1] for entry in inventory.tensors if entry.format == "NVFP4"), default=0)
    worker = max(WORKER_BYTES[device], ROW_FACTOR * widest, NVFP4_ROW_FACTOR * widest_tile)
    worker += FLOAT_BYTES[device] if dequantizes else 0
    held = sum(payloads[:2]) + sum(entry.n_bytes for entry in inventory.resources)
    return BASE_BYTES[device] + held + worker_count(jobs) * worker
