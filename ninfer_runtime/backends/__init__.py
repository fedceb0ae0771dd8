"""Backends by name; each is imported only when it is asked for."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ninfer_format.errors import UsageError

if TYPE_CHECKING:
    from ninfer_runtime.backends.base import Backend

_DEVICES: Mapping[str, str] = {"reference": "cpu", "cuda": "cuda"}
"""The device each backend runs on when none is named."""

NAMES = tuple(_DEVICES)


def default_device(name: str) -> str:
    """Where a backend runs unless told otherwise; ``cpu`` for a name that does not exist."""
    return _DEVICES.get(name, "cpu")


def backend(name: str) -> "Backend":
    """The backend of that name. Raises UsageError for an unknown one, MissingExtraError without its dependencies."""
    from ninfer_format.command import require_extra

    if name == "reference":
        require_extra("torch", "cpu")
        from ninfer_runtime.backends.reference import ReferenceBackend

        return ReferenceBackend()
    if name == "cuda":
        require_extra("cuda.bindings", "cuda")
        from ninfer_runtime.backends.cuda.backend import CudaBackend

        return CudaBackend()
    raise UsageError(f"unknown backend {name!r}, expected one of {', '.join(NAMES)}")
