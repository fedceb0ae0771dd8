"""Speculation on the CUDA program (emulated): the tokens, drafts and states of the reference, whatever is drafted.

Sums differ in their last bits from the reference and between kernels, so seeds are fixed: with these no draw falls on
an edge. States are compared with tolerances that a column out of place, or a stale one, misses by far.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer_format import Artifact
from ninfer_format.errors import UsageError
from ninfer_runtime.backends.base import ContractError, Int32s, Place, PrefillChunk, ProgramLimits, ProgramOptions
from ninfer_runtime.backends.cuda import draft_pass
from ninfer_runtime.backends.cuda.backend import CudaBackend
from ninfer_runtime.backends.cuda.ops.draft import HELD_DRAFTS
from ninfer_runtime.backends.cuda.program import CudaProgram
from ninfer_runtime.backends.reference.program import ReferenceProgram
from ninfer_runtime.config import SamplingParams
from ninfer_runtime.models.binder import BoundModel, bind
from tests.emulator.device import EmulatedDevice
from tests.runtime import speaking
from tests.runtime.conftest import ArtifactOf
from tests.runtime.programs import GREEDY, LIMITS, Row, emitted, int32, pages_of, random_ids, round_of
from tests.runtime.speaking import SAMPLED, SPREAD, proposing, questions

SEED = 5
MAX_DRAFTS = 5
DRAFTS = replace(LIMITS, max_drafts=MAX_DRAFTS, device_snapshots=2, host_snapshots=1)
PENALISED = replace(GREEDY, presence_penalty=1.0, frequency_penalty=0.4)
BIASED = replace(SAMPLED, logit_bias=((5, 3.0), (9, -100.0)), min_p=0.02, seed=SEED)
KINDS = {"greedy": GREEDY, "penalised": PENALISED, "spread": replace(SPREAD, seed=SEED), "biased": BIASED}
WILD = SamplingParams(temperature=2.0, top_k=0, seed=SEED)
CLOSE = 0.05
"""Of the largest element: bfloat16 inputs of products, summed in another order."""


@pytest.fixture(scope="module")
def model(artifact_of: ArtifactOf) -> Iterator[BoundModel]:
    with Artifact.open(artifact_of("dense", "bf16")) as artifact:
        yield bind(artifact)


def drafting(model: BoundModel, limits: ProgramLimits = DRAFTS, **options: Any) -> CudaProgram:
    backend = CudaBackend(EmulatedDevice(n_sms=4))
    chosen = ProgramOptions(device="cuda", dtype="bfloat16", proposer="mtp", **options)
    return backend.create(model, backend.plan_memory(model, limits, chosen))


@pytest.fixture(scope="module")
def program(model: BoundModel) -> CudaProgram:
    return drafting(model)


@pytest.fixture(scope="module")
def reference(model: BoundModel) -> ReferenceProgram:
    return proposing(model, max_drafts=MAX_DRAFTS)


# The helpers are written for the reference; they use nothing but the seam.
speak: Any = speaking.speak
opened: Any = speaking.opened
round_with_drafts: Any = speaking.round_with_drafts


def draft_state(program: CudaProgram, slot: int = 0) -> tuple[NDArray[np.float32], ...]:
    """Hidden row of the last folded token; keys and values of the draft layer from index 1 on, [heads, n - 1, 256]."""
    n_tokens, r = program.length(slot), program._regions
    program.release(program.snapshot(slot))  # folds what is pending
    assert r.draft is not None
    device: Any = program.device
    hidden = program.model.spec.text.hidden
    row = device.get(r.draft.memory.hidden + 2 * slot * hidden, np.uint16, (hidden,))
    planes = r.kv.planes(r.kv_pool, r.kv.n_layers - 1)
    shape = (r.kv.n_pages, r.kv.n_kv_heads, 64, 256)
    pages = pages_of(slot)
    out = [row]
    for pointer in (planes.k, planes.v):
        plane = device.get(pointer, np.uint16, shape)[pages]
        out.append(np.moveaxis(plane, 1, 0).reshape(shape[1], -1, 256)[:, 1:n_tokens])
    return tuple((words.astype(np.uint32) << 16).view(np.float32) for words in out)


def reference_state(program: ReferenceProgram, slot: int = 0) -> tuple[NDArray[np.float32], ...]:
    recurrent, n_tokens = program._slots.recurrent[slot], program.length(slot)
    layer = len(program.model.spec.attention_layers)
    keys, values = program._pool.gather(layer, program._tensor(pages_of(slot)), n_tokens)
    return tuple(x.float().numpy().copy() for x in (recurrent.hidden[0], keys[:, 1:], values[:, 1:]))


def assert_close(found: tuple[NDArray[np.float32], ...], expected: tuple[NDArray[np.float32], ...]) -> None:
    for name, a, b in zip(("hidden row", "keys", "values"), found, expected, strict=True):
        assert a.shape == b.shape
        assert np.abs(a - b).max(initial=0.0) <= CLOSE * np.abs(b).max(initial=1e-6), name


def assert_state_of(program: CudaProgram, reference: ReferenceProgram, prompt: Int32s, tokens: list[int]) -> None:
    """The draft layer's state is that of a cold run over what was folded."""
    opened(reference, np.concatenate([prompt, np.array(tokens, np.int32)])[: program.length(0)])
    assert_close(draft_state(program), reference_state(reference))


def hold(program: CudaProgram, index: int, anchor: int, drafts: list[int], slot: int = 0) -> None:
    """Put drafts of the tokens behind ``anchor``, the sequence's token ``index``, into a slot."""
    assert program._regions.draft is not None
    held = np.zeros(1, HELD_DRAFTS)
    held["index"], held["anchor"], held["n_drafts"] = index, anchor, len(drafts)
    held["token_ids"][0, : len(drafts)] = drafts
    program.device.upload(program._regions.draft.memory.held + slot * HELD_DRAFTS.itemsize, held)


@pytest.mark.parametrize("name", KINDS)
def test_drafts_give_the_tokens_of_the_reference_and_of_stepping(
    model: BoundModel, program: CudaProgram, reference: ReferenceProgram, name: str
) -> None:
    sampling, prompt = KINDS[name], questions(model, 7, 1)[0]
    told = speak(reference, prompt, 12, n_drafts=5, sampling=sampling)
    for how in ({"n_drafts": 5}, {"n_drafts": 5, "one_ahead": True}):
        spoken = speak(program, prompt, 12, sampling=sampling, **how)
        assert (spoken.tokens, spoken.rounds) == (told.tokens, told.rounds)
        assert_state_of(program, reference, prompt, told.tokens)


@pytest.mark.parametrize("sampling", [WILD, replace(WILD, top_k=40, frequency_penalty=0.5)], ids=["wide", "cut"])
def test_wrong_drafts_of_its_own_change_nothing_either(
    model: BoundModel, program: CudaProgram, reference: ReferenceProgram, sampling: SamplingParams
) -> None:
    prompt = random_ids(model, SEED, 63)
    stepped = speak(program, prompt, 14, sampling=sampling).tokens
    for how in ({"n_drafts": 3}, {"n_drafts": 3, "one_ahead": True}):
        spoken = speak(program, prompt, 14, sampling=sampling, **how)
        assert spoken.tokens == stepped
        assert any(right < drafted for drafted, right in spoken.rounds)
        assert_state_of(program, reference, prompt, stepped)


@pytest.mark.parametrize("sampling", [SAMPLED, replace(WILD, top_k=40, top_p=0.9)], ids=["usual", "wild"])
def test_ratio_emits_what_the_reference_emits(model: BoundModel, sampling: SamplingParams) -> None:
    program = drafting(model, replace(DRAFTS, max_rows=1), acceptance="ratio")
    reference = proposing(model, acceptance="ratio")
    rounds = []
    for seed, prompt in enumerate(questions(model, SEED, 3)):
        params = replace(sampling, seed=seed)
        expected = speak(reference, prompt, 12, n_drafts=3, sampling=params)
        for one_ahead in (False, True):
            spoken = speak(program, prompt, 12, n_drafts=3, sampling=params, one_ahead=one_ahead)
            assert (spoken.tokens, spoken.rounds) == (expected.tokens, expected.rounds)
        rounds += expected.rounds
    assert any(right > 0 for _, right in rounds)
    assert sampling is SAMPLED or any(right < drafted for drafted, right in rounds)
    # Greedy rows, and rows that no limit cuts, are accepted as they are without ratio.
    for params in (GREEDY, replace(WILD, seed=3)):
        stepped = speak(program, prompt, 8, sampling=params)
        assert speak(program, prompt, 8, n_drafts=3, sampling=params).tokens == stepped.tokens


@pytest.mark.parametrize("options", [{"kv_dtype": "fp6"}, {"draft_head": True}], ids=str)
def test_formats_of_the_cache_and_the_draft_head_change_nothing_about_that(
    model: BoundModel, options: dict[str, Any]
) -> None:
    program = drafting(model, replace(DRAFTS, max_rows=1, max_columns=3, max_drafts=2), **options)
    prompt, sampling = questions(model, 7, 1)[0], KINDS["spread"]
    expected = speak(program, prompt, 10, sampling=sampling)
    spoken = speak(program, prompt, 10, n_drafts=2, sampling=sampling)
    assert spoken.tokens == expected.tokens
    assert sum(right for _, right in spoken.rounds) > 0


def test_stops_budgets_and_logprobs_are_those_of_the_reference(
    model: BoundModel, program: CudaProgram, reference: ReferenceProgram
) -> None:
    prompt = questions(model, SEED, 3)[1]
    whole = speak(reference, prompt, 9).tokens
    for n, stop_ids in ((2, frozenset[int]()), (3, frozenset[int]()), (20, frozenset({whole[6]}))):
        asked: dict[str, Any] = {"stop_ids": stop_ids, "n_top_logprobs": 3, "n_drafts": 4}
        expected, spoken = speak(reference, prompt, n, **asked), speak(program, prompt, n, **asked)
        assert (spoken.tokens, spoken.status, spoken.rounds) == (expected.tokens, expected.status, expected.rounds)
        for (chosen, ids, top), (found, found_ids, found_top) in zip(expected.logprobs, spoken.logprobs, strict=True):
            assert found_ids[0] == ids[0]
            np.testing.assert_allclose([found, *found_top], [chosen, *top], atol=0.1)


def test_chunks_of_a_prompt_and_restored_states_draft_the_same(
    model: BoundModel, program: CudaProgram, reference: ReferenceProgram
) -> None:
    prompt = questions(model, SEED, 4)[3]
    expected = opened(reference, prompt, n_drafts=MAX_DRAFTS)
    assert expected.drafts is not None
    openings: list[tuple[int, list[int]]] = [(0, [len(prompt)]), (1, [1, 9, len(prompt) - 10])]
    for slot, chunks in openings:
        found = opened(program, prompt, n_drafts=MAX_DRAFTS, slot=slot, chunks=chunks)
        assert (found.token_id, found.drafts.tolist()) == (expected.token_id, expected.drafts.tolist())
        assert_close(draft_state(program, slot), reference_state(reference))
    opened(program, prompt[:12])
    snapshot = program.snapshot(0)
    program.copy_pages(pages_of(0)[:1], pages_of(3)[:1])
    places: tuple[Place, ...] = ("host", "device")
    for place in places:
        snapshot = program.relocate(snapshot, place)
        opened(program, random_ids(model, 1, 50), n_drafts=2)
        program.restore(3, snapshot)
        warm = opened(program, prompt[12:], slot=3, n_drafts=MAX_DRAFTS, fresh=False)
        assert (warm.token_id, warm.drafts.tolist()) == (expected.token_id, expected.drafts.tolist())
        assert_close(draft_state(program, 3), reference_state(reference))
    program.release(snapshot)


def test_rows_draft_the_same_alone_and_among_others(model: BoundModel, program: CudaProgram) -> None:
    slots, params = (3, 0, 4), (KINDS["spread"], GREEDY, PENALISED)
    prompts = [*questions(model, SEED, 2), random_ids(model, SEED, 64)]

    def start(b: int) -> int:
        found = opened(program, prompts[b], slot=slots[b], n_drafts=3, sampling=params[b])
        return int(found.token_id)

    alone = []
    for b in range(3):
        tokens = [start(b)]
        for n in (1, 3, 2):
            round_ = round_with_drafts(program, tokens[-1], n_drafts=n, slot=slots[b], sampling=params[b])
            result = program.read(ticket := program.launch(round_))
            program.commit(ticket)
            tokens += emitted(result)
        alone.append(tokens)
    together = [[start(b)] for b in range(3)]
    for n in (1, 3, 2):
        rows = (Row(slots[b], [together[b][-1], *[0] * n], params[b]) for b in range(3))
        round_ = replace(round_of(program, *rows), own_drafts=True, n_drafts=int32(n, n, n))
        result = program.read(ticket := program.launch(round_))
        program.commit(ticket)
        for b in range(3):
            together[b] += emitted(result, b)
    assert together == alone


def test_rows_that_are_read_one_after_the_other_draft_the_same(
    model: BoundModel, program: CudaProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_pass, "rows_at_once", lambda limits: 1)
    apart = drafting(model, replace(DRAFTS, max_rows=2))
    prompts, found = questions(model, SEED, 2), []
    for some in (program, apart):
        tokens = [[opened(some, prompt, slot=b, n_drafts=3).token_id] for b, prompt in enumerate(prompts)]
        for _ in range(2):
            rows = (Row(b, [tokens[b][-1], 0, 0, 0]) for b in range(2))
            round_ = replace(round_of(some, *rows), own_drafts=True, n_drafts=int32(3, 3))
            result = some.read(ticket := some.launch(round_))
            some.commit(ticket)
            assert result.drafts is not None
            for b in range(2):
                tokens[b] += [*emitted(result, b), *result.drafts[b].tolist()]
                tokens[b].append(emitted(result, b)[-1])
        found.append(tokens)
    assert found[0] == found[1]


def test_a_shorter_commit_and_a_rollback_keep_the_last_hidden_row_right(
    model: BoundModel, program: CudaProgram, reference: ReferenceProgram
) -> None:
    prompt = questions(model, SEED, 3)[1]
    tokens = speak(reference, prompt, 7).tokens
    for columns in (0, 2, 4):
        opened(program, prompt, n_drafts=3)
        hold(program, len(prompt), tokens[0], tokens[1:4])
        round_ = round_with_drafts(program, tokens[0], n_drafts=3)
        result = program.read(ticket := program.launch(round_))
        assert emitted(result) == tokens[1:5]
        program.commit(ticket, int32(columns))
        cold = np.concatenate([prompt, np.array(tokens[:columns], np.int32)])
        opened(reference, cold)
        assert_close(draft_state(program), reference_state(reference))
        # The drafts belonged behind the last of the emitted tokens.
        again = round_with_drafts(program, tokens[columns], n_drafts=3)
        result = program.read(ticket := program.launch(again))
        assert result.drafted is not None
        assert result.drafted.tolist() == [3 if columns == 4 else 0]
        assert emitted(result)[:1] == tokens[columns + 1 : columns + 2]
        program.rollback(ticket)
        assert_close(draft_state(program), reference_state(reference))


def test_wrong_drafts_masks_and_forced_tokens(
    model: BoundModel, program: CudaProgram, reference: ReferenceProgram
) -> None:
    prompt = questions(model, SEED, 2)[1]
    free = speak(reference, prompt, 5).tokens
    words = -(-model.spec.text.vocab_rows // 32)
    for right in range(3):
        opened(program, prompt)
        drafts = [*free[1 : 1 + right], *((token + 1) % model.spec.n_addressable for token in free[1 + right : 4])]
        hold(program, len(prompt), free[0], drafts)
        result = program.read(ticket := program.launch(round_with_drafts(program, free[0], n_drafts=3)))
        program.rollback(ticket)
        assert (result.accepted.tolist(), emitted(result)) == ([right], free[1 : 2 + right])
        hold(program, len(prompt), free[0], free[1:4])
        mask = np.full((1, 4, words), 0xFFFFFFFF, np.uint32)
        mask[0, right, free[1 + right] // 32] &= ~np.uint32(1 << free[1 + right] % 32)
        round_ = round_with_drafts(program, free[0], n_drafts=3, logits_mask=mask)
        result = program.read(ticket := program.launch(round_))
        program.rollback(ticket)
        assert result.accepted.tolist() == [right]
        assert emitted(result)[:-1] == free[1 : 1 + right]
        assert emitted(result)[-1] != free[1 + right]
    opened(program, prompt, n_drafts=3)
    other = (free[0] + 1) % model.spec.n_addressable
    result = program.read(ticket := program.launch(round_with_drafts(program, other, n_drafts=3)))
    program.commit(ticket)
    cold = opened(reference, np.concatenate([prompt, int32(other)]), n_drafts=3)
    assert cold.drafts is not None
    assert result.drafted is not None
    assert result.drafts is not None
    assert (result.drafted.tolist(), emitted(result)) == ([0], [cold.token_id])
    assert result.drafts[0, :3].tolist() == cold.drafts.tolist()


def test_known_columns_are_read_too(model: BoundModel, program: CudaProgram, reference: ReferenceProgram) -> None:
    ids = questions(model, SEED, 3)[2]
    cold = opened(reference, ids, n_drafts=3)
    assert cold.drafts is not None
    opened(program, ids[:-4])
    round_ = replace(round_of(program, Row(0, ids[-4:].tolist()), verify=False), n_drafts=int32(3))
    result = program.read(ticket := program.launch(round_))
    program.commit(ticket)
    assert result.drafts is not None
    assert (emitted(result), result.drafts[0, :3].tolist()) == ([cold.token_id], cold.drafts.tolist())
    assert_close(draft_state(program), reference_state(reference))


def test_positions_of_media_are_those_of_the_token_before(
    model: BoundModel, program: CudaProgram, reference: ReferenceProgram
) -> None:
    prompt = random_ids(model, SEED, 70)
    axes = np.sort(np.random.default_rng(SEED).integers(0, 50, (3, 70)), 1).astype(np.int32)
    for some in (program, reference):
        some.reset(0)
        for begin, end in ((0, 1), (1, 31), (31, 70)):
            positions = np.ascontiguousarray(axes[:, begin:end])
            chunk = PrefillChunk(0, prompt[begin:end], begin, pages_of(0), positions)
            some.prefill(chunk if end < 70 else replace(chunk, sampling=GREEDY, n_drafts=2))
    assert_close(draft_state(program), reference_state(reference))
    with pytest.raises(ContractError, match="goes on at rotary position 70, its last token is at"):
        program.launch(round_with_drafts(program, 5, n_drafts=2))


def test_forced_acceptance_is_for_measurements_alone(model: BoundModel, program: CudaProgram) -> None:
    prompt = questions(model, SEED, 1)[0]
    plain = speak(program, prompt, 6)
    program.bench_accept(1.0)
    opened(program, prompt)
    hold(program, len(prompt), plain.tokens[0], [7, 8, 9])
    result = program.read(ticket := program.launch(round_with_drafts(program, plain.tokens[0], n_drafts=3)))
    program.commit(ticket)
    program.bench_accept(0.0)
    assert emitted(result)[:3] == [7, 8, 9]
    assert speak(program, prompt, 6).tokens == plain.tokens


def test_what_is_not_there_is_refused(model: BoundModel, artifact_of: ArtifactOf) -> None:
    backend = CudaBackend(EmulatedDevice(n_sms=4))
    options = ProgramOptions(device="cuda", dtype="bfloat16", proposer="mtp")
    with pytest.raises(UsageError, match="at least 1 with proposer"):
        backend.plan_memory(model, LIMITS, options)
    backend.plan_memory(model, replace(DRAFTS, max_rows=8, n_slots=8), options)


def test_a_sampled_seed_is_needed_for_drafts_too(model: BoundModel, program: CudaProgram) -> None:
    with pytest.raises(ContractError, match="without a seed"):
        opened(program, int32(1, 2, 3), n_drafts=2, sampling=SamplingParams(temperature=1.0))
