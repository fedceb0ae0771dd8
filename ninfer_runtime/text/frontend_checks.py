"""What the frontend files of a published identity must say; anything else would run the wrong prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

from ninfer_format.errors import ArtifactError
from ninfer_format.published import TOKENIZER_IDS
from ninfer_runtime.text.json_input import parse_json
from ninfer_runtime.text.template import TEMPLATE_FILE
from ninfer_runtime.text.tokenizer import TOKENIZER_CONFIG, Tokenizer

_TOKEN_IDS: Mapping[str, int] = {
    "<|vision_start|>": 248_053,
    "<|vision_end|>": 248_054,
    "<|image_pad|>": 248_056,
    "<|video_pad|>": 248_057,
    "<|audio_start|>": 248_070,
    "<|audio_end|>": 248_071,
    "<tts_pad>": 248_072,
    "<tts_text_bos>": 248_073,
    "<tts_text_eod>": 248_074,
    "<tts_text_bos_single>": 248_075,
    "<|audio_pad|>": 248_076,
}
_FIRST_TTS_ID = 248_070
"""From here on the tokens must also be special."""

_CONFIG_VALUES: Mapping[str, Any] = {"add_bos_token": False, "add_prefix_space": False, "pad_token": "<|endoftext|>"}

_HALF = [0.5, 0.5, 0.5]
_PREPROCESSOR_VALUES: Mapping[str, Any] = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": _HALF,
    "image_std": _HALF,
}
_PREPROCESSOR_IF_PRESENT: Mapping[str, Any] = {
    "rescale_factor": 1 / 255,
    "fps": 2,
    "min_frames": 4,
    "max_frames": 768,
}


def check_published(tokenizer: Tokenizer, tokenizer_config: bytes, template: str) -> None:
    """ArtifactError listing every way in which the text files differ from what a published identity has."""
    problems = list(_vocabulary_problems(tokenizer))
    config = parse_json(tokenizer_config, TOKENIZER_CONFIG)
    for name, expected in _CONFIG_VALUES.items():
        if name not in config or _text_of(config[name]) != expected:
            problems.append(f"{TOKENIZER_CONFIG}: {name} is {config.get(name)!r}, expected {expected!r}")
    if config.get("chat_template") != template:
        problems.append(f"{TOKENIZER_CONFIG}: chat_template differs from {TEMPLATE_FILE}")
    _raise(problems)


def check_preprocessor(document: bytes, name: str) -> None:
    """ArtifactError when a preprocessor file of a published identity asks for another preprocessing."""
    config = parse_json(document, name)
    if not isinstance(config, dict):
        raise ArtifactError(f"{name} is not an object")
    problems = [
        f"{name}: {key} is {config.get(key)!r}, expected {expected!r}"
        for key, expected in _PREPROCESSOR_VALUES.items()
        if config.get(key) != expected
    ]
    problems += [
        f"{name}: {key} is {config[key]!r}, expected {expected!r}"
        for key, expected in _PREPROCESSOR_IF_PRESENT.items()
        if key in config and not _is_near(config[key], expected)
    ]
    _raise(problems)


def _vocabulary_problems(tokenizer: Tokenizer) -> Sequence[str]:
    problems = []
    if tokenizer.n_addressable != TOKENIZER_IDS:
        problems.append(f"the tokenizer has {tokenizer.n_addressable} ids, expected {TOKENIZER_IDS}")
    for text, token_id in _TOKEN_IDS.items():
        token = tokenizer.added.get(text)
        if token is None or token.token_id != token_id:
            problems.append(f"{text} has id {token.token_id if token else None}, expected {token_id}")
        elif token_id >= _FIRST_TTS_ID and not token.special:
            problems.append(f"{text} is not special")
    problems += [f"{token.text} is normalized" for token in tokenizer.added.values() if token.normalized]
    return problems


def _is_near(value: Any, expected: float) -> bool:
    return isinstance(value, int | float) and abs(value - expected) < 1e-9


def _text_of(value: Any) -> Any:
    """A token in tokenizer_config.json: its text, or an object that holds it."""
    return value.get("content") if isinstance(value, dict) else value


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise ArtifactError("the frontend files are not those of this identity: " + "; ".join(problems))
