"""The script that weighs the CPU against the link: its arithmetic, and a small run."""

from __future__ import annotations

import sys

import pytest

from scripts import measure_ffn_cpu


def test_what_copies_take_of_memory_is_not_there_for_the_cpu() -> None:
    gain = measure_ffn_cpu.gain
    assert gain(0.010, 100, 10.0, 20.0, 1) == pytest.approx(1 + 0.1 / 10), (
        "100 bytes at the 10 per second that are left"
    )
    assert gain(40.0, 100, 10.0, 20.0, 200) == pytest.approx(1 + 20 / 40), "the products are slower than memory"
    assert gain(0.0, 100, 10.0, 10.0, 200) == 1.0


def test_small_run_measures_every_form(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["measure_ffn_cpu.py", "--small", "--columns", "1"])
    monkeypatch.setattr(measure_ffn_cpu, "SAMPLES", 1)
    measure_ffn_cpu.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    forms = [row for row in rows if row[0] in ("bf16", "int8", "int4")]
    assert forms
    for name, columns, _megabytes, milliseconds, *_ in forms:
        assert (columns, float(milliseconds) > 0) == ("1", True), name
