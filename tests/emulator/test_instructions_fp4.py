"""The emulated block-scaled FP4 product against the model of the instruction, and the model against known products."""

import ctypes
from collections.abc import Iterator
from itertools import product as combinations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer_format.numeric.nvfp4 import E2M1, E4M3FN
from ninfer_runtime.backends.cuda.compiler import Compiler, KernelSpec, Sources
from tests.emulator import fp4_model
from tests.emulator.build import HERE
from tests.emulator.device import EmulatedDevice

Words = NDArray[np.uint32]
SELECTORS = [(0, 0), (1, 1), (0, 2), (1, 3)]
ALL_SELECTORS = list(combinations((0, 1), (0, 1, 2, 3)))
LARGEST_SCALE = 0x7E


class Fp4ProbeParams(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("a", "b", "c", "scales", "out"))


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice(folders=(HERE,), arch="sm_120a") as device:
        yield device


def spec(pair_a: int, lane_b: int) -> KernelSpec:
    return KernelSpec("instructions_fp4.cu", "probe_mma_fp4", (("SELECT_A", pair_a), ("SELECT_B", lane_b)), 32)


def emulated(
    device: EmulatedDevice, a: Words, b: Words, c: NDArray[np.float32], scales: Words, pair_a: int, lane_b: int
) -> NDArray[np.float32]:
    pointers = [device.put(array) for array in (a, b, c, scales)]
    out = device.allocate(4 * 128)
    params = Fp4ProbeParams(*pointers, out)
    device.kernel(spec(pair_a, lane_b)).launch((1, 1, 1), params, device.stream(), pdl=False)
    found: NDArray[np.float32] = device.get(out, np.float32, (32, 4))
    for pointer in (*pointers, out):
        device.free(pointer)
    return found


def registers(random: np.random.Generator) -> tuple[Words, Words]:
    return (
        random.integers(0, 2**32, (32, 4), np.uint32),
        random.integers(0, 2**32, (32, 2), np.uint32),
    )


def bytes_to_words(scales: NDArray[np.integer]) -> Words:
    """Bytes [32, 2, 4] → words [32, 2]."""
    return np.ascontiguousarray(scales.astype(np.uint8)).view(np.uint32)[..., 0]


@pytest.mark.parametrize("pair_a, lane_b", SELECTORS)
def test_sums_that_every_order_gives_exactly_are_bit_identical(
    device: EmulatedDevice, pair_a: int, lane_b: int, fresh_seed: int
) -> None:
    random = np.random.default_rng(fresh_seed)
    a, b = registers(random)
    powers = np.array([0x28, 0x30, 0x38, 0x40])  # 1/4, 1/2, 1, 2; every lane's and byte's differs from its neighbours'
    scales = bytes_to_words(powers[random.integers(0, 4, (32, 2, 4))])
    c = random.integers(-512, 512, (32, 4)).astype(np.float32)
    expected = fp4_model.product(a, b, c, scales, pair_a, lane_b)
    assert np.array_equal(emulated(device, a, b, c, scales, pair_a, lane_b), expected)


@pytest.mark.parametrize("pair_a, lane_b", [(0, 0), (1, 3)])
def test_any_scales(device: EmulatedDevice, pair_a: int, lane_b: int, fresh_seed: int) -> None:
    random = np.random.default_rng(fresh_seed)
    a, b = registers(random)
    scales = bytes_to_words(random.integers(0, LARGEST_SCALE + 1, (32, 2, 4)))
    c = random.standard_normal((32, 4)).astype(np.float32)
    found = emulated(device, a, b, c, scales, pair_a, lane_b)
    largest = np.abs(
        fp4_model.product(a & np.uint32(0x77777777), b & np.uint32(0x77777777), np.abs(c), scales, pair_a, lane_b)
    )
    assert (np.abs(found - fp4_model.product(a, b, c, scales, pair_a, lane_b)) <= 64 * 2.0**-24 * largest).all()


def test_one_element_of_each_operand_at_a_time(device: EmulatedDevice) -> None:
    """Each nibble of A meets the nibble of B of its k, and no other; each with the scales of its row, column, block."""
    random = np.random.default_rng(7)
    scale_bytes = random.integers(0x30, 0x48, (32, 2, 4))
    scales, zeros = bytes_to_words(scale_bytes), np.zeros((32, 4), np.float32)
    everywhere = np.full((32, 2), 0x22222222, np.uint32)  # 1.0
    for lane, register, nibble in combinations((0, 9, 18, 31), range(4), (0, 3, 7)):
        a = np.zeros((32, 4), np.uint32)
        a[lane, register] = 5 << 4 * nibble
        row, k = fp4_model.a_place(lane, register, nibble)
        found = emulated(device, a, everywhere, zeros, scales, 0, 1)
        of_row = E4M3FN[scale_bytes[4 * (row % 8) + row // 8, 0, k // 16]]
        for other in range(32):
            for i in range(4):
                m, n = fp4_model.c_place(other, i)
                expected = E2M1[5] * of_row * E4M3FN[scale_bytes[4 * n + 1, 1, k // 16]] if m == row else 0.0
                assert found[other, i] == expected


def test_a_scale_that_is_no_number_spoils_its_row_or_column(device: EmulatedDevice) -> None:
    a, b = np.full((32, 4), 0x22222222, np.uint32), np.full((32, 2), 0x22222222, np.uint32)
    scale_bytes = np.full((32, 2, 4), 0x38)
    scale_bytes[4 * 3 + 1, 0, 2] = 0x7F  # row 11
    found = emulated(device, a, b, np.zeros((32, 4), np.float32), bytes_to_words(scale_bytes), 0, 0)
    rows = np.array([[fp4_model.c_place(lane, i)[0] for i in range(4)] for lane in range(32)])
    assert np.array_equal(np.isnan(found), rows == 11)
    assert (found[rows != 11] == 64.0).all()


def test_it_compiles_for_its_cards_alone(tmp_path: Path) -> None:
    sources, specs = Sources(HERE), [spec(*selectors) for selectors in ALL_SELECTORS]
    for cubin in Compiler("sm_120a", sources=sources, folder=tmp_path).compile_all(specs).values():
        assert cubin.image.startswith(b"\x7fELF")
        assert not cubin.warnings
