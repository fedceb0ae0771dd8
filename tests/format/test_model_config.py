"""The config resource: geometry from config sections, strict reading, canonical writing, hostile documents."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from ninfer_format.directory import Identity
from ninfer_format.errors import InventoryError
from ninfer_format.model_config import MAX_CONFIG_BYTES, ModelConfig, config_of, published_config
from ninfer_format.model_geometry import draft_head_rows, geometry_from_config, inspect_config
from ninfer_format.published import PUBLISHED
from tests.format.geometries import tiny_config, tiny_sections

GENEROUS_SECONDS = 5.0


@pytest.mark.parametrize(
    ("addressable", "rows"),
    [
        (248_077, 131_072),
        (131_072, 131_072),
        (131_071, 65_536),
        (131_073, 131_072),
        (65_537, 32_896),
        (623, 384),
        (512, 256),
        (257, 256),
        (129, 128),
        (128, 128),
        (100, 100),
        (1, 1),
    ],
)
def test_draft_head_rows_rule(addressable: int, rows: int) -> None:
    assert draft_head_rows(addressable) == rows


def test_draft_head_of_no_ids_is_refused() -> None:
    with pytest.raises(InventoryError, match="0 ids"):
        draft_head_rows(0)


def test_tiny_dense_geometry() -> None:
    geometry = tiny_config("dense").geometry
    assert geometry.architecture == "qwen3_5"
    assert geometry.text.layer_kinds == ("gdn", "gdn", "gdn", "attention")
    assert (geometry.text.hidden, geometry.text.vocab_rows, geometry.text.mlp_width) == (128, 640, 256)
    assert (geometry.text.n_experts, geometry.text.mtp_layers, geometry.draft_head_rows) == (0, 1, 384)
    assert geometry.vision is not None
    assert (geometry.vision.depth, geometry.vision.n_positions) == (1, 64)


def test_tiny_moe_geometry() -> None:
    text = tiny_config("moe").geometry.text
    assert (text.mlp_width, text.n_experts, text.experts_per_token) == (None, 8, 2)
    assert (text.expert_width, text.shared_width) == (128, 128)


def test_layer_types_win_and_the_interval_stands_in_for_them() -> None:
    sections = tiny_sections("dense")
    text = {k: v for k, v in sections["text_config"].items() if k != "layer_types"} | {"num_hidden_layers": 9}
    kinds = geometry_from_config(text, None, None, 384).text.layer_kinds
    assert [i for i, kind in enumerate(kinds) if kind == "attention"] == [3, 7]
    text |= {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}
    assert geometry_from_config(text, None, None, 384).text.layer_kinds == ("attention", "gdn")


def test_every_wrong_member_is_named_at_once() -> None:
    sections = tiny_sections("dense")
    text = {**sections["text_config"], "hidden_size": "128", "num_attention_heads": 0, "vocab_size": True}
    del text["head_dim"]
    vision = {**sections["vision_config"], "depth": 1.0}
    geometry, problems = inspect_config(text, vision, None, 384)
    assert geometry is None
    assert [p.split(" is ")[0] for p in problems] == [
        "text_config.hidden_size",
        "text_config.vocab_size",
        "text_config.num_attention_heads",
        "text_config.head_dim",
        "vision_config.depth",
    ]
    assert problems[0] == "text_config.hidden_size is '128', expected an integer from 1 to 1048576"


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("text_config", {"num_hidden_layers": 1_000_000}, "1000000, expected an integer from 1 to 1024"),
        ("text_config", {"num_hidden_layers": 5}, "layer_types is a list of 4"),
        ("text_config", {"layer_types": ["linear_attention"] * 3 + ["mamba"]}, "layer_types[3] is 'mamba'"),
        ("text_config", {"layer_types": 4}, "layer_types is 4"),
        ("text_config", {"num_experts": 8}, "num_experts_per_tok is missing"),
        ("text_config", {"model_type": "qwen3_5_moe_text"}, "num_experts is missing"),
        ("text_config", {"model_type": "llama"}, "model_type is 'llama'"),
        ("text_config", {"attn_output_gate": False}, "attn_output_gate is False, expected True"),
        ("text_config", {"attention_bias": True}, "attention_bias is True"),
        ("text_config", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True"),
        ("text_config", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
        ("text_config", {"num_key_value_heads": 4}, "a multiple of num_key_value_heads (4)"),
        ("text_config", {"linear_num_key_heads": 2}, "a multiple of linear_num_key_heads (2)"),
        ("text_config", {"hidden_size": 1 << 62}, "from 1 to 1048576"),
        ("text_config", {"hidden_size": 130}, "vision_config.out_hidden_size is 128"),
        ("text_config", {"vocab_size": 383}, "draft_head_rows is 384, expected at most"),
        ("vision_config", {"deepstack_visual_indexes": [8]}, "deepstack_visual_indexes is [8]"),
        ("vision_config", {"hidden_size": 145}, "a multiple of num_heads (2)"),
        ("token_ids", {"image": 640}, "token_ids.image is 640, expected an id from 0 to 639"),
        ("token_ids", {"audio": 1}, "expected image, video, vision_start, vision_end"),
    ],
)
def test_config_that_no_object_list_can_express_is_refused(section: str, change: dict[str, Any], message: str) -> None:
    config = tiny_config("dense")
    sections = tiny_sections("dense")
    sections[section] = {**sections[section], **change}
    with pytest.raises(InventoryError) as caught:
        ModelConfig(**sections, recipe=config.recipe, draft_head_rows=384)
    assert message in str(caught.value)


def dflash(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}
    config |= {"num_key_value_heads": 1, "intermediate_size": 256, "dflash_config": {"target_layer_ids": [0, 2]}}
    return config | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "dflash.hidden_size is 64, expected text_config.hidden_size (128)"),
        ({"dflash_config": {"target_layer_ids": [0, 4]}}, "a list with 4, expected layers 0 to 3"),
        ({"dflash_config": {"target_layer_ids": []}}, "expected a list of 1 to 4 target layers"),
        ({"dflash_config": None}, "target_layer_ids is None"),
    ],
)
def test_companion_that_does_not_fit_its_target_is_refused(changes: dict[str, Any], message: str) -> None:
    sections = tiny_sections("moe")
    fitting = geometry_from_config(sections["text_config"], None, dflash(), 384)
    assert fitting.dflash is not None
    assert fitting.dflash.n_taps == 2
    _, problems = inspect_config(sections["text_config"], None, dflash(**changes), 384)
    assert len(problems) == 1
    assert message in problems[0]


@pytest.mark.parametrize("identity", [str(i) for i in PUBLISHED])
def test_published_document_survives_writing_and_reading(identity: str) -> None:
    config = published_config(identity)
    text = config.to_json()
    again = ModelConfig.from_json(text, name=config.recipe.name)
    assert again == config
    assert again.to_json() == text
    assert again.geometry == config.geometry


def test_document_has_exactly_six_members_in_order_and_sorted_sections() -> None:
    text = tiny_config("dense", "nvfp4").to_json()
    document = json.loads(text)
    assert list(document) == ["text_config", "vision_config", "token_ids", "dflash", "recipe", "draft_head_rows"]
    assert list(document["text_config"]) == sorted(document["text_config"])
    assert list(document["token_ids"]) == ["image", "video", "vision_start", "vision_end"]
    assert document["dflash"] is None
    assert text == json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def test_member_order_of_the_source_does_not_change_the_text() -> None:
    sections = tiny_sections("moe")
    config = tiny_config("moe")
    sections["text_config"] = dict(reversed(sections["text_config"].items()))
    assert ModelConfig(**sections, recipe=config.recipe, draft_head_rows=384).to_json() == config.to_json()


def test_exceptions_stand_after_the_roles_under_their_object_names() -> None:
    document = json.loads(published_config("qwen3.6-35b-a3b/groupwise-int").to_json())
    assert list(document["recipe"])[-3:] == [f"text/layers/{n}/moe/routed_down" for n in (34, 38, 39)]
    first, *rest = document["recipe"].items()
    document["recipe"] = dict([*rest, first])
    with pytest.raises(InventoryError, match="comes after exceptions"):
        ModelConfig.from_json(json.dumps(document).encode())


Change = Callable[[dict[str, Any]], object]
BAD_DOCUMENTS: dict[str, tuple[Change, str]] = {
    "extra member": (lambda d: d.update(extra=1), "expected an object with exactly"),
    "missing member": (lambda d: d.pop("dflash"), "expected an object with exactly"),
    "text null": (lambda d: d.update(text_config=None), "text_config is None, expected an object"),
    "vision a list": (lambda d: d.update(vision_config=[]), "vision_config is [], expected an object or null"),
    "vision without token ids": (lambda d: d.update(token_ids=None), "token_ids is null"),
    "token id a boolean": (lambda d: d["token_ids"].update(image=True), "token_ids.image is True"),
    "recipe null": (lambda d: d.update(recipe=None), "recipe is None"),
    "recipe empty": (lambda d: d.update(recipe={}), "recipe is {}"),
    "format a number": (lambda d: d["recipe"].update({"text/draft_head": 4}), "is 4, expected a format name"),
    "unknown format": (lambda d: d["recipe"].update({"text/draft_head": "Q4"}), "unknown format 'Q4'"),
    "unknown role": (lambda d: d["recipe"].update({"text/x": "BF16"}), "'text/x' names no object"),
    "rows a real": (lambda d: d.update(draft_head_rows=384.0), "draft_head_rows is 384.0"),
    "rows zero": (lambda d: d.update(draft_head_rows=0), "draft_head_rows is 0"),
}


@pytest.mark.parametrize("what", BAD_DOCUMENTS)
def test_document_that_breaks_the_schema_is_refused(what: str) -> None:
    change, message = BAD_DOCUMENTS[what]
    document = json.loads(tiny_config("dense").to_json())
    change(document)
    with pytest.raises(InventoryError) as caught:
        ModelConfig.from_json(json.dumps(document).encode())
    assert message in str(caught.value)


def with_text(member: str) -> bytes:
    """The tiny document with one raw member spliced into text_config."""
    start = b'{"text_config":{'
    return start + member.encode() + b"," + tiny_config("dense").to_json().removeprefix(start)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not JSON"),
    "array": (b"[]", "expected an object"),
    "not UTF-8": (b'{"text_config":"\xff"}', "not UTF-8"),
    "byte-order mark": (b"\xef\xbb\xbf" + b"{}", "byte-order mark"),
    "trailing text": (b"{} {}", "not JSON"),
    "member twice": (with_text('"a":1,"a":1'), "appears twice"),
    "NaN": (with_text('"a":NaN'), "NaN appears; it is not JSON"),
    "Infinity": (with_text('"a":-Infinity'), "-Infinity appears; it is not JSON"),
    "1e400": (with_text('"a":1e400'), "out of range"),
    "minus zero": (with_text('"a":-0'), "-0"),
    "5000 digits": (with_text('"a":' + "9" * 5000), "has 5000 digits"),
    "lone surrogate": (with_text('"a":"\\ud800"'), "not plain JSON"),
    "100 levels": (with_text('"a":' + "[" * 100 + "]" * 100), "nested more than 32 levels"),
    "100000 levels": (b"[" * 100_000, "nested too deeply"),
    "too long": (b" " * (MAX_CONFIG_BYTES + 1), f"the limit is {MAX_CONFIG_BYTES}"),
    "a million layers": (
        tiny_config("dense").to_json().replace(b'"num_hidden_layers":4', b'"num_hidden_layers":1000000'),
        "num_hidden_layers is 1000000",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_text_ends_in_one_typed_error_quickly(what: str) -> None:
    text, message = HOSTILE[what]
    start = time.process_time()
    with pytest.raises(InventoryError) as caught:
        ModelConfig.from_json(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert time.process_time() - start < GENEROUS_SECONDS


def test_thousands_of_false_exceptions_give_one_short_message_quickly() -> None:
    document = json.loads(tiny_config("dense").to_json())
    document["recipe"] |= {f"text/layers/{n}/mlp/down": "BF16" for n in range(4, 20_000)}
    start = time.process_time()
    with pytest.raises(InventoryError, match=r"and \d+ more") as caught:
        ModelConfig.from_json(json.dumps(document).encode())
    assert len(str(caught.value)) < 4000
    assert time.process_time() - start < GENEROUS_SECONDS


def test_white_space_and_member_order_carry_no_meaning() -> None:
    config = tiny_config("moe")
    document = json.loads(config.to_json())
    loose = json.dumps(dict(reversed(document.items())), indent=2).encode()
    assert ModelConfig.from_json(loose) == config


def test_extra_section_members_are_kept() -> None:
    document = json.loads(with_text('"rope_parameters_note":"größer","eps":1e-06'))
    config = ModelConfig.from_json(json.dumps(document).encode())
    assert config.text_config["rope_parameters_note"] == "größer"
    assert b'"eps":1e-06' in config.to_json()


def test_section_that_is_not_json_cannot_be_written() -> None:
    sections = tiny_sections("dense")
    sections["text_config"] = {**sections["text_config"], "rms_norm_eps": float("nan")}
    config = ModelConfig(**sections, recipe=tiny_config("dense").recipe, draft_head_rows=384)
    with pytest.raises(InventoryError, match="not plain JSON"):
        config.to_json()


class Opened:
    """The part of an artifact that config_of reads."""

    def __init__(self, identity: str, resources: dict[str, bytes]) -> None:
        self.identity = Identity.parse(identity)
        self.objects = resources

    def payload(self, name: str, /) -> memoryview:
        return memoryview(self.objects[name])


def test_config_of_reads_the_resource_of_a_custom_artifact() -> None:
    config = tiny_config("moe", "w8")
    found = config_of(Opened("my-model/w8", {"model/config.json": config.to_json()}))
    assert found == config
    assert found.recipe.name == "w8"


def test_config_of_a_published_identity_never_comes_from_the_file() -> None:
    opened = Opened("qwen3.6-27b/nvfp4", {"model/config.json": tiny_config("moe").to_json()})
    assert config_of(opened) == published_config("qwen3.6-27b/nvfp4")


def test_config_of_a_custom_artifact_without_resource_says_what_is_missing() -> None:
    with pytest.raises(InventoryError, match=r"my-model/w8 is not a published identity .* no model/config.json"):
        config_of(Opened("my-model/w8", {}))
