"""``show``: totals that add up, bars that fit, and a treemap whose areas are bytes."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path

import pytest

from ninfer_format.directory import Directory, Identity
from ninfer_format.inventory import COMPONENTS, component_of
from ninfer_format.reader import Artifact
from ninfer_format.show import Overview, bar, human_bytes, overview, render, role_pattern
from ninfer_format.treemap import HEIGHT, WIDTH, Rect, html_page, squarify, svg
from tests.format.samples import GOLDEN, custom_inventory, ninfer_verify, packed, tensor, write_artifact, write_custom


@pytest.fixture(scope="module", params=["dense", "moe"])
def shown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Overview:
    planned, config = custom_inventory(request.param)
    path = write_custom(tmp_path_factory.mktemp("show") / "a.ninfer", planned.directory, config)
    with Artifact.open(path) as artifact:
        return overview(artifact)


def test_totals_add_up_to_the_file(shown: Overview) -> None:
    for shares in (shown.components, shown.formats, shown.roles):
        assert sum(share.n_bytes for share in shares) + shown.framing_bytes == shown.file_bytes
        assert sum(share.n_objects for share in shares) == len(shown.objects)
    order = [*COMPONENTS, "other"]
    assert [order.index(share.name) for share in shown.components] == sorted(
        order.index(share.name) for share in shown.components
    )
    for share in shown.components:
        assert share.n_bytes == sum(e.n_bytes for e in shown.objects if component_of(e.name) == share.name)


def test_roles_are_names_without_their_layer_number() -> None:
    assert role_pattern("text/layers/17/mlp/down") == "text/layers/*/mlp/down"
    assert role_pattern("text/output_head") == "text/output_head"
    assert role_pattern("mtp/layer/mlp/down") == "mtp/layer/mlp/down"


def test_json_lists_objects_only_when_asked(tmp_path: Path) -> None:
    path = GOLDEN / "tiny_v2.ninfer"
    document = ninfer_verify("show", "--json", path).json
    assert document["schema"] == "ninfer.show/1"
    assert document["identity"] == "test-model/test-weights"
    assert document["file_bytes"] == 12_548
    assert "objects" not in document
    assert sum(row["bytes"] for row in document["components"]) + document["header_and_padding_bytes"] == 12_548
    objects = ninfer_verify("show", "--json", "--objects", path).json["objects"]
    assert [entry["name"] for entry in objects][:2] == ["frontend/note.json", "text/layers/0/input_norm"]
    assert objects[-1]["bytes"] == 4612


def test_text_shows_every_component_and_format(shown: Overview) -> None:
    text = render(shown, width=100, ascii_only=False, with_objects=True)
    for share in shown.formats:
        assert share.name in text
    for entry in shown.objects:
        assert entry.name in text
    for title in ("text", "draft head", "MTP", "vision", "frontend", "model config", "header, padding"):
        assert re.search(rf"^  {title} ", text, re.MULTILINE)
    plain = render(shown, width=100, ascii_only=True, with_objects=False)
    assert plain.isascii()


@pytest.mark.parametrize("n, text", [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (17_495_365_888, "16.3 GiB")])
def test_byte_counts_for_people(n: int, text: str) -> None:
    assert human_bytes(n) == text


def test_bar_has_its_width_and_shows_the_smallest_share() -> None:
    for ascii_only in (False, True):
        assert bar(0.0, 20, ascii_only=ascii_only).strip() == ""
        assert bar(1e-9, 20, ascii_only=ascii_only).strip() != ""
        for fraction in (0.0, 1e-9, 0.33, 0.5, 0.999, 1.0):
            assert len(bar(fraction, 20, ascii_only=ascii_only)) == 20


# --- the treemap ----------------------------------------------------------------------------------------------------


def test_squarified_rectangles_tile_their_area_in_proportion(fresh_seed: int) -> None:
    rng = random.Random(fresh_seed)
    for n in (1, 2, 3, 7, 40, 300):
        values = sorted((rng.paretovariate(1.1) for _ in range(n)), reverse=True)
        area = Rect(3, 5, rng.uniform(10, 500), rng.uniform(10, 500))
        placed = squarify(values, area)
        scale = area.w * area.h / sum(values)
        for value, rect in zip(values, placed, strict=True):
            assert rect.w * rect.h == pytest.approx(value * scale, rel=1e-6)
            assert rect.x >= area.x - 1e-6
            assert rect.y >= area.y - 1e-6
            assert rect.x + rect.w <= area.x + area.w + 1e-6
            assert rect.y + rect.h <= area.y + area.h + 1e-6
        for a, b in combinations(placed[:40], 2):
            across = min(a.x + a.w, b.x + b.w) - max(a.x, b.x)
            down = min(a.y + a.h, b.y + b.h) - max(a.y, b.y)
            assert across < 1e-6 or down < 1e-6


def test_equal_values_come_out_nearly_square() -> None:
    for rect in squarify([1.0] * 60, Rect(0, 0, 600, 400)):
        assert 0.5 < rect.w / rect.h < 2


@pytest.mark.parametrize("values", [[], [0.0], [1.0, 0.0]])
def test_empty_and_zero_shares_do_not_fail(values: list[float]) -> None:
    assert len(squarify(values, Rect(0, 0, 10, 10))) == len(values)
    assert len(squarify(values, Rect(0, 0, 0, 10))) == len(values)


def rects(root: ElementTree.Element, kind: str) -> list[tuple[Rect, str]]:
    found = []
    for element in root.iter("rect"):
        if element.get("class", "").split()[0] == kind:
            numbers = (float(element.get(key, "nan")) for key in ("x", "y", "width", "height"))
            found.append((Rect(*numbers), element.findtext("title") or ""))
    return found


def test_picture_has_one_rectangle_with_a_hover_title_per_object(shown: Overview) -> None:
    root = ElementTree.fromstring(svg(shown))
    objects = rects(root, "object")
    assert len(objects) == len(shown.objects)
    titles = {title.split("\n")[0]: title for _, title in objects}
    assert set(titles) == {entry.name for entry in shown.objects}
    for entry in shown.objects:
        assert f"{entry.n_bytes:,} bytes" in titles[entry.name]
    for rect, _ in [*objects, *rects(root, "component")]:
        assert rect.w >= 0
        assert rect.h >= 0
        assert rect.x + rect.w <= WIDTH + 0.1
        assert rect.y + rect.h <= HEIGHT + 0.1
    assert len(rects(root, "component")) == len(shown.components)


def test_areas_inside_a_component_are_in_proportion_to_bytes(shown: Overview) -> None:
    by_name = {title.split("\n")[0]: rect for rect, title in rects(ElementTree.fromstring(svg(shown)), "object")}
    text = [entry for entry in shown.objects if component_of(entry.name) == "text" and entry.n_bytes > 20_000]
    ratios = [by_name[e.name].w * by_name[e.name].h / e.n_bytes for e in text]
    assert len(ratios) > 5
    assert max(ratios) / min(ratios) < 1.1


def test_labels_lie_inside_the_picture_and_are_whole_or_marked_as_cut(shown: Overview) -> None:
    labels = list(ElementTree.fromstring(svg(shown)).iter("text"))
    assert len(labels) > 10
    for label in labels:
        assert 0 <= float(label.get("x", "-1")) < WIDTH
        assert 0 < float(label.get("y", "-1")) <= HEIGHT
        assert label.text


def test_page_is_self_contained_and_has_a_dark_side(shown: Overview) -> None:
    page = html_page(shown)
    assert page.startswith("<!DOCTYPE html>")
    assert "prefers-color-scheme:dark" in page
    for forbidden in ("http:", "https:", "<script", "<link", "<img", "@import", "url("):
        assert forbidden not in page
    for share in (*shown.components, *shown.formats):
        assert f"{share.n_bytes:,}" in page


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    hostile = '</title><script>alert("x")</script>&amp;'
    directory = Directory(Identity("<b>m</b>", "w&w"), packed([tensor(hostile, (3,), "FP32", 0)]))
    path = write_artifact(tmp_path / "<i>a.ninfer", directory)
    out = tmp_path / "page.html"
    assert ninfer_verify("show", "--html", out, path).code == 0
    page = out.read_text(encoding="utf-8")
    assert "<script" not in page
    assert "<b>m" not in page
    assert "<i>a" not in page
    with Artifact.open(path) as artifact:
        ((_, title),) = rects(ElementTree.fromstring(svg(overview(artifact))), "object")
    assert title.startswith(hostile)


@pytest.mark.parametrize("name", ["malformed/ok-baseline", "tiny_v2", "malformed/ok-resource-unaligned"])
def test_tiny_files_have_a_picture_too(name: str, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert ninfer_verify("show", "--html", out, GOLDEN / f"{name}.ninfer").code == 0
    page = out.read_text(encoding="utf-8")
    ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    assert "nan" not in page
