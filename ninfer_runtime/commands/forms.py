"""The form that options prescribe for an answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ninfer_format.errors import UsageError
from ninfer_runtime.commands.parsing import STDIN, read_bytes, read_text
from ninfer_runtime.text.json_input import parse_json

if TYPE_CHECKING:
    from ninfer_runtime.text.grammar import GrammarSpec


def read_form(
    json_schema: str | None,
    regex: str | None,
    choices: Sequence[str] | None,
    grammar: str | None,
    *,
    stdin_is_free: bool = True,
) -> "GrammarSpec | None":
    """At most one of them: files with a JSON schema and with a Lark grammar, a pattern, texts.

    UsageError for two of them, for a file that holds none, and for ``-`` where standard input has its use already.
    """
    from ninfer_runtime.text.grammar import Choice, Lark, Regex

    forms: Mapping[str, tuple[Any, Callable[[Any], GrammarSpec]]] = {
        "--json-schema": (json_schema, _schema),
        "--regex": (regex, Regex),
        "--choice": (choices or None, lambda texts: Choice(tuple(texts))),
        "--grammar": (grammar, lambda source: Lark(read_text(source))),
    }
    given = [name for name, (value, _) in forms.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{given[0]} and {given[1]} exclude each other; an answer has one form")
    if not given:
        return None
    value, form = forms[given[0]]
    if STDIN in (json_schema, grammar) and not stdin_is_free:
        raise UsageError(f"{given[0]} is -, but standard input has the conversation; expected a file")
    return form(value)


def _schema(source: str) -> "GrammarSpec":
    from ninfer_runtime.text.grammar import JsonSchema

    schema = parse_json(read_bytes(source), source, UsageError)
    if not isinstance(schema, dict | bool):
        raise UsageError(f"{source} holds no JSON schema; expected an object")
    return JsonSchema(schema)
