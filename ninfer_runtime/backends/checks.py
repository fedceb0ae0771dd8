"""The rules of the seam, checked before anything is computed; every breach is a ContractError naming both sides."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ninfer_format.errors import UsageError
from ninfer_runtime.backends.base import (
    ContractError,
    Int32s,
    PrefillChunk,
    ProgramLimits,
    ProgramOptions,
    Round,
    Uint32s,
)
from ninfer_runtime.config import PAGE_TOKENS
from ninfer_runtime.models.binder import BoundModel
from ninfer_runtime.models.spec import ModelSpec


def require(condition: bool, message: str) -> None:
    """Raise ContractError(message) unless ``condition`` holds."""
    if not condition:
        raise ContractError(message)


def check_array(name: str, value: NDArray[np.generic], dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    """Type and shape of an array at the seam."""
    require(
        value.dtype == dtype and value.shape == shape,
        f"{name} is {value.dtype}{list(value.shape)}, expected {np.dtype(dtype).name}{list(shape)}",
    )


def check_ids(name: str, ids: Int32s, limit: int) -> None:
    """Every id in 0 .. limit - 1."""
    bad = ids[(ids < 0) | (ids >= limit)]
    require(bad.size == 0, f"{name} holds {bad[:1].tolist()}, expected 0 to {limit - 1}")


def check_pages(name: str, pages: Int32s, n_tokens: int, limits: ProgramLimits) -> None:
    """Pages that hold ``n_tokens`` tokens: present, existing, distinct, within the context."""
    require(n_tokens <= limits.max_context, f"{name} reaches {n_tokens} tokens, the program holds {limits.max_context}")
    needed = -(-n_tokens // PAGE_TOKENS)
    require(pages.size >= needed, f"{name} has {pages.size} pages, {n_tokens} tokens need {needed}")
    check_ids(name, pages[:needed], limits.n_pages)
    require(len(set(pages[:needed].tolist())) == needed, f"{name} names a page twice: {pages[:needed].tolist()}")


def check_slot(slot: int, limits: ProgramLimits, busy: Iterable[int]) -> None:
    """The slot exists and takes part in no uncommitted round."""
    require(0 <= slot < limits.n_slots, f"slot {slot} does not exist, the program has {limits.n_slots}")
    require(slot not in busy, f"slot {slot} is part of a round that is neither committed nor rolled back")


def check_prefill(chunk: PrefillChunk, length: int, limits: ProgramLimits, spec: ModelSpec) -> None:
    """Shapes, ids and continuity of a prompt chunk."""
    n_tokens = len(chunk.token_ids)
    require(
        1 <= n_tokens <= limits.prefill_chunk,
        f"the chunk has {n_tokens} tokens, expected 1 to {limits.prefill_chunk}",
    )
    wanted = n_tokens if chunk.logits == "all" else 1
    require(wanted <= limits.logits_rows, f"{wanted} rows of logits were asked for, at most {limits.logits_rows} exist")
    check_array("token_ids", chunk.token_ids, np.int32, (n_tokens,))
    check_ids("token_ids", chunk.token_ids, spec.text.vocab_rows)
    require(chunk.start == length, f"the chunk starts at {chunk.start}, slot {chunk.slot} holds {length} tokens")
    check_drafts("n_drafts", chunk.n_drafts, limits)
    require(chunk.n_drafts == 0 or chunk.sampling is not None, "n_drafts without sampling: nothing is drawn to follow")
    check_pages("pages", chunk.pages, chunk.start + n_tokens + chunk.n_drafts, limits)
    if chunk.positions is not None:
        check_array("positions", chunk.positions, np.int32, (3, n_tokens))
    if chunk.embeddings is not None:
        indices, rows = chunk.embeddings.indices, chunk.embeddings.rows
        check_array("embeddings.indices", indices, np.int32, (len(indices),))
        check_ids("embeddings.indices", indices, n_tokens)
        check_array("embeddings.rows", rows, np.float32, (len(indices), spec.text.hidden))
    if chunk.logits_mask is not None:
        check_array("logits_mask", chunk.logits_mask, np.uint32, (mask_words(spec),))


def check_drafts(name: str, n_drafts: int, limits: ProgramLimits) -> None:
    """As many drafts as the program may hold in a slot."""
    require(0 <= n_drafts <= limits.max_drafts, f"{name} is {n_drafts}, expected 0 to {limits.max_drafts}")


def mask_words(spec: ModelSpec) -> int:
    """uint32 words of a logits mask over all head rows."""
    return -(-spec.text.vocab_rows // 32)


def check_round(round_: Round, limits: ProgramLimits, spec: ModelSpec) -> None:
    """Everything about a round that does not depend on a previous one."""
    b = round_.n_rows
    require(1 <= b <= limits.max_rows, f"the round has {b} rows, expected 1 to {limits.max_rows}")
    require(round_.token_ids.ndim == 2, f"token_ids has {round_.token_ids.ndim} dims, expected [B, q]")
    q = round_.token_ids.shape[1]
    require(1 <= q <= limits.max_columns, f"the round has {q} columns, expected 1 to {limits.max_columns}")
    check_array("token_ids", round_.token_ids, np.int32, (b, q))
    for name in ("slots", "n_columns", "starts", "rope_deltas", "budget"):
        check_array(name, getattr(round_, name), np.int32, (b,))
    check_array("pages", round_.pages, np.int32, (b, round_.pages.shape[-1]))
    require(len(set(round_.slots.tolist())) == b, f"slots {round_.slots.tolist()} are not distinct")
    wide = round_.n_columns[(round_.n_columns < 1) | (round_.n_columns > q)]
    require(wide.size == 0, f"n_columns holds {wide[:1].tolist()}, expected 1 to {q}")
    require(len(round_.sampling) == b, f"{len(round_.sampling)} sampling sets for {b} rows")
    require(len(round_.stop_ids) == b, f"{len(round_.stop_ids)} stop sets for {b} rows")
    if round_.logits_mask is not None:
        check_array("logits_mask", round_.logits_mask, np.uint32, (b, q, mask_words(spec)))
    require(round_.verify or not round_.own_drafts, "own_drafts without verify: drafts are not known tokens")
    require(limits.max_drafts > 0 or not round_.own_drafts, "own_drafts, but the program has no proposer")
    if round_.n_drafts is not None:
        check_array("n_drafts", round_.n_drafts, np.int32, (b,))
        for n in round_.n_drafts.tolist():
            check_drafts("n_drafts", n, limits)


def check_row(
    b: int,
    token_ids: Int32s,
    start: int,
    length: int,
    pages: Int32s,
    limits: ProgramLimits,
    spec: ModelSpec,
    n_drafts: int = 0,
) -> None:
    """One row that will be evaluated, after a previous round has been taken into account.

    ``n_drafts`` are those it may draft behind all it can emit.
    """
    require(start == length, f"row {b} starts at {start}, its slot holds {length} tokens")
    check_pages(f"pages of row {b}", pages, start + len(token_ids) + n_drafts, limits)
    check_ids(f"token_ids of row {b}", token_ids, spec.text.vocab_rows)


def check_proposer(model: BoundModel, limits: ProgramLimits, options: ProgramOptions) -> None:
    """UsageError for drafts that nothing was planned or stored for."""
    if options.proposer == "none":
        if limits.max_drafts or options.draft_head:
            raise UsageError(
                f"max_drafts is {limits.max_drafts} and draft_head {options.draft_head}, but there is no proposer"
            )
        return
    if limits.max_drafts < 1:
        raise UsageError(f"max_drafts is {limits.max_drafts}, expected at least 1 with proposer {options.proposer!r}")
    path = model.artifact.path
    if model.mtp is None:
        raise UsageError(f"{path} has no MTP layer; convert the checkpoint with it, or run without --spec mtp")
    if options.draft_head and model.draft_head is None:
        raise UsageError(f"{path} has no draft head; run without --lm-head-draft")


def check_masks(masks: Uint32s, n_addressable: int) -> None:
    """Some id below ``n_addressable`` is allowed in every column of ``masks`` [..., words]."""
    rows = masks.reshape(-1, masks.shape[-1])
    allowed = rows[:, : n_addressable // 32].any(axis=1)
    if n_addressable % 32:
        allowed |= (rows[:, n_addressable // 32] & np.uint32((1 << n_addressable % 32) - 1)) != 0
    require(bool(allowed.all()), "the logits mask allows no addressable id; end the row before masking everything")
