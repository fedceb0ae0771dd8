"""Prescribed forms in the engine: with drafts and without, alone and among others, the same text, and of its form."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from ninfer_runtime import LLM, Choice, GenerationParams, JsonSchema, Lark, Regex, RequestOutput
from ninfer_runtime.backends.base import Round, Ticket
from ninfer_runtime.engine import rounds
from tests.runtime.conftest import ArtifactOf

FIELDS: dict[str, Any] = {
    "sum": {"type": "integer", "minimum": 0, "maximum": 999},
    "words": {"type": "array", "items": {"enum": ["tens", "ones", 10]}, "maxItems": 3},
    "note": {"type": "string", "maxLength": 8},
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["sum", "words"], "additionalProperties": False}
PATTERN = r"[0-9]{1,3} \+ [0-9]{1,3} = [0-9]{1,4}\."
FORMS = (
    JsonSchema(SCHEMA),
    Regex(PATTERN),
    Choice(("12 + 7 = 19.", "12 + 7 = 20.", "a story")),
    Lark('start: (WORD " "){1,3} "."\nWORD: /[a-z]{2,6}/'),
)
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
DAYS = {"type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 14}}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "forecast", "parameters": DAYS}},
]
QUESTIONS = ("What is 12 + 7?", "Tell me a story.", "How is the weather in Paris?")
DENSE = pytest.mark.parametrize("models", ["dense"], indirect=True)
N_MAX = 64
GREEDY: dict[str, Any] = {"temperature": 0}
SPREAD: dict[str, Any] = {"temperature": 1.2, "top_k": 0, "top_p": 1.0, "presence_penalty": 0.5}


@pytest.fixture(scope="module", params=["dense", "moe"])
def models(request: pytest.FixtureRequest, artifact_of: ArtifactOf) -> Iterator[tuple[LLM, LLM]]:
    """One model without drafts and with three per round."""
    settings: dict[str, Any] = {"dtype": "float32", "max_context": 256, "max_concurrency": 4, "prefix_reuse": False}
    path = artifact_of(request.param, "bf16")
    with LLM(path, **settings) as plain, LLM(path, spec="mtp", draft_tokens=3, **settings) as drafting:
        yield plain, drafting


def ids(requests: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for request in requests for output in request.outputs]


def check_form(form: Any, text: str) -> None:
    """The text, which has ended, is of its form, says a checker that knows no grammars."""
    match form:
        case JsonSchema(schema):
            jsonschema.validate(json.loads(text), schema)
        case Regex(pattern):
            assert re.fullmatch(pattern, text), text
        case Choice(choices):
            assert text in choices
        case Lark():
            assert re.fullmatch(r"([a-z]{2,6} ){1,3}\.", text), text


def check(models: tuple[LLM, LLM], questions: list[str], *, thinking: bool, **sampling: Any) -> tuple[int, int, int]:
    """Every question in every form: equal with and without drafts. How many texts ended and are of their form, how many
    drafts were evaluated, how many were right."""
    plain, drafting = models
    asked = [(question, form) for question in questions for form in FORMS]
    params = [GenerationParams(response_format=form, max_tokens=N_MAX, max_thinking=9, **sampling) for _, form in asked]
    expected = plain.chat([question for question, _ in asked], params, thinking=thinking)
    found = drafting.chat([question for question, _ in asked], params, thinking=thinking)
    assert ids(found) == ids(expected)
    outputs = [request.outputs[0] for request in found]
    ended = [i for i, output in enumerate(outputs) if output.finish_reason == "stop"]
    for i in ended:
        check_form(asked[i][1], outputs[i].text)
    drafts = [output.finish.drafting for output in outputs]
    return len(ended), sum(one.n_drafted for one in drafts), sum(one.n_accepted for one in drafts)


@pytest.mark.parametrize("thinking, sampling", [(True, GREEDY), (False, SPREAD)], ids=["thinking-greedy", "spread"])
def test_forms_with_drafts_are_those_without(
    thinking: bool, sampling: dict[str, Any], models: tuple[LLM, LLM], fresh_seed: int
) -> None:
    if sampling["temperature"]:
        sampling = {**sampling, "seed": fresh_seed}
    n_ended, n_drafted, n_accepted = check(models, list(QUESTIONS[:1]), thinking=thinking, **sampling)
    assert n_ended >= 3
    assert 0 < n_accepted <= n_drafted


@DENSE
def test_e2_e7_penalties_bias_and_log_probabilities_are_the_same_with_drafts(
    models: tuple[LLM, LLM], fresh_seed: int
) -> None:
    plain, drafting = models
    fields: tuple[dict[str, Any], ...] = (
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "temperature": 0},
        {"presence_penalty": -2.0, "frequency_penalty": -1.0, "min_p": 0.2},
        {"logit_bias": {5: 3.0, 9: -100.0}, "min_p": 0.05, "top_k": 0},
        {"temperature": 0},
    )
    params = [GenerationParams(max_tokens=24, logprobs=2, seed=fresh_seed, **more) for more in fields]
    asked = [QUESTIONS[i % 2] for i in range(len(params))]
    expected, found = (model.chat(asked, params, thinking=False) for model in (plain, drafting))
    assert ids(found) == ids(expected)
    assert sum(request.outputs[0].finish.drafting.n_accepted for request in found) > 0
    for one, other in zip(found, expected, strict=True):
        rows = zip(one.outputs[0].logprobs or (), other.outputs[0].logprobs or (), strict=True)
        for mine, its in rows:
            assert mine.keys() == its.keys()
            assert [value.logprob for value in mine.values()] == pytest.approx(
                [value.logprob for value in its.values()], abs=1e-4
            )


@DENSE
def test_masks_that_come_late_change_nothing(models: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    forms = (FORMS[1], FORMS[2], Regex("(?:z9){8}"), None)
    params = [GenerationParams(temperature=0, max_tokens=24, response_format=form, logprobs=0) for form in forms]
    asked = [QUESTIONS[i % 2] for i in range(len(forms))]
    for model in models:
        launch, n_rounds, n_first = model.engine.program.launch, 0, 0

        def counting(round_: Round, launch: Callable[[Round], Ticket] = launch) -> Ticket:
            nonlocal n_rounds, n_first
            n_rounds += 1
            n_first += round_.logits_mask is not None
            return launch(round_)

        with monkeypatch.context() as patch:
            patch.setattr(model.engine.program, "launch", counting)
            late = model.chat(asked, params, thinking=False)
            assert 0 < n_first < n_rounds, "rounds of both kinds"
            n_rounds = n_first = 0
            patch.setattr(rounds, "may_come_late", lambda lanes: False)
            first = model.chat(asked, params, thinking=False)
            assert n_first > 0
        assert ids(late) == ids(first)
        for one, other in zip(late, first, strict=True):
            assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-3)


@DENSE
def test_a_row_that_keeps_leaving_its_form_is_waited_for_longer_and_longer(models: tuple[LLM, LLM]) -> None:
    plain, _ = models
    n_before = plain.stats().rounds
    params = GenerationParams(temperature=0, max_tokens=64, response_format=Regex("(?:z9){20}"))
    ((output,),) = (request.outputs for request in plain.chat(QUESTIONS[0], params, thinking=False))
    assert output.text == "z9" * 20
    n_tokens = len(output.token_ids)
    assert n_tokens - 1 <= plain.stats().rounds - n_before <= n_tokens + 7


@pytest.mark.slow
def test_a_dozen_questions_in_every_form(models: tuple[LLM, LLM], fresh_seed: int) -> None:
    rng = random.Random(fresh_seed)
    questions = [f"What is {rng.randrange(60)} + {rng.randrange(60)}?" for _ in range(6)]
    questions += [QUESTIONS[i % 3] for i in range(6)]
    for thinking, sampling in ((False, GREEDY), (False, {**SPREAD, "seed": fresh_seed})):
        n_ended, n_drafted, n_accepted = check(models, questions, thinking=thinking, **sampling)
        print(f"{n_ended} texts of their form, {n_accepted} of {n_drafted} drafts accepted")
        assert n_ended > 2 * len(questions)


@DENSE
def test_drafts_that_break_the_form_cost_nothing_but_their_round(models: tuple[LLM, LLM]) -> None:
    plain, drafting = models
    never = GenerationParams(response_format=Regex("(?:z9){8}"), temperature=0, max_tokens=N_MAX)
    for model in (plain, drafting):
        ((output,),) = (request.outputs for request in model.chat(QUESTIONS[0], never, thinking=False))
        assert output.text == "z9" * 8


@DENSE
def test_rows_with_a_form_and_rows_without_do_not_see_each_other(models: tuple[LLM, LLM]) -> None:
    plain, drafting = models
    free = GenerationParams(temperature=0, max_tokens=30, logprobs=1)
    bound = GenerationParams(temperature=0, max_tokens=30, response_format=FORMS[0])
    together = drafting.chat([QUESTIONS[i % 3] for i in range(4)], [free, bound] * 2, thinking=False)
    for i, request in enumerate(together):
        alone = plain.chat(QUESTIONS[i % 3], (free, bound)[i % 2], thinking=False)
        assert ids([request]) == ids(alone)
        for one, other in zip(request.outputs[0].logprobs or (), alone[0].outputs[0].logprobs or (), strict=True):
            assert one.keys() == other.keys()


@pytest.mark.parametrize("name", [None, "forecast"])
def test_forced_calls_with_drafts_are_those_without_and_fit(name: str | None, models: tuple[LLM, LLM]) -> None:
    plain, drafting = models
    choice: Any = "required" if name is None else {"type": "function", "name": name}
    params = [GenerationParams(temperature=t, seed=3, max_tokens=100, top_k=30) for t in (0, 1.0)]
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "thinking": False, "parallel_tool_calls": False}
    found = drafting.chat(QUESTIONS[1:], params, **asked)
    assert ids(found) == ids(plain.chat(QUESTIONS[1:], params, **asked))
    outputs = [output for request in found for output in request.outputs if output.finish_reason != "length"]
    assert outputs
    for output in outputs:
        assert (output.finish_reason, output.text, len(output.tool_calls)) == ("tool_calls", "", 1)
        (call,) = output.tool_calls
        assert call.name == name or name is None
        jsonschema.validate(json.loads(call.arguments), CITY if call.name == "get_weather" else DAYS)
