"""Records: schema, shares, file names, table and plot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ninfer_runtime.bench.report import Limits, Record, Result, plot_roofline, render

LIMITS = Limits(read_gbps=4000.0, mma_tflops=600.0, h2d_gbps=55.0, memcpy_gbps=40.0)
GOOD = Result(
    "decode/m/w/c1/ctx7680",
    200.0,
    "tok/s",
    "read_gbps",
    achieved=3000.0,
    check="equal",
    details={"bytes": 16e9, "flops": 5e10, "seconds": 5e-3},
)
PLAIN = Result("host/m/w/c1/ctx7680", 0.01, "share of wall time")
WRONG = Result("prefill/m/w/7680", 1.0, "tok/s", "mma_tflops", achieved=300.0, problem="not finite")


def test_record_has_the_schema_of_the_specification() -> None:
    document = Record("NVIDIA H200", LIMITS, (GOOD, PLAIN), "abc").to_json()
    assert document["schema"] == "ninfer.bench/1"
    assert {"schema", "date", "device", "commit", "limits", "results"} <= document.keys()
    assert {"read_gbps", "mma_tflops", "h2d_gbps"} <= document["limits"].keys()
    first, second = document["results"]
    assert {name: first[name] for name in ("id", "value", "unit", "limit", "share")} == {
        "id": "decode/m/w/c1/ctx7680",
        "value": 200.0,
        "unit": "tok/s",
        "limit": "read_gbps",
        "share": 0.75,
    }
    assert second["limit"] is None
    assert second["share"] is None


def test_loading_is_held_against_the_slower_of_copy_and_link() -> None:
    assert LIMITS.value("load_gbps") == 40.0
    assert Limits(1.0, 1.0, None, 40.0).value("load_gbps") == 40.0
    assert Limits(1.0, 1.0, 5.0, 40.0).value("load_gbps") == 5.0


def test_a_wrong_output_makes_the_record_bad_and_shows() -> None:
    record = Record("card", LIMITS, (GOOD, WRONG))
    assert not record.is_good
    assert Record("card", LIMITS, (GOOD,)).is_good
    assert record.to_json()["results"][1]["problem"] == "not finite"
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(record))
    text = console.export_text()
    assert "75.0%" in text
    assert "WRONG: not finite" in text


def test_records_of_one_day_get_numbers(tmp_path: Path) -> None:
    record = Record("NVIDIA H200", LIMITS, (GOOD,), date="2026-11-30T10:00:00+00:00")
    names = [record.write(tmp_path / "records").name for _ in range(3)]
    assert names == ["2026-11-30-nvidia-h200.json", "2026-11-30-nvidia-h200-2.json", "2026-11-30-nvidia-h200-3.json"]
    assert json.loads((tmp_path / "records" / names[0]).read_text()) == record.to_json()


def test_roofline_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "roofline.png"
    for results in (
        (GOOD, PLAIN),
        (GOOD, replace(GOOD, id="prefill/m/v/7680"), replace(GOOD, id="attention/128k")),
        (PLAIN,),
    ):
        plot_roofline(Record("card", LIMITS, results), path)
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
