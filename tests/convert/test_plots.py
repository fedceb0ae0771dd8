"""The pictures show the report's numbers; the page holds everything and loads nothing."""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from ninfer_convert import plots
from ninfer_convert.card import model_card
from ninfer_convert.manifest import ArtifactFacts
from ninfer_convert.plots import (
    bits_per_weight,
    check_folder,
    draw,
    error_by_layer,
    error_by_role,
    gain_by_role,
    size_by_component,
)
from ninfer_convert.summaries import role_summaries, stored_tensors
from ninfer_format import UsageError
from tests.convert.published import built, planned_report
from tests.convert.test_convert_cli import MAIN, ROOT, document, run
from tests.convert.tiny import TinyCheckpoint

PICTURES = ("error-by-layer.png", "error-by-role.png", "bits-per-weight.png", "size-by-component.png")


def figure(make: Any, report: dict[str, Any]) -> Figure:
    tensors = stored_tensors(report)
    made = make(report, tensors, role_summaries(tensors))
    assert isinstance(made, Figure)
    return made


def bars(axes: Any) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def labels(axes: Any, side: str) -> list[str]:
    return [tick.get_text() for tick in getattr(axes, f"get_{side}ticklabels")()]


class Page(HTMLParser):
    """What a page refers to and how it is built."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.references: list[str] = []
        self.counts: dict[str, int] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag == "img":
            self.images.append(dict(attributes))
        self.references += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "action")]


def test_files_are_four_pictures_and_a_page_that_holds_them(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    report = built(tiny.folder, tmp_path / "x.ninfer")
    folder = tmp_path / "plots"
    files = draw(report, folder)
    assert [path.name for path in files] == [*PICTURES, "index.html"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in files)
    page = Page((folder / "index.html").read_text())
    assert len(page.images) == len(PICTURES)
    for file, image in zip(PICTURES, page.images, strict=True):
        assert image["alt"]
        kind, _, content = (image["src"] or "").partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(content) == (folder / file).read_bytes()
        with Image.open(folder / file) as opened:
            assert opened.width >= 1500
            assert len(opened.convert("RGB").getcolors(1 << 24) or ()) > 50
    assert all(reference.startswith("data:image/png") for reference in page.references)
    assert not {"script", "link", "iframe"} & page.counts.keys()
    assert page.counts["tr"] == 1 + len(role_summaries(stored_tensors(report)))
    assert not re.search(r"url\(|@import|https?:", re.sub(r"data:[^\"]*", "", (folder / "index.html").read_text()))


def test_drawing_again_replaces_the_files_with_the_same(dense: TinyCheckpoint, tmp_path: Path) -> None:
    report = built(dense.folder, tmp_path / "x.ninfer")
    files = draw(report, tmp_path)
    before = [path.read_bytes() for path in files]
    assert [path.read_bytes() for path in draw(report, tmp_path)] == before


def test_maps_hold_every_error_at_its_layer(dense: TinyCheckpoint, tmp_path: Path) -> None:
    report = built(dense.folder, tmp_path / "x.ninfer")
    errors = {record["name"]: record["error"]["relative"] for record in report["objects"] if "error" in record}
    decoder, vision = figure(error_by_layer, report).axes[:2]
    for axes, tower in ((decoder, "text"), (vision, "vision")):
        shown = axes.images[0].get_array()
        assert shown is not None
        values = np.ma.filled(shown.astype(float), np.nan)
        for row, role in enumerate(labels(axes, "y")):
            for layer in range(values.shape[1]):
                expected = errors.get(f"{tower}/layers/{layer}/{role}", np.nan)
                assert values[row, layer] == pytest.approx(expected, nan_ok=True)
    assert labels(decoder, "y")[0] == "attention/query_key"
    texts = {text.get_text() for text in decoder.texts}
    assert f"{errors['text/layers/1/mlp/down']:.3g}" in texts


def test_exact_layers_are_marked_apart_from_absent_ones() -> None:
    axes = figure(error_by_layer, planned_report("qwen3.6-27b/nvfp4")).axes[0]
    marks = [text.get_position() for text in axes.texts if text.get_text() == "="]
    rows = labels(axes, "y")
    assert [(rows[int(y)], int(x)) for x, y in marks] == [
        *(("attention/query_key_gate_value", layer) for layer in (3, 7, 11, 15, 19, 23)),
        ("attention/output", 3), ("attention/output", 7), ("gdn/output", 4),
    ]  # fmt: skip


def test_bars_have_the_lengths_of_the_figures() -> None:
    report = planned_report("qwen3.6-35b-a3b/groupwise-int")
    tensors = stored_tensors(report)
    summaries = {role.role: role for role in role_summaries(tensors)}
    axes = figure(error_by_role, report).axes[0]
    assert labels(axes, "y") == list(summaries)
    assert [bar.get_width() for bar in bars(axes)] == pytest.approx([role.relative for role in summaries.values()])
    bits = figure(bits_per_weight, report).axes[0]
    names = labels(bits, "y")
    widths = dict.fromkeys(names, 0.0)
    for bar in bars(bits):
        widths[names[round(bar.get_y() + bar.get_height() / 2)]] += bar.get_width()
    for name, width in widths.items():
        own = [t for t in tensors if t.role == name]
        assert width == pytest.approx(8 * sum(t.n_bytes for t in own) / sum(t.n_values for t in own))
    assert widths["text/layers/*/moe/routed_down"] == pytest.approx(5.25 + 3 / 40)
    size = figure(size_by_component, report).axes[0]
    total = sum(bar.get_width() for bar in bars(size)) * 2**30
    assert total == pytest.approx(sum(record["bytes"] for record in report["objects"]))
    assert labels(size, "y") == ["frontend", "text", "draft head", "MTP", "vision", "DFlash"]


def test_gains_of_a_search_are_drawn_and_told(dense: TinyCheckpoint, tmp_path: Path) -> None:
    report = built(dense.folder, tmp_path / "x.ninfer", method="mse")
    files = draw(report, tmp_path / "plots")
    assert "gain-by-role.png" in [path.name for path in files]
    gains = {o["name"]: o["error"]["removed"] for o in report["objects"] if "error" in o}
    axes = figure(gain_by_role, report).axes[0]
    shown = dict(zip(labels(axes, "y"), (bar.get_width() for bar in bars(axes)), strict=True))
    down = [gains[f"text/layers/{layer}/mlp/down"] for layer in range(4)]
    assert shown["text/layers/*/mlp/down"] == pytest.approx(100 * sum(down) / 4)
    assert shown["mtp/input_projection"] == pytest.approx(100 * gains["mtp/input_projection"])
    card = model_card(report, ArtifactFacts("x.ninfer", 1, "0" * 64, 1, None))
    assert f"| {gains['mtp/input_projection']:.1%} |" in card
    assert "searching scales removed" in card


def test_an_exact_artifact_has_no_error_pictures(dense: TinyCheckpoint, tmp_path: Path) -> None:
    files = draw(built(dense.folder, tmp_path / "x.ninfer", recipe="bf16"), tmp_path / "plots")
    assert [path.name for path in files] == [*PICTURES[2:], "index.html"]
    text = (tmp_path / "plots" / "index.html").read_text()
    assert "exact copy of the source" in text
    assert "Numbers" not in text


def test_names_in_the_page_are_escaped(dense: TinyCheckpoint, tmp_path: Path) -> None:
    report = built(dense.folder, tmp_path / "x.ninfer")
    report["source"]["name"] = "<script>alert(1)</script>&"
    draw(report, tmp_path / "plots")
    text = (tmp_path / "plots" / "index.html").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text


# --- the option -------------------------------------------------------------------------------------------------------


def test_build_and_publish_draw_on_request(dense: TinyCheckpoint, tmp_path: Path) -> None:
    out, folder = tmp_path / "x.ninfer", tmp_path / "plots"
    built_now = run("build", dense.folder, out, "--plots", folder, "--json")
    assert built_now.returncode == 0, built_now.stderr
    expected = [str(folder / name) for name in (*PICTURES, "index.html")]
    assert document(built_now)["side_files"] == expected
    published = run("publish", out, "--plots", tmp_path / "more", "--json")
    assert published.returncode == 0, published.stderr
    for path in expected:
        assert (tmp_path / "more" / Path(path).name).read_bytes() == Path(path).read_bytes()


def test_what_cannot_be_drawn_is_refused_before_the_build(dense: TinyCheckpoint, tmp_path: Path) -> None:
    out = tmp_path / "x.ninfer"
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "absent" / "plots"):
        with pytest.raises(UsageError, match="expected a folder"):
            check_folder(folder)
        assert run("build", dense.folder, out, "--plots", folder).returncode == 2
    inside = run("build", dense.folder, out, "--plots", dense.folder / "plots")
    assert inside.returncode == 2
    assert "inside the source" in inside.stderr
    without = run(
        "build",
        dense.folder,
        out,
        "--plots",
        tmp_path / "p",
        program=f"import sys; sys.modules['matplotlib'] = None\n{MAIN}",
    )
    assert without.returncode == 2
    assert "pip install 'ninfer[plots]'" in without.stderr
    assert not out.exists()
    assert not (tmp_path / "p").exists()


def test_matplotlib_is_loaded_only_to_draw() -> None:
    program = f"import sys, ninfer_convert.commands.build, {plots.__name__}; print('matplotlib' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"


def test_pictures_are_readable_at_published_size() -> None:
    content = plots._png(figure(error_by_layer, planned_report("qwen3.6-35b-a3b/groupwise-int")))
    with Image.open(io.BytesIO(content)) as opened:
        assert opened.width == 1650
        assert 900 < opened.height < 2000
