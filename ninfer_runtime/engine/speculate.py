"""How many tokens to draft behind the next round, from what was accepted before."""

from ninfer_runtime.engine.sequence import Drafting


class DraftController:
    """One sequence's drafting: asks for ``max_drafts`` each time and counts what became of them."""

    def __init__(self, max_drafts: int, *, backoff: bool) -> None:
        self._max_drafts = max_drafts
        self._backoff = backoff
        self._n_rounds = self._n_drafted = self._n_accepted = 0
        self._accepted_at = [0] * max_drafts

    def wanted(self) -> int:
        """Drafts to ask for behind the next round."""
        return self._max_drafts

    def note(self, drafted: int, accepted: int) -> None:
        """A round evaluated ``drafted`` drafts and accepted the first ``accepted``."""
        self._n_rounds += 1
        self._n_drafted += drafted
        self._n_accepted += accepted
        for i in range(accepted):
            self._accepted_at[i] += 1

    @property
    def drafting(self) -> Drafting:
        """The counts so far."""
        return Drafting(self._n_rounds, self._n_drafted, self._n_accepted, tuple(self._accepted_at))
