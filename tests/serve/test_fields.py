"""Every field of every request is offered or refused with its name; what is offered is checked, nothing is ignored."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer_runtime.serve.errors import ApiError, problem_of
from ninfer_runtime.serve.fields import CHAT, COMPLETIONS, FIELDS, Field, read_rows
from ninfer_runtime.serve.kinds import ANYTHING, Number, OneOf
from tests.serve.live import MODEL, LiveServer

TURN = [{"role": "user", "content": "Hi"}]
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "input_tokens": "/v1/responses/input_tokens",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
}
BASES: dict[str, dict[str, Any]] = {
    "chat": {"model": MODEL, "messages": TURN, "max_tokens": 1},
    "completions": {"model": MODEL, "prompt": "Hi", "max_tokens": 1},
    "responses": {"model": MODEL, "input": "Hi", "max_output_tokens": 16},
    "input_tokens": {"model": MODEL, "input": "Hi"},
    "messages": {"model": MODEL, "messages": TURN, "max_tokens": 1},
    "count_tokens": {"model": MODEL, "messages": TURN},
}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
GOOD: dict[str, dict[str, Any]] = {
    "model": {"model": MODEL},
    "messages": {"messages": TURN},
    "prompt": {"prompt": [[1, 2], [3]]},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "max_completion_tokens": {"max_completion_tokens": 1},
    "max_tokens": {"max_tokens": 1},
    "min_tokens": {"min_tokens": 1},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": -1},
    "frequency_penalty": {"frequency_penalty": 1},
    "seed": {"seed": 2**64 - 1},
    "logit_bias": {"logit_bias": {"5": -100}},
    "stop": {"stop": ["a", ""]},
    "n": {"n": 2},
    "echo": {"echo": True},
    "tools": {"tools": TOOLS},
    "tool_choice": {"tools": TOOLS, "tool_choice": "auto"},
    "parallel_tool_calls": {"parallel_tool_calls": False},
    "response_format": {"response_format": {"type": "text"}},
    "structured_outputs": {"structured_outputs": {"regex": "a*"}},
    "guided_json": {"guided_json": {"type": "integer"}},
    "guided_regex": {"guided_regex": "a"},
    "guided_choice": {"guided_choice": ["a", "b"]},
    "guided_grammar": {"guided_grammar": 'start: "a"'},
    "reasoning_effort": {"reasoning_effort": "none"},
    "enable_thinking": {"enable_thinking": False},
    "preserve_thinking": {"preserve_thinking": True},
    "thinking_budget": {"thinking_budget": 5},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "user": {"user": "u"},
    "metadata": {"metadata": {"a": "b"}},
    "safety_identifier": {"safety_identifier": "s"},
    "prompt_cache_key": {"prompt_cache_key": "k"},
    "ignore_eos": {"ignore_eos": True},
    "stop_token_ids": {"stop_token_ids": [5]},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "cache_salt": {"cache_salt": "c"},
}
OF_CHAT: dict[str, Any] = {"logprobs": {"logprobs": True}, "top_logprobs": {"logprobs": True, "top_logprobs": 2}}
OF_COMPLETIONS: dict[str, Any] = {"logprobs": {"logprobs": 2}}
WRONG: dict[str, Any] = {"no such": [[]]}
"""A value that fits no field but those that take any object."""


def offered_rows(api: str) -> list[Field]:
    return [row for row in FIELDS[api] if row.why is None]  # type: ignore[index]


def test_the_tables_below_name_every_field() -> None:
    assert {row.name for row in offered_rows("chat")} == (set(GOOD) - {"prompt", "echo"}) | set(OF_CHAT)
    assert {row.name for row in offered_rows("completions")} <= set(GOOD) | set(OF_COMPLETIONS)
    for rows in FIELDS.values():
        names = [row.name for row in rows]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_what_is_offered_is_taken(server: LiveServer, api: str) -> None:
    good = {**GOOD, **(OF_CHAT if api == "chat" else OF_COMPLETIONS)}
    for row in offered_rows(api):
        answer = server.post(PATHS[api], {**BASES[api], **good[row.name]})
        assert answer.status == 200, (row.name, answer.body)
        empty = server.post(PATHS[api], {**BASES[api], row.name: None})
        assert (empty.status == 200) is (not row.required), (row.name, empty.body)


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_value_of_the_wrong_kind_is_refused_with_the_fields_name(server: LiveServer, api: str) -> None:
    for row in offered_rows(api):
        value: Any = 3.14 if row.kind is ANYTHING else WRONG
        answer = server.post(PATHS[api], {**BASES[api], row.name: value})
        assert answer.status == 400, (row.name, answer.body)
        param = answer.json["error"]["param"]
        assert param is not None, (row.name, answer.body)
        assert param.split(".")[0].split("[")[0] == row.name, answer.body


@pytest.mark.parametrize("api", PATHS)
def test_what_is_not_offered_is_refused_with_its_name_unless_it_asks_for_nothing(server: LiveServer, api: str) -> None:
    refused = [row for row in FIELDS[api] if row.why is not None]  # type: ignore[index]
    assert refused
    for row in refused:
        answer = server.post(PATHS[api], {**BASES[api], row.name: WRONG})
        assert answer.status == 400, (row.name, answer.body)
        error = answer.json["error"]
        assert row.name in error["message"]
        if "param" in error:
            assert (error["param"], error["code"]) == (row.name, row.code)
        for value in (*row.only, None):
            assert server.post(PATHS[api], {**BASES[api], row.name: value}).status == 200, (row.name, value)


@pytest.mark.parametrize("api", PATHS)
def test_what_is_in_no_table_is_refused_with_its_name(server: LiveServer, api: str) -> None:
    answer = server.post(PATHS[api], {**BASES[api], "made_up": None})
    assert answer.status == 400
    assert "'made_up' is unknown" in answer.json["error"]["message"]
    for row in FIELDS[api]:  # type: ignore[index]
        if row.required:
            body = {name: value for name, value in BASES[api].items() if name != row.name}
            missing = server.post(PATHS[api], body)
            assert missing.status == 400
            assert f"'{row.name}' is missing" in missing.json["error"]["message"]


@pytest.mark.parametrize("value", [0, -1, 2**31, 1.5, "10", True, [1], {}])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_c10_an_output_limit_is_a_positive_integer_or_null(server: LiveServer, name: str, value: Any) -> None:
    answer = server.post(PATHS["chat"], {**BASES["chat"], name: value})
    assert (answer.status, answer.json["error"]["param"]) == (400, name)


def test_c10_null_is_the_default(server: LiveServer) -> None:
    answer = server.post(PATHS["completions"], {"model": MODEL, "prompt": "Hi", "max_tokens": None, "temperature": 0})
    assert answer.json["usage"]["completion_tokens"] <= 16
    assert answer.status == 200


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("completions", "prompt", ""),
        ("completions", "prompt", [""]),
        ("completions", "prompt", []),
        ("completions", "prompt", [[]]),
        ("completions", "prompt", ["a", ""]),
        ("completions", "prompt", [1, "a"]),
        ("completions", "prompt", [10**9]),
        ("completions", "prompt", [-1]),
        ("completions", "prompt", [True]),
        ("chat", "messages", []),
        ("chat", "messages", [{}]),
        ("chat", "messages", ["a"]),
        ("chat", "messages", [{"role": "user", "content": None}]),
        ("chat", "messages", [{"role": "user", "content": ""}]),
        ("chat", "messages", [{"role": "user", "content": []}]),
        ("chat", "messages", [{"role": "user"}]),
        ("chat", "messages", [{"role": "assistant", "content": None}]),
        ("chat", "messages", [{"role": "narrator", "content": "a"}]),
        ("chat", "messages", [{"role": "user", "content": "a", "name": "Ann"}]),
        ("chat", "messages", [{"role": "user", "content": "a", "made_up": 1}]),
        ("chat", "messages", [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]),
        ("chat", "messages", [*TURN, {"role": "assistant", "content": "a", "function_call": {}}]),
        ("chat", "messages", [*TURN, {"role": "tool", "content": "a"}]),
    ],
)
def test_c9_empty_and_wrong_prompts_are_refused_with_their_place(
    server: LiveServer, path: str, field: str, value: Any
) -> None:
    answer = server.post(PATHS[path], {**BASES[path], field: value})
    assert answer.status == 400, answer.body
    assert str(answer.json["error"]["param"]).startswith(field), answer.body
    assert server.post(PATHS[path], BASES[path]).status == 200


def test_c9_whitespace_is_a_prompt(server: LiveServer) -> None:
    assert server.post(PATHS["completions"], {**BASES["completions"], "prompt": " \n\t"}).status == 200
    assert server.post(PATHS["chat"], {**BASES["chat"], "messages": [{"role": "user", "content": " \n"}]}).status == 200


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("top_k", 0, 200), ("top_k", -1, 200), ("top_k", 641, 200), ("top_k", -2, 400), ("top_k", 2**31, 400),
        ("top_p", 0, 200), ("top_p", 1, 200), ("top_p", 1e-9, 200), ("top_p", 1.01, 400),
        ("min_p", 1, 200), ("min_p", 1.5, 400),
        ("temperature", 0, 200), ("temperature", 1e-7, 200), ("temperature", 2.1, 400),
        ("logit_bias", {"3": -100, "4": 100}, 200), ("logit_bias", {"3": 101}, 400), ("logit_bias", {"-3": 1}, 400),
        ("logit_bias", {"999999": 1}, 400), ("logit_bias", {"a": 1}, 400), ("logit_bias", {"3": "1"}, 400),
        ("seed", 0, 200), ("seed", -1, 400), ("seed", 2**64, 400), ("seed", 1.0, 400),
    ],
)  # fmt: skip
def test_e13_bounds_of_the_sampling_fields(server: LiveServer, name: str, value: Any, status: int) -> None:
    assert server.post(PATHS["chat"], {**BASES["chat"], name: value}).status == status


def test_e13_numbers_that_are_none_are_no_json(server: LiveServer) -> None:
    for word in (b"NaN", b"Infinity", b"-Infinity", b"1e400"):
        body = b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "temperature": ' + word + b"}"
        answer = server.ask("POST", PATHS["chat"], body, {"content-type": "application/json"})
        assert answer.status == 400, word


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "conflicting_template_option"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "conflicting_template_option"),
        ({"reasoning_effort": "minimal"}, "reasoning_effort_not_supported"),
        ({"chat_template_kwargs": {"made_up": 1}}, "unknown_parameter"),
        ({"response_format": {"type": "grammar"}}, "response_format_not_supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "missing_parameter"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, None),
        ({"structured_outputs": {}}, "invalid_request"),
        ({"structured_outputs": {"regex": "("}}, None),
        ({"structured_outputs": {"grammar": "start: nothing"}}, None),
        ({"structured_outputs": {"choice": []}}, "invalid_request"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "invalid_request"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice_not_supported"),
        ({"tools": [{"type": "web_search"}]}, None),
        ({"stop": ["a"] * 17}, "invalid_value"),
        ({"metadata": {"a": "b" * 513}}, "invalid_value"),
    ],
)
def test_contradictions_and_bad_forms_are_refused(server: LiveServer, fields: dict[str, Any], code: str | None) -> None:
    answer = server.post(PATHS["chat"], {**BASES["chat"], **fields})
    assert answer.status == 400, answer.body
    if code is not None:
        assert answer.json["error"]["code"] == code


def test_values_are_read_as_they_are_and_zero_is_not_false() -> None:
    rows = (Field("a", Number(0, 1)), Field("b", OneOf(("x",))), Field("c", why="no", only=(False, 1)))
    assert read_rows(rows, {"a": 0, "b": "x", "c": False}) == {"a": 0.0, "b": "x"}
    for body in ({"c": 0}, {"c": True}, {"c": 1.0}, {"a": True}, {"a": float("nan")}, {"b": 1}):
        with pytest.raises(ApiError) as caught:
            read_rows(rows, body, "outer")
        assert problem_of(caught.value).param == f"outer.{next(iter(body))}"


def test_schemas_describe_what_is_read() -> None:
    import jsonschema

    for rows, base in ((CHAT, BASES["chat"]), (COMPLETIONS, BASES["completions"])):
        from ninfer_runtime.serve.fields import schema_of_rows

        validator = jsonschema.Draft202012Validator(schema_of_rows(rows))
        good = {**GOOD, **(OF_CHAT if rows is CHAT else OF_COMPLETIONS)}
        for row in rows:
            if row.why is None:
                assert validator.is_valid({**base, **good[row.name]}), row.name
            else:
                assert not validator.is_valid({**base, row.name: WRONG}), row.name
        assert not validator.is_valid({**base, "made_up": 1})
