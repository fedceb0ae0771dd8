"""All columns of a call through the decoder: rows share the matrix products and nothing else."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ninfer_runtime.models.binder import BoundModel
from ninfer_runtime.models.moe import MoeWeights
from ninfer_runtime.models.qwen3_5 import AttentionWeights
from ninfer_runtime.models.registry import FeedForward, LayerWeights

from .attention import AttentionRow, attention
from .gdn import GdnRow, gdn
from .kv_formats import KvPool
from .linear import linear_float32
from .mlp import mlp
from .moe import moe
from .norm import rms_norm
from .rope import rope_tables
from .state import Recurrent, RowRecord
from .weights import Weights


@dataclass(frozen=True, slots=True)
class Segment:
    """Columns [begin, end) of a call: one sequence, its pages (int64), its state.

    ``start`` is the index of the first column. With ``record`` the state is only read and its drivers recorded.
    """

    begin: int
    end: int
    start: int
    pages: Tensor
    recurrent: Recurrent
    record: RowRecord | None = None


def decode_columns(
    model: BoundModel, weights: Weights, pool: KvPool, x: Tensor, positions: Tensor, segments: list[Segment]
) -> Tensor:
    """Embeddings [T, hidden] and rotary positions int64 [3, T] → hidden rows after the final norm, [T, hidden]."""
    spec = model.spec
    rope = rope_tables(positions, spec)
    attention_rows = [AttentionRow(s.begin, s.end, s.start, s.pages) for s in segments]
    gdn_rows = [GdnRow(s.begin, s.end, s.recurrent, s.record) for s in segments]
    n_attention = n_gdn = 0
    for w in model.layers:
        h = rms_norm(x, weights.vector(w.input_norm), spec.norm_eps)
        if isinstance(w.mixer, AttentionWeights):
            x = x + attention(h, weights, w.mixer, spec, n_attention, attention_rows, rope, pool)
            n_attention += 1
        else:
            x = x + gdn(h, weights, w.mixer, spec, n_gdn, gdn_rows)
            n_gdn += 1
        x = add_feed_forward(x, weights, w, model)
    return rms_norm(x, weights.vector(model.final_norm), spec.norm_eps)


def add_feed_forward(x: Tensor, weights: Weights, w: LayerWeights, model: BoundModel) -> Tensor:
    """The second half of a block, residual stream to residual stream: [T, hidden]."""
    h = rms_norm(x, weights.vector(w.post_attention_norm), model.spec.norm_eps)
    return x + feed_forward(h, weights, w.ffn, model)


def feed_forward(x: Tensor, weights: Weights, w: FeedForward, model: BoundModel) -> Tensor:
    """Dense or sparse: [T, hidden] → [T, hidden]."""
    if isinstance(w, MoeWeights):
        return moe(x, weights, w, model.spec.text)
    return mlp(x, weights, w)


def head_logits(model: BoundModel, weights: Weights, hidden: Tensor) -> Tensor:
    """float32 [T, head rows] on the CPU, padding rows included. There is no soft cap, and no rounding to bfloat16."""
    if hidden.shape[0] == 0:
        return torch.empty((0, model.output_head.n_rows), dtype=torch.float32)
    return linear_float32(hidden, weights, model.output_head).cpu()
