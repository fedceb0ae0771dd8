"""What a program remembers between calls beside keys and values: recurrent state per slot, records of a round."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ninfer_runtime.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Recurrent:
    """State of one sequence in all DeltaNet layers, and of its last folded token.

    conv      [layers, taps - 1, channels] in the program's dtype: the last projections before the activation
    matrices  float32 [layers, value heads, key dim, value dim]
    hidden    [1, hidden] in the program's dtype: the token's final-normed row; [0, hidden] without a proposer
    position  int64 [3, 1], its rotary position; [3, 0] without a proposer
    """

    conv: Tensor
    matrices: Tensor
    hidden: Tensor
    position: Tensor

    def copy_from(self, other: "Recurrent") -> None:
        """Overwrite in place; devices may differ."""
        for own, its in zip(self.tensors, other.tensors, strict=True):
            own.copy_(its)

    def zero(self) -> None:
        """The state before the first token."""
        for own in self.tensors:
            own.zero_()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of it."""
        return (self.conv, self.matrices, self.hidden, self.position)

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors)


def empty_recurrent(spec: ModelSpec, dtype: torch.dtype, device: torch.device, *, proposes: bool) -> Recurrent:
    """A zero state. Zero columns before the sequence are part of the convolution's definition."""
    t, n_layers, n_last = spec.text, len(spec.gdn_layers), int(proposes)
    conv = torch.zeros((n_layers, t.conv_taps - 1, spec.conv_channels), dtype=dtype, device=device)
    shape = (n_layers, t.gdn_value_heads, t.gdn_key_dim, t.gdn_value_dim)
    return Recurrent(
        conv,
        torch.zeros(shape, dtype=torch.float32, device=device),
        torch.zeros((n_last, t.hidden), dtype=dtype, device=device),
        torch.zeros((3, n_last), dtype=torch.int64, device=device),
    )


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """What drove one DeltaNet layer over the columns of one row; enough to repeat the transition exactly.

    projections [T, channels] in the program's dtype; key, value float32 [T, value heads, dim]; alpha, beta float32
    [T, value heads]. Keys are already normalised: a replay must not compute anything anew but the state.
    """

    projections: Tensor
    key: Tensor
    value: Tensor
    alpha: Tensor
    beta: Tensor


@dataclass(frozen=True, slots=True)
class Columns:
    """Evaluated tokens of one sequence: embeddings and final-normed hidden rows [T, hidden], rotary positions int64
    [3, T], and the row's pages (int64)."""

    embeddings: Tensor
    hidden: Tensor
    positions: Tensor
    pages: Tensor

    def remember(self, recurrent: Recurrent, n_columns: int) -> None:
        """Make the last of the first ``n_columns`` tokens the one that was folded last."""
        if n_columns:
            recurrent.hidden.copy_(self.hidden[n_columns - 1 : n_columns])
            recurrent.position.copy_(self.positions[:, n_columns - 1 : n_columns])


@dataclass(slots=True)
class RowRecord:
    """One row of a round: its slot, the records of every DeltaNet layer in layer order, and what was evaluated."""

    slot: int
    n_columns: int
    layers: list[LayerRecord] = field(default_factory=list)
    columns: Columns | None = None
