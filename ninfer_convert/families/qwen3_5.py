"""Qwen3.5 family, dense and mixture of experts, with MTP, vision and DFlash: source names → stored objects, as tables.

Object names, shapes and the fused parts of each matrix come from ``ninfer_format``; the tables below only say which
source tensor holds which part. Specification: ``specs/conversion.md``; facts: the checkpoints' own names.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ninfer_convert.families.row_maps import ObjectSource, Origin, RowRun, Transform
from ninfer_format import Inventory, ModelConfig, ModelGeometry, ResourceEntry, TensorEntry
from ninfer_format.formats import layout_for
from ninfer_format.roles import expert_rows, object_name, role_named, role_shape, row_views

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """The object is one source tensor."""

    tensor: str
    transform: Transform = "rows"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A source matrix whose rows are ``parts``, one after the other, or alternating head by head."""

    tensor: str
    parts: tuple[str, ...]
    per_head: bool = False


@dataclass(frozen=True, slots=True)
class Bank:
    """Expert rows: one tensor [experts, rows, columns], or one matrix per expert and part (``{e}``)."""

    fused: str
    per_expert: Mapping[str, str]


Origins = Whole | Bank | tuple[Matrix, ...]

_ATTENTION = (
    Matrix("self_attn.q_proj.weight", ("query", "gate"), per_head=True),
    Matrix("self_attn.k_proj.weight", ("key",)),
    Matrix("self_attn.v_proj.weight", ("value",)),
)
_GDN = (
    Matrix("linear_attn.in_proj_qkv.weight", ("query", "key", "value")),
    Matrix("linear_attn.in_proj_z.weight", ("z",)),
    Matrix("linear_attn.in_proj_a.weight", ("a",)),
    Matrix("linear_attn.in_proj_b.weight", ("b",)),
)
_MLP = (Matrix("mlp.gate_proj.weight", ("gate",)), Matrix("mlp.up_proj.weight", ("up",)))
_SHARED = (
    Matrix("mlp.shared_expert.gate_proj.weight", ("gate",)),
    Matrix("mlp.shared_expert.up_proj.weight", ("up",)),
)
_ROUTER = (Matrix("mlp.gate.weight", ("router",)), Matrix("mlp.shared_expert_gate.weight", ("shared_gate",)))
_GATE_UP = Bank(
    "mlp.experts.gate_up_proj",
    {"gate": "mlp.experts.{e}.gate_proj.weight", "up": "mlp.experts.{e}.up_proj.weight"},
)
_DOWN = Bank("mlp.experts.down_proj", {"down": "mlp.experts.{e}.down_proj.weight"})

_DECODER_LAYER: Mapping[str, Origins] = {
    "input_norm": Whole("input_layernorm.weight"),
    "post_attention_norm": Whole("post_attention_layernorm.weight"),
    "attention/query_key": _ATTENTION,
    "attention/gate_value": _ATTENTION,
    "attention/query_key_gate_value": _ATTENTION,
    "attention/query_norm": Whole("self_attn.q_norm.weight"),
    "attention/key_norm": Whole("self_attn.k_norm.weight"),
    "attention/output": Whole("self_attn.o_proj.weight"),
    "gdn/a_log": Whole("linear_attn.A_log", "widen"),
    "gdn/dt_bias": Whole("linear_attn.dt_bias", "widen"),
    "gdn/convolution": Whole("linear_attn.conv1d.weight", "conv_transpose"),
    "gdn/a_projection": Whole("linear_attn.in_proj_a.weight"),
    "gdn/b_projection": Whole("linear_attn.in_proj_b.weight"),
    "gdn/a_b_projection": _GDN,
    "gdn/query_key": _GDN,
    "gdn/value_z": _GDN,
    "gdn/query_key_value_z": _GDN,
    "gdn/norm": Whole("linear_attn.norm.weight"),
    "gdn/output": Whole("linear_attn.out_proj.weight"),
    "mlp/gate_up": _MLP,
    "mlp/down": Whole("mlp.down_proj.weight"),
    "moe/router_shared_gate": _ROUTER,
    "moe/routed_gate_up": _GATE_UP,
    "moe/routed_down": _DOWN,
    "moe/shared_gate_up": _SHARED,
    "moe/shared_down": Whole("mlp.shared_expert.down_proj.weight"),
}
_VISION_LAYER: Mapping[str, Origins] = {
    "attention/qkv": Whole("attn.qkv.weight"),
    "attention/qkv_bias": Whole("attn.qkv.bias"),
    "attention/output": Whole("attn.proj.weight"),
    "attention/output_bias": Whole("attn.proj.bias"),
    "mlp/fc1": Whole("mlp.linear_fc1.weight"),
    "mlp/fc1_bias": Whole("mlp.linear_fc1.bias"),
    "mlp/fc2": Whole("mlp.linear_fc2.weight"),
    "mlp/fc2_bias": Whole("mlp.linear_fc2.bias"),
    "norm1/weight": Whole("norm1.weight"),
    "norm1/bias": Whole("norm1.bias"),
    "norm2/weight": Whole("norm2.weight"),
    "norm2/bias": Whole("norm2.bias"),
}
_DFLASH_LAYER: Mapping[str, Origins] = {
    "input_norm": Whole("input_layernorm.weight"),
    "attention/query_key_value": (
        Matrix("self_attn.q_proj.weight", ("query",)),
        Matrix("self_attn.k_proj.weight", ("key",)),
        Matrix("self_attn.v_proj.weight", ("value",)),
    ),
    "attention/query_norm": Whole("self_attn.q_norm.weight"),
    "attention/key_norm": Whole("self_attn.k_norm.weight"),
    "attention/output": Whole("self_attn.o_proj.weight"),
    "post_attention_norm": Whole("post_attention_layernorm.weight"),
    "mlp/gate_up": _MLP,
    "mlp/down": Whole("mlp.down_proj.weight"),
}
_TEXT: Mapping[str, Origins] = {
    "token_embedding": Whole("embed_tokens.weight"),
    "final_norm": Whole("norm.weight"),
}
_MTP: Mapping[str, Origins] = {
    "input_projection": Whole("fc.weight"),
    "embedding_norm": Whole("pre_fc_norm_embedding.weight"),
    "hidden_norm": Whole("pre_fc_norm_hidden.weight"),
    "final_norm": Whole("norm.weight"),
}
_VISION: Mapping[str, Origins] = {
    "patch_embedding": Whole("patch_embed.proj.weight"),
    "patch_embedding_bias": Whole("patch_embed.proj.bias"),
    "position_embedding": Whole("pos_embed.weight"),
    "merger/fc1": Whole("merger.linear_fc1.weight"),
    "merger/fc1_bias": Whole("merger.linear_fc1.bias"),
    "merger/fc2": Whole("merger.linear_fc2.weight"),
    "merger/fc2_bias": Whole("merger.linear_fc2.bias"),
    "merger/norm/weight": Whole("merger.norm.weight"),
    "merger/norm/bias": Whole("merger.norm.bias"),
}
_DFLASH: Mapping[str, Origins] = {
    "feature_projection": Whole("fc.weight"),
    "context_norm": Whole("hidden_norm.weight"),
    "final_norm": Whole("norm.weight"),
}
# Role prefix → (source prefix, table); the first that fits counts. {text}, {vision}: as the checkpoint has it.
_BLOCKS: tuple[tuple[str, str, Mapping[str, Origins]], ...] = (
    ("text/layers/*/", "{text}layers.{layer}.", _DECODER_LAYER),
    ("text/", "{text}", _TEXT),
    ("mtp/layer/", "mtp.layers.0.", _DECODER_LAYER),
    ("mtp/", "mtp.", _MTP),
    ("vision/layers/*/", "{vision}blocks.{layer}.", _VISION_LAYER),
    ("vision/", "{vision}", _VISION),
    ("dflash/layers/*/", "layers.{layer}.", _DFLASH_LAYER),
    ("dflash/", "", _DFLASH),
)
_HEADS: Mapping[str, Transform] = {"text/output_head": "rows", "text/draft_head": "draft_rows"}


@dataclass(frozen=True, slots=True)
class Names:
    """How a checkpoint spells its prefixes, and which tensor is the output head."""

    text: str
    vision: str
    lm_head: str
    """Where a head of its own would be."""
    tied: bool

    @property
    def embedding(self) -> str:
        """Name of the token embedding."""
        return self.text + "embed_tokens.weight"

    @property
    def head(self) -> str:
        """Name of the tensor that the output head is made from."""
        return self.embedding if self.tied else self.lm_head


_TEXT_PREFIXES = (("model.language_model.", ""), ("language_model.model.", "language_model."), ("model.", ""))
_VISION_PREFIXES = ("model.visual.", "visual.")


def spelling(stored: Container[str], *, tied: bool) -> Names:
    """Names as in ``stored``: the official prefixes, or those of text-only and re-saved checkpoints.

    A tied head is the embedding.
    """
    found = (p for p in _TEXT_PREFIXES if p[0] + "embed_tokens.weight" in stored)
    text, root = next(found, _TEXT_PREFIXES[0])
    vision = next((p for p in _VISION_PREFIXES if p + "patch_embed.proj.weight" in stored), _VISION_PREFIXES[0])
    return Names(text, vision, root + "lm_head.weight", tied)


@dataclass(slots=True)
class SourceMap:
    """Object sources in inventory order, and the shape that every source tensor must have, by origin and name."""

    sources: tuple[ObjectSource, ...] = ()
    shapes: dict[Origin, dict[str, Shape]] = field(default_factory=lambda: {"base": {}, "packed": {}, "dflash": {}})


def object_sources(config: ModelConfig, inventory: Inventory, stored: Container[str], names: Names) -> SourceMap:
    """Where every object of ``inventory`` comes from, for a checkpoint with the tensor names ``stored``.

    ``stored`` only decides how expert banks are spelled; whether the tensors exist with the shapes of the result is
    for the caller to check.
    """
    geometry, result = config.geometry, SourceMap()
    sources = []
    for entry in inventory.objects:
        if isinstance(entry, ResourceEntry):
            sources.append(ObjectSource(entry.name, "resource"))
            continue
        role, layer = inventory.roles[entry.name]
        sources.append(tensor_source(geometry, names, stored, entry, role, layer, result))
    result.sources = tuple(sources)
    return result


def tensor_source(
    geometry: ModelGeometry,
    names: Names,
    stored: Container[str],
    entry: TensorEntry,
    role: str,
    layer: int | None,
    result: SourceMap,
) -> ObjectSource:
    """Where one tensor object comes from; the source shapes it needs are added to ``result``."""
    origin: Origin = "dflash" if role.startswith("dflash/") else "base"
    shapes = result.shapes[origin]
    if role == "text/draft_head_token_ids":
        return ObjectSource(entry.name, "draft_ids")
    if (matrix := role_named(role).divisor_of) is not None:
        shape = role_shape(geometry, matrix)
        whole = TensorEntry(object_name(matrix, layer), shape, "NVFP4", layout_for("NVFP4"), 0, 0)
        fused = tensor_source(geometry, names, stored, whole, matrix, layer, result)
        return ObjectSource(entry.name, "input_divisor", fused.runs, 0, origin)
    if role in _HEADS:
        rows, width = geometry.text.vocab_rows, geometry.text.hidden
        shapes[names.head] = (rows, width)
        return ObjectSource(entry.name, _HEADS[role], (RowRun(names.head, 0, rows),), width)
    prefix, source = _look_up(role)
    prefix = prefix.format(text=names.text, vision=names.vision, layer=layer)
    width = entry.shape[-1]
    if isinstance(source, Whole):
        name, shape = prefix + source.tensor, _whole_shape(geometry, role, entry.shape)
        shapes[name] = shape
        if source.transform == "conv_transpose":
            return ObjectSource(entry.name, source.transform, (RowRun(name, 0, shape[0]),), shape[-1], origin)
        n_rows = entry.shape[0] if len(entry.shape) > 1 else 1
        return ObjectSource(entry.name, source.transform, (RowRun(name, 0, n_rows),), width, origin)
    if isinstance(source, Bank):
        runs = _bank_runs(geometry, role, prefix, source, entry.shape, stored, shapes)
    else:
        runs = _fused_runs(geometry, role, prefix, source, width, shapes)
    return ObjectSource(entry.name, "rows", _merged(runs), width, origin)


def _merged(runs: Iterable[RowRun]) -> tuple[RowRun, ...]:
    """The same rows in fewer runs: neighbours that continue each other are joined."""
    merged: list[RowRun] = []
    for run in runs:
        if merged and merged[-1].tensor == run.tensor and merged[-1].begin + merged[-1].count == run.begin:
            run = RowRun(run.tensor, merged[-1].begin, merged.pop().count + run.count)
        merged.append(run)
    return tuple(merged)


def _look_up(role: str) -> tuple[str, Origins]:
    block, source_prefix, table = next(row for row in _BLOCKS if role.startswith(row[0]))
    return source_prefix, table[role[len(block) :]]


def _whole_shape(geometry: ModelGeometry, role: str, stored_shape: Shape) -> Shape:
    """Source shape of a tensor that is taken whole: the stored one but for the two convolutions."""
    if role == "vision/patch_embedding" and (v := geometry.vision) is not None:
        return v.hidden, v.in_channels, v.temporal_patch, v.patch, v.patch
    if role == "text/layers/*/gdn/convolution":
        taps, channels = stored_shape
        return channels, 1, taps
    return stored_shape


def _fused_runs(
    geometry: ModelGeometry, role: str, prefix: str, matrices: Sequence[Matrix], width: int, shapes: dict[str, Shape]
) -> Iterator[RowRun]:
    """Runs of a matrix fused from parts, in the stored order of its parts."""
    widths = role_named(role).widths(geometry)
    for part, begin, end in row_views(geometry, role):
        matrix = next(m for m in matrices if part in m.parts)
        name = prefix + matrix.tensor
        shapes[name] = (sum(widths[p] for p in matrix.parts), width)
        index = matrix.parts.index(part)
        if not matrix.per_head:
            yield RowRun(name, sum(widths[p] for p in matrix.parts[:index]), end - begin)
            continue
        rows = widths["head_dim"]
        for head in range((end - begin) // rows):
            yield RowRun(name, (head * len(matrix.parts) + index) * rows, rows)


def _bank_runs(
    geometry: ModelGeometry,
    role: str,
    prefix: str,
    bank: Bank,
    stored_shape: Shape,
    stored: Container[str],
    shapes: dict[str, Shape],
) -> Iterator[RowRun]:
    """Runs of a bank of experts; matrices per expert are used where any is stored and no fused tensor is."""
    n_experts, (n_rows, width) = geometry.text.n_experts, stored_shape
    apart = (prefix + name.format(e=e) for e in range(n_experts) for name in bank.per_expert.values())
    if prefix + bank.fused in stored or not any(name in stored for name in apart):
        shapes[prefix + bank.fused] = (n_experts, n_rows // n_experts, width)
        yield RowRun(prefix + bank.fused, 0, n_rows)
        return
    for expert in range(n_experts):
        for part, begin, end in expert_rows(geometry, role, expert):
            name = prefix + bank.per_expert[part].format(e=expert)
            shapes[name] = (end - begin, width)
            yield RowRun(name, 0, end - begin)


def converted_prefixes(config: ModelConfig, names: Names, origin: Origin) -> tuple[str, ...]:
    """Prefixes of source tensors that belong to what is converted: an unused tensor there would be lost silently."""
    text = config.geometry.text
    if origin == "dflash":
        dflash = config.geometry.dflash
        return tuple(f"layers.{layer}." for layer in range(dflash.n_layers)) if dflash else ()
    layers = tuple(f"{names.text}layers.{layer}." for layer in range(text.n_layers))
    vision = (names.vision,) if config.geometry.vision else ()
    mtp = ("mtp.",) if text.mtp_layers else ()
    stems = (names.text + "embed_tokens.", names.text + "norm.", names.head.removesuffix("weight"))
    return (*layers, *vision, *mtp, *stems)
