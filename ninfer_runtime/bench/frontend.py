"""Frontend files of a synthetic artifact: right in structure and size, empty of knowledge.

The tokenizer is byte-level BPE without merges: 256 letters, filler tokens that no text produces, and the added tokens
of the family, so every id decodes to something and prompts encode byte by byte.
"""

import json
from collections.abc import Mapping
from typing import Any

from ninfer_format.errors import UsageError
from ninfer_format.published import FRONTEND_RESOURCES

_SPECIAL, _PLAIN = True, False
ADDED_TOKENS = (
    ("<|endoftext|>", _SPECIAL),
    ("<|im_start|>", _SPECIAL),
    ("<|im_end|>", _SPECIAL),
    ("<|object_ref_start|>", _SPECIAL),
    ("<|object_ref_end|>", _SPECIAL),
    ("<|box_start|>", _SPECIAL),
    ("<|box_end|>", _SPECIAL),
    ("<|quad_start|>", _SPECIAL),
    ("<|quad_end|>", _SPECIAL),
    ("<|vision_start|>", _SPECIAL),
    ("<|vision_end|>", _SPECIAL),
    ("<|vision_pad|>", _SPECIAL),
    ("<|image_pad|>", _SPECIAL),
    ("<|video_pad|>", _SPECIAL),
    ("<tool_call>", _PLAIN),
    ("</tool_call>", _PLAIN),
    ("<|fim_prefix|>", _PLAIN),
    ("<|fim_middle|>", _PLAIN),
    ("<|fim_suffix|>", _PLAIN),
    ("<|fim_pad|>", _PLAIN),
    ("<|repo_name|>", _PLAIN),
    ("<|file_sep|>", _PLAIN),
    ("<tool_response>", _PLAIN),
    ("</tool_response>", _PLAIN),
    ("<think>", _PLAIN),
    ("</think>", _PLAIN),
    ("<|audio_start|>", _SPECIAL),
    ("<|audio_end|>", _SPECIAL),
    ("<tts_pad>", _SPECIAL),
    ("<tts_text_bos>", _SPECIAL),
    ("<tts_text_eod>", _SPECIAL),
    ("<tts_text_bos_single>", _SPECIAL),
    ("<|audio_pad|>", _SPECIAL),
)
"""The last ids of every vocabulary of the family, in order: text, and whether it is special."""

LETTERS = 256
FEWEST_IDS = LETTERS + len(ADDED_TOKENS)

_TEMPLATE = """\
{%- for m in messages -%}
{{ '<|im_start|>' ~ m.role ~ '\\n' }}{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content or [] -%}{{ part.text if part.text is defined }}{%- endfor -%}
{% endif %}{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' ~ ('<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking \
else '<think>\\n') }}
{%- endif -%}
"""


def frontend_resources(n_addressable: int, sizes: Mapping[str, int] | None = None) -> dict[str, bytes]:
    """The six files, by resource name; with ``sizes`` each padded with white space to exactly so many bytes.

    UsageError when there are too few ids for letters and added tokens, or a file cannot be as small as asked.
    """
    if n_addressable < FEWEST_IDS:
        raise UsageError(f"a vocabulary of {n_addressable} ids is too small for a tokenizer, expected {FEWEST_IDS}")
    wanted = sizes or {}
    ids = {text: n_addressable - len(ADDED_TOKENS) + i for i, (text, _) in enumerate(ADDED_TOKENS)}
    preprocessor = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    template_name = "frontend/chat_template.jinja"
    template = _padded_template(wanted.get(template_name))
    documents: Mapping[str, Any] = {
        "frontend/tokenizer.json": _tokenizer(n_addressable, ids),
        "frontend/tokenizer_config.json": _tokenizer_config(ids, template),
        "frontend/generation_config.json": {
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "temperature": 1.0,
            "top_k": 20,
            "top_p": 0.95,
        },
        "frontend/preprocessor_config.json": preprocessor
        | {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
        "frontend/video_preprocessor_config.json": preprocessor
        | {"size": {"shortest_edge": 4_096, "longest_edge": 25_165_824}},
    }
    files = {
        name: _padded(json.dumps(document, separators=(",", ":")).encode(), wanted.get(name), name)
        for name, document in documents.items()
    }
    files[template_name] = template.encode()
    return {name: files[name] for name in FRONTEND_RESOURCES}


def _definition(text: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": text, **flags, "special": special}


def _tokenizer(n_addressable: int, ids: Mapping[str, int]) -> dict[str, Any]:
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(c) for c in shown] + [chr(0x100 + i) for i in range(LETTERS - len(shown))]
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    vocabulary |= {f"#{i:x}": i for i in range(LETTERS, n_addressable - len(ADDED_TOKENS))}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[text], **_definition(text, special)} for text, special in ADDED_TOKENS],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _tokenizer_config(ids: Mapping[str, int], template: str) -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(ids[text]): _definition(text, special) for text, special in ADDED_TOKENS},
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template,
    }


def _padded_template(n_bytes: int | None) -> str:
    """The template with a comment at its end that makes it ``n_bytes`` long."""
    head, tail = _TEMPLATE + "{#-", "-#}"
    missing = 0 if n_bytes is None else n_bytes - len(head) - len(tail)
    if missing < 0:
        raise UsageError(f"the chat template takes {len(head) + len(tail)} bytes, {n_bytes} were asked for")
    return head + " " * missing + tail


def _padded(document: bytes, n_bytes: int | None, name: str) -> bytes:
    if n_bytes is not None and len(document) > n_bytes:
        raise UsageError(f"{name} takes {len(document)} bytes, {n_bytes} were asked for")
    return document.ljust(n_bytes or 0)
