"""Choose the geometry of linear_small on the card at hand, and write it into the card's tuning file.

    python -m scripts.tune_linear [--columns 8,16,32] [--write]

Every candidate is timed per launch of a 27B layer, in chains over distinct weights (``lab_linear``). Launches are put
in two classes as the table does, by tile rows; the candidate with the least time over a class wins, if its results are
right. Candidates that do not fit a class are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator

from ninfer_format.errors import NinferError
from ninfer_runtime.backends.cuda.arena import Arena
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.ops import linear_small
from ninfer_runtime.backends.cuda.ops.linear_small import Workspace, kernel_spec, workspace_bytes
from ninfer_runtime.backends.cuda.ops.linear_small_tuning import FOLDER, LinearSmallTuning
from scripts import lab_linear
from scripts.lab_linear import KINDS, Lab, chain, clocks

MIN_LARGE_TILE_ROWS = 640
CLASSES = {MIN_LARGE_TILE_ROWS: ("gdn_in", "gate_up", "attention_in"), 0: ("out", "down")}
WHOLE = 101_376
LARGEST_ERROR = 1.0


def candidates(columns: int) -> list[LinearSmallTuning]:
    """What is worth trying at ``columns`` columns."""
    shapes = {
        8: [(8, 2, 2, 2, 4, 0), (16, 1, 1, 1, 3, 0), (16, 1, 1, 1, 12, 0), (8, 1, 2, 2, 6, 0), (8, 2, 1, 2, 12, 0)],
        16: [(12, 2, 1, 1, 12, 0), (16, 1, 1, 1, 12, 0), (8, 2, 1, 1, 12, 0), (16, 1, 1, 1, 12, 256)],
        32: [(8, 2, 1, 1, 12, 0), (16, 1, 1, 1, 12, 128), (8, 1, 1, 1, 12, 0)],
    }
    made = []
    for warps, tile_rows, blocks, min_blocks, stages, x_columns in shapes[columns]:
        for early in (1, 0) if columns == 8 else (1,):
            made.append(
                LinearSmallTuning(columns, 0, warps, tile_rows, blocks, min_blocks, WHOLE, stages, x_columns, early)
            )
    return made


def specs(lab: Lab, choice: LinearSmallTuning, kinds: tuple[str, ...]) -> Iterator[KernelSpec]:
    """The variants of a candidate."""
    for kind in kinds:
        formats = frozenset(matrix.tile for matrix in lab.weights[kind][0])
        with contextlib.suppress(NinferError):
            yield kernel_spec(formats, KINDS[kind][0], choice.columns // 8, choice)


def time_kind(lab: Lab, arena: Arena, workspace: Workspace, kind: str, choice: LinearSmallTuning) -> float:
    """Microseconds of a launch; NinferError or ValueError when it does not fit or its results are wrong."""
    setattr(linear_small, "linear_small_tuning", lambda *_: choice)  # noqa: B010 - this geometry in the product's place
    ops = lab.ops(arena, workspace, kind, choice.columns)
    error = lab.check(ops[0], choice.columns)
    if not 0 <= error <= LARGEST_ERROR:
        raise ValueError(f"error {error}")
    full = lab.time_us(chain(lab, ops, choice.columns, 3))
    # One column is what a single request decodes with; its class also serves up to eight.
    return full if choice.columns > 8 else (3 * lab.time_us(chain(lab, ops, 1, 3)) + full) / 4


def best_of_class(lab: Lab, columns: int, min_tile_rows: int, kinds: tuple[str, ...]) -> LinearSmallTuning | None:
    """The fastest candidate over ``kinds``; prints all of them."""
    best: tuple[float, LinearSmallTuning] | None = None
    for choice in candidates(columns):
        arena = Arena(lab.device, workspace_bytes(lab.device) + (32 << 20))
        workspace = Workspace(arena, workspace_bytes(lab.device))
        workspace.clear(lab.device, lab.stream)
        text = (
            f"{choice.warps} warps x {choice.tile_rows}, {choice.blocks_per_sm} blocks (of {choice.min_blocks}), "
            f"{choice.max_stages} stages, x {choice.x_columns}, early {choice.release_early}"
        )
        try:
            times = {kind: time_kind(lab, arena, workspace, kind, choice) for kind in kinds}
        except (NinferError, ValueError) as error:
            print(f"{columns:3d} columns  {text}: {error}", flush=True)
        else:
            print(f"{columns:3d} columns  {text}: " + "  ".join(f"{k} {t:.1f}" for k, t in times.items()), flush=True)
            if best is None or sum(times.values()) < best[0]:
                best = sum(times.values()), dataclasses.replace(choice, min_tile_rows=min_tile_rows)
        arena.close()
    return best[1] if best else None


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", default="8,16,32")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    kinds = [kind for members in CLASSES.values() for kind in members]
    lab = Lab(kinds, 1)
    lab_linear.WARM_UP_SECONDS, lab_linear.SAMPLES = 0.05, 5
    print(f"{lab.device.name}, read {lab.read_gbps:.0f} GB/s", flush=True)
    columns = [int(text) for text in options.columns.split(",")]
    lab.device.prepare(
        dict.fromkeys(
            spec
            for n in columns
            for choice in candidates(n)
            for members in CLASSES.values()
            for spec in specs(lab, choice, members)
        )
    )
    chosen = [best_of_class(lab, n, rows, members) for n in columns for rows, members in CLASSES.items()]
    print("clocks", clocks())
    file = FOLDER / f"{lab.device.arch}-{lab.device.n_sms}.json"
    if options.write and all(chosen):
        document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"linear_small": []}
        others = [row for row in document["linear_small"] if row["columns"] not in columns]
        document["linear_small"] = [dataclasses.asdict(row) for row in chosen if row] + others
        file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
