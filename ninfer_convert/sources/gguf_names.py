"""How llama.cpp names and lays out the tensors of the two architectures, as tables (specs/conversion.md, GGUF sources).

Its converter changes four things, all undone here: zero-centred norm weights are stored plus one; ``A_log`` as
-exp(A_log); the convolution without its middle dimension; and value heads, grouped by key head in the checkpoint
(k0v0 k0v1 k1v0 k1v1), are tiled (k0v0 k1v0 k0v1 k1v1) wherever a tensor has a row, column or element per value head.
The ``gguf`` package has the names (``MODEL_ARCH.QWEN35``, ``QWEN35MOE``), llama.cpp's pull request 19468 the tiling,
20533 and 22673 the names of the draft layer, 19139 the fused expert bank (gate first).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.families import RowRun

Shape = tuple[int, ...]
Floats = NDArray[np.float32]
Change = Callable[[Floats], None]
"""Undoes an elementwise change in place."""
Axis = Literal["rows", "columns", "value rows"]

TEXT = "model.language_model."
_BLOCK = re.compile(r"blk\.(\d{1,4})\.(.+)")


def minus_one(values: Floats) -> None:
    """w from w + 1."""
    np.subtract(values, np.float32(1), out=values)


def log_of_minus(values: Floats) -> None:
    """A_log from -exp(A_log), by way of float64; NaN where the stored value is not negative."""
    with np.errstate(invalid="ignore", divide="ignore"):
        values[...] = np.log(-values.astype(np.float64))
    values[~np.isfinite(values)] = np.nan


@dataclass(frozen=True, slots=True)
class Rule:
    """One tensor of the checkpoint: ``name`` below its layer, and what llama.cpp does to it."""

    name: str
    heads: Axis | None = None
    """What is tiled by value head; ``value rows``: only the rows after those of queries and keys."""
    per_head: Literal["one", "value_dim"] = "value_dim"
    """Rows or columns per value head."""
    change: Change | None = None


def _norm(name: str) -> Rule:
    return Rule(name, change=minus_one)


TOP: Mapping[str, Rule] = {
    "token_embd.weight": Rule(f"{TEXT}embed_tokens.weight"),
    "output_norm.weight": _norm(f"{TEXT}norm.weight"),
    "output.weight": Rule("lm_head.weight"),
}
LAYER: Mapping[str, Rule] = {
    "attn_norm.weight": _norm("input_layernorm.weight"),
    "post_attention_norm.weight": _norm("post_attention_layernorm.weight"),
    "attn_q.weight": Rule("self_attn.q_proj.weight"),
    "attn_k.weight": Rule("self_attn.k_proj.weight"),
    "attn_v.weight": Rule("self_attn.v_proj.weight"),
    "attn_output.weight": Rule("self_attn.o_proj.weight"),
    "attn_q_norm.weight": _norm("self_attn.q_norm.weight"),
    "attn_k_norm.weight": _norm("self_attn.k_norm.weight"),
    "attn_qkv.weight": Rule("linear_attn.in_proj_qkv.weight", "value rows"),
    "attn_gate.weight": Rule("linear_attn.in_proj_z.weight", "rows"),
    "ssm_alpha.weight": Rule("linear_attn.in_proj_a.weight", "rows", "one"),
    "ssm_beta.weight": Rule("linear_attn.in_proj_b.weight", "rows", "one"),
    "ssm_a": Rule("linear_attn.A_log", "columns", "one", log_of_minus),
    "ssm_dt.bias": Rule("linear_attn.dt_bias", "columns", "one"),
    "ssm_conv1d.weight": Rule("linear_attn.conv1d.weight", "value rows"),
    "ssm_norm.weight": Rule("linear_attn.norm.weight"),  # the one norm that is not zero-centred
    "ssm_out.weight": Rule("linear_attn.out_proj.weight", "columns"),
    "ffn_gate.weight": Rule("mlp.gate_proj.weight"),
    "ffn_up.weight": Rule("mlp.up_proj.weight"),
    "ffn_down.weight": Rule("mlp.down_proj.weight"),
    "ffn_gate_inp.weight": Rule("mlp.gate.weight"),
    "ffn_gate_inp_shexp.weight": Rule("mlp.shared_expert_gate.weight"),
    "ffn_gate_shexp.weight": Rule("mlp.shared_expert.gate_proj.weight"),
    "ffn_up_shexp.weight": Rule("mlp.shared_expert.up_proj.weight"),
    "ffn_down_shexp.weight": Rule("mlp.shared_expert.down_proj.weight"),
    "ffn_down_exps.weight": Rule("mlp.experts.down_proj"),
    "ffn_gate_up_exps.weight": Rule("mlp.experts.gate_up_proj"),
}
GATE, UP = "ffn_gate_exps.weight", "ffn_up_exps.weight"
"""Two banks [experts, rows, width] that make one fused bank."""
DRAFT: Mapping[str, Rule] = {
    "nextn.eh_proj.weight": Rule("mtp.fc.weight"),
    "nextn.enorm.weight": _norm("mtp.pre_fc_norm_embedding.weight"),
    "nextn.hnorm.weight": _norm("mtp.pre_fc_norm_hidden.weight"),
    "nextn.shared_head_norm.weight": _norm("mtp.norm.weight"),
}


@dataclass(frozen=True, slots=True)
class Heads:
    """What the tiling and the layer numbers depend on."""

    n_layers: int
    """Decoder layers, without the draft layer."""
    keys: int
    values: int
    key_dim: int
    value_dim: int

    def grouped(self, per_head: int) -> NDArray[np.int64]:
        """Position in the tiled order of every row, in the checkpoint's order."""
        tiled = np.arange(self.values * per_head, dtype=np.int64).reshape(-1, self.keys, per_head)
        return tiled.transpose(1, 0, 2).reshape(-1)


@dataclass(frozen=True, slots=True)
class Logical:
    """A tensor of the checkpoint and how to make it: rows of stored tensors, then columns, then elements."""

    name: str
    shape: Shape
    runs: tuple[RowRun, ...]
    columns: NDArray[np.int64] | None = None
    """Stored column of every column."""
    change: Change | None = None

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of the stored tensors."""
        return tuple(dict.fromkeys(run.tensor for run in self.runs))


def logical_tensors(shapes: Mapping[str, Shape], heads: Heads) -> tuple[list[Logical], list[str]]:
    """The checkpoint's tensors for stored ``shapes`` (C order) by name, and the names that no rule knows.

    Shapes that do not fit the heads are passed on as they are stored: they cannot be those that the config requires.
    """
    found: list[Logical] = []
    unknown: list[str] = []
    for stored, shape in shapes.items():
        match = _BLOCK.fullmatch(stored)
        if match is None:
            rule, prefix = TOP.get(stored), ""
        else:
            layer, rest = int(match[1]), match[2]
            draft = layer >= heads.n_layers
            rule = LAYER.get(rest)
            prefix = f"mtp.layers.{layer - heads.n_layers}." if draft else f"{TEXT}layers.{layer}."
            if draft and rest in DRAFT:
                rule, prefix = DRAFT[rest], ""
            if rest in (GATE, UP) and f"blk.{layer}.{UP if rest == GATE else GATE}" in shapes:
                if rest == GATE:
                    found.append(_fused_bank(prefix, stored, f"blk.{layer}.{UP}", shapes))
                continue
        if rule is None:
            unknown.append(stored)
        else:
            found.append(_logical(prefix + rule.name, rule, stored, shape, heads))
    return found, unknown


def _logical(name: str, rule: Rule, stored: str, shape: Shape, heads: Heads) -> Logical:
    logical = _checkpoint_shape(rule, shape)
    n_rows = int(np.prod(shape[:-1], dtype=np.int64))
    whole = (RowRun(stored, 0, n_rows),)
    if rule.heads is None or heads.keys == heads.values:
        return Logical(name, logical, whole, change=rule.change)
    per_head = heads.value_dim if rule.per_head == "value_dim" else 1
    if rule.heads == "columns":
        columns = heads.grouped(per_head) if shape[-1] == heads.values * per_head else None
        return Logical(name, logical, whole, columns, rule.change)
    before = 2 * heads.keys * heads.key_dim if rule.heads == "value rows" else 0
    if n_rows != before + heads.values * per_head:
        return Logical(name, logical, whole, change=rule.change)
    order = before + heads.grouped(per_head)[::per_head]
    runs = [RowRun(stored, 0, before)] if before else []
    runs += [RowRun(stored, int(begin), per_head) for begin in order]
    return Logical(name, logical, tuple(runs), change=rule.change)


def _checkpoint_shape(rule: Rule, shape: Shape) -> Shape:
    """The shape with the dimensions of one that llama.cpp drops."""
    if rule.name.endswith("conv1d.weight") and len(shape) == 2:
        return shape[0], 1, shape[1]
    if rule.name.endswith("shared_expert_gate.weight") and len(shape) == 1:
        return 1, *shape
    return shape


def _fused_bank(prefix: str, gate: str, up: str, shapes: Mapping[str, Shape]) -> Logical:
    """Gate rows, then up rows, of every expert."""
    ours, theirs = shapes[gate], shapes[up]
    name = prefix + LAYER["ffn_gate_up_exps.weight"].name
    if ours != theirs or len(ours) != 3:
        return Logical(name, ours, (RowRun(gate, 0, int(np.prod(ours[:-1], dtype=np.int64))),))
    experts, rows, width = ours
    runs = [RowRun(stored, e * rows, rows) for e in range(experts) for stored in (gate, up)]
    return Logical(name, (experts, 2 * rows, width), tuple(runs))
