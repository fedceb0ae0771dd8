"""GGUF metadata of the two architectures → the ``config.json`` that the checkpoint had, as far as the file tells.

Every width comes from the metadata or from a stored shape; layer kinds come from the tensors that are stored and must
agree with the metadata. Specification: ``specs/conversion.md``, GGUF sources.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ninfer_convert.problems import Problem
from ninfer_convert.sources.gguf_names import Heads, Shape
from ninfer_format.model_geometry import Architecture

ARCHITECTURES: Mapping[str, Architecture] = {"qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe"}
"""``general.architecture`` → architecture."""
TOKENS, TEMPLATE = "tokenizer.ggml.tokens", "tokenizer.chat_template"

_CLASSES = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}
_INTEGERS: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "head_dim": "attention.key_length",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_DENSE = {"intermediate_size": "feed_forward_length"}
_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
# What the architecture names stand for, and no metadata field says.
_FIXED = {
    "attention_bias": False,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "mamba_ssm_dtype": "float32",
    "mtp_use_dedicated_embeddings": False,
}
_QUANTIZATION_VERSION = 2
"""Of the block formats; earlier files had others under the same numbers."""
_ADVICE = "use a GGUF file that a current llama.cpp made of a model of this family"


class _Metadata:
    """Fields of one architecture, typed; faults are collected."""

    def __init__(self, fields: Mapping[str, Any], architecture: str, faults: list[str]) -> None:
        self._fields, self._architecture, self._faults = fields, architecture, faults

    def get(self, key: str) -> Any:
        """The field below the architecture's name, or None."""
        return self._fields.get(f"{self._architecture}.{key}")

    def fault(self, key: str, found: Any, expected: str) -> None:
        """Collect a sentence on a field."""
        text = "missing" if found is None else f"{found!r:.60}"
        self._faults.append(f"{self._architecture}.{key} is {text}, expected {expected}")

    def integer(self, key: str) -> int:
        """A positive integer; 1 stands in for anything else."""
        value = self.get(key)
        if type(value) is int and value > 0:
            return value
        self.fault(key, value, "a positive integer")
        return 1

    def number(self, key: str) -> float:
        """A positive float32 number as the shortest decimal that is the same float32; 1 stands in otherwise."""
        value = self.get(key)
        if type(value) in (int, float) and 0 < value < float("inf"):
            return float(str(np.float32(value)))
        self.fault(key, value, "a positive number")
        return 1.0


def config_of_metadata(
    fields: Mapping[str, Any], shapes: Mapping[str, Shape], file: str
) -> tuple[dict[str, Any] | None, list[Problem]]:
    """The nested config of a text-only model for metadata ``fields`` and stored tensor ``shapes`` (C order).

    None, or a config to go on with, and a problem per fault.
    """
    name = fields.get("general.architecture")
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        message = f"general.architecture is {name!r:.60}; this release converts {', '.join(ARCHITECTURES)}"
        advice = "give the GGUF file of the language model of a Qwen3.5, 3.6 or 3.8 checkpoint"
        return None, [Problem("unsupported-architecture", message, file, advice)]
    faults: list[str] = []
    if (version := fields.get("general.quantization_version")) not in (None, _QUANTIZATION_VERSION):
        faults.append(f"general.quantization_version is {version!r:.40}, expected {_QUANTIZATION_VERSION}")
    metadata = _Metadata(fields, str(name), faults)
    text = _text(metadata, architecture, shapes)
    tied = "output.weight" not in shapes
    text["tie_word_embeddings"] = tied
    for member, field in (("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id")):
        if type(token := fields.get(f"tokenizer.ggml.{field}")) is int:
            text[member] = token
    config = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "tie_word_embeddings": tied,
        "text_config": text,
    }
    return config, [Problem("bad-config", fault, file, _ADVICE) for fault in faults]


def heads_of(text: Mapping[str, Any]) -> Heads:
    """What the layout of the stored tensors depends on."""
    return Heads(
        text["num_hidden_layers"],
        text["linear_num_key_heads"],
        text["linear_num_value_heads"],
        text["linear_key_head_dim"],
        text["linear_value_head_dim"],
    )


def _text(metadata: _Metadata, architecture: Architecture, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    text: dict[str, Any] = {"model_type": f"{architecture}_text", **_FIXED}
    widths = {**_INTEGERS, **(_EXPERTS if architecture == "qwen3_5_moe" else _DENSE)}
    text |= {member: metadata.integer(field) for member, field in widths.items()}
    draft = metadata.get("nextn_predict_layers")
    text["mtp_num_hidden_layers"] = draft if type(draft) is int else 0
    text["num_hidden_layers"] = max(1, metadata.integer("block_count") - text["mtp_num_hidden_layers"])
    text["layer_types"] = _layer_types(metadata, text["num_hidden_layers"], shapes)
    text["num_key_value_heads"] = _kv_heads(metadata, text["layer_types"])
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    if values % keys:
        metadata.fault("ssm.time_step_rank", values, f"a multiple of ssm.group_count ({keys})")
    inner = metadata.integer("ssm.inner_size")
    if inner % values:
        metadata.fault("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank ({values})")
    text["linear_value_head_dim"] = max(1, inner // values)
    if (width := metadata.get("attention.value_length")) not in (None, text["head_dim"]):
        metadata.fault("attention.value_length", width, f"attention.key_length ({text['head_dim']})")
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) == 2:
        text["vocab_size"] = embedding[0]
    text["rms_norm_eps"] = metadata.number("attention.layer_norm_rms_epsilon")
    text["rope_parameters"] = _rope(metadata, text["head_dim"])
    text["partial_rotary_factor"] = text["rope_parameters"]["partial_rotary_factor"]
    return text


def _layer_types(metadata: _Metadata, n_layers: int, shapes: Mapping[str, Shape]) -> list[str]:
    """Kinds by what is stored, checked against the interval."""
    if n_layers > len(shapes):
        metadata.fault("block_count", n_layers, f"at most the number of stored tensors ({len(shapes)})")
        return []
    kinds = ["linear_attention" if f"blk.{i}.ssm_a" in shapes else "full_attention" for i in range(n_layers)]
    interval = metadata.integer("full_attention_interval")
    for layer, kind in enumerate(kinds):
        stated = "linear_attention" if (layer + 1) % interval else "full_attention"
        if stated != kind:
            metadata.fault("full_attention_interval", interval, f"one that makes layer {layer} {kind}, as it is stored")
            break
    return kinds


def _kv_heads(metadata: _Metadata, kinds: list[str]) -> int:
    """One number, or one per layer with zeros where there is no attention."""
    value = metadata.get("attention.head_count_kv")
    if isinstance(value, list) and all(type(heads) is int for heads in value):
        used = {heads for heads, kind in zip(value, kinds, strict=False) if kind == "full_attention"}
        if len(used) == 1 and min(used) > 0:
            return int(used.pop())
        metadata.fault("attention.head_count_kv", value, "the same number for every attention layer")
        return 1
    return metadata.integer("attention.head_count_kv")


def _rope(metadata: _Metadata, head_dim: int) -> dict[str, Any]:
    sections = metadata.get("rope.dimension_sections")
    if not isinstance(sections, list) or len(sections) not in (3, 4) or any(sections[3:]):
        metadata.fault("rope.dimension_sections", sections, "three counts of pairs, and a fourth of zero")
        sections = [1, 1, 1]
    scaling = metadata.get("rope.scaling.type")
    if scaling not in (None, "none"):
        metadata.fault("rope.scaling.type", scaling, "none: stretched positions are not converted")
    theta = metadata.number("rope.freq_base")
    return {
        "rope_type": "default",
        "rope_theta": int(theta) if theta.is_integer() else theta,
        "partial_rotary_factor": metadata.integer("rope.dimension_count") / head_dim,
        "mrope_section": sections[:3],
        "mrope_interleaved": True,
    }
