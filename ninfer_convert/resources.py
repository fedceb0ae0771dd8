"""The frontend files of a checkpoint: read whole, checked for what the runtime needs, stored byte for byte."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_convert.problems import Problem
from ninfer_convert.safetensors_header import LFS_POINTER

PREFIX = "frontend/"
TEXT_FILES: Mapping[str, str] = {
    "tokenizer.json": "text in and out",
    "tokenizer_config.json": "special tokens and the draft head",
    "chat_template.jinja": "chat prompts",
    "generation_config.json": "the stop token ids",
}
VISION_FILES: Mapping[str, str] = {
    "preprocessor_config.json": "image input",
    "video_preprocessor_config.json": "video input",
}
"""File name → what needs it, in stored order (text files first)."""

_MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Frontend:
    """Payloads and SHA-256 by object name, and what the tokenizer files say about token ids."""

    payloads: Mapping[str, bytes]
    digests: Mapping[str, str]
    n_ids: int
    """Addressable token ids: the largest id plus one; 0 when the tokenizer files could not be read."""
    forced: tuple[int, ...]
    """Ids of special tokens, which the draft head must have: ascending, below ``n_ids``."""


def read_frontend(folder: Path, *, vision: bool, problems: list[Problem], notes: list[str]) -> Frontend:
    """Read and check the frontend files; every fault becomes a problem that names the file and what needs it."""
    payloads: dict[str, bytes] = {}
    documents: dict[str, Any] = {}
    for file, needed_for in {**TEXT_FILES, **(VISION_FILES if vision else {})}.items():
        payload = _read(folder, file, needed_for, problems)
        if payload is None:
            continue
        document = _decode(file, payload, problems)
        if document is not None:
            payloads[PREFIX + file] = payload
            documents[file] = document
    tokenizer, config = documents.get("tokenizer.json"), documents.get("tokenizer_config.json")
    readable = tokenizer is not None and config is not None
    n_ids, forced = token_ids(tokenizer, config, problems) if readable else (0, ())
    if n_ids and (generation := documents.get("generation_config.json")) is not None:
        _check_stop_ids(generation, n_ids, problems)
    _compare_templates(documents.get("chat_template.jinja"), config, notes)
    digests = {name: hashlib.sha256(payload).hexdigest() for name, payload in payloads.items()}
    return Frontend(payloads, digests, n_ids, forced)


def _read(folder: Path, file: str, needed_for: str, problems: list[Problem]) -> bytes | None:
    path = folder / file
    try:
        if path.stat().st_size > _MAX_BYTES:
            message = f"the file has {path.stat().st_size} bytes, at most {_MAX_BYTES} are allowed"
            problems.append(Problem("bad-frontend", message, file, "download it again"))
            return None
        payload = path.read_bytes()
    except FileNotFoundError:
        problems.append(_missing(folder, file, needed_for))
        return None
    except OSError as error:
        problems.append(Problem("unreadable-file", f"cannot be read: {error.strerror}", file, "check its permissions"))
        return None
    if not payload:
        message = f"the file is empty; it is needed for {needed_for}"
        problems.append(Problem("empty-file", message, file, "download it again"))
        return None
    if payload.startswith(LFS_POINTER):
        message = "this is a Git LFS pointer, not the file itself"
        problems.append(Problem("lfs-pointer", message, file, "fetch it with `git lfs pull`"))
        return None
    return payload


def _missing(folder: Path, file: str, needed_for: str) -> Problem:
    advice = "download it from the model's repository"
    if file in VISION_FILES:
        advice += ", or pass --no-vision to convert without image and video input"
    elif file == "chat_template.jinja" and _template_in_config(folder):
        advice = "save the chat_template member of tokenizer_config.json under this name"
    return Problem("missing-frontend", f"the file is missing; it is needed for {needed_for}", file, advice)


def _template_in_config(folder: Path) -> bool:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and isinstance(config.get("chat_template"), str)


def _decode(file: str, payload: bytes, problems: list[Problem]) -> Any:
    """The JSON object (or the template's text); None and a problem if it is neither."""
    try:
        text = payload.decode("utf-8")
        if file.endswith(".jinja"):
            return text
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "UTF-8 text" if isinstance(error, UnicodeDecodeError) else "JSON"
        problems.append(Problem("bad-frontend", f"the file is not valid {kind}: {error}", file, "download it again"))
        return None
    if not isinstance(document, dict):
        problems.append(Problem("bad-frontend", "the file does not hold a JSON object", file, "download it again"))
        return None
    return document


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def token_ids(tokenizer: Any, config: Any, problems: list[Problem]) -> tuple[int, tuple[int, ...]]:
    """Number of addressable ids and the forced ones; (0, ()) and a problem if the files have another structure."""
    again = "use the tokenizer files of the original checkpoint"
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    added = tokenizer.get("added_tokens", [])
    if not isinstance(vocab, dict) or not isinstance(added, list):
        message = "model.vocab is not an object of token → id, or added_tokens is not a list"
        problems.append(Problem("bad-frontend", message, "tokenizer.json", again))
        return 0, ()
    decoder = config.get("added_tokens_decoder", {})
    if not isinstance(decoder, dict) or not all(isinstance(entry, dict) for entry in decoder.values()):
        message = "added_tokens_decoder is not an object of id → token"
        problems.append(Problem("bad-frontend", message, "tokenizer_config.json", again))
        return 0, ()
    ids = [*vocab.values(), *(entry.get("id") if isinstance(entry, dict) else None for entry in added)]
    known = {int(key): entry for key, entry in decoder.items() if key.isdecimal() and len(key) < 10}
    if len(known) != len(decoder) or not all(map(_is_id, ids)) or not (ids or known):
        message = "there are no token ids, or one is not a number from 0 to 2^31 - 1"
        problems.append(Problem("bad-frontend", message, "tokenizer.json, tokenizer_config.json", again))
        return 0, ()
    n_ids = 1 + max([*ids, *known])
    return n_ids, tuple(sorted(i for i, entry in known.items() if entry.get("special") is True))


def _check_stop_ids(generation: Any, n_ids: int, problems: list[Problem]) -> None:
    stops = generation.get("eos_token_id")
    listed = stops if isinstance(stops, list) else [stops]
    if not listed or not all(_is_id(i) and i < n_ids for i in listed):
        message = f"eos_token_id is {stops!r:.80}, expected a token id or a nonempty list of ids below {n_ids}"
        advice = "use the generation_config.json of the original checkpoint"
        problems.append(Problem("bad-frontend", message, "generation_config.json", advice))


def _compare_templates(template: Any, config: Any, notes: list[str]) -> None:
    repeated = config.get("chat_template") if config is not None else None
    if template is not None and isinstance(repeated, str) and repeated != template:
        notes.append(
            "chat_template.jinja differs from the chat_template member of tokenizer_config.json; the file will be used"
        )
