"""Bytes and operations that a round or a prompt cannot avoid, from the directory and the geometry alone.

Counted are the matrices, each once per round; the recurrent matrices, read and written once per row; keys and values of
the whole context, read once per row. Activations, norms, convolution columns and embedding rows are left out: together
they are below 0.1 % of a decode round of the published models, and leaving them out only lowers a share.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ninfer_format.directory import Entry, TensorEntry
from ninfer_format.errors import UsageError
from ninfer_format.model_geometry import TextGeometry
from ninfer_format.roles import role_of

FLOAT32_BYTES = 4
KV_GROUP = 64
"""Keys or values that share one binary16 scale in the INT8 and FP6 formats."""

_KV_BYTES_PER_VALUE: Mapping[str, float] = {
    "float32": 4,
    "bf16": 2,
    "int8": 1 + 2 / KV_GROUP,
    "fp6": 0.75 + 2 / KV_GROUP,
}
_ROUTED = ("routed_gate_up", "routed_down")
HEAD = "text/output_head"

_LAUNCHES: Mapping[str, str] = {
    "text/layers/*/attention/query_key": "attention/input",
    "text/layers/*/attention/gate_value": "attention/input",
    "text/layers/*/attention/query_key_gate_value": "attention/input",
    "text/layers/*/attention/output": "attention/output",
    "text/layers/*/gdn/query_key": "gdn/input",
    "text/layers/*/gdn/value_z": "gdn/input",
    "text/layers/*/gdn/query_key_value_z": "gdn/input",
    "text/layers/*/gdn/a_projection": "gdn/input",
    "text/layers/*/gdn/b_projection": "gdn/input",
    "text/layers/*/gdn/a_b_projection": "gdn/input",
    "text/layers/*/gdn/output": "gdn/output",
    "text/layers/*/mlp/gate_up": "mlp/gate_up",
    "text/layers/*/mlp/down": "mlp/down",
    "text/layers/*/moe/router_shared_gate": "moe/router",
    "text/layers/*/moe/routed_gate_up": "moe/routed_gate_up",
    "text/layers/*/moe/routed_down": "moe/routed_down",
    "text/layers/*/moe/shared_gate_up": "moe/shared_gate_up",
    "text/layers/*/moe/shared_down": "moe/shared_down",
    HEAD: "head",
}
"""Role of a matrix that every token multiplies → the launch that reads it."""


@dataclass(frozen=True, slots=True)
class RoundBytes:
    """What one round must move: ``weights`` once, ``states`` and ``keys_values`` for every row."""

    weights: int
    states: int
    keys_values: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.states + self.keys_values


def matrices(objects: Iterable[Entry]) -> dict[str, tuple[TensorEntry, ...]]:
    """The matrices every token multiplies, by launch kind, in file order."""
    found: dict[str, tuple[TensorEntry, ...]] = {}
    for entry in objects:
        launch = _LAUNCHES.get(role_of(entry.name)[0])
        if launch is not None and isinstance(entry, TensorEntry):
            found[launch] = (*found.get(launch, ()), entry)
    return found


def launch_bytes(objects: Iterable[Entry]) -> dict[str, tuple[int, ...]]:
    """Bytes of every launch of a kind, layer after layer: sibling matrices of one layer add up."""
    sums: dict[str, dict[int | None, int]] = {}
    for launch, entries in matrices(objects).items():
        layers = sums.setdefault(launch, {})
        for entry in entries:
            layer = role_of(entry.name)[1]
            layers[layer] = layers.get(layer, 0) + entry.n_bytes
    return {launch: tuple(layers.values()) for launch, layers in sums.items()}


def distinct_experts(text: TextGeometry, n_columns: int) -> float:
    """Experts that ``n_columns`` tokens with independent routing touch, on average."""
    return text.n_experts * (1 - (1 - text.experts_per_token / text.n_experts) ** n_columns)


def weight_bytes(objects: Iterable[Entry], text: TextGeometry, n_columns: int = 1, touched: float | None = None) -> int:
    """Bytes of the weights that a round of ``n_columns`` columns reads: all once, of the experts those ``touched`` in
    a layer, on average; None: as many as with independent routing."""
    total = 0.0
    touched = distinct_experts(text, n_columns) if touched is None and text.n_experts else touched or 0.0
    for entries in matrices(objects).values():
        for entry in entries:
            is_bank = entry.name.rpartition("/")[2] in _ROUTED
            total += entry.n_bytes * (touched / text.n_experts if is_bank else 1)
    return round(total)


def state_bytes(text: TextGeometry) -> int:
    """The recurrent matrices of one row, float32, once."""
    n_layers = text.layer_kinds.count("gdn")
    return n_layers * text.gdn_value_heads * text.gdn_key_dim * text.gdn_value_dim * FLOAT32_BYTES


def kv_bytes_per_token(text: TextGeometry, kv_dtype: str) -> int:
    """Keys and values of one token in all attention layers. UsageError for a type that is not known here."""
    if kv_dtype not in _KV_BYTES_PER_VALUE:
        raise UsageError(f"KV type {kv_dtype!r}, expected one of {', '.join(_KV_BYTES_PER_VALUE)}")
    n_values = 2 * text.layer_kinds.count("attention") * text.n_kv_heads * text.head_dim
    return round(n_values * _KV_BYTES_PER_VALUE[kv_dtype])


def round_bytes(
    objects: Iterable[Entry],
    text: TextGeometry,
    contexts: Sequence[float],
    kv_dtype: str,
    n_columns: int | None = None,
    touched: float | None = None,
    state_writes: float = 1.0,
) -> RoundBytes:
    """One round whose rows have these contexts (tokens); ``n_columns`` in all, by default one per row; ``touched`` as
    in ``weight_bytes``. A state is read once and written ``state_writes`` times, on average over rounds."""
    n_rows = len(contexts)
    return RoundBytes(
        weights=weight_bytes(objects, text, n_rows if n_columns is None else n_columns, touched),
        states=round((1 + state_writes) * n_rows * state_bytes(text)),
        keys_values=round(sum(contexts) * kv_bytes_per_token(text, kv_dtype)),
    )


def draft_bytes(objects: Iterable[Entry]) -> int:
    """What one draft reads of weights: the matrices of the draft layer, and the head over all ids."""
    return sum(
        entry.n_bytes
        for entry in objects
        if isinstance(entry, TensorEntry) and len(entry.shape) == 2 and entry.name.startswith(("mtp/", HEAD))
    )


def recurrence_bytes(text: TextGeometry, n_folded: int, n_recorded: int) -> int:
    """One row's recurrent layers in a round: the matrices read and written, what drove the columns that are folded
    read, what drives the columns of the round written: projections of the convolution, keys, corrections, decays."""
    n_layers = text.layer_kinds.count("gdn")
    key, value = text.gdn_key_heads * text.gdn_key_dim, text.gdn_value_heads * text.gdn_value_dim
    column = 2 * (2 * key + value) + FLOAT32_BYTES * (key + value + text.gdn_value_heads)
    return 2 * state_bytes(text) + n_layers * (n_folded + n_recorded) * column


def matrix_flops(objects: Iterable[Entry], text: TextGeometry, *, head: bool) -> int:
    """Multiplications and additions of one token in the matrices: two per weight it meets."""
    total = 0.0
    for launch, entries in matrices(objects).items():
        for entry in entries:
            is_bank = entry.name.rpartition("/")[2] in _ROUTED
            share = text.experts_per_token / text.n_experts if is_bank else 1
            total += 2 * entry.shape[0] * entry.shape[1] * share if launch != "head" or head else 0
    return round(total)


def attention_flops(text: TextGeometry, start: int, n_tokens: int) -> int:
    """Causal attention of tokens ``start`` … ``start + n_tokens - 1``: two products per head, all attention layers."""
    positions = n_tokens * start + n_tokens * (n_tokens + 1) // 2
    return 4 * text.layer_kinds.count("attention") * text.n_heads * text.head_dim * positions


def prefill_flops(objects: Iterable[Entry], text: TextGeometry, n_tokens: int) -> int:
    """A prompt from its first token on: matrices without the head, and causal attention."""
    return n_tokens * matrix_flops(objects, text, head=False) + attention_flops(text, 0, n_tokens)
