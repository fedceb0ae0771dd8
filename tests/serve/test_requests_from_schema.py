"""Requests drawn from the server's own OpenAPI document, fitting it or not: no server error, whatever is asked."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.runtime.conftest import ArtifactOf
from tests.serve.live import LiveServer
from tests.serve.programmed import CONFIG, programmed

PROMPTS: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi"}
SMALL = replace(CONFIG, max_context=256, max_concurrency=4, max_pending=32)


@pytest.fixture(scope="module")
def asked(artifact_of: ArtifactOf) -> Iterator[LiveServer]:
    with programmed(artifact_of("dense", "bf16"), "some words ", config=SMALL) as (server, _):
        yield server


def thinned(body: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Some bodies with few of their fields, some with a good prompt: of all forty, some contradict each other."""
    optional = [name for name in body if name not in PROMPTS]
    kept = draw.sample(optional, min(len(optional), draw.choice([0, 1, 2, 3, 40])))
    if "model" in body:
        kept.append("model")
    plain = draw.random() < 0.5
    prompts = {name: PROMPTS[name] if plain else body[name] for name in PROMPTS if name in body}
    return {**{name: body[name] for name in kept}, **prompts}


def ask_drawn(server: LiveServer, n_requests: int, draw: int, paths: Sequence[str] = ()) -> Counter[tuple[str, int]]:
    """Ask about ``n_requests`` drawn requests of ``paths`` (all), most of them POSTs; (path, status) → responses."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [cast(Any, found).ok() for found in schema.get_all_operations()]
    operations = [operation for operation in operations if not paths or operation.path in paths]
    posts = sum(operation.method.upper() == "POST" for operation in operations)
    seen: Counter[tuple[str, int]] = Counter()
    for operation in operations:
        n = max(2, n_requests // posts // 2) if operation.method.upper() == "POST" else 5
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            try:
                ask_operation(server, operation, mode, n, draw, seen)
            except Unsatisfiable:
                assert mode is GenerationMode.NEGATIVE, "what has neither body nor parameters cannot be wrong"
    return seen


def ask_operation(
    server: LiveServer, operation: Any, mode: GenerationMode, n: int, draw: int, seen: Counter[tuple[str, int]]
) -> None:
    """Up to ``n`` requests of one route, in one mode."""

    @seed(draw)
    @settings(
        max_examples=n,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = thinned(case.body, random.Random(draw + seen.total()))
        response = case.call(base_url=server.url, timeout=60)
        seen[case.operation.path, response.status_code] += 1
        assert response.status_code < 500, (case.as_curl_command(), response.text)
        if response.status_code >= 400:
            assert response.json()["error"]["message"]

    check()


def test_no_server_error_in_a_few_requests(asked: LiveServer, fresh_seed: int) -> None:
    seen = ask_drawn(asked, 30, fresh_seed, ("/v1/chat/completions", "/tokenize", "/v1/models/{model_id}"))
    assert sum(seen.values()) >= 25
    assert seen["/v1/chat/completions", 400]
    asked.wait_until_idle()


@pytest.mark.slow
def test_no_server_error_in_three_thousand_requests(asked: LiveServer, fresh_seed: int) -> None:
    seen = ask_drawn(asked, 3600, fresh_seed)
    print(sum(seen.values()), sorted(seen.items()))
    assert sum(seen.values()) >= 3000
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/apply-template"):
        assert seen[path, 200], path
    assert asked.ask("GET", "/health").status == 200
    asked.wait_until_idle()
