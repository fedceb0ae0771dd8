"""y = x Wᵀ with float32 accumulation and one rounding, a fixed number of rows per product (see ``numerics``)."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ninfer_runtime.models.views import View

from .numerics import by_row_tiles
from .weights import Weights


def linear_float32(x: Tensor, weights: Weights, view: View) -> Tensor:
    """[T, K] × the rows of ``view`` → float32 [T, n_rows], not rounded."""
    if weights.observer is not None:
        weights.observer(view.name, x)
    out = torch.empty((x.shape[0], view.n_rows), dtype=torch.float32, device=x.device)
    x = weights.activations.rows(x.float(), view.name)
    for block in weights.matrix(view):
        out[:, block.begin : block.end] = by_row_tiles(partial(torch.matmul, other=block.rows.float().T), x)
    return out


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
