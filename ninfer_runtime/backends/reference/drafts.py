"""Drafted tokens: how one is drawn from a proposer's logits, and how the target accepts one that has a distribution.

Specification: ``specs/program.md``.
"""

from dataclasses import dataclass

import numpy as np

from ninfer_runtime.backends.base import Float32s
from ninfer_runtime.config import Acceptance, SamplingParams

from .sampling import Candidates, Counts, Float64s, Int64s, Purpose, adjust, candidates, draw, sample, seed_of, uniform


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed token. ``distribution`` is what it was drawn from; None: it is right where the target draws it too."""

    token_id: int
    distribution: Candidates | None = None


@dataclass(frozen=True, slots=True)
class HeldDrafts:
    """Drafts of the tokens behind ``anchor``, the sequence's token ``index``, which is in no state yet."""

    index: int
    anchor: int
    drafts: tuple[Draft, ...]


def propose(
    logits: Float32s, params: SamplingParams, counts: Counts, position: int, acceptance: Acceptance
) -> Draft | None:
    """A draft of the token at ``position`` from a proposer's logits float32 [n addressable], -inf = not proposed.

    "equal" draws as the target will, with its random number; "ratio" with a number of its own, and keeps what it drew
    from. None when NaN or positive infinity is among the logits, or nothing is finite.
    """
    proposed = logits[logits != -np.inf]
    if proposed.size == 0 or not np.isfinite(proposed).all():
        return None
    if acceptance == "equal" or params.is_greedy:
        return Draft(sample(logits, params, counts, position))
    found = candidates(adjust(logits, params, counts, None), params)
    return Draft(draw(found, uniform(seed_of(params), position, Purpose.DRAFT)), found)


def draw_by_ratio(target: Candidates, draft_id: int, proposal: Candidates, seed: int, position: int) -> int:
    """The token at ``position``: the draft with probability min(1, p / q), otherwise a draw from what q left of p.

    With ``draft_id`` drawn from ``proposal`` the result is distributed as ``target``, whatever the proposal is.
    """
    drafted = np.array([draft_id])
    p, q = shares(target, drafted)[0], shares(proposal, drafted)[0]
    if uniform(seed, position, Purpose.ACCEPT) < p / q:
        return draft_id
    return draw(residual(target, proposal), uniform(seed, position, Purpose.CORRECTION))


def residual(target: Candidates, proposal: Candidates) -> Candidates:
    """max(0, p - q), renormalised, in the target's order. Where rounding leaves nothing of it, p itself."""
    excess = np.maximum(target.probabilities - shares(proposal, target.ids), 0.0)
    total = excess.sum()
    return Candidates(target.ids, excess / total) if total > 0.0 else target


def shares(of: Candidates, ids: Int64s) -> Float64s:
    """Probabilities of ``ids``; 0 for those that are no candidates."""
    dense = np.zeros(1 + max(int(of.ids.max()), int(ids.max())))
    dense[of.ids] = of.probabilities
    out: Float64s = dense[ids]
    return out
