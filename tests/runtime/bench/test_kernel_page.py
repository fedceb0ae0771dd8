"""The closing tables of specs/kernels.md say what the recorded register budget says."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from ninfer_runtime.backends.cuda.catalog import read_budget
from ninfer_runtime.bench.predict import TARGETS
from scripts.kernel_tables import ARCH, MARKS, NOT_MEASURED, PAGE, entry_point, span


def tables() -> str:
    text = Path(PAGE).read_text(encoding="utf-8")
    return text.partition(MARKS[0])[2].partition(MARKS[1])[0]


def test_registers_of_every_kernel_are_those_of_the_budget() -> None:
    by_kernel: dict[str, list[int]] = defaultdict(list)
    for variant, registers in read_budget()[ARCH].items():
        by_kernel[entry_point(variant)].append(registers)
    rows = re.findall(r"^\| (\w+) \| (\d+) \| [^|]* \| ([^|]*) \| ([^|]*) \|", tables(), re.MULTILINE)
    found = {name: (int(count), registers) for name, count, registers, _ in rows}
    assert found == {name: (len(all_of_it), span(all_of_it)) for name, all_of_it in by_kernel.items()}
    assert {spills for _, _, _, spills in rows} == {"0"}


def test_cards_that_were_not_measured_are_called_so() -> None:
    for target in TARGETS:
        assert f"{target.name} ({target.n_sms} SMs)" in tables()
        assert f"{target.name}, predicted, {NOT_MEASURED}" in tables()
