"""From logits to a token: bias, penalties, temperature, top-k, softmax, min-p, top-p, one random number.

Everything is float64 numpy on the addressable logits, so the order of the steps is all there is to check.
Specification: ``specs/program.md``.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ninfer_runtime.backends.base import ContractError, Float32s, Uint32s
from ninfer_runtime.config import SamplingParams

Float64s = NDArray[np.float64]
Int64s = NDArray[np.int64]
Counts = NDArray[np.int32]

MASK_BITS = 32


class Purpose(IntEnum):
    """What a random number is for; each purpose has its own stream. TARGET serves prefill and decode alike, so a
    token does not depend on whether its position was reached by a prompt or by a round. The others belong to drafts
    that have a distribution of their own: what a draft is drawn with must decide nothing else."""

    TARGET = 0
    ACCEPT = 1
    CORRECTION = 2
    BONUS = 3
    DRAFT = 4


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """A number in [0, 1) that depends on nothing but its arguments.

    Philox 4x64-10 with key (seed, purpose) and counter (position + 1, 0, 0, 0); the upper 53 bits of its first word.
    """
    # numpy advances the counter before it draws, hence the +1 of the specification.
    bits = np.random.Philox(key=np.array([seed, int(purpose)], np.uint64), counter=position)
    return float(bits.random_raw() >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Candidates:
    """What may still be drawn, most likely first (lower id first on ties), with probabilities that add up to 1."""

    ids: Int64s
    probabilities: Float64s


def unpack_mask(mask: Uint32s, n_ids: int) -> NDArray[np.bool_]:
    """bool [n_ids] from packed words: bit ``id % 32`` of word ``id // 32``."""
    bits = np.unpackbits(np.ascontiguousarray(mask, "<u4").view(np.uint8), bitorder="little")
    return bits[:n_ids].astype(bool)


def adjust(logits: Float32s, params: SamplingParams, counts: Counts | None, mask: Uint32s | None) -> Float64s:
    """Bias and penalties; masked ids become -inf. ``logits`` float32 [n addressable], ``counts`` of generated tokens.

    ContractError when the mask leaves nothing to draw.
    """
    adjusted = logits.astype(np.float64)
    for token_id, value in params.logit_bias:
        adjusted[token_id] += value
    if counts is not None and params.has_penalties:
        seen = np.flatnonzero(counts[: adjusted.size])
        adjusted[seen] -= params.presence_penalty + params.frequency_penalty * counts[seen]
    if mask is not None:
        allowed = unpack_mask(mask, adjusted.size)
        if not allowed.any():
            raise ContractError("the logits mask allows no addressable id; end the row before masking everything")
        adjusted[~allowed] = -np.inf
    return adjusted


def top_candidates(adjusted: Float64s, k: int) -> Int64s:
    """Ids of the k largest finite values, descending, lower id first on ties; k <= 0 or too large keeps all."""
    possible = np.flatnonzero(adjusted > -np.inf)
    values = adjusted[possible]
    if 0 < k < possible.size:
        # Everything at or above the k-th value takes part in the exact, stable sort; ties may bring more than k.
        threshold = np.partition(values, possible.size - k)[possible.size - k]
        possible, values = possible[values >= threshold], values[values >= threshold]
    order = np.argsort(-values, kind="stable")
    return possible[order][:k] if k > 0 else possible[order]


def candidates(adjusted: Float64s, params: SamplingParams) -> Candidates:
    """Steps after the penalties for temperature > 0; at least one candidate always survives."""
    ids = top_candidates(adjusted, params.top_k)
    scaled = (adjusted[ids] - adjusted[ids[0]]) / params.temperature
    weights = np.exp(scaled)
    probabilities = weights / weights.sum()
    keep = probabilities >= params.min_p * probabilities[0]
    if params.top_p < 1.0:
        before = np.cumsum(probabilities) - probabilities
        keep &= before < params.top_p
    keep[0] = True
    kept = probabilities[keep]
    return Candidates(ids[keep], kept / kept.sum())


def draw(of: Candidates, u: float) -> int:
    """The candidate whose share of the cumulative mass holds ``u``."""
    index = int(np.searchsorted(np.cumsum(of.probabilities), u, side="right"))
    return int(of.ids[min(index, of.ids.size - 1)])


def sample(
    logits: Float32s,
    params: SamplingParams,
    counts: Counts | None,
    position: int,
    mask: Uint32s | None = None,
    purpose: Purpose = Purpose.TARGET,
) -> int:
    """The token at ``position`` (its own index in the sequence) from finite logits float32 [n addressable]."""
    adjusted = adjust(logits, params, counts, mask)
    if params.is_greedy:
        return int(np.argmax(adjusted))
    return draw(candidates(adjusted, params), uniform(seed_of(params), position, purpose))


def seed_of(params: SamplingParams) -> int:
    """The seed of a row that is sampled."""
    if params.seed is None:
        raise ContractError("sampling without a seed; the engine draws one per request")
    return params.seed


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one token and of the most likely ones, float32."""

    chosen: float
    top_ids: NDArray[np.int32]
    top: Float32s


def token_logprobs(logits: Float32s, token_id: int, n_top: int) -> TokenLogprobs:
    """log softmax over the raw addressable logits, for the chosen token and the ``n_top`` most likely ones."""
    raw = logits.astype(np.float64)
    peak = raw.max()
    log_total = peak + np.log(np.exp(raw - peak).sum())
    ids = top_candidates(raw, n_top) if n_top > 0 else np.empty(0, np.int64)
    return TokenLogprobs(
        float(raw[token_id] - log_total), ids.astype(np.int32), (raw[ids] - log_total).astype(np.float32)
    )
