"""The script that times the CPU and plans a card with it."""

from __future__ import annotations

import re
import sys

import pytest

from scripts import measure_ffn_cpu


def test_small_model_is_timed_and_planned(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["measure_ffn_cpu.py", "tiny/groupwise-int", "--context", "512", "--cores", "16"]
    monkeypatch.setattr(sys, "argv", arguments)
    measure_ffn_cpu.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["1", "4", "8"]
    assert all(float(re.findall(r"([0-9.]+) ms", line)[0]) > 0 for line in lines[1:4])
    assert [line.split(",")[0] for line in lines[4:]] == ["0 drafts", "0 drafts", "3 drafts", "3 drafts"]
    assert all(line.endswith("tokens/s") for line in lines[4:])
