"""Kept prefixes on the CUDA program (emulated): states and pages taken up again give the answers of a cold engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ninfer_runtime.backends import backend
from ninfer_runtime.backends.base import Backend
from ninfer_runtime.backends.cuda.backend import CudaBackend
from ninfer_runtime.config import EngineConfig, KvDtype
from ninfer_runtime.engine import engine as engine_module
from ninfer_runtime.engine.engine import Engine
from ninfer_runtime.text.frontend import Frontend
from tests.emulator.device import EmulatedDevice
from tests.runtime.conftest import ArtifactOf
from tests.runtime.revisits import assert_warm_is_cold

COLD = EngineConfig(backend="cuda", device="cuda", dtype="bfloat16", max_context=320, prefill_chunk=128)


@pytest.mark.parametrize(
    "kv_dtype, device, host, drafts, max_new",
    [
        ("bf16", 1, 2, 0, 3),
        ("int8", 0, 3, 2, 3),
        *(pytest.param(*one, 12, marks=pytest.mark.slow) for one in (("bf16", 3, 0, 3), ("fp6", 0, 3, 0))),
    ],
)
def test_conversations_taken_up_again_are_answered_as_by_a_cold_engine(
    artifact_of: ArtifactOf,
    monkeypatch: pytest.MonkeyPatch,
    kv_dtype: KvDtype,
    device: int,
    host: int,
    drafts: int,
    max_new: int,
) -> None:
    """Cases F1 and F6: branches and ways back, with states on the device, in host memory and moving between them."""

    def on_emulator(name: str) -> Backend:
        return CudaBackend(EmulatedDevice(n_sms=4)) if name == "cuda" else backend(name)

    monkeypatch.setattr(engine_module, "backend", on_emulator)
    path = artifact_of("dense", "groupwise-int")
    plain = replace(COLD, kv_dtype=kv_dtype)
    if drafts:
        plain = replace(plain, spec="mtp", draft_tokens=drafts)
    keeping = replace(plain, prefix_reuse=True, snapshots=device, host_snapshots=host, kv_capacity=512)
    with Engine.open(path, plain) as cold, Engine.open(path, keeping) as warm:
        assert assert_warm_is_cold(warm, cold, Frontend.open(warm.artifact), max_new) > 100
        stats = warm.stats()
        assert stats.snapshots_used == device + host
        assert stats.pages_used == stats.pages_cached
