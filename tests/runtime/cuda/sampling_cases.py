"""Random rounds of every kind: parameters, ties, masks, drafts that repeat and come true, stops and budgets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.random import Generator

from ninfer_runtime.backends.base import Float32s, Int32s, Round, Uint32s
from ninfer_runtime.backends.reference.book import Launched
from ninfer_runtime.config import MAX_SEED, SamplingParams
from tests.runtime.cuda.sampling_rig import Bench, Mirror, Vocabulary, assert_same, make_round

TEMPERATURES = (0.0, 0.05, 0.7, 1.0, 2.0)
TOP_KS = (-1, 0, 1, 2, 5, 20, 50, 1000, 2**31 - 1)
TOP_PS = (0.0, 0.3, 0.8, 0.95, 1.0)
MIN_PS = (0.0, 0.02, 0.3, 1.0)
# Fractions of 2: other penalties make values that differ in float64 alone, and where more of those meet at a boundary
# than are sorted at once, the device takes them for ties.
PENALTIES = (0.0, 0.0, 0.125, 1.5, -0.75)
SEEDS = (0, 1, 2**32, 2**63, MAX_SEED)


def some_params(rng: Generator, n_ids: int) -> SamplingParams:
    """Any combination of parameters."""
    n_bias = int(rng.choice([0, 0, 1, 40]))
    ids = rng.choice(n_ids, n_bias, replace=False).tolist()
    return SamplingParams(
        temperature=float(rng.choice(TEMPERATURES)),
        top_p=float(rng.choice(TOP_PS)),
        top_k=int(rng.choice(TOP_KS)),
        min_p=float(rng.choice(MIN_PS)),
        presence_penalty=float(rng.choice(PENALTIES)),
        frequency_penalty=float(rng.choice(PENALTIES)),
        seed=int(rng.choice(np.array(SEEDS, np.uint64))),
        logit_bias=tuple(
            (i, float(v)) for i, v in zip(ids, rng.choice([-100.0, -1.0, 0.25, 5.5], n_bias), strict=True)
        ),
    )


def some_logits(rng: Generator, shape: tuple[int, ...], vocabulary: Vocabulary) -> Float32s:
    """Peaked rows over a broad floor; some rows lie on a coarse grid, so that ties abound. Padding rows win, if let."""
    logits = rng.normal(0.0, 2.0, (*shape, vocabulary.n_rows))
    best = rng.integers(0, vocabulary.n_addressable, (*shape, 12))
    np.put_along_axis(logits, best, rng.normal(8.0, 2.0, best.shape), -1)
    is_coarse = rng.random(shape) < 0.4
    logits[is_coarse] = np.round(logits[is_coarse])
    logits[..., vocabulary.n_addressable :] = 1e4
    return logits.astype(np.float32)


def decided_logits(rng: Generator, mirror: Mirror, round_: Round, previous: Launched | None = None) -> Float32s:
    """Some logits of a round, with most drafts right, from which no draw is on an edge."""
    while True:
        logits = some_logits(rng, round_.token_ids.shape, mirror.vocabulary)
        make_drafts_right(logits, round_.token_ids, rng)
        if mirror.is_decided(round_, logits, previous):
            return logits


def some_masks(rng: Generator, shape: tuple[int, ...], vocabulary: Vocabulary) -> Uint32s:
    """From one allowed id to almost all."""
    words = -(-vocabulary.n_rows // 32)
    bits = rng.random((*shape, 32 * words)) < rng.choice([0.0, 0.01, 0.5, 0.95], (*shape, 1))
    np.put_along_axis(bits, rng.integers(0, vocabulary.n_addressable, (*shape, 1)), True, -1)
    return np.packbits(bits, axis=-1, bitorder="little").view("<u4")


def make_drafts_right(logits: Float32s, token_ids: Int32s, rng: Generator) -> None:
    """Raise the logit of most drafts in the column before, so that rows accept some."""
    for b in range(len(token_ids)):
        for i in range(1, token_ids.shape[1]):
            if rng.random() < 0.75:
                logits[b, i - 1, token_ids[b, i]] = 40.0


def check_rounds(bench: Bench, seed: int, n_rounds: int) -> None:
    """Random rounds of any kind, on the device and on the reference."""
    rng, vocabulary = np.random.default_rng(seed), bench.vocabulary
    for _ in range(n_rounds):
        b, q = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        mirror = Mirror(vocabulary)
        mirror.counts[:] = rng.choice([0, 0, 0, 1, 3], mirror.counts.shape)
        bench.set_counts(mirror.counts)
        few = rng.choice(vocabulary.n_addressable, 4)  # drafts repeat
        token_ids = rng.choice(few, (b, q)).astype(np.int32)
        round_ = make_round(
            token_ids,
            tuple(some_params(rng, vocabulary.n_addressable) for _ in range(b)),
            n_columns=rng.integers(1, q + 1, b).astype(np.int32),
            starts=rng.integers(0, 2**20, b).astype(np.int32),
            slots=rng.permutation(8)[:b].astype(np.int32),
            stop_ids=tuple(frozenset(rng.choice(few, int(rng.integers(0, 3))).tolist()) for _ in range(b)),
            budget=rng.integers(1, 6, b).astype(np.int32),
            verify=bool(rng.random() < 0.75),
            logits_mask=some_masks(rng, (b, q), vocabulary) if rng.random() < 0.3 else None,
            n_top_logprobs=[None, 0, 1, 20, 100][rng.integers(0, 5)],
        )
        logits = decided_logits(rng, mirror, round_)
        try:
            assert_same(bench.play(round_, logits), mirror.launch(round_, logits).result)
        except AssertionError:
            print(replace(round_, logits_mask=None), "masked:", round_.logits_mask is not None)
            raise
