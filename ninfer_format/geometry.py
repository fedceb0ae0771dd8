"""Pure integer arithmetic of the container: rounding, checked products, spans."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ninfer_format.errors import GeometryError, TruncatedError

MAX_EXTENT = (1 << 63) - 1
"""Largest byte count or element count that any sum or product may reach."""


def up(x: int, alignment: int) -> int:
    """Smallest multiple of ``alignment`` that is at least ``x`` (both in the same unit)."""
    return -(-x // alignment) * alignment


def checked_product(factors: Iterable[int]) -> int:
    """Product of positive integers; GeometryError as soon as it passes 2^63 - 1."""
    product = 1
    for factor in factors:
        product *= factor
        if product > MAX_EXTENT:
            raise GeometryError(f"the product of {list(factors)!r} exceeds 2^63 - 1; no real tensor is that large")
    return product


@dataclass(frozen=True, slots=True)
class Span:
    """A byte range inside the payload area: ``offset`` and ``size`` in bytes, payload-relative."""

    name: str
    offset: int
    size: int
    alignment: int

    @property
    def end(self) -> int:
        """First byte after the span."""
        return self.offset + self.size


def check_spans(spans: Sequence[Span], payload_bytes: int) -> None:
    """Ordered, aligned, disjoint and inside the payload (container rules 1 to 4).

    Raises GeometryError for order, overlap or alignment and TruncatedError when the file ends too early.
    """
    end, last = 0, "the payload start"
    for span in spans:
        if span.offset < end:
            raise GeometryError(
                f"object {span.name!r} starts at payload offset {span.offset}, inside or before {last!r} "
                f"which ends at {end}; objects must be stored in order without overlap"
            )
        if span.offset % span.alignment:
            raise GeometryError(
                f"object {span.name!r} starts at payload offset {span.offset}, which is not a multiple of "
                f"{span.alignment}"
            )
        if span.end > MAX_EXTENT:
            raise GeometryError(f"object {span.name!r} ends at {span.end}, beyond 2^63 - 1")
        end, last = span.end, span.name
        if end > payload_bytes:
            raise TruncatedError(
                f"object {span.name!r} ends at payload offset {end}, but the file holds only {payload_bytes} "
                "payload bytes; it is incomplete, download or build it again"
            )


def first_permitted(cursor: int, alignment: int) -> int:
    """Where a packing writer puts the next object: the first aligned offset at or after ``cursor``."""
    return up(cursor, alignment)
