"""How many ids the stored tokenizer can produce; matrix rows from there on are padding and never sampled."""

import json
from typing import Any

from ninfer_format.errors import ArtifactError
from ninfer_format.reader import Artifact

TOKENIZER = "frontend/tokenizer.json"
TOKENIZER_CONFIG = "frontend/tokenizer_config.json"


def addressable_ids(artifact: Artifact, vocab_rows: int) -> int:
    """One more than the highest id of ``tokenizer.json`` and of ``added_tokens_decoder``; ArtifactError otherwise.

    The last added tokens of the official checkpoints stand only in ``tokenizer_config.json``.
    """
    tokenizer, config = _json(artifact, TOKENIZER), _json(artifact, TOKENIZER_CONFIG)
    try:
        ids = [int(i) for i in tokenizer["model"]["vocab"].values()]
        ids += [int(token["id"]) for token in tokenizer.get("added_tokens") or ()]
        ids += [int(i) for i in config.get("added_tokens_decoder") or ()]
        n_ids = max(ids) + 1
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(
            f"{artifact.path}: {TOKENIZER} has no readable vocabulary ({type(error).__name__}: {error}); "
            "expected model.vocab, added_tokens and added_tokens_decoder with integer ids"
        ) from None
    if not 0 < n_ids <= vocab_rows:
        raise ArtifactError(f"{artifact.path}: the tokenizer has ids up to {n_ids - 1}, the head has {vocab_rows} rows")
    return n_ids


def _json(artifact: Artifact, name: str) -> dict[str, Any]:
    if name not in artifact.objects.names():
        raise ArtifactError(f"{artifact.path}: no resource {name!r}; convert the checkpoint again with its tokenizer")
    try:
        value = json.loads(bytes(artifact.payload(name)))
    except ValueError as error:
        raise ArtifactError(f"{artifact.path}: {name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{artifact.path}: {name} holds {type(value).__name__}, expected an object")
    return value
