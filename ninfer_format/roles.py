"""What every stored tensor is: one table of roles with their shapes, fused parts and permitted formats.

A role is an object name with the layer number replaced by ``*``. A shape is written as one name per dimension, a
``+`` sum where a matrix is several fused by rows; the names are widths of the role's block (``_*_widths`` below). The
order of ``ROLES`` is the order of every inventory. Specification: ``specs/inventory.md``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from ninfer_format.errors import InventoryError
from ninfer_format.formats import NUMERIC_FORMATS
from ninfer_format.model_geometry import LayerKind, ModelGeometry

Style = Literal["split", "fused", "moe"]
"""Naming of the decoder: dense with separate projections, dense with fused ones, mixture of experts."""

Widths = Mapping[str, int]
STYLES: tuple[Style, ...] = ("split", "fused", "moe")
MATRIX_FORMATS = tuple(f.name for f in NUMERIC_FORMATS.values() if f.name == "BF16" or f.kind == "grouped")
LAYER_MARK = "/layers/*/"
_LAYERED_NAME = re.compile(r"(.+?/layers/)(0|[1-9][0-9]*)(/.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Role:
    """One row of the table.

    ``dims`` names the dimensions; ``formats`` are those a recipe may choose (one for tensors that are never
    quantized); ``divisor_of`` is the NVFP4 matrix whose activation divisor this scalar is.
    """

    name: str
    dims: tuple[str, ...]
    formats: tuple[str, ...]
    styles: tuple[Style, ...]
    widths: Callable[[ModelGeometry], Widths]
    divisor_of: str | None = None

    @property
    def is_matrix(self) -> bool:
        """Whether recipes choose this role's format."""
        return len(self.formats) > 1

    @property
    def layer_prefix(self) -> str | None:
        """``text/layers/*/`` and the like for a role repeated per layer, else None."""
        head, mark, _ = self.name.partition(LAYER_MARK)
        return head + mark if mark else None

    @property
    def mixer(self) -> LayerKind | None:
        """The layer kind a decoder role belongs to; None where every layer has it."""
        for kind in ("gdn", "attention"):
            if self.name.startswith(f"text/layers/*/{kind}/"):
                return kind
        return None


@dataclass(frozen=True, slots=True)
class _Row:
    dims: tuple[str, ...]
    formats: tuple[str, ...]
    styles: tuple[Style, ...] = STYLES
    divisor: str | None = None


def _matrix(rows: str, columns: str, *styles: Style, divisor: str | None = None) -> _Row:
    """A quantizable matrix; with ``divisor`` it may be NVFP4 and is then followed by that scalar."""
    formats = (*MATRIX_FORMATS, "NVFP4") if divisor else MATRIX_FORMATS
    return _Row((rows, columns), formats, styles or STYLES, divisor)


def _kept(format: str, *dims: str, styles: tuple[Style, ...] = STYLES) -> _Row:
    """A tensor that every recipe stores in the same format."""
    return _Row(dims, (format,), styles)


_DENSE: tuple[Style, ...] = ("split", "fused")
_MOE: tuple[Style, ...] = ("moe",)

_ATTENTION = {
    "query_key": _matrix("query+key", "hidden", "split"),
    "gate_value": _matrix("gate+value", "hidden", "split"),
    "query_key_gate_value": _matrix("query+key+gate+value", "hidden", "fused", "moe", divisor="input_projection"),
    "query_norm": _kept("BF16", "head_dim"),
    "key_norm": _kept("BF16", "head_dim"),
    "output": _matrix("hidden", "query", divisor="output_projection"),
}
_GDN = {
    "a_log": _kept("FP32", "heads"),
    "dt_bias": _kept("FP32", "heads"),
    "convolution": _kept("BF16", "taps", "channels"),
    "a_projection": _kept("BF16", "a", "hidden", styles=_DENSE),
    "b_projection": _kept("BF16", "b", "hidden", styles=_DENSE),
    "a_b_projection": _kept("BF16", "a+b", "hidden", styles=_MOE),
    "query_key": _matrix("query+key", "hidden", "split"),
    "value_z": _matrix("value+z", "hidden", "split"),
    "query_key_value_z": _matrix("query+key+value+z", "hidden", "fused", "moe", divisor="input_projection"),
    "norm": _kept("BF16", "value_dim"),
    "output": _matrix("hidden", "value", divisor="output_projection"),
}
_MLP = {
    "gate_up": _matrix("gate+up", "hidden", *_DENSE, divisor="gate_up_projection"),
    "down": _matrix("hidden", "width", *_DENSE, divisor="down_projection"),
}
_EXPERTS = {
    "router_shared_gate": _kept("BF16", "router+shared_gate", "hidden", styles=_MOE),
    "routed_gate_up": _matrix("expert_gate_up", "hidden", *_MOE, divisor="routed_gate_up_projection"),
    "routed_down": _matrix("expert_down", "expert_width", *_MOE, divisor="routed_down_projection"),
    "shared_gate_up": _matrix("gate+up", "hidden", *_MOE, divisor="shared_gate_up_projection"),
    "shared_down": _matrix("hidden", "width", *_MOE, divisor="shared_down_projection"),
}
_VISION_LAYER = {
    "attention/qkv": _matrix("query+key+value", "hidden"),
    "attention/qkv_bias": _kept("BF16", "query+key+value"),
    "attention/output": _matrix("hidden", "hidden"),
    "attention/output_bias": _kept("BF16", "hidden"),
    "mlp/fc1": _matrix("width", "hidden"),
    "mlp/fc1_bias": _kept("BF16", "width"),
    "mlp/fc2": _matrix("hidden", "width"),
    "mlp/fc2_bias": _kept("BF16", "hidden"),
    "norm1/weight": _kept("BF16", "hidden"),
    "norm1/bias": _kept("BF16", "hidden"),
    "norm2/weight": _kept("BF16", "hidden"),
    "norm2/bias": _kept("BF16", "hidden"),
}
_DFLASH_LAYER = {
    "input_norm": _kept("BF16", "hidden"),
    "attention/query_key_value": _matrix("query+key+value", "hidden"),
    "attention/query_norm": _kept("BF16", "head_dim"),
    "attention/key_norm": _kept("BF16", "head_dim"),
    "attention/output": _matrix("hidden", "query"),
    "post_attention_norm": _kept("BF16", "hidden"),
    "mlp/gate_up": _matrix("gate+up", "hidden"),
    "mlp/down": _matrix("hidden", "width"),
}


def _text_widths(g: ModelGeometry) -> Widths:
    t = g.text
    return {"hidden": t.hidden, "twice_hidden": 2 * t.hidden, "vocab": t.vocab_rows, "draft": g.draft_head_rows}


def _attention_widths(g: ModelGeometry) -> Widths:
    t = g.text
    query, key = t.n_heads * t.head_dim, t.n_kv_heads * t.head_dim
    return {"hidden": t.hidden, "query": query, "key": key, "gate": query, "value": key, "head_dim": t.head_dim}


def _gdn_widths(g: ModelGeometry) -> Widths:
    t = g.text
    key, value = t.gdn_key_heads * t.gdn_key_dim, t.gdn_value_heads * t.gdn_value_dim
    heads = t.gdn_value_heads
    projections = {"query": key, "key": key, "value": value, "z": value, "a": heads, "b": heads}
    inner = {"heads": heads, "taps": t.conv_taps, "channels": 2 * key + value, "value_dim": t.gdn_value_dim}
    return {"hidden": t.hidden, **projections, **inner}


def _mlp_widths(g: ModelGeometry) -> Widths:
    width = g.text.mlp_width or 0
    return {"hidden": g.text.hidden, "gate": width, "up": width, "width": width}


def _expert_widths(g: ModelGeometry) -> Widths:
    t = g.text
    shared = {"gate": t.shared_width, "up": t.shared_width, "width": t.shared_width}
    banks = {"expert_gate_up": 2 * t.n_experts * t.expert_width, "expert_down": t.n_experts * t.hidden}
    router = {"router": t.n_experts, "shared_gate": 1}
    return {"hidden": t.hidden, "expert_width": t.expert_width, **shared, **banks, **router}


def _vision_widths(g: ModelGeometry) -> Widths:
    v = g.vision
    if v is None:
        raise InventoryError("a vision role was asked for, but the model has no vision tower")
    h = v.hidden
    patch = v.in_channels * v.temporal_patch * v.patch * v.patch
    merger = {"merged": h * v.merge * v.merge, "out": v.out_width, "patch": patch, "positions": v.n_positions}
    return {"hidden": h, "query": h, "key": h, "value": h, "width": v.mlp_width, **merger}


def _dflash_widths(g: ModelGeometry) -> Widths:
    d = g.dflash
    if d is None:
        raise InventoryError("a DFlash role was asked for, but the model has no DFlash companion")
    key = d.n_kv_heads * d.head_dim
    attention = {"query": d.n_heads * d.head_dim, "key": key, "value": key, "head_dim": d.head_dim}
    mlp = {"gate": d.mlp_width, "up": d.mlp_width, "width": d.mlp_width}
    return {"hidden": d.hidden, "features": d.n_taps * g.text.hidden, **attention, **mlp}


_HIDDEN_NORM = _kept("BF16", "hidden")
_BLOCKS: tuple[tuple[str, Callable[[ModelGeometry], Widths], Mapping[str, _Row]], ...] = (
    ("text/", _text_widths, {"token_embedding": _matrix("vocab", "hidden")}),
    ("text/layers/*/", _text_widths, {"input_norm": _HIDDEN_NORM}),
    ("text/layers/*/attention/", _attention_widths, _ATTENTION),
    ("text/layers/*/gdn/", _gdn_widths, _GDN),
    ("text/layers/*/", _text_widths, {"post_attention_norm": _HIDDEN_NORM}),
    ("text/layers/*/mlp/", _mlp_widths, _MLP),
    ("text/layers/*/moe/", _expert_widths, _EXPERTS),
    ("text/", _text_widths, {
        "final_norm": _HIDDEN_NORM,
        "output_head": _matrix("vocab", "hidden"),
        "draft_head": _matrix("draft", "hidden"),
        "draft_head_token_ids": _kept("I32", "draft"),
    }),
    ("mtp/", _text_widths, {
        "input_projection": _matrix("hidden", "twice_hidden"),
        "embedding_norm": _HIDDEN_NORM,
        "hidden_norm": _HIDDEN_NORM,
        "layer/input_norm": _HIDDEN_NORM,
    }),
    ("mtp/layer/attention/", _attention_widths, {
        name: replace(row, styles=STYLES) for name, row in _ATTENTION.items() if name not in ("query_key", "gate_value")
    }),
    ("mtp/layer/", _text_widths, {"post_attention_norm": _HIDDEN_NORM}),
    ("mtp/layer/mlp/", _mlp_widths, _MLP),
    ("mtp/layer/moe/", _expert_widths, _EXPERTS),
    ("mtp/", _text_widths, {"final_norm": _HIDDEN_NORM}),
    ("vision/", _vision_widths, {
        "patch_embedding": _matrix("hidden", "patch"),
        "patch_embedding_bias": _HIDDEN_NORM,
        "position_embedding": _kept("BF16", "positions", "hidden"),
    }),
    ("vision/layers/*/", _vision_widths, _VISION_LAYER),
    ("vision/merger/", _vision_widths, {
        "fc1": _matrix("merged", "merged"),
        "fc1_bias": _kept("BF16", "merged"),
        "fc2": _matrix("out", "merged"),
        "fc2_bias": _kept("BF16", "out"),
        "norm/weight": _HIDDEN_NORM,
        "norm/bias": _HIDDEN_NORM,
    }),
    ("dflash/", _dflash_widths, {"feature_projection": _matrix("hidden", "features"), "context_norm": _HIDDEN_NORM}),
    ("dflash/layers/*/", _dflash_widths, _DFLASH_LAYER),
    ("dflash/", _dflash_widths, {"final_norm": _HIDDEN_NORM}),
)  # fmt: skip


def _all_roles() -> Mapping[str, Role]:
    roles: dict[str, Role] = {}
    for prefix, widths, rows in _BLOCKS:
        in_text = prefix.startswith("text/")
        for suffix, row in rows.items():
            name = prefix + suffix
            formats = row.formats if in_text else tuple(f for f in row.formats if f != "NVFP4")
            roles[name] = Role(name, row.dims, formats, row.styles, widths)
            if row.divisor and in_text:
                scalar = f"{prefix}{row.divisor}/input_scale_divisor"
                roles[scalar] = Role(scalar, (), ("FP32",), row.styles, widths, divisor_of=name)
    return MappingProxyType(roles)


ROLES: Mapping[str, Role] = _all_roles()


def role_named(name: str) -> Role:
    """The role called ``name``; InventoryError otherwise."""
    try:
        return ROLES[name]
    except KeyError:
        raise InventoryError(f"{name[:120]!r} is not a role of any model this release knows") from None


def role_of(object_name: str) -> tuple[str, int | None]:
    """``text/layers/7/mlp/down`` → (``text/layers/*/mlp/down``, 7); a name without a layer is its own role."""
    match = _LAYERED_NAME.fullmatch(object_name)
    if match is None or len(match[2]) > 9:
        return object_name, None
    return f"{match[1]}*{match[3]}", int(match[2])


def object_name(role: str, layer: int | None) -> str:
    """Name of the object of ``role`` on ``layer`` (None for roles outside the layer stacks)."""
    return role if layer is None else role.replace("*", str(layer), 1)


def styles_of(geometry: ModelGeometry) -> tuple[Style, ...]:
    """Namings that a model of this architecture may use."""
    return _MOE if geometry.architecture == "qwen3_5_moe" else _DENSE


def roles_present(geometry: ModelGeometry, style: Style) -> tuple[Role, ...]:
    """Roles of this model in inventory order, activation divisors left out."""
    present = {
        "text": True,
        "mtp": geometry.text.mtp_layers > 0,
        "vision": geometry.vision is not None,
        "dflash": geometry.dflash is not None,
    }
    roles = (r for r in ROLES.values() if r.divisor_of is None and style in r.styles)
    return tuple(r for r in roles if present[r.name.partition("/")[0]])


def layer_count(geometry: ModelGeometry, layer_prefix: str) -> int:
    """How often roles under ``text/layers/*/``, ``vision/layers/*/`` or ``dflash/layers/*/`` repeat."""
    tower = layer_prefix.partition("/")[0]
    if tower == "text":
        return geometry.text.n_layers
    if tower == "vision":
        return geometry.vision.depth if geometry.vision else 0
    return geometry.dflash.n_layers if geometry.dflash else 0


def role_on_layer(geometry: ModelGeometry, role: Role, layer: int) -> bool:
    """Whether ``role`` has an object on ``layer``: the layer exists and is of the role's mixer kind."""
    if role.layer_prefix is None or not 0 <= layer < layer_count(geometry, role.layer_prefix):
        return False
    return role.mixer is None or geometry.text.layer_kinds[layer] == role.mixer


def role_shape(geometry: ModelGeometry, role: str) -> tuple[int, ...]:
    """Logical stored shape of ``role``: [output rows, input columns] for matrices, ``()`` for scalars."""
    spec = role_named(role)
    widths = spec.widths(geometry)
    return tuple(sum(widths[name] for name in dim.split("+")) for dim in spec.dims)


def row_views(geometry: ModelGeometry, role: str) -> tuple[tuple[str, int, int], ...]:
    """Named row ranges (part, begin, end) of a fused tensor in stored order; empty where rows have one meaning.

    Parts: query, key, gate, value, z, up, a, b, router, shared_gate. Expert banks: ``expert_rows``.
    """
    spec = role_named(role)
    if not spec.dims or "+" not in spec.dims[0]:
        return ()
    widths, views, begin = spec.widths(geometry), [], 0
    for part in spec.dims[0].split("+"):
        views.append((part, begin, begin + widths[part]))
        begin += widths[part]
    return tuple(views)


def expert_rows(geometry: ModelGeometry, role: str, expert: int) -> tuple[tuple[str, int, int], ...]:
    """Row ranges of one expert inside ``routed_gate_up`` (gate, up) or ``routed_down`` (down)."""
    text = geometry.text
    if not 0 <= expert < text.n_experts:
        raise InventoryError(f"expert {expert} does not exist; the model has experts 0 to {text.n_experts - 1}")
    bank = role_named(role).dims[0]
    if bank == "expert_gate_up":
        begin, width = 2 * expert * text.expert_width, text.expert_width
        return ("gate", begin, begin + width), ("up", begin + width, begin + 2 * width)
    if bank == "expert_down":
        return (("down", expert * text.hidden, (expert + 1) * text.hidden),)
    raise InventoryError(f"{role!r} is not a bank of routed experts")
