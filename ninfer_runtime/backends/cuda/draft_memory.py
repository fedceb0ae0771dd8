"""What drafting adds to a program's memory: the layer's own working memory, what slots hold, snapshots of it."""

from dataclasses import dataclass

from ninfer_format.geometry import up
from ninfer_runtime.backends.base import ProgramLimits
from ninfer_runtime.backends.cuda.arena import Taker
from ninfer_runtime.backends.cuda.ops.draft import (
    DRAFT_STATE,
    HELD_DRAFTS,
    MAX_DRAFTS,
    PROPOSAL_BYTES,
    DraftMemory,
    hidden_bytes,
    input_stride,
    record_bytes,
)
from ninfer_runtime.backends.cuda.ops.linear_small import MAX_COLUMNS as MOST_SMALL_COLUMNS
from ninfer_runtime.backends.cuda.ops.round_state import MAX_ROWS, ROW_STATE
from ninfer_runtime.backends.cuda.ops.sampling import SamplerMemory, SamplerShape
from ninfer_runtime.backends.cuda.packing import PackedMatrix, activation_stride

_BF16, _INT, _FLOAT = 2, 4, 4


@dataclass(frozen=True, slots=True)
class DraftRegions:
    """Addresses of one program that drafts.

    snapshots   bf16 [device snapshots][hidden]
    row_of      int32 [addressable ids], rows of the draft head; head_logits float32 [MAX_ROWS][head_stride], what it
                gives. 0 without a head of its own
    """

    memory: DraftMemory
    sampler: SamplerMemory
    snapshots: int
    row_of: int
    head_logits: int
    head_stride: int
    hidden_bytes: int


def rows_at_once(limits: ProgramLimits) -> int:
    """Rows of a round that the layer reads together: one column more of each than the round has."""
    return min(limits.max_rows, MOST_SMALL_COLUMNS // (limits.max_columns + 1))


def lay_out_drafts(
    taker: Taker,
    limits: ProgramLimits,
    hidden: int,
    n_tokens: int,
    shape: SamplerShape,
    head: PackedMatrix | None,
    *,
    ratio: bool,
) -> DraftRegions:
    """Take every region; ``n_tokens``: the most columns of a chunk; ``ratio``: how drafts are
    accepted."""
    take = taker.take
    n_tokens = max(n_tokens, limits.max_rows * (limits.max_columns + 1))
    memory = DraftMemory(
        x=take("workspace/draft_x", n_tokens * hidden * _FLOAT),
        inputs=take("workspace/draft_inputs", n_tokens * input_stride(hidden) * _BF16),
        chained=take("workspace/draft_chained", MAX_ROWS * activation_stride(hidden) * _BF16),
        last=take("workspace/draft_last", hidden_bytes(hidden)),
        rows=take("workspace/draft_rows", MAX_ROWS * ROW_STATE.itemsize),
        states=take("workspace/draft_states", MAX_ROWS * DRAFT_STATE.itemsize),
        tokens=take("workspace/draft_tokens", _INT * MAX_ROWS * (limits.max_columns + 1)),
        held=take("state/held", limits.n_slots * HELD_DRAFTS.itemsize),
        hidden=take("state/hidden", limits.n_slots * hidden_bytes(hidden)),
        records=take("state/hidden_records", limits.n_slots * record_bytes(hidden)),
        proposals=take("state/proposals", limits.n_slots * MAX_DRAFTS * PROPOSAL_BYTES) if ratio else 0,
    )
    head_stride = 0 if head is None else up(head.n_outputs, 4)
    return DraftRegions(
        memory=memory,
        sampler=SamplerMemory.take(taker, "workspace/draft", shape, MAX_ROWS),
        snapshots=take("snapshots/hidden", limits.device_snapshots * hidden_bytes(hidden)),
        row_of=0 if head is None else take("weights/draft_rows_of_ids", _INT * shape.n_addressable),
        head_logits=0 if head is None else take("workspace/draft_logits", MAX_ROWS * head_stride * _FLOAT),
        head_stride=head_stride,
        hidden_bytes=hidden_bytes(hidden),
    )
