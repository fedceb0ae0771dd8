"""linear_large.cu under the emulator: formats and epilogues against float64, on the weights that the kernel makes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from ninfer_format.errors import SignatureError
from ninfer_runtime.backends.cuda.ops.linear_large import (
    Epilogue,
    LinearLarge,
    Output,
    clear_workspace,
    launches,
    schedule,
    specs,
    workspace_bytes,
)
from ninfer_runtime.backends.cuda.packing import TILE_FORMATS, PackedMatrix, activation_stride, pack_matrix
from tests.emulator.device import EmulatedDevice
from tests.runtime.cuda.random_nvfp4 import random_nvfp4

Floats = npt.NDArray[np.float64]
FORMATS = tuple(TILE_FORMATS)


def to_bf16(values: npt.NDArray[np.floating]) -> Floats:
    """Nearest bf16, ties to even, of any float64 in the normal range."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    rounded: Floats = np.ldexp(np.rint(mantissa * 256), exponent - 8)
    return rounded


def bf16_words(values: Floats) -> npt.NDArray[np.uint16]:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_words(words: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (words.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Weight:
    """A random matrix: packed in device memory, and as the operand that the kernel makes of it."""

    matrix: PackedMatrix
    operand: Floats  # [n_rows, k]


def random_weight(
    device: EmulatedDevice, rng: np.random.Generator, name: str, n_rows: int, k: int, glu: bool = False
) -> Weight:
    matrix = PackedMatrix("w", name, n_rows, k, interleaved=glu)
    tile = matrix.tile
    if not tile.group:
        operand = to_bf16(rng.standard_normal((n_rows, k)) / np.sqrt(k))
        return Weight(matrix.at(device.put(pack_matrix(matrix, bf16_words(operand), None))), operand)
    if tile.floating:
        matrix, codes, scale_words, values = random_nvfp4(rng, matrix)
        return Weight(matrix.at(device.put(pack_matrix(matrix, codes, scale_words))), values)
    top = 1 << (tile.bits - 1)
    codes = rng.integers(-top, top, (n_rows, k))
    scales = (rng.uniform(0.2, 2.0, (n_rows, -(-k // tile.group))) / (top * np.sqrt(k))).astype(np.float16)
    packed = pack_matrix(matrix, codes, scales.view(np.uint16))
    scale = np.repeat(scales.astype(np.float64), tile.group, axis=1)[:, :k]
    operand = to_bf16(codes * to_bf16(scale))
    return Weight(matrix.at(device.put(packed)), operand)


def random_activations(
    device: EmulatedDevice, rng: np.random.Generator, n_tokens: int, k: int
) -> tuple[int, int, Floats]:
    """Pointer, stride and values; columns from K on hold zeros as far as tiles reach, then NaN."""
    values = to_bf16(rng.standard_normal((n_tokens, k)))
    stride = activation_stride(k) + 8
    words = np.full((n_tokens, stride), 0xFFFF, np.uint16)
    words[:, : activation_stride(k)] = 0
    words[:, :k] = bf16_words(values)
    return device.put(words), stride, values


def bound(x: Floats, w: Floats) -> Floats:
    """Largest error of fp32 sums in any order, and then some: 2e-6 |x| |w|."""
    limit: Floats = 2e-6 * np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(w, axis=1)[None]
    return limit


def run(
    device: EmulatedDevice,
    weights: Sequence[Weight],
    epilogue: Epilogue,
    activations: tuple[int, int, Floats],
    outputs: Sequence[Output],
) -> None:
    workspace = device.empty(workspace_bytes(device))
    clear_workspace(device, workspace)
    op = LinearLarge(device, [w.matrix for w in weights], epilogue, max_tokens=1024, workspace=workspace)
    pointer, stride, values = activations
    op.launch(device.stream(), len(values), pointer, stride, outputs)
    device.synchronize()


def check_bf16(words: npt.NDArray[np.uint16], expected: Floats, error: Floats) -> None:
    """Within ``error`` before one rounding to bf16."""
    found = from_words(words).astype(np.float64)
    assert np.all(np.isfinite(found))
    assert np.all(np.abs(found - expected) <= error + 2.0**-8 * np.abs(expected))


@pytest.mark.parametrize("n_tokens", [49, 64, 65, 127])
@pytest.mark.parametrize("name", FORMATS)
def test_stored_product_is_the_float64_one(name: str, n_tokens: int, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    n_rows, k = 77, 264 + 8 * (n_tokens % 2) - n_tokens % 5
    with EmulatedDevice(n_sms=3) as device:
        weight = random_weight(device, rng, name, n_rows, k)
        x = random_activations(device, rng, n_tokens, k)
        out = device.empty(n_tokens * n_rows * 4)
        run(device, [weight], Epilogue.STORE, x, [Output(out, "fp32")])
        found = device.get(out, np.float32, (n_tokens, n_rows))
        assert np.all(np.abs(found - x[2] @ weight.operand.T) <= bound(x[2], weight.operand))


@pytest.mark.parametrize("n_rows", [33, 46])
@pytest.mark.parametrize("name", ["Q4G64_F16S", "BF16"])
def test_bf16_store_keeps_to_its_columns(name: str, n_rows: int, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    n_tokens, k, stride = 65, 128, n_rows + 3
    with EmulatedDevice(n_sms=2) as device:
        weight = random_weight(device, rng, name, n_rows, k)
        x = random_activations(device, rng, n_tokens, k)
        out = device.empty(n_tokens * stride * 2)
        run(device, [weight], Epilogue.STORE, x, [Output(out, "bf16", stride)])
        words = device.get(out, np.uint16, (n_tokens, stride))
        check_bf16(words[:, :n_rows], x[2] @ weight.operand.T, bound(x[2], weight.operand))
        assert np.all(words[:, n_rows:] == 0xFFFF)


@pytest.mark.parametrize("name", FORMATS)
def test_swiglu_pairs_gate_and_up(name: str, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    n_tokens, width, k = 49, 44, 192
    with EmulatedDevice(n_sms=2) as device:
        weight = random_weight(device, rng, name, 2 * width, k, glu=True)
        x = random_activations(device, rng, n_tokens, k)
        out = device.empty(n_tokens * width * 2)
        run(device, [weight], Epilogue.SWIGLU, x, [Output(out)])
        gate, up = np.split(x[2] @ weight.operand.T, 2, axis=1)
        expected = gate / (1 + np.exp(-gate)) * up
        error = np.max(bound(x[2], weight.operand)) * (1.1 * np.abs(up) + np.abs(gate) + 1) + 1e-6 * np.abs(expected)
        check_bf16(device.get(out, np.uint16, (n_tokens, width)), expected, error)


@pytest.mark.parametrize("name", FORMATS)
def test_residual_is_added_in_fp32(name: str, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    n_tokens, n_rows, k = 128, 49, 320
    with EmulatedDevice(n_sms=3) as device:
        weight = random_weight(device, rng, name, n_rows, k)
        x = random_activations(device, rng, n_tokens, k)
        residual = rng.standard_normal((n_tokens, n_rows)).astype(np.float32)
        out = device.put(residual)
        run(device, [weight], Epilogue.RESIDUAL, x, [Output(out, "fp32")])
        found = device.get(out, np.float32, (n_tokens, n_rows))
        expected = residual + x[2] @ weight.operand.T
        assert np.all(np.abs(found - expected) <= bound(x[2], weight.operand) + 2.0**-23 * np.abs(expected))


def test_matrices_of_several_formats_share_a_launch(fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    n_tokens, k = 70, 256
    rows = {"Q4G64_F16S": 270, "NVFP4": 90, "BF16": 5}
    with EmulatedDevice(n_sms=3) as device:
        weights = [random_weight(device, rng, name, n, k) for name, n in [*rows.items(), ("BF16", 3)]]
        x = random_activations(device, rng, n_tokens, k)
        sizes = [w.matrix.n_rows for w in weights]
        outs = [device.empty(n_tokens * n * 4) for n in sizes]
        dtypes = ("bf16", "bf16", "fp32", "fp32")
        outputs = [Output(out, "fp32" if t == "fp32" else "bf16") for out, t in zip(outs, dtypes, strict=True)]
        run(device, weights, Epilogue.STORE, x, outputs)
        for weight, out, n, dtype in zip(weights, outs, sizes, dtypes, strict=True):
            expected, error = x[2] @ weight.operand.T, bound(x[2], weight.operand)
            if dtype == "bf16":
                check_bf16(device.get(out, np.uint16, (n_tokens, n)), expected, error)
            else:
                assert np.all(np.abs(device.get(out, np.float32, (n_tokens, n)) - expected) <= error)


@pytest.mark.parametrize("n_sms", [1, 2, 5, 7])
def test_spans_over_blocks_repeat_bit_for_bit_and_leave_the_flags_clear(n_sms: int, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    n_tokens, n_rows, k = 255, 300, 128 * 9
    with EmulatedDevice(n_sms=n_sms) as device:
        weight = random_weight(device, rng, "Q4G64_F16S", n_rows, k)
        x = random_activations(device, rng, n_tokens, k)
        workspace = device.empty(workspace_bytes(device))
        clear_workspace(device, workspace)
        op = LinearLarge(device, [weight.matrix], Epilogue.STORE, max_tokens=n_tokens, workspace=workspace)
        stream, results = device.stream(), []
        for _ in range(2):
            out = device.empty(n_tokens * n_rows * 4)
            op.launch(stream, n_tokens, x[0], x[1], [Output(out, "fp32")])
            results.append(device.get(out, np.float32, (n_tokens, n_rows)))
        assert np.array_equal(results[0], results[1])
        assert np.all(np.abs(results[0] - x[2] @ weight.operand.T) <= bound(x[2], weight.operand))
        flags = device.get(workspace + workspace_bytes(device) - 256, np.uint32, n_sms)
        assert not flags.any()


@pytest.mark.parametrize("n_sms", [1, 36, 132, 170])
@pytest.mark.parametrize("n_tokens", [49, 64, 65, 128, 1000, 1024])
@pytest.mark.parametrize("n_pairs", [1, 8, 160, 513, 1088])
@pytest.mark.parametrize("stages", [1, 40, 136])
def test_every_tile_is_given_out_once(n_pairs: int, stages: int, n_tokens: int, n_sms: int) -> None:
    cut = schedule(n_pairs, stages, n_tokens, n_sms)
    tiles = -(-n_pairs // 8) * -(-n_tokens // cut.tokens)
    assert cut.whole_tiles + cut.shared_tiles == tiles
    assert 1 <= cut.blocks <= n_sms
    assert cut.whole_tiles % cut.blocks == 0
    assert cut.shared_tiles < 2 * n_sms
    assert cut.shared_tiles * stages >= cut.blocks or not cut.shared_tiles


def test_matrices_that_do_not_go_together_are_refused() -> None:
    plain = PackedMatrix("plain", "Q4G64_F16S", 32, 128)
    with EmulatedDevice() as device:
        for matrices, epilogue in (
            ([], Epilogue.STORE),
            ([plain, PackedMatrix("longer", "Q4G64_F16S", 32, 256)], Epilogue.STORE),
            ([plain], Epilogue.SWIGLU),
            ([PackedMatrix("pairs", "Q4G64_F16S", 32, 128, interleaved=True)], Epilogue.STORE),
        ):
            with pytest.raises(SignatureError):
                LinearLarge(device, matrices, epilogue, max_tokens=64, workspace=0)


def test_small_nvfp4_matrices_of_one_launch_have_divisors_of_their_own(fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    n_tokens, k, sizes = 50, 192, (128, 100, 17)
    with EmulatedDevice(n_sms=2) as device:
        weights = [random_weight(device, rng, "NVFP4", n, k) for n in sizes]
        assert launches([w.matrix for w in weights]) == [[0, 1, 2]]
        x = random_activations(device, rng, n_tokens, k)
        outs = [device.empty(n_tokens * n * 4) for n in sizes]
        run(device, weights, Epilogue.STORE, x, [Output(out, "fp32") for out in outs])
        for weight, out, n in zip(weights, outs, sizes, strict=True):
            found = device.get(out, np.float32, (n_tokens, n))
            assert np.all(np.abs(found - x[2] @ weight.operand.T) <= bound(x[2], weight.operand))


def test_activations_that_cannot_be_read_are_refused() -> None:
    matrix = PackedMatrix("m", "Q4G64_F16S", 32, 200)
    with EmulatedDevice() as device:
        op = LinearLarge(device, [matrix], Epilogue.STORE, max_tokens=64, workspace=0)
        for n_tokens, x, stride in ((0, 256, 256), (65, 256, 256), (64, 264, 256), (64, 256, 200), (64, 256, 260)):
            with pytest.raises(ValueError):
                op.launch(device.stream(), n_tokens, x, stride, [Output(256)])


def test_variants_do_not_depend_on_shapes() -> None:
    small = [PackedMatrix("a", "Q4G64_F16S", 16, 128), PackedMatrix("b", "BF16", 16, 128)]
    large = [PackedMatrix("a", "Q4G64_F16S", 7168, 5120), PackedMatrix("b", "BF16", 48, 5120)]
    assert specs(small, Epilogue.STORE) == specs(large, Epilogue.STORE)
