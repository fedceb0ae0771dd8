"""Tiny GGUF files, written with the ``gguf`` package's writer and laid out the way llama.cpp's converter does.

The layout is spelled out here a second time, forwards and with plain loops, so that the tables under test are not used
to check themselves. K types are encoded by the simple rule of their format, since the package only decodes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from ninfer_convert.plan import BuildOptions, ConversionPlan, make_plan
from tests.convert.fp8 import floats
from tests.convert.tiny import TinyCheckpoint, random_words, shapes_of, tiny_checkpoint

Floats = NDArray[np.float32]
KINDS = {kind.name: kind for kind in gguf.GGMLQuantizationType}
Choose = Callable[[str, tuple[int, ...]], str]
"""GGUF tensor name and shape → type name."""
TEXT = "model.language_model."
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}


def tiled(values: Floats, text: Mapping[str, Any], axis: int, per_head: int) -> Floats:
    """Value heads along ``axis`` from grouped by key head to tiled, head by head."""
    keys, heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    grouped = np.split(values, heads, axis)
    assert grouped[0].shape[axis] == per_head
    return np.concatenate([grouped[k * (heads // keys) + v] for v in range(heads // keys) for k in range(keys)], axis)


def layer_tensor(name: str, values: Floats, text: Mapping[str, Any]) -> Floats:
    """One tensor of a layer (or the draft block) as llama.cpp stores it."""
    dim, before = text["linear_value_head_dim"], 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"]
    match name:
        case "linear_attn.in_proj_qkv.weight":
            return np.concatenate([values[:before], tiled(values[before:], text, 0, dim)])
        case "linear_attn.conv1d.weight":
            values = values[:, 0]
            return np.concatenate([values[:before], tiled(values[before:], text, 0, dim)])
        case "linear_attn.in_proj_z.weight":
            return tiled(values, text, 0, dim)
        case "linear_attn.in_proj_a.weight" | "linear_attn.in_proj_b.weight" | "linear_attn.dt_bias":
            return tiled(values, text, 0, 1)
        case "linear_attn.A_log":
            return tiled(-np.exp(values), text, 0, 1)
        case "linear_attn.out_proj.weight":
            return tiled(values, text, 1, dim)
        case "mlp.shared_expert_gate.weight":
            return values.reshape(-1)
    if name.endswith("norm.weight") or "_norm_" in name:
        return values if name == "linear_attn.norm.weight" else values + np.float32(1)
    return values


def gguf_tensors(config: Mapping[str, Any], tensors: Mapping[str, Floats], *, fused: bool = False) -> dict[str, Floats]:
    """Every tensor of the language model under its GGUF name, in C order; the vision tower is left out.

    ``fused`` keeps gate and up rows of the experts in one bank.
    """
    text, found = config["text_config"], {}
    for name, values in tensors.items():
        if name == "lm_head.weight":
            found["output.weight"] = values
        elif name == f"{TEXT}embed_tokens.weight":
            found["token_embd.weight"] = values
        elif name == f"{TEXT}norm.weight":
            found["output_norm.weight"] = values + np.float32(1)
        elif name.startswith((f"{TEXT}layers.", "mtp.")):
            layer, rest = _place(name, text["num_hidden_layers"])
            if rest == "mlp.experts.gate_up_proj":
                half = values.shape[1] // 2
                parts = {"gate": values[:, :half], "up": values[:, half:]}
                parts = {"gate_up": values} if fused else parts
                found |= {f"blk.{layer}.ffn_{part}_exps.weight": np.ascontiguousarray(v) for part, v in parts.items()}
            else:
                found[f"blk.{layer}.{NAMES[rest]}"] = np.ascontiguousarray(layer_tensor(rest, values, text))
    return found


def _place(name: str, n_layers: int) -> tuple[int, str]:
    if name.startswith("mtp.layers."):
        number, rest = name.removeprefix("mtp.layers.").split(".", 1)
        return n_layers + int(number), rest
    if name.startswith("mtp."):
        return n_layers, name
    number, rest = name.removeprefix(f"{TEXT}layers.").split(".", 1)
    return int(number), rest


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields below the architecture's name; floats are FLOAT32, integers UINT32, lists arrays of INT32."""
    text = config["text_config"]
    rope = text["rope_parameters"]
    mtp = text["mtp_num_hidden_layers"]
    fields = {
        "block_count": text["num_hidden_layers"] + mtp,
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": text["num_key_value_heads"],
        "attention.key_length": text["head_dim"],
        "attention.value_length": text["head_dim"],
        "attention.layer_norm_rms_epsilon": float(text["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(text["head_dim"] * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [*rope.get("mrope_section", [2, 1, 1]), 0],
        "ssm.conv_kernel": text["linear_conv_kernel_dim"],
        "ssm.state_size": text["linear_key_head_dim"],
        "ssm.group_count": text["linear_num_key_heads"],
        "ssm.time_step_rank": text["linear_num_value_heads"],
        "ssm.inner_size": text["linear_value_head_dim"] * text["linear_num_value_heads"],
        "full_attention_interval": 4,
    }
    if mtp:
        fields["nextn_predict_layers"] = mtp
    if "num_experts" not in text:
        return fields | {"feed_forward_length": text["intermediate_size"]}
    return fields | {
        "expert_count": text["num_experts"],
        "expert_used_count": text["num_experts_per_tok"],
        "expert_feed_forward_length": text["moe_intermediate_size"],
        "expert_shared_feed_forward_length": text["shared_expert_intermediate_size"],
    }


def token_list(frontend: Mapping[str, bytes], n_rows: int) -> list[str]:
    """Tokens by id as llama.cpp stores them, padded to the rows of the embedding."""
    tokenizer, config = (json.loads(frontend[f]) for f in ("tokenizer.json", "tokenizer_config.json"))
    tokens = [f"[PAD{i}]" for i in range(n_rows)]
    for token, i in tokenizer["model"]["vocab"].items():
        tokens[i] = token
    for entry in tokenizer["added_tokens"]:
        tokens[entry["id"]] = entry["content"]
    for i, entry in config["added_tokens_decoder"].items():
        tokens[int(i)] = entry["content"]
    return tokens


def write_gguf(
    path: Path,
    tensors: Mapping[str, Floats | tuple[NDArray[np.uint8], str]],
    fields: Mapping[str, Any],
    *,
    architecture: str,
    choose: Choose = lambda name, shape: "F32",
    tokens: list[str] | None = None,
    template: str | None = None,
    extra: Mapping[str, Any] | None = None,
    split_max_tensors: int = 0,
) -> dict[str, tuple[str, Floats]]:
    """Write a GGUF file, or several; for every tensor its type and what the package decodes it to.

    A tensor may also be given as raw blocks and the name of their type.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    for key, value in {**{f"{architecture}.{k}": v for k, v in fields.items()}, **(extra or {})}.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    if tokens is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_merges([f"a b{i}" for i in range(5)])
        writer.add_token_types([1] * len(tokens))
    if template is not None:
        writer.add_chat_template(template)
    decoded = {}
    for name, given in tensors.items():
        blocks, kind = given if isinstance(given, tuple) else encode(given, choose(name, given.shape))
        decoded[name] = kind, gguf.quants.dequantize(blocks, KINDS[kind]).astype(np.float32)
        if kind in ("F32", "F16"):
            writer.add_tensor(name, blocks)
        else:
            writer.add_tensor(name, blocks, raw_dtype=KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded


def of_checkpoint(
    path: Path,
    checkpoint: TinyCheckpoint,
    choose: Choose = lambda name, shape: "F32",
    *,
    fused: bool = False,
    change: Callable[[dict[str, Any]], None] = lambda tensors: None,
    architecture: str | None = None,
    extra: Mapping[str, Any] | None = None,
    split_max_tensors: int = 0,
    **fields: Any,
) -> dict[str, tuple[str, Floats]]:
    """The GGUF file of a tiny checkpoint, its tensors edited by ``change``; ``fields`` replace metadata, None omits."""
    values = {name: floats(words) for name, words in checkpoint.tensors.items()}
    tensors: dict[str, Any] = dict(gguf_tensors(checkpoint.config, values, fused=fused))
    change(tensors)
    moe = "num_experts" in checkpoint.config["text_config"]
    return write_gguf(
        path,
        tensors,
        metadata(checkpoint.config) | {key.replace("__", "."): value for key, value in fields.items()},
        architecture=architecture or ("qwen35moe" if moe else "qwen35"),
        choose=choose,
        tokens=token_list(checkpoint.frontend, checkpoint.config["text_config"]["vocab_size"]),
        template=checkpoint.frontend["chat_template.jinja"].decode(),
        extra=extra,
        split_max_tensors=split_max_tensors,
    )


def matrices_as(kind: str) -> Choose:
    """``kind`` for matrices, F32 for vectors and the convolution, as llama.cpp chooses."""
    return lambda name, shape: kind if len(shape) > 1 and "conv1d" not in name else "F32"


def wide(folder: Path, *, moe: bool = False, seed: int = 0, key_heads: int = 2) -> TinyCheckpoint:
    """A text-only checkpoint whose rows are whole K blocks, with three or more value heads per key head."""
    checkpoint = tiny_checkpoint(folder, moe=moe)
    text = checkpoint.config["text_config"]
    text |= {"hidden_size": 256, "head_dim": 64, "linear_num_key_heads": key_heads, "linear_num_value_heads": 8}
    text["linear_value_head_dim"] = 32
    text |= {"num_experts": 3, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512} if moe else {}
    text |= {} if moe else {"intermediate_size": 512}
    text["rope_parameters"]["mrope_section"] = [4, 2, 2]
    checkpoint.config["vision_config"] = None
    rng = np.random.default_rng(seed)
    checkpoint.tensors = {name: random_words(shape, rng) for name, shape in shapes_of(checkpoint.config).items()}
    for name, words in checkpoint.tensors.items():
        if name.endswith("norm.weight") or "_norm_" in name:
            words[np.abs(floats(words)) < 2.0**-16] = 0  # what w + 1 in float32 cannot hold
    return checkpoint.save()


def plan_gguf(path: Path, frontend: TinyCheckpoint | Path, **options: Any) -> ConversionPlan:
    folder = frontend if isinstance(frontend, Path) else frontend.folder
    return make_plan(BuildOptions(path, frontend=folder, **options))


def encode(values: Floats, kind: str) -> tuple[Any, str]:
    """Blocks of ``values`` in type ``kind``."""
    if kind in K_TYPES:
        return (_q6_k if kind == "Q6_K" else _q45_k)(values, kind), kind
    return gguf.quants.quantize(np.ascontiguousarray(values, np.float32), KINDS[kind]), kind


def _q45_k(values: Floats, kind: str) -> NDArray[np.uint8]:
    """d · scale · q − dmin · min: 8 sub-blocks of 32 with 6-bit scales and minima."""
    top = 15 if kind == "Q4_K" else 31
    x = values.reshape(-1, 8, 32)
    low = np.minimum(x.min(-1), 0)
    scale, minimum = (x.max(-1) - low).clip(0) / top, -low
    d, dmin = (v.max(-1, keepdims=True).astype(np.float16) for v in (scale / 63, minimum / 63))
    sc, mn = (_ratio(v, w).clip(0, 63).astype(np.uint8) for v, w in ((scale, d), (minimum, dmin)))
    step, base = d * sc.astype(np.float32), dmin * mn.astype(np.float32)
    q = _ratio(x + base[..., None], step[..., None]).clip(0, top).astype(np.uint8)
    packed = np.empty((len(x), 12), np.uint8)
    packed[:, :4] = sc[:, :4] | (sc[:, 4:] >> 4 << 6)
    packed[:, 4:8] = mn[:, :4] | (mn[:, 4:] >> 4 << 6)
    packed[:, 8:] = (sc[:, 4:] & 15) | (mn[:, 4:] & 15) << 4
    pairs = q.reshape(-1, 4, 2, 32)
    low_bits = ((pairs[:, :, 0] & 15) | (pairs[:, :, 1] & 15) << 4).reshape(len(x), 128)
    parts = [d.view(np.uint8), dmin.view(np.uint8), packed]
    if kind == "Q5_K":
        parts.append(np.bitwise_or.reduce([(q[:, j] >> 4) << j for j in range(8)]))
    return np.concatenate([*parts, low_bits], axis=1).reshape(*values.shape[:-1], -1)


def _q6_k(values: Floats, kind: str) -> NDArray[np.uint8]:
    """d · scale · (q − 32): 16 sub-blocks of 16 with 8-bit scales."""
    x = values.reshape(-1, 16, 16)
    scale = np.abs(x).max(-1) / 31
    d = (scale.max(-1, keepdims=True) / 127).astype(np.float16)
    sc = _ratio(scale, d).clip(-128, 127).astype(np.int8)
    q = (_ratio(x, (d * sc.astype(np.float32))[..., None]) + 32).clip(0, 63).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15) | (q[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce([(q[:, :, j] >> 4) << 2 * j for j in range(4)])
    parts = [low.reshape(len(x), 128), high.reshape(len(x), 64), sc.view(np.uint8), d.view(np.uint8)]
    return np.concatenate(parts, axis=1).reshape(*values.shape[:-1], -1)


def _ratio(values: Any, by: Any) -> Any:
    """Rounded quotient, zero where ``by`` is."""
    by = np.broadcast_to(by, values.shape).astype(np.float32)
    return np.rint(np.divide(values, by, out=np.zeros(values.shape, np.float32), where=by != 0))


def write_sparse_gguf(path: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], kind: str) -> None:
    """A GGUF file of a whole model that is all holes behind its header: matrices of type ``kind``, vectors F32."""
    architecture = "qwen35moe" if "num_experts" in config["text_config"] else "qwen35"
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata(config).items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        else:
            writer.add_uint32(f"{architecture}.{key}", value)
    end = 0
    for name, shape in shapes.items():
        chosen = KINDS[matrices_as(kind)(name, shape)]
        stored = gguf.quant_shape_to_byte_shape(shape, chosen)
        n_bytes = int(np.prod(stored, dtype=np.int64))
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), n_bytes, chosen)
        end += -(-n_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with open(path, "r+b") as stream:
        stream.truncate(-(-path.stat().st_size // 32) * 32 + end)


def gguf_shapes(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """What ``gguf_tensors`` does to tensors, for shapes alone."""
    n_layers, found = config["text_config"]["num_hidden_layers"], dict[str, tuple[int, ...]]()
    top = {"lm_head.weight": "output.weight", f"{TEXT}embed_tokens.weight": "token_embd.weight"}
    top[f"{TEXT}norm.weight"] = "output_norm.weight"
    for name, shape in shapes.items():
        if name in top:
            found[top[name]] = shape
            continue
        layer, rest = _place(name, n_layers)
        if rest == "mlp.experts.gate_up_proj":
            half = (shape[0], shape[1] // 2, shape[2])
            found |= {f"blk.{layer}.ffn_{part}_exps.weight": half for part in ("gate", "up")}
        else:
            squeezed = "conv1d" in rest or rest == "mlp.shared_expert_gate.weight"
            found[f"blk.{layer}.{NAMES[rest]}"] = tuple(n for n in shape if n > 1) if squeezed else shape
    return found
