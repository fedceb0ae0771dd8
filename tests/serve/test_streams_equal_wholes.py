"""Whatever the model writes: the deltas of every API's stream join to the body of its whole answer."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ninfer_runtime.engine.sequence import MissReason, Reuse
from ninfer_runtime.text.stream import Reply, StreamOptions, join
from tests.property.model_outputs import Output, model_outputs
from tests.property.test_any_split import byte_ids
from tests.runtime.chain import events_of
from tests.runtime.conftest import ArtifactOf
from tests.serve import assembled
from tests.serve.live import MODEL, LiveServer
from tests.serve.scripted import ScriptedEngine, scripted

LEAST = {"call": 0.2, "failed": 0.02, "reasoning": 0.3}
"""How many outputs, as a share of those asked for, must show each of these for the property to say something."""
LEAST_OUTPUT = 16
"""Of ``max_output_tokens``."""
TURNS = [{"role": "user", "content": "hi"}]
Scripted = tuple[LiveServer, ScriptedEngine]


@pytest.fixture(scope="module")
def scene(artifact_of: ArtifactOf) -> Iterator[Scripted]:
    with scripted(artifact_of("dense", "bf16")) as pair:
        pair[1].reuse = Reuse(3, 5, MissReason.DIFFERS, 5)
        yield pair


def function(tool: Any) -> dict[str, Any]:
    return {"name": tool.name, "parameters": {"type": "object", **tool.parameters}}


def chat_body(options: StreamOptions) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": TURNS,
        "tools": [{"type": "function", "function": function(tool)} for tool in options.tools],
        "enable_thinking": options.starts_inside,
        "stop": list(options.stops),
        "include_stop_str_in_output": options.include_stop,
    }


def responses_body(options: StreamOptions) -> dict[str, Any]:
    tools = [{"type": "function", **function(tool)} for tool in options.tools]
    return {"model": MODEL, "input": "hi", "tools": tools, "enable_thinking": options.starts_inside, "store": False}


def messages_body(options: StreamOptions) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": TURNS,
        "tools": [{"name": tool.name, "input_schema": {"type": "object", **tool.parameters}} for tool in options.tools],
        "thinking": {"type": "enabled" if options.starts_inside else "disabled"},
        "stop_sequences": list(options.stops),
    }


def reply_of(text: str, options: StreamOptions, **changes: Any) -> Reply:
    """What the text chain makes of the output in one piece."""
    kept = {name: getattr(options, name) for name in ("starts_inside", "tools", "stops", "include_stop")}
    return join(events_of([text], StreamOptions(**(kept | changes))))


def both(server: LiveServer, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer, and the events of the streamed one."""
    whole, streamed = server.post(path, body), server.post(path, {**body, "stream": True})
    assert (whole.status, streamed.status) == (200, 200), (whole.body, streamed.body)
    return whole.json, streamed.events


def check_chat(server: LiveServer, output: Output, limit: dict[str, int]) -> Counter[str]:
    """Chat completions."""
    body = {**chat_body(output.options), **limit, "stream_options": None}
    whole, events = both(server, "/v1/chat/completions", body)
    (choice,) = whole["choices"]
    assert assembled.plain(assembled.chat(events)) == assembled.plain(choice)
    expected = reply_of(output.text, output.options)
    said = choice["message"]
    assert (said["content"] or "", said.get("reasoning_content", "")) == (expected.content, expected.reasoning)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in said.get("tool_calls", ())]
    assert calls == [(call.name, call.arguments) for call in expected.tool_calls]
    announced = sum(
        "id" in call for event in events for c in event["choices"] for call in c["delta"].get("tool_calls", ())
    )
    return Counter(call=bool(calls), failed=announced > len(calls), reasoning=bool(expected.reasoning))


def check_responses(server: LiveServer, output: Output, limit: dict[str, int]) -> None:
    """Responses: text, thinking and calls against the chain, items against the stream."""
    limits = {"max_output_tokens": max(LEAST_OUTPUT, limit["max_tokens"])} if limit else {}
    whole, events = both(server, "/v1/responses", responses_body(output.options) | limits)
    streamed = assembled.response(events)
    streamed["output"] = assembled.without_failed(streamed["output"])
    assert assembled.plain(streamed) == assembled.plain(whole)
    expected = reply_of(output.text, output.options, stops=(), include_stop=False)
    texts = [
        "".join(part["text"] for item in whole["output"] if item["type"] == kind for part in item["content"])
        for kind in ("message", "reasoning")
    ]
    assert texts == [expected.content, expected.reasoning]
    calls = [(item["name"], item["arguments"]) for item in whole["output"] if item["type"] == "function_call"]
    assert calls == [(call.name, call.arguments) for call in expected.tool_calls]


def check_messages(server: LiveServer, output: Output, limit: dict[str, int]) -> None:
    """Anthropic messages."""
    whole, events = both(server, "/v1/messages", messages_body(output.options) | limit)
    assert assembled.plain(assembled.message(events)) == assembled.plain(whole)
    expected = reply_of(output.text, output.options, include_stop=False)
    blocks = whole["content"]
    assert "".join(block["text"] for block in blocks if block["type"] == "text") == expected.content
    assert "".join(block["thinking"] for block in blocks if block["type"] == "thinking") == expected.reasoning
    assert [block["name"] for block in blocks if block["type"] == "tool_use"] == [
        call.name for call in expected.tool_calls
    ]


def check_completions(server: LiveServer, output: Output, limit: dict[str, int]) -> None:
    """Text completions, in which no tag means anything."""
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 4096, "stop": list(output.options.stops)} | limit
    whole, events = both(server, "/v1/completions", body)
    (choice,) = whole["choices"]
    assert assembled.completion(events) == choice


def check_many(scene: Scripted, seed: int, n: int) -> None:
    """``n`` outputs, or more until they were such as make a difference, whole and streamed through four APIs."""
    server, engine = scene
    draw = random.Random(seed ^ 2)
    seen: Counter[str] = Counter()
    for i, output in enumerate(model_outputs(seed, 10 * n)):
        if i >= n and all(seen[what] >= share * n for what, share in LEAST.items()):
            break
        is_cut = draw.random() < 0.2
        if is_cut:
            output = replace(output, text=output.text[: draw.randint(0, len(output.text))] or "x")
        engine.script = [byte_ids()[byte] for byte in output.text.encode()]
        limit = {"max_tokens": len(engine.script)} if is_cut else {}
        try:
            seen += check_chat(server, output, limit)
            check_responses(server, output, limit)
            check_messages(server, output, limit)
            check_completions(server, output, limit)
        except AssertionError as error:
            raise AssertionError(f"output {i}, {output.kind}: {output.text!r} with {output.options}") from error
    print(dict(seen))
    for what, share in LEAST.items():
        assert seen[what] >= share * n, f"too few outputs with {what}: {seen}"


def test_the_deltas_of_every_api_join_to_its_whole_answer(scene: Scripted, fresh_seed: int) -> None:
    check_many(scene, fresh_seed, 60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_deltas_of_two_thousand_answers_join_to_the_whole_ones(scene: Scripted, fresh_seed: int) -> None:
    check_many(scene, fresh_seed, 2_000)
