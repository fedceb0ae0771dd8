"""The proposer of one program, host side: when the draft layer runs, and what is recorded of it.

Every round and every chunk is read, whether or not drafts are wanted behind it, so that they are the same wherever
drafting starts. Reading a round belongs to the round's own graph (``round_pass``).
"""

from collections.abc import Callable

import numpy as np

from ninfer_runtime.backends.base import Int32s, PrefillChunk
from ninfer_runtime.backends.checks import require
from ninfer_runtime.backends.cuda.book import Lane
from ninfer_runtime.backends.cuda.device import Array, Device, Stream
from ninfer_runtime.backends.cuda.draft_pass import DraftPass
from ninfer_runtime.backends.cuda.graphs import GraphBook
from ninfer_runtime.backends.cuda.memory import Regions
from ninfer_runtime.backends.cuda.ops.draft import HELD_DRAFTS, no_drafts, row_of_id
from ninfer_runtime.backends.cuda.ops.round_state import RoundBuffers
from ninfer_runtime.models.binder import BoundModel
from ninfer_runtime.models.mtp import draft_ids

Send = Callable[[int, Array], None]
"""Copies a small array to the device, in the order of the program's stream."""

_FIRST, _NEXT = 0, 1


class Drafting:
    """Drafts go to the slots; results of rounds and chunks say which."""

    def __init__(self, device: Device, stream: Stream, regions: Regions, drafts: DraftPass, send: Send) -> None:
        assert regions.draft is not None
        self._device, self._stream, self._regions, self._send = device, stream, regions, send
        self._own, self._pass = regions.draft, drafts
        self._graphs = GraphBook(device, stream)

    def load(self, model: BoundModel) -> None:
        """The map of the draft head's ids."""
        if self._own.row_of and model.draft_head is not None:
            n_addressable = model.spec.n_addressable
            rows = row_of_id(draft_ids(model.artifact, model.draft_head, n_addressable), n_addressable)
            self._device.upload(self._own.row_of, rows)

    def record(self, max_rows: int) -> None:
        """A graph of the first draft and one of a further draft, for every number of rows."""
        queue = {_FIRST: self._pass.first, _NEXT: self._pass.next}
        shapes = [(n_rows, which) for n_rows in range(1, max_rows + 1) for which in queue]
        self._graphs.record_all(shapes, lambda shape, stream: queue[shape[1]](stream, shape[0]))

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """For reports."""
        return (("drafts", f"{len(self._graphs)} graphs of {self._graphs.n_nodes} launches"),)

    def drop(self, slot: int) -> None:
        """The slot holds no drafts."""
        self._send(self._own.memory.held + slot * HELD_DRAFTS.itemsize, no_drafts())

    def fold(self, entries: int) -> None:
        """The hidden row of one pending record; the entry as ``GdnFold`` takes it."""
        self._pass.fold(self._stream, entries, 1)

    def follow_round(self, n_rows: int, n_drafts: int) -> None:
        """Launch the drafts of a round: as many steps as the row that wants most."""
        for i in range(n_drafts):
            self._graphs.launch((n_rows, _FIRST if i == 0 else _NEXT), self._stream)

    def queue(self, stream: Stream, n_rows: int, n_drafts: int) -> None:
        """The same launch by launch, to be captured."""
        for i in range(n_drafts):
            step = self._pass.first if i == 0 else self._pass.next
            step(stream, n_rows)

    def follow_prompt(
        self, chunk: PrefillChunk, lane: Lane, positions: Int32s, token_id: int | None, buffers: RoundBuffers
    ) -> Int32s | None:
        """Read a chunk that was folded and draft behind its drawn token, as ``PrefillResult.drafts``.

        ``lane`` still has the position of the token before the chunk; ``positions`` int32 [3, T] are the chunk's.
        """
        prompt, memory = self._regions.prompt, self._own.memory
        n_tokens, has_drafts = len(chunk.token_ids), token_id is not None and chunk.n_drafts > 0
        before = np.concatenate([np.array(lane.position, np.int32)[:, None], positions], 1)
        self._send(prompt.positions, before[:, : n_tokens + has_drafts])
        if has_drafts:
            self._send(prompt.tokens + 4 * n_tokens, np.array([token_id], np.int32))
        self._pass.read_chunk(self._stream, chunk.slot, chunk.start, n_tokens, with_drawn=has_drafts)
        if not has_drafts:
            self.drop(chunk.slot)
            return np.empty(0, np.int32) if chunk.n_drafts else None
        state, row, held = self._pass.prompt_states(
            chunk.slot, chunk.start, n_tokens, token_id or 0, int(positions[:, -1].max()), chunk.n_drafts
        )
        self._send(memory.states, state)
        self._send(memory.rows, row)
        self._send(memory.held + chunk.slot * HELD_DRAFTS.itemsize, held)
        for i in range(chunk.n_drafts):
            step = self._pass.first if i == 0 else self._pass.next
            step(self._stream, 1, self._regions.prompt_memory)
        self._device.download(self._regions.prompt_memory.result, buffers.result, self._stream)
        self._stream.synchronize()
        return buffers.held_drafts()

    def close(self) -> None:
        """Give the graphs back."""
        self._graphs.close()


def check_position(b: int, lane: Lane, position: int) -> None:
    """The draft layer's column of the next token has the position of the last one; in rounds all axes are equal."""
    expected = (position - 1,) * 3
    require(
        lane.length == 0 or lane.position == expected,
        f"row {b} goes on at rotary position {position}, its last token is at {lane.position}: drafts follow it",
    )
