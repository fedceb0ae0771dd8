"""Prompts whose routing no rounding decides, for comparing implementations of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch

from ninfer_runtime.backends.reference import moe

CLEAR = 1e-4
"""Between the router logits of the last expert that is taken and of the first that is not: a hundred times what two
implementations in float32 differ by. One routing in two thousand is closer."""


@contextmanager
def routed() -> Iterator[list[float]]:
    """Inside, the reference's routings leave the distance of the last expert taken to the first not taken."""
    route, gaps = moe.route, list[float]()

    def watched(logits: torch.Tensor, experts_per_token: int) -> tuple[torch.Tensor, torch.Tensor]:
        ordered = logits.sort(-1, descending=True).values
        gaps.extend((ordered[:, experts_per_token - 1] - ordered[:, experts_per_token]).tolist())
        return route(logits, experts_per_token)

    with patch.object(moe, "route", watched):
        yield gaps


def clear_prompt(seed: int, n_tokens: int, n_ids: int, evaluate: Callable[[list[int]], object]) -> list[int]:
    """The first random prompt that ``evaluate``, on the reference, routes clearly; two experts as good as each other
    may change places between implementations, and everything behind them changes."""
    rng = np.random.default_rng(seed)
    while True:
        ids: list[int] = rng.integers(0, n_ids, n_tokens).tolist()
        with routed() as gaps:
            evaluate(ids)
        if min(gaps, default=CLEAR) >= CLEAR:
            return ids
