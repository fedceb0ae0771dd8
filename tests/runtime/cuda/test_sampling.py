"""The device's sampler against the reference's: every parameter, ties, masks, NaN, drafts, stops and budgets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from ninfer_runtime.backends.base import ContractError, Float32s, PrefillChunk, RowStatus
from ninfer_runtime.backends.cuda.ops.round_state import MAX_STOP_IDS
from ninfer_runtime.backends.reference.sampling import Purpose, adjust, candidates, sample, token_logprobs, uniform
from ninfer_runtime.config import MAX_SEED, SamplingParams
from tests.emulator.device import EmulatedDevice
from tests.runtime.chance import chance_at_most
from tests.runtime.cuda.sampling_cases import check_rounds, some_logits
from tests.runtime.cuda.sampling_rig import ODD, TINY, Bench, Mirror, Vocabulary, assert_same, is_decided, make_round

# With few candidates sorted at once, a small vocabulary takes the paths that large ones take.
NARROW = {"capacity": 128, "prefix": 32}


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice() as device:
        yield device


@pytest.fixture(scope="module", params=[(TINY, False), (ODD, False), (ODD, True)], ids=["640", "3001", "3001-narrow"])
def bench(device: EmulatedDevice, request: pytest.FixtureRequest) -> Bench:
    vocabulary, is_narrow = request.param
    return Bench(device, vocabulary, **(NARROW if is_narrow else {}))


def test_any_round_equals_the_reference(bench: Bench, fresh_seed: int) -> None:
    check_rounds(bench, fresh_seed, 20)


def play_one(bench: Bench, logits: Float32s, params: SamplingParams, start: int = 0) -> int:
    """The token one row draws from one column of logits [head rows]."""
    round_ = make_round(np.zeros((1, 1), np.int32), (params,), starts=np.array([start], np.int32))
    result = bench.play(round_, logits.reshape(1, 1, -1))
    assert result.emitted[0] == 1
    return int(result.token_ids[0, 0])


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**32 + 5, 2**63, MAX_SEED])
@pytest.mark.parametrize("start", [0, 1, 2**20, 2**31 - 5])
def test_one_uniform_number_keyed_by_seed_and_position(bench: Bench, seed: int, start: int) -> None:
    n = bench.vocabulary.n_addressable
    logits = np.zeros(bench.vocabulary.n_rows, np.float32)
    token = play_one(bench, logits, SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=seed), start)
    assert token == int(uniform(seed, start + 1, Purpose.TARGET) * n)


def test_ties_go_to_the_lowest_id_and_both_zeros_are_equal(bench: Bench) -> None:
    logits = np.full(bench.vocabulary.n_rows, -0.0, np.float32)
    logits[300:] = 0.0
    assert play_one(bench, logits, SamplingParams.greedy()) == 0
    logits[:200] = -1.0
    assert play_one(bench, logits, SamplingParams.greedy()) == 200
    logits[599], logits[250] = 4.0, 4.0
    assert play_one(bench, logits, SamplingParams.greedy()) == 250
    logits[:] = 1.0
    drawn = {play_one(bench, logits, SamplingParams(top_k=3, top_p=1.0, seed=seed)) for seed in range(30)}
    assert drawn == {0, 1, 2}


@pytest.mark.parametrize("params", [SamplingParams.greedy(), SamplingParams(seed=3), SamplingParams(top_k=0, seed=4)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_end_the_row_there(bench: Bench, params: SamplingParams, value: float) -> None:
    n = bench.vocabulary.n_addressable
    for at in (0, 255, 256, n - 1):
        logits = np.zeros((2, 3, bench.vocabulary.n_rows), np.float32)
        logits[:, :, 7] = 30.0
        logits[0, 1, at] = value
        logits[..., n:] = np.nan  # padding rows do not count
        round_ = make_round(np.full((2, 3), 7, np.int32), (params, params), n_top_logprobs=2)
        result = bench.play(round_, logits)
        assert_same(result, Mirror(bench.vocabulary).launch(round_, logits).result)
        assert result.status == (RowStatus.NOT_FINITE, RowStatus.RUNNING)
        assert result.emitted.tolist() == [1, 3]


def test_extreme_numbers_stay_in_order(bench: Bench) -> None:
    huge = np.float32(3.4e38)
    logits = np.full(bench.vocabulary.n_rows, -huge, np.float32)
    logits[[5, 400]] = [huge, np.nextafter(huge, np.float32(0))]
    for params in (SamplingParams(seed=1), SamplingParams(seed=1, top_k=0, top_p=1.0), SamplingParams.greedy()):
        assert play_one(bench, logits, params) == 5
    logits[:] = 0.0
    logits[[3, 9]] = [1e-6, 2e-6]
    for temperature in (5e-324, 1e-300, 1e-30, 1e-7, 0.0):
        params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, seed=1)
        with np.errstate(over="ignore"):
            expected = sample(logits[: bench.vocabulary.n_addressable], params, None, 1)
        assert play_one(bench, logits, params) == expected


def test_values_that_differ_in_float64_alone_are_told_apart(bench: Bench) -> None:
    logits = np.full(bench.vocabulary.n_rows, -1.0, np.float32)
    logits[[10, 20]] = 1.0, 1.0
    params = SamplingParams(temperature=0.0, logit_bias=((20, 1e-12), (10, 1e-13), (500, 1e-3)))
    assert play_one(bench, logits, params) == 20
    assert play_one(bench, logits, SamplingParams(top_k=1, seed=1, logit_bias=params.logit_bias)) == 20


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.3, top_k=12, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.05),
        SamplingParams(temperature=0.8, top_k=0, top_p=0.97, presence_penalty=1.0),
    ],
)
def test_draws_follow_the_distribution(bench: Bench, params: SamplingParams, fresh_seed: int) -> None:
    rng, n = np.random.default_rng(fresh_seed), bench.vocabulary.n_addressable
    logits = some_logits(rng, (1, 1), bench.vocabulary)[0, 0]
    counts = rng.integers(0, 2, n).astype(np.int32)
    bench.set_counts(np.broadcast_to(np.pad(counts, (0, bench.vocabulary.n_rows - n)), (9, bench.vocabulary.n_rows)))
    expected = candidates(adjust(logits[:n], params, counts, None), params)
    n_draws, observed = 800, np.zeros(n)
    for begin in range(0, n_draws, 8):
        sampling = tuple(params.merged(seed=fresh_seed + begin + i) for i in range(8))
        round_ = make_round(np.zeros((8, 1), np.int32), sampling)
        result = bench.play(round_, np.broadcast_to(logits, (8, 1, logits.size)))
        np.add.at(observed, result.token_ids[:, 0], 1)
    assert observed.sum() == observed[expected.ids].sum()
    assert chance_at_most(observed[expected.ids], n_draws * expected.probabilities) > 1e-9


def test_drafts_count_as_soon_as_they_are_accepted(bench: Bench) -> None:
    logits = np.zeros((1, 4, bench.vocabulary.n_rows), np.float32)
    logits[..., 11], logits[..., 12] = 3.0, 2.0
    params = SamplingParams(temperature=0.0, frequency_penalty=0.6)
    round_ = make_round(np.full((1, 4), 11, np.int32), (params,))
    bench.set_counts(np.zeros((9, bench.vocabulary.n_rows), np.int32))
    result = bench.play(round_, logits)
    assert result.token_ids[0].tolist() == [11, 11, 12, 0]  # 3.0, 2.4, and 1.8 against 2.0
    assert (result.accepted[0], result.status[0]) == (2, RowStatus.RUNNING)


def test_a_stop_id_wins_over_the_budget_and_cuts_drafts(bench: Bench) -> None:
    logits = np.zeros((3, 4, bench.vocabulary.n_rows), np.float32)
    logits[..., 11] = 5.0
    round_ = make_round(
        np.full((3, 4), 11, np.int32),
        (SamplingParams.greedy(),) * 3,
        stop_ids=(frozenset({11, *range(100, 163)}), frozenset({12}), frozenset()),
        budget=np.array([1, 3, 9], np.int32),
    )
    result = bench.play(round_, logits)
    assert result.status == (RowStatus.STOP_ID, RowStatus.BUDGET, RowStatus.RUNNING)
    assert result.emitted.tolist() == [1, 3, 4]
    assert_same(result, Mirror(bench.vocabulary).launch(round_, logits).result)


def test_a_mask_that_allows_nothing_is_an_error_only_where_it_is_reached(bench: Bench) -> None:
    vocabulary = bench.vocabulary
    logits = np.zeros((1, 2, vocabulary.n_rows), np.float32)
    masks = np.full((1, 2, -(-vocabulary.n_rows // 32)), 2**32 - 1, np.uint32)
    masks[0, 1] = 0
    for params in (SamplingParams.greedy(), SamplingParams(seed=1), SamplingParams(seed=1, top_k=0)):
        missed = make_round(np.array([[3, 600]], np.int32), (params,), logits_mask=masks)
        assert bench.play(missed, logits).emitted.tolist() == [1]
        token = bench.play(missed, logits).token_ids[0, 0]
        reached = make_round(np.array([[3, token]], np.int32), (params,), logits_mask=masks)
        with pytest.raises(ContractError, match="allows no addressable id"):
            bench.play(reached, logits)


def test_padding_rows_stay_out_whatever_the_mask_says(bench: Bench) -> None:
    vocabulary = bench.vocabulary
    logits = np.zeros((1, 1, vocabulary.n_rows), np.float32)
    logits[..., vocabulary.n_addressable :] = 100.0
    masks = np.zeros((1, 1, -(-vocabulary.n_rows // 32)), np.uint32)
    masks[..., -1] = 2**32 - 1
    masks[0, 0, 0] = 1 << 4
    round_ = make_round(np.zeros((1, 1), np.int32), (SamplingParams.greedy(),), logits_mask=masks)
    assert bench.play(round_, logits).token_ids[0, 0] in (4, (vocabulary.n_rows - 1) // 32 * 32)


def test_the_draw_behind_a_prompt(bench: Bench, fresh_seed: int) -> None:
    rng, vocabulary = np.random.default_rng(fresh_seed), bench.vocabulary
    n = vocabulary.n_addressable
    logits = some_logits(rng, (1, 1), vocabulary)
    tokens, pages = np.array([1, 2, 3], np.int32), np.zeros(1, np.int32)
    seeded = (SamplingParams(seed=fresh_seed + i) for i in itertools.count())
    params = next(one for one in seeded if is_decided(partial(sample, logits[0, 0, :n], one, None, 43), vocabulary))
    chunk = PrefillChunk(2, tokens, 40, pages, sampling=params, n_top_logprobs=3)
    token, logprobs = bench.play_prompt(chunk, logits)
    assert token == sample(logits[0, 0, :n], params, None, 43)
    expected = token_logprobs(logits[0, 0, :n], token, 3)
    assert logprobs is not None
    assert logprobs.top_ids.tolist() == expected.top_ids.tolist()
    np.testing.assert_allclose([logprobs.chosen, *logprobs.top], [expected.chosen, *expected.top], rtol=2e-6, atol=1e-5)
    logits[0, 0, 5] = np.nan
    assert bench.play_prompt(chunk, logits) == (None, None)


def test_what_the_packed_input_cannot_hold_is_refused_by_name(bench: Bench) -> None:
    tokens = np.zeros((1, 1), np.int32)
    biases = tuple((i, 1.0) for i in range(9000))
    wrong = {
        "65 stop ids, at most 64": make_round(
            tokens, (SamplingParams.greedy(),), stop_ids=(frozenset(range(MAX_STOP_IDS + 1)),)
        ),
        "9000 logit biases": make_round(tokens, (SamplingParams(temperature=0.0, logit_bias=biases),)),
        "200 top logprobs": make_round(tokens, (SamplingParams.greedy(),), n_top_logprobs=200),
        "without a seed": make_round(tokens, (SamplingParams(),)),
    }
    for words, round_ in wrong.items():
        with pytest.raises(ContractError, match=words):
            bench.start(round_)


def test_a_captured_round_repeats(device: EmulatedDevice) -> None:
    bench = Bench(device, Vocabulary(640, 640, 640))
    logits = np.zeros((2, 2, 640), np.float32)
    logits[..., 9] = 1.0
    round_ = make_round(np.full((2, 2), 9, np.int32), (SamplingParams.greedy(),) * 2)
    first = bench.play(round_, logits)
    with device.capture(bench.stream) as graph:
        bench.launch(2, 2)
    for _ in range(3):
        graph.launch(bench.stream)
        assert_same(bench.read(round_), first)
