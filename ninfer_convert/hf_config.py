"""``config.json`` of the checkpoint that an artifact stands for, from its model config."""

from collections.abc import Mapping
from typing import Any, Literal

from ninfer_format import ModelConfig

Dtype = Literal["bfloat16", "float32"]
_CLASS_STEMS = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}
_MEDIA_TOKENS = {
    "image": "image_token_id",
    "video": "video_token_id",
    "vision_start": "vision_start_token_id",
    "vision_end": "vision_end_token_id",
}
# Said anew, or of no meaning for plain weights.
_REPLACED = ("dtype", "torch_dtype", "quantization_config")


def checkpoint_config(config: ModelConfig, *, dtype: Dtype, tied: bool) -> dict[str, Any]:
    """The nested config of a model with vision, or the flat one of a text-only model.

    ``dtype`` is that of the weights; ``tied`` says that the checkpoint has no output head of its own.
    """
    architecture = config.geometry.architecture
    stem = _CLASS_STEMS[architecture]
    text = {
        "model_type": f"{architecture}_text",
        **_kept(config.text_config),
        "dtype": dtype,
        "tie_word_embeddings": tied,
    }
    if config.vision_config is None:
        return {"architectures": [f"{stem}ForCausalLM"], **text, "model_type": f"{architecture}_text"}
    ids = config.token_ids or {}
    return {
        "architectures": [f"{stem}ForConditionalGeneration"],
        "model_type": architecture,
        "language_model_only": False,
        "tie_word_embeddings": tied,
        "dtype": dtype,
        **{member: ids[key] for key, member in _MEDIA_TOKENS.items()},
        "text_config": text,
        "vision_config": _kept(config.vision_config),
    }


def companion_config(dflash: Mapping[str, Any], *, dtype: Dtype) -> dict[str, Any]:
    """The DFlash companion's config as it was, with the dtype of the written weights."""
    return {**_kept(dflash), "dtype": dtype}


def _kept(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in _REPLACED}
