"""The closing tables of specs/kernels.md: what kernels take from an SM, what they issue, what cards should reach.

    python scripts/kernel_tables.py [--record bench/records/DATE-CARD.json] [--write]

Compiles every variant for both targets (cached), reads the machine code with nvdisasm, and predicts shares of bandwidth
for cards that were not measured from a record of one that was. Prints the tables, or with --write puts them between
the marks in specs/kernels.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ninfer_runtime.backends.cuda.catalog import KernelRow, kernel_rows, planned_specs  # noqa: E402
from ninfer_runtime.backends.cuda.compiler import Compiler  # noqa: E402
from ninfer_runtime.backends.cuda.ops.linear_small import step_bytes  # noqa: E402
from ninfer_runtime.backends.cuda.packing import TILE_FORMATS  # noqa: E402
from ninfer_runtime.backends.cuda.planned import planned_model  # noqa: E402
from ninfer_runtime.backends.cuda.sass import Loop, main_loop  # noqa: E402
from ninfer_runtime.bench import predict  # noqa: E402
from ninfer_runtime.bench.bytes_moved import matrices  # noqa: E402

PAGE = ROOT / "specs" / "kernels.md"
IDENTITY = "qwen3.6-27b/groupwise-int"
ARCH, MEASURED_ARCH = "sm_120a", "sm_90a"
CONTEXT = 7_680
TILES = (1, 2, 4)
"""Token tiles of eight columns in the table of instructions."""
NOT_MEASURED = "not measured on this card"
MARKS = ("<!-- tables: begin -->", "<!-- tables: end -->")


def entry_point(variant: str) -> str:
    """``linear_small[NT=1]x256`` → ``linear_small``."""
    return variant.partition("[")[0]


def span(values: Sequence[int]) -> str:
    """One number, or the least and the most."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def resource_table(rows: Sequence[KernelRow]) -> list[str]:
    """One line per entry point, ranges over its variants."""
    groups: dict[str, list[KernelRow]] = defaultdict(list)
    for row in rows:
        groups[entry_point(row.name)].append(row)
    cards = " and ".join(f"{target.name} ({target.n_sms} SMs)" for target in predict.TARGETS)
    lines = [f"| kernel | variants | threads | registers | spills | shared memory | blocks per SM, {cards} |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for name, found in sorted(groups.items()):
        cells = (
            name,
            str(len(found)),
            span([row.threads for row in found]),
            span([row.registers for row in found]),
            span([row.spill_bytes for row in found]),
            span([row.shared_bytes for row in found]),
            span([row.blocks_per_sm for row in found]),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def defines_of(variant: str) -> dict[str, int]:
    """The numeric constants in a variant's name."""
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", variant)}


def per_weight_byte(loops: Mapping[str, Loop], tiles: int = 1) -> dict[str, float]:
    """Format → warp instructions per weight byte of linear_small with only that format, the least of its variants."""
    found: dict[str, float] = {}
    for variant, loop in loops.items():
        constants = defines_of(variant)
        tile = next((one for one in TILE_FORMATS.values() if constants["FORMATS"] == 1 << one.code), None)
        if tile is None or constants["NT"] != tiles or not loop.n_matrix:
            continue
        each = loop.n_instructions / (loop.n_copy_groups * constants["MT"] * step_bytes(tile))
        found[tile.name] = min(each, found.get(tile.name, each))
    return found


def main_loops(arch: str) -> dict[str, Loop]:
    """Variant → main loop, of linear_small with one format: what the table of instructions needs."""
    formats = {1 << tile.code for tile in TILE_FORMATS.values()}
    wanted = [
        spec
        for spec in planned_specs(arch)
        if spec.name == "linear_small"
        and dict(spec.defines)["FORMATS"] in formats
        and dict(spec.defines)["NT"] in TILES
    ]
    cubins = Compiler(arch).compile_all(wanted)
    loops = {spec.variant: main_loop(cubins[spec].image, spec.name) for spec in wanted}
    return {variant: loop for variant, loop in loops.items() if loop is not None}


def instruction_table(by_arch: Mapping[str, Mapping[str, Loop]]) -> list[str]:
    """Format by tokens: instructions per weight byte on both targets, against their budgets."""
    lines = ["| linear_small, columns | " + " | ".join(f"{arch} {name}" for arch in by_arch for name in TILE_FORMATS)]
    lines[0] += " |"
    lines.append("|---" * (1 + len(by_arch) * len(TILE_FORMATS)) + "|")
    for tiles in TILES:
        numbers = []
        for loops in by_arch.values():
            each = per_weight_byte(loops, tiles)
            numbers += [f"{each[name]:.2f}" if name in each else "" for name in TILE_FORMATS]
        lines.append(f"| up to {8 * tiles} | " + " | ".join(numbers) + " |")
    return lines


def per_byte_of_kinds(per_format: Mapping[str, float]) -> dict[str, float]:
    """Launch kind of the 27B → instructions per weight byte, formats weighted by their bytes."""
    found: dict[str, float] = {}
    for kind, entries in matrices(planned_model(IDENTITY).artifact.directory.objects).items():
        total = sum(entry.n_bytes for entry in entries)
        found[kind] = sum(entry.n_bytes * per_format.get(entry.format, 0.0) for entry in entries) / total
    return found


def prediction_table(record: Mapping[str, Any], per_kind: Mapping[str, float]) -> list[str]:
    """Launch kinds of the 27B: measured share, and the predicted ones."""
    limit = record["limits"]["read_gbps"]
    launches = predict.matrix_launches(record, IDENTITY)
    model = predict.fit(launches, limit)
    device = record["device"]
    heads = [f"{target.name}, predicted, {NOT_MEASURED}" for target in predict.TARGETS]
    lines = [
        f"Fitted on the {device} ({record['date'][:10]}, commit {(record['commit'] or 'unknown')[:7]}, "
        f"{limit:,.0f} GB/s): {model.launch_seconds * 1e6:.1f} us per "
        f"launch, streaming at {model.efficiency:.0%} of the bandwidth.",
        "",
        f"| launch, one column | MB | {device} | " + " | ".join(heads) + " |",
        "|---|---:" + "|---:" * (1 + len(heads)) + "|",
    ]
    for launch in launches:
        measured = launch.n_bytes / launch.seconds / (limit * 1e9)
        shares = [predict.predicted_share(launch, per_kind[launch.kind], model, target) for target in predict.TARGETS]
        numbers = " | ".join(f"{share:.0%}" for share in (measured, *shares))
        lines.append(f"| {launch.kind} | {launch.n_bytes / 1e6:,.1f} | {numbers} |")
    row = next(row for row in record["results"] if row["id"] == f"decode/{IDENTITY}/c1/ctx{CONTEXT}")
    rounds = [predict.predicted_round(record, IDENTITY, CONTEXT, model, target, per_kind) for target in predict.TARGETS]
    numbers = " | ".join(f"{share:.0%}" for share in (row["share"], *rounds))
    lines.append(f"| a whole round at {CONTEXT:,} tokens | {row['details']['bytes'] / 1e6:,.0f} | {numbers} |")
    return lines


def tables(record: Mapping[str, Any] | None) -> str:
    """All of them, in Markdown."""
    by_arch = {arch: main_loops(arch) for arch in (ARCH, MEASURED_ARCH)}
    parts = [*resource_table(kernel_rows(ARCH)), "", *instruction_table(by_arch)]
    if record is not None:
        parts += ["", *prediction_table(record, per_byte_of_kinds(per_weight_byte(by_arch[ARCH])))]
    return "\n".join(parts)


def write(text: str, page: Path = PAGE) -> None:
    """Put the tables between the marks of the page."""
    begin, end = MARKS
    before, mark, rest = page.read_text(encoding="utf-8").partition(begin)
    _, other, after = rest.partition(end)
    if not mark or not other:
        raise SystemExit(f"{page} has no {begin} … {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="a record of bench all")
    parser.add_argument("--write", action="store_true", help="update specs/kernels.md instead of printing")
    options = parser.parse_args()
    text = tables(None if options.record is None else json.loads(options.record.read_text(encoding="utf-8")))
    if options.write:
        write(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
