"""Value rules of payloads, the offline check of ``ninfer-verify --level numeric`` (specs/formats.md §7).

A reader never needs these scans. They run in tiles, copy next to nothing, and read only bytes that a rule can reject:
Q4, Q5 and Q6 codes are all legal, so of those matrices mostly the scale plane is touched.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_format.codec import Payload, checked_payload
from ninfer_format.formats import NUMERIC_FORMATS, FormatKind, NumericFormat, blockscale_planes, row_split_planes
from ninfer_format.layouts import blockscale, contiguous, planes
from ninfer_format.layouts.words import Bytes
from ninfer_format.numeric import grouped, nvfp4

DRAFT_IDS = "draft_head_token_ids"
"""Last part of the name of the id table of a draft head (I32)."""
INPUT_DIVISOR = "input_scale_divisor"
"""Last part of the name of an NVFP4 input scale divisor (FP32, rank 0)."""

_GROUPS_PER_TILE = 1 << 16
_WORDS_PER_TILE = 1 << 20


@dataclass(slots=True)
class Findings:
    """Broken rules of one object: the first place in words, and how many more there are."""

    name: str
    _first: dict[str, str] = field(default_factory=dict)
    _count: dict[str, int] = field(default_factory=dict)

    def add(self, rule: str, count: int, text: str) -> None:
        """Record ``count`` places that break ``rule``; ``text`` describes the first of them."""
        self._first.setdefault(rule, text)
        self._count[rule] = self._count.get(rule, 0) + count

    def messages(self) -> list[str]:
        """One line per rule, in the order found."""
        more = {rule: f"; {count - 1} more like it" if count > 1 else "" for rule, count in self._count.items()}
        return [f"{self.name}: {text}{more[rule]}" for rule, text in self._first.items()]


@dataclass(frozen=True, slots=True)
class Scan:
    """One tensor under test. ``data`` is its payload uint8; ``vocabulary`` bounds draft ids when known."""

    name: str
    fmt: NumericFormat
    shape: tuple[int, ...]
    data: Bytes
    strict: bool
    vocabulary: int | None
    findings: Findings

    def role(self) -> str:
        """Last part of the object name, which says what a scalar or an id table is for."""
        return self.name.rpartition("/")[2]


def scan_payload(
    name: str,
    format: str,
    layout: str,
    shape: Sequence[int],
    payload: Payload,
    *,
    strict: bool = False,
    vocabulary: int | None = None,
) -> list[str]:
    """Messages for every value rule that ``payload`` breaks, one per rule, each naming the first place; [] if clean.

    ``strict`` also reports NaN and infinity among BF16 and FP32 words, which the formats can store but no converter
    writes. ``vocabulary`` is the exclusive bound of draft token ids. Raises RegistryError or SignatureError when
    format, layout, shape and length do not go together.
    """
    data = checked_payload(payload, format, layout, shape)
    fmt = NUMERIC_FORMATS[format]
    findings = Findings(name)
    _RULES[fmt.kind](Scan(name, fmt, tuple(shape), data, strict, vocabulary, findings))
    return findings.messages()


# --- direct formats -------------------------------------------------------------------------------------------------


def _scan_direct(scan: Scan) -> None:
    words = contiguous.stored_words(scan.data, scan.fmt, scan.shape)
    if scan.fmt.name == "I32":
        if scan.role() == DRAFT_IDS:
            _scan_draft_ids(scan, words.reshape(-1))
    elif scan.fmt.name == "FP32" and scan.role() == INPUT_DIVISOR:
        _scan_input_divisor(scan, words.reshape(-1).view(np.float32))
    elif scan.strict:
        _scan_finite(scan, words.reshape(-1))


def _scan_draft_ids(scan: Scan, ids: npt.NDArray[np.int32]) -> None:
    outside = ids < 0 if scan.vocabulary is None else (ids < 0) | (ids >= scan.vocabulary)
    if outside.any():
        row = int(outside.argmax())
        bound = "or more" if scan.vocabulary is None else f"to {scan.vocabulary - 1}"
        scan.findings.add(
            "id domain",
            int(outside.sum()),
            f"row {row} (byte {row * 4}): token id {ids[row]}, expected 0 {bound}",
        )
    ordered = np.sort(ids)
    repeats = int((ordered[1:] == ordered[:-1]).sum())
    if repeats:
        order = np.argsort(ids, kind="stable")
        again = order[1:][ids[order[1:]] == ids[order[:-1]]]
        row = int(again.min())
        earlier = int((ids == ids[row]).argmax())
        scan.findings.add(
            "id repeated",
            repeats,
            f"row {row} (byte {row * 4}): token id {ids[row]} is already in row {earlier}, expected distinct ids",
        )


def _scan_input_divisor(scan: Scan, values: npt.NDArray[np.float32]) -> None:
    if scan.shape:
        scan.findings.add("divisor shape", 1, f"an input scale divisor has shape [], this one has {list(scan.shape)}")
    illegal = ~((values > 0) & np.isfinite(values))
    if illegal.any():
        row = int(illegal.argmax())
        scan.findings.add(
            "divisor value",
            int(illegal.sum()),
            f"byte {row * 4}: input scale divisor {values[row]}, expected finite and greater than 0",
        )


def _scan_finite(scan: Scan, words: npt.NDArray[Any]) -> None:
    magnitude, infinity = (0x7FFF, 0x7F80) if scan.fmt.name == "BF16" else (0x7FFF_FFFF, 0x7F80_0000)
    size = scan.fmt.word_bytes
    for first in range(0, words.size, _WORDS_PER_TILE):
        bits = words[first : first + _WORDS_PER_TILE] & words.dtype.type(magnitude)
        if int(bits.max()) < infinity:
            continue
        bad = bits >= infinity
        at = first + int(bad.argmax())
        place = [int(i) for i in np.unravel_index(at, scan.shape)] if scan.shape else []
        word = f"{int(words[at]):#0{2 + 2 * size}x}"
        scan.findings.add(
            "finite",
            int(bad.sum()),
            f"index {place} (byte {at * size}): {scan.fmt.name} word {word} is NaN "
            "or infinite, expected finite weights",
        )


# --- grouped integers in row-split ----------------------------------------------------------------------------------


def _scan_grouped(scan: Scan) -> None:
    fmt, k = scan.fmt, scan.shape[1]
    geometry = row_split_planes(fmt.name, scan.shape)
    views = planes.plane_views(scan.data, geometry)
    matrix = _GroupedMatrix(scan, geometry.base_offset, geometry.high_offset, geometry.scale_offset, views)
    for gap in planes.plane_gaps(geometry):
        _scan_gap(scan, gap)
    logical = grouped.groups_of(k, fmt)
    for tile in grouped.tiles(geometry.n_rows, logical, fmt, _GROUPS_PER_TILE * fmt.group):
        _scan_scales(matrix, tile)
        _scan_codes_under_zero(matrix, tile)
        if fmt.bits == 8:
            _scan_minus_128(matrix, tile)
    if k % fmt.group:
        for tile in grouped.tiles(geometry.n_rows, 1, fmt, _GROUPS_PER_TILE * fmt.group):
            _scan_padding_lanes(matrix, tile.rows)
    if logical < geometry.groups_per_row:
        for tile in grouped.tiles(
            geometry.n_rows, geometry.groups_per_row - logical, fmt, _GROUPS_PER_TILE * fmt.group
        ):
            shifted = slice(logical + tile.groups.start, logical + tile.groups.stop)
            _scan_padding_groups(matrix, grouped.Tile(tile.rows, shifted))


@dataclass(frozen=True, slots=True)
class _GroupedMatrix:
    """Planes of one matrix, and where a group's bytes lie in the object."""

    scan: Scan
    base_offset: int
    high_offset: int
    scale_offset: int
    views: planes.PlaneViews

    @property
    def groups_per_row(self) -> int:
        return int(self.views.scales.shape[1])

    def scale_byte(self, row: int, group: int) -> int:
        return self.scale_offset + (row * self.groups_per_row + group) * 2

    def code_byte(self, row: int, group: int, lane: int) -> int:
        """Byte of the object that makes the code in ``lane`` nonzero: its base byte, else its high byte."""
        fmt = self.scan.fmt
        per_base, per_high = int(self.views.base.shape[2]), int(self.views.high.shape[2])
        index = row * self.groups_per_row + group
        code = int(self.codes(slice(row, row + 1), group)[0, lane])
        if fmt.bits == 8 or code & 15:
            return self.base_offset + index * per_base + lane * per_base // fmt.group
        return self.high_offset + index * per_high + lane * per_high // fmt.group

    def codes(self, rows: slice, group: int) -> npt.NDArray[np.int8]:
        """Codes int8 [rows, G] of one group column."""
        one = slice(group, group + 1)
        return planes.unpack_codes(self.views.base[rows, one], self.views.high[rows, one], self.scan.fmt)[:, 0]

    def nonzero(self, tile: grouped.Tile, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """For each group of the tile that ``chosen`` [rows, groups] marks, in C order: does it hold a nonzero code?"""
        found = _any_byte(self.views.base[tile], chosen)
        return found | _any_byte(self.views.high[tile], chosen) if self.views.high.shape[2] else found

    def first_nonzero(self, row: int, group: int) -> tuple[int, int]:
        """(column, byte of the object) of the first nonzero code of a group."""
        lane = int((self.codes(slice(row, row + 1), group)[0] != 0).argmax())
        return group * self.scan.fmt.group + lane, self.code_byte(row, group, lane)


def _scan_scales(matrix: _GroupedMatrix, tile: grouped.Tile) -> None:
    scales = matrix.views.scales[tile]
    if int(scales.max()) < grouped.SCALE_INFINITY:
        return
    illegal = scales >= grouped.SCALE_INFINITY
    row, group = _first_of(illegal, tile)
    matrix.scan.findings.add(
        "scale",
        int(illegal.sum()),
        f"row {row}, group {group} (byte {matrix.scale_byte(row, group)}): "
        f"{_describe_scale(int(matrix.views.scales[row, group]))}, expected 0x0000 to 0x7bff",
    )


def _describe_scale(word: int) -> str:
    magnitude = word & 0x7FFF
    kind = "NaN" if magnitude > 0x7C00 else "infinite" if magnitude == 0x7C00 else "negative"
    return f"scale word {word:#06x} is {'negative zero' if word == 0x8000 else kind}"


def _scan_codes_under_zero(matrix: _GroupedMatrix, tile: grouped.Tile) -> None:
    zero = matrix.views.scales[tile] == 0
    if not zero.any():
        return
    bad = np.zeros(zero.shape, bool)
    bad[zero] = matrix.nonzero(tile, zero)
    if not bad.any():
        return
    row, group = _first_of(bad, tile)
    column, byte = matrix.first_nonzero(row, group)
    matrix.scan.findings.add(
        "code under zero scale",
        int(bad.sum()),
        f"row {row}, group {group} has scale word 0x0000 but a nonzero code in column {column} (byte {byte}); "
        "expected zero codes",
    )


def _scan_minus_128(matrix: _GroupedMatrix, tile: grouped.Tile) -> None:
    codes = matrix.views.base[tile].view(np.int8)
    if int(codes.min()) > -128:
        return
    bad = codes == -128
    row, group, lane = (int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
    row, group = tile.rows.start + row, tile.groups.start + group
    matrix.scan.findings.add(
        "code -128",
        int(bad.sum()),
        f"row {row}, group {group} (byte {matrix.code_byte(row, group, lane)}): code byte 0x80 (-128), "
        "expected -127 to 127",
    )


def _scan_padding_lanes(matrix: _GroupedMatrix, rows: slice) -> None:
    k, size = matrix.scan.shape[1], matrix.scan.fmt.group
    group, first_lane = divmod(k, size)
    bad = matrix.codes(rows, group)[:, first_lane:] != 0
    if not bad.any():
        return
    row, lane = (int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
    row, lane = rows.start + row, first_lane + lane
    matrix.scan.findings.add(
        "padding lane",
        int(bad.sum()),
        f"row {row}, group {group} (byte {matrix.code_byte(row, group, lane)}): nonzero code in padding column "
        f"{group * size + lane}, beyond the {k} columns; expected 0",
    )


def _scan_padding_groups(matrix: _GroupedMatrix, tile: grouped.Tile) -> None:
    scaled = matrix.views.scales[tile] != 0
    if scaled.any():
        row, group = _first_of(scaled, tile)
        matrix.scan.findings.add(
            "padding scale",
            int(scaled.sum()),
            f"row {row}, group {group} (byte {matrix.scale_byte(row, group)}): scale word "
            f"{int(matrix.views.scales[row, group]):#06x} in a padding group, expected 0x0000",
        )
    bad = matrix.nonzero(tile, np.ones(scaled.shape, bool)).reshape(scaled.shape)
    if bad.any():
        row, group = _first_of(bad, tile)
        column, byte = matrix.first_nonzero(row, group)
        matrix.scan.findings.add(
            "padding group",
            int(bad.sum()),
            f"row {row}, group {group} (byte {byte}): nonzero code in padding column {column}, "
            f"beyond the {matrix.scan.shape[1]} columns; expected 0",
        )


def _scan_gap(scan: Scan, gap: slice) -> None:
    nonzero = scan.data[gap] != 0
    if nonzero.any():
        at = gap.start + int(nonzero.argmax())
        scan.findings.add(
            "plane gap",
            int(nonzero.sum()),
            f"byte {at}: {int(scan.data[at]):#04x} in the gap between planes, expected 0",
        )


def _any_byte(plane: Bytes, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """For each chosen group of ``plane`` [rows, groups, 8 * n]: is any byte nonzero? [count] in C order."""
    words = plane.view(np.uint64)[chosen]
    # Word columns are ORed one by one: numpy's reduction over an axis of 4 costs ten times as much.
    bits = words[:, 0].copy()
    for column in range(1, words.shape[1]):
        bits |= words[:, column]
    return np.not_equal(bits, 0)


def _first_of(mask: npt.NDArray[np.bool_], tile: grouped.Tile) -> tuple[int, int]:
    """(row, group) in the matrix of the first marked group of a tile."""
    row, group = np.unravel_index(int(mask.argmax()), mask.shape)
    return tile.rows.start + int(row), tile.groups.start + int(group)


# --- NVFP4 ----------------------------------------------------------------------------------------------------------


def _scan_nvfp4(scan: Scan) -> None:
    geometry = blockscale_planes(scan.shape)
    gap = slice(geometry.code_bytes, geometry.scale_offset)
    if gap.start < gap.stop:
        _scan_gap(scan, gap)
    stored = scan.data[geometry.scale_offset : geometry.divisor_offset]
    for first in range(0, stored.size, _WORDS_PER_TILE):
        scales = stored[first : first + _WORDS_PER_TILE]
        if int(scales.max()) <= nvfp4.MAX_SCALE:
            continue
        bad = scales > nvfp4.MAX_SCALE
        at = first + int(bad.argmax())
        row, group = blockscale.scale_place(at, scan.shape[1])
        word, byte = int(stored[at]), geometry.scale_offset + at
        kind = "NaN" if word & 0x7F == 0x7F else "negative"
        text = f"row {row}, group {group} (byte {byte}): block scale {word:#04x} is {kind}, expected 0x00 to 0x7e"
        scan.findings.add("block scale", int(bad.sum()), text)
    divisor = blockscale.plane_views(scan.data, scan.shape).divisor[0]
    if not nvfp4.legal_divisor(divisor):
        scan.findings.add(
            "divisor",
            1,
            f"byte {geometry.divisor_offset}: weight scale divisor {divisor}, expected finite and greater than 0",
        )


_RULES: Mapping[FormatKind, Callable[[Scan], None]] = MappingProxyType(
    {"direct": _scan_direct, "grouped": _scan_grouped, "nvfp4": _scan_nvfp4}
)
