"""RMS norms. Reduction, scale and weight in float32, one rounding at the end. Formulas: ``specs/models.md``."""

import torch
from torch import Tensor

from .numerics import by_row_tiles, silu


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms(x) · (1 + w) over the last dim, in x's dtype; ``weight`` float32, stored around zero."""
    return by_row_tiles(lambda rows: _rms(rows.float(), eps) * (1.0 + weight), x).to(x.dtype)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """rms(x) · w · silu(gate) over the last dim, in the gate's dtype; ``weight`` float32, stored around one."""
    return by_row_tiles(lambda rows, z: _rms(rows.float(), eps) * weight * silu(z), x, gate).to(gate.dtype)


def _l2(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + eps)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(Σ x² + eps) over the last dim, float32; a sum, not a mean, and eps under the root."""
    return by_row_tiles(lambda rows: _l2(rows.float(), eps), x)
