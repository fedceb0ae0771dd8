"""The bytes of a round: what the host packs, what the kernels share, what comes back. Mirrors ``include/round.cuh``.

Sizes are frozen when a program starts (``RoundLayout``): the packed input is one upload, the packed result one
download. ``RoundMemory`` is the device side, ``RoundBuffers`` the host side of one transfer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_runtime.backends.base import (
    NO_PAGE,
    ContractError,
    Int32s,
    Logprobs,
    PrefillChunk,
    Round,
    RoundResult,
    RowStatus,
    Uint32s,
)
from ninfer_runtime.backends.checks import require
from ninfer_runtime.backends.cuda.arena import Taker
from ninfer_runtime.backends.cuda.device import Device
from ninfer_runtime.config import SamplingParams

MAX_ROWS = 8
MAX_COLUMNS = 6
MAX_STOP_IDS = 64
LOG_COLUMNS = 12
MOST_PENDING = 8

Structs = NDArray[Any]


def _ints(*names: str) -> list[tuple[str, Any]]:
    return [(name, np.int32) for name in names]


ROW_STATE = np.dtype(
    [
        *_ints("slot", "start", "n_columns", "rope_delta", "fold_columns", "fold_buffer", "record_buffer", "budget"),
        *_ints("verify", "status", "emitted", "accepted", "columns", "n_ratio", "carried"),
        *((name, np.uint8) for name in ("log_first", "log_record", "keeps_state", "reserved")),
    ]
)
"""One resolved row on the device; ``MAX_ROWS`` of them, written by ``round_begin``."""

HEADER = np.dtype(
    [
        *_ints("has_previous", "verify", "has_mask", "n_top", "own_drafts"),
        ("forced", np.float32),
        ("reserved", np.int32, 10),
    ]
)

ROW_INPUT = np.dtype(
    [
        ("seed", np.uint64),
        *((name, np.float64) for name in ("temperature", "top_p", "min_p", "presence", "frequency")),
        *_ints("slot", "n_columns", "start", "rope_delta", "budget", "fold_columns", "fold_buffer", "record_buffer"),
        *_ints("top_k", "n_stop_ids", "bias_begin", "n_bias"),
        ("token_ids", np.int32, MAX_COLUMNS),
        *_ints("n_drafts", "reserved"),
        ("stop_ids", np.int32, MAX_STOP_IDS),
    ]
)

BIAS_ENTRY = np.dtype([("value", np.float64), ("token_id", np.int32), ("reserved", np.int32)])

ROW_OUTPUT = np.dtype(
    [
        *_ints("status", "start", "emitted", "accepted", "columns", "budget", "empty_mask", "drafted"),
        ("token_ids", np.int32, MAX_COLUMNS),
        ("n_drafts", np.int32),
        ("drafts", np.int32, MAX_COLUMNS - 1),
        ("padding", np.int32, 4),
    ]
)

assert (ROW_STATE.itemsize, HEADER.itemsize, ROW_INPUT.itemsize) == (64, 64, 384)
assert (BIAS_ENTRY.itemsize, ROW_OUTPUT.itemsize) == (16, 96)


@dataclass(frozen=True, slots=True)
class RoundLayout:
    """Offsets in bytes of the packed input and the packed result.

    pages_per_row   entries of one row's page table
    vocab_rows      rows of the head, padding included: a mask has a bit for each
    n_addressable   ids that may be drawn
    max_rows, max_columns   of the rounds that the memory is for
    n_top_limit     most likely ids that a round can return with their logprobs
    n_bias_limit    logit biases of all rows together

    Input: header, MAX_ROWS rows, page table int32 [MAX_ROWS, pages_per_row], biases (only those in use travel).
    Result: MAX_ROWS rows; then, per row and emitted token, chosen float32 [8, 6], top ids int32 and top float32
    [8, 6, n_top_limit] (they travel when they were asked for).
    """

    pages_per_row: int
    vocab_rows: int
    n_addressable: int
    max_rows: int = MAX_ROWS
    max_columns: int = MAX_COLUMNS
    n_top_limit: int = 128
    n_bias_limit: int = 8192

    rows_offset = HEADER.itemsize
    pages_offset = HEADER.itemsize + MAX_ROWS * ROW_INPUT.itemsize
    """A kernel's pointer to the page table is the input's plus this."""
    chosen_offset = MAX_ROWS * ROW_OUTPUT.itemsize
    top_ids_offset = chosen_offset + 4 * MAX_ROWS * MAX_COLUMNS

    @property
    def bias_offset(self) -> int:
        """Of the bias entries."""
        return -(-(self.pages_offset + 4 * MAX_ROWS * self.pages_per_row) // 16) * 16

    @property
    def input_bytes(self) -> int:
        """Largest packed input."""
        return self.bias_offset + self.n_bias_limit * BIAS_ENTRY.itemsize

    @property
    def top_offset(self) -> int:
        """Of the log probabilities of the most likely ids."""
        return self.top_ids_offset + 4 * MAX_ROWS * MAX_COLUMNS * self.n_top_limit

    @property
    def result_bytes(self) -> int:
        """Packed result, logprobs included."""
        return self.top_offset + 4 * MAX_ROWS * MAX_COLUMNS * self.n_top_limit

    @property
    def mask_words(self) -> int:
        """uint32 words of one column's mask."""
        return -(-self.vocab_rows // 32)

    @property
    def mask_bytes(self) -> int:
        """Masks of a round of all rows and columns."""
        return 4 * self.max_rows * self.max_columns * self.mask_words


@dataclass(frozen=True, slots=True)
class RoundMemory:
    """Device addresses. Rounds and prompts have one set each, since a round's result outlives a prompt chunk.

    ``result`` is what a following round continues from; ``rows`` are RowState[8], ``tokens`` int32 [8 · 6].
    """

    layout: RoundLayout
    input: int
    result: int
    rows: int
    tokens: int
    masks: int

    @classmethod
    def take(cls, taker: Taker, name: str, layout: RoundLayout) -> "RoundMemory":
        """Memory for the rounds of a layout."""
        sizes = (
            ("input", layout.input_bytes),
            ("result", layout.result_bytes),
            ("rows", MAX_ROWS * ROW_STATE.itemsize),
            ("tokens", 4 * MAX_ROWS * MAX_COLUMNS),
            ("masks", layout.mask_bytes),
        )
        return cls(layout, *(taker.take(f"{name}/{part}", size) for part, size in sizes))

    @property
    def pages(self) -> int:
        """Page table int32 [MAX_ROWS, pages_per_row]."""
        return self.input + self.layout.pages_offset


class RoundBuffers:
    """Pinned host memory of one round in flight.

    ``pack`` and ``pack_prompt`` set the views ``packed`` (to upload to ``RoundMemory.input``), ``packed_masks`` (to
    ``RoundMemory.masks``; empty without masks) and ``result`` (to download from ``RoundMemory.result``), which
    ``unpack`` and ``unpack_prompt`` read.
    """

    def __init__(self, device: Device, layout: RoundLayout) -> None:
        self.layout = layout
        self._input = device.allocate_host(layout.input_bytes)
        self._output = device.allocate_host(layout.result_bytes)
        self._masks = device.allocate_host(layout.mask_bytes).view(np.uint32)
        self._input[:] = 0
        self._header: Structs = self._input[: HEADER.itemsize].view(HEADER)
        self._rows: Structs = self._input[layout.rows_offset : layout.pages_offset].view(ROW_INPUT)
        pages_end = layout.pages_offset + 4 * MAX_ROWS * layout.pages_per_row
        pages = self._input[layout.pages_offset : pages_end].view(np.int32)
        self._pages = pages.reshape(MAX_ROWS, layout.pages_per_row)
        self._bias: Structs = self._input[layout.bias_offset :].view(BIAS_ENTRY)
        self.packed = self._input[:0]
        self.packed_masks = self._masks[:0]
        self.result = self._output[:0]

    def pack(self, round_: Round, fold_columns: Int32s, fold_buffers: Int32s, record_buffers: Int32s) -> None:
        """A checked round. With ``previous`` the device ignores start, budget, fold_columns and token 0 given here.

        ContractError for more stop ids, biases or logprobs than the layout holds, or sampling without a seed.
        """
        b, q = round_.token_ids.shape
        rows = self._rows[:b]
        rows["slot"], rows["n_columns"], rows["start"] = round_.slots, round_.n_columns, round_.starts
        rows["rope_delta"], rows["budget"] = round_.rope_deltas, round_.budget
        rows["fold_columns"], rows["fold_buffer"], rows["record_buffer"] = fold_columns, fold_buffers, record_buffers
        rows["token_ids"][:, :q] = round_.token_ids
        rows["n_drafts"] = 0 if round_.n_drafts is None else round_.n_drafts
        self._header["own_drafts"] = round_.own_drafts
        width = min(round_.pages.shape[1], self.layout.pages_per_row)
        self._pages[:b, :width] = round_.pages[:, :width]
        self._pages[:b, width:] = NO_PAGE
        self._pack_header(round_.previous is not None, round_.verify, round_.logits_mask, round_.n_top_logprobs)
        self._pack_sampling(round_.sampling, round_.stop_ids)

    def pack_prompt(self, chunk: PrefillChunk) -> None:
        """The draw behind a prompt chunk: one row whose only column is the chunk's last token."""
        n_tokens = len(chunk.token_ids)
        row = self._rows[:1]
        row["slot"], row["n_columns"], row["start"] = chunk.slot, 1, chunk.start + n_tokens - 1
        row["rope_delta"] = row["fold_columns"] = row["fold_buffer"] = row["record_buffer"] = 0
        row["budget"], row["n_drafts"] = 2, 0
        row["token_ids"][0, 0] = chunk.token_ids[-1]
        self._pack_header(False, True, chunk.logits_mask, chunk.n_top_logprobs)
        self._pack_sampling((chunk.sampling or SamplingParams.greedy(),), (frozenset(),))

    def _pack_header(self, follows: bool, verify: bool, masks: Uint32s | None, n_top: int | None) -> None:
        layout = self.layout
        n_top = -1 if n_top is None else min(n_top, layout.n_addressable)
        require(n_top <= layout.n_top_limit, f"{n_top} top logprobs were asked for, at most {layout.n_top_limit} exist")
        self._header["has_previous"], self._header["verify"] = follows, verify
        self._header["has_mask"], self._header["n_top"] = masks is not None, n_top
        self.packed_masks = self._masks[:0]
        if masks is not None:
            self.packed_masks = self._masks[: masks.size]
            self.packed_masks[:] = masks.reshape(-1)
        self.result = self._output[: layout.chosen_offset if n_top < 0 else layout.result_bytes]

    def _pack_sampling(self, sampling: Sequence[SamplingParams], stop_ids: Sequence[frozenset[int]]) -> None:
        rows, n_biases = self._rows[: len(sampling)], 0
        for b, (params, stops) in enumerate(zip(sampling, stop_ids, strict=True)):
            row = rows[b]
            if params.seed is None and not params.is_greedy:
                raise ContractError("sampling without a seed; the engine draws one per request")
            require(len(stops) <= MAX_STOP_IDS, f"row {b} has {len(stops)} stop ids, at most {MAX_STOP_IDS} exist")
            row["seed"], row["temperature"] = params.seed or 0, params.temperature
            row["top_p"], row["min_p"], row["top_k"] = params.top_p, params.min_p, params.top_k
            row["presence"], row["frequency"] = params.presence_penalty, params.frequency_penalty
            row["n_stop_ids"] = len(stops)
            row["stop_ids"][: len(stops)] = list(stops)
            row["bias_begin"], row["n_bias"] = n_biases, len(params.logit_bias)
            if params.logit_bias:
                end, limit = n_biases + len(params.logit_bias), self.layout.n_bias_limit
                require(end <= limit, f"the rows have {end} logit biases or more, at most {limit} exist")
                entries = self._bias[n_biases:end]
                entries["token_id"], entries["value"] = zip(*sorted(params.logit_bias), strict=True)
                n_biases = end
        self.packed = self._input[: self.layout.bias_offset + n_biases * BIAS_ENTRY.itemsize]

    def unpack(self, round_: Round) -> RoundResult:
        """The downloaded result of ``round_``, without logits and hidden rows.

        ContractError when a row came to a column whose mask allows nothing.
        """
        b, q = round_.token_ids.shape
        rows: Structs = self._output[: self.layout.chosen_offset].view(ROW_OUTPUT)[:b]
        if rows["empty_mask"].any():
            raise ContractError("the logits mask allows no addressable id; end the row before masking everything")
        accepted, emitted, columns, starts = (rows[name].copy() for name in ("accepted", "emitted", "columns", "start"))
        status = tuple(RowStatus(code) for code in rows["status"].tolist())
        logprobs = None
        if round_.n_top_logprobs is not None:
            logprobs = self._logprobs(rows["emitted"], q, round_.n_top_logprobs)
        drafted, drafts, n_drafts = rows["drafted"].copy(), None, None
        if round_.n_drafts is not None:
            drafts, n_drafts = rows["drafts"].copy(), rows["n_drafts"].copy()
        return RoundResult(
            token_ids=rows["token_ids"][:, :q].copy(),
            accepted=accepted,
            emitted=emitted,
            columns=columns,
            status=status,
            starts=starts,
            logprobs=logprobs,
            drafted=drafted,
            drafts=drafts,
            n_drafts=n_drafts,
        )

    def force(self, acceptance: float) -> None:
        """Measurements only: the probability that a draft counts as right, whatever was drawn; 0: as it was drawn."""
        self._header["forced"] = acceptance

    def held_drafts(self) -> Int32s:
        """int32 [n] drafts behind a prompt chunk, from its downloaded result."""
        row = self._output[: self.layout.chosen_offset].view(ROW_OUTPUT)[0]
        drafts: Int32s = row["drafts"][: row["n_drafts"]].copy()
        return drafts

    def unpack_prompt(self, chunk: PrefillChunk) -> tuple[int | None, Logprobs | None]:
        """(drawn token, or None when a logit is not finite; its logprobs) of the chunk's last token."""
        row = self._output[: self.layout.chosen_offset].view(ROW_OUTPUT)[0]
        if row["empty_mask"]:
            raise ContractError("the logits mask allows no addressable id; end the row before masking everything")
        if row["emitted"] == 0:
            return None, None
        logprobs = None
        if chunk.n_top_logprobs is not None:
            of_round = self._logprobs(np.ones(1, np.int32), 1, chunk.n_top_logprobs)
            logprobs = Logprobs(of_round.chosen[0, 0], of_round.top_ids[0, 0], of_round.top[0, 0])
        return int(row["token_ids"][0]), logprobs

    def _logprobs(self, emitted: Int32s, q: int, n_top: int) -> Logprobs:
        layout, b = self.layout, len(emitted)
        n_top, limit = min(n_top, layout.n_addressable), layout.n_top_limit
        columns = (MAX_ROWS, MAX_COLUMNS)
        chosen = self._output[layout.chosen_offset : layout.top_ids_offset].view(np.float32).reshape(columns)
        ids = self._output[layout.top_ids_offset : layout.top_offset].view(np.int32).reshape(*columns, limit)
        top = self._output[layout.top_offset :].view(np.float32).reshape(*columns, limit)
        is_emitted = np.arange(q) < emitted[:, None]
        return Logprobs(
            np.where(is_emitted, chosen[:b, :q], np.float32(0)),
            np.where(is_emitted[..., None], ids[:b, :q, :n_top], np.int32(0)),
            np.where(is_emitted[..., None], top[:b, :q, :n_top], np.float32(0)),
        )
