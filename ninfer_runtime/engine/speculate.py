"""How many tokens to draft behind the next round, from what was accepted before.

With k drafts a round emits 1 + a1 + a1·a2 + … + a1···ak tokens, a being the chance that a draft is right when those
before it are, and takes 1 + cost·k times as long as one without. The k with the most tokens per time is asked for. The
chances are those of the recent rounds; what has not been tried for long is forgotten, and so gets tried again.
"""

from ninfer_runtime.engine.sequence import Drafting

COST_PER_DRAFT = 0.1
"""Time of one more draft and of the column that verifies it, in rounds without drafts. Of the 27B weights the draft
layer and the head are 6 % and are read once per draft; a column more costs a few per cent while a round reads weights
most of the time."""
MEMORY = 0.98
"""Weight of a round in the next one's estimate: a rejected draft counts half after 34 rounds."""
PRIOR_CHANCE, PRIOR_WEIGHT = 0.8, 0.5
"""What is assumed untried, in tries: enough to begin with all drafts, too little to outlast a few rejections. Where no
draft is ever right, about one round in twelve still tries one."""


class DraftController:
    """One sequence's drafting: what to ask for, and counts of what became of it. ``backoff`` False asks for all."""

    def __init__(self, max_drafts: int, *, backoff: bool, cost_per_draft: float = COST_PER_DRAFT) -> None:
        self._max_drafts = max_drafts
        self._backoff = backoff
        self._cost = cost_per_draft
        self._n_rounds = self._n_drafted = self._n_accepted = 0
        self._accepted_at = [0] * max_drafts
        self._tried, self._right = [0.0] * max_drafts, [0.0] * max_drafts

    def wanted(self) -> int:
        """Drafts to ask for behind the next round, 0 to ``max_drafts``."""
        if not self._backoff:
            return self._max_drafts
        best, best_rate, tokens, chance = 0, 1.0, 1.0, 1.0
        for i in range(self._max_drafts):
            chance *= self.chance(i)
            tokens += chance
            rate = tokens / (1.0 + self._cost * (i + 1))
            if rate > best_rate:
                best, best_rate = i + 1, rate
        return best

    def chance(self, i: int) -> float:
        """The estimated chance that draft ``i`` is right when those before it are."""
        prior = PRIOR_CHANCE * PRIOR_WEIGHT
        return (self._right[i] + prior) / (self._tried[i] + PRIOR_WEIGHT)

    def note(self, drafted: int, accepted: int) -> None:
        """A round evaluated ``drafted`` drafts and accepted the first ``accepted``."""
        self._n_rounds += 1
        self._n_drafted += drafted
        self._n_accepted += accepted
        for i in range(self._max_drafts):
            was_tried, was_right = i < drafted and i <= accepted, i < accepted
            self._accepted_at[i] += was_right
            self._tried[i] = MEMORY * self._tried[i] + was_tried
            self._right[i] = MEMORY * self._right[i] + was_right

    @property
    def drafting(self) -> Drafting:
        """The counts so far."""
        return Drafting(self._n_rounds, self._n_drafted, self._n_accepted, tuple(self._accepted_at))
