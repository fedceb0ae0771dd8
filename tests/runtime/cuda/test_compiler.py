"""Kernels become cubins for any target without a card; the cache answers only for exactly the same inputs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ninfer_format.errors import UnsupportedError
from ninfer_runtime.backends.cuda.compiler import (
    CompileError,
    Compiler,
    Cubin,
    KernelSpec,
    Sources,
    arch_for,
    cache_folder,
    usable_folder,
)
from ninfer_runtime.backends.cuda.nvrtc import Nvrtc
from tests.runtime.cuda.kernels import COPY_SPEC, compiler_in, write_sources


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the sources that NVRTC really compiled."""
    seen: list[str] = []
    real = Nvrtc.compile

    def counted(self, name, source, headers, options):  # type: ignore[no-untyped-def]
        seen.append(name)
        return real(self, name, source, headers, options)

    monkeypatch.setattr(Nvrtc, "compile", counted)
    return seen


ARCHS = [
    ((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a"),
    ((12, 1), "sm_121a"),
]  # fmt: skip


@pytest.mark.parametrize("capability, arch", ARCHS)
def test_target_of_a_card_has_its_own_generations_instructions(capability: tuple[int, int], arch: str) -> None:
    assert arch_for(capability) == arch


def test_card_before_ampere_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match=r"compute capability 7\.5, 8\.0 or newer is needed"):
        arch_for((7, 5))


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_120a"])
def test_every_target_compiles_here(tmp_path: Path, arch: str) -> None:
    assert compiler_in(tmp_path, arch).compile(COPY_SPEC).image[:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", ["sm_75", "sm120", "compute_90", "", "sm_999a"])
def test_unknown_target_is_refused_by_name(tmp_path: Path, arch: str) -> None:
    with pytest.raises(UnsupportedError, match=arch or "''"):
        compiler_in(tmp_path, arch)


def test_second_compiler_finds_the_cubin_of_the_first(tmp_path: Path, compilations: list[str]) -> None:
    first = compiler_in(tmp_path).compile(COPY_SPEC)
    second = compiler_in(tmp_path).compile(COPY_SPEC)
    assert (first, compilations) == (second, ["copy.cu"])


def changed_header(folder: Path) -> None:
    (folder / "include" / "factor.cuh").write_text("#pragma once\n__device__ inline float factor() { return 3; }\n")


def changed_kernel(folder: Path) -> None:
    path = folder / "kernels" / "copy.cu"
    path.write_text(path.read_text().replace("factor() *", "factor() +"))


@pytest.mark.parametrize("change", [changed_header, changed_kernel])
def test_changed_text_is_compiled_again(tmp_path: Path, compilations: list[str], change) -> None:  # type: ignore[no-untyped-def]
    first = compiler_in(tmp_path).compile(COPY_SPEC)
    change(tmp_path)
    second = compiler_in(tmp_path).compile(COPY_SPEC)
    assert first.path != second.path
    assert len(compilations) == 2


@pytest.mark.parametrize(
    "spec",
    [
        KernelSpec("copy.cu", "copy", (("SCALE", "3.0f"),), 128),
        KernelSpec("copy.cu", "copy", (("SCALE", "2.0f"),), 64),
        KernelSpec("copy.cu", "copy", (("SCALE", "2.0f"),), 128, min_blocks=4),
    ],
)
def test_changed_option_is_compiled_again(tmp_path: Path, compilations: list[str], spec: KernelSpec) -> None:
    compiler = compiler_in(tmp_path)
    assert compiler.compile(COPY_SPEC).path != compiler.compile(spec).path
    assert len(compilations) == 2


def test_other_target_line_information_and_compiler_version_are_other_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = compiler_in(tmp_path)
    paths = {one.compile(COPY_SPEC).path for one in (plain, compiler_in(tmp_path, "sm_90a"))}
    paths.add(compiler_in(tmp_path, line_info=True).compile(COPY_SPEC).path)
    monkeypatch.setattr(plain._nvrtc, "version", (13, 99))
    paths.add(plain.compile(COPY_SPEC).path)
    assert len(paths) == 4


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def no_list(path: Path) -> None:
    path.write_text("[]")


DAMAGES = [
    (".cubin", cut), (".cubin", flip), (".cubin", Path.unlink), (".json", cut), (".json", empty), (".json", no_list),
    (".json", Path.unlink),
]  # fmt: skip


@pytest.mark.parametrize("suffix, damage", DAMAGES)
def test_damaged_entry_is_built_again(tmp_path: Path, compilations: list[str], suffix: str, damage) -> None:  # type: ignore[no-untyped-def]
    first = compiler_in(tmp_path).compile(COPY_SPEC)
    damage(first.path.with_suffix(suffix))
    again = [compiler_in(tmp_path).compile(COPY_SPEC) for _ in range(2)]
    assert [one.image for one in again] == [first.image] * 2
    assert len(compilations) == 2


def test_entry_that_cannot_be_read_is_built_again(tmp_path: Path, compilations: list[str]) -> None:
    first = compiler_in(tmp_path).compile(COPY_SPEC)
    first.path.unlink()
    first.path.mkdir()
    reported: list[str] = []
    again = compiler_in(tmp_path, report=reported.append).compile(COPY_SPEC)
    assert again.image == first.image
    assert len(reported) == 1
    assert "was not kept" in reported[0]


def test_folder_that_cannot_be_written_gives_way_with_one_line(tmp_path: Path, compilations: list[str]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    reported: list[str] = []
    compiler = compiler_in(tmp_path, folder=blocked / "kernels", report=reported.append)
    assert compiler.compile(COPY_SPEC) == compiler.compile(COPY_SPEC)
    assert compilations == ["copy.cu"]
    assert len(reported) == 1
    assert str(blocked) in reported[0]
    assert usable_folder(blocked / "kernels", reported.append) == compiler.folder


@pytest.mark.parametrize(
    "variables, folder",
    [
        ({"NINFER_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/kernels"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/ninfer/kernels"),
        ({"HOME": "/c"}, "/c/.cache/ninfer/kernels"),
    ],
)
def test_cache_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str
) -> None:
    for name in ("NINFER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_user_without_a_home_gets_a_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NINFER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    assert usable_folder(cache_folder()) == cache_folder()


def test_refused_source_is_one_line_with_variant_target_complaint_and_log(tmp_path: Path) -> None:
    write_sources(tmp_path)
    (tmp_path / "kernels" / "copy.cu").write_text('extern "C" __global__ void copy() { nonsense; }\n// more\n')
    with pytest.raises(CompileError) as raised:
        compiler_in(tmp_path, "sm_90a").compile(COPY_SPEC)
    line = str(raised.value)
    assert "\n" not in line
    assert line.startswith("kernel copy[SCALE=2.0f]x128 does not compile for sm_90a: copy.cu(1): error: identifier")
    log = Path(line.rpartition("full log: ")[2].rstrip(")"))
    assert "nonsense" in log.read_text()


def test_static_shared_memory_that_no_block_can_have_is_one_line(tmp_path: Path) -> None:
    write_sources(tmp_path)
    text = 'extern "C" __global__ void copy(float* y) { __shared__ float a[60000]; a[threadIdx.x] = 1; y[0] = a[1]; }'
    (tmp_path / "kernels" / "copy.cu").write_text(text)
    with pytest.raises(CompileError, match=r"for sm_120a: ptxas error.*shared") as raised:
        compiler_in(tmp_path).compile(COPY_SPEC)
    assert "\n" not in str(raised.value)


def test_missing_header_is_the_compilers_complaint(tmp_path: Path) -> None:
    write_sources(tmp_path)
    (tmp_path / "include" / "factor.cuh").unlink()
    compiler = Compiler("sm_80", sources=Sources(tmp_path / "kernels", tmp_path / "include"), folder=tmp_path)
    with pytest.raises(
        CompileError, match=r'could not open source file "factor\.cuh"|cannot open source file "factor\.'
    ):
        compiler.compile(COPY_SPEC)


def test_missing_kernel_is_named(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"no absent\.cu"):
        compiler_in(tmp_path).compile(KernelSpec("absent.cu", "absent"))


def test_header_is_found_through_headers_and_only_once(tmp_path: Path) -> None:
    write_sources(tmp_path)
    (tmp_path / "include" / "factor.cuh").write_text('#pragma once\n#  include "inner.cuh"\n#include "absent.cuh"\n')
    (tmp_path / "include" / "inner.cuh").write_text('#pragma once\n#include "factor.cuh"\n')
    found = Sources(tmp_path / "kernels", tmp_path / "include").headers("copy.cu")
    assert list(found) == ["factor.cuh", "inner.cuh"]


def test_warning_reaches_the_caller_once_and_the_cubin_keeps_it(tmp_path: Path) -> None:
    write_sources(tmp_path)
    path = tmp_path / "kernels" / "copy.cu"
    path.write_text(path.read_text().replace("const int i", "int unused; const int i"))
    reported: list[str] = []
    made = [compiler_in(tmp_path, report=reported.append).compile(COPY_SPEC) for _ in range(2)]
    assert len(reported) == 1
    assert "unused" in reported[0]
    assert made[0].warnings == made[1].warnings
    assert "unused" in made[1].warnings[0]


def test_many_specs_share_what_is_the_same_and_come_back_by_spec(tmp_path: Path, compilations: list[str]) -> None:
    specs = [KernelSpec("heavy.cu", name, (), 128, shared) for name in ("spills", "indexed") for shared in (0, 1024)]
    made = compiler_in(tmp_path).compile_all([*specs, COPY_SPEC, *specs], jobs=2)
    assert set(made) == {*specs, COPY_SPEC}
    assert all(isinstance(cubin, Cubin) for cubin in made.values())
    assert sorted(compilations) == ["copy.cu", "heavy.cu"]


def test_one_refused_spec_ends_them_all(tmp_path: Path) -> None:
    specs = [KernelSpec("copy.cu", "copy", (("SCALE", value),), 128) for value in ("1", "oops", "2")]
    with pytest.raises(CompileError, match="oops"):
        compiler_in(tmp_path).compile_all(specs, jobs=2)


def test_entries_are_plain_files_with_a_readable_record(tmp_path: Path) -> None:
    made = compiler_in(tmp_path).compile(COPY_SPEC)
    record = json.loads(made.path.with_suffix(".json").read_text())
    assert "registers" in record["log"]
    assert made.path.read_bytes() == made.image
    assert sorted(os.listdir(made.path.parent)) == sorted([made.path.name, made.path.with_suffix(".json").name])
