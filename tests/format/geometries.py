"""Config sections for tests: the trained examples and drawn odd-sized models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from ninfer_format.model_config import ModelConfig
from ninfer_format.model_geometry import draft_head_rows, geometry_from_config
from ninfer_format.recipes import RECIPE_NAMES, recipe_for

TINY = Path(__file__).parents[2] / "examples" / "tiny"


def tiny_sections(name: str) -> dict[str, Any]:
    """text_config, vision_config, token_ids and dflash of examples/tiny/``name``."""
    config = json.loads((TINY / name / "config.json").read_text(encoding="utf-8"))
    keys = {"image": "image_token_id", "video": "video_token_id"}
    keys |= {"vision_start": "vision_start_token_id", "vision_end": "vision_end_token_id"}
    return {
        "text_config": config["text_config"],
        "vision_config": config["vision_config"],
        "token_ids": {ours: config[theirs] for ours, theirs in keys.items()},
        "dflash": None,
    }


def make_config(sections: dict[str, Any], recipe: str, rows: int) -> ModelConfig:
    """A config with a built-in recipe."""
    geometry = geometry_from_config(sections["text_config"], sections["vision_config"], sections["dflash"], rows)
    return ModelConfig(**sections, recipe=recipe_for(geometry, recipe), draft_head_rows=rows)


def tiny_config(name: str, recipe: str = "groupwise-int") -> ModelConfig:
    """Config of a trained example (623 addressable ids)."""
    return make_config(tiny_sections(name), recipe, draft_head_rows(623))


def small(most: int = 9) -> st.SearchStrategy[int]:
    return st.integers(1, most)


@st.composite
def odd_configs(draw: st.DrawFn) -> ModelConfig:
    """Any model of the two architectures, sizes odd on purpose, any built-in recipe."""
    moe, kv, key_heads = draw(st.booleans()), draw(small(3)), draw(small(3))
    hidden = draw(st.sampled_from((1, 7, 64, 65, 128, 130)))
    layers = draw(st.lists(st.sampled_from(("linear_attention", "full_attention")), min_size=1, max_size=7))
    vocab = draw(st.sampled_from((2, 129, 640)))
    text: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "vocab_size": vocab,
        "num_key_value_heads": kv,
        "num_attention_heads": kv * draw(small(4)),
        "head_dim": draw(st.sampled_from((2, 32, 256))),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw(small(3)),
        "linear_key_head_dim": draw(st.sampled_from((4, 128))),
        "linear_value_head_dim": draw(st.sampled_from((6, 128))),
        "linear_conv_kernel_dim": draw(small(4)),
        "mtp_num_hidden_layers": draw(st.integers(0, 1)),
    }
    if moe:
        experts = draw(small(5))
        text |= {"num_experts": experts, "num_experts_per_tok": draw(st.integers(1, experts))}
        text |= {"moe_intermediate_size": draw(small(70)), "shared_expert_intermediate_size": draw(small(70))}
    else:
        text["intermediate_size"] = draw(st.sampled_from((3, 64, 192)))
    vision: dict[str, Any] | None = None
    dflash: dict[str, Any] | None = None
    token_ids: dict[str, int] | None = None
    if draw(st.booleans()):
        heads = draw(small(3))
        vision = {"depth": draw(small(3)), "hidden_size": heads * 6, "num_heads": heads, "intermediate_size": 33}
        vision |= {"out_hidden_size": hidden, "in_channels": 3, "patch_size": 2, "temporal_patch_size": 2}
        vision |= {"spatial_merge_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": []}
        token_ids = dict.fromkeys(("image", "video", "vision_start", "vision_end"), vocab - 1)
    if draw(st.booleans()):
        dflash = {"hidden_size": hidden, "num_hidden_layers": draw(small(3)), "num_attention_heads": 4, "head_dim": 8}
        dflash |= {"num_key_value_heads": 2, "intermediate_size": 17, "dflash_config": {"target_layer_ids": [0]}}
    sections = {"text_config": text, "vision_config": vision, "token_ids": token_ids, "dflash": dflash}
    return make_config(sections, draw(st.sampled_from(RECIPE_NAMES)), draft_head_rows(draw(st.integers(1, vocab))))
