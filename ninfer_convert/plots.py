"""Pictures of a conversion: error by layer and role, bits per weight, size by component; PNG files and one HTML page.

matplotlib comes with the extra ``plots`` and is imported when something is drawn.
"""

import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ninfer_convert.plots_page import Picture, page
from ninfer_convert.summaries import (
    Report,
    RoleSummary,
    StoredTensor,
    in_order,
    role_summaries,
    stored_tensors,
    total_bits_per_weight,
)
from ninfer_format.command import require_extra
from ninfer_format.errors import UsageError
from ninfer_format.inventory import COMPONENTS, component_of
from ninfer_format.show import TITLES, human_bytes
from ninfer_format.writer import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE = "index.html"
DPI = 150
WIDTH = 11.0
"""Inches."""

# Okabe and Ito's palette, which people with any kind of colour vision can tell apart.
COLOURS: Mapping[str, str] = {
    "NVFP4": "#cc79a7",
    "Q4G64_F16S": "#0072b2",
    "Q5G64_F16S": "#56b4e9",
    "Q6G64_F16S": "#009e73",
    "W8G32_F16S": "#e69f00",
    "BF16": "#d55e00",
    "FP32": "#8a5a2b",
    "I32": "#5f6b7a",
    "files": "#b8b4a8",
}
_INK, _MUTED, _ABSENT = "#1f2933", "#6b7785", "#eceff2"
_MAP = "YlGnBu"
_ANNOTATED_LAYERS = 10
_TICKS = [round(digit * 10.0**power, 6) for power in range(-5, 1) for digit in (1, 2, 3, 5, 7)]
_TOWERS = (("text/layers/*/", "decoder"), ("vision/layers/*/", "vision tower"), ("dflash/layers/*/", "DFlash"))


def check_folder(folder: Path) -> None:
    """Before a long build: matplotlib is there, and ``folder`` is one or can be made."""
    require_extra("matplotlib", "plots")
    if not folder.is_dir() and (folder.exists() or not folder.parent.is_dir()):
        raise UsageError(f"--plots {folder}: expected a folder, or a new name in a folder that exists")


def draw(report: Report, folder: Path) -> tuple[Path, ...]:
    """Draw the report into ``folder`` (made if it is missing); the files written, the page last."""
    check_folder(folder)
    folder.mkdir(exist_ok=True)
    tensors = stored_tensors(report)
    roles = role_summaries(tensors)
    pictures = []
    for name, title, make in _FIGURES:
        if (figure := make(report, tensors, roles)) is not None:
            pictures.append(Picture(f"{name}.png", title, _png(figure)))
    for picture in pictures:
        write_atomically(folder / picture.file, picture.png)
    write_atomically(folder / PAGE, page(report, tensors, roles, pictures).encode("utf-8", "backslashreplace"))
    return (*(folder / picture.file for picture in pictures), folder / PAGE)


# --- pictures ---------------------------------------------------------------------------------------------------------


def _figure(height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained", facecolor="white")


def _png(figure: "Figure") -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _quiet_axes(axes: "Axes", *, keep: Sequence[str] = ()) -> None:
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)
        spine.set_color(_MUTED)
    axes.tick_params(length=0, colors=_INK, labelsize=9)


def _title(axes: "Axes", text: str, note: str = "") -> None:
    axes.set_title(text, loc="left", fontsize=12, color=_INK, fontweight="bold", pad=22 if note else 10)
    if note:
        axes.annotate(
            note, (0, 1), (0, 7), "axes fraction", textcoords="offset points", fontsize=9, color=_MUTED, va="bottom"
        )


def _short(role: str) -> str:
    """A role without what its picture says already."""
    for prefix, _ in _TOWERS:
        role = role.removeprefix(prefix)
    return role


def error_by_layer(report: Report, tensors: Sequence[StoredTensor], roles: Sequence[RoleSummary]) -> "Figure | None":
    """One map per tower, role by layer, all with one logarithmic colour scale; None if nothing has an error."""
    from matplotlib.colors import LogNorm

    towers = [t for prefix, title in _TOWERS if (t := _tower(prefix, title, tensors, roles)) is not None]
    values = np.concatenate([tower.values[tower.values > 0] for tower in towers]) if towers else np.empty(0)
    if not values.size:
        return None
    low, high = float(values.min()), float(values.max())
    norm = LogNorm(low / 1.05, high * 1.05)
    heights = [0.3 * len(tower.roles) + 1.0 for tower in towers]
    figure = _figure(sum(heights) + 0.4)
    grid = figure.add_gridspec(len(towers), 1, height_ratios=heights)
    axes_of = [figure.add_subplot(grid[i]) for i in range(len(towers))]
    image = None
    for axes, tower in zip(axes_of, towers, strict=True):
        image = _draw_tower(axes, tower, norm)
    assert image is not None
    bar = figure.colorbar(image, ax=axes_of, fraction=0.03, pad=0.015, aspect=28)
    bar.set_label("relative error", fontsize=9, color=_INK)
    ticks = [t for t in _TICKS if low / 1.05 <= t <= high * 1.05]
    bar.set_ticks(ticks, labels=[f"{t:g}" for t in ticks])
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=9, length=0)
    bar.outline.set_visible(False)
    return figure


class _Tower:
    """The errors of one layer stack: values [roles, layers], NaN where there is no object, 0 for exact copies."""

    def __init__(self, title: str, roles: Sequence[str], n_layers: int) -> None:
        self.title, self.roles = title, list(roles)
        self.values = np.full((len(roles), n_layers), np.nan)


def _tower(prefix: str, title: str, tensors: Sequence[StoredTensor], roles: Sequence[RoleSummary]) -> _Tower | None:
    shown = [summary.role for summary in roles if summary.role.startswith(prefix)]
    own = [tensor for tensor in tensors if tensor.role.startswith(prefix) and tensor.layer is not None]
    if not shown:
        return None
    tower = _Tower(title, shown, 1 + max(tensor.layer or 0 for tensor in own))
    for tensor in own:
        if tensor.role in shown:
            row, column = shown.index(tensor.role), tensor.layer or 0
            tower.values[row, column] = 0.0 if tensor.error is None else tensor.error["relative"]
    return tower


def _draw_tower(axes: "Axes", tower: _Tower, norm: Any) -> Any:
    from matplotlib.patches import Rectangle

    n_roles, n_layers = tower.values.shape
    axes.set_facecolor(_ABSENT)
    shown = np.ma.masked_where(~(tower.values > 0), tower.values)
    image = axes.imshow(shown, aspect="auto", cmap=_MAP, norm=norm, interpolation="nearest")
    for row, column in zip(*np.nonzero(tower.values == 0), strict=True):
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor="white"))
        axes.text(column, row, "=", ha="center", va="center", fontsize=8, color=_INK)
    if n_layers <= _ANNOTATED_LAYERS:
        for row, column in zip(*np.nonzero(tower.values > 0), strict=True):
            value = tower.values[row, column]
            ink = "white" if norm(value) > 0.6 else _INK
            axes.text(column, row, f"{value:.3g}", ha="center", va="center", fontsize=8, color=ink)
    axes.set_yticks(range(n_roles), [_short(role) for role in tower.roles])
    step = 1 if n_layers <= 16 else 2 if n_layers <= 32 else 4
    axes.set_xticks(range(0, n_layers, step))
    axes.set_xticks(np.arange(-0.5, n_layers), minor=True)
    axes.set_yticks(np.arange(-0.5, n_roles), minor=True)
    axes.grid(which="minor", color="white", linewidth=1.2 if n_layers <= 32 else 0.6)
    _quiet_axes(axes)
    axes.tick_params(which="minor", length=0)
    absent, exact = bool(np.isnan(tower.values).any()), bool((tower.values == 0).any())
    legend = [word for word, there in (("grey: not on this layer", absent), ("=: exact copy", exact)) if there]
    _title(axes, f"Error by layer, {tower.title}", "   ".join(["norm of the change over norm of the weights", *legend]))
    axes.set_xlabel("layer", fontsize=9, color=_INK)
    return image


def error_by_role(report: Report, tensors: Sequence[StoredTensor], roles: Sequence[RoleSummary]) -> "Figure | None":
    """A bar per role, and where its best and worst tensor lie; None if nothing has an error."""
    if not roles:
        return None
    figure = _figure(0.26 * len(roles) + 1.4)
    axes = figure.add_subplot()
    spread: dict[str, list[float]] = defaultdict(list)
    for tensor in tensors:
        if tensor.error is not None:
            spread[tensor.role].append(tensor.error["relative"])
    for row, summary in enumerate(roles):
        axes.barh(row, summary.relative, color=COLOURS.get(summary.formats[0], _MUTED), height=0.68)
        least, most = min(spread[summary.role]), max(spread[summary.role])
        if most > least:
            axes.plot([least, most], [row, row], color=_INK, linewidth=1.4, marker="|", markersize=7)
        axes.annotate(
            f"{summary.relative:.3g}", (max(most, summary.relative), row), (5, 0), textcoords="offset points",
            va="center", fontsize=8, color=_INK,
        )  # fmt: skip
    _role_axis(axes, [summary.role for summary in roles])
    axes.set_xlim(0, 1.08 * max(max(values) for values in spread.values()))
    axes.set_xlabel("relative error", fontsize=9, color=_INK)
    _title(axes, "Error by role", "norm of the change over norm of the weights; line: best to worst tensor")
    _format_legend(axes, [format for summary in roles for format in summary.formats[:1]])
    return figure


def gain_by_role(report: Report, tensors: Sequence[StoredTensor], roles: Sequence[RoleSummary]) -> "Figure | None":
    """How much of each role's squared error a search of scales removed; None if nothing was searched."""
    searched = [role for role in roles if role.removed is not None]
    if not searched:
        return None
    gains: dict[str, list[float]] = defaultdict(list)
    for tensor in tensors:
        if tensor.error is not None and "removed" in tensor.error:
            gains[tensor.role].append(100 * tensor.error["removed"])
    figure = _figure(0.26 * len(searched) + 1.4)
    axes = figure.add_subplot()
    for row, summary in enumerate(searched):
        mean, least, most = 100 * (summary.removed or 0.0), min(gains[summary.role]), max(gains[summary.role])
        axes.barh(row, mean, color=COLOURS.get(summary.formats[0], _MUTED), height=0.68)
        if most > least:
            axes.plot([least, most], [row, row], color=_INK, linewidth=1.4, marker="|", markersize=7)
        axes.annotate(
            f"{mean:.1f} %", (max(most, mean), row), (5, 0), textcoords="offset points", va="center", fontsize=8,
            color=_INK,
        )  # fmt: skip
    _role_axis(axes, [summary.role for summary in searched])
    axes.set_xlim(min(0.0, *(min(values) for values in gains.values())), 1.1 * max(map(max, gains.values())))
    axes.set_xlabel("% of the squared error", fontsize=9, color=_INK)
    _title(
        axes,
        "Error removed by searching scales",
        "against scales from the largest magnitudes; line: least to most of one tensor",
    )
    _format_legend(axes, [format for summary in searched for format in summary.formats[:1]])
    return figure


def bits_per_weight(report: Report, tensors: Sequence[StoredTensor], roles: Sequence[RoleSummary]) -> "Figure":
    """Stored bits per weight of every role with matrices, split by format where layers differ."""
    by_role: dict[str, dict[str, list[int]]] = {}
    for tensor in tensors:
        if tensor.is_matrix:
            figures = by_role.setdefault(tensor.role, {}).setdefault(tensor.format, [0, 0])
            figures[0], figures[1] = figures[0] + tensor.n_bytes, figures[1] + tensor.n_values
    by_role = {role: by_role[role] for role in in_order(by_role)}
    figure = _figure(0.26 * len(by_role) + 1.4)
    axes = figure.add_subplot()
    for row, formats in enumerate(by_role.values()):
        n_bytes, n_values = (sum(figures[i] for figures in formats.values()) for i in (0, 1))
        left = 0.0
        for format, (part, _) in sorted(formats.items(), key=lambda item: item[1][0], reverse=True):
            width = 8 * part / n_values
            axes.barh(row, width, left=left, color=COLOURS.get(format, _MUTED), height=0.68)
            left += width
        axes.annotate(
            f"{8 * n_bytes / n_values:.2f}", (left, row), (5, 0), textcoords="offset points", va="center", fontsize=8,
            color=_INK, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip
    total = total_bits_per_weight(tensors)
    axes.axvline(total, color=_INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1.5)
    _role_axis(axes, list(by_role))
    axes.set_xlabel("bits per weight, scales and padding included", fontsize=9, color=_INK)
    _title(axes, "Bits per weight", f"dashed: {total:.2f} over the whole model")
    _format_legend(axes, [format for formats in by_role.values() for format in formats])
    return figure


def size_by_component(report: Report, tensors: Sequence[StoredTensor], roles: Sequence[RoleSummary]) -> "Figure":
    """Bytes of every component, split by format."""
    sizes: dict[str, dict[str, int]] = {}
    for record in report["objects"]:
        formats = sizes.setdefault(component_of(record["name"]), {})
        format = record.get("format", "files")
        formats[format] = formats.get(format, 0) + record["bytes"]
    order = [name for name in (*COMPONENTS, "other") if name in sizes]
    total = sum(sum(formats.values()) for formats in sizes.values())
    unit, scale = _unit(max(sum(formats.values()) for formats in sizes.values()))
    figure = _figure(0.42 * len(order) + 1.5)
    axes = figure.add_subplot()
    for row, name in enumerate(order):
        left = 0.0
        for format in (f for f in COLOURS if f in sizes[name]):
            width = sizes[name][format] / scale
            axes.barh(row, width, left=left, color=COLOURS[format], height=0.66)
            left += width
        n_bytes = sum(sizes[name].values())
        label = f"{human_bytes(n_bytes)}, {n_bytes / total:.1%}"
        axes.annotate(label, (left, row), (5, 0), textcoords="offset points", va="center", fontsize=9, color=_INK)
    axes.set_yticks(range(len(order)), [TITLES.get(name, name) for name in order])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * max(sum(formats.values()) for formats in sizes.values()) / scale)
    _quiet_axes(axes, keep=("left",))
    axes.grid(axis="x", color=_ABSENT)
    axes.set_axisbelow(True)
    axes.set_xlabel(unit, fontsize=9, color=_INK)
    _title(axes, "Size by component", f"{total:,} bytes in {len(report['objects']):,} objects")
    _format_legend(axes, [format for formats in sizes.values() for format in formats])
    return figure


def _unit(n_bytes: int) -> tuple[str, float]:
    for name, scale in (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if n_bytes >= scale:
            return name, scale
    return "bytes", 1.0


def _role_axis(axes: "Axes", roles: Sequence[str]) -> None:
    axes.set_yticks(range(len(roles)), roles)
    axes.set_ylim(len(roles) - 0.4, -0.6)
    _quiet_axes(axes, keep=("left",))
    axes.grid(axis="x", color=_ABSENT)
    axes.set_axisbelow(True)


def _format_legend(axes: "Axes", formats: Sequence[str]) -> None:
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    figure = axes.figure
    above = ScaledTranslation(0, 20 / 72, figure.dpi_scale_trans)
    used = [name for name in COLOURS if name in set(formats)]
    patches = [Patch(color=COLOURS[name], label=name) for name in used]
    axes.legend(
        handles=patches, loc="lower right", bbox_to_anchor=(1.0, 1.0), bbox_transform=axes.transAxes + above,
        ncols=len(used), frameon=False, fontsize=8, handlelength=1.0, handleheight=1.0, columnspacing=1.2,
    )  # fmt: skip


_Maker = Callable[[Report, Sequence[StoredTensor], Sequence[RoleSummary]], "Figure | None"]
_FIGURES: tuple[tuple[str, str, _Maker], ...] = (
    ("error-by-layer", "Error by layer and role", error_by_layer),
    ("error-by-role", "Error by role", error_by_role),
    ("gain-by-role", "Error removed by searching scales", gain_by_role),
    ("bits-per-weight", "Bits per weight by role", bits_per_weight),
    ("size-by-component", "Size by component", size_by_component),
)
