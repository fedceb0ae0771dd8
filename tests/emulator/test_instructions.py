"""Every function of ptx.cuh does what the PTX ISA says: fragment layouts, lanes, rounding; bit for bit where it can."""

import ctypes
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer_runtime.backends.cuda.compiler import KernelSpec
from tests.emulator.build import HERE
from tests.emulator.device import EmulatedDevice

POISON = 0xFFFFFFFF
NAN_BF16 = NAN_HALF = 0x7FFF
Words = NDArray[np.uint32]
LANE = np.arange(32)[:, None]
GROUP, QUAD = LANE // 4, LANE % 4


class ProbeParams(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in ("a", "b", "c", "out")), ("n", ctypes.c_int))


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice(folders=(HERE,)) as device:
        yield device


def probe(
    device: EmulatedDevice,
    name: str,
    inputs: list[NDArray[Any]],
    n_out: int,
    n: int = 0,
    grid: int = 1,
    out: Words | None = None,
    **options: Any,
) -> Words:
    """Run ``probe_NAME`` and return the words of ``out``."""
    spec = KernelSpec(
        "instructions.cu", f"probe_{name}", **{"defines": (("WAIT_GROUPS", 0),), "threads": 32, **options}
    )
    pointers = [device.put(array) for array in inputs] + [0] * (3 - len(inputs))
    result = device.allocate(4 * n_out) if out is None else device.put(out)
    device.kernel(spec).launch((grid, 1, 1), ProbeParams(*pointers, result, n), device.stream(), pdl=False)
    words: Words = device.get(result, np.uint32, n_out)
    for pointer in filter(None, (*pointers, result)):
        device.free(pointer)
    return words


# The layouts, as "Matrix Fragments for mma.m16n8k16" and "… mma.m16n8k32" of the PTX ISA state them.
def places_16() -> tuple[tuple[NDArray[Any], NDArray[Any]], ...]:
    i = np.arange(8)[None]
    a = (GROUP + 8 * ((i // 2) % 2), QUAD * 2 + (i & 1) + 8 * (i >= 4))
    j = np.arange(4)[None]
    b = (QUAD * 2 + (j & 1) + 8 * (j >= 2), GROUP + 0 * j)
    return a, b


def places_32() -> tuple[tuple[NDArray[Any], NDArray[Any]], ...]:
    i = np.arange(16)[None]
    a = (GROUP + 8 * ((i // 4) % 2), QUAD * 4 + (i & 3) + 16 * (i >= 8))
    j = np.arange(8)[None]
    b = (QUAD * 4 + (j & 3) + 16 * (j >= 4), GROUP + 0 * j)
    return a, b


def places_c() -> tuple[NDArray[Any], NDArray[Any]]:
    i = np.arange(4)[None]
    return GROUP + 8 * (i >= 2), QUAD * 2 + (i & 1)


@pytest.mark.parametrize("name, dtype", [("mma_bf16", ml_dtypes.bfloat16), ("mma_f16", np.float16)])
def test_mma_of_floats_equals_the_product_of_matrices(
    device: EmulatedDevice, name: str, dtype: Any, fresh_seed: int
) -> None:
    random = np.random.default_rng(fresh_seed)
    a, b = random.standard_normal((16, 16)).astype(dtype), random.standard_normal((16, 8)).astype(dtype)
    c = random.standard_normal((16, 8)).astype(np.float32)
    of_a, of_b = places_16()
    inputs = [np.ascontiguousarray(a[of_a]).view(np.uint32), np.ascontiguousarray(b[of_b]).view(np.uint32)]
    out = probe(device, name, [*inputs, c[places_c()]], 128).view(np.float32).reshape(32, 4)
    exact_a, exact_b = a.astype(np.float64), b.astype(np.float64)
    expected = c.astype(np.float64) + exact_a @ exact_b
    # Sixteen additions round; each by at most half a unit of a sum that the sum of magnitudes bounds.
    bound = 16 * 2.0**-24 * (np.abs(c) + np.abs(exact_a) @ np.abs(exact_b))
    assert (np.abs(out - expected[places_c()]) <= bound[places_c()]).all()


def test_mma_of_bytes_is_exact(device: EmulatedDevice, fresh_seed: int) -> None:
    random = np.random.default_rng(fresh_seed)
    a, b = random.integers(-128, 128, (16, 32), np.int8), random.integers(-128, 128, (32, 8), np.int8)
    a[0], b[:, 0] = -128, -128
    c = random.integers(-(2**31), 2**31, (16, 8)).astype(np.int32)
    of_a, of_b = places_32()
    inputs = [np.ascontiguousarray(a[of_a]).view(np.uint32), np.ascontiguousarray(b[of_b]).view(np.uint32)]
    out = probe(device, "mma_s8", [*inputs, c[places_c()]], 128).view(np.int32).reshape(32, 4)
    with np.errstate(over="ignore"):
        expected = c + a.astype(np.int32) @ b.astype(np.int32)
    assert np.array_equal(out, expected[places_c()])


def test_ldmatrix_hands_out_rows_and_columns(device: EmulatedDevice, fresh_seed: int) -> None:
    matrices = np.random.default_rng(fresh_seed).integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    out = probe(device, "ldmatrix", [matrices], 384, shared_bytes=512)
    rows, columns = LANE // 4, 2 * (LANE % 4) + np.arange(2)[None]
    plain = np.stack([np.ascontiguousarray(m[rows, columns]).view(np.uint32)[:, 0] for m in matrices], 1)
    turned = np.stack([np.ascontiguousarray(m.T[rows, columns]).view(np.uint32)[:, 0] for m in matrices], 1)
    assert np.array_equal(out[:128].reshape(32, 4), plain)
    assert np.array_equal(out[128:256].reshape(32, 4), turned)
    assert np.array_equal(out[256:320].reshape(32, 2), plain[:, :2])
    assert np.array_equal(out[320:].reshape(32, 2), turned[:, :2])


@pytest.mark.parametrize("source", [0, 7, 31])
def test_lanes_exchange_words(device: EmulatedDevice, source: int, fresh_seed: int) -> None:
    lane = np.arange(32)
    a = np.random.default_rng(fresh_seed).standard_normal(32).astype(np.float32).view(np.uint32)
    out = probe(device, "shuffle", [a], 288, n=source)
    assert np.array_equal(out[:32], a[lane ^ 5])
    assert (out[32:64] == a[source]).all()
    assert np.array_equal(out[64:96], a[np.where(lane >= 3, lane - 3, lane)])
    assert np.array_equal(out[96:128], a[np.where(lane < 29, lane + 3, lane)])
    assert (out[128:160] == np.sum((a & 1) << lane.astype(np.uint32))).all()
    assert np.array_equal(out[160:224].reshape(32, 2), np.stack([lane ^ 1, a[lane ^ 1]], 1))
    assert (out[224:256].view(np.float32) == 496.0).all()
    assert (out[256:].view(np.float32) == a.view(np.float32).max()).all()


FUNCTIONS = (
    "float_to_bf16", "float_to_half", "bf16_to_float", "half_to_float", "pack_bf16", "pack_half", "bf16_hi",
    "half_hi", "fma_bf16x2", "mul_bf16x2", "add_bf16x2", "fma_f16x2", "mul_f16x2", "add_f16x2", "and_or", "xor3",
    "prmt", "dp4a", "float_to_int_rn", "umulhi", "exp2_approx", "rcp_approx", "rsqrt_approx",
)  # fmt: skip


def numbers(device: EmulatedDevice, a: Words, b: Words | None = None, c: Words | None = None) -> dict[str, Words]:
    """Results of all functions on single numbers, by name."""
    zeros = np.zeros_like(a)
    inputs = [a, zeros if b is None else b, zeros if c is None else c]
    out = probe(device, "numbers", inputs, len(FUNCTIONS) * a.size, n=a.size, grid=4, threads=256)
    return dict(zip(FUNCTIONS, out.reshape(len(FUNCTIONS), a.size), strict=True))


def rounding_cases(random: np.random.Generator) -> Words:
    """fp32 words at, just below and just above what rounds to a half or a bf16 either way, and any others."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = halves[np.isfinite(halves)]
    with np.errstate(over="ignore", invalid="ignore"):
        larger = np.nextafter(np.abs(halves).astype(np.float16), np.float16(np.inf))
        middles = ((np.abs(halves) + larger) / 2).astype(np.float32)
    bf16_middles = (np.arange(2**16, dtype=np.uint32) << 16 | 0x8000).astype(np.uint32)
    exact = np.concatenate([halves.view(np.uint32), middles.view(np.uint32), bf16_middles])
    return np.concatenate([exact, exact + 1, exact - 1, random.integers(0, 2**32, 100_000, np.uint32)])


def test_rounding_to_16_bits_is_to_nearest_even(device: EmulatedDevice, fresh_seed: int) -> None:
    words = rounding_cases(np.random.default_rng(fresh_seed))
    values = words.view(np.float32)
    out = numbers(device, words, words[::-1].copy())
    with np.errstate(over="ignore", invalid="ignore"):
        half = np.where(np.isnan(values), NAN_HALF, values.astype(np.float16).view(np.uint16)).astype(np.uint32)
        bf16 = np.where(np.isnan(values), NAN_BF16, values.astype(ml_dtypes.bfloat16).view(np.uint16)).astype(np.uint32)
    assert np.array_equal(out["float_to_half"], half)
    assert np.array_equal(out["float_to_bf16"], bf16)
    assert np.array_equal(out["pack_half"], half | half[::-1] << 16)
    assert np.array_equal(out["pack_bf16"], bf16 | bf16[::-1] << 16)


def test_widening_all_16_bit_words_is_exact(device: EmulatedDevice) -> None:
    words: Words = np.arange(2**16, dtype=np.uint32)
    upper: Words = words << np.uint32(16)
    low, high = numbers(device, words), numbers(device, upper)
    half, bf16 = (words.astype(np.uint16).view(dtype).astype(np.float32) for dtype in (np.float16, ml_dtypes.bfloat16))
    for found in (low["half_to_float"], high["half_hi"]):
        assert np.array_equal(found.view(np.float32), half, equal_nan=True)
    for found in (low["bf16_to_float"], high["bf16_hi"]):
        assert np.array_equal(found, words << 16)
        assert np.array_equal(found.view(np.float32), bf16, equal_nan=True)


def exact_fma(dtype: Any, a: int, b: int, c: int) -> int:
    """Word of a·b + c rounded once, by rational arithmetic; operands are finite words."""
    x, y, z = (Fraction(float(np.uint16(word).view(dtype))) for word in (a, b, c))
    exact = x * y + z
    info = ml_dtypes.finfo(dtype)
    if exact == 0:
        negative = ((a ^ b) >> 15) and c >> 15 if (x * y == 0 and z == 0) else 0
        return 0x8000 if negative else 0
    exponent = max(int(info.minexp), _log2_floor(abs(exact)))
    step = Fraction(2) ** (exponent - int(info.nmant))
    rounded = round(exact / step) * step  # Python rounds halves to even
    if abs(rounded) > Fraction(float(info.max)):
        return (0x8000 if exact < 0 else 0) | int(np.array(np.inf, dtype).view(np.uint16))
    word = int(np.array(float(abs(rounded))).astype(dtype).view(np.uint16))
    return word | (0x8000 if exact < 0 else 0)


def _log2_floor(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


@pytest.mark.parametrize("name, dtype", [("bf16x2", ml_dtypes.bfloat16), ("f16x2", np.float16)])
def test_pairs_are_multiplied_and_added_with_one_rounding(
    device: EmulatedDevice, name: str, dtype: Any, fresh_seed: int
) -> None:
    random = np.random.default_rng(fresh_seed)
    a, b, c = random.integers(0, 2**16, (3, 3000)).astype(np.uint16)
    with np.errstate(all="ignore"):
        product = a.view(dtype).astype(np.float64) * b.view(dtype).astype(np.float64)
        near = (-product * random.choice([1.0, 1.01, 0.99, 2.0**-9, 2.0**9], product.size)).astype(dtype)
    c = np.where(random.random(c.size) < 0.6, near.view(np.uint16), c)
    finite = np.isfinite(np.stack([a, b, c]).view(dtype).astype(np.float32)).all(0)
    a, b, c = (word[finite].astype(np.uint32) for word in (a, b, c))
    out = numbers(device, a << 16 | b, b << 16 | a, c << 16 | c)
    expected = [exact_fma(dtype, *map(int, row)) for row in zip(a, b, c, strict=True)]
    assert np.array_equal(out[f"fma_{name}"], np.array([word << 16 | word for word in expected], np.uint32))
    with np.errstate(all="ignore"):
        x, y = (word.astype(np.uint16).view(dtype) for word in (a, b))
        for function, value in ((f"mul_{name}", x * y), (f"add_{name}", x + y)):
            word = value.view(np.uint16).astype(np.uint32)
            assert np.array_equal(out[function], word << 16 | word), function


def test_integer_functions(device: EmulatedDevice, fresh_seed: int) -> None:
    a, b, c = np.random.default_rng(fresh_seed).integers(0, 2**32, (3, 500), np.uint32)
    out = numbers(device, a, b, c)
    assert np.array_equal(out["and_or"], a & b | c)
    assert np.array_equal(out["xor3"], a ^ b ^ c)
    assert np.array_equal(out["umulhi"], (a.astype(np.uint64) * b >> np.uint64(32)).astype(np.uint32))
    pool = np.stack([a, b], 1).view(np.uint8).astype(np.uint32)
    picks = c[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
    picked = np.take_along_axis(pool, (picks & 7).astype(np.int64), 1)
    picked = np.where(picks & 8, np.where(picked & 0x80, 0xFF, 0), picked).astype(np.uint8)
    assert np.array_equal(out["prmt"], np.ascontiguousarray(picked).view(np.uint32)[:, 0])
    bytes_of = [np.stack([word], 1).view(np.int8).astype(np.int64) for word in (a, b)]
    total = c.view(np.int32) + (bytes_of[0] * bytes_of[1]).sum(1)
    assert np.array_equal(out["dp4a"], (total & 0xFFFFFFFF).astype(np.uint32))


def test_conversion_to_int_rounds_to_even_and_saturates(device: EmulatedDevice) -> None:
    values = np.array([0.5, 1.5, -0.5, -2.5, 3e9, -3e9, np.inf, -np.inf, np.nan, 2147483520.0], np.float32)
    out = numbers(device, values.view(np.uint32))["float_to_int_rn"].view(np.int32)
    assert out.tolist() == [0, 2, 0, -2, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 0, 2147483520]


def test_approximations_are_close_and_flush(device: EmulatedDevice, fresh_seed: int) -> None:
    x = np.random.default_rng(fresh_seed).uniform(0.01, 100, 1000).astype(np.float32)
    out = {name: words.view(np.float32) for name, words in numbers(device, x.view(np.uint32)).items()}
    wide = x.astype(np.float64)
    for name, exact in (("exp2_approx", 2**wide), ("rcp_approx", 1 / wide), ("rsqrt_approx", wide**-0.5)):
        assert np.allclose(out[name], exact, rtol=2.0**-21, atol=0), name
    tiny = np.array([1e-40, -130.0, -0.0], np.float32).view(np.uint32)
    edge = {name: words.view(np.float32) for name, words in numbers(device, tiny).items()}
    assert edge["exp2_approx"].tolist() == [1.0, 0.0, 1.0]
    assert edge["rcp_approx"][0] == np.inf
    assert edge["rsqrt_approx"][0] == np.inf


@pytest.mark.parametrize("groups", [0, 1, 2, 3])
def test_asynchronous_copies_arrive_with_the_wait_for_their_group(groups: int, fresh_seed: int) -> None:
    source = np.random.default_rng(fresh_seed).integers(0, 2**31, (3, 64, 4)).astype(np.uint32)
    options: dict[str, Any] = {"threads": 64, "shared_bytes": source.nbytes, "defines": (("WAIT_GROUPS", groups),)}
    with EmulatedDevice(folders=(HERE,), watch=False) as device:
        out = probe(device, "cp_async", [source], source.size, **options).reshape(source.shape)
    expected = source.copy()
    expected[1, 1::2] = 0
    expected[3 - groups :] = POISON
    assert np.array_equal(out, expected)


def test_named_barriers_and_block_sums(device: EmulatedDevice) -> None:
    values = np.arange(256, dtype=np.uint32)
    out = probe(device, "barriers", [values], 384, threads=256, shared_bytes=1024)
    assert np.array_equal(out[:128], values[127::-1])
    assert (out[128:].view(np.float32) == 255 * 128 + 256).all()


def test_blocks_run_from_the_last_to_the_first(device: EmulatedDevice) -> None:
    out = probe(device, "block_order", [], 8, grid=7, out=np.zeros(8, np.uint32))
    assert out.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
