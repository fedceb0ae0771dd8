"""``LLM``: many prompts, many answers, whole or in pieces; each answer the one it would be alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from ninfer_format.errors import EngineStoppedError, RequestError, UsageError
from ninfer_runtime import (
    LLM,
    Choice,
    CompletionOutput,
    EngineConfig,
    FinishReason,
    GenerationParams,
    JsonSchema,
    Lark,
    Regex,
    SamplingParams,
    StreamedOutput,
)
from ninfer_runtime.engine.reading import choice_seeds
from tests.runtime.conftest import ArtifactOf

ROOT = Path(__file__).resolve().parents[2]
GREEDY = GenerationParams(temperature=0)
SUM = "What is 12 + 7?"
STORY = "Tell me a story."
WEATHER = "How is the weather in Paris?"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GET_WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
KNOWN = {"type": "function", "function": {"name": "get_weather", "parameters": {"city": "string"}}}
"""As the tiny model was shown it: it calls this one unasked."""
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def llm(artifact_of: ArtifactOf) -> Iterator[LLM]:
    with LLM(artifact_of("dense", "bf16"), dtype="float32", max_context=256, max_concurrency=4) as llm:
        yield llm


def one(llm: LLM, messages: Any, params: Any = GREEDY, **options: Any) -> CompletionOutput:
    """The only answer to a conversation."""
    ((output,),) = (request.outputs for request in llm.chat(messages, params, **options))
    return output


# ---- prompts and answers -------------------------------------------------------------------------
def test_each_conversation_has_its_answer_in_order_however_many_there_are(llm: LLM) -> None:
    asked = [f"What is {a} + {b}?" for a in (1, 2, 3) for b in (4, 5, 6)]
    together = llm.chat(asked, GREEDY, thinking=False)
    assert len(together) == len(asked) > 2 * llm.engine.plan.limits.max_rows
    for text, request in zip(asked, together, strict=True):
        assert request.prompt is not None
        assert text in request.prompt
        assert request.prompt_token_ids == tuple(llm.tokenizer.encode_segments(llm.tokenizer.split(request.prompt)))
        (output,) = request.outputs
        alone = one(llm, text, thinking=False)
        assert (output.text, output.token_ids) == (alone.text, alone.token_ids)
        assert output.finish_reason == "stop"
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.is_healthy) == (0, 0, True)


def test_thinking_answer_and_ids_are_told_apart(llm: LLM) -> None:
    output = one(llm, [{"role": "user", "content": SUM}])
    assert output.text == "12 + 7 = 19."
    assert output.reasoning.endswith("10 + 9 = 19.")
    assert 0 < output.n_reasoning_tokens < len(output.token_ids)
    assert output.token_ids[-1] in llm.frontend.generation.stop_ids
    assert (output.finish.n_generated, output.finish.reason) == (len(output.token_ids), FinishReason.STOP_TOKEN)
    assert one(llm, SUM, thinking=False).reasoning == ""


def test_a_message_goes_back_into_the_conversation(llm: LLM) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": WEATHER}]
    call = one(llm, turns, tools=[KNOWN], thinking=False)
    assert call.finish_reason == "tool_calls"
    turns += [call.message, {"role": "tool", "content": "Sunny.", "tool_call_id": call.tool_calls[0].call_id}]
    prompt = llm.chat(turns, GenerationParams(max_tokens=1), tools=[KNOWN])[0].prompt
    assert prompt is not None
    assert "<function=get_weather>\n<parameter=city>\nParis\n" in prompt
    thought = one(llm, SUM)
    assert thought.message["reasoning_content"] == thought.reasoning


def test_texts_go_on_without_a_template_and_ids_are_taken_as_they_are(llm: LLM) -> None:
    rendered = llm.chat(SUM, GREEDY, thinking=False)[0]
    assert rendered.prompt is not None
    prompts: list[str | Sequence[int]] = [rendered.prompt, rendered.prompt_token_ids]
    as_text, as_ids = llm.generate(prompts, GREEDY)
    assert as_text.prompt_token_ids == as_ids.prompt_token_ids == rendered.prompt_token_ids
    assert as_ids.prompt is None
    for request in (as_text, as_ids):
        assert request.outputs[0].token_ids == rendered.outputs[0].token_ids
        assert request.outputs[0].text == "12 + 7 = 19."
    spellings: tuple[Any, ...] = (rendered.prompt_token_ids, np.array(rendered.prompt_token_ids))
    for ids in spellings:
        assert llm.generate(ids, GREEDY)[0].outputs[0].token_ids == rendered.outputs[0].token_ids


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params: list[GenerationParams | SamplingParams] = [
        GREEDY,
        GenerationParams(temperature=0, max_tokens=3),
        SamplingParams.greedy(),
    ]
    outputs = [request.outputs[0] for request in llm.chat([SUM] * 3, params)]
    assert outputs[0].token_ids == outputs[2].token_ids
    assert outputs[1].token_ids == outputs[0].token_ids[:3]
    assert outputs[1].finish_reason == "length"


def test_what_is_not_said_is_the_models_own(llm: LLM) -> None:
    defaults = {thinking: llm.default_sampling(thinking=thinking) for thinking in (True, False)}
    for params in (None, GenerationParams(), SamplingParams.greedy(), GenerationParams(top_k=3)):
        (request,) = llm.chat(SUM, params, thinking=False)
        assert request.outputs[0].token_ids
    assert GenerationParams(top_k=3).over(defaults[True]) == defaults[True].merged(top_k=3)
    assert GenerationParams(logit_bias={5: 2.0}).over(defaults[True]).logit_bias == ((5, 2.0),)


def test_without_a_limit_an_answer_goes_on_to_the_end_of_the_context(llm: LLM) -> None:
    (request,) = llm.generate("ab", GenerationParams(temperature=0, ignore_eos=True))
    (output,) = request.outputs
    assert len(request.prompt_token_ids) + len(output.token_ids) == 256
    assert (output.finish_reason, output.finish.reason) == ("length", FinishReason.CONTEXT_CAPACITY)


# ---- pieces --------------------------------------------------------------------------------------
def joined(pieces: list[StreamedOutput]) -> CompletionOutput:
    """The whole answer, which the pieces before say too."""
    assert [piece.output is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    output = pieces[-1].output
    assert output is not None
    assert "".join(piece.text for piece in pieces) == output.text
    assert "".join(piece.reasoning for piece in pieces) == output.reasoning
    assert tuple(token for piece in pieces for token in piece.token_ids) == output.token_ids
    return output


def test_pieces_join_to_the_whole(llm: LLM) -> None:
    params = [GenerationParams(n=2, seed=3, max_tokens=24, logprobs=1), GREEDY]
    pieces = defaultdict[tuple[int, int], list[StreamedOutput]](list)
    order = []
    for piece in llm.chat_stream([STORY, SUM], params):
        pieces[piece.request_index, piece.index].append(piece)
        order.append(piece.request_index)
    assert sorted(pieces) == [(0, 0), (0, 1), (1, 0)]
    assert order != sorted(order), "they grow together"
    whole = llm.chat([STORY, SUM], params)
    for (i, index), said in pieces.items():
        output, expected = joined(said), whole[i].outputs[index]
        assert (output.text, output.token_ids, output.index) == (expected.text, expected.token_ids, index)
        assert output.logprobs == expected.logprobs
        if output.logprobs is not None:
            assert output.logprobs == tuple(entry for piece in said for entry in piece.logprobs or ())


def test_a_stream_that_is_dropped_ends_its_answers(llm: LLM) -> None:
    stream = llm.chat_stream([SUM] * 6, GREEDY)
    next(stream)
    assert llm.stats().running > 0
    stream.close()
    stats = llm.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert one(llm, SUM).text == "12 + 7 = 19."


def test_streams_may_be_open_side_by_side(llm: LLM) -> None:
    first, second = llm.chat_stream(SUM, GREEDY), llm.generate_stream("ab", GenerationParams(temperature=0))
    heads = [next(first), next(second)]
    inside = one(llm, SUM, thinking=False)
    assert inside.text == "12 + 7 = 19."
    assert joined([heads[0], *first]).text == "12 + 7 = 19."
    assert joined([heads[1], *second]).token_ids == llm.generate("ab", GREEDY)[0].outputs[0].token_ids


def test_an_interrupt_ends_everything_and_the_engine_stays_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, n_steps = llm.engine.core.step, 0

    def interrupted() -> bool:
        nonlocal n_steps
        n_steps += 1
        if n_steps == 5:
            signal.raise_signal(signal.SIGINT)
        return step()

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.chat([SUM] * 6, GREEDY)
    assert signal.getsignal(signal.SIGINT) is before
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.is_healthy) == (0, 0, True)
    assert one(llm, SUM).text == "12 + 7 = 19."


# ---- n, seeds, log probabilities -----------------------------------------------------------------
DRAWN = GenerationParams(temperature=1.5, top_p=1.0, top_k=0, max_tokens=16, seed=11)


def drawn(**fields: Any) -> GenerationParams:
    values = {name: getattr(DRAWN, name) for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")}
    return GenerationParams(**{**values, **fields})


def test_e10_e12_answers_of_one_request_are_those_of_their_seeds_in_any_company(llm: LLM) -> None:
    (request,) = llm.chat(STORY, drawn(n=4), thinking=False)
    assert [output.index for output in request.outputs] == [0, 1, 2, 3]
    assert len({output.token_ids for output in request.outputs}) == 4
    seeds = choice_seeds(11, 4)
    assert [output.finish.seed for output in request.outputs] == seeds
    others = [drawn(seed=7, n=3), *(drawn(seed=seed) for seed in seeds)]
    among = llm.chat([SUM, STORY, STORY, STORY, STORY], others, thinking=False)
    for output, alone in zip(request.outputs, among[1:], strict=True):
        assert output.token_ids == alone.outputs[0].token_ids


def test_answers_to_one_prompt_compute_it_once(llm: LLM) -> None:
    text = "".join(f"{i} and " for i in range(40))
    (request,) = llm.generate(text, GenerationParams(n=3, max_tokens=2))
    reused = [output.finish.reuse.n_tokens for output in request.outputs]
    assert reused == [0, len(request.prompt_token_ids) - 1, len(request.prompt_token_ids) - 1]
    assert request.num_cached_tokens == 0


def test_e11_without_a_seed_answers_differ(llm: LLM) -> None:
    requests = llm.chat([STORY] * 3, drawn(seed=None, n=2), thinking=False)
    outputs = [output for request in requests for output in request.outputs]
    assert len({output.token_ids for output in outputs}) > 3
    assert len({output.finish.seed for output in outputs}) == 6
    again = one(llm, STORY, drawn(seed=outputs[0].finish.seed), thinking=False)
    assert again.token_ids == outputs[0].token_ids


@pytest.mark.parametrize("k", [0, 1, 3])
def test_e9_log_probabilities_are_those_of_the_raw_logits(k: int, llm: LLM) -> None:
    (request,) = llm.chat(STORY, drawn(logprobs=k, presence_penalty=1.0), thinking=False)
    (output,) = request.outputs
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    text = [*request.prompt_token_ids, *output.token_ids]
    logits = llm.engine.teacher_forced_logits(text)[len(request.prompt_token_ids) - 1 : -1]
    logits = logits[:, : llm.tokenizer.n_addressable]
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    for row, token_id, entry in zip(expected, output.token_ids, output.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        assert entry[token_id].decoded_token == llm.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        top = np.argsort(-row, kind="stable")[:k].tolist()
        assert set(entry) == {token_id, *top}
        for rank, other in enumerate(top, 1):
            assert entry[other].rank == rank
        for other, value in entry.items():
            assert value.logprob == pytest.approx(row[other], abs=1e-4)
        assert entry[token_id].rank == (top.index(token_id) + 1 if token_id in top else None)
    total = sum(entry[token_id].logprob for token_id, entry in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)


# ---- ends ----------------------------------------------------------------------------------------
def test_stop_texts_and_ids_end_an_answer_and_are_named(llm: LLM) -> None:
    by_text = one(llm, SUM, GenerationParams(temperature=0, stop="= 1"))
    assert (by_text.text, by_text.stop_reason, by_text.finish_reason) == ("12 + 7 ", "= 1", "stop")
    kept = one(llm, SUM, GenerationParams(temperature=0, stop=["xx", "= 1"], include_stop_str_in_output=True))
    assert kept.text == "12 + 7 = 1"
    thinking = one(llm, SUM, GenerationParams(temperature=0, reasoning_stop="Ones"))
    assert (thinking.text, thinking.stop_reason) == ("", "Ones")
    token_id = one(llm, SUM).token_ids[3]
    by_id = one(llm, SUM, GenerationParams(temperature=0, stop_token_ids=[token_id]))
    assert (by_id.token_ids[-1], by_id.stop_reason, by_id.finish_reason) == (token_id, token_id, "stop")
    assert one(llm, SUM).stop_reason is None


def test_an_answer_has_its_least_length(llm: LLM) -> None:
    plain = one(llm, SUM, thinking=False)
    longer = one(llm, SUM, GenerationParams(temperature=0, min_tokens=30, max_tokens=60), thinking=False)
    assert len(plain.token_ids) < 30 <= len(longer.token_ids)
    assert longer.token_ids[: len(plain.token_ids) - 1] == plain.token_ids[:-1]


def test_d23_thinking_that_fills_the_answer_is_all_there_is(llm: LLM) -> None:
    output = one(llm, SUM, GenerationParams(temperature=0, max_tokens=10))
    assert (output.text, output.finish_reason, output.n_reasoning_tokens) == ("", "length", 10)
    assert output.reasoning == llm.tokenizer.decode(list(output.token_ids))


def test_d23_a_thinking_budget_is_kept_and_the_answer_comes(llm: LLM) -> None:
    free = one(llm, SUM)
    params = GenerationParams(temperature=0, max_thinking=9, closing_phrase=" Enough.", logprobs=0)
    output = one(llm, SUM, params)
    assert output.reasoning == llm.tokenizer.decode(list(free.token_ids[:9])) + " Enough."
    assert output.text
    assert output.finish_reason == "stop"
    assert output.n_reasoning_tokens < free.n_reasoning_tokens
    assert output.logprobs is not None
    forced = [i for i, entry in enumerate(output.logprobs) if not entry]
    assert forced == list(range(9, 9 + len(forced)))
    assert llm.tokenizer.decode([output.token_ids[i] for i in forced]) == " Enough.\n</think>\n\n"


# ---- forms and tools -----------------------------------------------------------------------------
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}, "sure": {"type": "boolean"}},
    "required": ["sum", "sure"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_has_the_form_it_must_have(thinking: bool, llm: LLM) -> None:
    forms = (
        JsonSchema(SCHEMA),
        Regex("[a-c]{3}"),
        Choice(("yes", "no")),
        Lark('start: "<" NUMBER ">"\nNUMBER: /[0-9]{2}/'),
    )
    params = [GenerationParams(response_format=form, max_tokens=200, n=2, seed=4) for form in forms]
    whole = llm.chat([SUM] * len(forms), params, thinking=thinking)
    texts = [[output.text for output in request.outputs] for request in whole]
    assert all(output.finish_reason == "stop" for request in whole for output in request.outputs)
    assert all(bool(output.reasoning) is thinking for request in whole for output in request.outputs)
    for text in texts[0]:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert all(len(text) == 3 and set(text) <= set("abc") for text in texts[1])
    assert set(texts[2]) <= {"yes", "no"}
    assert all(text[0] == "<" and text[1:3].isdigit() and text[3:] == ">" for text in texts[3])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_calls_that_must_come_fit_their_schemas_whatever_is_asked(choice: Any, llm: LLM) -> None:
    params = GenerationParams(temperature=1.2, n=3, seed=9, max_tokens=220)
    tools = [NOW, GET_WEATHER]
    requests = llm.chat([SUM, WEATHER], params, tools=tools, tool_choice=choice)
    outputs = [output for request in requests for output in request.outputs]
    ended = [output for output in outputs if output.finish_reason != "length"]
    assert len(ended) > len(outputs) // 2
    for output in ended:
        assert output.finish_reason == "tool_calls"
        assert output.text == ""
        assert output.tool_calls
        for call in output.tool_calls:
            jsonschema.validate(json.loads(call.arguments), CITY if call.name == "get_weather" else {"type": "object"})
            assert call.name == "get_weather" or choice == "required"


def test_d16_tools_are_read_offered_left_out_or_cut(llm: LLM) -> None:
    free = one(llm, WEATHER, tools=[KNOWN], thinking=False)
    (call,) = free.tool_calls
    assert (call.name, json.loads(call.arguments), free.text) == ("get_weather", {"city": "Paris"}, "")
    none = llm.chat(WEATHER, GREEDY, tools=[KNOWN], tool_choice="none", thinking=False)[0]
    assert none.prompt is not None
    assert "get_weather" not in none.prompt
    assert none.outputs[0].tool_calls == ()
    cut = one(llm, WEATHER, GenerationParams(temperature=0, max_tokens=15), tools=[KNOWN], thinking=False)
    assert (cut.finish_reason, cut.tool_calls) == ("length", ())


def test_the_first_call_can_be_the_end(llm: LLM) -> None:
    params = GenerationParams(temperature=0, max_tokens=120, ignore_eos=True, stop_token_ids=[0])
    output = one(llm, WEATHER, params, tools=[KNOWN], parallel_tool_calls=False, thinking=False)
    assert len(output.tool_calls) == 1
    assert output.finish_reason == "tool_calls"
    assert len(output.token_ids) < 120


# ---- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "fields, words",
    [
        ({"n": 0}, "n is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"max_thinking": 0}, "max_thinking is 0"),
        ({"logprobs": 21}, "from 0 to 20"),
        ({"temperature": 2.1}, "temperature is 2.1"),
        ({"seed": -1}, "seed is -1"),
        ({"logit_bias": {3: 101.0}}, r"logit_bias\[3\]"),
    ],
)
def test_parameters_that_cannot_be_are_refused_when_they_are_made(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        GenerationParams(**fields)


def test_what_cannot_run_is_refused_before_anything_runs(llm: LLM) -> None:
    n_before = llm.stats().prompt_tokens
    refused: list[tuple[Any, Any, dict[str, Any], str]] = [
        ([SUM, ""], GREEDY, {}, "is empty"),
        ([], GREEDY, {}, "at least one message"),
        ([SUM, [{"role": "user", "content": "x" * 9000}]], GREEDY, {}, "the context holds 256"),
        ([SUM, SUM], [GREEDY], {}, "1 sampling_params were given for 2 prompts"),
        (SUM, GenerationParams(stop=""), {}, "stop"),
        (SUM, GenerationParams(stop_token_ids=[99999]), {}, "99999 does not exist"),
        (SUM, GenerationParams(logit_bias={99999: 1.0}), {}, "99999 does not exist"),
        (SUM, GenerationParams(response_format=Regex("a(")), {}, "unclosed group"),
        (SUM, GenerationParams(response_format=Regex("a"), min_tokens=3), {}, "exclude each other"),
        (SUM, GenerationParams(response_format=Regex("a"), ignore_eos=True), {}, "needs a stop id"),
        (SUM, GenerationParams(min_tokens=9, max_tokens=8), {}, "least length is 9"),
        (SUM, GREEDY, {"tool_choice": "required"}, "there are no tools"),
        ([["Hi"]], GREEDY, {}, r"messages\[0\] is a string"),
        (SUM, GREEDY, {"tools": ["now"]}, r"tools\[0\] is a string"),
        (SUM, GREEDY, {"tool_choice": "sometimes"}, "tool_choice is 'sometimes'"),
        (SUM, GREEDY, {"tools": [NOW], "tool_choice": {"type": "function", "name": "then"}}, "'then'"),
        (SUM, GenerationParams(response_format=Regex("a")), {"tools": [NOW], "tool_choice": "required"}, "excludes"),
    ]
    for messages, params, options, words in refused:
        with pytest.raises(RequestError, match=words):
            llm.chat(messages, params, **options)
    with pytest.raises(UsageError, match="reasoning effort"):
        llm.chat(SUM, GREEDY, reasoning_effort="enormous")
    with pytest.raises(RequestError, match="raw output"):
        llm.generate(SUM, GenerationParams(max_thinking=3))
    assert llm.generate([]) == []
    wrong: tuple[Any, ...] = ("", [[]], ["a", ""], [["a"]], [1.5], [None])
    for prompts in wrong:
        with pytest.raises(RequestError, match="prompt"):
            llm.generate(prompts)
    assert llm.stats().prompt_tokens == n_before


def test_settings_are_the_engines_and_a_closed_model_says_so(artifact_of: ArtifactOf) -> None:
    path = artifact_of("dense", "bf16")
    with pytest.raises(UsageError, match="'max_contxt' is no setting"):
        LLM(path, max_contxt=5)
    with pytest.raises(UsageError, match="config and dtype were given"):
        LLM(path, config=EngineConfig(), dtype="float32")
    with LLM(path, config=EngineConfig(max_context=64)) as llm:
        assert llm.engine.config == EngineConfig(max_context=64)
        assert llm.stats().max_rows == 1
    with pytest.raises(EngineStoppedError):
        llm.chat(SUM)
    llm.close()


def test_defaults_fit_the_model(artifact_of: ArtifactOf) -> None:
    with LLM(artifact_of("dense", "bf16")) as llm:
        config = llm.engine.config
        assert (config.dtype, config.device) == ("bfloat16", "cpu")
        assert (config.max_concurrency, config.prefix_reuse) == (8, True)
        assert config.max_context == min(8192, llm.engine.model.spec.max_position or 8192)
    with LLM(artifact_of("dense", "bf16"), prefix_reuse=False, max_context=64) as llm:
        assert (llm.engine.config.snapshots, llm.stats().snapshots_total) == (0, 0)


def test_a_template_file_stands_in(artifact_of: ArtifactOf, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
    with LLM(artifact_of("dense", "bf16"), chat_template=template, max_context=64, max_concurrency=1) as llm:
        (request,) = llm.chat("Hi", GenerationParams(max_tokens=1))
        assert request.prompt == "<|im_start|>Hi"


def test_importing_the_names_loads_no_backend() -> None:
    program = "import sys; from ninfer_runtime import LLM, GenerationParams; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
