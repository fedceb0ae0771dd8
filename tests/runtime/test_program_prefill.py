"""Prompts: cuts do not matter, overrides and positions do what they say, plans hold, bad calls are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ninfer_format.errors import UsageError
from ninfer_runtime.backends.base import ContractError, EmbeddingRows, PrefillChunk, ProgramLimits, ProgramOptions
from ninfer_runtime.backends.reference import ReferenceBackend, weights
from ninfer_runtime.config import Dtype, SamplingParams
from ninfer_runtime.models.binder import BoundModel
from tests.runtime.programs import (
    GREEDY,
    LIMITS,
    cuts,
    int32,
    pages_of,
    prefill,
    program_of,
    random_ids,
    same,
    state_of,
)
from tests.runtime.routing import clear_prompt

N_TOKENS = 150


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunked_prefill_equals_one_shot_bit_for_bit(model: BoundModel, dtype: Dtype, fresh_seed: int) -> None:
    program, ids = program_of(model, dtype), random_ids(model, fresh_seed, N_TOKENS)
    whole = prefill(program, ids)
    state = state_of(program)
    for chunks in ([1] * N_TOKENS, [64, 64, 22], cuts(fresh_seed, N_TOKENS)):
        assert np.array_equal(whole, prefill(program, ids, chunks=chunks)), f"logits depend on the cuts {chunks}"
        assert same(state, state_of(program)), f"state depends on the cuts {chunks}"


def test_results_do_not_depend_on_what_stays_resident(model: BoundModel, fresh_seed: int) -> None:
    ids, backend = random_ids(model, fresh_seed, 20), ReferenceBackend()
    results = []
    for budget in (0, 100_000, 1 << 30):
        plan = backend.plan_memory(model, LIMITS, ProgramOptions(weight_budget=budget))
        assert plan.weight_bytes <= budget
        results.append(prefill(backend.create(model, plan), ids))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_matrix_of_many_blocks_is_decoded_ahead_and_in_order(
    model: BoundModel, monkeypatch: pytest.MonkeyPatch, fresh_seed: int
) -> None:
    program, backend = program_of(model), ReferenceBackend()
    ids = int32(*clear_prompt(fresh_seed, 20, model.spec.n_addressable, lambda ids: prefill(program, int32(*ids))))
    whole = prefill(program, ids)
    monkeypatch.setattr(weights, "BLOCK_BYTES", 100 * 4 * model.spec.text.hidden)
    results = []
    for budget in (0, 300_000, 1 << 30):
        plan = backend.plan_memory(model, LIMITS, ProgramOptions(weight_budget=budget))
        program = backend.create(model, plan)
        results += [prefill(program, ids), prefill(program, ids)]
        assert program._weights.resident_bytes <= plan.weight_bytes
    assert all(np.array_equal(result, results[0]) for result in results)
    np.testing.assert_allclose(results[0], whole, rtol=0, atol=1e-4)


def test_bfloat16_stays_close_to_float32(dense: BoundModel, fresh_seed: int) -> None:
    ids = random_ids(dense, fresh_seed, 60)
    exact, rounded = (prefill(program_of(dense, dtype), ids) for dtype in ("float32", "bfloat16"))
    spread = float(np.ptp(exact))
    assert np.abs(exact - rounded).mean() < 0.005 * spread
    assert np.abs(exact - rounded).max() > 0, "bfloat16 must round somewhere"


def test_logits_come_for_none_the_last_or_all_tokens(model: BoundModel, fresh_seed: int) -> None:
    program, ids = program_of(model), random_ids(model, fresh_seed, 9)
    whole = prefill(program, ids)
    assert whole.shape == (9, model.spec.text.vocab_rows)
    for wanted, expected in (("none", whole[:0]), ("last", whole[-1:]), ("all", whole)):
        program.reset(0)
        chunk = PrefillChunk(0, ids, 0, pages_of(0), logits=wanted)  # type: ignore[arg-type]
        assert np.array_equal(program.prefill(chunk).logits, expected)
        program.reset(0)
        drawn = program.prefill(replace(chunk, sampling=GREEDY))
        assert np.array_equal(drawn.logits, expected)
        assert drawn.token_id == int(whole[-1, : model.spec.n_addressable].argmax())


def test_equal_positions_on_all_axes_are_the_default_and_other_axes_matter(dense: BoundModel, fresh_seed: int) -> None:
    program, ids = program_of(dense), random_ids(dense, fresh_seed, 12)
    plain = prefill(program, ids)
    index = np.tile(np.arange(12, dtype=np.int32), (3, 1))
    for axis in (None, 0, 1, 2):
        positions = index.copy()
        if axis is not None:
            positions[axis, 6:] += 3
        program.reset(0)
        found = program.prefill(PrefillChunk(0, ids, 0, pages_of(0), positions=positions, logits="all")).logits
        assert np.array_equal(found[:6], plain[:6])
        assert np.array_equal(found[6:], plain[6:]) == (axis is None)


def test_overridden_rows_replace_token_embeddings(dense: BoundModel, fresh_seed: int) -> None:
    program, ids = program_of(dense), random_ids(dense, fresh_seed, 10)
    expected = prefill(program, ids)
    rows = dense.artifact.rows("text/token_embedding", ids[[2, 7]])
    other = ids.copy()
    other[[2, 7]] = (other[[2, 7]] + 1) % dense.spec.n_addressable
    program.reset(0)
    override = EmbeddingRows(int32(2, 7), np.ascontiguousarray(rows))
    found = program.prefill(PrefillChunk(0, other, 0, pages_of(0), embeddings=override, logits="all")).logits
    assert np.array_equal(found, expected)


def test_hidden_rows_are_what_the_head_reads(dense: BoundModel, fresh_seed: int) -> None:
    program, ids = program_of(dense), random_ids(dense, fresh_seed, 5)
    result = program.prefill(PrefillChunk(0, ids, 0, pages_of(0), logits="all", want_hidden=True))
    assert result.hidden is not None
    assert result.hidden.shape == (5, dense.spec.text.hidden)
    by_hand = result.hidden @ dense.artifact.tensor("text/output_head").T
    np.testing.assert_allclose(by_hand, result.logits, rtol=0, atol=1e-4)


def test_non_finite_input_is_reported_and_leaves_nothing_behind(model: BoundModel, fresh_seed: int) -> None:
    program, ids = program_of(model), random_ids(model, fresh_seed, 70)
    clean = prefill(program, ids)
    bad = EmbeddingRows(int32(3), np.full((1, model.spec.text.hidden), np.nan, np.float32))
    program.reset(0)
    result = program.prefill(PrefillChunk(0, ids, 0, pages_of(0), embeddings=bad, sampling=GREEDY))
    assert not result.finite
    assert result.token_id is None
    # The pages still hold NaN beyond the row's length; a reused page must not show them.
    assert np.array_equal(prefill(program, ids), clean)


def test_logprobs_of_the_drawn_token_are_those_of_the_raw_logits(model: BoundModel, fresh_seed: int) -> None:
    program, ids = program_of(model), random_ids(model, fresh_seed, 8)
    raw = prefill(program, ids)[-1, : model.spec.n_addressable].astype(np.float64)
    expected = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
    hot = SamplingParams(temperature=2.0, top_p=1.0, top_k=0, presence_penalty=1.0, seed=fresh_seed)
    for n_top in (0, 1, 20):
        program.reset(0)
        result = program.prefill(PrefillChunk(0, ids, 0, pages_of(0), sampling=hot, n_top_logprobs=n_top))
        assert result.logprobs is not None
        assert float(result.logprobs.chosen) == pytest.approx(expected[result.token_id], abs=1e-5)
        best = np.argsort(-expected, kind="stable")[:n_top]
        assert result.logprobs.top_ids.tolist() == best.tolist()
        np.testing.assert_allclose(result.logprobs.top, expected[best], atol=1e-5)


def test_plan_counts_what_is_allocated(model: BoundModel) -> None:
    program = program_of(model)
    plan = program.plan
    assert plan.kv_bytes == program._pool.n_bytes
    states = sum(recurrent.n_bytes for recurrent in program._slots.recurrent)
    assert plan.state_bytes == states + program._slots.counts.nbytes
    assert plan.device_snapshot_bytes == 2 * plan.host_snapshot_bytes == 2 * states // LIMITS.n_slots
    prefill(program, int32(*range(200)))
    assert program._weights.resident_bytes <= plan.weight_bytes
    assert plan.device_bytes == sum(n for label, n in plan.rows() if label != "host snapshots")


CHUNK = PrefillChunk(0, int32(1, 2, 3), 0, int32(0, 1))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"slot": 5}, "slot 5 does not exist"),
        ({"slot": -1}, "slot -1 does not exist"),
        ({"start": 1}, "starts at 1, slot 0 holds 0"),
        ({"token_ids": int32()}, "0 tokens"),
        ({"token_ids": np.zeros(257, np.int32)}, "257 tokens"),
        ({"token_ids": int32(1, -2)}, "token_ids holds"),
        ({"token_ids": int32(1, 10**6)}, "token_ids holds"),
        ({"token_ids": np.array([1, 2])}, "token_ids is int64"),
        ({"pages": int32()}, "0 pages"),
        ({"pages": int32(-1)}, "holds"),
        ({"pages": int32(99)}, "holds"),
        ({"token_ids": np.zeros(65, np.int32), "pages": int32(2, 2)}, "twice"),
        ({"positions": np.zeros((3, 2), np.int32)}, "positions is int32"),
        ({"logits_mask": np.zeros(1, np.uint32), "sampling": GREEDY}, "logits_mask is uint32"),
        ({"embeddings": EmbeddingRows(int32(3), np.zeros((1, 128), np.float32))}, "embeddings.indices holds"),
        ({"embeddings": EmbeddingRows(int32(0), np.zeros((1, 7), np.float32))}, "embeddings.rows is"),
        ({"sampling": SamplingParams(temperature=1.0)}, "without a seed"),
    ],
)
def test_chunk_that_breaks_the_contract_is_refused(dense: BoundModel, change: dict[str, Any], message: str) -> None:
    program = program_of(dense)
    with pytest.raises(ContractError, match=message):
        program.prefill(replace(CHUNK, **change))


def test_limits_and_options_outside_the_backend_are_refused(dense: BoundModel) -> None:
    backend = ReferenceBackend()
    for bad in ({"max_rows": 2}, {"n_pages": 0}, {"device_snapshots": -1}, {"page_tokens": 32}):
        with pytest.raises(UsageError):
            ProgramLimits(**bad)
    for device in ("toaster", "cuda:99", "meta"):
        with pytest.raises(UsageError):
            backend.plan_memory(dense, LIMITS, ProgramOptions(device=device))
