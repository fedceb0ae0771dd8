"""Rows with grammars in the engine: each token is the one its masks give, whether they come in front of the launch or
while the device works, whatever else runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from ninfer_format.errors import GenerationError
from ninfer_runtime import Engine, EngineConfig, FinishReason, Request, SamplingParams, TokenEvent
from ninfer_runtime.backends.base import Round, Ticket, Uint32s
from ninfer_runtime.engine.masks import MAX_DISTRUST
from ninfer_runtime.engine.sequence import Anchors, Forced
from tests.runtime.history_program import VOCAB, HistoryProgram, allowed, continuation, limits_of, next_token
from tests.runtime.test_engine_together import Counting, prompts

GREEDY = SamplingParams.greedy()
CONFIG = EngineConfig(max_context=256, prefill_chunk=128, max_concurrency=4)
STOPS = frozenset(range(900, 940))
WORDS = -(-VOCAB // 32)


@dataclass
class Every:
    """Of ``k`` ids one is forbidden, another one behind every text; stop ids come from the ``n``-th token on."""

    k: int
    n: int
    text: list[int] = field(default_factory=list)

    def mask(self, text: Sequence[int]) -> Uint32s:
        """What may follow a text: uint32 [WORDS]."""
        ids = np.arange(WORDS * 32)
        bits = (ids < VOCAB) & ((ids + 7 * len(text) + sum(text[-2:])) % self.k != 0)
        if len(text) < self.n:
            bits[list(STOPS)] = False
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def masks(self, drafts: Sequence[int], out: Uint32s) -> int:
        for i in range(len(drafts) + 1):
            out[i] = self.mask([*self.text, *drafts[:i]])
            if i == len(drafts) or not int(out[i, drafts[i] >> 5]) >> (drafts[i] & 31) & 1:
                return i + 1
        raise AssertionError("the last row has no draft behind it")

    def advance(self, token_id: int) -> None:
        mask = self.mask(self.text)
        assert int(mask[token_id >> 5]) >> (token_id & 31) & 1, "it was not allowed"
        self.text.append(token_id)


def expected(
    prompt: Sequence[int], params: SamplingParams, n_max: int, form: Every, stops: frozenset[int] = STOPS
) -> list[int]:
    """What one column at a time would say under the masks."""
    text: list[int] = []
    while len(text) < n_max and not (text and text[-1] in stops):
        text.append(allowed(next_token([*prompt, *text], params), form.mask(text)))
    return text


def ids(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token_id for event in events]


@pytest.mark.parametrize("k", [2, 9, 400])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_every_row_says_what_its_masks_let_it(k: int, drafts: int, ahead: bool, fresh_seed: int) -> None:
    program = HistoryProgram(limits_of(max_drafts=drafts, n_pages=64, device_snapshots=32), ahead=ahead)
    engine = Engine.of_program(program, replace(CONFIG, prefix_reuse=True))
    rng = np.random.default_rng(fresh_seed)
    requests, texts = [], []
    for i, prompt in enumerate(prompts(fresh_seed, 12, 90)):
        sampling = SamplingParams(seed=i) if i % 4 == 3 else GREEDY
        n_max, form = int(rng.integers(1, 60)), Every(k, int(rng.integers(0, 30)))
        bound = i % 3 != 2
        requests.append(Request(prompt, sampling, n_max, STOPS, grammar=form if bound else None))
        texts.append(expected(prompt, sampling, n_max, form) if bound else continuation(prompt, sampling, n_max, STOPS))
    handles = [engine.generate(request) for request in requests]
    for handle, text in zip(handles, texts, strict=True):
        assert ids(list(handle)) == text
        assert handle.finish is not None
        ended = text[-1] in STOPS
        assert handle.finish.reason is (FinishReason.STOP_TOKEN if ended else FinishReason.OUTPUT_LIMIT)
    stats = engine.stats()
    assert stats.pages_used == stats.pages_cached
    assert stats.generated_tokens == sum(map(len, texts))
    for request, text in zip(requests, texts, strict=True):  # what was kept is the text that was said
        again = (*request.token_ids, *text, 5)
        handle = engine.generate(Request(again, GREEDY, 9))
        assert ids(list(handle)) == continuation(again, GREEDY, 9)
    engine.close()


class Launches(HistoryProgram):
    """Notes which rounds had their masks at the launch."""

    def __init__(self, *, max_drafts: int = 0) -> None:
        super().__init__(limits_of(max_drafts=max_drafts), ahead=True)
        self.had_masks: list[bool] = []

    def launch(self, round_: Round) -> Ticket:
        self.had_masks.append(round_.logits_mask is not None)
        return super().launch(round_)


def test_greedy_rows_that_keep_to_their_form_are_not_waited_for(fresh_seed: int) -> None:
    (prompt,) = prompts(fresh_seed, 1)
    for sampling, masked in ((GREEDY, False), (SamplingParams(seed=3), True)):
        program = Launches()
        engine = Engine.of_program(program, CONFIG)
        list(engine.generate(Request(prompt, sampling, 30, grammar=Every(10**6, 0))))
        assert program.had_masks == [masked] * 29


def test_a_row_that_leaves_its_form_is_waited_for_longer_each_time() -> None:
    program = Launches()
    engine = Engine.of_program(program, CONFIG)

    class Never(Every):
        """Allows everything but what the model says."""

        def mask(self, text: Sequence[int]) -> Uint32s:
            bits = np.arange(WORDS * 32) < VOCAB
            bits[next_token([1, 2, *text], GREEDY)] = False
            return np.packbits(bits, bitorder="little").view(np.uint32)

    handle = engine.generate(Request((1, 2), GREEDY, 200, grammar=Never(2, 0)))
    text = ids(list(handle))
    assert text == expected((1, 2), GREEDY, 200, Never(2, 0), frozenset())
    waits: list[int] = []
    n = 1
    while sum(waits) < 199:  # the first token is the prompt's
        waits.append(min(n, MAX_DISTRUST, 199 - sum(waits)))
        n *= 2
    assert program.had_masks == [masked for wait in waits for masked in [False, *[True] * wait]]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("at", [1, 4])
def test_forced_text_and_cancelled_neighbours_leave_the_form_alone(drafts: int, at: int, fresh_seed: int) -> None:
    engine = Engine.of_program(HistoryProgram(limits_of(max_drafts=drafts), ahead=True), CONFIG)
    asked, form = prompts(fresh_seed, 3, 60), Every(9, 0)
    text = expected(asked[0], GREEDY, at, form, frozenset())
    for _ in range(3):
        text.append(allowed(650, form.mask(text)))
    forced = Forced(tuple(text[at:]))
    while len(text) < 25:
        text.append(allowed(next_token([*asked[0], *text], GREEDY), form.mask(text)))
    first = engine.generate(Request(asked[0], GREEDY, 25, reader=Counting(at, forced), grammar=form))
    other = engine.generate(Request(asked[1], GREEDY, 40, grammar=Every(2, 0), anchors=Anchors()))
    free = engine.generate(Request(asked[2], GREEDY, 12))
    next(other)
    other.cancel()
    assert ids(list(first)) == text
    assert ids(list(free)) == continuation(asked[2], GREEDY, 12)


def test_a_grammar_that_fails_late_ends_its_row_only(fresh_seed: int) -> None:
    engine = Engine.of_program(HistoryProgram(limits_of(max_drafts=0)), CONFIG)
    asked = prompts(fresh_seed, 2)

    class Failing(Every):
        def masks(self, drafts: Sequence[int], out: Uint32s) -> int:
            if len(self.text) == 5:
                raise ValueError("no way on")
            return super().masks(drafts, out)

    bad = engine.generate(Request(asked[0], GREEDY, 20, grammar=Failing(10**6, 0)))
    good = engine.generate(Request(asked[1], GREEDY, 20, grammar=Every(10**6, 0)))
    with pytest.raises(GenerationError, match="no way on"):
        list(bad)
    assert bad.n_generated == 5
    assert ids(list(good)) == expected(asked[1], GREEDY, 20, Every(10**6, 0), frozenset())
    assert engine.stats().is_healthy
