"""Feed-forward networks that pass through the device: the tokens of a resident program, in whatever order work is done.

The emulator does captured copies as early and as late as the recorded edges allow, and postpones what nothing has
waited for, so a forgotten edge changes tokens; the last tests take edges away and see that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from ninfer_format import Artifact
from ninfer_runtime.backends.base import PrefillChunk, ProgramLimits, ProgramOptions
from ninfer_runtime.backends.cuda.backend import CudaBackend
from ninfer_runtime.backends.cuda.device import DeviceError
from ninfer_runtime.backends.cuda.program import CudaProgram
from ninfer_runtime.backends.cuda.residency import Rates
from ninfer_runtime.backends.cuda.ring import DOWN, Ring
from ninfer_runtime.config import Residency, SamplingParams
from ninfer_runtime.models.binder import BoundModel, bind
from tests.emulator.device import EmulatedDevice
from tests.emulator.recording import Order
from tests.runtime import speaking
from tests.runtime.conftest import ArtifactOf
from tests.runtime.programs import LIMITS, Row, emitted, pages_of, random_ids, round_of

SEED = 9
RATES = Rates(400e9, 27e9)
N_LAYERS = 4
PLAIN = replace(LIMITS, max_rows=2, max_columns=2, n_slots=2, prefill_chunk=128, device_snapshots=0, host_snapshots=0)
DRAFTS = replace(PLAIN, max_columns=3, max_drafts=2)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=SEED)


@pytest.fixture(scope="module")
def model(artifact_of: ArtifactOf) -> Iterator[BoundModel]:
    with Artifact.open(artifact_of("dense", "groupwise-int")) as artifact:
        yield bind(artifact)


def program_of(
    model: BoundModel, device: EmulatedDevice, limits: ProgramLimits = PLAIN, **residency: Any
) -> CudaProgram:
    backend = CudaBackend(device, rates=RATES)
    options = ProgramOptions(
        device="cuda",
        dtype="bfloat16",
        proposer="mtp" if limits.max_drafts else "none",
        residency=Residency(**residency),
    )
    return backend.create(model, backend.plan_memory(model, limits, options))


def offloaded(
    model: BoundModel, device: EmulatedDevice, n_resident: int, n_slots: int, limits: ProgramLimits = PLAIN, **more: Any
) -> CudaProgram:
    """The last layers stream: the first one waits longest, whatever runs next."""
    streamed = tuple(range(n_resident, N_LAYERS))
    chosen = {"n_ffn_layers": n_resident, "streamed": streamed, "n_slots": n_slots}
    return program_of(model, device, limits, weights="ffn", **(chosen | more))


def story(program: CudaProgram, model: BoundModel) -> list[Any]:
    """Everything that a program says: rounds of several shapes, one launched ahead, with prompts in between."""
    out: list[Any] = []
    last = {}
    for slot, n_tokens in ((0, 60), (1, 7)):
        program.reset(slot)
        ids = random_ids(model, SEED + slot, n_tokens)
        result = program.prefill(PrefillChunk(slot, ids, 0, pages_of(slot), logits="last", sampling=SAMPLED))
        last[slot] = result.token_id or 0
        out += [result.token_id, result.logits.tobytes()]
    for slots, n_inputs in (((0,), 1), ((0, 1), 2), ((1,), 2), ((1,), 1), ((0, 1), 1)):
        rows = [Row(slot, [last[slot]] * n_inputs, SAMPLED) for slot in slots]
        ticket = program.launch(round_of(program, *rows, want_logits=slots == (1,)))
        evaluated = program.read(ticket)
        program.commit(ticket)
        out += [emitted(evaluated), None if evaluated.logits is None else evaluated.logits.tobytes()]
        for b, slot in enumerate(slots):
            last[slot] = int(evaluated.token_ids[b, 0])
    ids = random_ids(model, SEED + 2, 100)
    out.append(program.prefill(PrefillChunk(0, ids, program.length(0), pages_of(0), logits="last")).logits.tobytes())
    out.append(emitted(program.read(program.launch(round_of(program, Row(1, [last[1]]))))))
    program.close()
    return out


@pytest.fixture(scope="module")
def expected(model: BoundModel) -> list[Any]:
    return story(program_of(model, EmulatedDevice(n_sms=4)), model)


@pytest.mark.parametrize("order", ["side_first", "side_last"])
@pytest.mark.parametrize(("n_resident", "n_slots"), [(0, 1), (0, 3), (1, 2), (2, 1), (3, 1), (4, 0)])
def test_streamed_and_resident_networks_give_the_same_bits(
    model: BoundModel, expected: list[Any], n_resident: int, n_slots: int, order: Order
) -> None:
    device = EmulatedDevice(n_sms=4, lazy=order == "side_last", order=order)
    program = offloaded(model, device, n_resident, n_slots, host_embedding=n_resident == 2, link_limit=10e9)
    if order == "side_first":  # everything but the copies is postponed
        device.lazy, program.stream.lazy = True, True  # type: ignore[attr-defined]
    assert story(program, model) == expected


@pytest.mark.parametrize("order", ["side_first", "side_last"])
def test_rounds_with_drafts_in_one_graph_and_in_two_give_the_same_bits(model: BoundModel, order: Order) -> None:
    said = []
    for n_resident, n_slots in ((N_LAYERS, 0), (1, 1), (0, 2)):
        device = EmulatedDevice(n_sms=4, order=order)
        program = offloaded(model, device, n_resident, n_slots, DRAFTS)
        said.append(drafting_story(program, model))
    assert said[0] == said[1] == said[2]


def drafting_story(program: CudaProgram, model: BoundModel) -> list[Any]:
    """Rounds that draft two tokens, one, or none, and verify them, also launched one ahead; prompts between them."""
    spoken = [
        speaking.speak(
            cast(Any, program), random_ids(model, SEED, 40), 12, n_drafts=n, sampling=SAMPLED, one_ahead=ahead
        )
        for n, ahead in ((2, False), (1, False), (2, True), (0, True))
    ]
    program.close()
    return [(each.tokens, each.rounds) for each in spoken]


Key = tuple[int, int]


@pytest.mark.parametrize(
    ("edge", "order"),
    [
        ("_wait_for_arrival", "side_last"),
        ("_wait_for_use", "side_first"),
        ("settle", "side_last"),
    ],
)
def test_an_edge_that_is_forgotten_changes_what_is_said(
    model: BoundModel, expected: list[Any], monkeypatch: pytest.MonkeyPatch, edge: str, order: Order
) -> None:
    kept: Any = getattr(Ring, edge)

    def forgets(ring: Ring, stream: Any, key: Key = (0, DOWN)) -> None:
        if key[1] != DOWN:
            kept(ring, stream, key)

    monkeypatch.setattr(Ring, edge, forgets)
    device = EmulatedDevice(n_sms=4, lazy=True, order=order)
    assert story(offloaded(model, device, 1, 2), model) != expected


@contextmanager
def without_join(ring: Ring, stream: Any) -> Iterator[None]:
    ring._events, ring._copied = ring._as_captured, set()
    yield


def test_copies_that_do_not_join_their_graph_are_refused(model: BoundModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ring, "captured", without_join)
    with pytest.raises(DeviceError, match="not joined"):
        offloaded(model, EmulatedDevice(n_sms=4), 1, 1)
