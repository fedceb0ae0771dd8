"""Answers of the trained tiny model in every recipe, through rounds and drafts on the emulator."""

from __future__ import annotations

import pytest

from ninfer_format import Artifact
from ninfer_runtime.backends import backend
from ninfer_runtime.backends.base import Backend
from ninfer_runtime.backends.cuda.backend import CudaBackend
from ninfer_runtime.config import EngineConfig, SamplingParams
from ninfer_runtime.engine import engine as engine_module
from ninfer_runtime.engine.engine import Engine
from ninfer_runtime.engine.sequence import Request
from ninfer_runtime.text.frontend import Frontend
from ninfer_runtime.text.messages import parse_conversation
from tests.emulator.device import EmulatedDevice
from tests.runtime.conftest import ArtifactOf

MAX_NEW = 12


SLOW = pytest.mark.slow


@pytest.mark.parametrize("recipe", ["nvfp4", pytest.param("w8", marks=SLOW), pytest.param("bf16", marks=SLOW)])
def test_greedy_answers_with_drafts_are_those_of_the_reference_engine(
    recipe: str, artifact_of: ArtifactOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_emulator(name: str) -> Backend:
        return CudaBackend(EmulatedDevice(n_sms=4)) if name == "cuda" else backend(name)

    monkeypatch.setattr(engine_module, "backend", on_emulator)
    path = artifact_of("dense", recipe)
    with Artifact.open(path) as artifact:
        frontend = Frontend.open(artifact)
        question = parse_conversation([{"role": "user", "content": "What is 17 + 15?"}], [])
        prompt = frontend.prompt(question, thinking=False)
        request = Request(
            prompt.token_ids, SamplingParams.greedy(), max_new=MAX_NEW, stop_ids=frontend.generation.stop_ids
        )
    drafting = EngineConfig(
        backend="cuda", device="cuda", dtype="bfloat16", max_context=128, prefill_chunk=128, spec="mtp", draft_tokens=2
    )
    answers = []
    for config in (drafting, EngineConfig(dtype="float32", max_context=128)):
        with Engine.open(path, config) as engine:
            answers.append([event.token_id for event in engine.generate(request)])
    assert answers[0] == answers[1]
    assert len(answers[0]) > 3
