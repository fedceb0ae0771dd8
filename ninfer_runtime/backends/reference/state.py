"""What a program remembers between calls beside keys and values: recurrent state per slot, records of a round."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ninfer_runtime.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Recurrent:
    """State of one sequence in all DeltaNet layers.

    conv      [layers, taps - 1, channels] in the program's dtype: the last projections before the activation
    matrices  float32 [layers, value heads, key dim, value dim]
    """

    conv: Tensor
    matrices: Tensor

    def copy_from(self, other: "Recurrent") -> None:
        """Overwrite in place; devices may differ."""
        self.conv.copy_(other.conv)
        self.matrices.copy_(other.matrices)

    def zero(self) -> None:
        """The state before the first token."""
        self.conv.zero_()
        self.matrices.zero_()

    @property
    def n_bytes(self) -> int:
        """Bytes of both tensors."""
        return sum(t.numel() * t.element_size() for t in (self.conv, self.matrices))


def empty_recurrent(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Recurrent:
    """A zero state. Zero columns before the sequence are part of the convolution's definition."""
    t, n_layers = spec.text, len(spec.gdn_layers)
    conv = torch.zeros((n_layers, t.conv_taps - 1, spec.conv_channels), dtype=dtype, device=device)
    shape = (n_layers, t.gdn_value_heads, t.gdn_key_dim, t.gdn_value_dim)
    return Recurrent(conv, torch.zeros(shape, dtype=torch.float32, device=device))


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


@dataclass(slots=True)
class RowRecord:
    """One row of a round: its slot and the records of every DeltaNet layer, in layer order."""

    slot: int
    n_columns: int
    layers: list[LayerRecord] = field(default_factory=list)
