"""Answers of a prescribed form: what a request's fields and tools ask for, as grammars of the engine."""

from typing import TYPE_CHECKING

from ninfer_runtime.engine.sequence import Grammar
from ninfer_runtime.serve.errors import ApiError
from ninfer_runtime.serve.question import Question
from ninfer_runtime.text.frontend import Prompt
from ninfer_runtime.text.tool_calls import tools_from

if TYPE_CHECKING:
    from ninfer_runtime.serve.service import Service
    from ninfer_runtime.text.grammar import GrammarSpec

_CONSTRAINED = ("required", "named")


def grammars_of(
    service: "Service", question: Question, prompt: Prompt, stop_ids: frozenset[int]
) -> list[Grammar | None]:
    """One grammar per answer, None for free answers. RequestError for a form that cannot be followed. Blocks."""
    spec = spec_of(question)
    if spec is None:
        return [None] * question.n
    from ninfer_runtime.text.grammar import grammar_for

    tokenizer, inside = service.frontend.tokenizer, prompt.starts_inside
    return [grammar_for(spec, tokenizer, stop_ids, starts_inside=inside) for _ in range(question.n)]


def spec_of(question: Question) -> "GrammarSpec | None":
    """The form the answer must have: an asked-for format, calls that must come, or calls of strict functions."""
    from ninfer_runtime.text.grammar import ToolCalls

    definitions = question.conversation.tools if question.conversation is not None else ()
    choice = question.tool_choice
    if choice.mode == "none" or not definitions:
        return question.grammar
    if question.grammar is not None:
        if choice.mode in _CONSTRAINED:
            raise ApiError(
                "a prescribed answer format and a required tool call exclude each other", param="tool_choice"
            )
        return question.grammar
    is_required = choice.mode in _CONSTRAINED
    functions = [definition.get("function", definition) for definition in definitions]
    if not is_required and not any(function.get("strict") is True for function in functions):
        return None
    tools = tools_from(definitions)
    return ToolCalls(tools, choice.name, required=is_required, parallel=not question.one_call)
