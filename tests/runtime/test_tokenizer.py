"""Text to ids and back: equal to the library on ordinary text, and never a control token from user text."""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_format.errors import ArtifactError
from ninfer_format.published import TOKENIZER_IDS
from ninfer_runtime.text.frontend_checks import check_preprocessor, check_published
from ninfer_runtime.text.tokenizer import Segment, Tokenizer, byte_alphabet

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "dense"


@cache
def tiny() -> Tokenizer:
    return Tokenizer.from_files((TINY / "tokenizer.json").read_bytes(), (TINY / "tokenizer_config.json").read_bytes())


@cache
def library() -> Any:
    """The same vocabulary in transformers, as an independent reading of the two files."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


def files(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> tuple[bytes, bytes]:
    """The tiny tokenizer's two files after a change to their JSON."""
    tokenizer = json.loads((TINY / "tokenizer.json").read_bytes())
    config = json.loads((TINY / "tokenizer_config.json").read_bytes())
    change(tokenizer, config)
    return json.dumps(tokenizer).encode(), json.dumps(config).encode()


def test_all_added_tokens_are_known_also_those_of_the_config_only() -> None:
    assert tiny().n_addressable == 623
    assert tiny().added["<|audio_pad|>"].token_id == 622
    assert len(tiny().added) == 33


def is_ordinary(text: str) -> bool:
    return not any(literal in text for literal in tiny().added)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60).filter(is_ordinary))
def test_ordinary_text_is_encoded_as_the_library_does(text: str) -> None:
    assert tiny().encode_text(text) == library()(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(("<|im_start|>", "<think>", "</think>", "user\n", "a <b>", "é", "<|im", "<<think>>"))))
def test_trusted_text_is_encoded_as_the_library_does(pieces: list[str]) -> None:
    text = "".join(pieces)
    ids = tiny().encode_segments(tiny().split(text))
    assert ids == library()(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40), st.sampled_from(["<|im_start|>", "<|image_pad|>", "<think>", "<|audio_pad|>"]))
def test_text_of_users_never_becomes_an_added_token(text: str, literal: str) -> None:
    ids = tiny().encode_text(text + literal + text)
    assert max(ids) < 590
    assert tiny().decode(ids) == unicodedata.normalize("NFC", text + literal + text)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40), st.integers(0, 40))
def test_neighbouring_ordinary_segments_are_encoded_as_one_text(text: str, at: int) -> None:
    parts = [Segment(text[:at]), Segment(text[at:])]
    assert tiny().encode_segments(parts) == tiny().encode_text(text)


def test_lone_surrogates_become_replacement_characters() -> None:
    assert tiny().decode(tiny().encode_text("a\ud800b")) == "a\ufffdb"


def test_every_byte_has_one_letter() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet[ord("Ġ")] == ord(" ")


def test_tokens_stand_for_bytes_that_may_split_a_character() -> None:
    ids = tiny().encode_text("🙂")
    assert b"".join(map(tiny().token_bytes, ids)) == "🙂".encode()
    assert tiny().decode(ids[:1]) == "\ufffd"


def test_padding_rows_stand_for_nothing() -> None:
    assert tiny().token_bytes(639) == b""
    assert not tiny().is_control(639)


def test_control_tokens_are_the_special_ones() -> None:
    shown = {text for text, token in tiny().added.items() if not tiny().is_control(token.token_id)}
    assert {"<think>", "</think>", "<tool_call>", "</tool_call>"} <= shown
    assert not {"<|im_end|>", "<|endoftext|>", "<|im_start|>", "<|image_pad|>"} & shown
    assert not tiny().is_control(5)


# Each lie beside the intact files, which test_all_added_tokens… reads.
def hole(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    config["added_tokens_decoder"]["700"] = {**config["added_tokens_decoder"]["622"], "content": "<far>"}


def disagree(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    config["added_tokens_decoder"]["592"]["content"] = "<|other|>"


def same_text_twice(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    config["added_tokens_decoder"]["623"] = config["added_tokens_decoder"]["622"]


def strips(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    tokenizer["added_tokens"][0]["lstrip"] = True
    config["added_tokens_decoder"]["590"]["lstrip"] = True


def no_content(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    del config["added_tokens_decoder"]["622"]["content"]


def bad_key(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    config["added_tokens_decoder"]["x"] = config["added_tokens_decoder"].pop("622")


def words(tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["▁word"] = vocabulary.pop(next(reversed(vocabulary)))
    tokenizer["model"]["merges"] = []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (hole, "none with id 623"),
        (disagree, "added token 592"),
        (same_text_twice, "has two ids, 622 and 623"),
        (strips, "lstrip"),
        (no_content, r"\['622'\] has no content"),
        (bad_key, "no token id"),
        (words, "byte-level BPE never writes"),
    ],
)
def test_files_that_contradict_themselves_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        Tokenizer.from_files(*files(change))


@pytest.mark.parametrize("document", [b"", b"{}", b"null", b"\xff", b'{"model": {}}'])
def test_a_file_that_is_no_tokenizer_is_refused(document: bytes) -> None:
    with pytest.raises(ArtifactError, match="tokenizer"):
        Tokenizer.from_files(document, b"{}")


@pytest.mark.parametrize("document", [b"", b"[]", b'{"a": 1, "a": 2}', b'{"a": NaN}', b"[" * 100_000, b"\xff"])
def test_a_broken_tokenizer_config_is_refused(document: bytes) -> None:
    with pytest.raises(ArtifactError, match="tokenizer_config"):
        Tokenizer.from_files((TINY / "tokenizer.json").read_bytes(), document)


# ---- published identities ------------------------------------------------------------------------
BASE_IDS = 248_044
TEMPLATE = "{{ messages }}"


@cache
def published_files() -> tuple[bytes, bytes]:
    """Made-up files with the published ids: meaningless words, the real added tokens."""
    letters = sorted(map(chr, byte_alphabet()))
    words = itertools.chain(letters, ("".join(pair) for n in (2, 3) for pair in itertools.product(letters, repeat=n)))
    vocabulary = {word: i for i, word in enumerate(itertools.islice(words, BASE_IDS))}
    tiny_tokenizer, config = (json.loads(part) for part in files(lambda tokenizer, config: None))
    shift = BASE_IDS - 590
    for token in tiny_tokenizer["added_tokens"]:
        token["id"] += shift
    tiny_tokenizer["model"] |= {"vocab": vocabulary, "merges": []}
    config["added_tokens_decoder"] = {
        str(int(key) + shift): token for key, token in config["added_tokens_decoder"].items()
    }
    config["chat_template"] = TEMPLATE
    return json.dumps(tiny_tokenizer).encode(), json.dumps(config).encode()


def test_published_vocabulary_passes_and_each_difference_is_named() -> None:
    tokenizer_json, config_json = published_files()
    tokenizer = Tokenizer.from_files(tokenizer_json, config_json)
    assert tokenizer.n_addressable == TOKENIZER_IDS
    check_published(tokenizer, config_json, TEMPLATE)
    config = json.loads(config_json)
    lies = {"add_bos_token": True, "add_prefix_space": None, "pad_token": "<|im_end|>", "chat_template": "other"}
    for key, value in lies.items():
        with pytest.raises(ArtifactError, match=key):
            check_published(tokenizer, json.dumps(config | {key: value}).encode(), TEMPLATE)
    with pytest.raises(ArtifactError, match=r"623 ids, expected 248077.*<\|vision_start\|> has id 599"):
        check_published(tiny(), config_json, TEMPLATE)


PREPROCESSOR = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def test_published_preprocessing_is_checked_member_by_member() -> None:
    good = {**PREPROCESSOR, "rescale_factor": 1 / 255, "fps": 2, "max_frames": 768}
    check_preprocessor(json.dumps(PREPROCESSOR).encode(), "preprocessor_config.json")
    check_preprocessor(json.dumps(good).encode(), "video_preprocessor_config.json")
    for key in good:
        with pytest.raises(ArtifactError, match=key):
            check_preprocessor(json.dumps({**good, key: 7}).encode(), "preprocessor_config.json")
