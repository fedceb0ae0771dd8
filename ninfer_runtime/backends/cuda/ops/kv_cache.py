"""Where keys and values live: pages of 64 tokens, one plane per layer and kind. Device side: ``include/kv.cuh``.

Per attention layer four planes follow each other, each 256-byte aligned: K codes, V codes ``[page][kv head][64][256]``
in bfloat16 or int8, then their float16 scales ``[page][kv head][4][64]``, one for every 64 consecutive dims (INT8-G64
only). K is stored normalised and rotated, V as projected; the int8 codes of V have their sign bits flipped, which
spares the kernels an instruction in four. The layers of a pool follow each other.
"""

from dataclasses import dataclass
from typing import Literal

from ninfer_format.errors import UnsupportedError
from ninfer_format.geometry import up
from ninfer_runtime.config import PAGE_TOKENS, KvDtype

HEAD_DIM = 256
SCALE_GROUP = 64
_ALIGNMENT = 256

KvFormat = Literal["bf16", "int8"]
_CODE_BYTES = {"bf16": 2, "int8": 1}


def kv_format(dtype: KvDtype) -> KvFormat:
    """The format of a ``--kv-dtype`` on this backend; "auto" is int8. UnsupportedError for one it does not have."""
    if dtype == "auto":
        return "int8"
    if dtype == "fp6":
        raise UnsupportedError("kv dtype 'fp6' is not supported by the cuda backend; choose bf16 or int8")
    return dtype


@dataclass(frozen=True, slots=True)
class KvPlanes:
    """Device addresses of one layer's planes; the scales are 0 for bf16."""

    k: int
    v: int
    k_scales: int
    v_scales: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Sizes and addresses of a pool of ``n_pages`` pages for ``n_layers`` attention layers."""

    n_layers: int
    n_kv_heads: int
    n_pages: int
    format: KvFormat

    @property
    def code_page_bytes(self) -> int:
        """One page of K or of V codes of one layer."""
        return self.n_kv_heads * PAGE_TOKENS * HEAD_DIM * _CODE_BYTES[self.format]

    @property
    def scale_page_bytes(self) -> int:
        """One page of K or of V scales of one layer; 0 for bf16."""
        return self.n_kv_heads * PAGE_TOKENS * (HEAD_DIM // SCALE_GROUP) * 2 if self.format == "int8" else 0

    @property
    def page_bytes(self) -> int:
        """What one more page costs, over all layers."""
        return self.n_layers * 2 * (self.code_page_bytes + self.scale_page_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers: what a decode step reads per token of context."""
        return self.page_bytes // PAGE_TOKENS

    @property
    def plane_page_bytes(self) -> tuple[int, int, int, int]:
        """Bytes per page of the planes of a layer, in their order: K, V, K scales, V scales."""
        return (self.code_page_bytes, self.code_page_bytes, self.scale_page_bytes, self.scale_page_bytes)

    @property
    def plane_offsets(self) -> tuple[int, int, int, int]:
        """Offsets of the planes from the start of a layer."""
        code = up(self.n_pages * self.code_page_bytes, _ALIGNMENT)
        scale = up(self.n_pages * self.scale_page_bytes, _ALIGNMENT)
        return (0, code, 2 * code, 2 * code + scale)

    @property
    def layer_bytes(self) -> int:
        """Distance between two layers of the pool."""
        return self.plane_offsets[3] + up(self.n_pages * self.scale_page_bytes, _ALIGNMENT)

    @property
    def n_bytes(self) -> int:
        """The whole pool."""
        return self.n_layers * self.layer_bytes

    def planes(self, pool: int, layer: int) -> KvPlanes:
        """Planes of attention layer ``layer`` in a pool at device address ``pool`` (a multiple of 256)."""
        base = pool + layer * self.layer_bytes
        k, v, k_scales, v_scales = (base + offset for offset in self.plane_offsets)
        return KvPlanes(k, v, k_scales, v_scales) if self.format == "int8" else KvPlanes(k, v, 0, 0)
