"""Partial rotary embedding with three interleaved position axes. Angles and rotation in float32, one rounding."""

import torch
from torch import Tensor

from ninfer_runtime.models.spec import ModelSpec


def rope_tables(positions: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """int64 [3, T] positions (temporal, height, width) → float32 cos and sin, [T, rotary_dim / 2].

    Pair i turns by ``position[axis of i] · theta^(-2i / rotary_dim)``.
    """
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32, device=positions.device) / spec.rotary_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    axes = torch.tensor(spec.rope_axes, device=positions.device)
    angles = positions.float()[axes].T * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading dims of each head: [T, heads, head_dim] → same shape and dtype; the rest passes through."""
    pairs = cos.shape[-1]
    a, b, rest = x.float().split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)
