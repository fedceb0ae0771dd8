"""How an adapter says that it cannot present a matrix."""


class BadGroup(Exception):
    """Stored tensors that make no matrix: ``code``, ``message`` and ``advice`` of the problem."""

    def __init__(self, code: str, message: str, advice: str) -> None:
        super().__init__(message)
        self.code, self.message, self.advice = code, message, advice
