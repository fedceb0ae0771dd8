"""The seam's own tests, run on the CUDA program: every promise of rounds, states and pages holds there too.

Not here: what the reference promises beyond the seam, the same bits for a row whatever shares its call and however a
prompt was cut. On a card the sums of a row depend on the kernels its call takes; ``CLOSE`` bounds the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer_format import Artifact
from ninfer_runtime.backends.base import ContractError, Place, PrefillChunk, ProgramOptions
from ninfer_runtime.backends.cuda.backend import CudaBackend
from ninfer_runtime.backends.cuda.program import CudaProgram
from ninfer_runtime.config import Dtype
from ninfer_runtime.models.binder import BoundModel, bind
from tests.emulator.device import EmulatedDevice
from tests.runtime import test_program_rounds, test_program_state
from tests.runtime.conftest import ArtifactOf
from tests.runtime.cuda.test_program import conversation
from tests.runtime.programs import LIMITS, Row, pages_of, play, prefill, random_ids, round_of

ROUNDS = (
    "test_right_drafts_emit_what_stepping_emits_and_leave_its_state",
    "test_wrong_draft_ends_the_row_with_the_targets_own_token",
    "test_rollback_and_a_commit_of_nothing_leave_a_row_untouched",
    "test_shorter_commit_folds_exactly_that_many_inputs",
    "test_stop_id_and_budget_cut_the_row_and_its_commit",
    "test_one_ahead_equals_one_at_a_time",
    "test_extra_round_is_discarded_without_trace",
    "test_rows_that_ended_freeze_in_the_round_ahead",
    "test_budget_runs_on_through_rounds_launched_ahead",
    "test_masks_restrict_each_column_and_padding_rows_stay_out",
    "test_mask_without_a_way_out_is_refused",
    "test_logprobs_of_drafted_tokens_are_true_values",
    "test_round_that_breaks_the_contract_is_refused",
    "test_tickets_are_used_in_order_and_once",
    "test_round_may_only_follow_one_with_the_same_slots",
)
STATE = (
    "test_snapshot_survives_its_slot_and_repeats",
    "test_restore_empties_counts_and_resuming_sets_them",
    "test_e1_penalties_count_generated_tokens_only",
    "test_e4_every_rejected_draft_leaves_the_counts_alone",
    "test_snapshots_beyond_the_plan_and_after_release_are_refused",
    "test_page_copies_outside_the_pool_are_refused",
)
CLOSE = 0.02
"""Of the range of the logits: bfloat16 activations, summed in another order."""

for _name in ROUNDS:
    globals()[_name] = getattr(test_program_rounds, _name)
for _name in STATE:
    globals()[_name] = getattr(test_program_state, _name)


@pytest.fixture(scope="module")
def model(artifact_of: ArtifactOf) -> Iterator[BoundModel]:
    """The dense model alone, in the formats the kernels are made for."""
    with Artifact.open(artifact_of("dense", "groupwise-int")) as artifact:
        yield bind(artifact)


@pytest.fixture(scope="module")
def dense(model: BoundModel) -> BoundModel:
    """The same."""
    return model


def cuda_program_of(model: BoundModel, dtype: Dtype = "bfloat16", **limits: Any) -> CudaProgram:
    """As ``programs.program_of``, on the emulator."""
    backend = CudaBackend(EmulatedDevice(n_sms=4))
    options = ProgramOptions(device="cuda", dtype="bfloat16", kv_dtype="bf16")
    return backend.create(model, backend.plan_memory(model, replace(LIMITS, **limits), options))


def cuda_state_of(program: CudaProgram, slot: int = 0) -> tuple[NDArray[Any], ...]:
    """Committed state of a slot with its pending record folded, bit for bit: recurrent state, counts, length."""
    length = program.length(slot)
    if slot not in program._book.busy_slots():
        program._flush(slot)
    part = program._state_parts()[0]
    state = np.empty(part.n_bytes, np.uint8)
    counts = np.empty(program._regions.counts.stride, np.int32)
    program.device.synchronize()
    program.device.download(part.of_slot(slot), state)
    program.device.download(program._regions.counts.slot(slot), counts)
    return np.empty(0), state, counts[: program.model.spec.text.vocab_rows], np.array(length)


def assert_close(found: NDArray[Any], expected: NDArray[Any]) -> None:
    assert np.abs(found - expected).max() <= CLOSE * np.ptp(expected)


@pytest.mark.parametrize("place", ["device", "host"])
def test_restored_prefix_in_another_slot_is_close_to_a_cold_run(model: BoundModel, place: Place) -> None:
    program, ids = cuda_program_of(model), conversation(model)
    n = len(ids) * 2 // 3
    cold = prefill(program, ids, slot=0)
    prefill(program, ids[:n], slot=1)
    snapshot = program.snapshot(1, place)
    program.restore(3, snapshot)
    pages = np.concatenate([pages_of(1)[:1], pages_of(3)[1:]])
    program.copy_pages(pages_of(1)[1:2], pages_of(3)[1:2])
    warm = program.prefill(PrefillChunk(3, ids[n:], n, pages, logits="all")).logits
    assert_close(warm, cold[n:])
    # The same cut gives the same bits, wherever the prefix came from.
    prefill(program, ids[:n], slot=2)
    again = program.prefill(PrefillChunk(2, ids[n:], n, pages_of(2), logits="all")).logits
    assert np.array_equal(warm, again)


def test_snapshot_that_moves_to_the_host_and_back_is_the_same_state(model: BoundModel) -> None:
    program, ids = cuda_program_of(model, device_snapshots=1, host_snapshots=1), conversation(model)
    prefill(program, ids, slot=0)
    expected = cuda_state_of(program, 0)
    on_device = program.snapshot(0)
    on_host = program.relocate(on_device, "host")
    assert (on_host.place, on_host.n_tokens) == ("host", len(ids))
    with pytest.raises(ContractError, match="released"):
        program.restore(1, on_device)
    prefill(program, ids[:9], slot=0)
    program.snapshot(0)  # takes the place that became free
    with pytest.raises(ContractError, match="planned for 1"):
        program.relocate(on_host, "device")
    with pytest.raises(ContractError, match="host memory already"):
        program.relocate(on_host, "host")
    program.restore(1, on_host)
    found = cuda_state_of(program, 1)
    assert all(np.array_equal(a, b) for a, b in zip((found[1], found[3]), (expected[1], expected[3]), strict=True))


def test_snapshot_moves_to_the_device_while_its_host_memory_is_taken_again(model: BoundModel) -> None:
    program, ids = cuda_program_of(model, device_snapshots=1, host_snapshots=1), conversation(model)
    prefill(program, ids, slot=0)
    expected = cuda_state_of(program, 0)
    moved = program.relocate(program.snapshot(0, "host"), "device")
    prefill(program, ids[:9], slot=0)
    program.snapshot(0, "host")
    program.restore(1, moved)
    assert np.array_equal(cuda_state_of(program, 1)[1], expected[1])


def test_row_is_the_same_alone_and_among_others_while_columns_share_a_kernel(
    model: BoundModel, fresh_seed: int
) -> None:
    program = cuda_program_of(model)
    rows = [Row(slot, random_ids(model, fresh_seed + slot, 2).tolist()) for slot in range(4)]
    prompts = [random_ids(model, fresh_seed + 9 + slot, 20 + 11 * slot) for slot in range(4)]
    alone: list[NDArray[Any]] = []
    for slot, prompt in enumerate(prompts):
        prefill(program, prompt, slot=slot)
        logits = play(program, rows[slot], want_logits=True).logits
        assert logits is not None
        alone.append(logits[0])
    for slot, prompt in enumerate(prompts):
        prefill(program, prompt, slot=slot)
    together = play(program, *rows, want_logits=True).logits
    assert together is not None
    assert all(np.array_equal(alone[slot], together[slot]) for slot in range(4))


def test_rope_delta_shifts_every_axis_of_a_round_as_positions_do_in_a_prompt(model: BoundModel) -> None:
    program, ids = cuda_program_of(model), conversation(model)[:21]
    positions = np.tile(np.arange(21, dtype=np.int32), (3, 1))
    positions[:, 20] += 7
    program.reset(0)
    expected = program.prefill(PrefillChunk(0, ids, 0, pages_of(0), positions=positions, logits="last")).logits[0]
    prefill(program, ids[:20])
    round_ = round_of(program, Row(0, [int(ids[20])]), want_logits=True)
    round_.rope_deltas[0] = 7
    logits = program.read(program.launch(round_)).logits
    assert logits is not None
    assert_close(logits[0, 0], expected)


@pytest.fixture(autouse=True)
def on_the_cuda_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (test_program_rounds, test_program_state):
        for name, value in (("program_of", cuda_program_of), ("state_of", cuda_state_of)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
