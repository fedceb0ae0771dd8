"""A treemap of an artifact as one self-contained HTML page: area is bytes, colour is the format.

Three levels: component, layer (or the objects outside layers), object. Rectangles are squarified (Bruls, Huizing and
van Wijk, "Squarified treemaps", 2000). The page has no script and loads nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import TypeVar

from ninfer_format.directory import Entry, TensorEntry
from ninfer_format.inventory import component_of
from ninfer_format.show import LARGEST_ROLES, TITLES, Overview, Share, format_of, human_bytes

WIDTH, HEIGHT = 1200.0, 720.0
_HEAD = 18.0  # height of a component's title strip
_LETTER = 6.2  # average width of a letter at the label size, in the units of the picture

# One hue per format, readable under dark text in light mode and under light text in dark mode.
_COLOURS = {
    "Q4G64_F16S": ("#8fc1e8", "#2b5f8a"),
    "Q5G64_F16S": ("#9ad8c4", "#22705a"),
    "Q6G64_F16S": ("#c9dc94", "#5d7222"),
    "W8G32_F16S": ("#f3d48a", "#7f6118"),
    "NVFP4": ("#d7b3e6", "#6b3f82"),
    "BF16": ("#f2b39c", "#8a452b"),
    "FP32": ("#f0a7bd", "#8a2f50"),
    "I32": ("#c3c9d4", "#4c566a"),
    "raw-bytes-v1": ("#d8d2c4", "#5f5848"),
}
_OTHER = ("#cccccc", "#555555")


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle of the picture: left, top, width, height."""

    x: float
    y: float
    w: float
    h: float


def squarify(values: Sequence[float], area: Rect) -> list[Rect]:
    """Rectangles with areas proportional to ``values`` (descending, positive) that tile ``area``, near to squares."""
    total = sum(values)
    if not values or total <= 0 or area.w <= 0 or area.h <= 0:
        return [Rect(area.x, area.y, 0.0, 0.0) for _ in values]
    scale = area.w * area.h / total
    sizes = [value * scale for value in values]
    placed: list[Rect] = []
    free, start = area, 0
    while start < len(sizes):
        side = min(free.w, free.h)
        stop, sum_row = start + 1, sizes[start]
        worst = _worst(sizes[start], sizes[start], sum_row, side)
        while stop < len(sizes):
            longer = sum_row + sizes[stop]
            candidate = _worst(sizes[start], sizes[stop], longer, side)
            if candidate > worst:
                break
            stop, sum_row, worst = stop + 1, longer, candidate
        row, free = _lay_row(sizes[start:stop], sum_row, free)
        placed += row
        start = stop
    return placed


def _worst(largest: float, smallest: float, total: float, side: float) -> float:
    """Worst aspect ratio in a row of areas with this sum along ``side``."""
    if side <= 0 or smallest <= 0:
        return float("inf")
    thickness = total / side
    return max(thickness * thickness / smallest, largest / (thickness * thickness))


def _lay_row(sizes: Sequence[float], total: float, free: Rect) -> tuple[list[Rect], Rect]:
    """One row along the shorter side of ``free``, and what is left of it (never negative, whatever is rounded)."""
    upright = free.w >= free.h
    side, depth = (free.h, free.w) if upright else (free.w, free.h)
    thickness = min(total / side, depth) if side > 0 else 0.0
    row: list[Rect] = []
    at = free.y if upright else free.x
    for size in sizes:
        length = side * size / total if total > 0 else 0.0
        row.append(Rect(free.x, at, thickness, length) if upright else Rect(at, free.y, length, thickness))
        at += length
    if upright:
        return row, Rect(free.x + thickness, free.y, free.w - thickness, free.h)
    return row, Rect(free.x, free.y + thickness, free.w, free.h - thickness)


T = TypeVar("T")


def _tiled(items: Iterable[T], size: Callable[[T], int], area: Rect) -> list[tuple[T, Rect]]:
    ordered = sorted(items, key=lambda item: -size(item))
    return list(zip(ordered, squarify([float(size(item)) for item in ordered], area), strict=True))


def _layer(entry: Entry) -> str:
    """Group of an object inside its component: its layer number, or the object itself."""
    parts = entry.name.split("/")
    return parts[2] if len(parts) > 3 and parts[1] == "layers" else entry.name


def _total(objects: Iterable[Entry]) -> int:
    return sum(entry.n_bytes for entry in objects)


def _label(spellings: Sequence[str], area: Rect, *, y: float = 12.0, kind: str = "object") -> str:
    """The first (longest) spelling that fits, the last one cut short, or nothing where not even four letters fit."""
    letters = int((area.w - 6) / _LETTER)
    if area.h < 14 or letters < 4:
        return ""
    fitting = next((text for text in spellings if len(text) <= letters), None)
    shown = fitting if fitting is not None else spellings[-1][: letters - 1] + "…"
    return f'<text class="{kind}" x="{area.x + 3:.1f}" y="{area.y + y:.1f}">{escape(shown)}</text>'


def _spellings(entry: Entry, layer: str | None) -> list[str]:
    """Ever shorter names for one cell; the largest cell of a layer also carries its number."""
    parts = entry.name.split("/")[1:] or [entry.name]
    if layer is not None:
        parts = parts[2:]
        return [f"{layer} · {'/'.join(parts)}", f"{layer} · {parts[-1]}", layer]
    return ["/".join(parts[i:]) for i in range(len(parts))]


def _box(area: Rect, kind: str, title: str) -> str:
    shape = f'x="{area.x:.2f}" y="{area.y:.2f}" width="{area.w:.2f}" height="{area.h:.2f}"'
    return f'<rect class="{kind}" {shape}><title>{escape(title)}</title></rect>'


def _describe(entry: Entry, file_bytes: int) -> str:
    shape = " " + "×".join(map(str, entry.shape)) if isinstance(entry, TensorEntry) and entry.shape else ""
    share = 100 * entry.n_bytes / file_bytes
    size = f"{entry.n_bytes:,} bytes ({human_bytes(entry.n_bytes)}, {share:.2f} %)"
    return f"{entry.name}\n{format_of(entry)}{shape}\n{size}"


def _format_class(name: str) -> str:
    return f"f{list(_COLOURS).index(name)}" if name in _COLOURS else "fx"


def svg(shown: Overview) -> str:
    """The treemap as an inline SVG element with a hover title on every rectangle."""
    by_component: dict[str, list[Entry]] = {}
    for entry in shown.objects:
        by_component.setdefault(component_of(entry.name), []).append(entry)
    parts: list[str] = []
    for (component, objects), area in _tiled(
        by_component.items(), lambda item: _total(item[1]), Rect(0, 0, WIDTH, HEIGHT)
    ):
        n_bytes = _total(objects)
        title = TITLES.get(component, component)
        sized = f"{title} · {human_bytes(n_bytes)}"
        parts.append(_box(area, "component", f"{sized}\n{len(objects)} objects, {n_bytes:,} bytes"))
        head = _HEAD if area.h > 3 * _HEAD and area.w > 40 else 0.0
        if head:
            parts.append(_label([sized, title], area, y=13, kind="head"))
        edge = min(1.0, area.w / 4, area.h / 4)
        top = head or edge
        inner = Rect(area.x + edge, area.y + top, area.w - 2 * edge, area.h - top - edge)
        layers = [list(group) for _, group in groupby(objects, key=_layer)]
        for members, box in _tiled(layers, _total, inner):
            for position, (entry, cell) in enumerate(_tiled(members, lambda entry: entry.n_bytes, box)):
                kind = f"object {_format_class(format_of(entry))}"
                parts.append(_box(cell, kind, _describe(entry, shown.file_bytes)))
                in_layer = _layer(entry) != entry.name
                names = _spellings(entry, _layer(entry) if in_layer and position == 0 else None)
                parts.append(_label(names[2:] if in_layer and position else names, cell))
            if len(members) > 1:
                parts.append(
                    f'<rect class="layer" x="{box.x:.2f}" y="{box.y:.2f}" width="{box.w:.2f}" height="{box.h:.2f}"/>'
                )
    label = f"Treemap of {shown.identity}: area is bytes"
    body = "\n".join(part for part in parts if part)
    return f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{escape(label)}">\n{body}\n</svg>'


def _rows(shares: Iterable[Share], total: int, *, swatches: bool) -> str:
    rows = []
    for share in shares:
        swatch = f'<span class="swatch {_format_class(share.name)}"></span>' if swatches else ""
        name = escape(TITLES.get(share.name, share.name))
        rows.append(
            f"<tr><td>{swatch}{name}</td><td>{share.n_objects}</td><td>{share.n_bytes:,}</td>"
            f"<td>{100 * share.n_bytes / total:.2f} %</td></tr>"
        )
    return "\n".join(rows)


def _style() -> str:
    light = "".join(f".f{i}{{--c:{pair[0]}}}" for i, pair in enumerate(_COLOURS.values()))
    dark = "".join(f".f{i}{{--c:{pair[1]}}}" for i, pair in enumerate(_COLOURS.values()))
    return f"""
:root{{color-scheme:light dark;--bg:#fbfbf9;--ink:#1d2126;--soft:#5c646e;--line:#fbfbf9;--frame:#30363d}}
.fx{{--c:{_OTHER[0]}}}{light}
@media (prefers-color-scheme:dark){{
:root{{--bg:#14171b;--ink:#e8eaed;--soft:#a3abb5;--line:#14171b;--frame:#c8ced6}}
.fx{{--c:{_OTHER[1]}}}{dark}}}
body{{margin:2rem auto;max-width:75rem;padding:0 1rem;background:var(--bg);color:var(--ink);
font:15px/1.45 system-ui,sans-serif}}
h1{{font-size:1.3rem;margin:0}}p{{color:var(--soft);margin:.2rem 0 1rem}}
svg{{width:100%;height:auto;display:block;border:1px solid var(--frame)}}
svg text{{font:10.5px system-ui,sans-serif;fill:var(--ink);pointer-events:none}}svg text.head{{font-weight:600}}
rect.component{{fill:var(--bg);stroke:var(--frame);stroke-width:1}}
rect.object{{fill:var(--c);stroke:var(--line);stroke-width:.4}}rect.object:hover{{stroke:var(--ink);stroke-width:1.5}}
rect.layer{{fill:none;stroke:var(--frame);stroke-width:.7;pointer-events:none}}
.tables{{display:flex;flex-wrap:wrap;align-items:flex-start;gap:2.5rem;margin-top:1.2rem}}
table{{border-collapse:collapse}}th,td{{padding:.15rem .7rem .15rem 0;text-align:left}}
td+td,th+th{{text-align:right;font-variant-numeric:tabular-nums}}th{{color:var(--soft);font-weight:500}}
.swatch{{display:inline-block;width:.8em;height:.8em;margin-right:.5em;background:var(--c)}}
"""


def html_page(shown: Overview) -> str:
    """The whole page: title, picture, tables by component and by format (which is also the legend)."""
    total = shown.file_bytes
    rest = Share("header, padding", 0, shown.framing_bytes)
    head = "<tr><th>{}</th><th>objects</th><th>bytes</th><th>of the file</th></tr>"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{escape(str(shown.identity))}</title>
<style>{_style()}</style>
</head>
<body>
<h1>{escape(str(shown.identity))}</h1>
<p>{escape(ascii(shown.path.name)[1:-1])} · {total:,} bytes ({human_bytes(total)}) · {len(shown.objects)} objects.
Area is bytes, colour is the format; point at a rectangle for its name, shape and size.</p>
{svg(shown)}
<div class="tables">
<table>{head.format("component")}
{_rows((*shown.components, rest), total, swatches=False)}
</table>
<table>{head.format("format")}
{_rows(shown.formats, total, swatches=True)}
</table>
<table>{head.format("role")}
{_rows(shown.roles[:LARGEST_ROLES], total, swatches=False)}
</table>
</div>
</body>
</html>
"""
