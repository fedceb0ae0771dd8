"""Record the register budget of every kernel variant: python scripts/record_registers.py

Compiles for both tuned targets and rewrites tuning/registers.json. Refuses while a kernel spills, uses local memory or
too much shared memory. Prints what grew.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ninfer_runtime.backends.cuda.catalog import (
    BUDGET_FILE,
    budget_of,
    kernel_rows,
    problems_of,
    read_budget,
    write_budget,
)
from ninfer_runtime.backends.cuda.planned import TARGETS


def main() -> int:
    """0 when the budget was written."""
    before = read_budget() if BUDGET_FILE.exists() else {}
    rows = {arch: kernel_rows(arch) for arch in TARGETS}
    budgets = {arch: budget_of(found) for arch, found in rows.items()}
    problems = [line for arch, found in rows.items() for line in problems_of(found, budgets[arch])]
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    for arch, budget in budgets.items():
        known = before.get(arch, {})
        for name, registers in budget.items():
            if registers > known.get(name, registers):
                print(f"{name} for {arch}: {known[name]} → {registers} registers")
    write_budget(budgets)
    print(f"{sum(map(len, budgets.values()))} variants recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
