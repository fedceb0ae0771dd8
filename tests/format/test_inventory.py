"""Inventories: the four published ones object by object, custom ones of any size, and comparison with a directory."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from ninfer_format.directory import (
    Directory,
    Identity,
    ResourceEntry,
    TensorEntry,
    check_objects,
    entry_members,
    parse_directory,
)
from ninfer_format.errors import InventoryError, UsageError
from ninfer_format.geometry import up
from ninfer_format.inventory import (
    COMPONENTS,
    Inventory,
    compare_inventory,
    component_of,
    expected_inventory,
    expert_rows,
    plan_inventory,
    resident_bytes,
    resource_sizes,
    role_of,
    role_shape,
    row_views,
)
from ninfer_format.model_config import ModelConfig, published_config
from ninfer_format.published import FRONTEND_RESOURCES, PUBLISHED, known_digest
from ninfer_format.recipes import published_geometry
from ninfer_format.roles import ROLES
from tests.format.geometries import TINY, make_config, odd_configs, tiny_config

GOLDEN = Path(__file__).parents[1] / "golden"
IDENTITIES = [str(identity) for identity in PUBLISHED]
DENSE, NVFP4, DENSE_38, MOE = IDENTITIES


def golden(identity: str) -> dict[str, Any]:
    text = (GOLDEN / "inventory" / f"{identity.replace('/', '--')}.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


@pytest.mark.parametrize("identity", IDENTITIES)
def test_published_inventory_equals_the_golden_object_by_object(identity: str) -> None:
    expected = [{k: v for k, v in entry.items() if k != "sha256"} for entry in golden(identity)["objects"]]
    planned = [entry_members(entry) for entry in plan_inventory(identity).objects]
    for have, want in zip(planned, expected, strict=True):
        assert have == want


@pytest.mark.parametrize(
    ("identity", "file_bytes", "directory_sha256"),
    [
        (DENSE, 17_495_365_888, "0abb85fde318b5980c126f9c44a5bae09e852034de79ea269bd09693aa34e7f7"),
        (NVFP4, 18_324_064_000, "50677ebddbeb17566a1c7837a122872fada8244f54d4d7b78ee95d7b567033ff"),
        (DENSE_38, 18_210_531_328, "45912dd83c71a1b3b3b644c15ce3ef83b0b60d77cd7c82a39b21d9ba6267d742"),
        (MOE, 22_783_246_080, "4c65958b2a56b372481be2f333fa3837ac996ed4f067430de499657da0a083be"),
    ],
)
def test_published_file_size_and_directory_digest(identity: str, file_bytes: int, directory_sha256: str) -> None:
    inventory = plan_inventory(identity)
    assert inventory.file_bytes == file_bytes
    assert inventory.directory_sha256 == directory_sha256


@pytest.mark.parametrize(
    ("identity", "json_bytes", "directory_sha256"),
    [
        (DENSE, 174_176, "df352a3e3b8555f15fd00d143be213b9e5ff6fb910a1c2390f0785f9a1e2d386"),
        (MOE, 147_634, "0155278f7e050a4a5c39a697557ea9e2532d44dfc054fd41b496f8b37966732e"),
    ],
)
def test_version_1_directory_digest(identity: str, json_bytes: int, directory_sha256: str) -> None:
    inventory = plan_inventory(identity)
    assert len(inventory.directory_v1_json) == json_bytes
    assert inventory.directory_v1_sha256 == directory_sha256


def test_version_1_cannot_hold_nvfp4() -> None:
    with pytest.raises(InventoryError, match="version 1 has no such format"):
        _ = plan_inventory(NVFP4).directory_v1_json


@pytest.mark.parametrize(
    ("identity", "tensor", "resource", "span", "gaps", "payload_offset", "json_bytes"),
    [
        (DENSE, 17_482_342_304, 12_833_441, 17_495_189_760, 14_015, 176_128, 174_218),
        (NVFP4, 18_310_883_160, 12_833_441, 18_323_855_104, 138_503, 208_896, 206_636),
        (DENSE_38, 18_197_503_904, 12_837_177, 18_210_355_200, 14_119, 176_128, 174_230),
        (MOE, 22_770_245_536, 12_833_441, 22_783_094_528, 15_551, 151_552, 147_676),
    ],
)
def test_published_byte_accounting(
    identity: str, tensor: int, resource: int, span: int, gaps: int, payload_offset: int, json_bytes: int
) -> None:
    inventory = plan_inventory(identity)
    assert sum(e.n_bytes for e in inventory.tensors) == tensor
    assert sum(e.n_bytes for e in inventory.resources) == resource
    assert inventory.payload_bytes == span
    assert span - tensor - resource == gaps
    assert inventory.payload_offset == payload_offset
    assert len(inventory.directory_json) == json_bytes


@pytest.mark.parametrize("identity", IDENTITIES)
def test_published_counts_per_format_and_layout(identity: str) -> None:
    counts = golden(identity)["derived"]["counts"]
    inventory = plan_inventory(identity)
    assert Counter(e.format for e in inventory.tensors) == counts["formats"]
    assert Counter(e.layout for e in inventory.tensors) == counts["layouts"]
    assert (len(inventory.objects), len(inventory.resources)) == (counts["objects"], counts["resources"])


@pytest.mark.parametrize(
    ("identity", "sizes"),
    [
        (DENSE, (16_378_322_944, 357_040_128, 451_267_584, 295_711_648, 0)),
        (DENSE_38, (17_093_484_544, 357_040_128, 451_267_584, 295_711_648, 0)),
        (NVFP4, (17_206_863_800, 357_040_128, 451_267_584, 295_711_648, 0)),
        (MOE, (21_038_461_952, 143_130_624, 897_934_336, 280_664_992, 410_053_632)),
    ],
)
def test_published_component_bytes(identity: str, sizes: tuple[int, ...]) -> None:
    totals: Counter[str] = Counter()
    for entry in plan_inventory(identity).tensors:
        totals[component_of(entry.name)] += entry.n_bytes
    assert tuple(totals[c] for c in ("text", "draft_head", "mtp", "vision", "dflash")) == sizes
    assert set(totals) <= set(COMPONENTS)


@pytest.mark.parametrize(
    ("identity", "without", "resident"),
    [
        (DENSE, (), 17_482_356_224),
        (NVFP4, (), 18_310_958_336),
        (DENSE_38, (), 18_197_517_824),
        (MOE, (), 22_770_260_992),
        (MOE, ("dflash",), 22_360_207_360),
    ],
)
def test_resident_bytes_of_one_device_block(identity: str, without: tuple[str, ...], resident: int) -> None:
    assert resident_bytes(plan_inventory(identity), [c for c in COMPONENTS if c not in without]) == resident


@pytest.mark.parametrize("identity", IDENTITIES)
def test_published_table_agrees_with_the_golden_facts(identity: str) -> None:
    row, facts = PUBLISHED[Identity.parse(identity)], golden(identity)
    assert (row.file_name, row.file_bytes, row.file_sha256) == tuple(
        facts["published"][key] for key in ("filename", "bytes", "sha256")
    )
    assert (row.target_key, row.recipe_id) == (facts["target_key"], facts["recipe_id"])
    assert (row.json_bytes, row.directory_sha256) == (
        facts["derived"]["json_bytes"],
        facts["derived"]["directory_sha256"],
    )
    recorded = {e["name"]: (e["bytes"], e["sha256"]) for e in facts["objects"] if e["kind"] == "resource"}
    assert {name: (r.n_bytes, r.sha256) for name, r in row.resources.items()} == recorded
    v1 = facts["published"].get("v1")
    assert (row.v1 is None) == (v1 is None)
    if row.v1 is not None:
        assert v1 == {"bytes": row.file_bytes, "sha256": row.v1.file_sha256} | {
            "directory_sha256": row.v1.directory_sha256,
            "json_bytes": row.v1.json_bytes,
        }


def test_known_digests_are_labels_and_others_are_not() -> None:
    for row in PUBLISHED.values():
        assert str(row.identity) in (known_digest(row.file_sha256.upper()) or "")
        if row.v1 is not None:
            assert "version-1" in (known_digest(row.v1.file_sha256) or "")
    assert known_digest("0" * 64) is None


def test_nvfp4_divisor_stands_directly_after_its_matrix_one_to_one() -> None:
    inventory = plan_inventory(NVFP4)
    tensors = inventory.tensors
    matrices = [i for i, e in enumerate(tensors) if e.format == "NVFP4"]
    assert len(matrices) == 247
    for i in matrices:
        role = inventory.roles[tensors[i].name][0]
        scalar = tensors[i + 1]
        assert ROLES[inventory.roles[scalar.name][0]].divisor_of == role
        assert (scalar.shape, scalar.format) == ((), "FP32")
    assert sum(name.endswith("/input_scale_divisor") for name in inventory.roles) == 247


@pytest.mark.parametrize(
    ("identity", "role", "views"),
    [
        (DENSE, "text/layers/*/attention/query_key", [("query", 0, 6144), ("key", 6144, 7168)]),
        (DENSE, "text/layers/*/attention/gate_value", [("gate", 0, 6144), ("value", 6144, 7168)]),
        (DENSE, "text/layers/*/gdn/query_key", [("query", 0, 2048), ("key", 2048, 4096)]),
        (DENSE, "text/layers/*/gdn/value_z", [("value", 0, 6144), ("z", 6144, 12288)]),
        (DENSE, "mtp/layer/mlp/gate_up", [("gate", 0, 17408), ("up", 17408, 34816)]),
        (
            NVFP4,
            "text/layers/*/attention/query_key_gate_value",
            [("query", 0, 6144), ("key", 6144, 7168), ("gate", 7168, 13312), ("value", 13312, 14336)],
        ),
        (
            NVFP4,
            "text/layers/*/gdn/query_key_value_z",
            [("query", 0, 2048), ("key", 2048, 4096), ("value", 4096, 10240), ("z", 10240, 16384)],
        ),
        (
            MOE,
            "text/layers/*/attention/query_key_gate_value",
            [("query", 0, 4096), ("key", 4096, 4608), ("gate", 4608, 8704), ("value", 8704, 9216)],
        ),
        (
            MOE,
            "text/layers/*/gdn/query_key_value_z",
            [("query", 0, 2048), ("key", 2048, 4096), ("value", 4096, 8192), ("z", 8192, 12288)],
        ),
        (MOE, "text/layers/*/gdn/a_b_projection", [("a", 0, 32), ("b", 32, 64)]),
        (MOE, "text/layers/*/moe/router_shared_gate", [("router", 0, 256), ("shared_gate", 256, 257)]),
        (MOE, "text/layers/*/moe/shared_gate_up", [("gate", 0, 512), ("up", 512, 1024)]),
        (
            MOE,
            "dflash/layers/*/attention/query_key_value",
            [("query", 0, 4096), ("key", 4096, 5120), ("value", 5120, 6144)],
        ),
        (MOE, "dflash/layers/*/mlp/gate_up", [("gate", 0, 6144), ("up", 6144, 12288)]),
        (MOE, "text/output_head", []),
    ],
)
def test_row_views_are_those_of_the_contract(identity: str, role: str, views: list[tuple[str, int, int]]) -> None:
    assert list(row_views(published_geometry(identity), role)) == views


def test_dense_artifact_has_390_row_views_outside_vision() -> None:
    inventory, geometry = plan_inventory(DENSE), published_geometry(DENSE)
    roles = [role for name, (role, _) in inventory.roles.items() if component_of(name) != "vision"]
    assert sum(len(row_views(geometry, role)) for role in roles) == 390


def test_expert_rows_follow_expert_order() -> None:
    geometry = published_geometry(MOE)
    gate_up, down = "text/layers/*/moe/routed_gate_up", "mtp/layer/moe/routed_down"
    assert expert_rows(geometry, gate_up, 3) == (("gate", 3072, 3584), ("up", 3584, 4096))
    assert expert_rows(geometry, down, 255) == (("down", 255 * 2048, 256 * 2048),)
    assert expert_rows(geometry, gate_up, 255)[-1][2] == role_shape(geometry, gate_up)[0]
    for role, expert in ((gate_up, 256), (gate_up, -1), ("text/output_head", 0)):
        with pytest.raises(InventoryError):
            expert_rows(geometry, role, expert)


def test_golden_row_maps_start_their_parts_where_the_views_do() -> None:
    maps = json.loads((GOLDEN / "row_maps.json").read_text(encoding="utf-8"))["maps"]
    assert maps
    for row_map in maps:
        identity = row_map["identity"].split(" and ")[0]
        geometry, (role, _) = published_geometry(identity), role_of(row_map["object"])
        boundaries = {run[0] for run in row_map["runs"]} | {row_map["runs"][-1][1]}
        assert role_shape(geometry, role)[0] == row_map["runs"][-1][1]
        for part, begin, end in row_views(geometry, role):
            within_one_run = any(run[0] <= begin and end <= run[1] for run in row_map["runs"])
            assert within_one_run or {begin, end} <= boundaries, (row_map["object"], part)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_tiny_example_stores_every_checkpoint_element_once(name: str) -> None:
    elements = 0
    for shard in (TINY / name).glob("*.safetensors"):
        raw = shard.read_bytes()
        header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
        elements += sum(math.prod(t["shape"]) for key, t in header.items() if key != "__metadata__")
    config = tiny_config(name)
    tensors = plan_inventory(config.geometry, config.recipe).tensors
    assert sum(math.prod(e.shape) for e in tensors if component_of(e.name) != "draft_head") == elements


def planned(config: ModelConfig, **resources: int) -> Inventory:
    sizes = {f"frontend/{name.replace('__', '.')}": n for name, n in resources.items()}
    sizes["model/config.json"] = len(config.to_json())
    return plan_inventory(config.geometry, config.recipe, identity=Identity("tiny", "x"), resources=sizes)


@given(odd_configs())
@settings(max_examples=60, deadline=None)
def test_any_model_plans_a_valid_packed_directory_that_its_config_explains(config: ModelConfig) -> None:
    inventory = planned(config, tokenizer__json=1001, chat_template__jinja=7)
    check_objects(inventory.objects, inventory.payload_bytes)
    cursor = 0
    for entry in inventory.objects:
        assert entry.offset == up(cursor, entry.alignment)
        cursor = entry.offset + entry.n_bytes
    assert parse_directory(inventory.directory_json) == inventory.directory
    reread = ModelConfig.from_json(config.to_json(), name=config.recipe.name)
    assert reread == config
    assert compare_inventory(expected_inventory(inventory.directory, reread), inventory.directory, packed=True) == []
    assert all(role_of(name) == where for name, where in inventory.roles.items())


def test_dropped_towers_leave_no_object() -> None:
    config = tiny_config("dense")
    text = {**config.text_config, "mtp_num_hidden_layers": 0}
    sections: dict[str, Any] = {"text_config": text, "vision_config": None, "token_ids": None, "dflash": None}
    bare = make_config(sections, "bf16", 384)
    inventory = plan_inventory(bare.geometry, bare.recipe)
    assert {component_of(e.name) for e in inventory.objects} == {"text", "draft_head"}
    assert inventory.identity == Identity("custom", "bf16")


def test_resources_of_a_custom_artifact_come_in_contract_order() -> None:
    config = tiny_config("moe")
    sizes = {"model/config.json": 3, "frontend/chat_template.jinja": 2, "frontend/tokenizer.json": 1}
    resources = plan_inventory(config.geometry, config.recipe, resources=sizes).resources
    assert [(e.name, e.offset) for e in resources] == [
        ("frontend/tokenizer.json", 0),
        ("frontend/chat_template.jinja", 1),
        ("model/config.json", 3),
    ]


@pytest.mark.parametrize(
    ("resources", "message"),
    [({"frontend/merges.txt": 3}, "not a resource"), ({"frontend/tokenizer.json": 0}, "is empty")],
)
def test_unknown_or_empty_resource_is_refused(resources: dict[str, int], message: str) -> None:
    config = tiny_config("dense")
    with pytest.raises(InventoryError, match=message):
        plan_inventory(config.geometry, config.recipe, resources=resources)


def test_published_identity_keeps_its_six_resources_with_other_sizes() -> None:
    inventory = plan_inventory(DENSE, resources=dict.fromkeys(FRONTEND_RESOURCES, 5))
    assert [e.n_bytes for e in inventory.resources] == [5] * 6
    assert [e.name for e in inventory.tensors] == [e.name for e in plan_inventory(DENSE).tensors]
    with pytest.raises(InventoryError, match="has exactly the resources"):
        plan_inventory(DENSE, resources={"frontend/tokenizer.json": 5})


def test_identity_that_is_not_published_is_refused() -> None:
    with pytest.raises(InventoryError, match=r"published ones are qwen3\.6-27b/groupwise-int"):
        plan_inventory("qwen3.6-27b/w8")
    with pytest.raises(UsageError):
        plan_inventory("qwen3.6-27b")


def test_hostile_sizes_that_overflow_together_are_refused() -> None:
    config = tiny_config("moe")
    text = {**config.text_config, "num_experts": 1 << 16, "moe_intermediate_size": 1 << 20, "hidden_size": 1 << 20}
    text |= {"num_hidden_layers": 1024, "layer_types": ["full_attention"] * 1024}
    sections: dict[str, Any] = {"text_config": text, "vision_config": None, "token_ids": None, "dflash": None}
    huge = make_config(sections, "bf16", 384)
    with pytest.raises(InventoryError, match="2\\^63"):
        plan_inventory(huge.geometry, huge.recipe)


# Comparison: one lie per case, and what the sentence has to say about it.

LIES = {
    "missing": "object 'text/final_norm' is missing",
    "unexpected": "object 'text/extra' is unexpected",
    "shape": "has shape [129], expected [128]",
    "format": "has format FP32, expected BF16",
    "bytes": "has bytes 258, expected 256",
    "kind": "is a resource, expected a tensor",
    "identity": "the identity is other/x, expected tiny/x",
}


def lie(directory: Directory, what: str) -> Directory:
    objects = {e.name: e for e in directory.objects}
    norm = objects["text/final_norm"]
    assert isinstance(norm, TensorEntry)
    if what == "identity":
        return replace(directory, identity=Identity("other", "x"))
    if what == "missing":
        del objects[norm.name]
    elif what == "unexpected":
        objects["text/extra"] = replace(norm, name="text/extra")
    elif what == "kind":
        objects[norm.name] = ResourceEntry(norm.name, "raw-bytes-v1", norm.offset, norm.n_bytes)
    else:
        changed: dict[str, Any] = {"shape": {"shape": (129,)}, "format": {"format": "FP32"}, "bytes": {"n_bytes": 258}}
        objects[norm.name] = replace(norm, **changed[what])
    return Directory(directory.identity, tuple(objects.values()))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("what", LIES)
def test_one_lie_gives_one_sentence(what: str, packed: bool) -> None:
    expected = planned(tiny_config("dense"))
    problems = compare_inventory(expected, lie(expected.directory, what), packed=packed)
    assert len(problems) == 1
    assert LIES[what] in problems[0]


def test_order_and_gaps_count_only_when_packed() -> None:
    expected = planned(tiny_config("dense"))
    *rest, last = expected.objects
    moved = Directory(expected.identity, (*rest, replace(last, offset=last.offset + 256)))
    swapped = Directory(expected.identity, (last, *rest))
    assert compare_inventory(expected, moved, packed=False) == []
    assert compare_inventory(expected, swapped, packed=False) == []
    assert "offset" in compare_inventory(expected, moved, packed=True)[0]
    assert compare_inventory(expected, swapped, packed=True) == [
        f"object {expected.objects.index(rest[0])} is {last.name!r}, expected {rest[0].name!r}"
    ]


def test_long_lists_of_differences_are_counted_not_printed() -> None:
    expected = planned(tiny_config("dense"))
    problems = compare_inventory(expected, Directory(expected.identity, expected.objects[:1]), packed=True, limit=5)
    assert len(problems) == 6
    assert problems[-1] == f"and {len(expected.objects) - 1 - 5} more differences"


def test_published_identity_with_a_config_resource_has_an_object_too_many() -> None:
    inventory = plan_inventory(DENSE)
    extra = ResourceEntry("model/config.json", "raw-bytes-v1", inventory.payload_bytes, 10)
    directory = Directory(inventory.identity, (*inventory.objects, extra))
    expected = expected_inventory(directory, published_config(DENSE))
    assert compare_inventory(expected, directory, packed=False) == ["object 'model/config.json' is unexpected"]
    assert resource_sizes(directory.objects)["model/config.json"] == 10
