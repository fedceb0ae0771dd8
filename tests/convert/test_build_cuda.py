"""Whole builds on a CUDA device give the CPU's bytes: every method, from values and from dequantized sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ninfer_convert.check import CheckOptions, check
from ninfer_convert.pipeline import build
from ninfer_convert.plan import BuildOptions, make_plan
from tests.convert.nvfp4 import nvfp4_pair
from tests.convert.test_nvfp4_encode_build import wide

pytestmark = pytest.mark.gpu

CASES: dict[str, dict[str, Any]] = {
    "groupwise mse": {"method": "mse"},
    "nvfp4 max": {"recipe": "nvfp4"},
    "nvfp4 mse": {"recipe": "nvfp4", "method": "mse"},
    "w8": {"recipe": "w8"},
}


def both(source: Path, tmp_path: Path, **options: Any) -> list[bytes]:
    contents = []
    for device, step in (("cpu", None), ("cuda", None), ("cuda", 4096)):
        out = tmp_path / "x.ninfer"
        plan = make_plan(BuildOptions(source, out, device=device, force=True, jobs=3, **options))  # type: ignore[arg-type]
        contents.append(build(plan, step_lanes=step).path.read_bytes())
    return contents


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_builds_from_values_are_equal(tmp_path: Path, case: str, moe: bool) -> None:
    cpu, gpu, small = both(wide(tmp_path / "wide", moe=moe).folder, tmp_path, **CASES[case])
    assert cpu == gpu == small


@pytest.mark.parametrize("case", CASES)
def test_builds_from_dequantized_values_are_equal(tmp_path: Path, case: str) -> None:
    pair = nvfp4_pair(tmp_path)
    pair.source.frontend = pair.base.frontend
    pair.source.save()
    cpu, gpu, small = both(pair.source.folder, tmp_path, **CASES[case])
    assert cpu == gpu == small


def test_check_on_the_device_agrees_with_a_build_on_the_cpu(tmp_path: Path) -> None:
    checkpoint, out = wide(tmp_path / "wide"), tmp_path / "x.ninfer"
    build(make_plan(BuildOptions(checkpoint.folder, out, recipe="nvfp4", method="mse")))
    assert check(CheckOptions(out, checkpoint.folder, everything=True, device="cuda")).equal
