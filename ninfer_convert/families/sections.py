"""``config.json`` of the family → the config sections that an artifact carries.

Nested configs (text_config, vision_config) and the flat ones of text-only checkpoints are understood. Whether the
members describe a model that can be stored is checked by ``ninfer_format.model_geometry``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ninfer_convert.problems import Problem
from ninfer_format.model_geometry import Architecture

_CONFIG = "config.json"
_MODEL_TYPES: Mapping[str, Architecture] = {
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
_CLASSES: Mapping[str, Architecture] = {
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
}
# Members of a flat config that do not describe the decoder.
_ROOT_ONLY = ("architectures", "auto_map", "quantization_config", "transformers_version")
_MEDIA_TOKENS = {
    "image": "image_token_id",
    "video": "video_token_id",
    "vision_start": "vision_start_token_id",
    "vision_end": "vision_end_token_id",
}


@dataclass(frozen=True, slots=True)
class ModelSections:
    """What the config says about the model, after --no-mtp and --no-vision."""

    architecture: Architecture
    text_config: Mapping[str, Any]
    vision_config: Mapping[str, Any] | None
    token_ids: Mapping[str, int] | None
    tied: bool
    """The output head is the token embedding."""


def read_sections(
    config: Mapping[str, Any], *, no_mtp: bool, no_vision: bool, problems: list[Problem], notes: list[str]
) -> ModelSections | None:
    """Sections of ``config``; None and a problem if it is no model of this family."""
    architecture = _architecture(config, problems)
    if architecture is None:
        return None
    text = config.get("text_config", {k: v for k, v in config.items() if k not in _ROOT_ONLY})
    vision = config.get("vision_config")
    for key, section in (("text_config", text), ("vision_config", vision)):
        if not isinstance(section, dict) and not (key == "vision_config" and section is None):
            message = f"{key} is {section!r:.60}, expected an object"
            problems.append(Problem("bad-config", message, _CONFIG, "use the config.json of the original checkpoint"))
            return None
    if no_mtp:
        text = {**text, "mtp_num_hidden_layers": 0}
    if vision is not None and config.get("language_model_only") is True:
        notes.append("config.json says language_model_only: the vision tower is left out")
        vision = None
    if no_vision:
        vision = None
    token_ids = _token_ids(config, problems) if vision is not None else None
    tied = config.get("tie_word_embeddings") is True or text.get("tie_word_embeddings") is True
    return ModelSections(architecture, text, vision, token_ids, tied)


def _architecture(config: Mapping[str, Any], problems: list[Problem]) -> Architecture | None:
    classes = config.get("architectures")
    named = classes[0] if isinstance(classes, list) and classes else None
    model_type = config.get("model_type")
    by_type = _MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
    by_class = _CLASSES.get(named) if isinstance(named, str) else None
    found = by_type or by_class
    if found is None or (by_type and by_class and by_type != by_class):
        message = (
            f"model_type is {model_type!r:.60} and architectures is {classes!r:.80}; "
            f"this release converts {', '.join(_MODEL_TYPES)}"
        )
        advice = "convert a checkpoint of the Qwen3.5, 3.6 or 3.8 family"
        problems.append(Problem("unsupported-architecture", message, _CONFIG, advice))
        return None
    return found


def _token_ids(config: Mapping[str, Any], problems: list[Problem]) -> dict[str, int] | None:
    ids = {key: config.get(member) for key, member in _MEDIA_TOKENS.items()}
    if wrong := [_MEDIA_TOKENS[key] for key, value in ids.items() if type(value) is not int]:
        message = f"{', '.join(wrong)}: expected a token id, found none; image and video input needs it"
        advice = "use the config.json of the original checkpoint, or pass --no-vision"
        problems.append(Problem("bad-config", message, _CONFIG, advice))
        return None
    return {key: value for key, value in ids.items() if isinstance(value, int)}
