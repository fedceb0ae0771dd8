"""The engine over the CUDA program on the emulator: rounds are launched one ahead, answers are the reference's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ninfer_format import Artifact
from ninfer_runtime.backends import backend
from ninfer_runtime.backends.base import Backend
from ninfer_runtime.backends.cuda.backend import CudaBackend
from ninfer_runtime.backends.cuda.program import CudaProgram
from ninfer_runtime.config import EngineConfig, SamplingParams
from ninfer_runtime.engine import engine as engine_module
from ninfer_runtime.engine.engine import Engine
from ninfer_runtime.engine.sequence import FinishReason, Request
from ninfer_runtime.text.frontend import Frontend
from ninfer_runtime.text.messages import parse_conversation
from tests.emulator.device import EmulatedDevice
from tests.runtime.conftest import ArtifactOf

QUESTIONS = ("What is the capital of France?", "What is 17 + 15?", "Tell me a short story.")


@pytest.fixture(scope="module")
def path(artifact_of: ArtifactOf) -> Path:
    return artifact_of("dense", "groupwise-int")


@pytest.fixture
def engine(path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    def on_emulator(name: str) -> Backend:
        return CudaBackend(EmulatedDevice(n_sms=4)) if name == "cuda" else backend(name)

    monkeypatch.setattr(engine_module, "backend", on_emulator)
    config = EngineConfig(backend="cuda", device="cuda", dtype="bfloat16", max_context=256, prefill_chunk=128)
    return Engine.open(path, config)


def requests(path: Path, sampling: SamplingParams, max_new: int = 40) -> list[Request]:
    frontend = Frontend.open(Artifact.open(path))
    out = []
    for question in QUESTIONS:
        prompt = frontend.prompt(parse_conversation([{"role": "user", "content": question}], []), thinking=False)
        stops = frontend.generation.stop_ids
        out.append(Request(prompt.token_ids, sampling, max_new=max_new, stop_ids=stops))
    return out


def tokens_of(engine: Engine, request: Request) -> list[int]:
    return [event.token_id for event in engine.generate(request)]


def test_greedy_answers_are_those_of_the_reference_engine(engine: Engine, path: Path) -> None:
    with engine, Engine.open(path, EngineConfig(dtype="float32", max_context=256)) as reference:
        for request in requests(path, SamplingParams.greedy()):
            assert tokens_of(engine, request) == tokens_of(reference, request)


def test_sampled_answers_repeat_with_their_seed(engine: Engine, path: Path) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95, top_k=20, presence_penalty=0.5, seed=11)
    with engine:
        for request in requests(path, sampling, max_new=24):
            assert tokens_of(engine, request) == tokens_of(engine, request)


def test_stopped_generation_leaves_the_engine_as_it_was(engine: Engine, path: Path) -> None:
    with engine:
        request = requests(path, SamplingParams.greedy())[2]
        whole = tokens_of(engine, request)
        generation = engine.generate(request)
        taken = [next(generation).token_id for _ in range(3)]
        generation.stop()
        assert list(generation) == []
        assert generation.finish is not None
        assert generation.finish.reason is FinishReason.STOP_STRING
        assert taken == whole[:3]
        assert tokens_of(engine, request) == whole


def test_drafts_change_no_answer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "backend", lambda name: CudaBackend(EmulatedDevice(n_sms=4)))
    config = EngineConfig(backend="cuda", device="cuda", dtype="bfloat16", max_context=256, prefill_chunk=128)
    wanted = requests(path, SamplingParams.greedy(), max_new=24)[:2]
    with Engine.open(path, config) as plain:
        expected = [tokens_of(plain, request) for request in wanted]
    with Engine.open(path, replace(config, spec="mtp", draft_tokens=3, max_concurrency=2)) as drafting:
        handles = [drafting.generate(request) for request in wanted]
        assert [[event.token_id for event in handle] for handle in handles] == expected
        stats = drafting.stats()
    assert stats.accepted > 0.6 * stats.drafted > 0


def test_start_says_which_card_and_which_paths(engine: Engine) -> None:
    with engine:
        assert isinstance(engine.program, CudaProgram)
        notes = dict(engine.program.notes)
    assert set(notes) == {"device", "loading", "matrices", "rounds"}
    # The gates of the tiny model have three rows, a tile has sixteen.
    assert "[3, 128] as [16, 128]" in notes["matrices"]


def test_logits_of_a_text_come_in_chunks(engine: Engine, path: Path) -> None:
    ids = list(requests(path, SamplingParams.greedy())[0].token_ids)
    with engine:
        logits = engine.teacher_forced_logits(ids)
    assert logits.shape == (len(ids), engine.model.spec.text.vocab_rows)
    assert np.isfinite(logits).all()
