"""The sampler at the size of a real head: one, eight and forty-eight columns against the reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ninfer_runtime.backends.cuda.launch import CudaDevice
from ninfer_runtime.config import SamplingParams
from tests.runtime.cuda.sampling_cases import check_rounds, some_logits
from tests.runtime.cuda.sampling_rig import Bench, Mirror, Vocabulary, assert_same, make_round

pytestmark = pytest.mark.gpu

HEAD = Vocabulary(248_320, 248_077, 248_320)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    device = CudaDevice()
    yield Bench(device, HEAD)
    device.close()


def test_any_round_equals_the_reference(bench: Bench, fresh_seed: int) -> None:
    check_rounds(bench, fresh_seed, 6)


@pytest.mark.parametrize("shape", [(1, 1), (8, 1), (8, 6)])
@pytest.mark.parametrize("params", [SamplingParams.greedy(), SamplingParams(), SamplingParams(top_k=0, top_p=1.0)])
def test_rounds_of_every_width(bench: Bench, shape: tuple[int, int], params: SamplingParams, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    token_ids = rng.integers(0, HEAD.n_addressable, shape).astype(np.int32)
    logits = some_logits(rng, shape, HEAD)
    for b in range(shape[0]):  # every draft is right, so that every column draws
        for i in range(1, shape[1]):
            logits[b, i - 1, token_ids[b, i]] = 60.0
    sampling = tuple(params.merged(seed=int(seed)) for seed in rng.integers(0, 2**62, shape[0]))
    round_ = make_round(token_ids, sampling, n_top_logprobs=5)
    bench.set_counts(np.zeros((9, HEAD.n_rows), np.int32))
    first, again = bench.play(round_, logits), bench.play(round_, logits)
    assert_same(first, Mirror(HEAD).launch(round_, logits).result)
    assert np.array_equal(first.token_ids, again.token_ids)
