"""What the official ``openai`` client builds on the API: its own accumulation of streams, several clients at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, cast

import openai
import pytest

from tests.serve.live import MODEL, LiveServer

HELLO: Any = [{"role": "user", "content": "What is 2 + 3?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
PLAIN = {"enable_thinking": False}


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made


def final(client: openai.OpenAI, **fields: Any) -> Any:
    """The completion the client's accumulator makes of a stream."""
    asked = {"model": MODEL, "messages": HELLO, "seed": 4, "max_tokens": 100, "extra_body": PLAIN, **fields}
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        assert "chunk" in kinds
        return stream.get_final_completion()


def whole(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {"model": MODEL, "messages": HELLO, "seed": 4, "max_tokens": 100, "extra_body": PLAIN, **fields}
    return cast(Any, client.chat.completions).create(**asked)


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


def same(first: Any, second: Any) -> None:
    assert len(first.choices) == len(second.choices)
    for one, other in zip(first.choices, second.choices, strict=True):
        assert one.finish_reason == other.finish_reason
        assert (one.message.content or None) == (other.message.content or None)
        calls = [
            [(call.function.name, call.function.arguments) for call in c.message.tool_calls or ()] for c in (one, other)
        ]
        assert calls[0] == calls[1]
        logprobs = [None if c.logprobs is None else [e.logprob for e in c.logprobs.content or ()] for c in (one, other)]
        assert logprobs[0] == logprobs[1]
    assert first.usage.completion_tokens == second.usage.completion_tokens


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "temperature": 1.5},
        {"logprobs": True, "top_logprobs": 2, "max_tokens": 10},
        {"tools": [TOOL], "tool_choice": "required", "frequency_penalty": 2},
        {"stop": ["5"]},
    ],
    ids=["plain", "n", "logprobs", "tools", "stop"],
)
def test_the_clients_accumulator_arrives_at_the_whole_answer(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    streamed = final(client, **fields)
    same(streamed, whole(client, **fields))
    if "tools" in fields:
        (call,) = streamed.choices[0].message.tool_calls[:1]
        assert set(json.loads(call.function.arguments)) == {"a", "b"}


def test_raw_responses_have_the_request_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=1)
    assert raw.headers["x-request-id"].startswith("req_")
    assert raw.parse().choices[0].finish_reason == "length"


def test_e11_answers_at_the_same_time_are_those_of_one_alone(server: LiveServer, client: openai.OpenAI) -> None:
    """Seeded answers do not depend on who else is served; without seeds, equal questions get different answers."""
    asked: dict[str, Any] = {
        "model": MODEL, "messages": [{"role": "user", "content": "zebra ocean?"}], "max_tokens": 15,
        "temperature": 2.0, "top_p": 1.0, "extra_body": {"top_k": 0},
    }  # fmt: skip
    alone = [cast(Any, client.chat.completions).create(**asked, seed=i).choices[0].message for i in range(4)]

    async def together(seeds: list[int | None]) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as several:
            create = cast(Any, several.chat.completions).create
            calls = [create(**asked, **({} if seed is None else {"seed": seed})) for seed in seeds]
            return [answer.choices[0].message for answer in await asyncio.gather(*calls)]

    assert asyncio.run(together([0, 1, 2, 3])) == alone
    free = asyncio.run(together([None] * 5))
    assert len({str(message) for message in free}) > 1


def test_a_stream_that_is_closed_early_is_cancelled(server: LiveServer, client: openai.OpenAI) -> None:
    cancelled = server.service.engine.stats().requests_finished.get("cancelled", 0)
    with client.completions.create(
        model=MODEL, prompt="a", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    server.wait_until_idle()
    assert server.service.engine.stats().requests_finished["cancelled"] == cancelled + 1
