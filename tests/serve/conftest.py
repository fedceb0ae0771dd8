"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.conftest import ArtifactOf, artifact_of
from tests.serve.live import LiveServer, served

__all__ = ["artifact_of"]


@pytest.fixture(scope="session")
def server(artifact_of: ArtifactOf) -> Iterator[LiveServer]:
    """The dense tiny model, four answers at a time, no key."""
    with served(artifact_of("dense", "bf16")) as running:
        yield running
