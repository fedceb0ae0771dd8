"""Kept prefixes on a card: states and pages taken up again give the answers of a cold engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ninfer_runtime import Engine, EngineConfig
from ninfer_runtime.config import KvDtype
from ninfer_runtime.text.frontend import Frontend
from tests.runtime.artifacts import TRAINED, convert
from tests.runtime.revisits import assert_warm_is_cold

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

COLD = EngineConfig(backend="cuda", device="cuda", dtype="bfloat16", max_context=320, prefill_chunk=128)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "dense.ninfer"
    convert(TRAINED / "dense", path, "groupwise-int")
    return path


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp6"])
@pytest.mark.parametrize("device, host, drafts", [(3, 0, 0), (1, 2, 3), (0, 3, 0)])
def test_conversations_taken_up_again_are_answered_as_by_a_cold_engine(
    path: Path, kv_dtype: KvDtype, device: int, host: int, drafts: int
) -> None:
    """Cases F1 and F6: branches and ways back, with states on the device, in host memory and moving between them."""
    plain = replace(COLD, kv_dtype=kv_dtype)
    if drafts:
        plain = replace(plain, spec="mtp", draft_tokens=drafts)
    keeping = replace(plain, prefix_reuse=True, snapshots=device, host_snapshots=host, kv_capacity=512)
    with Engine.open(path, plain) as cold, Engine.open(path, keeping) as warm:
        assert assert_warm_is_cold(warm, cold, Frontend.open(warm.artifact), max_new=24) > 100
        assert warm.stats().snapshots_used == device + host
