"""Gated softmax attention over paged keys and values, one query at a time over exactly what it may see."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ninfer_runtime.models.qwen3_5 import AttentionWeights
from ninfer_runtime.models.spec import ModelSpec

from .kv_formats import KvPool
from .linear import linear, project
from .norm import rms_norm
from .rope import rotate
from .weights import Weights


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """Columns [begin, end) of a call belong to one sequence: index of the first, its pages (int64), and the lowest
    index that they see."""

    begin: int
    end: int
    start: int
    pages: Tensor
    lowest: int = 0


def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(q·k / sqrt(d)) v of one query: float32 [heads, d] over [kv heads, n, d] → float32 [heads, d].

    Query head j reads KV head ``j // (heads / kv heads)``.
    """
    n_kv_heads, _, dim = keys.shape
    grouped = query.reshape(n_kv_heads, -1, dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2)) * dim**-0.5
    return torch.bmm(torch.softmax(scores, -1), values).reshape(query.shape)


def attention(
    x: Tensor,
    weights: Weights,
    w: AttentionWeights,
    spec: ModelSpec,
    layer: int,
    rows: list[AttentionRow],
    rope: tuple[Tensor, Tensor],
    pool: KvPool,
) -> Tensor:
    """[T, hidden] → [T, hidden]; ``layer`` counts attention layers only. Writes the rows' new keys and values."""
    text, n_tokens = spec.text, x.shape[0]
    query, key, gate, value = project(x, weights, (w.query, w.key, w.gate, w.value))
    query = query.reshape(n_tokens, text.n_heads, text.head_dim)
    key = key.reshape(n_tokens, text.n_kv_heads, text.head_dim)
    value = value.reshape(n_tokens, text.n_kv_heads, text.head_dim)
    query = rotate(rms_norm(query, weights.vector(w.query_norm), spec.norm_eps), *rope)
    key = rotate(rms_norm(key, weights.vector(w.key_norm), spec.norm_eps), *rope)
    turned = pool.turn(query)
    mixed = torch.empty((n_tokens, text.n_heads, text.head_dim), dtype=torch.float32, device=x.device)
    for row in rows:
        columns = slice(row.begin, row.end)
        pool.append(layer, row.pages, row.start, key[columns], value[columns])
        keys, values = pool.gather(layer, row.pages, row.start + row.end - row.begin)
        for t in range(row.begin, row.end):
            seen = slice(row.lowest, row.start + t - row.begin + 1)
            mixed[t] = attend(turned[t], keys[:, seen], values[:, seen])
    gated = pool.turn(mixed).to(x.dtype).float().reshape(n_tokens, -1) * torch.sigmoid(gate.float())
    return linear(gated.to(x.dtype), weights, w.output)
