"""``ninfer-run kernels``: one row per variant, the same in the table and in JSON; failures are one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ninfer_runtime.backends.cuda import catalog, sass
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from tests.runtime.cuda.kernels import COPY_SPEC, compiler_in
from tests.runtime.run_command import Ninfer, in_this_process

PRODUCT = KernelSpec("matrix.cu", "product", (), 32, shared_bytes=2048)


@pytest.fixture
def ninfer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ninfer:
    return in_this_process(capsys, monkeypatch)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """``plan(spec, …)``: these are all the kernels there are."""

    def planned(*specs: KernelSpec) -> None:
        monkeypatch.setattr(catalog, "planned_specs", lambda arch: dict.fromkeys(specs, ("tiny/w8",)))
        monkeypatch.setattr(catalog, "Compiler", lambda arch: compiler_in(tmp_path, arch))

    return planned


def test_json_has_one_row_per_variant_and_target(ninfer: Ninfer, plan: Callable[..., None]) -> None:
    plan(COPY_SPEC, PRODUCT)
    run = ninfer("kernels", "--json")
    rows = run.document["kernels"]
    assert run.code == 0
    assert [(row["name"], row["arch"]) for row in rows] == [
        ("copy[SCALE=2.0f]x128", "sm_120a"), ("product[]x32", "sm_120a"),
        ("copy[SCALE=2.0f]x128", "sm_90a"), ("product[]x32", "sm_90a"),
    ]  # fmt: skip
    for row in rows:
        assert {"registers", "spill_bytes", "shared_bytes", "blocks_per_sm"} <= set(row)
    assert (rows[1]["shared_bytes"], rows[1]["spill_bytes"], rows[1]["blocks_per_sm"]) == (2048, 0, 24)
    assert (rows[0]["blocks_per_sm"], rows[2]["blocks_per_sm"]) == (12, 16), "48 and 64 warps"
    assert "loop" not in rows[0]


def test_table_has_the_same_rows(ninfer: Ninfer, plan: Callable[..., None]) -> None:
    plan(COPY_SPEC, PRODUCT)
    rows = ninfer("kernels", "--arch", "sm_90a", "--json").document["kernels"]
    head, *lines, count = ninfer("kernels", "--arch", "sm_90a").out.splitlines()
    assert head.split()[:3] == ["kernel", "target", "registers"]
    numbers = ("registers", "spill_bytes", "shared_bytes", "blocks_per_sm")
    assert [line.split() for line in lines] == [
        [row["name"], row["arch"], *(str(row[name]) for name in numbers)] for row in rows
    ]
    assert count == "2 variants"


def test_sass_counts_the_main_loop(ninfer: Ninfer, plan: Callable[..., None]) -> None:
    plan(COPY_SPEC, PRODUCT)
    copy, product = ninfer("kernels", "--arch", "sm_90a", "--sass", "--json").document["kernels"]
    assert "loop" not in copy
    assert (product["loop"]["n_matrix"], product["loop"]["global_bytes"]) == (6, 16)
    table = ninfer("kernels", "--arch", "sm_90a", "--sass").out.splitlines()
    assert table[1].split()[-1] == "-"
    assert table[2].split()[-1] == str(product["loop"]["n_instructions"])


def test_kernel_that_does_not_compile_is_one_line(ninfer: Ninfer, plan: Callable[..., None]) -> None:
    plan(KernelSpec("copy.cu", "copy", (("SCALE", "nonsense"),), 128))
    run = ninfer("kernels", "--arch", "sm_90a")
    assert (run.code, run.out) == (1, "")
    assert run.err.count("\n") == 1
    assert run.err.startswith("error: kernel copy[SCALE=nonsense]x128 does not compile for sm_90a: ")


def test_unknown_target_is_one_line(ninfer: Ninfer, plan: Callable[..., None]) -> None:
    plan(COPY_SPEC)
    run = ninfer("kernels", "--arch", "sm_12")
    assert (run.code, run.err) == (4, "error: unknown target 'sm_12', expected for example sm_80, sm_90a or sm_120a\n")


def test_missing_compiler_names_the_extra(ninfer: Ninfer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ninfer_runtime.backends.cuda import nvrtc

    nvrtc.nvrtc.cache_clear()
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter([str(tmp_path / "libnvrtc.so.13")]))
    try:
        run = ninfer("kernels", "--arch", "sm_90a")
    finally:
        nvrtc.nvrtc.cache_clear()
    assert run.code == 2
    assert run.err.endswith("install it with: pip install 'ninfer[cuda]'\n")


def test_missing_disassembler_names_its_package(
    ninfer: Ninfer, plan: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(PRODUCT)
    monkeypatch.setattr(sass, "_disassembler", lambda: None)
    run = ninfer("kernels", "--arch", "sm_90a", "--sass")
    assert run.code == 2
    assert run.err == "error: counting instructions needs nvdisasm; pip install nvidia-cuda-nvdisasm\n"
