"""Speculation on a card: the tokens of one at a time, whatever is drafted; most drafts of a trained model are right."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ninfer_format import Artifact
from ninfer_runtime.backends.base import Int32s, ProgramLimits, ProgramOptions
from ninfer_runtime.backends.cuda.backend import CudaBackend
from ninfer_runtime.backends.cuda.program import CudaProgram
from ninfer_runtime.config import KvDtype, SamplingParams
from ninfer_runtime.models.binder import BoundModel, bind
from tests.runtime.artifacts import ROOT, TRAINED, convert

sys.path.insert(0, str(ROOT / "tests" / "oracle"))

from tests.runtime import speaking
from tests.runtime.programs import GREEDY, LIMITS, Row, emitted, int32, round_of
from tests.runtime.speaking import SAMPLED, SPREAD, questions, stop_ids_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

# The helpers are written for the reference; they use nothing but the seam.
speak: Any = speaking.speak
opened: Any = speaking.opened
DRAFTS = replace(LIMITS, max_drafts=5)
N_PROMPTS, N_NEW = 24, 40
EQUAL_SHARE = 0.95
"""Of the answers: sums differ in their last bits between kernels, so a draw may fall on an edge."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BoundModel]:
    path = tmp_path_factory.mktemp("gpu") / "dense.ninfer"
    convert(TRAINED / "dense", path, "groupwise-int")
    with Artifact.open(path) as artifact:
        yield bind(artifact)


def drafting(model: BoundModel, kv_dtype: KvDtype = "bf16", limits: ProgramLimits = DRAFTS, **more: Any) -> CudaProgram:
    backend = CudaBackend()
    options = ProgramOptions(device="cuda", dtype="bfloat16", kv_dtype=kv_dtype, proposer="mtp", **more)
    return backend.create(model, backend.plan_memory(model, limits, options))


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp6"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, SPREAD], ids=["greedy", "sampled", "spread"])
def test_drafts_give_the_tokens_of_stepping(model: BoundModel, kv_dtype: KvDtype, sampling: SamplingParams) -> None:
    program, stop_ids, equal, rounds = drafting(model, kv_dtype), stop_ids_of(model), 0, []
    for i, prompt in enumerate(questions(model, 3, N_PROMPTS)):
        params = sampling if sampling.is_greedy else replace(sampling, seed=i)
        stepped = speak(program, prompt, N_NEW, sampling=params, stop_ids=stop_ids)
        spoken = speak(program, prompt, N_NEW, n_drafts=1 + i % 5, sampling=params, stop_ids=stop_ids)
        ahead = speak(program, prompt, N_NEW, n_drafts=1 + i % 5, sampling=params, stop_ids=stop_ids, one_ahead=True)
        assert (ahead.tokens, ahead.rounds) == (spoken.tokens, spoken.rounds)
        equal += spoken.tokens == stepped.tokens
        rounds += spoken.rounds
    drafted, accepted = (sum(pair[i] for pair in rounds) for i in range(2))
    print(json.dumps({"kv": kv_dtype, "equal": equal, "drafted": drafted, "accepted": accepted}))
    assert equal >= EQUAL_SHARE * N_PROMPTS
    assert accepted > 0.6 * drafted
    program.close()


def test_the_draft_head_and_rows_together(model: BoundModel) -> None:
    program = drafting(model, draft_head=True)
    prompts: list[Int32s] = questions(model, 5, 4)
    alone = [speak(program, prompt, 12, n_drafts=3).tokens for prompt in prompts]
    together = [[int(opened(program, prompt, slot=b, n_drafts=3).token_id)] for b, prompt in enumerate(prompts)]
    while min(map(len, together)) < 12:
        rows = (Row(b, [together[b][-1], 0, 0, 0]) for b in range(4))
        round_ = replace(round_of(program, *rows), own_drafts=True, n_drafts=int32(3, 3, 3, 3))
        result = program.read(ticket := program.launch(round_))
        program.commit(ticket)
        for b in range(4):
            together[b] += emitted(result, b)
    assert [tokens[:12] for tokens in together] == alone
    program.close()


def test_forced_acceptance_accepts_what_was_asked_for(model: BoundModel) -> None:
    program, prompt = drafting(model), questions(model, 3, 1)[0]
    program.bench_accept(0.5)
    rounds = speak(program, prompt, 150, n_drafts=3, sampling=replace(SPREAD, seed=1, temperature=2.0)).rounds
    program.bench_accept(0.0)
    first = np.array([right > 0 for drafted, right in rounds if drafted])
    assert 0.3 < first.mean() <= 1.0
    program.close()
