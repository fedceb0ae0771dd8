"""``ninfer-run kernels``: compile every kernel variant without a card and say what each takes from an SM."""

import json
from collections.abc import Sequence

from ninfer_runtime.backends.cuda.catalog import KernelRow, kernel_rows
from ninfer_runtime.backends.cuda.planned import TARGETS

_SCHEMA = "ninfer.kernels/1"
_N_WORDS = 2
_COLUMNS = ("kernel", "target", "registers", "spill bytes", "shared bytes", "blocks per SM")


def kernels(archs: Sequence[str] | None, *, sass: bool = False, jobs: int | None = None, as_json: bool = False) -> int:
    """Compile for ``archs`` (default: all tuned targets) and print one row per variant; 0 unless something fails."""
    rows: list[KernelRow] = []
    for arch in archs or TARGETS:
        rows += kernel_rows(arch, jobs=jobs, sass=sass)
    if as_json:
        print(json.dumps({"schema": _SCHEMA, "kernels": [row.to_json() for row in rows]}, indent=1))
    else:
        print("\n".join(_table(rows, sass=sass)))
    return 0


def _table(rows: Sequence[KernelRow], *, sass: bool) -> list[str]:
    head = _COLUMNS + (("loop instructions",) if sass else ())
    lines = [head]
    for row in rows:
        numbers = (row.registers, row.spill_bytes, row.shared_bytes, row.blocks_per_sm)
        loop = (str(row.loop.n_instructions) if row.loop else "-",) if sass else ()
        lines.append((row.name, row.arch, *map(str, numbers), *loop))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    texts = ["  ".join(_padded(line, widths)).rstrip() for line in lines]
    return [*texts, f"{len(rows)} variants"]


def _padded(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Words to the left, numbers to the right."""
    cells = zip(line, widths, strict=True)
    return [cell.ljust(width) if column < _N_WORDS else cell.rjust(width) for column, (cell, width) in enumerate(cells)]
