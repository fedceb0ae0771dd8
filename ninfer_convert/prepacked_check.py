"""What a prepacked NVFP4 folder and the BF16 base beside it must look like to give the published artifact.

Headers and JSON files only; values are compared by ``source_values.py``. Specification: specs/conversion.md, Sources.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ninfer_convert.allocation import decoder_matrices
from ninfer_convert.checkpoint import INDEX, read_json_object
from ninfer_convert.config_check import config_differences, differences
from ninfer_convert.families.checks import grouped_places
from ninfer_convert.families.qwen3_5 import object_sources, spelling
from ninfer_convert.problems import Problem, some_names
from ninfer_convert.sources.logical import PLAIN, LogicalCheckpoint, LogicalTensor
from ninfer_convert.sources.nvfp4 import COMPRESSED_TENSORS
from ninfer_format import Identity
from ninfer_format.inventory import plan_inventory
from ninfer_format.model_config import published_config

MANIFEST = "mixed_native_manifest.json"

_WORDS = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
    "scale_dtype": "torch.float8_e4m3fn",
}  # fmt: skip
_GROUP = "quantization_config.config_groups.group_0."
_QUANTIZATION: Mapping[str, Mapping[str, Any]] = {
    "quantization_config.": {"quant_method": "compressed-tensors", "format": "mixed-precision"},
    _GROUP: {"format": "nvfp4-pack-quantized"},
    _GROUP + "weights.": {**_WORDS, "dynamic": False},
    _GROUP + "input_activations.": {**_WORDS, "dynamic": "local"},
}
_MANIFEST: Mapping[str, Mapping[str, Any]] = {
    "": {
        "format_histogram": {
            "head_passthrough/BF16": 3, "linear/BF16": 117, "linear/NVFP4": 379, "layer_passthrough/BF16": 352,
            "mtp_linear/NVFP4": 7, "mtp_passthrough/BF16": 8,
        },
        "n_assignment_entries": 614,
        "ignore": ["lm_head"],
        "prune": None,
        "corrected_norm_passthrough_tensors": 216,
        "passthrough_dtype_policy": "source_dtype_preserved; corrected from silent norm fp32 upcast",
    }
}  # fmt: skip
_DIFFERS = "nvfp4-config-differs"
_CUSTOM = "convert it without --identity, as a custom artifact"


def published_obstacles(identity: Identity, prepacked: LogicalCheckpoint, base: LogicalCheckpoint) -> Iterator[Problem]:
    """Everything in headers and JSON files that keeps the two folders from being the sources of ``identity``."""
    yield from _config_obstacles(identity, prepacked)
    for label, checkpoint in (("NVFP4", prepacked), ("base", base)):
        yield from _folder_obstacles(identity, label, checkpoint)
    yield from _allocation_obstacles(identity, prepacked)


def _config_obstacles(identity: Identity, prepacked: LogicalCheckpoint) -> Iterator[Problem]:
    config = prepacked.config
    if config is None:
        return  # a problem of the folder already
    where = "NVFP4 config.json"
    for problem in (*config_differences(identity, config), *differences(identity, where, config, _QUANTIZATION)):
        yield replace(problem, code=_DIFFERS, where=where)
    section = config.get("quantization_config")
    groups = section.get("config_groups") if isinstance(section, Mapping) else None
    if isinstance(groups, Mapping) and set(groups) != {"group_0"}:
        found = some_names(sorted(groups))
        message = f"quantization_config.config_groups has {found}, {identity} requires group_0 only"
        yield Problem(_DIFFERS, message, where, _CUSTOM)
    unread: list[Problem] = []
    manifest = read_json_object(prepacked.folder / MANIFEST, unread)
    yield from unread
    if manifest is not None:
        for problem in differences(identity, MANIFEST, manifest, _MANIFEST):
            yield replace(problem, code=_DIFFERS)


def _folder_obstacles(identity: Identity, label: str, checkpoint: LogicalCheckpoint) -> Iterator[Problem]:
    """Each folder must hold an index and exactly the safetensors files that it names."""
    if not (checkpoint.folder / INDEX).exists():
        message = f"the {label} folder has no {INDEX}, {identity} requires one"
        yield Problem("no-index", message, str(checkpoint.folder), "download the complete checkpoint")
    if extra := [file for file in checkpoint.ignored if file.endswith(".safetensors")]:
        message = f"the {label} folder holds {some_names(extra)}, which its index does not name"
        advice = f"remove what does not belong to the checkpoint, or {_CUSTOM}"
        yield Problem("extra-shard", message, str(checkpoint.folder), advice)


def _allocation_obstacles(identity: Identity, prepacked: LogicalCheckpoint) -> Iterator[Problem]:
    """The closed check: every decoder matrix is stored as the artifact has it, with all its parts and no others."""
    stored = prepacked.tensors.keys() | prepacked.unavailable
    names = spelling(stored, tied=False)
    inventory = plan_inventory(identity)
    sources = object_sources(published_config(identity), inventory, stored, names).sources
    faults = {fault.name: fault for fault in prepacked.faults}
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for entry, source in decoder_matrices(inventory, sources):
        for name in source.tensors:
            if (fault := faults.get(name)) is not None:
                found[fault.code, fault.message, fault.advice].append(name)
            elif (tensor := prepacked.tensors.get(name)) is None:
                if name not in prepacked.unavailable:
                    found["missing-tensor", "it is missing from the NVFP4 folder", _CUSTOM].append(name)
            elif message := _misallocated(identity, entry.format, tensor):
                found["allocation", message, _CUSTOM].append(name)
    for (code, message, advice), where in found.items():
        count, place = grouped_places(where)
        yield Problem(code, message + count, place, advice)


def _misallocated(identity: Identity, format: str, tensor: LogicalTensor) -> str | None:
    """What is wrong with how one matrix of the decoder is stored."""
    kind = tensor.dtype if tensor.kind == PLAIN else tensor.kind
    if format != "NVFP4":
        return None if kind == "BF16" else f"it is stored as {kind}, {identity} requires BF16"
    if tensor.packed is None or tensor.kind != COMPRESSED_TENSORS.label:
        return f"it is stored as {kind}, {identity} requires {COMPRESSED_TENSORS.label}"
    if not tensor.packed.has_input_scale:
        return f"{COMPRESSED_TENSORS.input_global} is missing beside its NVFP4 words, {identity} requires it"
    return None


def config_disagreements(base: Mapping[str, Any], prepacked: Mapping[str, Any]) -> list[str]:
    """Members of ``text_config`` that both configs have with different values, among those that shape a tensor."""
    ours, theirs = (c.get("text_config", c) for c in (base, prepacked))
    if not (isinstance(ours, Mapping) and isinstance(theirs, Mapping)):
        return []
    return [
        f"{key} is {theirs[key]!r:.60}, the base has {ours[key]!r:.60}"
        for key in _SHAPING
        if key in ours and key in theirs and ours[key] != theirs[key]
    ]


_SHAPING = (
    "num_hidden_layers", "layer_types", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size", "rms_norm_eps", "rope_parameters",
)  # fmt: skip
