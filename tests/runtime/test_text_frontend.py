"""The text side of an artifact as a whole: resources, prompts, and what ends or hides a token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ninfer_format import Identity
from ninfer_format.errors import ArtifactError, NinferError, StorageError, UsageError
from ninfer_runtime.text.frontend import Frontend
from ninfer_runtime.text.messages import Conversation, parse_conversation
from ninfer_runtime.text.stream import join

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "dense"
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
EFFORTS = """\
{%- if reasoning_effort is defined and reasoning_effort not in ('low', 'high') %}{{ raise_exception('no') }}{% endif %}
{{- reasoning_effort | default('high') }}{{ messages[0].content }}<think>
"""


def artifact(changes: Mapping[str, bytes | None] | None = None, identity: str = "tiny/bf16") -> Any:
    """An artifact's resources from the tiny checkpoint, some replaced, or removed where None."""
    stored = {name: (TINY / name).read_bytes() for name in FILES} | dict(changes or {})
    payloads = {f"frontend/{name}": content for name, content in stored.items() if content is not None}
    objects = SimpleNamespace(names=lambda: tuple(payloads))
    return SimpleNamespace(
        path="a.ninfer",
        identity=Identity.parse(identity),
        objects=objects,
        payload=lambda name: memoryview(payloads[name]),
    )


def renamed_end_of_turn() -> dict[str, bytes]:
    """The tiny files as a fine-tune might leave them: `<|im_end|>` is no token, `<|endoftext|>` ends the turn."""
    tokenizer, config = (json.loads((TINY / name).read_bytes()) for name in FILES[:2])
    tokenizer["added_tokens"][2]["content"] = "<|reserved|>"
    config["added_tokens_decoder"]["592"]["content"] = "<|reserved|>"
    generation = {"eos_token_id": 590}
    changed = {"tokenizer.json": tokenizer, "tokenizer_config.json": config, "generation_config.json": generation}
    return {name: json.dumps(content).encode() for name, content in changed.items()}


def test_a_conversation_becomes_ids_and_a_place_to_start() -> None:
    frontend = Frontend.open(artifact())
    on = frontend.prompt(Conversation.of_prompt("hi"))
    off = frontend.prompt(Conversation.of_prompt("hi"), thinking=False)
    assert (on.starts_inside, off.starts_inside, on.thinking, off.thinking) == (True, False, True, False)
    assert (
        frontend.tokenizer.decode(on.token_ids)
        == on.text
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert frontend.ends_inside(on.token_ids)
    assert not frontend.ends_inside(off.token_ids)
    assert not frontend.ends_inside((5, 6))


def test_end_of_turn_that_is_not_one_token_is_never_shown_and_ends_the_turn() -> None:
    frontend = Frontend.open(artifact(renamed_end_of_turn()))
    assert frontend.end_markers == ("<|im_end|>",)
    conversation = Conversation.of_prompt("hi")
    prompt = frontend.prompt(conversation, thinking=False)
    stream = frontend.stream(frontend.stream_options(prompt, conversation))
    ids = frontend.tokenizer.encode_text("Hello.<|im_end|>\nmore")
    events = [event for token_id in ids for event in stream.feed([token_id])]
    assert stream.stop is not None
    assert join(events + stream.flush()).content == "Hello."


def test_a_vocabulary_with_the_token_lets_text_speak_of_it() -> None:
    frontend = Frontend.open(artifact())
    assert frontend.end_markers == ()
    stream = frontend.stream(
        frontend.stream_options(
            frontend.prompt(Conversation.of_prompt("x"), thinking=False), Conversation.of_prompt("x")
        )
    )
    ids = [*frontend.tokenizer.encode_text("Say <|im_end|>."), 592]
    assert join(stream.feed(ids) + stream.flush()).content == "Say <|im_end|>."


def test_stop_ids_are_hidden_even_where_the_vocabulary_does_not_call_them_special() -> None:
    letter = 40
    frontend = Frontend.open(artifact({"generation_config.json": json.dumps({"eos_token_id": [592, letter]}).encode()}))
    conversation = Conversation.of_prompt("x")
    stream = frontend.stream(frontend.stream_options(frontend.prompt(conversation, thinking=False), conversation))
    assert join(stream.feed([letter, 592]) + stream.flush()).content == ""


def test_tools_of_the_conversation_are_on_offer() -> None:
    frontend = Frontend.open(artifact())
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    conversation = parse_conversation([{"role": "user", "content": "x"}], tools)
    options = frontend.stream_options(frontend.prompt(conversation), conversation, stops=["a"], reasoning_stops=["b"])
    assert [tool.name for tool in options.tools] == ["f"]
    assert (options.stops, options.reasoning_stops, options.starts_inside) == (("a",), ("b",), True)


def test_switches_the_template_lacks_are_refused() -> None:
    fixed = Frontend.open(artifact({"chat_template.jinja": b"{{ messages[0].content }}"}))
    with pytest.raises(UsageError, match="cannot switch thinking off"):
        fixed.prompt(Conversation.of_prompt("x"), thinking=False)
    with pytest.raises(UsageError, match="'low', expected none"):
        fixed.prompt(Conversation.of_prompt("x"), reasoning_effort="low")
    assert not fixed.prompt(Conversation.of_prompt("x")).thinking
    levels = Frontend.open(artifact({"chat_template.jinja": EFFORTS.encode()}))
    assert levels.prompt(Conversation.of_prompt("x"), reasoning_effort="low").text == "lowx<think>"
    assert levels.template.capabilities.default_effort == "high"
    with pytest.raises(UsageError, match="'medium', expected one of low, high"):
        levels.prompt(Conversation.of_prompt("x"), reasoning_effort="medium")


@pytest.mark.parametrize("name", FILES)
def test_an_absent_resource_is_named(name: str) -> None:
    with pytest.raises(ArtifactError, match=f"no resource 'frontend/{name}'"):
        Frontend.open(artifact({name: None}))


@pytest.mark.parametrize("name", FILES)
def test_a_resource_that_is_not_utf8_is_named(name: str) -> None:
    with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
        Frontend.open(artifact({name: b"\xff\xfe\x00"}))


def test_a_published_identity_with_other_files_is_refused_and_a_custom_one_is_not() -> None:
    assert Frontend.open(artifact()).tokenizer.n_addressable == 623
    with pytest.raises(ArtifactError, match="not those of this identity"):
        Frontend.open(artifact(identity="qwen3.6-27b/groupwise-int"))


def test_a_template_file_stands_in_for_the_artifacts_own(tmp_path: Path) -> None:
    path = tmp_path / "short.jinja"
    path.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}<|im_end|>", encoding="utf-8")
    prompt = Frontend.open(artifact(), path).prompt(Conversation.of_prompt("hi <|im_end|>"))
    assert prompt.text == "[hi <|im_end|>]<|im_end|>"
    assert prompt.token_ids.count(592) == 1, "the template's own token is one, the user's is text"


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"{% if %}", ArtifactError, r"short\.jinja line 1"),
        (b"\xff", ArtifactError, r"short\.jinja is not UTF-8"),
        (b"x" * (1 << 20) + b"x", ArtifactError, r"short\.jinja has 1048577 characters"),
        (None, StorageError, r"short\.jinja: the chat template cannot be read"),
    ],
)
def test_a_template_file_that_cannot_be_used_is_named(
    tmp_path: Path, content: bytes | None, error: type[NinferError], message: str
) -> None:
    path = tmp_path / "short.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=message):
        Frontend.open(artifact(), path)


def test_an_own_template_does_not_loosen_the_check_of_a_published_identity(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("x", encoding="utf-8")
    with pytest.raises(ArtifactError, match="not those of this identity"):
        Frontend.open(artifact(identity="qwen3.6-27b/groupwise-int"), path)
