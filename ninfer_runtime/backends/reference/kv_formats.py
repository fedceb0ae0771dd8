"""Keys and values in pages: as they are, or quantized in groups of 64 dims and packed.

The numbers are those of ``backends/kv_numeric.py``, bit for bit. Specification: ``specs/kv-cache.md``.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ninfer_runtime.backends.base import ProgramOptions
from ninfer_runtime.backends.kv_numeric import (
    FP6_MAX,
    GROUP,
    INT8_MAX,
    QUANTIZED,
    check_head_dim,
    fp6_values,
    head_bytes,
)
from ninfer_runtime.config import PAGE_TOKENS, KvStorage
from ninfer_runtime.models.spec import ModelSpec

from .numerics import TORCH_DTYPES

Planes = tuple[Tensor, ...]
_FP6_BITS = 6
_FP6_BLOCK = 4
_FP6_BLOCK_BYTES = 3
_FP6_SIGN, _FP6_MASK = 0x20, 0x3F
_FP6_SMALLEST_NORMAL = 0.25
_EXPONENT_BITS = 0x7F800000


class Codec(Protocol):
    """float32 heads [..., D] to stored planes [..., width] and back."""

    def empty(self, shape: tuple[int, ...], head_dim: int, device: torch.device) -> Planes:
        """Planes of zeros for heads in the given leading shape."""

    def encode(self, x: Tensor) -> Planes:
        """What is stored of [..., D], of any floating type."""

    def decode(self, planes: Sequence[Tensor]) -> Tensor:
        """float32 [..., D]."""


class Plain:
    """One plane of a floating type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def empty(self, shape: tuple[int, ...], head_dim: int, device: torch.device) -> Planes:
        return (torch.zeros((*shape, head_dim), dtype=self.dtype, device=device),)

    def encode(self, x: Tensor) -> Planes:
        return (x.to(self.dtype),)

    def decode(self, planes: Sequence[Tensor]) -> Tensor:
        return planes[0].float()


class Int8:
    """INT8-G64: codes int8 [..., D], scales float16 [..., D / 64]."""

    def empty(self, shape: tuple[int, ...], head_dim: int, device: torch.device) -> Planes:
        return _codes_and_scales(shape, head_dim, torch.int8, head_dim, device)

    def encode(self, x: Tensor) -> Planes:
        scaled, scales = _scaled(x, INT8_MAX)
        codes = scaled.round().clamp(-INT8_MAX, INT8_MAX)
        return codes.to(torch.int8).reshape(x.shape), scales

    def decode(self, planes: Sequence[Tensor]) -> Tensor:
        return _times_scales(planes[0].float(), planes[1])


class Fp6:
    """FP6-G64: E3M2 codes packed into uint8 [..., 3 D / 4], scales float16 [..., D / 64]."""

    def __init__(self, device: torch.device) -> None:
        self._values = torch.from_numpy(fp6_values()).to(device)

    def empty(self, shape: tuple[int, ...], head_dim: int, device: torch.device) -> Planes:
        width = head_dim // _FP6_BLOCK * _FP6_BLOCK_BYTES
        return _codes_and_scales(shape, width, torch.uint8, head_dim, device)

    def encode(self, x: Tensor) -> Planes:
        scaled, scales = _scaled(x, FP6_MAX)
        magnitude = scaled.abs().clamp(max=FP6_MAX)
        exponent_bits = magnitude.clamp(min=_FP6_SMALLEST_NORMAL).view(torch.int32) & _EXPONENT_BITS
        quarters = (magnitude / exponent_bits.view(torch.float32) * 4).round().int()
        codes = 4 * ((exponent_bits >> 23) - 125) + quarters
        codes = codes | torch.where((scaled < 0) & (codes > 0), _FP6_SIGN, 0)
        blocks = codes.reshape(*x.shape[:-1], -1, _FP6_BLOCK)
        shifts = _FP6_BITS * torch.arange(_FP6_BLOCK, dtype=torch.int32, device=x.device)
        words = (blocks << shifts).sum(-1, dtype=torch.int32)
        packed = words[..., None] >> _byte_shifts(x.device) & 0xFF
        return packed.to(torch.uint8).reshape(*x.shape[:-1], -1), scales

    def decode(self, planes: Sequence[Tensor]) -> Tensor:
        packed, scales = planes
        blocks = packed.reshape(*packed.shape[:-1], -1, _FP6_BLOCK_BYTES).int()
        words = (blocks << _byte_shifts(packed.device)).sum(-1, dtype=torch.int32)
        shifts = _FP6_BITS * torch.arange(_FP6_BLOCK, dtype=torch.int32, device=packed.device)
        codes = words[..., None] >> shifts & _FP6_MASK
        return _times_scales(self._values[codes].reshape(*packed.shape[:-1], -1), scales)


def _byte_shifts(device: torch.device) -> Tensor:
    return 8 * torch.arange(_FP6_BLOCK_BYTES, dtype=torch.int32, device=device)


def _codes_and_scales(
    shape: tuple[int, ...], width: int, dtype: torch.dtype, head_dim: int, device: torch.device
) -> Planes:
    codes = torch.zeros((*shape, width), dtype=dtype, device=device)
    return codes, torch.zeros((*shape, head_dim // GROUP), dtype=torch.float16, device=device)


def _scaled(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """x · (1 / scale) in groups, float32 [..., D / 64, 64] with 0 for NaN, and the float16 scales [..., D / 64]."""
    groups = x.float().reshape(*x.shape[:-1], -1, GROUP)
    scales = (groups.abs().amax(-1) / largest).half()
    wide = scales.float()
    inverse = torch.where(wide == 0, 0.0, 1.0 / wide)
    return torch.nan_to_num(groups * inverse[..., None], nan=0.0), scales


def _times_scales(values: Tensor, scales: Tensor) -> Tensor:
    return (values.reshape(*scales.shape, GROUP) * scales.float()[..., None]).reshape(values.shape)


def rotate_head(x: Tensor) -> Tensor:
    """Walsh-Hadamard over the last axis, divided by sqrt(D): float32 of the same shape; its own inverse."""
    dim, distance = x.shape[-1], 1
    out = x.float()
    while distance < dim:
        a, b = out.reshape(*x.shape[:-1], -1, 2, distance).unbind(-2)
        out = torch.stack([a + b, a - b], -2).reshape(x.shape)
        distance *= 2
    return out * float(dim**-0.5)


def kv_storage(options: ProgramOptions) -> KvStorage:
    """The storage that the options ask for; "auto" is that of the arithmetic."""
    if options.kv_dtype == "auto":
        return "float32" if options.dtype == "float32" else "bf16"
    return options.kv_dtype


def rotates(options: ProgramOptions) -> bool:
    """Whether heads are rotated before they are stored: only what is quantized gains from it."""
    return options.kv_rotation and kv_storage(options) in QUANTIZED


def check_kv(spec: ModelSpec, options: ProgramOptions) -> None:
    """UsageError for heads that the storage, or its rotation, does not divide."""
    check_head_dim(kv_storage(options), spec.text.head_dim, rotation=options.kv_rotation)


def page_bytes(spec: ModelSpec, n_layers: int, options: ProgramOptions) -> int:
    """Bytes of one page over ``n_layers`` layers, keys and values."""
    head = head_bytes(kv_storage(options), spec.text.head_dim)
    return 2 * n_layers * spec.text.n_kv_heads * PAGE_TOKENS * head


_PLAIN: Mapping[KvStorage, torch.dtype] = {"float32": TORCH_DTYPES["float32"], "bf16": TORCH_DTYPES["bfloat16"]}


def codec_of(storage: KvStorage, device: torch.device) -> Codec:
    """The codec of a storage."""
    if storage in _PLAIN:
        return Plain(_PLAIN[storage])
    return Int8() if storage == "int8" else Fp6(device)


class KvPool:
    """Keys (normalised, with their positions) and values (raw) of ``n_layers`` layers, by page.

    Every plane is [layers, pages, kv heads, 64, width]. Where heads are rotated, this is the only place that knows:
    ``append`` stores rotated heads, ``gather`` returns them so, and attention over them gives ``turn(query)`` to the
    scores and takes its result through ``turn`` again.
    """

    def __init__(
        self, spec: ModelSpec, n_layers: int, n_pages: int, options: ProgramOptions, device: torch.device
    ) -> None:
        check_kv(spec, options)
        text = spec.text
        shape = (n_layers, n_pages, text.n_kv_heads, PAGE_TOKENS)
        self.rotates = rotates(options)
        self._codec = codec_of(kv_storage(options), device)
        self.keys = self._codec.empty(shape, text.head_dim, device)
        self.values = self._codec.empty(shape, text.head_dim, device)

    def turn(self, heads: Tensor) -> Tensor:
        """float32 of [..., head_dim]: rotated when the stored heads are, its own inverse; otherwise as it is."""
        return rotate_head(heads) if self.rotates else heads.float()

    def append(self, layer: int, pages: Tensor, start: int, keys: Tensor, values: Tensor) -> None:
        """Store [T, kv heads, head_dim] at indices start .. start + T - 1 of the row with these pages (int64)."""
        index = torch.arange(start, start + keys.shape[0], device=keys.device)
        page, offset = pages[index // PAGE_TOKENS], index % PAGE_TOKENS
        for planes, heads in ((self.keys, keys), (self.values, values)):
            stored = self._codec.encode(self.turn(heads) if self.rotates else heads)
            for plane, part in zip(planes, stored, strict=True):
                plane[layer][page, :, offset] = part

    def gather(self, layer: int, pages: Tensor, n_tokens: int) -> tuple[Tensor, Tensor]:
        """float32 keys and values [kv heads, n_tokens, head_dim] of the first ``n_tokens`` of a row, as stored."""
        used = pages[: -(-n_tokens // PAGE_TOKENS)]

        def joined(planes: Planes) -> Tensor:
            heads_first = (plane[layer, used].permute(1, 0, 2, 3) for plane in planes)
            rows = [plane.reshape(plane.shape[0], -1, plane.shape[-1])[:, :n_tokens] for plane in heads_first]
            return self._codec.decode(rows)

        return joined(self.keys), joined(self.values)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages of all layers."""
        for plane in (*self.keys, *self.values):
            plane[:, list(targets)] = plane[:, list(sources)]

    @property
    def n_bytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.numel() * plane.element_size() for plane in (*self.keys, *self.values))
