"""Fixtures of the runtime's tests: the trained tiny models as artifacts and as running programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from ninfer_format import Artifact
from ninfer_runtime.models.binder import BoundModel, bind
from tests.runtime.artifacts import TRAINED, convert

ArtifactOf = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def artifact_of(tmp_path_factory: pytest.TempPathFactory) -> ArtifactOf:
    """``artifact_of("dense" | "moe", recipe)``: path of a trained tiny model."""
    folder = tmp_path_factory.mktemp("artifacts")

    @cache
    def made(kind: str, recipe: str) -> Path:
        path = folder / f"{kind}-{recipe}.ninfer"
        convert(TRAINED / kind, path, recipe)
        return path

    return made


@pytest.fixture(scope="session", params=["dense", "moe"])
def model(request: pytest.FixtureRequest, artifact_of: ArtifactOf) -> Iterator[BoundModel]:
    """Both architectures in turn, every matrix BF16."""
    with Artifact.open(artifact_of(request.param, "bf16")) as artifact:
        yield bind(artifact)


@pytest.fixture(scope="session")
def dense(artifact_of: ArtifactOf) -> Iterator[BoundModel]:
    """The dense model, every matrix BF16."""
    with Artifact.open(artifact_of("dense", "bf16")) as artifact:
        yield bind(artifact)
