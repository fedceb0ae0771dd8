"""Sparse mixture of experts with one gated shared expert. Nothing is dropped: every token reaches all its experts."""

import torch
from torch import Tensor

from ninfer_format.model_geometry import TextGeometry
from ninfer_runtime.models.moe import MoeWeights
from ninfer_runtime.models.views import View

from .linear import linear, linear_float32
from .mlp import mlp, swiglu
from .numerics import by_row_tiles, exact_sigmoid
from .weights import Weights


def route(logits: Tensor, experts_per_token: int) -> tuple[Tensor, Tensor]:
    """Router logits float32 [T, E] → (expert ids int64 [T, k], weights float32 [T, k]).

    Softmax over all experts, the k largest (lower id first on ties), divided by their sum.
    """
    probabilities = by_row_tiles(lambda rows: torch.softmax(rows.double(), -1), logits)
    ordered, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    top = ordered[:, :experts_per_token]
    return ids[:, :experts_per_token], by_row_tiles(lambda rows: rows / rows.sum(-1, keepdim=True), top).float()


def expert_views(w: MoeWeights, text: TextGeometry, expert: int) -> tuple[View, View]:
    """The rows of one expert: fused gate and up, and down."""
    width, hidden = 2 * text.expert_width, text.hidden
    gate_up = View(w.routed_gate_up.name, expert * width, (expert + 1) * width)
    return gate_up, View(w.routed_down.name, expert * hidden, (expert + 1) * hidden)


def moe(x: Tensor, weights: Weights, w: MoeWeights, text: TextGeometry) -> Tensor:
    """[T, hidden] → [T, hidden]: Σ weight · expert(x) + sigmoid(shared gate) · shared(x), summed in float32.

    Experts add up in the order of their ids, whatever else is in the batch.
    """
    ids, shares = route(linear_float32(x, weights, w.router), text.experts_per_token)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        rows, rank = torch.nonzero(ids == expert, as_tuple=True)
        gate_up, down = expert_views(w, text, expert)
        gate, up = linear(x[rows], weights, gate_up).split(text.expert_width, dim=-1)
        out[rows] += shares[rows, rank, None] * linear(swiglu(gate, up), weights, down).float()
    shared_gate = exact_sigmoid(linear_float32(x, weights, w.shared_gate))
    out += shared_gate * mlp(x, weights, w.shared).float()
    return out.to(x.dtype)
