"""What a program remembers between calls: recurrent state per slot, keys and values in pages, records of a round."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ninfer_runtime.config import PAGE_TOKENS
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


class KvPool:
    """Keys (rotated, normalised) and values (raw) of every attention layer: [layers, pages, kv heads, 64, head_dim]."""

    def __init__(self, spec: ModelSpec, n_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        t = spec.text
        shape = (len(spec.attention_layers), n_pages, t.n_kv_heads, PAGE_TOKENS, t.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def append(self, layer: int, pages: Tensor, start: int, keys: Tensor, values: Tensor) -> None:
        """Store [T, kv heads, head_dim] at indices start .. start + T - 1 of the row with these pages (int64)."""
        index = torch.arange(start, start + keys.shape[0], device=keys.device)
        page, offset = pages[index // PAGE_TOKENS], index % PAGE_TOKENS
        self.keys[layer][page, :, offset] = keys.to(self.keys.dtype)
        self.values[layer][page, :, offset] = values.to(self.values.dtype)

    def gather(self, layer: int, pages: Tensor, n_tokens: int) -> tuple[Tensor, Tensor]:
        """float32 keys and values [kv heads, n_tokens, head_dim] of the first ``n_tokens`` of a row."""
        used = pages[: -(-n_tokens // PAGE_TOKENS)]

        def joined(pool: Tensor) -> Tensor:
            heads_first = pool[layer, used].permute(1, 0, 2, 3)
            return heads_first.reshape(heads_first.shape[0], -1, heads_first.shape[-1])[:, :n_tokens].float()

        return joined(self.keys), joined(self.values)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages of all layers."""
        self.keys[:, list(targets)] = self.keys[:, list(sources)]
        self.values[:, list(targets)] = self.values[:, list(sources)]
