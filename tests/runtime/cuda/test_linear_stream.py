"""linear_stream.cu under the emulator: the tests of linear_small at up to 8 columns, and its spans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from ninfer_runtime.backends.cuda.ops.linear_small import Epilogue
from ninfer_runtime.backends.cuda.ops.linear_stream import LinearStream, cut_spans, workspace_bytes
from ninfer_runtime.backends.cuda.packing import PackedMatrix
from tests.emulator.device import EmulatedDevice
from tests.runtime.cuda import test_linear_small as small
from tests.runtime.cuda.test_linear_small import FORMATS, Bench, Weight, run_store

COLUMNS = (1, 2, 3, 7, 8)


class StreamBench(Bench):
    """The rig of linear_small, whose operator streams."""

    def __init__(self, device: EmulatedDevice, seed: int) -> None:
        super().__init__(device, seed)
        self.places = device.put(np.full(workspace_bytes(device), 0xFF, np.uint8))

    def op(self, weights: Sequence[Weight], epilogue: Epilogue, n_columns: int) -> Any:
        op = LinearStream(self.device, self.arena, [w.matrix for w in weights], epilogue, self.places)
        op.prepare()
        return op

    def check_workspace(self) -> None:
        found = self.device.get(self.places, np.uint8, workspace_bytes(self.device))
        assert np.all(found == 0xFF), "the workspace is not as the next launch expects it"


@pytest.fixture(params=[1, 2, 3, 7])
def bench(request: pytest.FixtureRequest, fresh_seed: int) -> Iterator[StreamBench]:
    with EmulatedDevice(n_sms=request.param) as device:
        yield StreamBench(device, fresh_seed)


@pytest.fixture
def four_sms(fresh_seed: int) -> Iterator[StreamBench]:
    with EmulatedDevice(n_sms=4) as device:
        yield StreamBench(device, fresh_seed)


@pytest.mark.parametrize("n_columns", COLUMNS)
@pytest.mark.parametrize("format", FORMATS)
def test_product_is_the_float64_one_at_boundary_columns(four_sms: StreamBench, format: str, n_columns: int) -> None:
    weight = four_sms.weight(format, 277 + n_columns % 2, 264 + n_columns % 5)
    run_store(four_sms, [weight], n_columns, rms=n_columns % 2 == 0, floats=True)


@pytest.mark.parametrize("n_columns", [1, 7])
def test_tile_rows_split_over_any_number_of_warps_give_the_product(bench: StreamBench, n_columns: int) -> None:
    weights = [bench.weight("Q5G64_F16S", 130, 900), bench.weight("BF16", 48, 900)]
    run_store(bench, weights, n_columns, rms=True, floats=True)


@pytest.mark.parametrize("n_columns", [1, 4, 8])
def test_matrices_of_several_formats_share_a_launch(bench: StreamBench, n_columns: int) -> None:
    rows = {"Q4G64_F16S": 131, "Q5G64_F16S": 260, "BF16": 3}
    run_store(bench, [bench.weight(f, n, 520) for f, n in rows.items()], n_columns, rms=True, floats=False)


@pytest.mark.parametrize("n_columns", [1, 8])
@pytest.mark.parametrize("format", ["Q4G64_F16S", "W8G32_F16S", "BF16"])
def test_swiglu_pairs_gate_and_up_rows(four_sms: StreamBench, format: str, n_columns: int) -> None:
    small.test_swiglu_pairs_gate_and_up_rows(four_sms, format, n_columns)


@pytest.mark.parametrize("n_columns", [1, 3])
@pytest.mark.parametrize("format", ["Q5G64_F16S", "W8G32_F16S"])
def test_residual_adds_norms_and_sums_squares(bench: StreamBench, format: str, n_columns: int) -> None:
    small.test_residual_adds_norms_and_sums_squares(bench, format, n_columns)


def test_a_result_that_is_nan_arrives_as_nan(bench: StreamBench) -> None:
    small.test_a_result_that_is_nan_arrives_as_nan(bench)


@pytest.mark.parametrize("n_warps", [1, 5, 1584, 100_000])
def test_spans_cover_all_units_and_no_span_holds_two_matrices(n_warps: int) -> None:
    matrices = [
        PackedMatrix("a", "Q4G64_F16S", 4096, 5120),
        PackedMatrix("b", "Q5G64_F16S", 12288, 5120),
        PackedMatrix("c", "BF16", 48, 5120),
    ]
    cuts = cut_spans(matrices, n_warps).astype(np.int64)
    borders = np.cumsum([matrix.n_tiles * matrix.k_steps for matrix in matrices])
    assert (cuts[0], cuts[-1]) == (0, borders[-1])
    assert np.all(np.diff(cuts) > 0)
    assert np.isin(borders, cuts).all()
    assert len(cuts) == max(min(n_warps, borders[-1]), len(matrices)) + 1
