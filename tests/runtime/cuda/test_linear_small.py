"""linear_small.cu under the emulator: every format, epilogue and split against float64 on the dequantized weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from ninfer_format.errors import UnsupportedError
from ninfer_format.numeric.nvfp4 import E2M1, E4M3FN, MAX_SCALE
from ninfer_runtime.backends.cuda.arena import Arena, ArenaPlan
from ninfer_runtime.backends.cuda.ops import linear_small
from ninfer_runtime.backends.cuda.ops.linear_small import (
    Epilogue,
    LinearSmall,
    Output,
    Residual,
    RmsScale,
    Workspace,
    cut_spans,
    workspace_bytes,
)
from ninfer_runtime.backends.cuda.ops.linear_small_tuning import LinearSmallTuning, tuning_rows
from ninfer_runtime.backends.cuda.packing import TILE_FORMATS, PackedMatrix, activation_stride, pack_matrix
from tests.emulator.device import EmulatedDevice
from tests.runtime.cuda.random_nvfp4 import random_nvfp4

Floats = npt.NDArray[np.float64]
FORMATS = tuple(TILE_FORMATS)
BOUNDARY_COLUMNS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 47, 48)
EPSILON = 1e-6


def bf16_words(values: npt.NDArray[np.floating]) -> npt.NDArray[np.uint16]:
    """Nearest bf16 words, ties to even, of finite values."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_words(words: npt.NDArray[np.uint16]) -> Floats:
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@dataclass(frozen=True)
class Weight:
    """A random matrix: packed in device memory, and its exact values [n_rows, k]."""

    matrix: PackedMatrix
    values: Floats


class Bench:
    """A device, an arena with a workspace, and random operands."""

    def __init__(self, device: EmulatedDevice, seed: int) -> None:
        self.device, self.rng, self.stream = device, np.random.default_rng(seed), device.stream()
        n_bytes = max(workspace_bytes(device), 4 << 20)  # any geometry of four SMs
        self.arena = Arena(device, n_bytes)
        self.workspace = Workspace(self.arena, n_bytes)
        self.workspace.clear(device, self.stream)

    def weight(self, format: str, n_rows: int, k: int, interleaved: bool = False) -> Weight:
        matrix = PackedMatrix(format, format, n_rows, k, interleaved=interleaved)
        tile = matrix.tile
        if not tile.group:
            words = bf16_words(self.rng.standard_normal((n_rows, k)) / np.sqrt(k))
            return Weight(matrix.at(self.device.put(pack_matrix(matrix, words, None))), from_words(words))
        if tile.floating:
            matrix, codes, scale_words, values = random_nvfp4(self.rng, matrix)
            return Weight(matrix.at(self.device.put(pack_matrix(matrix, codes, scale_words))), values)
        top = 1 << (tile.bits - 1)
        codes = self.rng.integers(-top, top, (n_rows, k))
        scales = (self.rng.uniform(0.2, 2.0, (n_rows, -(-k // tile.group))) / (top * np.sqrt(k))).astype(np.float16)
        packed = self.device.put(pack_matrix(matrix, codes, scales.view(np.uint16)))
        return Weight(matrix.at(packed), codes * np.repeat(scales.astype(np.float64), tile.group, axis=1)[:, :k])

    def activations(self, n_columns: int, k: int) -> tuple[int, Floats]:
        words = np.zeros((n_columns, activation_stride(k)), np.uint16)
        words[:, :k] = bf16_words(self.rng.standard_normal((n_columns, k)))
        return self.device.put(words), from_words(words[:, :k])

    def op(self, weights: Sequence[Weight], epilogue: Epilogue, n_columns: int) -> LinearSmall:
        op = LinearSmall(self.device, self.arena, [w.matrix for w in weights], epilogue, n_columns, self.workspace)
        op.prepare()
        return op

    def check_workspace(self) -> None:
        found = self.device.get(self.workspace.pointer, np.uint8, self.workspace.n_bytes)
        assert np.all(found == 0xFF), "the workspace is not as the next launch expects it"


@pytest.fixture(params=[1, 2, 3, 5, 11])
def bench(request: pytest.FixtureRequest, fresh_seed: int) -> Iterator[Bench]:
    with EmulatedDevice(n_sms=request.param) as device:
        yield Bench(device, fresh_seed)


@pytest.fixture
def four_sms(fresh_seed: int) -> Iterator[Bench]:
    with EmulatedDevice(n_sms=4) as device:
        yield Bench(device, fresh_seed)


def bound(x: Floats, w: Floats) -> Floats:
    """Error of fp32 sums in any order: 2e-6 ‖x‖ ‖w‖ per element [T, N]."""
    error: Floats = 2e-6 * np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(w, axis=1)[None]
    return error


def run_store(bench: Bench, weights: Sequence[Weight], n_columns: int, rms: bool, floats: bool) -> list[Floats]:
    """Launch twice, check both against float64, return the results."""
    k = weights[0].matrix.k
    pointer, x = bench.activations(n_columns, k)
    rstd, scale = None, np.ones((n_columns, 1))
    if rms:
        parts = np.abs(bench.rng.standard_normal((7, n_columns))).astype(np.float32) * 40
        rstd = RmsScale(bench.device.put(parts), len(parts), 96, EPSILON)
        scale = 1 / np.sqrt(parts.astype(np.float64).sum(axis=0) / 96 + EPSILON)[:, None]
    op = bench.op(weights, "store", n_columns)
    results = []
    for _ in range(2):
        sizes = [n_columns * w.matrix.n_outputs * (4 if floats else 2) for w in weights]
        outputs = [Output(bench.device.empty(size), floats) for size in sizes]
        op.launch(bench.stream, n_columns, pointer, rstd, outputs)
        found = []
        for weight, output in zip(weights, outputs, strict=True):
            shape = (n_columns, weight.matrix.n_outputs)
            dtype = np.float32 if floats else np.uint16
            words = bench.device.get(output.pointer, dtype, shape)
            values = words.astype(np.float64) if floats else from_words(words)
            expected = x @ weight.values.T * scale
            rounding = 0.0 if floats else 2.0**-8
            error = np.abs(values - expected) - rounding * np.abs(expected)
            assert np.all(error <= bound(x, weight.values) * scale), weight.matrix
            found.append(values)
        bench.check_workspace()
        results.append(found)
    for first, second in zip(*results, strict=True):
        assert np.array_equal(first, second)
    return results[0]


@pytest.mark.parametrize("n_columns", BOUNDARY_COLUMNS)
@pytest.mark.parametrize("format", FORMATS)
def test_product_is_the_float64_one_at_boundary_columns(four_sms: Bench, format: str, n_columns: int) -> None:
    weight = four_sms.weight(format, 277 + n_columns % 2, 264 + n_columns % 5)
    run_store(four_sms, [weight], n_columns, rms=n_columns % 2 == 0, floats=True)


@pytest.mark.parametrize("n_columns", [1, 9])
def test_row_blocks_split_over_any_number_of_blocks_give_the_product(bench: Bench, n_columns: int) -> None:
    weights = [bench.weight("Q5G64_F16S", 130, 900), bench.weight("BF16", 48, 900)]
    run_store(bench, weights, n_columns, rms=True, floats=True)


@pytest.mark.parametrize("n_columns", [1, 4, 20])
def test_matrices_of_several_formats_share_a_launch(bench: Bench, n_columns: int) -> None:
    rows = {"Q4G64_F16S": 131, "Q5G64_F16S": 260, "BF16": 3}
    run_store(bench, [bench.weight(f, n, 520) for f, n in rows.items()], n_columns, rms=True, floats=False)


H200_ROWS = tuning_rows("sm_90a", 132, 233_472)


@pytest.mark.parametrize("row", range(len(H200_ROWS)))
def test_every_geometry_of_the_tuned_card_gives_the_product(
    four_sms: Bench, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = H200_ROWS[row]
    monkeypatch.setattr(linear_small, "linear_small_tuning", lambda *_, **__: geometry)
    weights = [four_sms.weight(f, n, 392) for f, n in (("Q5G64_F16S", 300), ("Q4G64_F16S", 90), ("BF16", 20))]
    run_store(four_sms, weights, geometry.columns, rms=True, floats=True)
    run_store(four_sms, weights[:2], max(1, geometry.columns - 7), rms=False, floats=True)


def test_every_code_times_every_scale_of_nvfp4_is_exact(four_sms: Bench) -> None:
    device, k = four_sms.device, 128
    codes = np.tile(np.arange(16), (MAX_SCALE + 1, k // 16))
    scales = np.tile(np.arange(MAX_SCALE + 1, dtype=np.uint8)[:, None], (1, k // 16))
    matrix = PackedMatrix("all", "NVFP4", MAX_SCALE + 1, k, divisor=8.0)
    matrix = matrix.at(device.put(pack_matrix(matrix, codes, scales)))
    values = E2M1[codes] * np.repeat(E4M3FN[scales], 16, axis=1) / 8
    op = four_sms.op([Weight(matrix, values.astype(np.float64))], "store", 48)
    for first in range(0, k, 48):
        columns = np.arange(first, min(first + 48, k))
        x = np.zeros((len(columns), k), np.float32)
        x[np.arange(len(columns)), columns] = 1
        out = device.empty(len(columns) * (MAX_SCALE + 1) * 4)
        op.launch(four_sms.stream, len(columns), device.put(bf16_words(x)), None, [Output(out, True)])
        found = device.get(out, np.float32, (len(columns), MAX_SCALE + 1))
        assert np.array_equal(found, values[:, columns].T)


@pytest.mark.parametrize("n_columns", [1, 12, 48])
@pytest.mark.parametrize("other", ["BF16", "W8G32_F16S"])
def test_nvfp4_shares_a_launch_and_keeps_its_own_divisor(four_sms: Bench, other: str, n_columns: int) -> None:
    weights = [four_sms.weight(f, n, 328) for f, n in (("NVFP4", 256), (other, 40), ("NVFP4", 128), ("BF16", 3))]
    run_store(four_sms, weights, n_columns, rms=True, floats=False)


OTHER_GEOMETRIES = (
    LinearSmallTuning(4, 0, 16, 1, 1, 2, 101_376, 4, phases=4, group_sums=1, x_ahead=0),
    LinearSmallTuning(8, 0, 8, 2, 1, 2, 101_376, 3, group_sums=1),
    LinearSmallTuning(24, 0, 4, 4, 1, 1, 101_376, 3, phases=2),
)


@pytest.mark.parametrize("geometry", OTHER_GEOMETRIES)
def test_sums_of_groups_phases_and_tall_warps_give_the_product(
    four_sms: Bench, geometry: LinearSmallTuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_small, "linear_small_tuning", lambda *_: geometry)
    weights = [four_sms.weight(f, n, 1000) for f, n in (("Q5G64_F16S", 300), ("Q6G64_F16S", 90), ("BF16", 20))]
    for n_columns in (geometry.columns - 3, geometry.columns):
        run_store(four_sms, weights, n_columns, rms=True, floats=True)


def test_two_w8_and_two_q6_matrices_share_a_launch(four_sms: Bench) -> None:
    weights = [four_sms.weight(f, 40 + i, 136) for i, f in enumerate(["W8G32_F16S", "Q6G64_F16S"] * 2)]
    run_store(four_sms, weights, 5, rms=False, floats=True)


@pytest.mark.parametrize("n_columns", [1, 8, 13, 48])
@pytest.mark.parametrize("format", ["Q4G64_F16S", "W8G32_F16S", "BF16", "NVFP4"])
def test_swiglu_pairs_gate_and_up_rows(four_sms: Bench, format: str, n_columns: int) -> None:
    width, k = 141, 328
    weight = four_sms.weight(format, 2 * width, k, interleaved=True)
    pointer, x = four_sms.activations(n_columns, k)
    ss = np.full((1, n_columns), 3.0 * k, np.float32)
    stride = activation_stride(width)
    out = four_sms.device.put(np.zeros((n_columns, stride), np.uint16))
    rstd = RmsScale(four_sms.device.put(ss), 1, k, EPSILON)
    four_sms.op([weight], "swiglu", n_columns).launch(
        four_sms.stream, n_columns, pointer, rstd, [Output(out, stride=stride)]
    )
    found = from_words(four_sms.device.get(out, np.uint16, (n_columns, stride)))
    product = x @ weight.values.T / np.sqrt(3.0 + EPSILON)
    gate, up = product[:, :width], product[:, width:]
    expected = gate / (1 + np.exp(-gate)) * up
    error = bound(x, weight.values).max() * (1 + np.abs(gate) + np.abs(up))
    assert np.all(np.abs(found[:, :width] - expected) <= error + 2.0**-8 * np.abs(expected))
    assert np.all(found[:, width:] == 0)
    four_sms.check_workspace()


@pytest.mark.parametrize("n_columns", [1, 3, 16, 33])
@pytest.mark.parametrize("format", ["Q5G64_F16S", "W8G32_F16S", "NVFP4"])
def test_residual_adds_norms_and_sums_squares(bench: Bench, format: str, n_columns: int) -> None:
    hidden, k = 136, 700
    weight = bench.weight(format, hidden, k)
    pointer, x = bench.activations(n_columns, k)
    stream_values = bench.rng.standard_normal((n_columns, hidden)).astype(np.float32)
    norm = bf16_words(bench.rng.standard_normal(hidden))
    op = bench.op([weight], "residual", n_columns)
    device, stride = bench.device, activation_stride(hidden)
    results = []
    for _ in range(2):
        residual = Residual(
            x=device.put(stream_values),
            ss=device.empty(op.ss_parts * n_columns * 4),
            normed=device.put(np.zeros((n_columns, stride), np.uint16)),
            next_norm=device.put(norm),
        )
        op.launch(bench.stream, n_columns, pointer, residual=residual)
        found = device.get(residual.x, np.float32, (n_columns, hidden))
        assert np.all(np.abs(found - (stream_values + x @ weight.values.T)) <= bound(x, weight.values) + 1e-6)
        normed = device.get(residual.normed, np.uint16, (n_columns, stride))
        factor = (1 + from_words(norm)).astype(np.float32)
        assert np.array_equal(normed[:, :hidden], bf16_words(found * factor))
        assert not normed[:, hidden:].any()
        ss = device.get(residual.ss, np.float32, (op.ss_parts, n_columns))
        assert np.allclose(ss.sum(axis=0), (found.astype(np.float64) ** 2).sum(axis=1), rtol=1e-5)
        bench.check_workspace()
        results.append((found, normed, ss))
    for first, second in zip(*results, strict=True):
        assert np.array_equal(first, second)


def test_a_result_that_is_nan_arrives_as_nan(bench: Bench) -> None:
    weight = bench.weight("Q4G64_F16S", 40, 900)
    words = np.full((2, activation_stride(900)), 0xFFFF, np.uint16)
    words[1] = 0
    out = bench.device.empty(2 * 40 * 4)
    bench.op([weight], "store", 2).launch(bench.stream, 2, bench.device.put(words), None, [Output(out, True)])
    found = bench.device.get(out, np.float32, (2, 40))
    assert np.all(np.isnan(found[0]))
    assert not found[1].any()
    bench.check_workspace()


@pytest.mark.parametrize("max_blocks", [1, 7, 132, 170, 5000])
def test_spans_cover_all_units_and_differ_by_at_most_a_unit(max_blocks: int) -> None:
    matrices = [PackedMatrix("a", "Q4G64_F16S", 4096, 5120), PackedMatrix("b", "Q5G64_F16S", 12288, 5120)]
    spans = cut_spans(matrices, 8, max_blocks)
    cuts = np.array([spans.begin(block) for block in range(spans.n_blocks + 1)])
    assert cuts[0] == 0
    assert cuts[-1] == 32 * 40 + 96 * 40
    assert spans.n_blocks == max_blocks or max_blocks == 5000
    assert np.all(np.diff(cuts) > 0)
    first = np.diff(np.minimum(cuts, 32 * 40))
    weights = first * 1088 + (np.diff(cuts) - first) * 1344
    assert weights.max() - weights.min() <= 2 * 1344


@pytest.mark.parametrize("rows", [(1,), (16, 1), (3, 3, 300), (640, 17, 16, 2000)])
def test_no_span_is_empty(rows: tuple[int, ...]) -> None:
    formats = ("BF16", "Q4G64_F16S", "W8G32_F16S", "Q6G64_F16S")
    matrices = [PackedMatrix("m", f, n, 128) for f, n in zip(formats, rows, strict=False)]
    for max_blocks in range(1, 60):
        spans = cut_spans(matrices, 8, max_blocks)
        cuts = [spans.begin(block) for block in range(spans.n_blocks + 1)]
        assert np.all(np.diff(cuts) > 0), (max_blocks, cuts)


def test_matrices_that_do_not_go_together_are_refused(four_sms: Bench) -> None:
    a, b = PackedMatrix("a", "Q4G64_F16S", 64, 128), PackedMatrix("b", "Q4G64_F16S", 64, 256)
    for matrices, epilogue, columns, complaint in (
        ([a, b], "store", 8, "one K"),
        ([a], "swiglu", 8, "interleaved"),
        ([a, a], "residual", 8, "one matrix"),
        ([a], "store", 49, "48 columns"),
    ):
        with pytest.raises(UnsupportedError, match=complaint):
            LinearSmall(four_sms.device, ArenaPlan(), matrices, epilogue, columns, four_sms.workspace)  # type: ignore[arg-type]
