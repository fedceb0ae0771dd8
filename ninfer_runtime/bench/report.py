"""Results of benchmarks: rows, records, table, plot. Specification: specs/benchmarks.md."""

import itertools
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ninfer_format.command import require_extra
from ninfer_format.writer import write_atomically

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = "ninfer.bench/1"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do, measured in the same run; None where it has no such part.

    read_gbps    device memory, read only (without a device: the host's)
    mma_tflops   BF16 products of ``mma.sync`` with FP32 sums (without a device: a float32 matrix product)
    h2d_gbps     pinned host memory to the device
    memcpy_gbps  host memory to host memory by all threads, bytes copied once
    """

    read_gbps: float
    mma_tflops: float
    h2d_gbps: float | None
    memcpy_gbps: float

    def value(self, name: str) -> float | None:
        """The limit of that name; ``load_gbps`` is the smaller of the two that loading passes through."""
        if name == "load_gbps":
            return min(self.memcpy_gbps, self.memcpy_gbps if self.h2d_gbps is None else self.h2d_gbps)
        found: float | None = getattr(self, name)
        return found

    def to_json(self) -> dict[str, float | None]:
        """The ``limits`` member of a record."""
        names = ("read_gbps", "mma_tflops", "h2d_gbps", "memcpy_gbps")
        return {name: None if (value := getattr(self, name)) is None else round(value, 3) for name in names}


@dataclass(frozen=True, slots=True)
class Result:
    """One number. ``achieved`` is in the unit of ``limit``; ``check`` says what was verified about the output.

    ``problem`` is what the check found wrong: the number then does not count.
    """

    id: str
    value: float
    unit: str
    limit: str | None = None
    achieved: float | None = None
    check: str = ""
    problem: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def share(self, limits: Limits) -> float | None:
        """Achieved over limit."""
        limit = None if self.limit is None else limits.value(self.limit)
        return None if limit is None or self.achieved is None else self.achieved / limit

    def to_json(self, limits: Limits) -> dict[str, Any]:
        """A row of a record."""
        share = self.share(limits)
        row = {
            "id": self.id,
            "value": _rounded(self.value),
            "unit": self.unit,
            "limit": self.limit,
            "share": None if share is None else round(share, 4),
            "check": self.check,
        }
        if self.problem:
            row["problem"] = self.problem
        return row | ({"details": dict(self.details)} if self.details else {})


@dataclass(frozen=True, slots=True)
class Record:
    """Results of one run on one machine."""

    device: str
    limits: Limits
    results: tuple[Result, ...]
    commit: str | None = None
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    notes: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether every output check passed."""
        return not any(result.problem for result in self.results)

    def to_json(self) -> dict[str, Any]:
        """The document of ``--json`` and of ``bench/records``."""
        return {
            "schema": SCHEMA,
            "date": self.date,
            "device": self.device,
            "commit": self.commit,
            "limits": self.limits.to_json(),
            "results": [result.to_json(self.limits) for result in self.results],
            "notes": list(self.notes),
        }

    def write(self, folder: Path) -> Path:
        """Write ``<date>-<device>.json``, a number behind it if there is one already, and return the path."""
        device = "".join(c if c.isalnum() else "-" for c in self.device.lower()).strip("-")
        stem = f"{self.date[:10]}-{device}"
        names = (f"{stem}{suffix}.json" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
        path = next(folder / name for name in names if not (folder / name).exists())
        folder.mkdir(parents=True, exist_ok=True)
        self.replace(path)
        return path

    def replace(self, path: Path) -> None:
        """Write the document under ``path``, over an older one of the same run."""
        write_atomically(path, (json.dumps(self.to_json(), indent=2) + "\n").encode())


def current_commit() -> str | None:
    """The commit of the source tree the package runs from; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return run.stdout.strip() or None


def render(record: Record) -> "Table":
    """The table of a record."""
    from rich.table import Table

    limits = ", ".join(f"{name} {value:,.1f}" for name, value in record.limits.to_json().items() if value is not None)
    table = Table(title=f"{record.device}: {limits}", title_justify="left", box=None, pad_edge=False)
    for column, justify in (("id", "left"), ("value", "right"), ("unit", "left"), ("limit", "left")):
        table.add_column(column, justify="right" if justify == "right" else "left", overflow="fold")
    table.add_column("share", justify="right")
    table.add_column("output")
    for result in record.results:
        share = result.share(record.limits)
        table.add_row(
            result.id,
            f"{result.value:,.4g}" if result.value < 1000 else f"{result.value:,.0f}",
            result.unit,
            result.limit or "",
            "" if share is None else f"{share:.1%}",
            f"WRONG: {result.problem}" if result.problem else result.check,
        )
    return table


def plot_roofline(record: Record, path: Path) -> None:
    """PNG: operations per byte against TFLOP/s, with the two measured roofs; MissingExtraError without matplotlib.

    Drawn are the results that say how many bytes and operations they are (``details.bytes``, ``details.flops``,
    ``details.seconds``).
    """
    require_extra("matplotlib", "plots")
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = [_point(result) for result in record.results if _is_drawn(result)]
    lowest, highest = min((p.intensity for p in points), default=1.0), max((p.intensity for p in points), default=1.0)
    intensity = np.geomspace(min(lowest, 1.0) / 2, max(highest, 1e3) * 2, 200)
    limits = record.limits
    roof = np.minimum(intensity * limits.read_gbps / 1e3, limits.mma_tflops)
    axes.loglog(intensity, roof, color="black", label=f"{limits.read_gbps:,.0f} GB/s, {limits.mma_tflops:,.1f} TFLOP/s")
    markers = dict(zip(dict.fromkeys(point.kind for point in points), itertools.cycle(_MARKERS), strict=False))
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(point.identity for point in points))}
    for kind, marker in markers.items():
        axes.plot([], [], marker, color="gray", label=kind)
    for identity, colour in colours.items():
        axes.plot([], [], "_", color=colour, markeredgewidth=5, label=identity)
    for point in points:
        axes.plot(point.intensity, point.tflops, markers[point.kind], color=colours[point.identity], alpha=0.8)
    named: list[Any] = []  # places on the page: a name that would lie on another is left out
    for point in points:
        place = axes.transData.transform((point.intensity, point.tflops))
        if all(np.abs(place - other).max() > _NAME_PIXELS for other in named):
            named.append(place)
            axes.annotate(point.name, (point.intensity, point.tflops), fontsize=7, xytext=(5, 3), **_OFFSET)
    axes.set_xlabel("operations per byte that must move")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{record.device}, {record.date[:10]}")
    axes.grid(which="major", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, format="png", dpi=120)


_OFFSET: Mapping[str, Any] = {"textcoords": "offset points"}
_NAME_PIXELS = 22
_MARKERS = "os^DvP"


@dataclass(frozen=True, slots=True)
class _Point:
    kind: str
    identity: str
    name: str
    intensity: float
    tflops: float


def _is_drawn(result: Result) -> bool:
    return all(result.details.get(name, 0) > 0 for name in ("bytes", "flops", "seconds"))


def _point(result: Result) -> _Point:
    """``kind/model/recipe/name…``; shorter ids are all name."""
    kind, *rest = result.id.split("/")
    identity, names = ("/".join(rest[:2]), rest[2:]) if len(rest) > 2 else ("", rest)
    d = result.details
    return _Point(kind, identity, " ".join(names), d["flops"] / d["bytes"], d["flops"] / d["seconds"] / 1e12)


def _rounded(value: float) -> float:
    """Six significant digits."""
    return float(f"{value:.6g}")
