"""Gated DeltaNet in rounds: fold the pending record, evaluate this round's columns, record them; and the flush.

A round leaves the state as it was before its columns and records what drove them; how many of them count is known when
the slot is used next. Committed states have the same bits however the columns were cut into rounds.
Specification: ``specs/kernels.md``, "Gated DeltaNet"; reference: ``backends/reference/gdn.py``.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops.gdn_state import DIM, HISTORY, TAPS, GdnGeometry, GdnLayerState, GdnStateLayout
from ninfer_runtime.backends.cuda.ops.round_state import MAX_COLUMNS, MAX_ROWS, MOST_PENDING

_THREADS = 256
_HEADS_PER_SM = 2
"""Blocks that the registers of a multiprocessor hold."""
_HINTS = 1
"""Loads (1), loads and stores (2) of states tell L2 that they are not met again soon."""
_SYSTEM_SHARED = 1024
"""Bytes that every block takes besides its own."""
_STATE_SHARED = DIM * DIM * 4
_PENDING_SHARED = MOST_PENDING * (2 * DIM + 1) * 4
_FOLD_SHARED = _PENDING_SHARED + 16
_FLOAT_ROWS, _HEAD_ROWS, _LINE_ROWS = 4 * MAX_COLUMNS, 2 * MAX_COLUMNS + 1, TAPS + HISTORY + MAX_COLUMNS
_COLUMN_SHARED = DIM * (4 * _FLOAT_ROWS + 2 * _HEAD_ROWS + 3 * 2 * _LINE_ROWS) + MAX_COLUMNS * 4 * 7
_DECODE_SHARED = _PENDING_SHARED + _COLUMN_SHARED + 2 * 112 + 64

FOLD_ENTRY = np.dtype([("slot", np.int32), ("n_columns", np.int32), ("buffer", np.int32), ("reserved", np.int32)])
"""One slot to flush: fold what is carried and the first ``n_columns`` columns of the newest round, whose window is
``buffer``."""


class GdnDecodeParams(ctypes.Structure):
    """Mirrors ``kernels/gdn_decode.cu``."""

    _fields_ = (
        ("rows", ctypes.c_uint64),
        ("qk", ctypes.c_uint64),
        ("vz", ctypes.c_uint64),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
        ("taps", ctypes.c_uint64),
        ("a_log", ctypes.c_uint64),
        ("dt_bias", ctypes.c_uint64),
        ("norm", ctypes.c_uint64),
        ("state", ctypes.c_uint64),
        ("history", ctypes.c_uint64),
        ("record", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("state_slot_stride", ctypes.c_uint64),
        ("record_slot_stride", ctypes.c_uint64),
        ("qk_stride", ctypes.c_int32),
        ("vz_stride", ctypes.c_int32),
        ("gate_stride", ctypes.c_int32),
        ("out_stride", ctypes.c_int32),
        ("n_rows", ctypes.c_int32),
        ("n_columns", ctypes.c_int32),
        ("n_ahead", ctypes.c_int32),
        ("norm_eps", ctypes.c_float),
    )


class GdnFoldParams(ctypes.Structure):
    """Mirrors ``kernels/gdn_fold.cu``."""

    _fields_ = (
        ("entries", ctypes.c_uint64),
        ("state", ctypes.c_uint64),
        ("history", ctypes.c_uint64),
        ("record", ctypes.c_uint64),
        ("state_slot_stride", ctypes.c_uint64),
        ("state_layer_stride", ctypes.c_uint64),
        ("record_slot_stride", ctypes.c_uint64),
        ("record_layer_stride", ctypes.c_uint64),
        ("carried_offset", ctypes.c_uint64),
        ("n_ahead", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class GdnInputs:
    """Projections of a call's tokens, T lines each; strides in elements, 0 = dense, else multiples of 8.

    qk  bf16 [T][2 · key width], query then key      vz  bf16 [T][2 · value width], value then z
    a, b  fp32 [T][value heads], same stride
    """

    qk: int
    vz: int
    a: int
    b: int
    qk_stride: int = 0
    vz_stride: int = 0
    gate_stride: int = 0


@dataclass(frozen=True, slots=True)
class GdnLayerWeights:
    """taps bf16 [4][channels], the last for the current token; a_log, dt_bias fp32 [value heads]; norm bf16 [128]."""

    taps: int
    a_log: int
    dt_bias: int
    norm: int


def _spec(geometry: GdnGeometry, name: str, shared: int, hints: int, ring: bool) -> KernelSpec:
    defines = (*geometry.defines, ("HINTS", hints), ("RING", int(ring)), ("BLOCK_SHARED", shared))
    return KernelSpec(f"{name}.cu", name, defines, _THREADS, shared, _HEADS_PER_SM)


def _decode_spec(geometry: GdnGeometry, ring: bool, hints: int = _HINTS) -> KernelSpec:
    return _spec(geometry, "gdn_decode", _DECODE_SHARED + (_STATE_SHARED if ring else 0), hints, ring)


def _fold_spec(geometry: GdnGeometry) -> KernelSpec:
    return _spec(geometry, "gdn_fold", _FOLD_SHARED, _HINTS, False)


def specs(geometry: GdnGeometry, hints: int = _HINTS) -> list[KernelSpec]:
    """Every variant of rounds and flushes."""
    return [_decode_spec(geometry, False, hints), _decode_spec(geometry, True, hints), _fold_spec(geometry)]


class GdnDecode:
    """One layer of a round: convolution, gates, recurrence and gated norm in one launch."""

    def __init__(
        self,
        device: Device,
        geometry: GdnGeometry,
        *,
        hints: int = _HINTS,
        fetches_ahead: bool = True,
        ring: int = _HEADS_PER_SM,
    ) -> None:
        """``ring``: most blocks per SM that take head after head where not all have room at once; 0: a block each."""
        self._geometry = geometry
        self._layout = GdnStateLayout(geometry)
        self._n_resident = _HEADS_PER_SM * device.n_sms
        self._n_ahead = self._n_resident if fetches_ahead else 0
        self._single = device.kernel(_decode_spec(geometry, False, hints))
        spec = _decode_spec(geometry, True, hints)
        self._n_ring = min(ring, device.shared_per_sm // (spec.shared_bytes + _SYSTEM_SHARED)) * device.n_sms
        self._ring = device.kernel(spec)

    def launch(
        self,
        stream: Stream,
        *,
        n_rows: int,
        n_columns: int,
        rows: int,
        inputs: GdnInputs,
        weights: GdnLayerWeights,
        state: GdnLayerState,
        out: int,
        out_stride: int = 0,
        pdl: bool = True,
    ) -> None:
        """Line c = b · n_columns + i of inputs and ``out`` is column i of row b, evaluated for i < the row's n_columns.

        rows   RowState [n_rows]: the row's pending columns are folded whether or not it evaluates any. Rows, states and
               records are read before the launch just ahead has ended: they must be older than that one, and it must
               have waited itself before it lets this one start (as linear_small does), or be without PDL
        out    bf16 [n_rows · n_columns][out_stride]: rms(o) · norm · silu(z), 0 in lines that are not evaluated
        """
        if not (1 <= n_rows <= MAX_ROWS and 1 <= n_columns <= MAX_COLUMNS):
            raise ValueError(f"{n_rows} rows of {n_columns} columns, expected at most {MAX_ROWS} of {MAX_COLUMNS}")
        g, layout = self._geometry, self._layout
        params = GdnDecodeParams(
            rows,
            inputs.qk,
            inputs.vz,
            inputs.a,
            inputs.b,
            weights.taps,
            weights.a_log,
            weights.dt_bias,
            weights.norm,
            state.matrix,
            state.history,
            state.record,
            out,
            layout.state_bytes_per_slot,
            layout.record_bytes_per_slot,
            inputs.qk_stride or 2 * g.key_width,
            inputs.vz_stride or 2 * g.value_width,
            inputs.gate_stride or g.value_heads,
            out_stride or g.value_width,
            n_rows,
            n_columns,
            self._n_ahead,
            g.norm_eps,
        )
        n_units = g.value_heads * n_rows
        if self._n_ring and n_units > self._n_resident:
            self._ring.launch((self._n_ring, 1, 1), params, stream, pdl=pdl)
        else:
            self._single.launch((n_units, 1, 1), params, stream, pdl=pdl)


def fold_entries(entries: Sequence[tuple[int, int, int]]) -> "np.ndarray[tuple[int], np.dtype[np.void]]":
    """FOLD_ENTRY array of (slot, n_columns, buffer), ready to upload."""
    array = np.zeros(len(entries), FOLD_ENTRY)
    for i, (slot, n_columns, buffer) in enumerate(entries):
        array[i] = (slot, n_columns, buffer, 0)
    return array


class GdnFold:
    """Flush pending records of all layers where no round does it: before a prefill, a snapshot, and the like."""

    def __init__(self, device: Device, geometry: GdnGeometry) -> None:
        self._geometry = geometry
        self._layout = GdnStateLayout(geometry)
        self._n_ahead = _HEADS_PER_SM * device.n_sms
        self._kernel = device.kernel(_fold_spec(geometry))

    def launch(self, stream: Stream, *, n_entries: int, entries: int, states: int, records: int) -> None:
        """``entries``: FOLD_ENTRY [n_entries] on the device, distinct slots; ``states``, ``records``: the regions."""
        g, layout = self._geometry, self._layout
        first = layout.layer(0, states, records)
        params = GdnFoldParams(
            entries,
            first.matrix,
            first.history,
            first.record,
            layout.state_bytes_per_slot,
            layout.state_layer_stride,
            layout.record_bytes_per_slot,
            layout.record_layer_stride,
            layout.carried_offset,
            self._n_ahead,
        )
        self._kernel.launch((g.value_heads, g.n_layers, n_entries), params, stream)
