"""The Messages API with the official client against a live server."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, beta_tool
from pydantic import BaseModel

from ninfer_format.errors import NonFiniteError
from tests.property.test_any_split import byte_ids
from tests.runtime.chain import call
from tests.runtime.conftest import ArtifactOf
from tests.serve import assembled
from tests.serve.live import LiveServer, leave_an_answer
from tests.serve.scripted import scripted

HI: list[Any] = [{"role": "user", "content": "Hi"}]
QUESTION: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NOW: Any = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
GREEDY = {"temperature": 0}
OFF: Any = {"type": "disabled"}
PLAIN: dict[str, Any] = {"model": "any", "max_tokens": 24, "thinking": OFF, "extra_body": GREEDY}
"""Short answers without thinking."""


def client_of(server: LiveServer) -> Anthropic:
    return Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Anthropic:
    return client_of(server)


def test_c26_thinking_is_a_block_of_its_own_whole_and_streamed(client: Anthropic) -> None:
    asked: Any = {"model": "any", "max_tokens": 64, "messages": QUESTION, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert (whole.model, whole.role, whole.stop_reason, whole.stop_sequence) == ("any", "assistant", "end_turn", None)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    starts = [kind for kind in kinds if kind in ("message_start", "content_block_start", "content_block_stop")]
    assert starts == [
        "message_start", "content_block_start", "content_block_stop", "content_block_start", "content_block_stop",
    ]  # fmt: skip
    assert kinds[-1] == "message_stop"
    for before, after in zip(whole.content, final.content, strict=True):
        assert before.to_dict().items() <= after.to_dict().items()
    replayed: Any = [*QUESTION, {"role": "assistant", "content": whole.content}, {"role": "user", "content": "Again?"}]
    assert client.messages.create(messages=replayed, **PLAIN).content


def test_c25_counted_tokens_are_those_of_the_request(client: Anthropic, server: LiveServer) -> None:
    asked: Any = {
        "model": "any", "messages": QUESTION, "tools": [WEATHER, NOW],
        "system": [{"type": "text", "text": "Be brief."}],
    }  # fmt: skip
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(max_tokens=1, **asked).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert server.post("/v1/messages/count_tokens?beta=true", asked).json == {"input_tokens": counted}
    picture: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match="runs text only"):
        client.messages.count_tokens(model="any", messages=[{"role": "user", "content": [picture]}])


def test_a_forced_use_streams_its_input_and_its_result_is_taken(client: Anthropic) -> None:
    turns: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    choice: Any = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    asked: Any = {**PLAIN, "max_tokens": 100, "tools": [WEATHER, NOW]}
    fragments = []
    with client.messages.stream(messages=turns, tool_choice=choice, **asked) as stream:
        for event in stream:
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                fragments.append(event.delta.partial_json)
        made = stream.get_final_message()
    (use,) = [block for block in made.content if block.type == "tool_use"]
    assert (use.name, made.stop_reason) == ("get_weather", "tool_use")
    assert use.input == json.loads("".join(fragments))
    assert len(fragments) > 1
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
    turns += [{"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    later = client.messages.create(messages=turns, **asked)
    assert later.stop_reason in ("end_turn", "tool_use", "max_tokens")
    assert later.usage.input_tokens + (later.usage.cache_read_input_tokens or 0) > made.usage.input_tokens


@pytest.mark.parametrize(
    ("choice", "n_uses"), [({"type": "any", "disable_parallel_tool_use": True}, 1), ({"type": "none"}, 0)]
)
def test_tool_choices(client: Anthropic, choice: Any, n_uses: int) -> None:
    made = client.messages.create(
        messages=HI,
        tools=[NOW],
        tool_choice=choice,
        **PLAIN,
    )
    assert [block.type for block in made.content].count("tool_use") == n_uses


def test_a_schema_is_followed(client: Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"fine": {"type": "boolean"}},
        "required": ["fine"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    made = client.messages.create(messages=QUESTION, output_config=form, **PLAIN | {"max_tokens": 60})
    (block,) = made.content
    assert block.type == "text"
    assert isinstance(json.loads(block.text)["fine"], bool)


class Sum(BaseModel):
    result: int
    fine: bool


def test_the_client_parses_what_follows_its_model(client: Anthropic) -> None:
    made = client.messages.parse(messages=QUESTION, output_format=Sum, **PLAIN | {"max_tokens": 100})
    assert isinstance(made.parsed_output, Sum)


def test_thinking_can_be_limited_and_left_out(client: Anthropic) -> None:
    made = client.messages.create(
        model="any", max_tokens=64, messages=QUESTION, extra_body=GREEDY,
        thinking={"type": "enabled", "budget_tokens": 5, "display": "omitted"},
    )  # fmt: skip
    thinking = made.content[0]
    assert thinking.type == "thinking"
    assert thinking.thinking == ""
    details = made.usage.to_dict()["output_tokens_details"]
    assert isinstance(details, dict)
    assert 5 <= details["thinking_tokens"] <= 10


def test_why_an_answer_ended(client: Anthropic) -> None:
    cut = client.messages.create(messages=QUESTION, **PLAIN | {"max_tokens": 2})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    whole = client.messages.create(messages=QUESTION, **PLAIN).content[0]
    assert whole.type == "text"
    stop = whole.text[3:5]
    stopped = client.messages.create(messages=QUESTION, stop_sequences=[stop, "never"], **PLAIN)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert [block.to_dict()["text"] for block in stopped.content] == [whole.text[: whole.text.index(stop)]]


def test_c23_what_was_read_from_the_cache_is_counted_apart(client: Anthropic) -> None:
    system = "This is said first, to everybody. " * 10
    made = [
        client.messages.create(messages=[{"role": "user", "content": text}], system=system, **PLAIN).usage
        for text in ("What is 4 + 4?", "Spell cloud.")
    ]
    assert (made[1].cache_read_input_tokens or 0) > 20
    assert made[1].input_tokens < made[0].input_tokens


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ({"extra_body": {"temperature": 3}}, "temperature"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"thinking": {"budget_tokens": 5}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "budget_tokens"),
        ({"output_config": {"effort": "high"}}, "effort"),
        ({"output_config": {"effort": "low"}, "thinking": OFF}, "contradict"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"tool_choice": {"name": "f"}}, "tool_choice.type"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "Well"}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, "has"),
        ({"messages": [{"role": "user", "content": "word " * 600}], "stream": True}, "has"),
    ],
)
def test_what_is_refused_is_named(client: Anthropic, fields: Any, words: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{"model": "any", "max_tokens": 8, "messages": QUESTION, **fields})
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert words in body["error"]["message"]
    assert body["request_id"] == caught.value.request_id or body["request_id"].startswith("req_")


def test_refusals_have_codes_and_paths(client: Anthropic) -> None:
    for fields, code, param in (
        ({"output_config": {"effort": "high"}}, "reasoning_effort_not_supported", "output_config.effort"),
        ({"extra_body": {"context_management": {}}}, "unsupported_parameter", "context_management"),
    ):
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(messages=QUESTION, **{**PLAIN, "thinking": {"type": "adaptive"}, **fields})
        body: Any = caught.value.body
        assert body["error"]["details"] == {"error_code": code, "param": param}


def test_c27_the_model_and_its_limits_are_found(client: Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.type, model.max_input_tokens, model.max_tokens) == ("model", 512, 511)
    assert client.models.retrieve(model.id).display_name == model.id
    assert model.created_at is not None
    assert model.created_at.year >= 2024


def test_c21_errors_have_this_apis_form_on_every_path_of_it(server: LiveServer) -> None:
    for method, path, body in (
        ("POST", "/v1/messages", b"{"), ("GET", "/v1/messages", None), ("POST", "/v1/messages/none", {}),
        ("POST", "/v1/messages/count_tokens", b"[]"),
    ):  # fmt: skip
        answered = server.ask(method, path, body)
        assert answered.status in (400, 404, 405)
        assert answered.json["type"] == "error"
        assert set(answered.json["error"]) == {"type", "message", "details"}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_cancels_its_message(server: LiveServer, stream: bool) -> None:
    turns = [{"role": "user", "content": "Tell me a story."}]
    body = {"model": "any", "messages": turns, "stream": stream, "max_tokens": 400}
    assert leave_an_answer(server, "/v1/messages", body) >= stream


def test_a_failure_behind_the_first_event_is_an_error_event(artifact_of: ArtifactOf) -> None:
    with scripted(artifact_of("dense", "bf16")) as (server, engine):
        client = client_of(server)
        engine.script, engine.error = (
            [byte_ids()[byte] for byte in b"some text"],
            NonFiniteError("row 0 has no maximum"),
        )
        stream = client.messages.create(messages=QUESTION, stream=True, **PLAIN)
        assert [next(stream).type for _ in range(2)] == ["message_start", "content_block_start"]
        with pytest.raises(anthropic.APIStatusError, match="row 0"):
            list(stream)
        with pytest.raises(anthropic.InternalServerError):
            client.messages.create(messages=QUESTION, **PLAIN)


def test_d13_several_uses_stream_one_after_the_other(artifact_of: ArtifactOf) -> None:
    said = f"I look.\n{call('get_weather', ('city', 'Paris'))}\n{call('now')}\n{call('get_weather', ('city', 'ü'))}"
    with scripted(artifact_of("dense", "bf16")) as (server, engine):
        engine.script = [byte_ids()[byte] for byte in said.encode()]
        body = {
            "model": "any", "messages": QUESTION, "thinking": OFF, "tools": [WEATHER, NOW], "max_tokens": 999,
            "stream": True,
        }  # fmt: skip
        made = assembled.message(server.post("/v1/messages", body).events)
        assert made["stop_reason"] == "tool_use"
        uses = [block for block in made["content"] if block["type"] == "tool_use"]
        assert [use["input"] for use in uses] == [{"city": "Paris"}, {}, {"city": "ü"}]
        assert len({use["id"] for use in uses}) == 3
        with client_of(server).messages.stream(
            model="any",
            messages=QUESTION,
            thinking=OFF,
            tools=[WEATHER, NOW],
            max_tokens=999,
        ) as stream:
            final = stream.get_final_message()
        assert [block.input for block in final.content if block.type == "tool_use"] == [use["input"] for use in uses]


def test_the_clients_tool_runner_runs_its_tools_without_a_thread(artifact_of: ArtifactOf) -> None:
    asked = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: Its name.
        """
        asked.append(city)
        return f"sunny in {city}"

    with scripted(artifact_of("dense", "bf16")) as (server, engine):
        engine.first.append([byte_ids()[byte] for byte in call("get_weather", ("city", "Paris")).encode()])
        engine.script = [byte_ids()[byte] for byte in b"It is sunny."]
        runner = client_of(server).beta.messages.tool_runner(
            model="any", max_tokens=200, messages=QUESTION, tools=[get_weather], thinking=OFF
        )
        made = list(runner)
    assert asked == ["Paris"]
    assert [message.stop_reason for message in made] == ["tool_use", "end_turn"]
    assert [block.type for block in made[1].content] == ["text"]
