"""Where keys and values live: pages of 64 tokens, one plane per layer and kind. Device side: ``include/kv.cuh``.

Per attention layer four planes follow each other, each 256-byte aligned: K codes, V codes ``[page][kv head][64][256]``
in bfloat16, int8 or fp6, then their float16 scales ``[page][kv head][4][64]``, one for every 64 consecutive dims
(INT8-G64 and FP6-G64). K is stored normalised and turned by its position, V as projected. The int8 codes of V have
their sign bits flipped, which spares the kernels an instruction in four; the bits of fp6 codes are laid out for whoever
reads them (``fp6_key_bytes``, ``fp6_value_bytes``). The layers of a pool follow each other.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ninfer_format.geometry import up
from ninfer_runtime.config import PAGE_TOKENS, KvDtype

HEAD_DIM = 256
SCALE_GROUP = 64
_ALIGNMENT = 256

KvFormat = Literal["bf16", "int8", "fp6"]
_CODE_BITS = {"bf16": 16, "int8": 8, "fp6": 6}

Bytes = NDArray[np.uint8]


def kv_format(dtype: KvDtype) -> KvFormat:
    """The format of a ``--kv-dtype`` on this backend; "auto" is int8."""
    return "int8" if dtype == "auto" else dtype


def fp6_key_bytes(codes: Bytes) -> Bytes:
    """uint8 codes [..., 256] → uint8 [..., 192] as K is stored: 16 dims in three words, as ``include/kv.cuh`` says."""
    pairs = _halves(codes.reshape(*codes.shape[:-1], -1, 8, 2))
    upper, mantissa = pairs >> 2 & 0x000F000F, pairs & 0x00030003
    words = [pairs[..., i] << 10 | pairs[..., 4 + i] << 4 for i in range(3)]
    words[0] |= upper[..., 3]
    words[1] |= upper[..., 7]
    words[2] |= mantissa[..., 3] << 2 | mantissa[..., 7]
    return _as_bytes(np.stack(words, -1), codes)


def fp6_value_bytes(codes: Bytes) -> Bytes:
    """uint8 codes [..., 256] → uint8 [..., 192] as V is stored: of 64 dims first 4, then 2 bits of each."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8, 4, 2).astype(np.uint32)
    fours = np.arange(4)[:, None]
    upper = (eights >> 2 << (4 * fours + 16 * np.arange(2))).sum((-2, -1)).astype("<u4").view(np.uint8)
    mantissa = ((eights & 3) << (2 * fours + 8 * np.arange(2))).sum((-2, -1)).astype("<u2").view(np.uint8)
    return np.concatenate([upper, mantissa], -1).reshape(*codes.shape[:-1], -1)


def _halves(pairs: Bytes) -> NDArray[Any]:
    """[..., 2] → a word with the first in its lower half."""
    wide = pairs.astype(np.uint32)
    return wide[..., 0] | wide[..., 1] << 16


def _as_bytes(words: NDArray[Any], like: Bytes) -> Bytes:
    return np.ascontiguousarray(words, "<u4").view(np.uint8).reshape(*like.shape[:-1], -1)


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
        return self.n_kv_heads * PAGE_TOKENS * HEAD_DIM * _CODE_BITS[self.format] // 8

    @property
    def scale_page_bytes(self) -> int:
        """One page of K or of V scales of one layer; 0 for bf16."""
        return 0 if self.format == "bf16" else self.n_kv_heads * PAGE_TOKENS * (HEAD_DIM // SCALE_GROUP) * 2

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
        return KvPlanes(k, v, 0, 0) if self.format == "bf16" else KvPlanes(k, v, k_scales, v_scales)
