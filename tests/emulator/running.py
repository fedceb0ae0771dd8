"""Which launches of an emulated device a card might still be running."""


class Running:
    """Launches that a card might not have ended yet: those behind the last wait, copy, or launch without pdl, and from
    the last one on that let the next one start only after its own wait."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._first = 1

    def begin(self, variant: str, pdl: bool) -> tuple[int, int]:
        """Number of a new launch, and the lowest number of those that may still run beside it."""
        if not pdl:
            self.end_all()
        self._names.append(variant)
        return self._first + len(self._names) - 1, self._first

    def end_before(self, number: int) -> None:
        """The launches in front of this one have ended."""
        del self._names[: number - self._first]
        self._first = number

    def end_all(self) -> None:
        """Everything launched so far has ended."""
        self._first += len(self._names)
        self._names.clear()

    def name(self, number: int) -> str:
        """Variant of a launch that may still run."""
        return self._names[number - self._first]
