"""The integers that decide an inventory: widths, counts and layer kinds of one model of the two architectures.

Names and shapes follow from these numbers alone (``roles.py``); nothing here knows mathematics. Member names are
those of a Hugging Face ``config.json``. Specification: ``specs/inventory.md``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ninfer_format.errors import InventoryError
from ninfer_format.geometry import up

Architecture = Literal["qwen3_5", "qwen3_5_moe"]
LayerKind = Literal["gdn", "attention"]

MAX_LAYERS = 1024
"""Most layers of one tower: ten times any known model, and small enough that a hostile config stays cheap."""
MAX_WIDTH = 1 << 20
MAX_VOCABULARY = 1 << 24
MAX_COUNT = 1 << 16
"""Most heads or experts. With MAX_WIDTH it keeps every expert bank below 2^63 bytes."""
DRAFT_HEAD_ROWS = 131_072
DRAFT_HEAD_ROW_MULTIPLE = 128

LAYER_KINDS: Mapping[str, LayerKind] = {"linear_attention": "gdn", "full_attention": "attention"}


@dataclass(frozen=True, slots=True)
class TextGeometry:
    """The decoder. ``mlp_width`` is None for a mixture of experts; the four expert fields are 0 for a dense model."""

    hidden: int
    layer_kinds: tuple[LayerKind, ...]
    vocab_rows: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    conv_taps: int
    mlp_width: int | None
    n_experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int
    mtp_layers: int

    @property
    def n_layers(self) -> int:
        """Decoder layers, without the MTP layer."""
        return len(self.layer_kinds)


@dataclass(frozen=True, slots=True)
class VisionGeometry:
    """The vision tower; ``patch`` in pixels, ``temporal_patch`` in frames, ``merge`` in patches per side."""

    depth: int
    hidden: int
    n_heads: int
    mlp_width: int
    out_width: int
    in_channels: int
    patch: int
    temporal_patch: int
    merge: int
    n_positions: int


@dataclass(frozen=True, slots=True)
class DflashGeometry:
    """The DFlash companion; ``n_taps`` target layers feed its feature projection."""

    hidden: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    mlp_width: int
    n_taps: int


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """All towers of one model and the row count of its optimized proposal head."""

    architecture: Architecture
    text: TextGeometry
    vision: VisionGeometry | None
    dflash: DflashGeometry | None
    draft_head_rows: int


def draft_head_rows(addressable_ids: int) -> int:
    """Rows of the proposal head for a tokenizer with ``addressable_ids`` ids.

    131,072 when there are at least that many ids, otherwise half of them rounded up to a multiple of 128; a
    vocabulary too small for that multiple keeps all its ids.
    """
    if addressable_ids < 1:
        raise InventoryError(f"a tokenizer with {addressable_ids} ids has no proposal head; expected at least 1 id")
    if addressable_ids >= DRAFT_HEAD_ROWS:
        return DRAFT_HEAD_ROWS
    return min(addressable_ids, up(-(-addressable_ids // 2), DRAFT_HEAD_ROW_MULTIPLE))


def geometry_from_config(
    text_config: Mapping[str, Any],
    vision_config: Mapping[str, Any] | None,
    dflash: Mapping[str, Any] | None,
    draft_head_rows: int,
) -> ModelGeometry:
    """Geometry of the model these config sections describe; InventoryError names every member that is wrong."""
    geometry, problems = inspect_config(text_config, vision_config, dflash, draft_head_rows)
    if geometry is None:
        raise InventoryError("the model config cannot be used: " + "; ".join(problems))
    return geometry


def inspect_config(
    text_config: Mapping[str, Any],
    vision_config: Mapping[str, Any] | None,
    dflash: Mapping[str, Any] | None,
    draft_head_rows: int,
) -> tuple[ModelGeometry | None, tuple[str, ...]]:
    """Geometry, or None with one sentence per problem; a preflight reports them all at once."""
    problems: list[str] = []
    text = _text(_Section("text_config", text_config, problems))
    vision = None if vision_config is None else _vision(_Section("vision_config", vision_config, problems))
    companion = None if dflash is None else _dflash(_Section("dflash", dflash, problems), text)
    rows = _Section("config", {"draft_head_rows": draft_head_rows}, problems).size("draft_head_rows", MAX_VOCABULARY)
    if not problems:
        _check_between_towers(text, vision, companion, rows, problems)
    if problems:
        return None, tuple(problems)
    architecture: Architecture = "qwen3_5" if text.mlp_width is not None else "qwen3_5_moe"
    return ModelGeometry(architecture, text, vision, companion, rows), ()


class _Section:
    """One config section being read: typed members out, sentences about wrong ones collected in ``problems``."""

    def __init__(self, name: str, members: Mapping[str, Any], problems: list[str]) -> None:
        self._name = name
        self._members = members
        self._problems = problems

    def __contains__(self, key: str) -> bool:
        return self._members.get(key) is not None

    def raw(self, key: str) -> Any:
        return self._members.get(key)

    def wrong(self, key: str, found: str, expected: str) -> None:
        self._problems.append(f"{self._name}.{key} is {found}, expected {expected}")

    def size(self, key: str, limit: int, *, least: int = 1) -> int:
        """An integer in [least, limit]; ``least`` stands in for a wrong one so that reading can go on."""
        value = self._members.get(key)
        if key not in self._members:
            self.wrong(key, "missing", f"an integer from {least} to {limit}")
        elif type(value) is not int or not least <= value <= limit:
            self.wrong(key, _spell(value), f"an integer from {least} to {limit}")
        else:
            return value
        return least

    def only(self, key: str, allowed: Iterable[Any]) -> None:
        """A member that may be absent or one of ``allowed``: other values describe a model we have no objects for."""
        value, options = self._members.get(key), tuple(allowed)
        if value is not None and not any(type(value) is type(a) and value == a for a in options):
            self.wrong(key, _spell(value), " or ".join(_spell(a) for a in options))

    def multiple(self, key: str, value: int, of_key: str, of: int) -> None:
        if value % of:
            self.wrong(key, str(value), f"a multiple of {of_key} ({of})")


def _spell(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _text(section: _Section) -> TextGeometry:
    moe = "num_experts" in section or str(section.raw("model_type")).startswith("qwen3_5_moe")
    types = ("qwen3_5_moe", "qwen3_5_moe_text") if moe else ("qwen3_5", "qwen3_5_text")
    section.only("model_type", types)
    section.only("attn_output_gate", (True,))
    section.only("attention_bias", (False,))
    section.only("mtp_use_dedicated_embeddings", (False,))
    section.only("mlp_only_layers", ([],))
    size = section.size
    geometry = TextGeometry(
        hidden=size("hidden_size", MAX_WIDTH),
        layer_kinds=_layer_kinds(section),
        vocab_rows=size("vocab_size", MAX_VOCABULARY),
        n_heads=size("num_attention_heads", MAX_COUNT),
        n_kv_heads=size("num_key_value_heads", MAX_COUNT),
        head_dim=size("head_dim", MAX_COUNT),
        gdn_key_heads=size("linear_num_key_heads", MAX_COUNT),
        gdn_value_heads=size("linear_num_value_heads", MAX_COUNT),
        gdn_key_dim=size("linear_key_head_dim", MAX_COUNT),
        gdn_value_dim=size("linear_value_head_dim", MAX_COUNT),
        conv_taps=size("linear_conv_kernel_dim", 64),
        mlp_width=None if moe else size("intermediate_size", MAX_WIDTH),
        n_experts=size("num_experts", MAX_COUNT) if moe else 0,
        experts_per_token=size("num_experts_per_tok", MAX_COUNT) if moe else 0,
        expert_width=size("moe_intermediate_size", MAX_WIDTH) if moe else 0,
        shared_width=size("shared_expert_intermediate_size", MAX_WIDTH) if moe else 0,
        mtp_layers=size("mtp_num_hidden_layers", 1, least=0) if "mtp_num_hidden_layers" in section else 0,
    )
    section.multiple("num_attention_heads", geometry.n_heads, "num_key_value_heads", geometry.n_kv_heads)
    section.multiple("linear_num_value_heads", geometry.gdn_value_heads, "linear_num_key_heads", geometry.gdn_key_heads)
    if geometry.experts_per_token > geometry.n_experts:
        limit = f"at most num_experts ({geometry.n_experts})"
        section.wrong("num_experts_per_tok", str(geometry.experts_per_token), limit)
    return geometry


def _layer_kinds(section: _Section) -> tuple[LayerKind, ...]:
    n_layers = section.size("num_hidden_layers", MAX_LAYERS)
    unknown: tuple[LayerKind, ...] = tuple("gdn" for _ in range(n_layers))
    if "layer_types" not in section:
        interval = section.size("full_attention_interval", MAX_LAYERS)
        return tuple("attention" if (layer + 1) % interval == 0 else "gdn" for layer in range(n_layers))
    types = section.raw("layer_types")
    if not isinstance(types, list) or len(types) != n_layers:
        found = f"a list of {len(types)}" if isinstance(types, list) else _spell(types)
        section.wrong("layer_types", found, f"a list of num_hidden_layers ({n_layers}) names")
        return unknown
    for layer, name in enumerate(types):
        if not isinstance(name, str) or name not in LAYER_KINDS:
            section.wrong(f"layer_types[{layer}]", _spell(name), " or ".join(repr(k) for k in LAYER_KINDS))
            return unknown
    return tuple(LAYER_KINDS[name] for name in types)


def _vision(section: _Section) -> VisionGeometry:
    section.only("deepstack_visual_indexes", ([],))
    size = section.size
    geometry = VisionGeometry(
        depth=size("depth", MAX_LAYERS),
        hidden=size("hidden_size", MAX_COUNT),
        n_heads=size("num_heads", MAX_COUNT),
        mlp_width=size("intermediate_size", MAX_WIDTH),
        out_width=size("out_hidden_size", MAX_WIDTH),
        in_channels=size("in_channels", 64),
        patch=size("patch_size", 256),
        temporal_patch=size("temporal_patch_size", 64),
        merge=size("spatial_merge_size", 64),
        n_positions=size("num_position_embeddings", MAX_VOCABULARY),
    )
    section.multiple("hidden_size", geometry.hidden, "num_heads", geometry.n_heads)
    return geometry


def _dflash(section: _Section, text: TextGeometry) -> DflashGeometry:
    section.only("attention_bias", (False,))
    inner = section.raw("dflash_config")
    taps = inner.get("target_layer_ids") if isinstance(inner, Mapping) else None
    layers = text.n_layers
    if not isinstance(taps, list) or not 1 <= len(taps) <= layers:
        section.wrong("dflash_config.target_layer_ids", _spell(taps), f"a list of 1 to {layers} target layers")
        taps = [0]
    for tap in taps:
        if type(tap) is not int or not 0 <= tap < layers:
            section.wrong("dflash_config.target_layer_ids", f"a list with {_spell(tap)}", f"layers 0 to {layers - 1}")
            break
    size = section.size
    geometry = DflashGeometry(
        hidden=size("hidden_size", MAX_WIDTH),
        n_layers=size("num_hidden_layers", MAX_LAYERS),
        n_heads=size("num_attention_heads", MAX_COUNT),
        n_kv_heads=size("num_key_value_heads", MAX_COUNT),
        head_dim=size("head_dim", MAX_COUNT),
        mlp_width=size("intermediate_size", MAX_WIDTH),
        n_taps=len(taps),
    )
    section.multiple("num_attention_heads", geometry.n_heads, "num_key_value_heads", geometry.n_kv_heads)
    return geometry


def _check_between_towers(
    text: TextGeometry,
    vision: VisionGeometry | None,
    dflash: DflashGeometry | None,
    rows: int,
    problems: list[str],
) -> None:
    if vision is not None and vision.out_width != text.hidden:
        problems.append(
            f"vision_config.out_hidden_size is {vision.out_width}, expected text_config.hidden_size ({text.hidden}): "
            "vision rows replace token embeddings"
        )
    if dflash is not None and dflash.hidden != text.hidden:
        problems.append(
            f"dflash.hidden_size is {dflash.hidden}, expected text_config.hidden_size ({text.hidden}): "
            "the companion uses the target's embedding and head"
        )
    if rows > text.vocab_rows:
        problems.append(f"draft_head_rows is {rows}, expected at most text_config.vocab_size ({text.vocab_rows})")
