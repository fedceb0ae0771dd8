"""Where the recurrent state of every slot lies, and the records of the rounds that are still to be folded into it.

Both live slot after slot, in them layer after layer, so that a slot's state is one contiguous block: a snapshot is one
copy of ``state_bytes_per_slot`` bytes from ``state_offset(slot)``, a reset one fill with zeros.

State of a layer: S fp32 [value head][value 128][key 128], then the convolution's history bf16 [3][channels], oldest
first.
Record of a layer: two windows bf16 [3 + columns][channels], the history before a round and its projections, one pending
while the next round writes the other; and the log, a ring of ``LOG_COLUMNS`` columns in fp32: keys [columns][key head]
[128], normalised; corrections u [columns][value head][128]; alpha [columns][value head]. Behind the layers of a slot:
``CARRIED``, the columns of the log that the state lacks beside those of the newest round.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from ninfer_format.errors import UnsupportedError
from ninfer_format.geometry import up
from ninfer_format.model_geometry import TextGeometry
from ninfer_runtime.backends.cuda.arena import ALIGNMENT
from ninfer_runtime.backends.cuda.ops.round_state import LOG_COLUMNS, MAX_COLUMNS, MOST_PENDING

DIM: Final = 128
TAPS: Final = 4
HISTORY: Final = TAPS - 1
WINDOWS: Final = 2
CARRIED: Final = np.dtype([("first", np.int32), ("n", np.int32)])
MOST_CARRIED: Final = 5
"""Columns that a state may lack: each costs two operations per number and round, but a state is written less often."""
_BF16 = 2
_FP32 = 4


@dataclass(frozen=True, slots=True)
class GdnGeometry:
    """Shape of the Gated DeltaNet layers of a model."""

    key_heads: int
    value_heads: int
    n_layers: int
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.key_heads < 1 or self.value_heads % self.key_heads:
            raise UnsupportedError(
                f"{self.value_heads} DeltaNet value heads share {self.key_heads} key heads, expected a multiple"
            )

    @property
    def ratio(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def key_width(self) -> int:
        """Channels of the queries, and of the keys."""
        return self.key_heads * DIM

    @property
    def value_width(self) -> int:
        """Channels of the values, of z, and of the result."""
        return self.value_heads * DIM

    @property
    def channels(self) -> int:
        """Channels of the convolution: query, key, value."""
        return 2 * self.key_width + self.value_width

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """Compile-time constants of every kernel of these layers."""
        return (("KEY_HEADS", self.key_heads), ("VALUE_HEADS", self.value_heads))


def gdn_geometry(text: TextGeometry, norm_eps: float) -> GdnGeometry:
    """The model's DeltaNet layers. UnsupportedError for head dims or taps that the kernels do not have."""
    found = (text.gdn_key_dim, text.gdn_value_dim, text.conv_taps)
    if found != (DIM, DIM, TAPS):
        raise UnsupportedError(
            f"DeltaNet key dim, value dim and convolution taps are {found}, the CUDA backend has {(DIM, DIM, TAPS)}; "
            "use --backend reference"
        )
    return GdnGeometry(text.gdn_key_heads, text.gdn_value_heads, text.layer_kinds.count("gdn"), norm_eps)


@dataclass(frozen=True, slots=True)
class GdnLayerState:
    """Device addresses of one layer in slot 0: state matrix, convolution history, record."""

    matrix: int
    history: int
    record: int


@dataclass(frozen=True, slots=True)
class GdnStateLayout:
    """Offsets in bytes; ``states`` and ``records`` are two regions, aligned to 256 bytes."""

    geometry: GdnGeometry

    @property
    def matrix_bytes(self) -> int:
        """S of one layer."""
        return self.geometry.value_heads * DIM * DIM * _FP32

    @property
    def state_layer_stride(self) -> int:
        """From one layer's state to the next one's."""
        return self.matrix_bytes + up(HISTORY * self.geometry.channels * _BF16, ALIGNMENT)

    @property
    def state_bytes_per_slot(self) -> int:
        """All layers of a slot; also the size of a snapshot."""
        return self.geometry.n_layers * self.state_layer_stride

    @property
    def record_layer_stride(self) -> int:
        """From one layer's record to the next one's."""
        g = self.geometry
        windows = WINDOWS * (HISTORY + MAX_COLUMNS) * g.channels * _BF16
        log = LOG_COLUMNS * (g.key_width + g.value_width + g.value_heads) * _FP32
        return up(windows + log, ALIGNMENT)

    @property
    def carried_offset(self) -> int:
        """Of ``CARRIED`` in a slot's records."""
        return self.geometry.n_layers * self.record_layer_stride

    @property
    def record_bytes_per_slot(self) -> int:
        """All layers, and what is carried."""
        return self.carried_offset + up(CARRIED.itemsize, ALIGNMENT)

    def state_offset(self, slot: int, layer: int = 0) -> int:
        """Of a layer's state in the region of states."""
        return slot * self.state_bytes_per_slot + layer * self.state_layer_stride

    def layer(self, layer: int, states: int, records: int) -> GdnLayerState:
        """Addresses of a layer (counted among the DeltaNet layers), given those of the two regions."""
        matrix = states + self.state_offset(0, layer)
        return GdnLayerState(matrix, matrix + self.matrix_bytes, records + layer * self.record_layer_stride)


@dataclass(frozen=True, slots=True)
class Carrying:
    """When rounds write states back: where the memory's rate is the limit, committed columns stay in the log a while.

    pointer, stride   CARRIED of slot 0, bytes to the next slot's
    heads_at_once     of all rows: with no more than these a round is short anyway
    max_columns       of the rounds that may follow
    """

    pointer: int
    stride: int
    value_heads: int
    heads_at_once: int
    max_columns: int

    @classmethod
    def of(cls, layout: GdnStateLayout, records: int, n_sms: int, max_columns: int) -> "Carrying":
        """Of the records at ``records``, on a card of ``n_sms``."""
        heads = layout.geometry.value_heads
        return cls(records + layout.carried_offset, layout.record_bytes_per_slot, heads, n_sms, max_columns)

    def limit(self, n_rows: int, n_columns: int) -> int:
        """Most columns that a state may lack behind a round, its own not counted: the following ones must have room."""
        if n_rows * self.value_heads <= self.heads_at_once:
            return 0
        return max(0, min(MOST_CARRIED, MOST_PENDING - n_columns, LOG_COLUMNS - n_columns - self.max_columns))

    def writes_per_round(self, n_rows: int, n_columns: int, committed: float) -> float:
        """How often rounds that commit so many columns write a state, on average."""
        return 1 / (1 + self.limit(n_rows, n_columns) // max(1.0, committed))
