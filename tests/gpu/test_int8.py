"""Rows of signed bytes and their product on the card: the oracle's words, and float64 of the same words."""

from collections.abc import Iterator

import numpy as np
import pytest

from ninfer_runtime.backends.cuda.launch import CudaDevice
from ninfer_runtime.backends.cuda.ops.linear_int8 import specs
from ninfer_runtime.backends.cuda.ops.linear_large import Epilogue, Output
from ninfer_runtime.backends.cuda.packing import PackedMatrix
from tests.runtime.cuda.int8_rig import FORMATS, check_rows, product, random_rows, random_weight, run
from tests.runtime.cuda.small_ops import get, poisoned, put

pytestmark = pytest.mark.gpu

WIDTHS = (128, 1984, 5120)
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 47, 48, 64, 65, 127, 128, 255, 1000, 1024)


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    card = CudaDevice()
    plain = [PackedMatrix("w", name, 32, 128) for name in FORMATS]
    card.prepare([spec for m in plain for kind in (Epilogue.STORE, Epilogue.RESIDUAL) for spec in specs([m], kind)])
    yield card
    card.close()


@pytest.mark.parametrize("n_rows", ROWS)
def test_rows_are_the_oracles(device: CudaDevice, n_rows: int, fresh_seed: int) -> None:
    check_rows(device, WIDTHS[n_rows % 3], n_rows, fresh_seed)


@pytest.mark.parametrize("n_tokens", [49, 64, 65, 127, 128, 255, 1000, 1024])
@pytest.mark.parametrize("name", FORMATS)
def test_stored_and_added_sums(device: CudaDevice, name: str, n_tokens: int, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    n_rows, k = 1043, 1984
    weight, x = random_weight(device, rng, name, n_rows, k), random_rows(rng, n_tokens, k)
    out = poisoned(device, 4 * n_tokens * n_rows)
    run(device, [weight], Epilogue.STORE, x, [Output(out, "fp32")])
    found, (expected, limit) = get(device, out, np.float32, (n_tokens, n_rows)), product(weight, x)
    assert (np.abs(found - expected) <= limit).all()
    before = rng.standard_normal((n_tokens, n_rows)).astype(np.float32)
    out = put(device, before)
    run(device, [weight], Epilogue.RESIDUAL, x, [Output(out, "fp32")])
    assert np.array_equal(get(device, out, np.float32, (n_tokens, n_rows)), before + found)
