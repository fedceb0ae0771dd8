"""Programs with streamed networks, and everything that one says: shared by the emulator's and the card's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ninfer_runtime.backends.base import PrefillChunk, ProgramLimits, ProgramOptions
from ninfer_runtime.backends.cuda.backend import CudaBackend
from ninfer_runtime.backends.cuda.device import Device
from ninfer_runtime.backends.cuda.program import CudaProgram
from ninfer_runtime.backends.cuda.residency import Rates
from ninfer_runtime.config import Residency, SamplingParams
from ninfer_runtime.models.binder import BoundModel
from tests.runtime import speaking
from tests.runtime.programs import LIMITS, Row, emitted, pages_of, random_ids, round_of

SEED = 9
RATES = Rates(400e9, 27e9)
N_LAYERS = 4
PLAIN = replace(LIMITS, max_rows=2, max_columns=2, n_slots=2, prefill_chunk=128, device_snapshots=0, host_snapshots=0)
DRAFTS = replace(PLAIN, max_columns=3, max_drafts=2)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=SEED)


def program_of(
    model: BoundModel, device: Device | None, limits: ProgramLimits = PLAIN, **residency: Any
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
    model: BoundModel, device: Device | None, n_resident: int, n_slots: int, limits: ProgramLimits = PLAIN, **more: Any
) -> CudaProgram:
    """The last layers stream: the first one waits longest, whatever runs next."""
    streamed = tuple(range(n_resident, N_LAYERS))
    chosen = {"n_ffn_layers": n_resident, "streamed": streamed, "n_slots": n_slots}
    return program_of(model, device, limits, weights="ffn", **(chosen | more))


def story(program: CudaProgram, model: BoundModel) -> list[Any]:
    """Everything that a program says: rounds of several shapes, with prompts in between."""
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


def hidden_rows(program: CudaProgram, model: BoundModel, seed: int = SEED) -> NDArray[np.float64]:
    """Hidden rows of two columns behind a prompt; the program is closed."""
    ids = random_ids(model, seed, 70)
    try:
        program.reset(0)
        program.prefill(PrefillChunk(0, ids[:60], 0, pages_of(0)))
        evaluated = program.read(program.launch(round_of(program, Row(0, ids[60:62].tolist()), want_hidden=True)))
    finally:
        program.close()
    assert evaluated.hidden is not None
    return evaluated.hidden.astype(np.float64)


def drafting_story(program: CudaProgram, model: BoundModel) -> list[Any]:
    """Rounds that draft two tokens, one, or none, and verify them, also launched one ahead; prompts between them."""
    spoken = [
        speaking.speak(
            cast(Any, program), random_ids(model, SEED, 40), 8, n_drafts=n, sampling=SAMPLED, one_ahead=ahead
        )
        for n, ahead in ((1, False), (2, True), (0, True))
    ]
    program.close()
    return [(each.tokens, each.rounds) for each in spoken]
