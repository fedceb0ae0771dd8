"""The benchmark and the soak of the server: short runs, so that the long ones can be trusted to run at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import bench_serve, soak_serve
from tests.runtime.conftest import ArtifactOf


@pytest.fixture(scope="module")
def artifact(artifact_of: ArtifactOf) -> Path:
    return artifact_of("dense", "bf16")


def test_the_benchmark_measures_what_was_streamed(artifact: Path) -> None:
    found = bench_serve.measure(artifact, n_clients=3, n_requests=1, n_tokens=150)
    for name in ("throughput", "steady"):
        part = found[name]
        assert part["tokens"] == 3 * 150
        assert part["tokens_per_second"] > 100
        assert part["tokens_per_event"] >= 0.9
        assert part["loop_late_ms"]["max"] >= part["loop_late_ms"]["p50"]
    assert found["latency"]["tokens"] == 150
    # Some tokens are pieces of characters; every other one is an event of its own.
    assert 100 < found["latency"]["events"] <= 150
    assert 0 < found["latency"]["draw_to_arrival_ms"]["p50"] < 100


def test_arrivals_are_paired_with_the_last_draw_before_them() -> None:
    assert bench_serve.paired([1.0, 2.0, 3.0], [1.5, 2.25, 3.125]) == [0.5, 0.25, 0.125]
    assert bench_serve.paired([1.0, 2.0, 3.0], [1.5, 3.5]) == [0.5, 0.5]


def test_texts_of_a_stream_are_joined_whatever_their_events() -> None:
    def chunk(text: str, index: int = 0) -> dict[str, object]:
        return {"choices": [{"index": index, "delta": {"content": text}}]}

    assert soak_serve.text_of([chunk("ab"), chunk("c")]) == soak_serve.text_of([chunk("a"), chunk("bc")])
    assert soak_serve.text_of([chunk("ab")]) != soak_serve.text_of([chunk("ba")])
    assert soak_serve.text_of([chunk("a", 0), chunk("b", 1)]) != soak_serve.text_of([chunk("b", 0), chunk("a", 1)])
    assert soak_serve.text_of([chunk("a"), chunk("x", 1), chunk("b")]) == soak_serve.text_of(
        [chunk("ab"), chunk("x", 1)]
    )
    same = {"id": 1, "usage": {"prompt_tokens_details": {"cached_tokens": 3}, "n": 1}}
    assert soak_serve.settled(same) == {"usage": {"n": 1}}


@pytest.mark.slow
def test_a_short_soak_finds_nothing_wrong(artifact: Path, fresh_seed: int) -> None:
    document, problems = soak_serve.soak(artifact, seconds=20, n_clients=8, seed=fresh_seed)
    assert problems == []
    assert document["requests"]["answered alike"] > 10
