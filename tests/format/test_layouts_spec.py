"""The vector blocks and tables of specs/layouts.md and specs/formats.md are executed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_format.codec import encode_tensor, pack_tensor, unpack_tensor
from ninfer_format.formats import LAYOUTS, NUMERIC_FORMATS, encoded_size, layout_for, row_split_planes
from ninfer_format.layouts.contiguous import STORED
from ninfer_format.layouts.planes import plane_views

SPECS = Path(__file__).parents[2] / "specs"
LAYOUTS_PAGE = (SPECS / "layouts.md").read_text(encoding="utf-8")
FORMATS_PAGE = (SPECS / "formats.md").read_text(encoding="utf-8")
NVFP4_PLACE = re.compile(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)


def blocks() -> list[dict[str, Any]]:
    """Each ``vector`` block as {key: words of the line}; ``byte`` lines collect under one key."""
    found = []
    for text in re.findall(r"```vector\n(.*?)```", LAYOUTS_PAGE, re.DOTALL):
        block: dict[str, Any] = {"byte": []}
        for line in text.splitlines():
            key, *words = line.split()
            if key == "byte":
                block["byte"].append(words)
            else:
                block[key] = words
        found.append(block)
    return found


def blocks_of(kind: str) -> list[dict[str, Any]]:
    return [block for block in blocks() if NUMERIC_FORMATS[block["format"][0]].kind == kind]


def shape_of(block: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(d) for d in block["shape"])


def test_page_has_an_example_of_every_format() -> None:
    assert {block["format"][0] for block in blocks()} == set(NUMERIC_FORMATS)


@pytest.mark.parametrize("block", blocks_of("direct"))
def test_direct_example(block: dict[str, Any]) -> None:
    name = block["format"][0]
    width = STORED[name].itemsize
    words = np.array([int(word, 16) for word in block["words"]], f"u{width}").reshape(shape_of(block))
    payload = pack_tensor(words, None, None, name, layout_for(name))
    assert payload == bytes.fromhex("".join(block["payload"]))


@pytest.mark.parametrize("block", blocks_of("grouped"))
def test_row_split_example(block: dict[str, Any]) -> None:
    name, shape = block["format"][0], shape_of(block)
    values = np.zeros(shape, np.float32)
    values[0, : len(block["row"])] = [float(value) for value in block["row"]]
    payload = encode_tensor(values, name, layout_for(name))
    geometry = row_split_planes(name, shape)
    views = plane_views(np.frombuffer(payload, np.uint8), geometry)
    codes = [int(code) for code in block["codes"]]
    stored = unpack_tensor(payload, name, layout_for(name), shape).codes
    assert stored[0, : len(codes)].tolist() == codes
    assert not stored[0, len(codes) :].any()
    assert [f"{word:04x}" for word in views.scales[0]] == block["scales"]
    for plane in ("base", "high"):
        expected = bytes.fromhex("".join(block.get(plane, [])))
        assert getattr(views, plane)[0].tobytes()[: len(expected)] == expected
    assert [geometry.base_offset, geometry.high_offset, geometry.scale_offset] == [int(o) for o in block["offsets"]]
    assert len(payload) == int(block["bytes"][0])


@pytest.mark.parametrize("block", blocks_of("nvfp4"))
def test_blockscale_example(block: dict[str, Any]) -> None:
    n, k = shape_of(block)
    codes = np.zeros((n, k // 2), np.uint8)
    scales = np.zeros((n, k // 16), np.uint8)
    first = bytes.fromhex("".join(block["codes"]))
    codes.reshape(-1)[: len(first)] = list(first)
    row, group, word = block["scale"]
    scales[int(row), int(group)] = int(word, 16)
    divisor = np.array([int(block["divisor"][0], 16)], np.uint32).view(np.float32)[0]
    payload = pack_tensor(codes, scales, divisor, "NVFP4", layout_for("NVFP4"))
    assert len(payload) == int(block["bytes"][0])
    for at, content in block["byte"]:
        assert payload[int(at)] == int(content, 16), f"byte {at}"


def test_scale_position_table() -> None:
    rows = [tuple(int(cell) for cell in row) for row in NVFP4_PLACE.findall(LAYOUTS_PAGE)]
    assert len(rows) == 11
    for n, g, k, position in rows:
        scales = np.zeros(((n // 128 + 1) * 128, k // 16), np.uint8)
        scales[n, g] = 1
        codes = np.zeros((scales.shape[0], k // 2), np.uint8)
        payload = pack_tensor(codes, scales, np.float32(1), "NVFP4", layout_for("NVFP4"))
        assert payload.index(1, codes.size) == codes.size + position


def test_size_table() -> None:
    rows = re.findall(r"^\| ([A-Z0-9_]+) \| ([\d ]+) \| (\d+) \|$", LAYOUTS_PAGE, re.MULTILINE)
    assert len(rows) == 8
    for name, shape, size in rows:
        assert encoded_size(name, layout_for(name), [int(d) for d in shape.split()]) == int(size)


def test_layout_table_lists_exactly_the_registered_layouts() -> None:
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| ([A-Z0-9_, ]+?) \| ([\w ]+).*\| (\d+) \|$", LAYOUTS_PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == list(LAYOUTS)
    for name, formats, rank, alignment in rows:
        layout = LAYOUTS[name]
        ranks = [int(word) for word in rank.split() if word.isdigit()]
        assert (tuple(formats.split(", ")), ranks[0], ranks[-1], int(alignment)) == (
            layout.formats, layout.min_rank, layout.max_rank, layout.alignment,
        )  # fmt: skip


def test_format_table_lists_exactly_the_registered_formats() -> None:
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \| (\w+) \| (\d+)-bit .*? \| (.*?) \| (\d*) ?\|", FORMATS_PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == list(NUMERIC_FORMATS)
    for name, kind, bits, codes, group in rows:
        fmt = NUMERIC_FORMATS[name]
        assert (fmt.kind, fmt.bits, fmt.group) == (kind, int(bits), int(group or 0))
        if kind == "grouped":
            assert codes == f"{fmt.qmin} to {fmt.qmax}"
