"""What the OpenAI chat and completions APIs say alike: finish reasons, usage, log probabilities, answer formats."""

import secrets
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ninfer_runtime.engine.sequence import FinishReason
from ninfer_runtime.serve.answering import Answers, Ending, Usage
from ninfer_runtime.serve.errors import ApiError
from ninfer_runtime.serve.fields import Values
from ninfer_runtime.serve.kinds import shown
from ninfer_runtime.serve.reader import Drawn
from ninfer_runtime.text.json_input import parse_json
from ninfer_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ninfer_runtime.serve.service import Service
    from ninfer_runtime.text.grammar import GrammarSpec

FINISH: Mapping[FinishReason, str] = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.OUTPUT_LIMIT: "length",
    FinishReason.CONTEXT_CAPACITY: "length",
    FinishReason.CANCELLED: "stop",
}


def new_id(prefix: str) -> str:
    """``prefix`` and 24 random hex digits."""
    return f"{prefix}{secrets.token_hex(12)}"


def fingerprint(service: "Service") -> str:
    """What answers with the same seed depend on beside the request."""
    return f"fp_{service.facts.weights_id}_{service.facts.backend}"


def finish_reason(ending: Ending) -> str:
    """``stop``, ``length`` or ``tool_calls``."""
    reason = FINISH[ending.reason]
    return "tool_calls" if ending.has_calls and reason == "stop" else reason


def stop_text(ending: Ending) -> str | None:
    """The stop string that ended the answer."""
    return ending.stop.stop if ending.stop is not None else None


def usage_document(usage: Usage) -> dict[str, Any]:
    """The ``usage`` member. ``prompt_tokens_details`` also says why no more of the prompt was cached."""
    details: dict[str, Any] = {"cached_tokens": usage.n_cached}
    if usage.reuse is not None:
        details["miss_reason"] = usage.reuse.reason.value
        details["first_difference"] = usage.reuse.first_difference
    return {
        "prompt_tokens": usage.n_prompt,
        "completion_tokens": usage.n_generated,
        "total_tokens": usage.n_total,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": usage.n_reasoning},
    }


def usage_of(answers: Answers) -> dict[str, Any]:
    """The ``usage`` member as of now."""
    return usage_document(answers.usage)


def logprob_entries(
    tokenizer: Tokenizer, drawn: Iterable[Drawn], *, with_thinking: bool = False
) -> list[dict[str, Any]]:
    """Entries of ``logprobs.content``: the answer's tokens, thinking and forced ones left out."""
    return [
        {
            **_token(tokenizer, item.token.token_id, item.token.logprob),
            "top_logprobs": [_token(tokenizer, token_id, value) for token_id, value in item.token.top_logprobs],
        }
        for item in drawn
        if item.token.logprob is not None and (with_thinking or not item.is_thinking)
    ]


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    piece = tokenizer.token_bytes(token_id)
    return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}


# ---- what the answer must look like -------------------------------------------------------------
def grammar_of(values: Values) -> "GrammarSpec | None":
    """The form that ``response_format``, ``structured_outputs`` or a ``guided_*`` field asks for, None: free."""
    asked = [spec for spec in (_response_format(values), _structured(values), *_guided(values)) if spec is not None]
    if len(asked) > 1:
        raise ApiError("response_format, structured_outputs and guided_* exclude each other; give one")
    return asked[0] if asked else None


def format_of(value: Any, place: str) -> "GrammarSpec | None":
    """A ``response_format``: type text, json_object or json_schema (nested, or flat as the Responses API has it)."""
    from ninfer_runtime.text.grammar import JsonObject, JsonSchema

    if not isinstance(value, dict):
        raise ApiError(f"{place} is {shown(value)}, expected an object", param=place)
    match value.get("type"):
        case "text":
            _only(value, {"type"}, place)
            return None
        case "json_object":
            _only(value, {"type"}, place)
            return JsonObject()
        case "json_schema":
            inner, where = value, place
            if "json_schema" in value:
                _only(value, {"type", "json_schema"}, place)
                inner, where = value["json_schema"], f"{place}.json_schema"
            if not isinstance(inner, dict):
                raise ApiError(f"{where} is {shown(inner)}, expected an object", param=where)
            _only(inner, {"type", "name", "description", "schema", "strict"}, where)
            if "schema" not in inner:
                raise ApiError(f"{where}.schema is missing", code="missing_parameter", param=f"{where}.schema")
            return JsonSchema(schema_of(inner["schema"], f"{where}.schema"))
    raise ApiError(
        f"{place}.type is {shown(value.get('type'))}, expected 'text', 'json_object' or 'json_schema'",
        code="response_format_not_supported",
        param=f"{place}.type",
    )


def schema_of(value: Any, place: str) -> Any:
    """A JSON schema given as such, or as its text."""
    schema = parse_json(value, place, ApiError) if isinstance(value, str) else value
    if not isinstance(schema, dict | bool):
        raise ApiError(f"{place} is {shown(schema)}, expected a JSON schema", param=place)
    return schema


def _only(members: Mapping[str, Any], allowed: set[str], place: str) -> None:
    if unknown := sorted(members.keys() - allowed):
        path = f"{place}.{unknown[0]}"
        raise ApiError(f"the parameter {path!r} is unknown", code="unknown_parameter", param=path)


def _response_format(values: Values) -> "GrammarSpec | None":
    return format_of(values["response_format"], "response_format") if "response_format" in values else None


def _structured(values: Values) -> "GrammarSpec | None":
    members: Values | None = values.get("structured_outputs")
    if members is None:
        return None
    given = {name: value for name, value in members.items() if not (name == "json_object" and value is False)}
    if len(given) != 1:
        raise ApiError(f"structured_outputs has {len(given)} members, expected one", param="structured_outputs")
    ((name, value),) = given.items()
    return _form(name, value, f"structured_outputs.{name}")


def _guided(values: Values) -> Iterable["GrammarSpec | None"]:
    for name in ("json", "regex", "choice", "grammar"):
        if f"guided_{name}" in values:
            yield _form(name, values[f"guided_{name}"], f"guided_{name}")


def _form(name: str, value: Any, place: str) -> "GrammarSpec":
    from ninfer_runtime.text import grammar

    match name:
        case "json":
            return grammar.JsonSchema(schema_of(value, place))
        case "json_object":
            return grammar.JsonObject()
        case "regex":
            return grammar.Regex(value)
        case "choice":
            if not value:
                raise ApiError(f"{place} is empty, expected at least one text", param=place)
            return grammar.Choice(value)
    return grammar.Lark(value)
