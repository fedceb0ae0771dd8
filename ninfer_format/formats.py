"""The closed registries: numeric formats, layouts, resource encodings, and the sizes that follow from them.

Specification: ``specs/formats.md`` and ``specs/layouts.md``. Names are identifiers; nothing is ever derived by
taking one apart, and no alias is accepted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ninfer_format.errors import RegistryError, SignatureError
from ninfer_format.geometry import MAX_EXTENT, checked_product, up

FormatKind = Literal["direct", "grouped", "nvfp4"]

MAX_RANK = 16
OBJECT_ALIGNMENT = 256
PLANE_ALIGNMENT = 256
ROW_SPLIT_COLUMNS = 128
"""Rows of the row-split layout are padded to a multiple of this many columns."""
RAW_BYTES = "raw-bytes-v1"
CONTIGUOUS = "contiguous-le-v1"
ROW_SPLIT = "row-split-k128-v1"
BLOCKSCALE = "blockscale-k16-m128x4-v1"


@dataclass(frozen=True, slots=True)
class NumericFormat:
    """One numeric format.

    ``bits`` per stored code, ``word_bytes`` of a direct word (0 otherwise), ``group`` elements along K that share a
    scale (0 for direct), ``qmin``/``qmax`` the code range of the signed-integer formats (0 otherwise).
    """

    name: str
    kind: FormatKind
    bits: int
    word_bytes: int = 0
    group: int = 0
    qmin: int = 0
    qmax: int = 0

    @property
    def high_bits(self) -> int:
        """Bits of a grouped code that live in the high plane (0 for 4- and 8-bit codes)."""
        return self.bits - 4 if self.bits in (5, 6) else 0


@dataclass(frozen=True, slots=True)
class Layout:
    """One storage layout: accepted formats, rank range, alignment of its objects in bytes."""

    name: str
    formats: tuple[str, ...]
    min_rank: int
    max_rank: int
    alignment: int = OBJECT_ALIGNMENT


NUMERIC_FORMATS: Mapping[str, NumericFormat] = MappingProxyType(
    {
        f.name: f
        for f in (
            NumericFormat("BF16", "direct", 16, word_bytes=2),
            NumericFormat("FP32", "direct", 32, word_bytes=4),
            NumericFormat("I32", "direct", 32, word_bytes=4),
            NumericFormat("Q4G64_F16S", "grouped", 4, group=64, qmin=-8, qmax=7),
            NumericFormat("Q5G64_F16S", "grouped", 5, group=64, qmin=-16, qmax=15),
            NumericFormat("Q6G64_F16S", "grouped", 6, group=64, qmin=-32, qmax=31),
            NumericFormat("W8G32_F16S", "grouped", 8, group=32, qmin=-127, qmax=127),
            NumericFormat("NVFP4", "nvfp4", 4, group=16),
        )
    }
)

LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        layout.name: layout
        for layout in (
            Layout(CONTIGUOUS, ("BF16", "FP32", "I32"), 0, MAX_RANK),
            Layout(ROW_SPLIT, ("Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S"), 2, 2),
            Layout(BLOCKSCALE, ("NVFP4",), 2, 2),
        )
    }
)

RESOURCE_ENCODINGS: Mapping[str, int] = MappingProxyType({RAW_BYTES: 1})
"""Resource encoding → alignment in bytes."""


def numeric_format(name: str) -> NumericFormat:
    """The registered format called ``name``; RegistryError lists the members otherwise."""
    try:
        return NUMERIC_FORMATS[name]
    except KeyError:
        known = ", ".join(NUMERIC_FORMATS)
        raise RegistryError(f"unknown numeric format {name!r}; this release knows {known}") from None


def layout_named(name: str) -> Layout:
    """The registered layout called ``name``; RegistryError lists the members otherwise."""
    try:
        return LAYOUTS[name]
    except KeyError:
        raise RegistryError(f"unknown layout {name!r}; this release knows {', '.join(LAYOUTS)}") from None


def layout_for(format: str) -> str:
    """Name of the one layout that stores ``format``."""
    numeric_format(format)
    return next(layout.name for layout in LAYOUTS.values() if format in layout.formats)


def alignment_of(layout_or_encoding: str) -> int:
    """Alignment in bytes of an object with this layout (tensors) or encoding (resources)."""
    if layout_or_encoding in RESOURCE_ENCODINGS:
        return RESOURCE_ENCODINGS[layout_or_encoding]
    return layout_named(layout_or_encoding).alignment


def check_signature(format: str, layout: str, shape: Sequence[int]) -> None:
    """Whether a tensor of ``shape`` may be stored as (format, layout).

    Raises RegistryError for an unknown name, SignatureError for a combination, rank or dimension that is not
    allowed, and GeometryError for more than 2^63 - 1 elements or bytes.
    """
    fmt, lay = numeric_format(format), layout_named(layout)
    if format not in lay.formats:
        raise SignatureError(f"layout {layout} does not store {format}; it stores {', '.join(lay.formats)}")
    if not lay.min_rank <= len(shape) <= lay.max_rank:
        expected = str(lay.min_rank) if lay.min_rank == lay.max_rank else f"{lay.min_rank} to {lay.max_rank}"
        raise SignatureError(f"rank {len(shape)} is not allowed in layout {layout}; expected {expected}")
    if any(type(d) is not int or d <= 0 for d in shape):
        raise SignatureError(f"shape {list(shape)} has a dimension that is not a positive integer")
    checked_product((*shape, max(1, fmt.word_bytes)))
    if fmt.kind == "nvfp4" and (shape[0] % 128 or shape[1] % 64):
        raise SignatureError(f"NVFP4 shape {list(shape)} needs rows % 128 == 0 and columns % 64 == 0")


@dataclass(frozen=True, slots=True)
class RowSplitPlanes:
    """Byte geometry of a row-split payload: three planes, each row-major over (row, group)."""

    n_rows: int
    k: int
    k_pad: int
    groups_per_row: int
    base_bytes_per_group: int
    high_bytes_per_group: int
    base_offset: int
    base_bytes: int
    high_offset: int
    high_bytes: int
    scale_offset: int
    scale_bytes: int
    total_bytes: int


def row_split_planes(format: str, shape: Sequence[int]) -> RowSplitPlanes:
    """Plane offsets and sizes in bytes of a grouped-integer matrix ``shape`` = [N, K] (specs/layouts.md)."""
    check_signature(format, ROW_SPLIT, shape)
    fmt = NUMERIC_FORMATS[format]
    n, k = shape
    k_pad = up(k, ROW_SPLIT_COLUMNS)
    groups = k_pad // fmt.group
    high_group = fmt.group * fmt.high_bits // 8
    base = n * groups * 32
    high = n * groups * high_group
    high_offset = up(base, PLANE_ALIGNMENT)
    scale_offset = high_offset + up(high, PLANE_ALIGNMENT)
    scale = n * groups * 2
    planes = RowSplitPlanes(
        n, k, k_pad, groups, 32, high_group, 0, base, high_offset, high, scale_offset, scale, scale_offset + scale
    )
    if planes.total_bytes > MAX_EXTENT:
        raise SignatureError(f"{format} {list(shape)} would need {planes.total_bytes} bytes, beyond 2^63 - 1")
    return planes


@dataclass(frozen=True, slots=True)
class BlockscalePlanes:
    """Byte geometry of an NVFP4 payload: packed codes, swizzled block scales, one float32 divisor."""

    code_bytes: int
    scale_offset: int
    scale_bytes: int
    divisor_offset: int
    total_bytes: int


def blockscale_planes(shape: Sequence[int]) -> BlockscalePlanes:
    """Plane offsets and sizes in bytes of an NVFP4 matrix ``shape`` = [N, K] (specs/layouts.md)."""
    check_signature("NVFP4", BLOCKSCALE, shape)
    n, k = shape
    codes = n * k // 2
    scale_offset = up(codes, PLANE_ALIGNMENT)
    divisor_offset = scale_offset + n * k // 16
    return BlockscalePlanes(codes, scale_offset, n * k // 16, divisor_offset, divisor_offset + 4)


def encoded_size(format: str, layout: str, shape: Sequence[int]) -> int:
    """Exact payload size in bytes of a tensor; RegistryError or SignatureError if it cannot be stored so."""
    check_signature(format, layout, shape)
    if layout == ROW_SPLIT:
        return row_split_planes(format, shape).total_bytes
    if layout == BLOCKSCALE:
        return blockscale_planes(shape).total_bytes
    return checked_product((*shape, NUMERIC_FORMATS[format].word_bytes))
