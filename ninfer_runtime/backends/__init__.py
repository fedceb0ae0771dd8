"""Backends by name; each is imported only when it is asked for."""

from typing import TYPE_CHECKING

from ninfer_format.errors import UsageError

if TYPE_CHECKING:
    from ninfer_runtime.backends.base import Backend

NAMES = ("reference",)


def backend(name: str) -> "Backend":
    """The backend of that name. Raises UsageError for an unknown one, MissingExtraError without its dependencies."""
    if name == "reference":
        from ninfer_format.command import require_extra

        require_extra("torch", "cpu")
        from ninfer_runtime.backends.reference import ReferenceBackend

        return ReferenceBackend()
    raise UsageError(f"unknown backend {name!r}, expected one of {', '.join(NAMES)}")
