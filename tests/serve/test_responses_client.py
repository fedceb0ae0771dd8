"""The Responses API with the official client against a live server."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from ninfer_format.errors import NonFiniteError
from tests.property.test_any_split import byte_ids
from tests.runtime.conftest import ArtifactOf
from tests.serve import assembled
from tests.serve.live import MODEL, LiveServer, leave_an_answer
from tests.serve.scripted import scripted

QUESTION = "What is 2 + 3?"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
NOW: Any = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
PLAIN: dict[str, Any] = {"model": MODEL, "temperature": 0, "reasoning": {"effort": "none"}, "max_output_tokens": 24}
"""Short answers without thinking."""


def client_of(server: LiveServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> OpenAI:
    return client_of(server)


def test_an_answer_is_thinking_and_text_with_its_counts(client: OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=64)
    assert [item.type for item in made.output] == ["reasoning", "message"]
    assert (made.status, made.error, made.incomplete_details) == ("completed", None, None)
    assert made.output_text == "2 + 3 = 5."
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert 0 < made.usage.output_tokens_details.reasoning_tokens < made.usage.output_tokens
    counted = client.responses.input_tokens.count(model=MODEL, input=QUESTION)
    assert counted.input_tokens == made.usage.input_tokens


def test_a_stream_has_the_documented_order_and_joins_to_the_response(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 64}
    events = [event.to_dict(mode="json") for event in client.responses.create(stream=True, **asked)]
    names = [str(event["type"]).removeprefix("response.") for event in events]
    assert [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    streamed, whole = assembled.response(events), client.responses.create(**asked).to_dict(mode="json")
    assert assembled.plain(streamed["output"]) == assembled.plain(whole["output"])


def test_calls_stream_are_answered_and_the_conversation_goes_on(client: OpenAI) -> None:
    asked: Any = {"input": "How is the weather in Paris?", "tools": [WEATHER, NOW], "tool_choice": "required", **PLAIN}
    with client.responses.stream(**asked | {"max_output_tokens": 80}) as stream:
        events = list(stream)
        made = stream.get_final_response()
    (call,) = [item for item in made.output if item.type == "function_call"]
    assert call.name in ("get_weather", "now")
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert arguments == call.arguments
    assert isinstance(json.loads(arguments), dict)
    follow: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    later = client.responses.create(previous_response_id=made.id, **asked | {"input": follow, "tool_choice": "auto"})
    assert later.previous_response_id == made.id
    items = client.responses.input_items.list(later.id, order="asc").data
    assert [item.type for item in items][-2:] == ["function_call", "function_call_output"]
    assert later.usage is not None
    assert made.usage is not None
    assert later.usage.input_tokens > made.usage.input_tokens


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "name": "now"}, ["now"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}, ["now"]),
        ("none", []),
    ],
)
def test_tool_choices(client: OpenAI, choice: Any, names: list[str]) -> None:
    made = client.responses.create(
        input="Hi", tools=[WEATHER, NOW], tool_choice=choice, parallel_tool_calls=False, **PLAIN
    )
    assert [item.name for item in made.output if item.type == "function_call"] == names
    assert made.tools[0].type == "function"


class Sum(BaseModel):
    result: int
    fine: bool


def test_a_schema_is_followed_and_parsed_by_the_client(client: OpenAI) -> None:
    made = client.responses.parse(input=QUESTION, text_format=Sum, **PLAIN | {"max_output_tokens": 100})
    assert isinstance(made.output_parsed, Sum)
    loose = client.responses.create(
        input=QUESTION, text={"format": {"type": "json_object"}}, **PLAIN | {"max_output_tokens": 100}
    )
    assert loose.status == "incomplete" or isinstance(json.loads(loose.output_text), dict)


def test_log_probabilities_are_of_the_text(client: OpenAI) -> None:
    made = client.responses.create(input=QUESTION, include=["message.output_text.logprobs"], top_logprobs=2, **PLAIN)
    (message,) = made.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_a_cut_answer_is_incomplete(client: OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=16)
    assert (made.status, made.usage and made.usage.output_tokens) == ("incomplete", 16)
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=16) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_what_was_asked_is_repeated_and_a_seed_repeats_the_answer(client: OpenAI) -> None:
    asked: Any = PLAIN | {"temperature": 1.5, "top_p": 0.9}
    first, second = (
        client.responses.create(
            input="Tell me a story.", instructions="Be brief.", metadata={"a": "b"}, user="u", prompt_cache_key="s",
            extra_body={"seed": 7}, **asked,
        )
        for _ in range(2)
    )  # fmt: skip
    assert first.output_text == second.output_text
    assert (first.instructions, first.metadata, first.user) == ("Be brief.", {"a": "b"}, "u")
    assert (first.temperature, first.top_p, first.max_output_tokens) == (1.5, 0.9, 24)


def test_c23_a_prefix_that_was_computed_before_is_counted(client: OpenAI) -> None:
    long = "This is said first. " * 12
    counts = []
    for question in ("What is 4 + 4?", "Spell cloud."):
        made = client.responses.create(instructions=long, input=question, **PLAIN)
        assert made.usage is not None
        counts.append(made.usage.input_tokens_details.cached_tokens)
    assert counts[1] > 20


def test_stored_responses_are_fetched_listed_and_deleted(client: OpenAI) -> None:
    made = client.responses.create(input=QUESTION, **PLAIN)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    turns: Any = [{"role": "user", "content": word} for word in ("one", "two", "three")]
    later = client.responses.create(input=turns, previous_response_id=made.id, **PLAIN)
    pages = client.responses.input_items.list(later.id, limit=2, order="asc")
    assert len(pages.data) == 2
    assert len(list(pages)) == 5
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(made.id)
    assert caught.value.code == "response_not_found"
    assert client.responses.create(input="Hi", previous_response_id=later.id, **PLAIN).status == "completed"
    passing = client.responses.create(input=QUESTION, store=False, **PLAIN)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="Hi", previous_response_id=passing.id, **PLAIN)
    for refused in (lambda: client.responses.cancel(later.id), lambda: client.responses.compact(model=MODEL)):
        with pytest.raises(openai.BadRequestError):
            refused()
    with pytest.raises(openai.BadRequestError) as caught_page:
        client.responses.input_items.list(later.id, after="nothing")
    assert caught_page.value.code == "invalid_pagination"


PICTURE: Any = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"extra_body": {"nonsense": 1}}, "nonsense", "unknown_parameter"),
        ({"background": True}, "background", "background_not_supported"),
        ({"truncation": "auto"}, "truncation", "truncation_not_supported"),
        ({"include": ["file_search_call.results"]}, "include[0]", "include_not_supported"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "reasoning_option_not_supported"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "reasoning_effort_not_supported"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "text_option_not_supported"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "tool_type_not_supported"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_request"),
        ({"max_output_tokens": 8}, "max_output_tokens", "invalid_value"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"metadata": {"a": 1}}, "metadata", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": None}, "input", "missing_parameter"),
        ({"input": [{"role": "user", "content": [PICTURE]}]}, "input[0].content[0]", "vision_disabled"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "invalid_value"),
        ({"input": "word " * 600}, "input", "context_length_exceeded"),
    ],
)
def test_what_is_refused_has_its_name_and_code(client: OpenAI, fields: Any, param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": MODEL, "input": "hi", **fields})
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize("stream", [False, True])
def test_c11_c12_what_does_not_fit_is_refused_before_a_stream_opens(server: LiveServer, stream: bool) -> None:
    long = {"type": "input_text", "text": "word " * 600}
    for parts, words in (([long], "512"), ([long, PICTURE], "runs text only")):
        content = {"role": "user", "content": parts}
        counted = server.post("/v1/responses/input_tokens", {"model": MODEL, "input": [content]})
        answered = server.post("/v1/responses", {"model": MODEL, "input": [content], "stream": stream})
        assert (answered.status, answered.headers["content-type"]) == (400, "application/json")
        n_tokens = str(counted.json.get("input_tokens", "runs text only"))
        assert n_tokens in answered.json["error"]["message"]
        assert words in answered.json["error"]["message"]


def test_other_errors_are_the_clients_own(client: OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="other", input="hi")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        answered = server.ask("POST", path, b"[")
        assert (answered.status, answered.json["error"]["type"]) == (400, "invalid_request_error")
    assert server.ask("GET", "/v1/responses/resp_none?stream=true").json["error"]["param"] == "stream"
    assert (
        server.ask("GET", "/v1/responses/resp_none/input_items?limit=0").json["error"]["code"] == "invalid_pagination"
    )
    assert server.ask("PUT", "/v1/responses").status == 405


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_cancels_its_response(server: LiveServer, stream: bool) -> None:
    body = {"model": MODEL, "input": "Tell me a story.", "stream": stream, "max_output_tokens": 400}
    assert leave_an_answer(server, "/v1/responses", body) >= stream


def test_a_failure_behind_the_first_event_ends_the_stream_as_failed(artifact_of: ArtifactOf) -> None:
    with scripted(artifact_of("dense", "bf16")) as (server, engine):
        engine.script, engine.error = (
            [byte_ids()[byte] for byte in b"some text"],
            NonFiniteError("row 0 has no maximum"),
        )
        client = client_of(server)
        kinds, last = [], None
        for event in client.responses.create(input="hi", stream=True, **PLAIN):
            kinds.append(event.type)
            last = event
        assert kinds[0] == "response.created"
        assert last is not None
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.code == "non_finite_logits"
        with pytest.raises(openai.InternalServerError):
            client.responses.create(input="hi", **PLAIN)
        engine.error = None
        assert client.responses.create(input="hi", **PLAIN).output_text == "some text"
