"""The ``Program`` seam: everything an engine may ask of a backend, and nothing it may know about one.

A program is one model, bound to one artifact, with all its memory planned before it is allocated. It has

- *slots*: lanes that each hold the committed recurrent state of one sequence (the GDN matrices, the last
  convolution columns), the number of tokens folded into it, and the occurrence counts of generated tokens;
- a *page pool*: keys and values in pages of 64 tokens. The caller owns the page tables (``cache/pages.py`` hands out
  page ids); token ``i`` of a row lives in ``pages[i // 64]``, and its keys and values may be overwritten at any time
  from the committed length on;
- *rounds*: B rows × q columns evaluated together. Evaluating a round changes keys and values only; the drivers of the
  recurrent state are recorded, and ``commit`` folds a prefix of them into the slots.

One round, seen from the engine::

    ticket = program.launch(Round(...))
    result = program.read(ticket)                      # waits
    program.commit(ticket)                             # or commit(ticket, columns) with fewer, or rollback(ticket)

Speculation: a program planned with a proposer drafts tokens after every draw, keeps them in the slot, and evaluates
them as the columns of a later round (``Round.own_drafts``). Nothing at this seam says how it drafts.

One ahead: the next round starts from what this one emits, before the host has looked at it::

    second = program.launch(following(first_round, first))     # commits the first by its own count
    result = program.read(first)
    program.rollback(second)                           # or commit(second): the host decides after looking at the result

All arrays at the seam are numpy, C-contiguous, and never modified or kept by the program after the call returns.
Token indices are absolute: 0 is the first prompt token. ``V`` is the number of head rows (padding rows included),
of which only ids below ``n_addressable`` are ever sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ninfer_format.errors import NinferError
from ninfer_runtime.backends.plan import MemoryPlan as MemoryPlan
from ninfer_runtime.backends.plan import ProgramLimits as ProgramLimits
from ninfer_runtime.backends.plan import ProgramOptions as ProgramOptions
from ninfer_runtime.config import SamplingParams

if TYPE_CHECKING:
    from ninfer_runtime.models.binder import BoundModel

Int32s = NDArray[np.int32]
Uint32s = NDArray[np.uint32]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]

LogitsWanted = Literal["none", "last", "all"]
Place = Literal["device", "host"]

NO_PAGE = -1
MAX_ROUNDS_IN_FLIGHT = 2


class ContractError(NinferError):
    """A call that breaks the rules of this page: a bug in the caller, not in a request or a file."""


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Rows that replace token embeddings: row ``i`` becomes the input of chunk token ``indices[i]``."""

    indices: Int32s
    rows: Float32s
    """float32 [n, hidden]."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive prompt tokens of one slot, folded into its state at once.

    token_ids        int32 [T], 1 <= T <= prefill_chunk
    start            index of the first one; must equal the slot's committed length
    pages            int32 [P], page ids that cover indices 0 .. start + T - 1
    positions        int32 [3, T] rotary positions (temporal, height, width); None: all three equal the index
    logits           which rows of logits to return: none, the last token's, or every token's (T <= logits_rows)
    sampling         draw the token that follows the chunk (``seed`` set); its occurrence is counted in the slot
    logits_mask      uint32 [ceil(V / 32)] for that draw: bit ``id % 32`` of word ``id // 32`` set = allowed
    n_top_logprobs   None: no logprobs; 0: of the drawn token; n: also of the n most likely ones
    want_hidden      also return the final-normed hidden rows, float32 [T, hidden]
    n_drafts         tokens to draft behind the drawn one, kept in the slot; 0 without ``sampling``
    """

    slot: int
    token_ids: Int32s
    start: int
    pages: Int32s
    positions: Int32s | None = None
    embeddings: EmbeddingRows | None = None
    logits: LogitsWanted = "none"
    sampling: SamplingParams | None = None
    logits_mask: Uint32s | None = None
    n_top_logprobs: int | None = None
    want_hidden: bool = False
    n_drafts: int = 0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log of the softmax over the addressable raw logits (before bias, penalties, temperature, masks).

    chosen float32 [...]; top_ids int32 and top float32 [..., n], most likely first, lower id first on ties.
    """

    chosen: Float32s
    top_ids: Int32s
    top: Float32s


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """token_id: the draw, or None when none was asked for or the logits were not finite.

    logits float32 [0 | 1 | T, V]; hidden float32 [T, hidden] or None; ``finite`` is False when NaN or infinity is
    among the addressable logits that were evaluated. drafts int32 [n_drafts] that the slot now holds.
    """

    token_id: int | None
    logits: Float32s
    hidden: Float32s | None
    logprobs: Logprobs | None
    finite: bool
    drafts: Int32s | None = None


class RowStatus(IntEnum):
    """Why a row emitted what it emitted."""

    RUNNING = 0
    """Nothing ended it: the next round may follow."""
    STOP_ID = 1
    """The last emitted token is one of the row's stop ids."""
    BUDGET = 2
    """The row has emitted as many tokens as it may."""
    NOT_FINITE = 3
    """NaN or infinity among the addressable logits: nothing was emitted from that column on."""
    FROZEN = 4
    """The row had ended in the previous round: no column was evaluated."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Names one launched round. Open until its round is committed or rolled back, and read or given up."""

    serial: int


@dataclass(frozen=True, slots=True)
class Round:
    """B rows × q columns. Row ``b`` evaluates its first ``n_columns[b]`` inputs in slot ``slots[b]``.

    slots          int32 [B], distinct
    token_ids      int32 [B, q], the inputs; column 0 is the last emitted token, which is in no state yet
    n_columns      int32 [B], 1..q
    starts         int32 [B], index of column 0; must equal the slot's committed length
    rope_deltas    int32 [B]; every axis of column i has rotary position ``start + i + rope_delta``
    pages          int32 [B, P], page ids per row, NO_PAGE beyond its end; must cover every evaluated index, and with
                   ``previous`` also those the row reaches if the previous round emits all it can
    sampling       B parameter sets, ``seed`` set in each that is not greedy
    stop_ids       B sets of token ids; an emitted one ends its row
    budget         int32 [B], tokens the row may still emit, at least 1
    verify         True: columns 1.. are drafts. Column i draws the token that follows it (counts include the drafts
                   before it); drafts are accepted as long as each equals the draw of the column before it. The row
                   emits the draws up to and including the first that differs, or one more than there are drafts.
                   For proposals without a distribution of their own this rule is exact: the emitted tokens are
                   those of one column at a time.
                   False: all columns are known tokens; only the last one draws, and the row emits that one token.
    previous       the round launched before, still unread or uncommitted, with the same slots in the same order.
                   It is committed by its own counts, for good. Column 0 becomes its last emitted token, start, budget
                   and counts continue from it (the fields here are ignored), rows that ended in it are FROZEN.
    logits_mask    uint32 [B, q, ceil(V / 32)], bit set = the id may be drawn from that column. None: all may.
    n_top_logprobs as in PrefillChunk, for every emitted token
    want_logits    also return raw logits, float32 [B, q, V]
    want_hidden    also return final-normed hidden rows, float32 [B, q, hidden]
    own_drafts     columns 1.. are the drafts the slots hold (``token_ids`` there are ignored): row ``b`` evaluates
                   column 0 and as many of its drafts as it holds, at most ``n_columns[b] - 1``. Needs ``verify``.
    n_drafts       int32 [B], tokens to draft behind what each row emits, for a later round; None: none. A row that
                   ends drafts nothing. Every round uses up the drafts its slots held.

    Own drafts are accepted by ``ProgramOptions.acceptance``. "equal": as above; the proposer draws with the random
    numbers of the target, so proposals agree often and the tokens are those without speculation. "ratio", for rows
    that are not greedy and proposals with a distribution q: draft d is accepted with probability min(1, p(d) / q(d));
    the first that is not gives way to a draw from max(0, p - q) renormalised; behind the last one a draw from p.

    The random number of a draw depends on (seed, index of the drawn token, purpose) and on nothing else.
    """

    slots: Int32s
    token_ids: Int32s
    n_columns: Int32s
    starts: Int32s
    rope_deltas: Int32s
    pages: Int32s
    sampling: tuple[SamplingParams, ...]
    stop_ids: tuple[frozenset[int], ...]
    budget: Int32s
    verify: bool = True
    previous: Ticket | None = None
    logits_mask: Uint32s | None = None
    n_top_logprobs: int | None = None
    want_logits: bool = False
    want_hidden: bool = False
    own_drafts: bool = False
    n_drafts: Int32s | None = None

    @property
    def n_rows(self) -> int:
        """B."""
        return len(self.slots)


def following(round_: Round, ticket: Ticket, n_columns: Int32s | None = None, n_drafts: Int32s | None = None) -> Round:
    """The round that continues ``round_`` from what it emits, before it has been read.

    ``n_columns`` int32 [B] limits the drafts of ``round_`` each row evaluates (None: one column, no drafts);
    ``n_drafts`` as in Round.
    """
    b = round_.n_rows
    columns = np.ones(b, np.int32) if n_columns is None else n_columns
    return replace(
        round_,
        token_ids=np.zeros((b, int(columns.max())), np.int32),
        n_columns=columns,
        verify=True,
        previous=ticket,
        logits_mask=None,
        own_drafts=n_columns is not None,
        n_drafts=n_drafts,
    )


@dataclass(frozen=True, slots=True)
class RoundResult:
    """token_ids  int32 [B, q]: row b emitted ``token_ids[b, :emitted[b]]``; the rest is 0

    accepted   int32 [B], drafts accepted (before a stop or the budget cut the row short)
    emitted    int32 [B]
    columns    int32 [B], inputs a full commit folds: ``emitted`` of a verify round; otherwise all, or none if nothing
               was emitted
    status     RowStatus per row
    starts     int32 [B], index of column 0 (known here also for a round with ``previous``)
    logprobs   of the emitted tokens, arrays [B, q(, n)], 0 beyond ``emitted``; None if not asked for
    logits     float32 [B, q, V], 0 beyond ``n_columns``; None if not asked for
    hidden     float32 [B, q, hidden], likewise
    drafted    int32 [B], drafts each row evaluated
    drafts     int32 [B, max_drafts], what the slots now hold, 0 beyond ``n_drafts`` int32 [B]; None if none were asked
    """

    token_ids: Int32s
    accepted: Int32s
    emitted: Int32s
    columns: Int32s
    status: tuple[RowStatus, ...]
    starts: Int32s
    logprobs: Logprobs | None = None
    logits: Float32s | None = None
    hidden: Float32s | None = None
    drafted: Int32s | None = None
    drafts: Int32s | None = None
    n_drafts: Int32s | None = None


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """A saved recurrent state, usable in any slot of the program that made it, until it is released."""

    serial: int
    n_tokens: int
    place: Place = "device"


class Program(Protocol):
    """One model ready to run. Not thread-safe: one worker drives it.

    Every method raises ContractError for calls that break the rules above; requests must be checked before.
    """

    @property
    def name(self) -> str:
        """Backend name, for reports."""

    @property
    def model(self) -> "BoundModel":
        """The model it runs."""

    @property
    def plan(self) -> MemoryPlan:
        """The plan it was allocated from; ``plan.limits`` are the limits in force."""

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """(label, text) of what a report says about this program beside its plan."""

    def enter_thread(self) -> None:
        """Called first in a thread that drives the program from then on, when it is not the one that made it."""

    @property
    def runs_ahead(self) -> bool:
        """Whether ``launch`` returns before the round is done, so that launching one ahead gains anything."""

    # ---- slots -------------------------------------------------------------------------------
    def length(self, slot: int) -> int:
        """Tokens folded into the slot's committed state."""

    def reset(self, slot: int) -> None:
        """Empty state, length 0, no counts."""

    def set_output_counts(self, slot: int, token_ids: Int32s) -> None:
        """Replace the occurrence counts by those of ``token_ids`` int32 [n] (a sequence that is resumed)."""

    def snapshot(self, slot: int, place: Place = "device") -> StateSnapshot:
        """Copy the committed state; occurrence counts are not part of it. Keys and values stay in their pages."""

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        """Copy a snapshot into a slot, whose length becomes the snapshot's and whose counts become empty."""

    def release(self, snapshot: StateSnapshot) -> None:
        """Give the snapshot's memory back; using it afterwards is a ContractError."""

    def relocate(self, snapshot: StateSnapshot, place: Place) -> StateSnapshot:
        """Move a snapshot to the other place; the old name is released. ContractError when that place is full."""

    # ---- keys and values ---------------------------------------------------------------------
    def copy_pages(self, sources: Int32s, targets: Int32s) -> None:
        """Copy whole pages, ``targets[i]`` from ``sources[i]`` (copy on write of a shared last page)."""

    # ---- prompts -----------------------------------------------------------------------------
    def prefill(self, chunk: PrefillChunk) -> PrefillResult:
        """Fold a chunk into its slot. The slot must not be in an open round."""

    # ---- rounds ------------------------------------------------------------------------------
    def launch(self, round_: Round) -> Ticket:
        """Start a round; at most two are open, the second naming the first as ``previous``."""

    def read(self, ticket: Ticket) -> RoundResult:
        """Wait for a round. May be called once per ticket, before or after its commit, not after a rollback."""

    def commit(self, ticket: Ticket, columns: Int32s | None = None) -> None:
        """Fold the first ``columns[b]`` recorded inputs of each row (None: ``RoundResult.columns``) and count the
        tokens emitted from them. 0 leaves a row as if the round had not been. The folded state equals, bit for bit,
        that of the same inputs evaluated one round each."""

    def rollback(self, ticket: Ticket) -> None:
        """``commit`` with zeros; the ticket need not be read."""

    def close(self) -> None:
        """Free everything; the program cannot be used afterwards."""


class Backend(Protocol):
    """Makes programs."""

    @property
    def name(self) -> str:
        """As in ``EngineConfig.backend``."""

    def free_memory(self, options: ProgramOptions) -> int:
        """Bytes a program could allocate now on that device."""

    def plan_memory(self, model: "BoundModel", limits: ProgramLimits, options: ProgramOptions) -> MemoryPlan:
        """What a program would allocate. Raises UsageError for options this backend does not have."""

    def create(self, model: "BoundModel", plan: MemoryPlan) -> Program:
        """Allocate exactly the plan and bind the weights. UsageError when it does not fit, saying by how much."""


def page_table(rows: Sequence[Sequence[int]], width: int) -> Int32s:
    """int32 [len(rows), width] page table from page lists, NO_PAGE where a row ends."""
    table = np.full((len(rows), width), NO_PAGE, np.int32)
    for b, pages in enumerate(rows):
        if len(pages) > width:
            raise ContractError(f"row {b} has {len(pages)} pages, its table has {width} entries")
        table[b, : len(pages)] = pages
    return table
