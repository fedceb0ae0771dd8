"""``/tokenize``, ``/detokenize`` and ``/apply-template``: the text side alone, no generation."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ninfer_runtime.serve.errors import ApiError
from ninfer_runtime.serve.fields import CHAT, Field, Values, offered
from ninfer_runtime.serve.kinds import Boolean, Free, String, shown
from ninfer_runtime.serve.openai_chat import question_of
from ninfer_runtime.serve.question import render

if TYPE_CHECKING:
    from ninfer_runtime.serve.service import Service

MAX_IDS = 1 << 22

_PROMPT_NAMES = (
    "model", "messages", "tools", "tool_choice", "reasoning_effort", "enable_thinking", "preserve_thinking",
    "chat_template_kwargs",
)  # fmt: skip
_CHAT_ROWS = {row.name: row for row in CHAT}
_MODEL = offered("model", String(1), "Checked if given.")
TEMPLATE_ROWS: tuple[Field, ...] = (_MODEL, *(_CHAT_ROWS[name] for name in _PROMPT_NAMES if name != "model"))
TOKENIZE_ROWS: tuple[Field, ...] = (
    _MODEL,
    offered("content", String(), "A text (llama.cpp's name for it)."),
    offered("prompt", String(), "A text (vLLM's name for it)."),
    offered("parse_special", Boolean(), "Texts of control tokens become those tokens.  [true]"),
    offered("with_pieces", Boolean(), "Each token with its text."),
)
DETOKENIZE_ROWS: tuple[Field, ...] = (
    _MODEL,
    offered("tokens", Free({"type": "array", "items": {"type": "integer"}}), "Token ids.", required=True),
)


def tokenize(service: "Service", values: Values) -> dict[str, Any]:
    """Token ids of a text."""
    _check_model(service, values)
    texts = [values[name] for name in ("content", "prompt") if name in values]
    if len(texts) != 1:
        raise ApiError(f"{len(texts)} texts were given, expected one of content and prompt", param="content")
    tokenizer, text = service.frontend.tokenizer, texts[0]
    trusted = values.get("parse_special", True)
    ids = tokenizer.encode_segments(tokenizer.split(text)) if trusted else tokenizer.encode_text(text)
    document: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": service.facts.max_context}
    if values.get("with_pieces"):
        pieces = (tokenizer.token_bytes(token_id) for token_id in ids)
        document["pieces"] = [
            {"id": token_id, "piece": piece.decode("utf-8", "replace"), "bytes": list(piece)}
            for token_id, piece in zip(ids, pieces, strict=True)
        ]
    return document


def detokenize(service: "Service", values: Values) -> dict[str, Any]:
    """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
    _check_model(service, values)
    ids, n = values["tokens"], service.facts.vocab_rows
    if not isinstance(ids, list) or len(ids) > MAX_IDS:
        raise ApiError(f"tokens is {shown(ids)}, expected an array of at most {MAX_IDS} token ids", param="tokens")
    for i, token_id in enumerate(ids):
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < n:
            raise ApiError(f"tokens[{i}] is {shown(token_id)}, expected an id from 0 to {n - 1}", param=f"tokens[{i}]")
    text = service.frontend.tokenizer.decode(ids)
    return {"content": text, "prompt": text}


def apply_template(service: "Service", values: Values) -> dict[str, Any]:
    """The prompt a conversation becomes, as text and as token ids."""
    question = question_of(service, {"model": service.facts.model_id, **values})
    (prompt,) = render(service, question)
    return {
        "prompt": prompt.text,
        "tokens": list(prompt.token_ids),
        "count": len(prompt.token_ids),
        "thinking": prompt.thinking,
        "starts_inside_thinking": prompt.starts_inside,
        "max_model_len": service.facts.max_context,
    }


def _check_model(service: "Service", values: Values) -> None:
    if "model" in values:
        service.check_model(values["model"])


Answer = Callable[["Service", Values], dict[str, Any]]
ROUTES: Mapping[str, tuple[tuple[Field, ...], Answer]] = {
    "/tokenize": (TOKENIZE_ROWS, tokenize),
    "/detokenize": (DETOKENIZE_ROWS, detokenize),
    "/apply-template": (TEMPLATE_ROWS, apply_template),
}
