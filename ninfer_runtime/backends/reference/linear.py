"""y = x Wᵀ with float32 accumulation and one rounding, in tiles of a fixed number of rows.

A BLAS picks its summation order by the shape of a call. Every call here has the same number of rows, the last tile
padded with zeros, so a token's result depends neither on its neighbours nor on how many of them there are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ninfer_runtime.models.views import View

from .weights import Weights

ROW_TILE = 16
"""Rows per product. Fewer waste less on one row, more are faster on prompts: [R, 5120] × [5120, 17408] takes 76, 98 and
122 ms on two cores for R = 8, 16 and 32, and a small model decodes 160, 180 and 144 tokens a second."""


def linear_float32(x: Tensor, weights: Weights, view: View) -> Tensor:
    """[T, K] × the rows of ``view`` → float32 [T, n_rows], not rounded."""
    n_tokens = x.shape[0]
    padded = torch.zeros((-(-n_tokens // ROW_TILE) * ROW_TILE, x.shape[1]), dtype=torch.float32, device=x.device)
    padded[:n_tokens] = x
    out = torch.empty((padded.shape[0], view.n_rows), dtype=torch.float32, device=x.device)
    for block in weights.matrix(view):
        transposed = block.rows.float().T
        for row in range(0, padded.shape[0], ROW_TILE):
            out[row : row + ROW_TILE, block.begin : block.end] = padded[row : row + ROW_TILE] @ transposed
    return out[:n_tokens]


def linear(x: Tensor, weights: Weights, view: View) -> Tensor:
    """[T, K] × the rows of ``view`` → [T, n_rows] in the program's dtype."""
    return linear_float32(x, weights, view).to(weights.dtype)


def project(x: Tensor, weights: Weights, views: Sequence[View]) -> list[Tensor]:
    """Several projections of one input, each [T, n_rows] in the program's dtype; a fused matrix is decoded once."""
    whole: dict[str, Tensor] = {}
    out = []
    for view in views:
        if view.name not in whole:
            whole[view.name] = linear(x, weights, View(view.name, 0, weights.shape(view.name)[0]))
        out.append(whole[view.name][:, view.begin : view.end])
    return out
