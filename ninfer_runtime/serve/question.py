"""A request of any API in one form, and its preparation: prompt, sampling, engine requests, refusals."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ninfer_runtime.config import SamplingParams
from ninfer_runtime.engine.asking import ToolChoice, Wanted, text_prompt
from ninfer_runtime.serve.errors import ApiError, context_length_exceeded
from ninfer_runtime.serve.fields import Api, Values
from ninfer_runtime.serve.kinds import Number, wrong
from ninfer_runtime.text.frontend import Prompt
from ninfer_runtime.text.messages import Conversation

if TYPE_CHECKING:
    from ninfer_runtime.serve.service import Service
    from ninfer_runtime.text.grammar import GrammarSpec


@dataclass(frozen=True, slots=True)
class Question:
    """What a client asked, free of its API's spelling.

    api               for metrics and the log
    conversation      what to answer; None for a text completion
    texts             prompts of a text completion, each a text or token ids
    prompt_param      the field an over-long prompt is blamed on; ``effort_param``: a level the template lacks
    thinking          None: the server's default
    sampling          SamplingParams fields the request sets
    max_new           None: the server's default;  ``min_new``: no end token before so many
    stops             of the answer;  ``include_stop`` keeps the one that hit
    n                 answers per prompt
    n_top_logprobs    as in ``Request``
    one_call          end after the first complete tool call
    grammar           what the answer must look like
    log_fields        what the request log shows of the request: ``user``, ``metadata`` …
    """

    api: Api
    conversation: Conversation | None = None
    texts: tuple[str | tuple[int, ...], ...] = ()
    prompt_param: str = "messages"
    thinking: bool | None = None
    reasoning_effort: str | None = None
    effort_param: str = "reasoning_effort"
    preserve_thinking: bool | None = None
    thinking_budget: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_new: int | None = None
    min_new: int = 0
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    n_top_logprobs: int | None = None
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    one_call: bool = False
    grammar: "GrammarSpec | None" = None
    cache_salt: str = ""
    stream: bool = False
    log_fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A question that can run: one prompt per text, and the sampling parameters in force (seed as asked)."""

    question: Question
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    max_new: int
    seconds: float

    @property
    def n_prompt(self) -> int:
        """Tokens of all prompts together."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


def render(service: "Service", question: Question) -> tuple[Prompt, ...]:
    """The prompts of a question; ApiError or RequestError where the template cannot do what is asked. Blocks."""
    if question.conversation is None:
        return tuple(text_prompt(service.frontend, text) for text in question.texts)
    conversation, capabilities = question.conversation, service.frontend.template.capabilities
    thinking = question.thinking
    if thinking is None:
        thinking = service.settings.thinking or not capabilities.thinking_switch
    if not thinking and not capabilities.thinking_switch:
        raise ApiError("this model's chat template cannot switch thinking off", code="thinking_not_switchable")
    effort = question.reasoning_effort
    if effort is not None and effort not in capabilities.effort_levels:
        levels = ", ".join(capabilities.effort_levels) or "none: its chat template has no levels"
        raise ApiError(
            f"the reasoning effort {effort!r} is not supported; this model knows {levels}",
            code="reasoning_effort_not_supported",
            param=question.effort_param,
        )
    if question.tool_choice.mode == "none":
        conversation = replace(conversation, tools=())
    preserve = question.preserve_thinking
    prompt = service.frontend.prompt(
        conversation,
        thinking=thinking,
        reasoning_effort=effort if thinking else None,
        preserve_thinking=service.settings.preserve_thinking or None if preserve is None else preserve,
    )
    return (prompt,)


def prepare(service: "Service", question: Question) -> Prepared:
    """Everything that can be refused before an engine sees the request is refused here. Blocks: call it in a thread."""
    started = time.perf_counter()
    prompts = render(service, question)
    facts = service.facts
    for prompt in prompts:
        if not prompt.token_ids:
            raise ApiError("the prompt is empty, expected at least one token", param=question.prompt_param)
        if len(prompt.token_ids) >= facts.max_context:
            raise context_length_exceeded(len(prompt.token_ids), facts.max_context, question.prompt_param)
    defaults = facts.sampling[prompts[0].thinking]
    sampling = defaults if facts.is_greedy_forced else defaults.merged(**question.sampling)
    max_new = question.max_new or service.settings.default_max_tokens
    return Prepared(question, prompts, sampling, max_new, time.perf_counter() - started)


def wanted_of(service: "Service", prepared: Prepared) -> Wanted:
    """What the engine is asked of each prompt."""
    question = prepared.question
    budget = question.thinking_budget or service.settings.max_thinking
    return Wanted(
        sampling=prepared.sampling,
        max_new=prepared.max_new,
        min_new=question.min_new,
        n=question.n,
        stops=question.stops,
        include_stop=question.include_stop,
        stop_token_ids=question.stop_token_ids,
        ignore_eos=question.ignore_eos,
        n_top_logprobs=question.n_top_logprobs,
        form=question.grammar,
        tool_choice=question.tool_choice,
        one_call=question.one_call,
        max_thinking=budget if prepared.prompts[0].thinking else None,
        raw=question.conversation is None,
        tolerant_tool_calls=service.settings.tolerant_tool_calls,
        cache_salt=question.cache_salt,
    )


# ---- reading fields that several APIs spell alike -----------------------------------------------
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed")
LOG_FIELDS = ("user", "metadata", "safety_identifier", "prompt_cache_key")


def sampling_of(values: Values) -> dict[str, Any]:
    """SamplingParams fields among a request's values, ``logit_bias`` in the form the engine takes."""
    given = {name: values[name] for name in SAMPLING_FIELDS if name in values}
    if "logit_bias" in values:
        given["logit_bias"] = _logit_bias(values["logit_bias"])
    return given


def log_fields_of(values: Values) -> dict[str, Any]:
    """Fields that do nothing but stand in the request log."""
    return {name: values[name] for name in LOG_FIELDS if name in values}


@dataclass(frozen=True, slots=True)
class ThinkingAsked:
    """What a request says about thinking."""

    thinking: bool | None = None
    reasoning_effort: str | None = None
    preserve_thinking: bool | None = None


def thinking_of(values: Values, effort: str | None) -> ThinkingAsked:
    """``enable_thinking``, ``preserve_thinking``, plain or in ``chat_template_kwargs``, and an effort; all must agree.

    The effort "none" is thinking switched off.
    """
    inner = values.get("chat_template_kwargs", {})
    effort = _agreed("reasoning_effort", effort, inner.get("reasoning_effort"))
    thinking = _agreed("enable_thinking", values.get("enable_thinking"), inner.get("enable_thinking"))
    preserve = _agreed("preserve_thinking", values.get("preserve_thinking"), inner.get("preserve_thinking"))
    if effort is not None:
        thinking = _agreed("enable_thinking", thinking, effort != "none", "the reasoning effort")
    return ThinkingAsked(thinking, None if effort == "none" else effort, preserve)


def _agreed(name: str, first: Any, second: Any, where: str = "chat_template_kwargs") -> Any:
    if first is not None and second is not None and first != second:
        raise ApiError(f"{name} and {where} contradict each other", code="conflicting_template_option", param=name)
    return second if first is None else first


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    kind = Number(-100, 100)
    if not isinstance(value, dict):
        raise wrong("logit_bias", value, "an object of token ids and numbers")
    for key in value:
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise ApiError(f"logit_bias names {key[:40]!r}, expected token ids", param="logit_bias")
    return tuple((int(key), kind.read(bias, f"logit_bias.{key}")) for key, bias in value.items())
