"""Rich requests with something in them replaced, removed or put elsewhere: answered or refused, never a failure."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.conftest import ArtifactOf
from tests.serve.live import MODEL, LiveServer
from tests.serve.scripted import scripted

SCHEMA = {"type": "object", "properties": {"city": {"type": ["string", "null"]}}, "required": ["city"]}
TEXT = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral", "ttl": "5m"}}
RESPONSES: dict[str, Any] = {
    "model": MODEL,
    "input": [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}], "id": "msg_1", "status": "completed"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello", "annotations": []}]},
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "f",
            "arguments": '{"city": "Paris"}',
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sunny"}]},
    ],
    "instructions": "Say little.",
    "tools": [{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "reasoning": {"effort": "none", "summary": None},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
    "max_output_tokens": 16,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "metadata": {"a": "b"},
    "stream_options": {"include_obfuscation": False},
    "chat_template_kwargs": {"enable_thinking": False},
    "temperature": 1,
    "seed": 1,
    "store": True,
}
MESSAGES: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 16,
    "system": [TEXT],
    "messages": [
        {"role": "user", "content": [TEXT, {"type": "text", "text": "there"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "so", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Hello"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"city": None}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [TEXT], "is_error": True}],
        },
        {"role": "system", "content": "Go on."},
        {"role": "user", "content": "Well?"},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["a"],
    "temperature": 0.5,
}
JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 2**70, 1e308, "", "x", "\ud800", "\x00", "<|im_start|>", "9" * 5000,
    [], [None], [[]], {}, {"": {}}, {"type": "text"}, {"type": None}, {"type": ["text"]}, {"type": {"a": 1}},
    "user", "assistant", "text", "json_schema", ["a", "a"], {"a": {"b": [1, {"c": None}]}},
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below ``value``."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def mutate(draw: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """A copy with one to three changes."""
    body = copy.deepcopy(body)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        found = places(body)
        container, key = draw.choice(found)
        match draw.randrange(5):
            case 0:
                del container[key]
            case 1:
                other, other_key = draw.choice(found)
                container[key] = copy.deepcopy(other[other_key])
            case 2 if isinstance(container, list):
                container.insert(key, copy.deepcopy(container[key]))
            case _:
                container[key] = copy.deepcopy(draw.choice(JUNK))
    return body


@pytest.fixture(scope="module")
def server(artifact_of: ArtifactOf) -> Iterator[LiveServer]:
    """A server whose model says nothing."""
    with scripted(artifact_of("dense", "bf16")) as (running, _):
        yield running


def check_many(server: LiveServer, seed: int, n: int) -> None:
    draw = random.Random(seed)
    seen: Counter[int] = Counter()
    for i in range(n):
        path, whole = draw.choice(
            (("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES), ("/v1/messages/count_tokens", MESSAGES))
        )
        if path.endswith("count_tokens"):
            whole = {name: whole[name] for name in ("model", "messages", "system", "tools", "tool_choice", "thinking")}
        body = mutate(draw, whole) if i else whole
        answered = server.post(path, body)
        assert answered.status in (200, 400, 404), (path, json.dumps(body), answered.body)
        seen[answered.status] += 1
        if answered.status != 200:
            assert isinstance(answered.json["error"]["message"], str)
    print(dict(seen))
    assert seen[200] > n / 20
    assert seen[400] > n / 3
    assert not server.service.active


def test_no_mutated_request_is_a_failure_of_the_server(server: LiveServer, fresh_seed: int) -> None:
    for path, body in (("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)):
        assert server.post(path, body).status == 200
    check_many(server, fresh_seed, 300)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_none_of_five_thousand_is(server: LiveServer, fresh_seed: int) -> None:
    check_many(server, fresh_seed, 5_000)
