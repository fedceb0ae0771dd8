"""Kernels from source to cubin, with NVRTC and without a card."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One compiled variant of one kernel.

    source        file under ``kernels/``
    name          entry point (``extern "C"``)
    defines       compile-time constants, passed as ``-DNAME=value``
    threads       block size; also ``-DTHREADS``
    shared_bytes  dynamic shared memory per block
    min_blocks    second argument of ``__launch_bounds__``; also ``-DMIN_BLOCKS``
    """

    source: str
    name: str
    defines: tuple[tuple[str, int | str], ...] = ()
    threads: int = 256
    shared_bytes: int = 0
    min_blocks: int = 1
