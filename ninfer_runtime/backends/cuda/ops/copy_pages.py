"""Whole pages of all layers copied inside one pool: a shared last page that is about to be written."""

import ctypes

from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops.kv_cache import KvLayout

_PLANES = 4


class CopyPagesParams(ctypes.Structure):
    """Mirrors ``kernels/copy_pages.cu``."""

    _fields_ = (
        ("pool", ctypes.c_uint64),
        ("pairs", ctypes.c_uint64),
        ("layer_bytes", ctypes.c_uint64),
        ("plane_offsets", ctypes.c_uint64 * _PLANES),
        ("plane_page_bytes", ctypes.c_uint32 * _PLANES),
    )


def specs() -> list[KernelSpec]:
    """The one variant."""
    return [KernelSpec("copy_pages.cu", "copy_pages")]


class CopyPages:
    """Copies for one pool."""

    def __init__(self, device: Device, layout: KvLayout) -> None:
        self._kernel = device.kernel(specs()[0])
        self._layout = layout

    def launch(self, stream: Stream, *, pool: int, pairs: int, n_pairs: int) -> None:
        """pairs: int32 [n_pairs][2] on the device, source then target; no page may be both. 16-byte units."""
        layout = self._layout
        params = CopyPagesParams(
            pool,
            pairs,
            layout.layer_bytes,
            (ctypes.c_uint64 * _PLANES)(*layout.plane_offsets),
            (ctypes.c_uint32 * _PLANES)(*layout.plane_page_bytes),
        )
        planes = 2 if layout.format == "bf16" else _PLANES
        self._kernel.launch((n_pairs, planes, layout.n_layers), params, stream)
