"""From a prompt and what is wanted of its answers to requests of the engine, each with its reader.

The command line, the Python API and the server ask this way; they differ in where their wishes come from.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ninfer_format.errors import MemberError, RequestError
from ninfer_format.published import PUBLISHED
from ninfer_runtime.cache.prefix import MIN_SAVED
from ninfer_runtime.config import Architecture, SamplingParams
from ninfer_runtime.engine.reading import AnswerReader, choice_seeds, reader_for
from ninfer_runtime.engine.sequence import Anchors, Grammar, Request
from ninfer_runtime.text.frontend import Frontend, Prompt
from ninfer_runtime.text.messages import Conversation
from ninfer_runtime.text.tool_calls import new_call_id, tools_from

if TYPE_CHECKING:
    from ninfer_format.directory import Identity
    from ninfer_runtime.text.generation_config import GenerationDefaults
    from ninfer_runtime.text.grammar import GrammarSpec

ToolMode = Literal["none", "auto", "required", "named"]
_MUST_CALL = ("required", "named")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the model may do with the tools: nothing, anything, call at least one, call the one named."""

    mode: ToolMode = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of the answers to one prompt.

    sampling          in force; its seed as asked for, None: every answer draws its own
    max_new           most tokens of an answer;  ``min_new``: before it may end
    n                 answers
    stops             end the answer;  ``reasoning_stops``: the thinking;  ``include_stop`` keeps the one that hit
    stop_token_ids    end it beside the model's own ids, which ``ignore_eos`` leaves out
    n_top_logprobs    as in ``Request``
    form              what the answer must look like, None: whatever it wants
    tool_choice       which calls may or must be made;  ``one_call``: end after the first
    read_calls        calls are told apart from the text; False: they are text as the model wrote them
    max_thinking      thinking tokens before the block is closed, with ``closing_phrase`` before the tag
    raw               control tokens and tags are shown, and nothing is told apart
    cache_salt        requests with different ones share no prefix
    """

    sampling: SamplingParams
    max_new: int
    min_new: int = 0
    n: int = 1
    stops: Sequence[str] = ()
    reasoning_stops: Sequence[str] = ()
    include_stop: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n_top_logprobs: int | None = None
    form: "GrammarSpec | None" = None
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    one_call: bool = False
    read_calls: bool = True
    max_thinking: int | None = None
    closing_phrase: str = ""
    raw: bool = False
    tolerant_tool_calls: bool = False
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and who reads it; they belong to one answer."""

    request: Request
    reader: AnswerReader


def answers_to(
    frontend: Frontend,
    prompt: Prompt,
    conversation: Conversation,
    wanted: Wanted,
    *,
    call_id: Callable[[], str] = new_call_id,
) -> list[Asked]:
    """One request per answer. RequestError for what can never run; blocks while a form is compiled."""
    n_ids = frontend.tokenizer.n_addressable
    for token_id in (*wanted.stop_token_ids, *(token_id for token_id, _ in wanted.sampling.logit_bias)):
        if not 0 <= token_id < n_ids:
            raise RequestError(f"token id {token_id} does not exist, expected 0 to {n_ids - 1}")
    if wanted.n < 1:
        raise RequestError(f"n is {wanted.n}, expected at least 1 answer")
    stop_ids = frozenset(wanted.stop_token_ids)
    if not wanted.ignore_eos:
        stop_ids |= frontend.generation.stop_ids
    if wanted.tool_choice.mode == "none":
        conversation = replace(conversation, tools=())
    form = form_of(conversation.tools, wanted)
    if not wanted.read_calls:
        conversation = replace(conversation, tools=())
    seed, anchors = wanted.sampling.seed, _anchors(prompt, wanted)
    asked = []
    for own in [None] * wanted.n if seed is None else choice_seeds(seed, wanted.n):
        reader = reader_for(
            frontend,
            prompt,
            conversation,
            stops=wanted.stops,
            reasoning_stops=wanted.reasoning_stops,
            include_stop=wanted.include_stop,
            raw=wanted.raw,
            tolerant_tool_calls=wanted.tolerant_tool_calls,
            one_call=wanted.one_call,
            max_thinking=wanted.max_thinking,
            closing_phrase=wanted.closing_phrase,
            call_id=call_id,
        )
        request = Request(
            prompt.token_ids,
            replace(wanted.sampling, seed=own),
            wanted.max_new,
            stop_ids,
            n_top_logprobs=wanted.n_top_logprobs,
            reader=reader,
            grammar=_grammar(frontend, form, wanted, stop_ids, starts_inside=prompt.starts_inside),
            anchors=anchors,
        )
        asked.append(Asked(request, reader))
    return asked


def form_of(definitions: Sequence[Mapping[str, Any]], wanted: Wanted) -> "GrammarSpec | None":
    """The form that an answer must have: the one asked for, calls that must come, or calls of strict functions.

    ``definitions`` are the tools on offer. MemberError for a form and a required call at once.
    """
    from ninfer_runtime.text.grammar import ToolCalls

    choice = wanted.tool_choice
    must_call = choice.mode in _MUST_CALL
    if must_call and not definitions:
        raise MemberError("tool_choice", f"is {choice.mode!r}, but there are no tools")
    if wanted.form is not None:
        if must_call:
            raise MemberError("tool_choice", "asks for a call, which excludes a prescribed form of the answer")
        return wanted.form
    functions = [definition.get("function", definition) for definition in definitions]
    if not must_call and not any(function.get("strict") is True for function in functions):
        return None
    return ToolCalls(tools_from(definitions), choice.name, required=must_call, parallel=not wanted.one_call)


def text_prompt(frontend: Frontend, text: str | Sequence[int]) -> Prompt:
    """A prompt without a template: token ids as they are, or a text, in which control tokens count."""
    if not isinstance(text, str):
        return Prompt("", tuple(text), False, False)
    tokenizer = frontend.tokenizer
    return Prompt(text, tuple(tokenizer.encode_segments(tokenizer.split(text))), False, False)


def default_sampling(
    identity: "Identity", generation: "GenerationDefaults", architecture: Architecture, *, thinking: bool
) -> SamplingParams:
    """What applies to a prompt rendered in that mode unless a request says otherwise.

    A published model has its authors' preset per mode. A custom one follows its ``generation_config.json`` if that says
    anything, otherwise the preset of its architecture.
    """
    if identity in PUBLISHED or not generation.sampling:
        return SamplingParams.defaults(architecture, thinking=thinking)
    return SamplingParams().merged(**generation.sampling)


def _grammar(
    frontend: Frontend, form: "GrammarSpec | None", wanted: Wanted, stop_ids: frozenset[int], *, starts_inside: bool
) -> Grammar | None:
    n_ids = frontend.tokenizer.n_addressable
    if not 0 <= wanted.min_new <= wanted.max_new:
        raise RequestError(f"the least length is {wanted.min_new} tokens, expected 0 to {wanted.max_new}")
    if form is None:
        if not wanted.min_new or not stop_ids:
            return None
        from ninfer_runtime.text.grammar_thinking import AtLeast

        return AtLeast(wanted.min_new, n_ids, stop_ids)
    if wanted.min_new:
        raise RequestError("a prescribed form and a least length exclude each other")
    from ninfer_runtime.text.grammar import grammar_for

    return grammar_for(form, frontend.tokenizer, stop_ids, starts_inside=starts_inside)


def _anchors(prompt: Prompt, wanted: Wanted) -> Anchors:
    """The prompt's own, and its end where more than one answer begins there."""
    anchors, end = prompt.anchors, len(prompt.token_ids) - 1
    if wanted.n > 1 and end - max(anchors.at, default=0) >= MIN_SAVED:
        anchors = replace(anchors, at=(*anchors.at, end))
    if wanted.cache_salt:
        anchors = replace(anchors, key=anchors.key + b"\0" + wanted.cache_salt.encode("utf-8", "surrogatepass"))
    return anchors
