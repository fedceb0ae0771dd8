"""Answers of a prescribed form: what may be asked for, and the grammar that the engine follows then.

llguidance compiles the forms and computes the masks; it is imported when the first grammar is made.
"""

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ninfer_format.errors import RequestError
from ninfer_runtime.text.grammar_matcher import Automaton, GrammarVocabulary, MatchedText
from ninfer_runtime.text.grammar_thinking import AfterThinking
from ninfer_runtime.text.grammar_tools import tool_call_lark
from ninfer_runtime.text.tokenizer import Tokenizer
from ninfer_runtime.text.tool_calls import Tool

if TYPE_CHECKING:
    from ninfer_runtime.engine.sequence import Grammar

MAX_KEPT = 64
JSON_WHITESPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,64}"
"""Between two JSON tokens: at most this, so that an answer cannot be padded without end."""


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """One JSON document that the schema describes; a keyword that cannot be enforced is refused."""

    schema: Mapping[str, Any] | bool


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object."""


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that the whole pattern matches, in the syntax of Rust's ``regex`` without look-around."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of these texts."""

    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lark:
    """A context-free grammar in llguidance's Lark dialect, from the rule ``start``."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """Calls of the offered functions.

    tools     functions on offer
    name      exactly one call of this function; None: of any
    required  nothing but calls; False: text, and calls that are well formed once they begin
    parallel  more than one call may follow
    """

    tools: tuple[Tool, ...]
    name: str | None = None
    required: bool = True
    parallel: bool = True


GrammarSpec = JsonSchema | JsonObject | Regex | Choice | Lark | ToolCalls


def grammar_for(
    spec: GrammarSpec, tokenizer: Tokenizer, stop_ids: frozenset[int], *, starts_inside: bool = False
) -> "Grammar":
    """A grammar for one sequence.

    stop_ids       allowed exactly where the text may end; at least one
    starts_inside  the prompt ends within an open thinking block: the grammar begins behind it

    Blocks while the form is compiled (kept for the next request that asks for the same). RequestError, with the
    compiler's words, for a form that is wrong, too large, or allows no text at all; MissingExtraError without
    llguidance.
    """
    if not stop_ids:
        raise RequestError("a prescribed form needs a stop id that ends it; leave out ignore_eos")
    with _LOCK:
        vocabulary = _VOCABULARIES.get(tokenizer)
        if vocabulary is None:
            vocabulary = _VOCABULARIES[tokenizer] = _Vocabulary(GrammarVocabulary(tokenizer))
    text = MatchedText(vocabulary.automaton(_source(spec, vocabulary.inner)), vocabulary.inner, stop_ids)
    return AfterThinking(text, vocabulary.inner, stop_ids) if starts_inside else text


class _Vocabulary:
    """What was compiled for one tokenizer, the latest used last."""

    def __init__(self, inner: GrammarVocabulary) -> None:
        self.inner = inner
        self._kept: OrderedDict[str, Automaton] = OrderedDict()
        self._lock = threading.Lock()

    def automaton(self, source: str) -> Automaton:
        with self._lock:
            if (found := self._kept.get(source)) is not None:
                self._kept.move_to_end(source)
                return found
        made = self.inner.compile(source)
        with self._lock:
            self._kept[source] = made
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return made


_LOCK = threading.Lock()
_VOCABULARIES: "weakref.WeakKeyDictionary[Tokenizer, _Vocabulary]" = weakref.WeakKeyDictionary()


def _source(spec: GrammarSpec, vocabulary: GrammarVocabulary) -> str:
    """What llguidance compiles."""
    match spec:
        case JsonSchema(schema):
            return vocabulary.json_source(_schema_text(schema), JSON_WHITESPACE)
        case JsonObject():
            return vocabulary.json_source('{"type": "object"}', JSON_WHITESPACE)
        case Regex(pattern):
            return vocabulary.regex_source(pattern)
        case Choice(choices):
            if not choices:
                raise RequestError("the list of choices is empty, expected at least one text")
            texts = (json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
            return vocabulary.lark_source("start: " + " | ".join(texts))
        case Lark(text):
            return vocabulary.lark_source(text)
        case ToolCalls(tools, name, required, parallel):
            return vocabulary.lark_source(
                tool_call_lark(tools, vocabulary.tag, JSON_WHITESPACE, name=name, required=required, parallel=parallel)
            )


def _schema_text(schema: Mapping[str, Any] | bool) -> str:
    if schema is False:
        raise RequestError("the JSON schema false describes no document")
    try:
        return json.dumps({} if schema is True else schema, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise RequestError("the JSON schema is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise RequestError(f"the JSON schema is no JSON document: {error}") from None
