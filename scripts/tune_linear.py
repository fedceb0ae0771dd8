"""Choose the geometry of linear_small on the card at hand, and write it into the card's tuning file.

    python -m scripts.tune_linear [--sizes 4,8,16,32] [--write FILE]

Every candidate is checked and timed per launch of a 27B layer, in chains over distinct weights (``lab_linear``).
Launches are put in two classes as the table does, by tile rows. The best few of both classes are then timed together,
in the chain of a layer, because launches overlap; the pair with the least time is chosen. Size 4 is timed with one
column.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ninfer_format.errors import NinferError
from ninfer_runtime.backends.cuda.arena import Arena
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.ops import linear_small
from ninfer_runtime.backends.cuda.ops.linear_small import LinearSmall, Workspace, plan
from ninfer_runtime.backends.cuda.ops.linear_small_tuning import FOLDER, LinearSmallTuning
from scripts import lab_linear
from scripts.lab_linear import KINDS, LAYER, MIN_LARGE_TILE_ROWS, WORKSPACE_BYTES, Lab, chain, clocks

CLASSES = {MIN_LARGE_TILE_ROWS: ("gdn_in", "gate_up"), 0: ("out", "down")}
# Where a class begins in a table that has rows for the launches of smaller models, too.
BEGINS = {4: {MIN_LARGE_TILE_ROWS: 800, 0: 200}, 8: {MIN_LARGE_TILE_ROWS: 800, 0: 200}}
WHOLE = 101_376
LARGEST_ERROR = 1.0
FINALISTS = 4
TIMED_COLUMNS = {4: 1}
PLAIN = LinearSmallTuning(48, 0, 8, 1, 1, 1, WHOLE, 12)  # of sizes that are not timed

Geometry = dict[str, int]


def shape(warps: int, tile_rows: int, blocks: int, min_blocks: int, stages: int, **more: int) -> Geometry:
    """A candidate's fields."""
    first = {"warps": warps, "tile_rows": tile_rows, "blocks_per_sm": blocks, "min_blocks": min_blocks}
    return {**first, "max_stages": stages, **more}


SHARED = {"x_ahead": 0, "shared_x": 1}
# By size and class.
SHAPES: dict[int, dict[int, list[Geometry]]] = {
    4: {
        MIN_LARGE_TILE_ROWS: [
            shape(8, 2, 2, 2, 4),
            shape(8, 2, 2, 2, 4, x_ahead=0),
            shape(16, 1, 1, 1, 4),
            shape(16, 1, 1, 1, 6, x_ahead=0),
            shape(4, 2, 4, 4, 4),
            shape(8, 1, 3, 3, 6, x_ahead=0),
            shape(8, 2, 1, 2, 12),
            shape(16, 1, 1, 2, 12, group_sums=1, x_ahead=0),
        ],
        0: [
            shape(8, 2, 2, 2, 4, phases=8),
            shape(8, 2, 2, 2, 4, phases=4),
            shape(16, 1, 1, 1, 4),
            shape(16, 1, 1, 1, 6, x_ahead=0),
            shape(16, 1, 1, 1, 4, phases=4, x_ahead=0),
            shape(4, 2, 4, 4, 4, phases=4),
            shape(8, 1, 3, 3, 6, phases=8, x_ahead=0),
            shape(8, 2, 1, 2, 12, phases=8),
        ],
    },
    8: {
        MIN_LARGE_TILE_ROWS: [
            shape(8, 2, 2, 2, 4),
            shape(16, 1, 1, 1, 4),
            shape(4, 2, 4, 4, 4),
        ],
        0: [
            shape(16, 1, 1, 1, 4),
            shape(16, 1, 1, 1, 6, x_ahead=0),
            shape(16, 1, 1, 1, 4, phases=2),
            shape(8, 2, 2, 2, 4, phases=4),
            shape(4, 2, 4, 4, 4, phases=2),
        ],
    },
    16: {
        MIN_LARGE_TILE_ROWS: [
            shape(12, 2, 1, 1, 12),
            shape(8, 2, 2, 2, 12, **SHARED),
            shape(16, 1, 1, 1, 12, **SHARED),
        ],
        0: [
            shape(16, 1, 1, 1, 12),
            shape(16, 1, 1, 1, 12, phases=2),
            shape(16, 1, 1, 1, 12, phases=4),
            shape(16, 1, 1, 1, 12, **SHARED),
        ],
    },
    32: {
        MIN_LARGE_TILE_ROWS: [
            shape(8, 2, 1, 1, 12),
            shape(8, 2, 1, 1, 12, **SHARED),
            shape(16, 1, 1, 1, 12, **SHARED),
        ],
        0: [
            shape(16, 1, 1, 1, 12, **SHARED),
            shape(8, 2, 1, 1, 12, phases=2),
            shape(8, 2, 1, 1, 12, **SHARED),
        ],
    },
}


def begins(size: int) -> dict[int, int]:
    """Class → the fewest tile rows of its launches."""
    return BEGINS.get(size, {rows: rows for rows in CLASSES})


def candidates(size: int, which: int) -> list[LinearSmallTuning]:
    """What is worth trying for launches of a class and size."""
    return [
        LinearSmallTuning(columns=size, min_tile_rows=begins(size)[which], shared_bytes=WHOLE, **geometry)
        for geometry in SHAPES[size][which]
    ]


def in_order(row: dict[str, int]) -> tuple[int, int, int, int]:
    """Where a row stands in the table, whose first that fits counts."""
    return -row.get("only_nvfp4", 0), row["columns"], -row["min_tile_rows"], -row.get("one_format", 0)


def describe(choice: LinearSmallTuning) -> str:
    """A candidate in a line."""
    defaults = LinearSmallTuning(0, 0, 0, 0, 0, 0, 0, 0)
    rest = [
        f"{field.name} {getattr(choice, field.name)}"
        for field in dataclasses.fields(choice)[8:]
        if getattr(choice, field.name) != getattr(defaults, field.name)
    ]
    return (
        f"{choice.warps:2d}w x{choice.tile_rows} {choice.blocks_per_sm}/{choice.min_blocks} blocks "
        f"{choice.max_stages:2d} stages {' '.join(rest)}"
    )


def in_place(choice: LinearSmallTuning) -> None:
    """Give launches of the candidate's size its geometry."""

    def tuned(device: object, size: int, n_tile_rows: int, formats: object) -> LinearSmallTuning:
        return choice if size == choice.columns else PLAIN

    setattr(linear_small, "linear_small_tuning", tuned)  # noqa: B010 - in the product's place


def specs(lab: Lab, choice: LinearSmallTuning, kinds: tuple[str, ...]) -> Iterator[KernelSpec]:
    """The variants of a candidate."""
    in_place(choice)
    for kind in kinds:
        with contextlib.suppress(NinferError):
            yield plan(lab.device, lab.weights[kind][0], KINDS[kind][0], choice.columns).spec


class Tuner:
    """Times candidates with one arena."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.arena = Arena(lab.device, WORKSPACE_BYTES)
        self.workspace = Workspace(self.arena, WORKSPACE_BYTES)
        self.workspace.clear(lab.device, lab.stream)

    def ops(self, kind: str, choice: LinearSmallTuning) -> list[LinearSmall]:
        """Launches of a kind with this geometry."""
        in_place(choice)
        return [
            LinearSmall(self.lab.device, self.arena, matrices, KINDS[kind][0], choice.columns, self.workspace)
            for matrices in self.lab.weights[kind]
        ]

    def time_kind(self, kind: str, choice: LinearSmallTuning) -> float:
        """Microseconds of a launch; NinferError or ValueError when it does not fit or its results are wrong."""
        ops = self.ops(kind, choice)
        error = self.lab.check(ops[0], choice.columns)
        if not 0 <= error <= LARGEST_ERROR:
            raise ValueError(f"error {error}")
        return self.lab.time_us(chain(self.lab, ops, TIMED_COLUMNS.get(choice.columns, choice.columns), 2))

    def finalists(self, size: int, which: int, kinds: tuple[str, ...]) -> list[LinearSmallTuning]:
        """The fastest candidates over ``kinds``; prints all of them."""
        found: list[tuple[float, int, LinearSmallTuning]] = []
        for i, choice in enumerate(candidates(size, which)):
            try:
                times = {kind: self.time_kind(kind, choice) for kind in kinds}
            except (NinferError, ValueError) as error:
                print(f"{size:3d}  {describe(choice)}: {error}", flush=True)
            else:
                print(
                    f"{size:3d}  {describe(choice)}: " + "  ".join(f"{k} {t:.1f}" for k, t in times.items()), flush=True
                )
                found.append((sum(times.values()), i, choice))
        return [choice for _, _, choice in sorted(found)[:FINALISTS]]

    def best_pair(self, size: int) -> tuple[float, LinearSmallTuning, LinearSmallTuning] | None:
        """The geometries of both classes with the least time of a layer."""
        classes = [self.finalists(size, rows, kinds) for rows, kinds in CLASSES.items()]
        columns, pairs = TIMED_COLUMNS.get(size, size), []
        for i, pair in enumerate(itertools.product(*classes)):
            ops = {
                kind: self.ops(kind, choice)
                for choice, kinds in zip(pair, CLASSES.values(), strict=True)
                for kind in kinds
            }
            n = min(len(members) for members in ops.values())
            layers = [ops[kind][j % len(ops[kind])] for j in range(max(n, 6)) for kind in LAYER]
            us = self.lab.time_us(chain(self.lab, layers, columns, 2)) * len(LAYER)
            pairs.append((us, i, pair))
            print(f"{size:3d}  layer {us:.1f}: {describe(pair[0])} | {describe(pair[1])}", flush=True)
        if not pairs:
            return None
        us, _, (large, small) = min(pairs)
        return us, large, small


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4,8,16,32")
    parser.add_argument("--write", type=Path, help="where the card's tuning file goes")
    options = parser.parse_args()
    start = time.perf_counter()
    sizes = [int(text) for text in options.sizes.split(",")]
    lab_linear.LEAST_CHAIN_BYTES = 260_000_000
    lab = Lab([kind for members in CLASSES.values() for kind in members], 1)
    lab_linear.WARM_UP_SECONDS, lab_linear.SAMPLES = 0.03, 5
    print(f"{lab.device.name}, read {lab.read_gbps:.0f} GB/s, {time.perf_counter() - start:.1f} s", flush=True)
    wanted = {
        spec: None
        for size in sizes
        for rows, members in CLASSES.items()
        for choice in candidates(size, rows)
        for spec in specs(lab, choice, members)
    }
    lab.device.prepare(wanted)
    print(f"{len(wanted)} variants, {time.perf_counter() - start:.1f} s", flush=True)
    for spec in wanted:
        if local_bytes := lab.device.kernel(spec).attribute("LOCAL_SIZE_BYTES"):
            print(f"spills {local_bytes} bytes: {spec.variant}")
    tuner, chosen = Tuner(lab), []
    for size in sizes:
        best = tuner.best_pair(size)
        if best is not None:
            print(f"{size:3d}  CHOSEN {best[0]:.1f} us a layer, {time.perf_counter() - start:.1f} s", flush=True)
            chosen += [best[1], best[2]]
    print("clocks", clocks())
    if options.write:
        file = FOLDER / f"{lab.device.arch}-{lab.device.n_sms}.json"
        document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"linear_small": []}
        others = [
            row
            for row in document["linear_small"]
            if row["columns"] not in sizes
            or row["min_tile_rows"] not in begins(row["columns"]).values()
            or row.get("only_nvfp4")
        ]
        document["linear_small"] = sorted([*map(dataclasses.asdict, chosen), *others], key=in_order)
        options.write.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
