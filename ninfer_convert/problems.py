"""What a preflight finds: problems, collected rather than raised one by one."""

from collections.abc import Sequence
from dataclasses import dataclass

from ninfer_format import SourceError


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why a checkpoint cannot be converted as asked."""

    code: str
    """Stable kebab-case name of the kind, for scripts."""
    message: str
    """What was found and what was expected."""
    where: str
    """File, tensor, config key or option."""
    advice: str
    """What to do about it."""

    def __str__(self) -> str:
        return f"{self.where}: {self.message}; {self.advice}"


class PlanError(SourceError):
    """A build was asked for although its plan has problems; ``problems`` holds all of them."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


def some_names(names: Sequence[str], limit: int = 3) -> str:
    """The first few names and how many more there are: ``a, b, c and 97 more``."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
