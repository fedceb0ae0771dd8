"""qwen3.6-27b/nvfp4 at full geometry, from folders made of holes: figures, closed checks, each violation by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_convert.plan import BuildOptions, ConversionPlan, make_plan
from ninfer_convert.problems import Problem
from ninfer_convert.source_values import check_values
from ninfer_format import Identity
from ninfer_format.published import PUBLISHED
from tests.convert.nvfp4 import LAYERS
from tests.convert.nvfp4_full import FullNvfp4, full_base, full_nvfp4
from tests.convert.tiny import INDEX

NVFP4 = Identity("qwen3.6-27b", "nvfp4")
ROW = PUBLISHED[NVFP4]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {name: resource.n_bytes for name, resource in ROW.resources.items()}
    return full_base(tmp_path_factory.mktemp("full") / "base", sizes)


@pytest.fixture
def full(tmp_path: Path, base: Path) -> FullNvfp4:
    return full_nvfp4(tmp_path / "nvfp4", base)


def planned(full: FullNvfp4, **options: Any) -> ConversionPlan:
    return make_plan(BuildOptions(full.folder, base=full.base, **{"identity": NVFP4, **options}))


def only(full: FullNvfp4) -> Problem:
    (problem,) = planned(full.save()).problems
    return problem


def test_plan_from_headers_alone_has_the_published_size_and_directory(full: FullNvfp4) -> None:
    plan = planned(full.save())
    target = plan.require()
    assert plan.output_bytes == ROW.file_bytes == 18_324_064_000
    assert target.inventory.directory_sha256 == ROW.directory_sha256
    packed = [s for s in target.sources if s.transform == "packed"]
    assert (len(packed), len({name for s in packed for name in s.tensors})) == (247, 379)
    assert sum(s.transform == "input_divisor" and s.origin == "packed" for s in target.sources) == 247
    plain = {name for twin in target.twins.values() for name in twin.tensors}
    assert (len(target.twins), len(plain)) == (105, 117)


def test_identity_is_inferred_from_frontend_files_allocation_and_base(
    full: FullNvfp4, monkeypatch: pytest.MonkeyPatch
) -> None:
    full.save()
    digests = planned(full).digests
    resources = {n: type(r)(r.n_bytes, digests[n]) for n, r in ROW.resources.items()}
    row = type(ROW)(**{name: getattr(ROW, name) for name in ROW.__slots__} | {"resources": resources})
    for module in ("identity", "check"):
        monkeypatch.setattr(f"ninfer_convert.{module}.PUBLISHED", {**PUBLISHED, NVFP4: row})
    target = planned(full, identity=None).require()
    assert (target.identity, target.published) == (NVFP4, True)
    full.unpack(f"{LAYERS}9.mlp.down_proj")
    plan = planned(full.save(), identity=None)
    assert not plan.require().published
    assert any("a custom artifact" in n and "requires NVFP4" in n for n in plan.notes)


def test_method_mse_is_no_published_artifact(full: FullNvfp4) -> None:
    (problem,) = planned(full.save(), method="mse").problems
    assert (problem.code, problem.where) == ("identity-refused", "--method")


# Config and manifest


GROUP = ("quantization_config", "config_groups", "group_0")
CONFIG_LIES: list[tuple[tuple[str, ...], Any]] = [
    (("quantization_config", "quant_method"), "modelopt"),
    (("quantization_config", "format"), "nvfp4-pack-quantized"),
    ((*GROUP, "format"), "pack-quantized"),
    *(((*GROUP, section, member), value)
      for section in ("weights", "input_activations")
      for member, value in (("num_bits", 8), ("type", "int"), ("strategy", "group"), ("group_size", 32),
                            ("symmetric", False), ("scale_dtype", None), ("dynamic", True))),
    (("text_config", "hidden_size"), 4096),
    (("tie_word_embeddings",), True),
]  # fmt: skip


@pytest.mark.parametrize("path, value", CONFIG_LIES, ids=[".".join(path[-2:]) for path, _ in CONFIG_LIES])
def test_every_member_of_the_nvfp4_config_is_checked(full: FullNvfp4, path: tuple[str, ...], value: Any) -> None:
    section = full.config
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    problem = only(full)
    assert (problem.code, problem.where) == ("nvfp4-config-differs", "NVFP4 config.json")
    assert ".".join(path) in problem.message


def test_a_second_config_group_is_refused(full: FullNvfp4) -> None:
    full.config["quantization_config"]["config_groups"]["group_1"] = {}
    assert "group_1" in only(full).message


@pytest.mark.parametrize("member", ["format_histogram", "n_assignment_entries", "ignore", "prune",
                                    "corrected_norm_passthrough_tensors", "passthrough_dtype_policy"])  # fmt: skip
def test_every_member_of_the_manifest_is_checked(full: FullNvfp4, member: str) -> None:
    assert full.manifest is not None
    full.manifest[member] = {"linear/NVFP4": 380} if member == "format_histogram" else 7
    problem = only(full)
    assert (problem.code, problem.where) == ("nvfp4-config-differs", "mixed_native_manifest.json")
    assert problem.message.startswith(member)


def test_missing_manifest_is_named(full: FullNvfp4) -> None:
    full.manifest = None
    problem = only(full)
    assert (problem.code, problem.where) == ("missing-file", "mixed_native_manifest.json")


# Folders


def test_shard_that_the_index_does_not_name_is_refused(full: FullNvfp4) -> None:
    full.save()
    (full.folder / "extra.safetensors").write_bytes(b"")
    (problem,) = planned(full).problems
    assert (problem.code, "extra.safetensors" in problem.message) == ("extra-shard", True)


def test_empty_shard_and_missing_index_are_refused(full: FullNvfp4) -> None:
    full.save()
    (full.folder / INDEX).rename(full.folder / "moved")
    (full.folder / "model-00001-of-00001.safetensors").rename(full.folder / "model.safetensors")
    assert [p.code for p in planned(full).problems] == ["no-index"]
    (full.folder / "model.safetensors").write_bytes(b"")
    (full.folder / "moved").rename(full.folder / INDEX)
    (full.folder / "model.safetensors").rename(full.folder / "model-00001-of-00001.safetensors")
    assert "empty-file" in {p.code for p in planned(full).problems}


# Allocation


def drop(part: str) -> Callable[[FullNvfp4, str], None]:
    return lambda full, stem: full.tensors.__delitem__(f"{stem}.{part}")


def store(part: str, dtype: str, shape: tuple[int, ...]) -> Callable[[FullNvfp4, str], None]:
    return lambda full, stem: full.tensors.__setitem__(f"{stem}.{part}", (dtype, shape))


DOWN, A, Q3 = "9.mlp.down_proj", "9.linear_attn.in_proj_a", "3.self_attn.q_proj"
VIOLATIONS: dict[str, tuple[str, Callable[[FullNvfp4, str], None], str, str]] = {
    "no codes": (DOWN, drop("weight_packed"), "missing-codes", "weight_packed"),
    "no scales": (DOWN, drop("weight_scale"), "missing-scale", "weight_scale"),
    "no weight global": (DOWN, drop("weight_global_scale"), "missing-scale", "weight_global_scale"),
    "no input global": (DOWN, drop("input_global_scale"), "allocation", "input_global_scale"),
    "plain beside packed": (DOWN, store("weight", "BF16", (5120, 17408)), "stored-twice", ".weight"),
    "plain instead of packed": (DOWN, lambda full, stem: full.unpack(stem), "allocation", "requires NVFP4"),
    "packed instead of plain": (A, lambda full, stem: full.pack(stem), "allocation", "requires BF16"),
    "packed instead of fused plain": (Q3, lambda full, stem: full.pack(stem), "allocation", "requires BF16"),
    "quantized part beside plain": (A, store("weight_scale", "F8_E4M3", (48, 320)), "quantized-source", "scales"),
    "plain missing": (A, drop("weight"), "missing-tensor", "missing"),
    "plain of another dtype": (A, store("weight", "F32", (48, 5120)), "allocation", "F32"),
    "codes of another shape": (DOWN, store("weight_packed", "U8", (5120, 8704 - 8)), "wrong-shape", "weight_scale"),
    "scales of another dtype": (DOWN, store("weight_scale", "U8", (5120, 1088)), "wrong-dtype", "weight_scale"),
    "globals per row": (DOWN, store("weight_global_scale", "F32", (5120,)), "wrong-shape", "weight_global_scale"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_every_violation_of_the_allocation_is_one_error_that_names_the_tensor(full: FullNvfp4, name: str) -> None:
    linear, violate, code, text = VIOLATIONS[name]
    violate(full, LAYERS + linear)
    problem = only(full)
    assert (problem.code, problem.where) == (code, f"{LAYERS}{linear}.weight")
    assert text in problem.message


def test_modelopt_names_are_not_the_published_source(full: FullNvfp4) -> None:
    stem = LAYERS + DOWN
    for part in ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"):
        del full.tensors[f"{stem}.{part}"]
    full.tensors |= {f"{stem}.weight": ("U8", (5120, 8704)), f"{stem}.weight_scale": ("F8_E4M3", (5120, 1088)),
                     f"{stem}.weight_scale_2": ("F32", ()), f"{stem}.input_scale": ("F32", ())}  # fmt: skip
    problem = only(full)
    assert (problem.code, problem.where) == ("allocation", f"{stem}.weight")
    assert "ModelOpt" in problem.message


def test_extra_tensors_outside_the_decoder_do_not_matter(full: FullNvfp4) -> None:
    full.tensors = {n: t for n, t in full.tensors.items() if not n.startswith(("mtp.", "model.visual.", "lm_head"))}
    full.tensors["mtp.layers.0.strange.weight_packed"] = ("U8", (8, 8))
    assert planned(full.save()).problems == ()


# Values


def test_values_are_checked_before_a_build_and_every_fault_names_its_tensors(full: FullNvfp4) -> None:
    globals_, inputs = "weight_global_scale", "input_global_scale"
    stems = {
        "v": f"{LAYERS}27.self_attn.v_proj", "z": f"{LAYERS}9.linear_attn.in_proj_z", "up": f"{LAYERS}0.mlp.up_proj",
        "down": f"{LAYERS}1.mlp.down_proj", "o": f"{LAYERS}31.self_attn.o_proj",
        "out": f"{LAYERS}2.linear_attn.out_proj",
    }  # fmt: skip
    one_ulp = float(np.nextafter(np.float32(1), np.float32(2)))
    full.scalars = {
        f"{stems['v']}.{globals_}": one_ulp, f"{stems['z']}.{globals_}": 1.25, f"{stems['up']}.{inputs}": 2.0,
        f"{stems['down']}.{globals_}": 0.0, f"{stems['o']}.{inputs}": np.inf, f"{stems['out']}.{globals_}": -1.0,
    }  # fmt: skip
    plain = f"{LAYERS}4.linear_attn.out_proj.weight"
    full.words = {plain: (2 * (17 * 6144 + 5), b"\x80\x3f")}
    problems, _ = check_values(planned(full.save()))
    found = {(p.code, p.where): p.message for p in problems}
    assert {(code, where) for code, where in found} == {
        ("global-scales-differ", "text/layers/27/attention/query_key_gate_value"),
        ("global-scales-differ", "text/layers/9/gdn/query_key_value_z"),
        ("global-scales-differ", "text/layers/0/mlp/gate_up_projection/input_scale_divisor"),
        ("bad-global-scale", "text/layers/1/mlp/down"),
        ("bad-global-scale", "text/layers/31/attention/output_projection/input_scale_divisor"),
        ("bad-global-scale", "text/layers/2/gdn/output"),
        ("base-differs", plain),
    }
    differing = found["global-scales-differ", "text/layers/27/attention/query_key_gate_value"]
    assert f"{LAYERS}27.self_attn.q_proj.{globals_} is 1," in differing
    assert f"{stems['v']}.{globals_} is 1.00000012" in differing
    assert f"{stems['up']}.{inputs} is 2" in found[
        "global-scales-differ", "text/layers/0/mlp/gate_up_projection/input_scale_divisor"
    ]  # fmt: skip
    assert f"{stems['down']}.{globals_}" in found["bad-global-scale", "text/layers/1/mlp/down"]
    assert "[17, 5]" in found["base-differs", plain]
