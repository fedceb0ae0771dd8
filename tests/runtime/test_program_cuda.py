"""The reference backend on a CUDA device: the promises of the CPU hold there too, and both agree to rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ninfer_runtime.backends.base import ProgramOptions
from ninfer_runtime.backends.reference import ReferenceBackend
from ninfer_runtime.backends.reference.program import ReferenceProgram
from ninfer_runtime.config import Dtype, SamplingParams
from ninfer_runtime.models.binder import BoundModel
from tests.runtime.programs import LIMITS, Row, cuts, emitted, play, prefill, program_of, random_ids, step

pytestmark = pytest.mark.gpu
N_TOKENS = 120


def cuda_program(model: BoundModel, dtype: Dtype = "float32") -> ReferenceProgram:
    backend = ReferenceBackend()
    return backend.create(model, backend.plan_memory(model, LIMITS, ProgramOptions(device="cuda", dtype=dtype)))


def test_float32_logits_equal_the_cpu_to_rounding(model: BoundModel, fresh_seed: int) -> None:
    ids = random_ids(model, fresh_seed, N_TOKENS)
    expected, found = prefill(program_of(model), ids), prefill(cuda_program(model), ids)
    assert np.abs(found - expected).max() <= 2e-4 * np.ptp(expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuts_do_not_matter_on_the_device_either(model: BoundModel, dtype: Dtype, fresh_seed: int) -> None:
    program, ids = cuda_program(model, dtype), random_ids(model, fresh_seed, N_TOKENS)
    whole = prefill(program, ids)
    for chunks in ([1] * N_TOKENS, cuts(fresh_seed, N_TOKENS)):
        assert np.array_equal(whole, prefill(program, ids, chunks=chunks))


def test_drafts_snapshots_and_steps_agree_on_the_device(model: BoundModel, fresh_seed: int) -> None:
    program, ids = cuda_program(model), random_ids(model, fresh_seed, 61)
    row = Row(0, [7], SamplingParams(temperature=1.2, frequency_penalty=0.5, seed=fresh_seed))
    prefill(program, ids)
    snapshot = program.snapshot(0, "host")
    tokens = step(program, 7, 8, row)
    program.restore(0, snapshot)
    first = play(program, replace(row, inputs=[7, *tokens[:5]]))
    assert emitted(first) == tokens[:6]
    assert step(program, tokens[5], 2, row) == tokens[6:]
