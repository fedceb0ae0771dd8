"""Rounds without a model: random logits through the device's sampler and through the reference's, side by side."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from ninfer_runtime.backends.base import Float32s, Int32s, Logprobs, PrefillChunk, Round, RoundResult
from ninfer_runtime.backends.cuda.arena import Arena, ArenaPlan, Taker
from ninfer_runtime.backends.cuda.device import Device
from ninfer_runtime.backends.cuda.ops.round_begin import Counts, CountsMemory, RoundBegin
from ninfer_runtime.backends.cuda.ops.round_state import (
    MAX_COLUMNS,
    MAX_ROWS,
    ROW_STATE,
    RoundBuffers,
    RoundLayout,
    RoundMemory,
)
from ninfer_runtime.backends.cuda.ops.sampling import Sampler, SamplerMemory, SamplerShape
from ninfer_runtime.backends.reference import sampling
from ninfer_runtime.backends.reference.book import Launched
from ninfer_runtime.backends.reference.results import Evaluation, round_result
from ninfer_runtime.backends.reference.rounds import RowTask
from ninfer_runtime.config import SamplingParams
from ninfer_runtime.models.spec import ModelSpec

N_SLOTS = 9
PAGES = 5
EDGE = 1e-3
"""Of an id's even share of the vocabulary: a few 1e-7 of all; float32 sums of shares were seen to be off by 1e-8."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Head rows, ids that may be drawn, elements between rows of logits."""

    n_rows: int
    n_addressable: int
    stride: int


TINY = Vocabulary(640, 601, 640)
ODD = Vocabulary(3001, 2999, 3001)


def make_round(token_ids: Int32s, sampling: tuple[SamplingParams, ...], **changes: Any) -> Round:
    """A round of rows 0 .. B - 1 with plenty of budget and no stop ids, unless ``changes`` say otherwise."""
    b, q = token_ids.shape
    plain = Round(
        slots=np.arange(b, dtype=np.int32),
        token_ids=token_ids,
        n_columns=np.full(b, q, np.int32),
        starts=np.arange(b, dtype=np.int32) * 7,
        rope_deltas=np.zeros(b, np.int32),
        pages=np.zeros((b, 1), np.int32),
        sampling=sampling,
        stop_ids=(frozenset(),) * b,
        budget=np.full(b, 100, np.int32),
    )
    return replace(plain, **changes)


def is_decided(draw: Callable[[], object], vocabulary: Vocabulary) -> bool:
    """Whether ``draw`` gives the same with the reference's random numbers a little smaller or larger.

    The device adds up shares in float32, the reference in float64. A number closer than their difference to the edge
    between two candidates' shares may fall to either, and nothing says that both take the same one.
    """
    uniform, edge, found = sampling.uniform, EDGE / vocabulary.n_addressable, []
    for shift in (-edge, 0.0, edge):
        with patch.object(
            sampling, "uniform", lambda *at, shift=shift: min(max(uniform(*at) + shift, 0.0), 1 - 2.0**-53)
        ):
            found.append(draw())
    return found[0] == found[1] == found[2]


class Mirror:
    """The reference's rounds, from given logits."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        text = SimpleNamespace(vocab_rows=vocabulary.n_rows, hidden=16)
        self._spec = cast(ModelSpec, SimpleNamespace(text=text, n_addressable=vocabulary.n_addressable))
        self.counts = np.zeros((N_SLOTS, vocabulary.n_rows), np.int32)

    def launch(self, round_: Round, logits: Float32s, previous: Launched | None = None) -> Launched:
        """Its outcome; the previous round is committed by its own counts."""
        if previous is not None:
            self.count(previous.round, previous.result, previous.result.emitted)
        tasks = [self._task(round_, b, previous) for b in range(round_.n_rows)]
        evaluations = [None if task is None else self._rows(round_, b, logits) for b, task in enumerate(tasks)]
        result = round_result(round_, tasks, evaluations, self._spec)
        budgets = np.array([0 if task is None else task.budget for task in tasks], np.int32)
        return Launched(round_, result, [], budgets)

    def is_decided(self, round_: Round, logits: Float32s, previous: Launched | None = None) -> bool:
        """Whether no draw of this launch is on an edge; nothing is counted."""

        def tokens() -> object:
            twin = copy(self)
            twin.counts = self.counts.copy()
            return twin.launch(round_, logits, previous).result.token_ids.tolist()

        return is_decided(tokens, self.vocabulary)

    def count(self, round_: Round, result: RoundResult, n_tokens: Int32s) -> None:
        """Occurrences of the first tokens of each row."""
        for b, slot in enumerate(round_.slots):
            np.add.at(self.counts[slot], result.token_ids[b, : n_tokens[b]], 1)

    def _task(self, round_: Round, b: int, previous: Launched | None) -> RowTask | None:
        token_ids = round_.token_ids[b, : round_.n_columns[b]].copy()
        start, budget = int(round_.starts[b]), int(round_.budget[b])
        if previous is not None:
            following = previous.continuation(b)
            if following is None:
                return None
            token_ids[0], start, budget = following
        masks = None if round_.logits_mask is None else round_.logits_mask[b]
        counts = self.counts[round_.slots[b]]
        return RowTask(token_ids, start, round_.sampling[b], counts, round_.stop_ids[b], budget, masks)

    def _rows(self, round_: Round, b: int, logits: Float32s) -> Evaluation:
        n = int(round_.n_columns[b])
        return Evaluation(logits[b, 0 if round_.verify else n - 1 : n], None)


class Bench:
    """The operators of one program: memory, transfers and the two launches around a model that is not there."""

    def __init__(self, device: Device, vocabulary: Vocabulary, **shape: int) -> None:
        self.device, self.vocabulary = device, vocabulary
        self._shape = SamplerShape(vocabulary.n_addressable, vocabulary.stride, **shape)
        self._layout = RoundLayout(PAGES, vocabulary.n_rows, vocabulary.n_addressable)
        plan = ArenaPlan()
        self._take(plan)
        self._arena = Arena(device, plan.n_bytes)
        self.memory, sampler_memory, counts, self._logits = self._take(self._arena)
        self.stream = device.stream()
        self.buffers = RoundBuffers(device, self._layout)
        self.counts = Counts(device, counts, self.stream)
        self.begin = RoundBegin(device, self.memory, counts)
        self.sampler = Sampler(device, self._shape, sampler_memory, self.memory, counts)

    def _take(self, taker: Taker) -> tuple[RoundMemory, SamplerMemory, CountsMemory, int]:
        return (
            RoundMemory.take(taker, "round", self._layout),
            SamplerMemory.take(taker, "round", self._shape),
            CountsMemory.take(taker, N_SLOTS, self.vocabulary.n_rows),
            taker.take("logits", 4 * MAX_ROWS * MAX_COLUMNS * self.vocabulary.stride),
        )

    def set_counts(self, counts: NDArray[np.int32]) -> None:
        """Occurrences of every slot, int32 [N_SLOTS, head rows]."""
        wide = np.zeros((N_SLOTS, self.counts.memory.stride), np.int32)
        wide[:, : counts.shape[1]] = counts
        self.device.upload(self.counts.memory.pointer, wide)

    def get_counts(self) -> NDArray[np.int32]:
        """The same, from the device."""
        wide = np.zeros((N_SLOTS, self.counts.memory.stride), np.int32)
        self.device.synchronize()
        self.device.download(self.counts.memory.pointer, wide)
        return wide[:, : self.vocabulary.n_rows]

    def start(self, round_: Round, *, record_buffer: int = 0) -> None:
        """Pack, upload, resolve."""
        b = round_.n_rows
        fold = np.arange(b, dtype=np.int32) % 3
        buffers = np.full(b, record_buffer, np.int32)
        self.buffers.pack(round_, fold, 1 - buffers, buffers)
        self.device.upload(self.memory.input, self.buffers.packed, self.stream)
        if self.buffers.packed_masks.size:
            self.device.upload(self.memory.masks, self.buffers.packed_masks, self.stream)
        self.begin.launch(self.stream, b, round_.token_ids.shape[1])

    def rows(self) -> NDArray[Any]:
        """RowState[8] as it is now."""
        rows = np.zeros(MAX_ROWS, ROW_STATE)
        self.device.synchronize(self.stream)
        self.device.download(self.memory.rows, rows.view(np.uint8))
        return rows

    def tokens(self, b: int, q: int) -> Int32s:
        """Resolved inputs."""
        tokens = np.zeros((b, q), np.int32)
        self.device.synchronize(self.stream)
        self.device.download(self.memory.tokens, tokens)
        return tokens

    def launch(self, b: int, q: int) -> None:
        """All kernels of a round."""
        self.begin.launch(self.stream, b, q)
        self.sampler.launch(self.stream, b, q, self._logits)

    def finish(self, round_: Round, logits: Float32s) -> RoundResult:
        """Sample from logits [B, q, head rows], download, unpack."""
        b, q = round_.token_ids.shape
        self._put_logits(logits)
        self.sampler.launch(self.stream, b, q, self._logits)
        return self.read(round_)

    def _put_logits(self, logits: Float32s) -> None:
        wide = np.full((*logits.shape[:2], self.vocabulary.stride), np.nan, np.float32)
        wide[..., : self.vocabulary.n_rows] = logits
        self.device.upload(self._logits, wide)

    def read(self, round_: Round) -> RoundResult:
        """Download and unpack."""
        self.device.download(self.memory.result, self.buffers.result, self.stream)
        self.device.synchronize(self.stream)
        return self.buffers.unpack(round_)

    def play_prompt(self, chunk: PrefillChunk, logits: Float32s) -> tuple[int | None, Logprobs | None]:
        """The draw behind a prompt chunk from logits [1, 1, head rows]."""
        self.buffers.pack_prompt(chunk)
        self.device.upload(self.memory.input, self.buffers.packed, self.stream)
        self._put_logits(logits)
        self.launch(1, 1)
        self.device.download(self.memory.result, self.buffers.result, self.stream)
        self.device.synchronize(self.stream)
        return self.buffers.unpack_prompt(chunk)

    def play(self, round_: Round, logits: Float32s) -> RoundResult:
        """One whole round."""
        self.start(round_)
        return self.finish(round_, logits)


def assert_same(result: RoundResult, expected: RoundResult) -> None:
    """Everything but raw logits and hidden rows; log probabilities to 1e-5."""
    assert result.status == expected.status
    for name in ("token_ids", "accepted", "emitted", "columns", "starts"):
        assert np.array_equal(getattr(result, name), getattr(expected, name)), name
    assert (result.logprobs is None) == (expected.logprobs is None)
    if result.logprobs is not None and expected.logprobs is not None:
        np.testing.assert_allclose(result.logprobs.chosen, expected.logprobs.chosen, rtol=2e-6, atol=1e-5)
        np.testing.assert_allclose(result.logprobs.top, expected.logprobs.top, rtol=2e-6, atol=1e-5)
        assert np.array_equal(result.logprobs.top_ids, expected.logprobs.top_ids)
