"""Gated DeltaNet on a device beside the reference: random layers, states of several slots, rounds and flushes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ninfer_format.model_geometry import TextGeometry
from ninfer_runtime.backends.cuda.device import Device
from ninfer_runtime.backends.cuda.ops.gdn_decode import GdnDecode, GdnFold, GdnInputs, GdnLayerWeights, fold_entries
from ninfer_runtime.backends.cuda.ops.gdn_prefill import GdnPrefill, workspace_bytes
from ninfer_runtime.backends.cuda.ops.gdn_state import CARRIED, DIM, HISTORY, GdnGeometry, GdnStateLayout
from ninfer_runtime.backends.cuda.ops.round_state import LOG_COLUMNS, ROW_STATE
from ninfer_runtime.backends.reference.gdn import Gates, _Inputs, gates, mix_row
from ninfer_runtime.backends.reference.norm import gated_rms_norm
from ninfer_runtime.backends.reference.state import Recurrent, RowRecord

Words = NDArray[np.uint16]
Floats = NDArray[np.float32]


def words(x: Tensor) -> Words:
    """The stored words of a bfloat16 tensor."""
    return x.contiguous().view(torch.uint16).numpy()


def floats(x: Words) -> Floats:
    """bfloat16 words as float32."""
    return (x.astype(np.uint32) << 16).view(np.float32)


def relative_error(found: NDArray[np.floating], expected: NDArray[np.floating]) -> float:
    """|found - expected| / |expected|, NaN when anything is."""
    difference = found.astype(np.float64) - expected.astype(np.float64)
    size = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(difference)) / max(size, 1e-30)


def bits(arrays: Sequence[NDArray[np.generic]]) -> list[bytes]:
    """What must be equal where no bit may change."""
    return [array.tobytes() for array in arrays]


@dataclass(frozen=True, slots=True)
class Projections:
    """Inputs of T tokens of one layer: qk, vz bfloat16; a, b float32 [T, value heads]."""

    qk: Tensor
    vz: Tensor
    a: Tensor
    b: Tensor

    def __getitem__(self, lines: slice | Sequence[int]) -> Projections:
        return Projections(self.qk[lines], self.vz[lines], self.a[lines], self.b[lines])


def joined(parts: Sequence[Projections]) -> Projections:
    """The lines of all parts, one after the other."""
    return Projections(*(torch.cat([getattr(p, name) for p in parts]) for name in ("qk", "vz", "a", "b")))


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer and what the reference makes of them."""

    geometry: GdnGeometry
    taps: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor

    @property
    def text(self) -> TextGeometry:
        """The members that the reference reads."""
        g = self.geometry
        return TextGeometry(
            hidden=DIM, layer_kinds=tuple("gdn" for _ in range(g.n_layers)), vocab_rows=1, n_heads=1, n_kv_heads=1,
            head_dim=DIM,
            gdn_key_heads=g.key_heads, gdn_value_heads=g.value_heads, gdn_key_dim=DIM, gdn_value_dim=DIM, conv_taps=4,
            mlp_width=1, n_experts=0, experts_per_token=0, expert_width=0, shared_width=0, mtp_layers=0,
        )  # fmt: skip

    def _inputs(self, x: Projections, dtype: torch.dtype) -> tuple[_Inputs, Tensor]:
        g = self.geometry
        value, z = x.vz.to(dtype).split(g.value_width, -1)
        both = gates(x.a, x.b, self.a_log, self.dt_bias)
        return _Inputs(torch.cat([x.qk.to(dtype), value], -1), Gates(both.alpha, both.beta)), z

    def run(self, state: Recurrent, x: Projections, record: RowRecord | None, dtype: torch.dtype) -> Floats:
        """The reference's result, [T, value width]; advances ``state`` or, with ``record``, appends to that."""
        inputs, z = self._inputs(x, dtype)
        out = mix_row(state, 0, inputs, self.taps.float(), self.text, record)
        y = gated_rms_norm(out, self.norm.float(), z.reshape(out.shape), self.geometry.norm_eps)
        return y.reshape(len(y), -1).float().numpy()


def random_layer(geometry: GdnGeometry, generator: torch.Generator, slowest: float = 1e-3) -> Layer:
    """exp(A_log), which multiplies softplus(a + dt_bias), from ``slowest`` up to at least 1, as in trained models."""
    a_log = torch.empty(geometry.value_heads)
    a_log.uniform_(float(np.log(slowest)), float(np.log(max(1.0, 4 * slowest))), generator=generator)
    taps = torch.randn((4, geometry.channels), generator=generator) * 0.5
    norm = 1 + 0.2 * torch.randn(DIM, generator=generator)
    dt_bias = 0.5 * torch.randn(geometry.value_heads, generator=generator)
    return Layer(geometry, taps.bfloat16(), a_log, dt_bias, norm.bfloat16())


def random_projections(
    geometry: GdnGeometry, n_tokens: int, generator: torch.Generator, correlation: float = 0.5
) -> Projections:
    """Tokens that share a direction: keys of real text are far from orthogonal."""

    def correlated(width: int) -> Tensor:
        common = torch.randn(width, generator=generator)
        own = torch.randn((n_tokens, width), generator=generator)
        return (correlation * common + (1 - correlation) * own).bfloat16()

    gate = (n_tokens, geometry.value_heads)
    a, b = torch.randn(gate, generator=generator), torch.randn(gate, generator=generator) + 1
    return Projections(correlated(2 * geometry.key_width), correlated(2 * geometry.value_width), a, b)


@dataclass(slots=True)
class Row:
    """One row of a round: its slot, the columns it evaluates, how its pending record is to be used, and whether the
    state goes on lacking what is folded."""

    slot: int
    n_columns: int
    fold: int
    buffer: int
    keeps: bool = False


@dataclass(slots=True)
class Rig:
    """One or more layers of states and records on a device, filled with ``seed_states``."""

    device: Device
    layer: Layer
    n_slots: int
    layout: GdnStateLayout = field(init=False)
    states: int = field(init=False)
    records: int = field(init=False)
    weights: GdnLayerWeights = field(init=False)
    carried: NDArray[np.void] = field(init=False)

    def __post_init__(self) -> None:
        self.layout = GdnStateLayout(self.layer.geometry)
        self.states = self.device.allocate(self.n_slots * self.layout.state_bytes_per_slot)
        self.records = self.device.allocate(self.n_slots * self.layout.record_bytes_per_slot)
        self.carried = np.zeros(self.n_slots, CARRIED)
        for slot in range(self.n_slots):
            self.carry(slot, 0, 0)
        w = self.layer
        self.weights = GdnLayerWeights(
            self.put(words(w.taps)), self.put(w.a_log.numpy()), self.put(w.dt_bias.numpy()), self.put(words(w.norm))
        )

    def put(self, array: NDArray[np.generic]) -> int:
        """A device copy."""
        pointer = self.device.allocate(array.nbytes)
        self.device.upload(pointer, np.ascontiguousarray(array))
        return pointer

    def poisoned(self, n_bytes: int) -> int:
        """Device memory of 0xFF bytes."""
        return self.put(np.full(n_bytes, 0xFF, np.uint8))

    def carry(self, slot: int, first: int, n: int) -> None:
        """The slot's state lacks ``n`` columns of the log from ``first`` on."""
        self.carried[slot] = first, n
        at = self.records + slot * self.layout.record_bytes_per_slot + self.layout.carried_offset
        self.device.upload(at, self.carried[slot : slot + 1])

    def write_state(self, slot: int, layer: int, matrix: Floats, history: Words) -> None:
        """matrix [value head, value, key], history [3, channels]."""
        at = self.states + self.layout.state_offset(slot, layer)
        self.device.upload(at, np.ascontiguousarray(matrix))
        self.device.upload(at + self.layout.matrix_bytes, np.ascontiguousarray(history))

    def read_state(self, slot: int, layer: int = 0) -> tuple[Floats, Words]:
        """What ``write_state`` takes."""
        g = self.layer.geometry
        matrix, history = np.empty((g.value_heads, DIM, DIM), np.float32), np.empty((HISTORY, g.channels), np.uint16)
        self.device.synchronize()
        at = self.states + self.layout.state_offset(slot, layer)
        self.device.download(at, matrix)
        self.device.download(at + self.layout.matrix_bytes, history)
        return matrix, history

    def inputs(self, x: Projections) -> GdnInputs:
        """Device copies of a call's lines."""
        qk, vz = (self.put(words(t)) for t in (x.qk, x.vz))
        a, b = (self.put(np.ascontiguousarray(t.numpy())) for t in (x.a, x.b))
        return GdnInputs(qk, vz, a, b)

    def read_words(self, pointer: int, shape: tuple[int, ...]) -> Words:
        """bfloat16 words on the device."""
        found = np.empty(shape, np.uint16)
        self.device.synchronize()
        self.device.download(pointer, found)
        return found

    def round(self, rows: Sequence[Row], n_columns: int, x: Projections) -> Words:
        """[rows, n_columns, value width] of a round; ``x`` has rows · n_columns lines."""
        g = self.layer.geometry
        states = np.zeros(len(rows), ROW_STATE)
        for i, row in enumerate(rows):
            states[i]["slot"], states[i]["n_columns"], states[i]["fold_columns"] = row.slot, row.n_columns, row.fold
            states[i]["fold_buffer"], states[i]["record_buffer"] = row.buffer, 1 - row.buffer
            first, carried = (int(x) for x in self.carried[row.slot])
            behind = (first + carried + row.fold) % LOG_COLUMNS
            states[i]["carried"], states[i]["log_first"], states[i]["log_record"] = carried, first, behind
            states[i]["keeps_state"] = row.keeps
            self.carry(row.slot, *((first, carried + row.fold) if row.keeps else (behind, 0)))
        out = self.poisoned(2 * len(rows) * n_columns * g.value_width)
        GdnDecode(self.device, g).launch(
            self.device.stream(), n_rows=len(rows), n_columns=n_columns, rows=self.put(states), inputs=self.inputs(x),
            weights=self.weights, state=self.layout.layer(0, self.states, self.records), out=out,
        )  # fmt: skip
        return self.read_words(out, (len(rows), n_columns, g.value_width))

    def prefill(self, slot: int, x: Projections) -> Words:
        """[T, value width] of a prefill of all lines of ``x``."""
        g, n_tokens = self.layer.geometry, len(x.qk)
        out = self.poisoned(2 * n_tokens * g.value_width)
        GdnPrefill(self.device, g).launch(
            self.device.stream(), n_tokens=n_tokens, slot=slot, inputs=self.inputs(x), weights=self.weights, out=out,
            state=self.layout.layer(0, self.states, self.records),
            workspace=self.poisoned(workspace_bytes(g, n_tokens)),
        )  # fmt: skip
        return self.read_words(out, (n_tokens, g.value_width))

    def flush(self, *entries: tuple[int, int, int]) -> None:
        """Fold (slot, columns, buffer) in all layers."""
        GdnFold(self.device, self.layer.geometry).launch(
            self.device.stream(), n_entries=len(entries), entries=self.put(fold_entries(entries)), states=self.states,
            records=self.records,
        )  # fmt: skip
        self.device.synchronize()
        for slot, _, _ in entries:
            self.carry(slot, 0, 0)


def empty_state(layer: Layer, dtype: torch.dtype = torch.bfloat16) -> Recurrent:
    """The reference's state of one layer before the first token."""
    g = layer.geometry
    matrices = torch.zeros((1, g.value_heads, DIM, DIM))
    nothing = torch.zeros((0, 1), dtype=dtype), torch.zeros((3, 0), dtype=torch.int64)
    return Recurrent(torch.zeros((1, HISTORY, g.channels), dtype=dtype), matrices, *nothing)


def random_state(layer: Layer, generator: torch.Generator) -> Recurrent:
    """A state as after some tokens."""
    state = empty_state(layer)
    state.matrices.normal_(generator=generator).mul_(0.3)
    state.conv.normal_(generator=generator)
    return state


def device_state(state: Recurrent) -> tuple[Floats, Words]:
    """The reference's state in the device's order."""
    return np.ascontiguousarray(state.matrices[0].transpose(1, 2).numpy()), words(state.conv[0])
