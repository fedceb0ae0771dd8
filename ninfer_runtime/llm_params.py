"""What a caller of ``LLM`` asks of answers, in the words of vLLM's sampling parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ninfer_format.errors import MemberError, RequestError
from ninfer_runtime.config import SamplingParams
from ninfer_runtime.engine.asking import ToolChoice, Wanted
from ninfer_runtime.engine.sequence import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from ninfer_runtime.text.grammar import Choice, JsonObject, JsonSchema, Lark, Regex

    ResponseFormat = JsonSchema | JsonObject | Regex | Choice | Lark

_DRAWING = frozenset(field.name for field in fields(SamplingParams)) - {"logit_bias"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """What is asked of the answers to one prompt (``specs/python-api.md``). RequestError for values that cannot be.

    n                   answers
    max_tokens          most tokens of an answer, thinking included; None: as many as the context holds
    min_tokens          tokens before it may end
    temperature … seed, logit_bias   as in ``SamplingParams``; None: the model's own value for the mode of the prompt
    stop                texts that end the answer;  ``reasoning_stop``: that end it in the thinking
    stop_token_ids      ids that end it, beside the model's own
    include_stop_str_in_output   keep the text that ended it
    ignore_eos          run on past the model's own ids
    logprobs            None: none; 0: of the tokens themselves; k: also of the k most likely ones, at most 20
    max_thinking        thinking tokens before the block is closed; None: no limit
    closing_phrase      said before the closing tag then
    response_format     what the answer must look like; None: whatever it wants
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    stop: str | Sequence[str] = ()
    reasoning_stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    max_thinking: int | None = None
    closing_phrase: str = ""
    response_format: "ResponseFormat | None" = None

    def __post_init__(self) -> None:
        _check_count("n", self.n, 1)
        _check_count("max_tokens", self.max_tokens, 1)
        _check_count("min_tokens", self.min_tokens, 0)
        _check_count("max_thinking", self.max_thinking, 1)
        _check_count("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        self.over(SamplingParams())

    def over(self, default: SamplingParams) -> SamplingParams:
        """``default`` with what is set here."""
        given: dict[str, Any] = {name: getattr(self, name) for name in _DRAWING}
        if self.logit_bias is not None:
            given["logit_bias"] = tuple(self.logit_bias.items())
        return default.merged(**given)


Params = GenerationParams | SamplingParams
"""Plain ``SamplingParams`` say all about drawing and leave the rest as it is by default."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What ``LLM.chat`` is told beside messages and parameters."""

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    thinking: bool
    reasoning_effort: str | None
    preserve_thinking: bool | None


def wanted_of(
    params: Params | None,
    default: SamplingParams,
    max_context: int,
    *,
    tool_choice: ToolChoice | None = None,
    one_call: bool = False,
    raw: bool = False,
) -> Wanted:
    """In the engine's words. ``default`` are the model's own values for the mode of the prompt."""
    sampling = default
    if isinstance(params, SamplingParams):
        sampling, params = params, None
    if params is None:
        params = GenerationParams()
    return Wanted(
        sampling=params.over(sampling),
        max_new=max_context if params.max_tokens is None else params.max_tokens,
        min_new=params.min_tokens,
        n=params.n,
        stops=_texts(params.stop),
        reasoning_stops=_texts(params.reasoning_stop),
        include_stop=params.include_stop_str_in_output,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        n_top_logprobs=params.logprobs,
        form=params.response_format,
        tool_choice=tool_choice or ToolChoice(),
        one_call=one_call,
        max_thinking=params.max_thinking,
        closing_phrase=params.closing_phrase,
        raw=raw,
    )


def each_of(params: Params | Sequence[Params] | None, n_prompts: int) -> list[Params | None]:
    """One per prompt: the same for all, or a list of as many."""
    if params is None or isinstance(params, GenerationParams | SamplingParams):
        return [params] * n_prompts
    if len(params) != n_prompts:
        raise RequestError(f"{len(params)} sampling_params were given for {n_prompts} prompts, expected one for each")
    return list(params)


def tool_choice_of(choice: str | Mapping[str, Any], tools: Sequence[Any]) -> ToolChoice:
    """``none``, ``auto``, ``required``, or one function as OpenAI names it; MemberError for anything else."""
    match choice:
        case "none" | "auto" | "required":
            return ToolChoice(choice)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
            if name not in [function.get("name") for function in functions if isinstance(function, Mapping)]:
                raise MemberError("tool_choice", f"names {name!r}, which is not among the tools")
            return ToolChoice("named", name)
    raise MemberError(
        "tool_choice",
        f"is {choice!r}, expected 'none', 'auto', 'required' or {{'type': 'function', 'function': {{'name': …}}}}",
    )


def _texts(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _check_count(name: str, value: int | None, low: int, high: int | None = None) -> None:
    if value is None:
        return
    is_whole = type(value) is int
    if not is_whole or value < low or (high is not None and value > high):
        span = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} is {value!r}, expected a whole number {span}")
