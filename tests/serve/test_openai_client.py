"""The official ``openai`` client against a live server: every documented feature, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.serve.live import MODEL, LiveServer

HELLO: Any = [{"role": "user", "content": "What is 2 + 3?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
PLAIN = {"enable_thinking": False}
VAGUE: Any = [{"role": "user", "content": "zebra ocean?"}]
"""A question the tiny model was not taught, so that sampling matters."""
WILD: Any = {"messages": VAGUE, "temperature": 2.0, "top_p": 1.0, "extra_body": {"top_k": 0}, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made


class Assembled:
    """What a stream says, per choice."""

    def __init__(self, chunks: list[ChatCompletionChunk], n: int = 1) -> None:
        self.chunks = chunks
        self.content = [""] * n
        self.reasoning = [""] * n
        self.finish: list[str | None] = [None] * n
        self.calls: list[dict[int, list[str]]] = [{} for _ in range(n)]
        self.logprobs: list[list[Any]] = [[] for _ in range(n)]
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            delta, i = choice.delta, choice.index
            self.content[i] += delta.content or ""
            self.reasoning[i] += getattr(delta, "reasoning_content", None) or ""
            self.finish[i] = choice.finish_reason or self.finish[i]
            for call in delta.tool_calls or ():
                name, arguments = call.function.name, call.function.arguments  # type: ignore[union-attr]
                known = self.calls[i].setdefault(call.index, ["", ""])
                known[0] += name or ""
                known[1] += arguments or ""
            if choice.logprobs is not None:
                self.logprobs[i] += choice.logprobs.content or []


def whole(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    fields = {"model": MODEL, "messages": HELLO, "seed": 3, "max_tokens": 40, **fields}
    return cast(ChatCompletion, client.chat.completions.create(**fields))


def streamed(client: openai.OpenAI, **fields: Any) -> Assembled:
    fields = {"model": MODEL, "messages": HELLO, "seed": 3, "max_tokens": 40, **fields}
    return Assembled(list(client.chat.completions.create(**fields, stream=True)), fields.get("n", 1))


# ---- answers ---------------------------------------------------------------------------------------
def test_an_answer_has_its_thinking_its_text_and_its_counts(client: openai.OpenAI) -> None:
    answer = whole(client, max_tokens=300, temperature=0)
    (choice,) = answer.choices
    assert answer.model == MODEL
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert cast(Any, choice.message).reasoning_content
    assert choice.finish_reason == "stop"
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details is not None
    thought = usage.completion_tokens_details.reasoning_tokens or 0
    assert 0 < thought < usage.completion_tokens


@pytest.mark.parametrize("plain", [False, True])
def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, plain: bool) -> None:
    extra = PLAIN if plain else {}
    answer, stream = whole(client, extra_body=extra), streamed(client, extra_body=extra)
    message = answer.choices[0].message
    assert stream.content[0] == (message.content or "")
    assert stream.reasoning[0] == (getattr(message, "reasoning_content", None) or "")
    assert bool(stream.reasoning[0]) is not plain
    assert stream.finish == [answer.choices[0].finish_reason]
    assert {chunk.id for chunk in stream.chunks} == {stream.chunks[0].id}
    assert stream.chunks[0].choices[0].delta.role == "assistant"


def test_c23_usage_comes_in_a_last_chunk_without_choices(client: openai.OpenAI) -> None:
    with_usage = streamed(client, stream_options={"include_usage": True})
    *before, last = with_usage.chunks
    assert last.choices == []
    assert last.usage is not None
    assert all(chunk.usage is None for chunk in before)
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    same = whole(client).usage
    assert same is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (same.prompt_tokens, same.completion_tokens)
    assert all(chunk.usage is None for chunk in streamed(client).chunks)
    counts = streamed(client, stream_options={"include_usage": True}, extra_body={"stream_options": {
        "include_usage": True, "continuous_usage_stats": True}}).chunks  # fmt: skip
    totals = [chunk.usage.completion_tokens for chunk in counts if chunk.usage is not None]
    assert len(totals) == len(counts)
    assert totals == sorted(totals)


def test_c23_cached_tokens_count_what_was_reused(client: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "Count with me: " + ", ".join(map(str, range(40)))}]
    extra = {"cache_salt": "c23"}
    first, second = (whole(client, messages=long, max_tokens=2, extra_body=extra).usage for _ in range(2))
    other = whole(client, messages=long, max_tokens=2, extra_body={"cache_salt": "another"}).usage
    cached = [usage.prompt_tokens_details.cached_tokens for usage in (first, second, other)]  # type: ignore[union-attr]
    assert cached[0] == 0
    assert cached[1] is not None
    assert second is not None
    assert second.prompt_tokens // 2 < cached[1] < second.prompt_tokens
    assert cached[2] == 0


def test_seeds_repeat_and_their_absence_does_not(client: openai.OpenAI) -> None:
    texts = [str(whole(client, **WILD, seed=seed).choices[0].message) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert len({str(whole(client, **WILD, seed=openai.omit).choices[0].message) for _ in range(3)}) == 3


def test_e12_n_answers_differ_and_repeat(client: openai.OpenAI) -> None:
    answer = whole(client, n=3, **WILD)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [cast(Any, choice.message).reasoning_content for choice in answer.choices]
    assert len(set(texts)) == 3
    assert streamed(client, n=3, **WILD).reasoning == texts
    assert cast(Any, whole(client, **WILD).choices[0].message).reasoning_content == texts[0]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * 12


@pytest.mark.parametrize("top", [None, 0, 3])
def test_e9_log_probabilities_are_those_of_the_answer(client: openai.OpenAI, top: int | None) -> None:
    fields: dict[str, Any] = {"logprobs": True, "extra_body": PLAIN, "max_tokens": 8, "temperature": 0}
    if top is not None:
        fields["top_logprobs"] = top
    answer, stream = whole(client, **fields), streamed(client, **fields)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    said = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content).decode()
    assert said == answer.choices[0].message.content == stream.content[0]
    assert [entry.logprob for entry in stream.logprobs[0]] == [entry.logprob for entry in logprobs.content]
    for entry in logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == (top or 0)
        if top:
            # Greedy: the token is the most likely one.
            assert entry.top_logprobs[0].token == entry.token
            assert entry.top_logprobs[0].logprob == entry.logprob


def test_log_probabilities_of_many_tokens(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 20, "seed": 1, "logprobs": 2}
    few = client.completions.create(**fields).choices
    monkeypatch.setattr("ninfer_runtime.serve.exchange.MANY_TOKENS", 5)
    assert client.completions.create(**fields).choices == few


def test_c4_a_stop_string_ends_the_answer_and_is_not_shown(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"extra_body": PLAIN, "temperature": 0, "max_tokens": 60}
    text = whole(client, **fields).choices[0].message.content
    assert text is not None
    stop = text[2:5]
    answer = whole(client, stop=[stop, "never said"], **fields)
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert cast(Any, answer.choices[0]).stop_reason == stop
    assert streamed(client, stop=stop, **fields).content == [text[: text.index(stop)]]
    shown = whole(client, stop=stop, **{**fields, "extra_body": {**PLAIN, "include_stop_str_in_output": True}})
    assert shown.choices[0].message.content == text[: text.index(stop) + len(stop)]


def test_the_output_limit_ends_with_length(client: openai.OpenAI) -> None:
    for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 30}):
        answer = whole(client, **limit)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3


def test_an_answer_is_at_least_as_long_as_asked(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 100}
    usual = whole(client, **fields, extra_body=PLAIN)
    assert usual.choices[0].finish_reason == "stop"
    assert usual.usage is not None
    least = usual.usage.completion_tokens + 10
    longer = whole(client, **fields, extra_body={**PLAIN, "min_tokens": least}).usage
    assert longer is not None
    assert longer.completion_tokens >= least
    with pytest.raises(openai.BadRequestError):
        whole(client, max_tokens=5, extra_body={"min_tokens": 6})


# ---- thinking --------------------------------------------------------------------------------------
def test_effort_none_and_the_switch_turn_thinking_off(client: openai.OpenAI) -> None:
    for fields in (
        {"reasoning_effort": "none"},
        {"extra_body": PLAIN},
        {"extra_body": {"chat_template_kwargs": PLAIN}},
        {"extra_body": {"thinking_budget": 0}},
    ):
        message = whole(client, **fields).choices[0].message
        assert message.content
        assert getattr(message, "reasoning_content", None) is None


def test_an_effort_the_template_does_not_know_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        whole(client, reasoning_effort="high")
    assert (caught.value.code, caught.value.param) == ("reasoning_effort_not_supported", "reasoning_effort")


@pytest.mark.parametrize("stream", [False, True])
def test_d23_a_thinking_budget_closes_the_thinking(client: openai.OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {"max_tokens": 60, "extra_body": {"thinking_budget": 4}}
    if stream:
        found = streamed(client, stream_options={"include_usage": True}, **fields)
        content, usage = found.content[0], found.chunks[-1].usage
    else:
        answer = whole(client, **fields)
        content, usage = answer.choices[0].message.content or "", answer.usage
    assert content
    assert usage is not None
    assert usage.completion_tokens_details is not None
    # Four tokens of thinking and those that close it.
    assert 4 <= (usage.completion_tokens_details.reasoning_tokens or 0) <= 4 + 12


# ---- tools and prescribed forms --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tools", "choice", "name"),
    [
        ([WEATHER], "required", "get_weather"),
        ([WEATHER, CLOCK], {"type": "function", "function": {"name": "now"}}, "now"),
        ([CLOCK, WEATHER], {"type": "function", "function": {"name": "get_weather"}}, "get_weather"),
    ],
)
def test_a_required_call_comes_and_fits_its_schema(client: openai.OpenAI, tools: Any, choice: Any, name: str) -> None:
    fields: dict[str, Any] = {
        "tools": tools, "tool_choice": choice, "max_tokens": 200, "extra_body": PLAIN, "parallel_tool_calls": False,
        "frequency_penalty": 2,
    }  # fmt: skip
    answer = whole(client, **fields)
    (chosen,) = answer.choices
    assert chosen.finish_reason == "tool_calls"
    assert chosen.message.content is None
    (call,) = cast(Any, chosen.message.tool_calls)
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name == name
    arguments = json.loads(call.function.arguments)
    if name == "now":
        assert arguments == {}
    else:
        assert set(arguments) == {"city", "days"}
        assert arguments["days"] in (1, 2)
        assert len(arguments["city"]) <= 8
    stream = streamed(client, **fields)
    assert stream.calls == [{0: [name, call.function.arguments]}]
    assert stream.finish == ["tool_calls"]


def test_tool_choice_none_and_auto_let_the_model_speak(client: openai.OpenAI) -> None:
    for choice in ("none", "auto"):
        message = whole(client, tools=[WEATHER], tool_choice=choice, extra_body=PLAIN).choices[0].message
        assert message.content
        assert not message.tool_calls


def test_a_whole_tool_conversation_is_understood(client: openai.OpenAI) -> None:
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    asked = whole(client, tools=[CLOCK], max_tokens=1).usage
    answered = whole(client, messages=messages, tools=[CLOCK], max_tokens=1).usage
    assert asked is not None
    assert answered is not None
    assert answered.prompt_tokens > asked.prompt_tokens + len("12:00")


SHAPE = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("thinking", [True, False])
def test_c22_an_answer_follows_its_json_schema(client: openai.OpenAI, thinking: bool) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SHAPE, "strict": True}}
    extra: dict[str, Any] = {"thinking_budget": 3} if thinking else PLAIN
    fields: dict[str, Any] = {"response_format": form, "max_tokens": 200, "extra_body": extra, "frequency_penalty": 2}
    text = whole(client, **fields).choices[0].message.content or ""
    value = json.loads(text)
    assert set(value) == {"n", "ok"}
    assert 0 <= value["n"] <= 99
    assert isinstance(value["ok"], bool)
    assert streamed(client, **fields).content == [text]


def test_c22_the_clients_own_parsing_takes_the_answer(client: openai.OpenAI) -> None:
    from pydantic import BaseModel

    class Shape(BaseModel):
        ok: bool

    parsed = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Shape, max_tokens=100, temperature=0, extra_body=PLAIN
    )
    assert isinstance(parsed.choices[0].message.parsed, Shape)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}, "logit_bias": {}}, None),
        ({"extra_body": {"structured_outputs": {"regex": "[ab]{3}"}}}, r"[ab]{3}"),
        ({"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}}, r"yes|no"),
        ({"extra_body": {"structured_outputs": {"grammar": 'start: "x" /[0-9]{2}/'}}}, r"x[0-9]{2}"),
        ({"extra_body": {"guided_regex": "z{4}"}}, r"z{4}"),
        ({"extra_body": {"guided_choice": ["one"]}}, r"one"),
        ({"extra_body": {"guided_grammar": 'start: "g"'}}, r"g"),
        ({"extra_body": {"guided_json": {"enum": [7]}}}, r"7"),
        ({"extra_body": {"structured_outputs": {"json": '{"enum": [8]}'}}}, r"8"),
    ],
)
def test_c22_other_forms_are_followed(client: openai.OpenAI, fields: dict[str, Any], pattern: str | None) -> None:
    import re

    extra = {**PLAIN, **fields.pop("extra_body", {})}
    answer = whole(client, **fields, extra_body=extra, max_tokens=40).choices[0]
    text = answer.message.content or ""
    if pattern is None:
        assert text.lstrip().startswith("{")
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(text), dict)
    else:
        assert re.fullmatch(pattern, text)


def test_two_forms_at_once_are_refused(client: openai.OpenAI) -> None:
    for fields in (
        {"response_format": {"type": "json_object"}, "extra_body": {"guided_regex": "a"}},
        {"response_format": {"type": "json_object"}, "tools": [WEATHER], "tool_choice": "required"},
        {"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}},
    ):
        with pytest.raises(openai.BadRequestError):
            whole(client, **fields)


# ---- completions -----------------------------------------------------------------------------------
def test_text_completions_whole_and_streamed(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "The answer is", "max_tokens": 20, "temperature": 0}
    answer = client.completions.create(**fields)
    chunks = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == answer.choices[0].text
    assert chunks[-1].usage is not None
    assert answer.usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    echoed = client.completions.create(**fields, echo=True)
    assert echoed.choices[0].text == "The answer is" + answer.choices[0].text


def test_several_prompts_of_texts_and_token_ids(client: openai.OpenAI, server: LiveServer) -> None:
    ids = server.post("/tokenize", {"content": "The answer is"}).json["tokens"]
    answer = client.completions.create(
        model=MODEL, prompt=["The answer is", "Once upon"], max_tokens=6, temperature=0, n=1
    )
    same = client.completions.create(model=MODEL, prompt=[ids, ids], max_tokens=6, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text == same.choices[0].text == same.choices[1].text
    two = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, seed=1, max_tokens=4)
    assert [choice.index for choice in two.choices] == [0, 1, 2, 3]


def test_log_probabilities_of_a_text_completion(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "The answer is", "max_tokens": 6, "temperature": 0}
    answer = client.completions.create(**fields, logprobs=2).choices[0]
    assert answer.logprobs is not None
    assert answer.logprobs.tokens is not None
    assert answer.logprobs.text_offset is not None
    assert "".join(answer.logprobs.tokens) == answer.text
    assert [answer.text[at:][: len(t)] for at, t in zip(answer.logprobs.text_offset, answer.logprobs.tokens)] == (  # noqa: B905
        answer.logprobs.tokens
    )
    assert all(len(top) == 2 for top in answer.logprobs.top_logprobs or ())
    assert client.completions.create(**fields, logprobs=0).choices[0].text == answer.text


# ---- errors ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found", "model"),
        ({"temperature": 3}, openai.BadRequestError, "invalid_value", "temperature"),
        ({"messages": []}, openai.BadRequestError, "invalid_value", "messages"),
        ({"max_tokens": 0}, openai.BadRequestError, "invalid_value", "max_tokens"),
        ({"extra_body": {"made_up": 1}}, openai.BadRequestError, "unknown_parameter", "made_up"),
        ({"functions": [{"name": "f"}]}, openai.BadRequestError, "tools_not_supported", "functions"),
        ({"top_logprobs": 2}, openai.BadRequestError, "invalid_request", "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "invalid_request", "stream_options"),
        ({"tool_choice": "required"}, openai.BadRequestError, "invalid_request", "tool_choice"),
        ({"n": 100}, openai.BadRequestError, "invalid_request", "n"),
        ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "invalid_request", None),
    ],
)
def test_errors_are_the_clients_own_types(
    client: openai.OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], code: str, param: str | None
) -> None:
    with pytest.raises(kind) as caught:
        whole(client, **fields)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.request_id is not None
    assert caught.value.request_id.startswith("req_")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("part", ["image_url", "video_url"])
def test_c12_media_are_refused_as_vision_disabled_before_a_stream_opens(
    client: openai.OpenAI, part: str, stream: bool
) -> None:
    content = [{"type": "text", "text": "Look:"}, {"type": part, part: {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(openai.BadRequestError) as caught:
        whole(client, messages=[{"role": "user", "content": content}], stream=stream)
    assert caught.value.code == "vision_disabled"
    assert "messages[0].content[1]" in str(caught.value.param)


@pytest.mark.parametrize("stream", [False, True])
def test_c11_a_prompt_beyond_the_context_is_refused_with_both_counts(client: openai.OpenAI, stream: bool) -> None:
    long: Any = [{"role": "user", "content": "word " * 600}]
    with pytest.raises(openai.BadRequestError) as caught:
        whole(client, messages=long, stream=stream)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert "512" in caught.value.message
    with pytest.raises(openai.BadRequestError, match="512") as text:
        client.completions.create(model=MODEL, prompt="word " * 600, stream=stream)
    assert (text.value.code, text.value.param) == ("context_length_exceeded", "prompt")


# ---- what the server says of itself ----------------------------------------------------------------
def test_c27_models_say_their_limits(client: openai.OpenAI) -> None:
    (listed,) = client.models.list().data
    assert listed.id == MODEL
    found = cast(Any, client.models.retrieve(MODEL))
    assert (found.context_length, found.max_model_len, found.max_output_tokens) == (512, 512, 511)
    assert found.quantization == "bf16"
    assert found.meta["n_ctx"] == 512
    assert "json_schema" in found.features
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_e14_default_sampling_is_shown_by_mode(server: LiveServer) -> None:
    defaults = server.ask("GET", "/v1/models").json["data"][0]["default_sampling"]
    assert defaults["thinking"]["temperature"] == 1.0
    assert set(defaults) == {"thinking", "plain"}
