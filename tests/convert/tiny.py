"""Small checkpoints with the real tensor names, written without the code under test.

Every width is different from every other where the architecture allows it, so that a transposed or swapped tensor is
visible, and none is a multiple of 128. Change ``config``, ``tensors`` or ``frontend``, then ``save()``.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]
INDEX = "model.safetensors.index.json"
N_IDS = 330
"""Addressable ids; the last 30 are added tokens, of which the last 7 are only in tokenizer_config.json."""
N_BASE_IDS = 300
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_DTYPES = {
    "uint16": "BF16", "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64",
    "uint8": "U8", "int8": "I8",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


def text_config(*, moe: bool) -> dict[str, Any]:
    """Decoder of four layers, the last with attention."""
    text: dict[str, Any] = {
        "model_type": "qwen3_5_moe_text" if moe else "qwen3_5_text",
        "hidden_size": 72,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "vocab_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
        "mtp_num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "attn_output_gate": True,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    }
    if moe:
        return text | {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
        }
    return text | {"intermediate_size": 136}


VISION_CONFIG = {
    "depth": 2,
    "hidden_size": 48,
    "num_heads": 2,
    "intermediate_size": 88,
    "out_hidden_size": 72,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 36,
}
DFLASH_CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 384,
    "num_target_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 64,
    "dflash_config": {"block_size": 4, "mask_token_id": N_IDS, "target_layer_ids": [0, 2, 3]},
}


def model_config(*, moe: bool) -> dict[str, Any]:
    """A whole nested config.json."""
    name, kind = ("Qwen3_5Moe", "qwen3_5_moe") if moe else ("Qwen3_5", "qwen3_5")
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": kind,
        "tie_word_embeddings": False,
        "image_token_id": 312,
        "video_token_id": 313,
        "vision_start_token_id": 309,
        "vision_end_token_id": 310,
        "text_config": text_config(moe=moe),
        "vision_config": dict(VISION_CONFIG),
    }


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint with this (nested) config, expert banks fused."""
    text, vision = config["text_config"], config.get("vision_config")
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.language_model.embed_tokens.weight": (vocab, hidden),
        "model.language_model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer, kind in enumerate(text["layer_types"]):
        for name, shape in _layer(text, attention=kind == "full_attention"):
            shapes[f"model.language_model.layers.{layer}.{name}"] = shape
    if text["mtp_num_hidden_layers"]:
        shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            shapes[f"mtp.{name}.weight"] = (hidden,)
        for name, shape in _layer(text, attention=True):
            shapes[f"mtp.layers.0.{name}"] = shape
    if vision is not None:
        shapes |= {f"model.visual.{name}": shape for name, shape in _vision(vision)}
    return shapes


def _layer(text: Mapping[str, Any], *, attention: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head_dim = text["hidden_size"], text["head_dim"]
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if attention:
        query, key = text["num_attention_heads"] * head_dim, text["num_key_value_heads"] * head_dim
        yield "self_attn.q_proj.weight", (2 * query, hidden)
        yield "self_attn.k_proj.weight", (key, hidden)
        yield "self_attn.v_proj.weight", (key, hidden)
        yield "self_attn.o_proj.weight", (hidden, query)
        yield "self_attn.q_norm.weight", (head_dim,)
        yield "self_attn.k_norm.weight", (head_dim,)
    else:
        heads = text["linear_num_value_heads"]
        key, value = text["linear_num_key_heads"] * text["linear_key_head_dim"], heads * text["linear_value_head_dim"]
        yield "linear_attn.in_proj_qkv.weight", (2 * key + value, hidden)
        yield "linear_attn.in_proj_z.weight", (value, hidden)
        yield "linear_attn.in_proj_a.weight", (heads, hidden)
        yield "linear_attn.in_proj_b.weight", (heads, hidden)
        yield "linear_attn.out_proj.weight", (hidden, value)
        yield "linear_attn.conv1d.weight", (2 * key + value, 1, text["linear_conv_kernel_dim"])
        yield "linear_attn.A_log", (heads,)
        yield "linear_attn.dt_bias", (heads,)
        yield "linear_attn.norm.weight", (text["linear_value_head_dim"],)
    if "num_experts" not in text:
        width = text["intermediate_size"]
        yield "mlp.gate_proj.weight", (width, hidden)
        yield "mlp.up_proj.weight", (width, hidden)
        yield "mlp.down_proj.weight", (hidden, width)
        return
    experts, width, shared = text["num_experts"], text["moe_intermediate_size"], text["shared_expert_intermediate_size"]
    yield "mlp.gate.weight", (experts, hidden)
    yield "mlp.shared_expert_gate.weight", (1, hidden)
    yield "mlp.experts.gate_up_proj", (experts, 2 * width, hidden)
    yield "mlp.experts.down_proj", (experts, hidden, width)
    yield "mlp.shared_expert.gate_proj.weight", (shared, hidden)
    yield "mlp.shared_expert.up_proj.weight", (shared, hidden)
    yield "mlp.shared_expert.down_proj.weight", (hidden, shared)


def _vision(vision: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    h, width, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    yield "patch_embed.proj.weight", (h, vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    yield "patch_embed.proj.bias", (h,)
    yield "pos_embed.weight", (vision["num_position_embeddings"], h)
    merged = h * vision["spatial_merge_size"] ** 2
    matrices = {f"blocks.{b}.{n}": s for b in range(vision["depth"]) for n, s in (
        ("attn.qkv", (3 * h, h)), ("attn.proj", (h, h)), ("mlp.linear_fc1", (width, h)), ("mlp.linear_fc2", (h, width)),
    )}  # fmt: skip
    matrices |= {"merger.linear_fc1": (merged, merged), "merger.linear_fc2": (vision["out_hidden_size"], merged)}
    for name, shape in matrices.items():
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[:1]
    for name in (*(f"blocks.{b}.norm{i}" for b in range(vision["depth"]) for i in (1, 2)), "merger.norm"):
        yield f"{name}.weight", (h,)
        yield f"{name}.bias", (h,)


def dflash_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a companion with this config."""
    hidden, width, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    taps = len(config["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in (
            ("input_layernorm.weight", (hidden,)), ("post_attention_layernorm.weight", (hidden,)),
            ("self_attn.q_proj.weight", (query, hidden)), ("self_attn.k_proj.weight", (key, hidden)),
            ("self_attn.v_proj.weight", (key, hidden)), ("self_attn.o_proj.weight", (hidden, query)),
            ("self_attn.q_norm.weight", (dim,)), ("self_attn.k_norm.weight", (dim,)),
            ("mlp.gate_proj.weight", (width, hidden)), ("mlp.up_proj.weight", (width, hidden)),
            ("mlp.down_proj.weight", (hidden, width)),
        )}  # fmt: skip
    return shapes


def random_words(shape: tuple[int, ...], rng: np.random.Generator) -> Words:
    """BF16 words of normal values: the upper halves of float32 words."""
    values = rng.standard_normal(shape, np.float32) * np.float32(0.1)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def unfuse_experts(tensors: dict[str, Words], *, only: str = "") -> None:
    """Replace the fused banks whose name contains ``only`` by one matrix per expert and projection, in place."""
    for name in [n for n in tensors if ".experts." in n and only in n]:
        bank, (prefix, kind) = tensors.pop(name), name.split("experts.")
        for expert, rows in enumerate(bank):
            stem = f"{prefix}experts.{expert}."
            if kind == "down_proj":
                tensors[stem + "down_proj.weight"] = rows.copy()
            else:
                tensors[stem + "gate_proj.weight"] = rows[: len(rows) // 2].copy()
                tensors[stem + "up_proj.weight"] = rows[len(rows) // 2 :].copy()


def write_safetensors(path: Path, tensors: Mapping[str, Words]) -> None:
    """A safetensors file; uint16 arrays are BF16 words."""
    header, offset = {}, 0
    for name, array in tensors.items():
        dtype = _DTYPES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            stream.write(np.ascontiguousarray(array).tobytes())


def write_sparse(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file of BF16 tensors that is all holes behind its header."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + offset)


def frontend_files(template: str = TEMPLATE) -> dict[str, bytes]:
    """The six frontend files of a tokenizer with N_IDS ids."""
    added = {
        i: {"content": f"<|t{i}|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": i % 3 != 0}
        for i in range(N_BASE_IDS, N_IDS)
    }  # fmt: skip
    documents: dict[str, Any] = {
        "tokenizer.json": {
            "model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(N_BASE_IDS)}, "merges": []},
            "added_tokens": [{"id": i, **entry} for i, entry in added.items() if i < N_IDS - 7],
        },
        "tokenizer_config.json": {
            "added_tokens_decoder": {str(i): entry for i, entry in added.items()},
            "chat_template": template,
        },
        "generation_config.json": {"eos_token_id": [302, 300], "bos_token_id": 300},
        "preprocessor_config.json": {"patch_size": 4, "merge_size": 2},
        "video_preprocessor_config.json": {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2},
    }
    files = {name: json.dumps(document).encode() for name, document in documents.items()}
    return files | {"chat_template.jinja": template.encode()}


@dataclass
class TinyCheckpoint:
    """A checkpoint folder and what it is made of."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Words]
    frontend: dict[str, bytes]
    n_shards: int = 3
    mtp_file: str | None = None
    """File of its own for the mtp.* tensors."""
    weight_map: dict[str, str] = field(default_factory=dict)

    def shards(self) -> list[str]:
        """Names of the shard files."""
        return sorted(set(self.weight_map.values()))

    def save(self) -> TinyCheckpoint:
        """Write every file (the folder may exist)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own = [n for n in self.tensors if self.mtp_file and n.startswith("mtp.")]
        rest = [n for n in self.tensors if n not in own]
        per_shard = -(-len(rest) // self.n_shards)
        files = {
            f"model-{i + 1:05d}-of-{self.n_shards:05d}.safetensors": rest[i * per_shard : (i + 1) * per_shard]
            for i in range(self.n_shards)
        }
        if self.mtp_file:
            files[self.mtp_file] = own
        self.weight_map = {name: file for file, names in files.items() for name in names}
        for file, names in files.items():
            write_safetensors(self.folder / file, {name: self.tensors[name] for name in names})
        self.save_index()
        self.save_config()
        for file, content in self.frontend.items():
            (self.folder / file).write_bytes(content)
        return self

    def save_index(self) -> None:
        """Write the index as ``weight_map`` has it."""
        (self.folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": self.weight_map}))

    def save_config(self) -> None:
        """Write config.json."""
        (self.folder / "config.json").write_text(json.dumps(self.config))


def tiny_checkpoint(folder: Path, *, moe: bool = False, seed: int = 0, **members: Any) -> TinyCheckpoint:
    """A complete checkpoint in ``folder``, saved; ``members`` go to TinyCheckpoint."""
    rng, config = np.random.default_rng(seed), model_config(moe=moe)
    tensors = {name: random_words(shape, rng) for name, shape in shapes_of(config).items()}
    return TinyCheckpoint(folder, config, tensors, frontend_files(), **members).save()


def tiny_dflash(folder: Path, *, seed: int = 1) -> Path:
    """A DFlash companion that goes with the tiny checkpoints: one file without an index."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    tensors = {name: random_words(shape, rng) for name, shape in dflash_shapes(DFLASH_CONFIG).items()}
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(DFLASH_CONFIG))
    return folder
