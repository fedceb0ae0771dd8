"""What an engine has done and is doing, as numbers."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A consistent look at an engine. Totals count since its start.

    running            sequences that hold a slot: ``prefilling`` + ``decode_ready``
    waiting            requests in the queue
    pages_used         KV pages with an owner, ``pages_cached`` of them kept only for prefix reuse
    reused_tokens      prompt tokens that prefix reuse spared; ``computed_prefill_tokens`` were computed
    rounds, row_rounds rounds launched, and the rows in them; their ratio is the mean batch
    accepted_at        accepted_at[i]: rounds of a row that accepted its draft i
    requests_finished  by FinishReason value, and "error"
    fault              why the engine runs nothing any more, None while it is healthy
    """

    max_rows: int
    running: int
    prefilling: int
    decode_ready: int
    waiting: int
    pages_used: int
    pages_cached: int
    pages_total: int
    snapshots_used: int
    snapshots_total: int
    prompt_tokens: int
    computed_prefill_tokens: int
    reused_tokens: int
    generated_tokens: int
    rounds: int
    row_rounds: int
    drafted: int
    accepted: int
    accepted_at: tuple[int, ...]
    requests_finished: Mapping[str, int]
    fault: str | None = None

    @property
    def is_healthy(self) -> bool:
        """False once the engine has failed."""
        return self.fault is None


@dataclass(slots=True)
class Totals:
    """The running sums behind ``EngineStats``."""

    prompt_tokens: int = 0
    computed_prefill_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    row_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    finished: Counter[str] = field(default_factory=Counter)

    def note_drafts(self, drafted: int, accepted: int) -> None:
        """One row of one round evaluated ``drafted`` drafts and accepted the first ``accepted``."""
        self.drafted += drafted
        self.accepted += accepted
        if drafted > len(self.accepted_at):
            self.accepted_at += [0] * (drafted - len(self.accepted_at))
        for i in range(accepted):
            self.accepted_at[i] += 1
