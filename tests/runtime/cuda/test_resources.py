"""Registers, stack, spills and shared memory read from real cubins; blocks per SM from the limits of the card."""

from __future__ import annotations

from pathlib import Path

import pytest

from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.resources import (
    CubinError,
    Resources,
    blocks_per_sm,
    limits_of,
    read_resources,
    resources_of,
)
from ninfer_runtime.backends.cuda.sass import instructions_per_loop, main_loop
from tests.runtime.cuda.kernels import COPY_SPEC, compiler_in

ARCHS = ("sm_80", "sm_90a", "sm_120a")
HEAVY = KernelSpec("heavy.cu", "spills")


@pytest.mark.parametrize("arch", ARCHS)
def test_light_kernel_has_registers_and_nothing_else(tmp_path: Path, arch: str) -> None:
    made = compiler_in(tmp_path, arch).compile(COPY_SPEC)
    found = resources_of(made.image, made.log, "copy")
    assert 1 <= found.registers <= 32
    assert (found.local_bytes, found.spill_bytes, found.static_shared_bytes) == (0, 0, 0)


@pytest.mark.parametrize("arch", ARCHS)
def test_spills_are_told_from_arrays_that_live_in_local_memory(tmp_path: Path, arch: str) -> None:
    made = compiler_in(tmp_path, arch).compile(HEAVY)
    found = read_resources(made.image, made.log)
    assert set(found) == {"spills", "indexed"}
    assert found["spills"].registers == 255
    assert found["spills"].local_bytes > 0
    assert min(found["spills"].spill_store_bytes, found["spills"].spill_load_bytes) > 0
    assert (found["indexed"].local_bytes, found["indexed"].spill_bytes) == (64, 0)
    assert found["indexed"].static_shared_bytes == 256


def test_absent_kernel_is_named_with_those_there_are(tmp_path: Path) -> None:
    made = compiler_in(tmp_path).compile(HEAVY)
    with pytest.raises(CubinError, match="no kernel 'copy', only indexed, spills"):
        resources_of(made.image, made.log, "copy")


@pytest.mark.parametrize("length", [0, 5, 63, 64, 200, 1000])
def test_torn_cubin_is_an_error_of_ours(tmp_path: Path, length: int) -> None:
    made = compiler_in(tmp_path).compile(COPY_SPEC)
    with pytest.raises(CubinError):
        read_resources(made.image[:length], made.log)


def test_something_else_than_a_cubin_is_an_error_of_ours() -> None:
    with pytest.raises(CubinError, match="not a 64-bit"):
        read_resources(b"MZ" + bytes(200), "")


BLOCKS = [
    # arch, registers, threads, shared bytes, blocks: what bounds it
    ("sm_120a", 32, 256, 0, 6),  # 48 warps
    ("sm_90a", 32, 256, 0, 8),  # 64 warps
    ("sm_120a", 255, 256, 0, 1),  # registers
    ("sm_120a", 128, 256, 0, 2),
    ("sm_120a", 129, 256, 0, 1),  # granules of 8 registers
    ("sm_120a", 168, 128, 0, 3),
    ("sm_120a", 16, 32, 0, 24),  # blocks
    ("sm_90a", 16, 32, 0, 32),
    ("sm_120a", 32, 256, 101_376, 1),  # all of the shared memory
    ("sm_120a", 32, 256, 101_377, 0),
    ("sm_120a", 32, 256, 50_176, 2),  # (102,400 - 2 x 1,024) / 2
    ("sm_120a", 32, 256, 50_177, 1),
    ("sm_90a", 32, 256, 101_376, 2),
    ("sm_86", 16, 32, 0, 16),
]


@pytest.mark.parametrize("arch, registers, threads, shared, blocks", BLOCKS)
def test_blocks_per_sm(arch: str, registers: int, threads: int, shared: int, blocks: int) -> None:
    assert blocks_per_sm(Resources(registers, 0, 0, 0, 0), threads, shared, limits_of(arch)) == blocks


def test_static_shared_memory_counts_too() -> None:
    limits = limits_of("sm_120a")
    assert blocks_per_sm(Resources(32, 0, 0, 0, 0), 128, 50_176, limits) == 2
    assert blocks_per_sm(Resources(32, 0, 0, 0, 128), 128, 50_176, limits) == 1


def test_newer_card_of_a_generation_takes_the_limits_of_the_nearest_older_one() -> None:
    assert limits_of("sm_88") == limits_of("sm_87")
    assert limits_of("sm_121a") == limits_of("sm_120a")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_main_loop_is_the_one_with_the_matrix_instructions(tmp_path: Path, arch: str) -> None:
    made = compiler_in(tmp_path, arch).compile(KernelSpec("matrix.cu", "product", (), 32))
    loop = main_loop(made.image, "product")
    assert loop is not None
    assert (loop.n_matrix, loop.global_bytes) == (6, 16)
    assert 6 + 1 + 2 <= loop.n_instructions <= 30
    assert loop.per_byte(512) == loop.n_instructions / 512
    assert instructions_per_loop(made.image, "product") == loop.n_instructions


def test_kernel_without_loop_has_no_main_loop(tmp_path: Path) -> None:
    made = compiler_in(tmp_path).compile(COPY_SPEC)
    assert main_loop(made.image, "copy") is None
    assert instructions_per_loop(made.image, "copy") == 0


def test_disassembly_names_an_absent_kernel_and_refuses_other_files(tmp_path: Path) -> None:
    made = compiler_in(tmp_path).compile(COPY_SPEC)
    with pytest.raises(CubinError, match="no kernel 'other', only copy"):
        main_loop(made.image, "other")
    with pytest.raises(CubinError, match="nvdisasm refuses"):
        main_loop(b"nothing", "copy")
