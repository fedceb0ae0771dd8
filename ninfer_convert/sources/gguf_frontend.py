"""Frontend files beside a GGUF file: whether they belong to the model that the file holds.

A GGUF file has tokens, merges and a template, but no ``tokenizer.json`` byte for byte, and no stop ids of a
``generation_config.json``: what an artifact stores has to come from the original model's folder.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ninfer_convert.problems import Problem
from ninfer_convert.sources.gguf import GgufSource

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_ADVICE = "give the folder of the model that the GGUF file was made of"


def compare_frontend(source: GgufSource, folder: Path, problems: list[Problem], notes: list[str]) -> None:
    """Compare the tokens of ``source`` with the tokenizer in ``folder``, and the templates.

    Another token under an id is a problem, another template a note; files that cannot be read are reported elsewhere.
    """
    tokenizer, config = _document(folder / TOKENIZER), _document(folder / CONFIG)
    if source.tokens is None:
        notes.append("the GGUF file holds no tokens to compare tokenizer.json with")
    elif difference := _difference(source.tokens, _vocabulary(tokenizer)):
        problems.append(Problem("frontend-differs", f"{difference}; another model's tokenizer", TOKENIZER, _ADVICE))
    elif difference := _difference(source.tokens, _added(tokenizer, config)):
        notes.append(f"added tokens are spelled otherwise in the GGUF file: {difference}")
    try:
        template = (folder / TEMPLATE).read_text("utf-8")
    except (OSError, ValueError):
        return
    if source.template is not None and source.template.strip() != template.strip():
        notes.append(f"the GGUF file holds another chat template than {TEMPLATE}, which is stored")


def _difference(tokens: Sequence[str], expected: Iterator[tuple[int, str]]) -> str | None:
    for number, token in expected:
        if not 0 <= number < len(tokens):
            return f"id {number} is {token!r:.40}, the GGUF file has {len(tokens)} tokens"
        if tokens[number] != token:
            return f"id {number} is {token!r:.40}, in the GGUF file it is {tokens[number]!r:.40}"
    return None


def _document(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _vocabulary(tokenizer: dict[str, Any]) -> Iterator[tuple[int, str]]:
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    for token, number in vocabulary.items() if isinstance(vocabulary, dict) else ():
        if type(number) is int:
            yield number, token


def _added(tokenizer: dict[str, Any], config: dict[str, Any]) -> Iterator[tuple[int, str]]:
    listed = tokenizer.get("added_tokens")
    dicts = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    entries = [(entry.get("id"), entry.get("content")) for entry in dicts]
    decoder = config.get("added_tokens_decoder")
    for number, entry in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and number.isdecimal():
            entries.append((int(number), entry.get("content")))
    for number, token in entries:
        if type(number) is int and isinstance(token, str):
            yield number, token
