"""The bound against chances that can be added up."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.runtime.chance import chance_at_most


@pytest.mark.parametrize("n, share", [(10, 0.5), (100, 0.3), (200, 0.05)])
def test_bound_of_two_cells_is_above_the_chance_and_not_far(n: int, share: float) -> None:
    chances = np.array([math.comb(n, i) * share**i * (1 - share) ** (n - i) for i in range(n + 1)])
    expected = np.array([n * share, n * (1 - share)])

    def divergence(i: int) -> float:
        return sum(o * math.log(o / e) for o, e in zip((i, n - i), expected.tolist(), strict=True) if o)

    divergences = np.array([divergence(i) for i in range(n + 1)])
    for i in range(n + 1):
        exact = chances[divergences >= divergences[i] - 1e-9].sum()
        assert exact * (1 - 1e-12) <= chance_at_most(np.array([i, n - i]), expected) <= min(1.0, 100 * n * exact)


def test_bound_of_many_rare_cells_is_above_the_share_of_draws_that_come_as_far(fresh_seed: int) -> None:
    shares = np.array([0.6, *[0.4 / 40] * 40])
    drawn = np.random.default_rng(fresh_seed).multinomial(100, shares, 2_000)
    bounds = np.sort([chance_at_most(observed, 100 * shares) for observed in drawn])
    # The share of 2,000 that are at most x has a mean of at most x, and is above x + 0.1 once in e^40 (Hoeffding).
    assert (np.arange(1, 2_001) / 2_000 <= bounds + 0.1).all()


def test_no_divergence_is_certain_and_an_impossible_cell_is_not_possible() -> None:
    assert chance_at_most(np.array([50, 50]), np.array([50.0, 50.0])) == 1.0
    assert chance_at_most(np.array([7]), np.array([7.0])) == 1.0
    assert chance_at_most(np.array([100, 1]), np.array([101.0, 0.0])) == 0.0
    assert chance_at_most(np.array([100, 0]), np.array([50.0, 50.0])) == pytest.approx(
        2.0**-100 * math.e * 100 * math.log(2)
    )
