"""The closed config check of a published identity: listed members must have the published values, others are free.

The values are those of ``ninfer_format.published``; the tables say which members count (specs/conversion.md).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ninfer_convert.problems import Problem
from ninfer_format import Identity
from ninfer_format.published import published_sections

_ABSENT = object()
_MEDIA_TOKENS = {"image": "image_token_id", "video": "video_token_id"} | {
    key: f"{key}_token_id" for key in ("vision_start", "vision_end")
}
_TEXT = (
    "num_hidden_layers", "full_attention_interval", "hidden_size", "vocab_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "mamba_ssm_dtype", "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings", "tie_word_embeddings", "max_position_embeddings", "rms_norm_eps", "layer_types",
)  # fmt: skip
_TEXT_DENSE = (*_TEXT, "intermediate_size")
_TEXT_MOE = (
    *_TEXT, "attn_output_gate", "hidden_act", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size", "attention_bias", "attention_dropout",
)  # fmt: skip
_ROPE_DENSE = ("rope_theta", "mrope_section")
_ROPE_MOE = (*_ROPE_DENSE, "mrope_interleaved", "partial_rotary_factor")
_VISION_DENSE = (
    "depth", "hidden_size", "intermediate_size", "out_hidden_size", "num_heads", "in_channels", "patch_size",
    "temporal_patch_size", "spatial_merge_size", "num_position_embeddings",
)  # fmt: skip
_VISION_MOE = (*_VISION_DENSE, "hidden_act", "deepstack_visual_indexes")
_DFLASH = (
    "architectures", "model_type", "attention_bias", "attention_dropout", "dtype", "head_dim", "hidden_act",
    "hidden_size", "intermediate_size", "layer_types", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "num_target_layers", "rms_norm_eps", "sliding_window",
    "tie_word_embeddings", "use_sliding_window", "vocab_size",
)  # fmt: skip


def config_differences(identity: Identity, config: Mapping[str, Any]) -> tuple[Problem, ...]:
    """One problem per checked member of ``config.json`` that differs from the published model's."""
    moe = identity.model_id == "qwen3.6-35b-a3b"
    published = published_sections(identity)
    kind = "qwen3_5_moe" if moe else "qwen3_5"
    root = {
        "architectures": [f"Qwen3_5{'Moe' if moe else ''}ForConditionalGeneration"],
        "model_type": kind,
        "tie_word_embeddings": False,
    }
    root |= {} if moe else {"language_model_only": False}
    root |= {member: published["token_ids"][key] for key, member in _MEDIA_TOKENS.items()}
    text, vision = published["text_config"], published["vision_config"]
    expected = {
        "": root,
        "text_config.": {key: text[key] for key in (_TEXT_MOE if moe else _TEXT_DENSE)},
        "text_config.rope_parameters.": {k: text["rope_parameters"][k] for k in (_ROPE_MOE if moe else _ROPE_DENSE)},
        "vision_config.": {key: vision[key] for key in (_VISION_MOE if moe else _VISION_DENSE)},
    }
    return tuple(differences(identity, "config.json", config, expected))


def dflash_differences(identity: Identity, config: Mapping[str, Any]) -> tuple[Problem, ...]:
    """The same for the config of the DFlash companion; empty for an identity that has none."""
    published = published_sections(identity)["dflash"]
    if published is None:
        return ()
    expected = {
        "": {key: published[key] for key in _DFLASH},
        "rope_parameters.": published["rope_parameters"],
        "dflash_config.": published["dflash_config"],
    }
    return tuple(differences(identity, "DFlash config.json", config, expected))


def differences(
    identity: Identity, where: str, config: Mapping[str, Any], expected: Mapping[str, Mapping[str, Any]]
) -> Iterator[Problem]:
    """One problem per member of ``config`` that is not as in ``expected``: path prefix (``a.b.``) → member → value."""
    for prefix, members in expected.items():
        section: Any = config
        for key in prefix.split(".")[:-1]:
            section = section.get(key) if isinstance(section, Mapping) else None
        for key, value in members.items():
            found = section.get(key, _ABSENT) if isinstance(section, Mapping) else _ABSENT
            if not _equal(found, value):
                shown = "absent" if found is _ABSENT else f"{found!r:.80}"
                message = f"{prefix}{key} is {shown}, {identity} requires {value!r:.80}"
                yield Problem("config-differs", message, where, "convert it without --identity, as a custom artifact")


def _equal(found: Any, value: Any) -> bool:
    """Equality of JSON values: numbers by value, but true is not 1."""
    if isinstance(value, list):
        return isinstance(found, list) and len(found) == len(value) and all(map(_equal, found, value))
    return bool(found == value) and isinstance(found, bool) == isinstance(value, bool)
