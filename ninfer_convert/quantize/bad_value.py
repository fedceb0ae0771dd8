"""A source value that cannot be stored, by its place in the matrix."""

from ninfer_format import EncodeError


class BadValue(EncodeError):
    """``value`` at ``row`` and ``column`` of the matrix being encoded cannot be stored; ``why`` says the rule."""

    def __init__(self, row: int, column: int, value: float, why: str) -> None:
        super().__init__(f"value at row {row}, column {column} is {value}; {why}")
        self.row, self.column, self.value, self.why = row, column, value, why
