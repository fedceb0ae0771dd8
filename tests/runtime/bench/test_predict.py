"""Predictions for cards that were not measured, and the tables that carry them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ninfer_format.errors import UsageError
from ninfer_runtime.backends.cuda.catalog import KernelRow
from ninfer_runtime.backends.cuda.sass import Loop
from ninfer_runtime.bench import predict
from scripts import kernel_tables

IDENTITY = "qwen3.6-27b/groupwise-int"
READ = 4000.0
BYTES = {"gdn/input": 53.4e6, "gdn/output": 20.6e6, "mlp/gate_up": 94.7e6, "mlp/down": 58.5e6, "head": 993.3e6}
COUNTS = {"gdn/input": 48, "gdn/output": 48, "mlp/gate_up": 64, "mlp/down": 64, "head": 1}
LAUNCH, EFFICIENCY = 3e-6, 0.92


def record() -> dict[str, Any]:
    """What a card would write whose launches take 3 us and stream at 92 %, and that spends 0.3 ms beside them."""
    seconds = {kind: LAUNCH + n_bytes / (EFFICIENCY * READ * 1e9) for kind, n_bytes in BYTES.items()}
    rows: list[dict[str, Any]] = [
        {
            "id": f"matrix/{IDENTITY}/{kind}",
            "value": seconds[kind] * 1e6,
            "details": {"launches": COUNTS[kind], "mb_per_launch": BYTES[kind] / 1e6},
        }
        for kind in BYTES
    ]
    matrix_bytes = sum(COUNTS[kind] * BYTES[kind] for kind in BYTES)
    total = 3e-4 + sum(COUNTS[kind] * seconds[kind] for kind in BYTES)
    details = {"bytes": matrix_bytes + 0.6e9, "seconds": total}
    rows.append({"id": f"decode/{IDENTITY}/c1/ctx7680", "share": 0.8, "details": details})
    return {"device": "card", "date": "2026-11-30", "commit": None, "limits": {"read_gbps": READ}, "results": rows}


def test_launch_time_and_efficiency_are_found_again() -> None:
    model = predict.fit(predict.matrix_launches(record(), IDENTITY), READ)
    assert model.launch_seconds == pytest.approx(LAUNCH, rel=1e-3)
    assert model.efficiency == pytest.approx(EFFICIENCY, rel=1e-3)


def test_a_launch_is_bound_by_streaming_until_its_instructions_do_not_fit() -> None:
    (launch,) = (one for one in predict.matrix_launches(record(), IDENTITY) if one.kind == "head")
    target = predict.TARGETS[0]
    model = predict.Streaming(0.0, EFFICIENCY)
    assert predict.predicted_share(launch, 0.2, model, target) == pytest.approx(EFFICIENCY)
    assert predict.predicted_share(launch, 2.0, model, target) == pytest.approx(target.instructions_per_byte / 2)


def test_a_slower_card_loses_less_to_launches() -> None:
    launches = predict.matrix_launches(record(), IDENTITY)
    model = predict.fit(launches, READ)
    measured = launches[1].n_bytes / launches[1].seconds / (READ * 1e9)
    shares = [predict.predicted_share(launches[1], 0.2, model, target) for target in predict.TARGETS]
    assert measured < shares[0] < shares[1] < EFFICIENCY


def test_a_round_counts_what_is_no_matrix() -> None:
    model = predict.fit(predict.matrix_launches(record(), IDENTITY), READ)
    shares = [predict.predicted_round(record(), IDENTITY, 7680, model, target, {}) for target in predict.TARGETS]
    assert all(0.5 < share < 1 for share in shares)
    with pytest.raises(UsageError, match="ctx9"):
        predict.predicted_round(record(), IDENTITY, 9, model, predict.TARGETS[0], {})


def test_a_record_without_launches_is_refused() -> None:
    with pytest.raises(UsageError, match="bench all"):
        predict.matrix_launches({"results": []}, IDENTITY)


def row(name: str, registers: int) -> KernelRow:
    return KernelRow(name, "sm_120a", 256, registers, 0, 0, 1000, 2, (), ())


def test_resource_table_has_one_line_per_kernel_with_ranges() -> None:
    lines = kernel_tables.resource_table([row("a[N=1]x256", 40), row("a[N=2]x256", 96), row("b[]x256", 7)])
    assert "RTX 5090 (170 SMs) and RTX 5060 Ti (36 SMs)" in lines[0]
    assert lines[2:] == [
        "| a | 2 | 256 | 40 to 96 | 0 | 1,000 | 2 |",
        "| b | 1 | 256 | 7 | 0 | 1,000 | 2 |",
    ]


def test_instructions_are_held_against_the_bytes_of_a_pass() -> None:
    loop = Loop(n_instructions=272, n_matrix=48, global_bytes=48, n_copy_groups=2)
    loops = {"linear_small[FORMATS=1,EPILOGUE=1,NT=1,MT=2]x256": loop, "linear_small[FORMATS=3,NT=1]x256": loop}
    assert kernel_tables.per_weight_byte(loops) == {"Q4G64_F16S": 272 / (2 * 2 * 1088)}
    assert kernel_tables.per_weight_byte(loops, tiles=2) == {}


def test_every_prediction_says_that_it_was_not_measured() -> None:
    kinds = dict.fromkeys(BYTES, 0.2)
    text = "\n".join(kernel_tables.prediction_table(record(), kinds))
    assert text.count("not measured on this card") == len(predict.TARGETS)
    assert "| a whole round at 7,680 tokens |" in text


def test_tables_replace_what_stands_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = kernel_tables.MARKS
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    kernel_tables.write("new", page)
    assert page.read_text() == f"before\n{begin}\nnew\n{end}\nafter\n"
    page.write_text("nothing")
    with pytest.raises(SystemExit):
        kernel_tables.write("new", page)
