"""A source value that cannot be stored, by its place in the matrix."""

from ninfer_format import EncodeError

NOT_FINITE = "only finite weights can be stored; the checkpoint is damaged or was saved from a diverged model"


class BadValue(EncodeError):
    """``value`` at ``row``, ``column`` of the matrix being encoded cannot be stored; ``why`` has rule and advice."""

    def __init__(self, row: int, column: int, value: float, why: str) -> None:
        super().__init__(f"value at row {row}, column {column} is {value}; {why}")
        self.row, self.column, self.value, self.why = row, column, value, why
