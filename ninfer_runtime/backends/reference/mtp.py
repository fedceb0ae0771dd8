"""The draft layer: it reads the sequence behind the decoder, and proposes tokens that may follow.

The column of token i holds the token's embedding and the final-normed hidden row of the token before it, at the rotary
position of the token before it; its output proposes token i + 1. Its keys and values live at index i of the row's
pages, one layer behind the decoder's, so everything below a committed length depends on the committed tokens alone.
Token 0 has no column. Formulas: ``specs/models.md``.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ninfer_runtime.backends.base import Float32s, ProgramOptions
from ninfer_runtime.config import SamplingParams
from ninfer_runtime.models.binder import BoundModel
from ninfer_runtime.models.mtp import draft_ids
from ninfer_runtime.models.qwen3_5 import AttentionWeights

from .attention import AttentionRow, attention
from .drafts import Draft, propose
from .embedding import embed
from .forward import add_feed_forward, head_logits
from .kv_formats import KvPool
from .linear import linear, linear_float32
from .norm import rms_norm
from .rope import rope_tables
from .sampling import Counts
from .weights import Weights

FIRST_INDEX = 1
"""The lowest token index that has a column."""


@dataclass(frozen=True, slots=True)
class DraftRow:
    """T consecutive tokens of one sequence, and what to draft behind the last of them.

    start       index of the first
    embeddings  [T, hidden] of the tokens
    hidden      [T, hidden] final-normed hidden rows, each of the token before
    positions   int64 [3, T] rotary positions, each of the token before
    pages       int64, of the row
    params, counts  with which tokens are drawn; counts hold every token of the row that counts, int32 [V]
    """

    start: int
    embeddings: Tensor
    hidden: Tensor
    positions: Tensor
    pages: Tensor
    params: SamplingParams
    counts: Counts
    n_drafts: int = 0


@dataclass(slots=True)
class _Chain:
    """Drafts of one row so far; ``hidden`` [1, hidden] is the layer's output for the last of them, or of the row."""

    row: DraftRow
    hidden: Tensor
    drafts: list[Draft] = field(default_factory=list)
    is_over: bool = False

    @property
    def next_index(self) -> int:
        """Index of the token to draft."""
        return self.row.start + self.row.embeddings.shape[0] + len(self.drafts)

    def draft(self, logits: Float32s, options: ProgramOptions) -> None:
        """Draw one more."""
        counts = self.row.counts
        if self.drafts and self.row.params.has_penalties:
            counts = counts.copy()
            np.add.at(counts, [draft.token_id for draft in self.drafts], 1)
        draft = propose(logits, self.row.params, counts, self.next_index, options.acceptance)
        if draft is not None:
            self.drafts.append(draft)
        self.is_over = draft is None or len(self.drafts) == self.row.n_drafts

    def column(self, embedding: Tensor) -> DraftRow:
        """The last draft as input, with the layer's own output in place of a hidden row of the decoder."""
        last = self.row.positions[:, -1].max()
        positions = (last + len(self.drafts)).expand(3, 1)
        row = self.row
        return DraftRow(self.next_index - 1, embedding, self.hidden, positions, row.pages, row.params, row.counts)


class DraftLayer:
    """The layer with its head; keys and values are layer ``len(attention_layers)`` of the pool."""

    def __init__(self, model: BoundModel, weights: Weights, pool: KvPool, options: ProgramOptions) -> None:
        assert model.mtp is not None
        self._model, self._weights, self._pool, self._options = model, weights, pool, options
        self._own = model.mtp
        self._head = model.draft_head if options.draft_head else None
        self._head_ids = None if self._head is None else draft_ids(model.artifact, self._head, model.spec.n_addressable)

    def follow(self, rows: list[DraftRow]) -> list[tuple[Draft, ...]]:
        """Read the tokens of every row, and draft behind those that want it; fewer where the logits are not finite."""
        chains: list[_Chain | None] = []
        for row, out in zip(rows, self._columns(rows), strict=True):
            chains.append(_Chain(row, out[-1:]) if row.n_drafts else None)
        live = [chain for chain in chains if chain is not None]
        while live:
            logits = self._logits(torch.cat([chain.hidden for chain in live]))
            for chain, own in zip(live, logits, strict=True):
                chain.draft(own, self._options)
            live = [chain for chain in live if not chain.is_over]
            if live:
                tokens = torch.tensor([chain.drafts[-1].token_id for chain in live], device=live[0].hidden.device)
                embedded = embed(tokens, self._weights, self._model.token_embedding).split(1)
                columns = [chain.column(one) for chain, one in zip(live, embedded, strict=True)]
                for chain, out in zip(live, self._columns(columns), strict=True):
                    chain.hidden = out
        return [() if chain is None else tuple(chain.drafts) for chain in chains]

    def _columns(self, rows: list[DraftRow]) -> list[Tensor]:
        """The layer's output for every token of every row, [T, hidden] each, without a column of token 0."""
        spec, weights, own = self._model.spec, self._weights, self._own
        skips = [max(0, FIRST_INDEX - row.start) for row in rows]
        parts = [row.embeddings.shape[0] - skip for row, skip in zip(rows, skips, strict=True)]
        segments, begin = [], 0
        for row, skip, n_tokens in zip(rows, skips, parts, strict=True):
            if n_tokens:
                segments.append(AttentionRow(begin, begin + n_tokens, row.start + skip, row.pages, FIRST_INDEX))
            begin += n_tokens
        embeddings = torch.cat([row.embeddings[skip:] for row, skip in zip(rows, skips, strict=True)])
        if begin == 0:
            return list(embeddings.split(parts))
        hidden = torch.cat([row.hidden[skip:] for row, skip in zip(rows, skips, strict=True)])
        positions = torch.cat([row.positions[:, skip:] for row, skip in zip(rows, skips, strict=True)], 1)
        e = rms_norm(embeddings, weights.vector(own.embedding_norm), spec.norm_eps)
        c = rms_norm(hidden, weights.vector(own.hidden_norm), spec.norm_eps)
        x = linear(torch.cat([e, c], -1), weights, own.input_projection)
        h = rms_norm(x, weights.vector(own.layer.input_norm), spec.norm_eps)
        assert isinstance(own.layer.mixer, AttentionWeights)
        rope, layer = rope_tables(positions, spec), len(spec.attention_layers)
        x = x + attention(h, weights, own.layer.mixer, spec, layer, segments, rope, self._pool)
        x = add_feed_forward(x, weights, own.layer, self._model)
        return list(rms_norm(x, weights.vector(own.final_norm), spec.norm_eps).split(parts))

    def _logits(self, hidden: Tensor) -> Float32s:
        """[T, hidden] → float32 [T, n addressable]; -inf for ids that the draft head does not have."""
        n_addressable = self._model.spec.n_addressable
        if self._head is None:
            return head_logits(self._model, self._weights, hidden).numpy()[:, :n_addressable]
        out = np.full((hidden.shape[0], n_addressable), -np.inf, np.float32)
        out[:, self._head_ids] = linear_float32(hidden, self._weights, self._head.rows).cpu().numpy()
        return out
