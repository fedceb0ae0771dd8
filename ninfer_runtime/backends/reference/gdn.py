"""Gated DeltaNet as the plain recurrence, one token at a time. Formulas: ``specs/models.md``.

Prompts, rounds and replays all run ``step`` on tensors of one shape, so the state after n tokens is the same, bit for
bit, however those tokens were cut into calls.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ninfer_format.model_geometry import TextGeometry
from ninfer_runtime.models.qwen3_5 import GdnWeights
from ninfer_runtime.models.spec import L2_NORM_EPS, ModelSpec

from .linear import linear, linear_float32, project
from .norm import gated_rms_norm, l2_norm
from .numerics import exact_sigmoid, silu
from .state import LayerRecord, Recurrent, RowRecord
from .weights import Weights


@dataclass(frozen=True, slots=True)
class Gates:
    """alpha = exp(g) and beta, float32 [T, value heads]."""

    alpha: Tensor
    beta: Tensor


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> Gates:
    """g = -exp(A_log) · softplus(a + dt_bias), alpha = exp(g), beta = sigmoid(b); softplus is the identity above 20.

    a, b float32 [T, value heads]; evaluated in float64, see ``numerics``.
    """
    g = -a_log.double().exp() * softplus(a.double() + dt_bias.double())
    return Gates(g.exp().float(), exact_sigmoid(b))


def convolve(history: Tensor, projections: Tensor, taps: Tensor) -> Tensor:
    """silu(Σ_j taps[j] · p_{t - n + 1 + j}) per channel, in the projections' dtype.

    history [n - 1, channels], projections [T, channels], taps float32 [n, channels]; the last tap multiplies the
    current token.
    """
    n_taps, n_tokens = taps.shape[0], projections.shape[0]
    columns = torch.cat([history, projections]).float()
    total = taps[0] * columns[:n_tokens]
    for j in range(1, n_taps):
        total = total + taps[j] * columns[j : j + n_tokens]
    return silu(total).to(projections.dtype)


def advance_history(history: Tensor, projections: Tensor) -> Tensor:
    """The columns a convolution needs next: the last n - 1 of history and projections together."""
    return torch.cat([history, projections])[-history.shape[0] :]


def step(state: Tensor, key: Tensor, value: Tensor, alpha: Tensor, beta: Tensor) -> None:
    """Advance ``state`` [heads, key dim, value dim] in place by one token: decay, read, correct, update.

    S ← αS;  u = β (v − Sᵀk);  S ← S + k uᵀ, with key, value [heads, dim] and alpha, beta [heads], all float32.
    """
    state *= alpha[:, None, None]
    predicted = torch.bmm(key[:, None], state)
    correction = beta[:, None, None] * (value[:, None] - predicted)
    state += key[:, :, None] * correction


def replay(recurrent: Recurrent, record: RowRecord, n_columns: int) -> None:
    """Fold the first ``n_columns`` recorded columns of a row into its state; 0 leaves it unchanged."""
    if n_columns == 0:
        return
    for layer, log in enumerate(record.layers):
        recurrent.conv[layer] = advance_history(recurrent.conv[layer], log.projections[:n_columns])
        for t in range(n_columns):
            step(recurrent.matrices[layer], log.key[t], log.value[t], log.alpha[t], log.beta[t])


@dataclass(frozen=True, slots=True)
class _Inputs:
    """One row's part of a call: query | key | value before the convolution, [T, channels], and its gates."""

    mixed: Tensor
    gates: Gates


def _heads(text: TextGeometry, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convolved channels → query, key float32 [T, value heads, key dim] (normalised), value float32 [T, …, value dim].

    Consecutive value heads share a key head.
    """
    n_tokens, width = convolved.shape[0], text.gdn_key_heads * text.gdn_key_dim
    query, key, value = convolved.split([width, width, convolved.shape[1] - 2 * width], dim=-1)
    shape = (n_tokens, text.gdn_key_heads, text.gdn_key_dim)
    shared_by = text.gdn_value_heads // text.gdn_key_heads
    query = l2_norm(query.reshape(shape), L2_NORM_EPS) * text.gdn_key_dim**-0.5
    key = l2_norm(key.reshape(shape), L2_NORM_EPS)
    value = value.reshape(n_tokens, text.gdn_value_heads, text.gdn_value_dim).float()
    return query.repeat_interleave(shared_by, 1), key.repeat_interleave(shared_by, 1), value


def mix_row(
    recurrent: Recurrent, layer: int, inputs: _Inputs, taps: Tensor, text: TextGeometry, record: RowRecord | None
) -> Tensor:
    """One row's columns through one layer: float32 [T, value heads, value dim].

    Without ``record`` the state advances; with it the state stays and the drivers are appended to the record.
    """
    history, matrices = recurrent.conv[layer], recurrent.matrices[layer]
    query, key, value = _heads(text, convolve(history, inputs.mixed, taps))
    alpha, beta = inputs.gates.alpha, inputs.gates.beta
    if record is not None:
        record.layers.append(LayerRecord(inputs.mixed, key, value, alpha, beta))
        matrices = matrices.clone()
    out = torch.empty_like(value)
    for t in range(value.shape[0]):
        step(matrices, key[t], value[t], alpha[t], beta[t])
        out[t] = torch.bmm(query[t][:, None], matrices)[:, 0]
    if record is None:
        recurrent.conv[layer] = advance_history(history, inputs.mixed)
    return out


@dataclass(frozen=True, slots=True)
class GdnRow:
    """Columns [begin, end) of a call belong to one sequence with this state."""

    begin: int
    end: int
    recurrent: Recurrent
    record: RowRecord | None


def gdn(x: Tensor, weights: Weights, w: GdnWeights, spec: ModelSpec, layer: int, rows: list[GdnRow]) -> Tensor:
    """[T, hidden] → [T, hidden]; ``layer`` counts DeltaNet layers only."""
    text = spec.text
    query, key, value, z = project(x, weights, (w.query, w.key, w.value, w.z))
    mixed = torch.cat([query, key, value], -1)
    both = gates(
        linear_float32(x, weights, w.a),
        linear_float32(x, weights, w.b),
        weights.vector(w.a_log),
        weights.vector(w.dt_bias),
    )
    taps, norm = weights.vector(w.convolution), weights.vector(w.norm)
    out = torch.empty((x.shape[0], text.gdn_value_heads, text.gdn_value_dim), dtype=torch.float32, device=x.device)
    for row in rows:
        columns = slice(row.begin, row.end)
        own = _Inputs(mixed[columns], Gates(both.alpha[columns], both.beta[columns]))
        out[columns] = mix_row(row.recurrent, layer, own, taps, text, row.record)
    z = z.reshape(out.shape)
    normed = gated_rms_norm(out, norm, z, spec.norm_eps)
    return linear(normed.reshape(x.shape[0], -1), weights, w.output)
