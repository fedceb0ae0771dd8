"""The sampler against small tables worked out by hand, and against the distribution it claims."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_format.errors import RequestError
from ninfer_runtime.backends.base import ContractError, Float32s
from ninfer_runtime.backends.reference.sampling import (
    Purpose,
    adjust,
    candidates,
    draw,
    sample,
    token_logprobs,
    top_candidates,
    uniform,
)
from ninfer_runtime.config import SamplingParams

OFF: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def logits_of(*probabilities: float) -> Float32s:
    return np.log(np.array(probabilities, np.float64)).astype(np.float32)


def kept(logits: Float32s, **fields: Any) -> list[int]:
    """Ids that may be drawn, most likely first."""
    params = SamplingParams(**(OFF | fields))
    return [int(i) for i in candidates(adjust(logits, params, None, None), params).ids]


def test_ties_go_to_the_lower_id() -> None:
    logits = np.array([1, 3, 3, 2, 3], np.float32)
    assert sample(logits, SamplingParams.greedy(), None, 0) == 1
    assert kept(logits, top_k=2) == [1, 2]
    assert kept(logits, top_k=4) == [1, 2, 4, 3]
    assert sample(np.array([-0.0, 0.0], np.float32), SamplingParams.greedy(), None, 0) == 0


@pytest.mark.parametrize("top_k, expected", [(0, 5), (-1, 5), (1, 1), (3, 3), (5, 5), (6, 5), (2**31 - 1, 5)])
def test_top_k_keeps_that_many_and_zero_or_minus_one_keeps_all(top_k: int, expected: int) -> None:
    assert len(kept(logits_of(0.3, 0.25, 0.2, 0.15, 0.1), top_k=top_k)) == expected


@pytest.mark.parametrize(
    "top_p, expected",
    [(0.0, [0]), (1e-9, [0]), (0.49, [0]), (0.51, [0, 1]), (0.79, [0, 1]), (0.81, [0, 1, 2]), (1.0, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_shortest_prefix_that_reaches_it(top_p: float, expected: list[int]) -> None:
    assert kept(logits_of(0.5, 0.3, 0.15, 0.05), top_p=top_p) == expected


def test_prefix_that_reaches_top_p_exactly_is_enough() -> None:
    assert kept(np.zeros(4, np.float32), top_p=0.5) == [0, 1]


@pytest.mark.parametrize("min_p, expected", [(0.0, 4), (0.09, 4), (0.2, 3), (0.61, 1), (1.0, 1)])
def test_min_p_drops_what_is_far_below_the_best(min_p: float, expected: int) -> None:
    assert len(kept(logits_of(0.5, 0.3, 0.15, 0.05), min_p=min_p)) == expected


def test_top_p_is_measured_before_min_p_removes_mass_and_after_top_k_did() -> None:
    logits = logits_of(0.4, 0.3, 0.2, 0.1)
    # Over all four, 0.75 needs three; over the best three (renormalised 4/9, 3/9, 2/9) it needs two.
    assert kept(logits, top_p=0.75) == [0, 1, 2]
    assert kept(logits, top_p=0.75, top_k=3) == [0, 1]
    assert kept(logits, top_p=0.75, min_p=0.6) == [0, 1]


@pytest.mark.parametrize("temperature", [1e-7, 1e-3, 2.0])
@pytest.mark.parametrize(
    "field, n_kept",
    [
        ({}, 100),
        ({"top_k": -1}, 100),
        ({"top_p": 0.0}, 1),
        ({"min_p": 1.0}, 1),
        ({"top_k": 1}, 1),
        ({"top_p": 1e-9, "min_p": 1.0}, 1),
    ],
)
def test_e13_something_can_always_be_drawn(
    temperature: float, field: dict[str, Any], n_kept: int, fresh_seed: int
) -> None:
    logits = np.random.default_rng(fresh_seed).normal(0, 30, 100).astype(np.float32)
    best = int(logits.argmax())
    logits[best] += 1.0  # at temperature 1e-3 the second then has e^-1000 of its share
    params = SamplingParams(**(OFF | {"temperature": temperature, "seed": fresh_seed} | field))
    found = candidates(adjust(logits, params, None, None), params)
    assert found.ids.size == n_kept
    assert found.probabilities.sum() == pytest.approx(1)
    drawn = sample(logits, params, None, 0)
    assert drawn == best or (n_kept > 1 and temperature > 1e-2 and drawn in found.ids)


def test_penalties_follow_the_formula_and_reach_greedy_too() -> None:
    logits = np.array([3.0, 2.9, 1.0], np.float32)
    counts = np.array([2, 0, 1], np.int32)
    params = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    np.testing.assert_allclose(adjust(logits, params, counts, None), [3 - 0.5 - 0.5, 2.9, 1 - 0.5 - 0.25], rtol=1e-6)
    assert sample(logits, params, counts, 0) == 1
    assert sample(logits, SamplingParams.greedy(), counts, 0) == 0
    negative = SamplingParams(temperature=0.0, presence_penalty=-2.0, frequency_penalty=-2.0)
    assert sample(logits, negative, np.array([0, 0, 1], np.int32), 0) == 2


def test_e13_logit_bias_bans_forces_and_adds() -> None:
    logits = logits_of(0.5, 0.3, 0.2)
    params = SamplingParams(temperature=0.0, logit_bias=((0, -100.0),))
    assert sample(logits, params, None, 0) == 1
    params = SamplingParams(temperature=0.0, logit_bias=((2, 100.0),))
    assert sample(logits, params, None, 0) == 2


def test_mask_bits_are_little_endian_words() -> None:
    mask = np.zeros(2, np.uint32)
    mask[1] = 1 << 3
    assert sample(np.arange(40, dtype=np.float32), SamplingParams.greedy(), None, 0, mask) == 35
    everything = SamplingParams(**OFF, seed=1)
    assert candidates(adjust(np.arange(40, dtype=np.float32), everything, None, mask), everything).ids.tolist() == [35]
    with pytest.raises(ContractError, match="allows no addressable id"):
        sample(np.zeros(32, np.float32), everything, None, 0, mask)


def _philox(key: tuple[int, int], counter: int) -> int:
    """First output word of Philox 4x64-10, in integers, from the published constants."""
    low = (1 << 64) - 1
    k0, k1 = key
    c = [counter & low, (counter >> 64) & low, 0, 0]
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(p1 >> 64) ^ c[1] ^ k0, p1 & low, (p0 >> 64) ^ c[3] ^ k1, p0 & low]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & low, (k1 + 0xBB67AE8584CAA73B) & low
    return c[0]


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 2**31])
@pytest.mark.parametrize("purpose", list(Purpose))
def test_random_number_is_philox_of_seed_purpose_and_position(seed: int, position: int, purpose: Purpose) -> None:
    expected = (_philox((seed, purpose), position + 1) >> 11) / 2**53
    assert uniform(seed, position, purpose) == expected


def test_draw_splits_the_unit_interval_by_cumulative_mass() -> None:
    params = SamplingParams(**OFF)
    found = candidates(adjust(logits_of(0.25, 0.5, 0.25), params, None, None), params)
    assert [draw(found, u) for u in (0.0, 0.499, 0.501, 0.749, 0.751, 1 - 2**-53)] == [1, 1, 0, 0, 2, 2]


@pytest.mark.parametrize(
    "fields, target",
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),
        ({"min_p": 0.4}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    ],
)
def test_draws_follow_the_stated_distribution(fields: dict[str, Any], target: list[float], fresh_seed: int) -> None:
    n, logits = 20_000, logits_of(0.4, 0.3, 0.2, 0.1)
    params = SamplingParams(**(OFF | {"seed": fresh_seed} | fields))
    found = np.bincount([sample(logits, params, None, position) for position in range(n)], minlength=4)
    assert all(count == 0 for count, p in zip(found, target, strict=True) if p == 0)
    chi = sum((count - n * p) ** 2 / (n * p) for count, p in zip(found, target, strict=True) if p)
    assert chi < 50, f"{found} is not {target} (chi-square {chi:.1f}; above 50 once in 10^10 for 3 degrees)"


def test_logprobs_are_natural_logs_over_the_raw_logits() -> None:
    one = token_logprobs(logits_of(0.5, 0.25, 0.25), 1, 2)
    assert one.chosen == pytest.approx(math.log(0.25), abs=1e-6)
    assert one.top_ids.tolist() == [0, 1]
    np.testing.assert_allclose(one.top, np.log([0.5, 0.25]), atol=1e-6)
    assert token_logprobs(logits_of(0.5, 0.5), 0, 0).top_ids.size == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=60), st.integers(1, 70))
def test_top_candidates_equal_a_full_stable_sort(values: list[int], k: int) -> None:
    adjusted = np.array(values, np.float64)
    adjusted[adjusted == -4] = -np.inf
    expected = sorted((i for i in range(len(values)) if values[i] != -4), key=lambda i: (-values[i], i))
    assert top_candidates(adjusted, k).tolist() == expected[:k]
    assert top_candidates(adjusted, 0).tolist() == expected


REFUSED: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-0.1, 2.1, math.nan, math.inf, "1", True, None)),
    *(("top_p", value) for value in (-0.01, 1.01, math.nan)),
    *(("min_p", value) for value in (-0.01, 1.01)),
    *(("top_k", value) for value in (-2, 1.5, 2**31, True)),
    *(("presence_penalty", value) for value in (-2.1, 2.1)),
    *(("frequency_penalty", value) for value in (-2.1, math.inf)),
    *(("seed", value) for value in (-1, 2**64, 1.0)),
    *(("logit_bias", value) for value in (((1, 101.0),), ((1, math.nan),), ((-1, 1.0),), ((1, 1.0), (1, 2.0)))),
]


@pytest.mark.parametrize("name, value", REFUSED)
def test_e13_value_outside_the_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "make", [lambda: SamplingParams(temperature=1e-7, top_p=0.0), lambda: SamplingParams(top_k=-1, min_p=1.0)]
)
def test_e13_extreme_but_legal_values_are_taken(make: Callable[[], SamplingParams]) -> None:
    make()


def test_official_defaults_by_architecture_and_mode() -> None:
    rows = {
        ("qwen3_5", True): (1.0, 0.95, 20, 0, 0, 0),
        ("qwen3_5", False): (0.7, 0.80, 20, 0, 1.5, 0),
        ("qwen3_5_moe", True): (1.0, 0.95, 20, 0, 1.5, 0),
        ("qwen3_5_moe", False): (0.7, 0.80, 20, 0, 1.5, 0),
    }
    for (architecture, thinking), expected in rows.items():
        p = SamplingParams.defaults(architecture, thinking=thinking)  # type: ignore[arg-type]
        found = (p.temperature, p.top_p, p.top_k, p.min_p, p.presence_penalty, p.frequency_penalty)
        assert found == expected


def test_overrides_replace_fields_and_none_does_not() -> None:
    base = SamplingParams.defaults("qwen3_5", thinking=False)
    assert base.merged(temperature=None, seed=5).seed == 5
    assert base.merged(temperature=None) == base
    with pytest.raises(RequestError, match="temprature"):
        base.merged(temprature=1)
    with pytest.raises(RequestError, match="top_p"):
        base.merged(top_p=3)
