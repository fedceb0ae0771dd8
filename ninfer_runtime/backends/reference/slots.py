"""Lanes and snapshots: recurrent state, token counts, lengths and drafts, and who may touch them."""

from itertools import count

import numpy as np
import torch

from ninfer_runtime.backends.base import Int32s, Place, ProgramLimits, StateSnapshot
from ninfer_runtime.backends.checks import check_ids, require
from ninfer_runtime.models.spec import ModelSpec

from .drafts import Draft, HeldDrafts
from .sampling import Counts
from .state import Recurrent, empty_recurrent


class Slots:
    """All slots of a program, allocated once."""

    def __init__(
        self, spec: ModelSpec, limits: ProgramLimits, dtype: torch.dtype, device: torch.device, *, proposes: bool
    ) -> None:
        self._spec, self._limits, self._dtype, self._device = spec, limits, dtype, device
        self._proposes = proposes
        self.recurrent = [self._empty(device) for _ in range(limits.n_slots)]
        self.counts: Counts = np.zeros((limits.n_slots, spec.text.vocab_rows), np.int32)
        self.lengths = [0] * limits.n_slots
        self.held: list[HeldDrafts | None] = [None] * limits.n_slots
        self._snapshots: dict[int, tuple[Place, Recurrent]] = {}
        self._serials = count(1)

    def reset(self, slot: int) -> None:
        """Empty state, counts and length."""
        self.recurrent[slot].zero()
        self.counts[slot] = 0
        self.lengths[slot] = 0
        self.held[slot] = None

    def set_output_counts(self, slot: int, token_ids: Int32s) -> None:
        """Counts of exactly these tokens."""
        check_ids("token_ids", token_ids, self._spec.text.vocab_rows)
        self.counts[slot] = np.bincount(token_ids, minlength=self._spec.text.vocab_rows)

    def count(self, slot: int, token_ids: Int32s) -> None:
        """Add one occurrence of each token."""
        np.add.at(self.counts[slot], token_ids, 1)

    def snapshot(self, slot: int, place: Place) -> StateSnapshot:
        """Copy a slot's state; ContractError beyond the planned number of snapshots."""
        return self._save(self.recurrent[slot], self.lengths[slot], place)

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        """Copy a snapshot back; counts become empty, drafts are gone."""
        self.recurrent[slot].copy_from(self._saved(snapshot))
        self.counts[slot] = 0
        self.lengths[slot] = snapshot.n_tokens
        self.held[slot] = None

    def release(self, snapshot: StateSnapshot) -> None:
        """Drop a snapshot."""
        self._saved(snapshot)
        del self._snapshots[snapshot.serial]

    def relocate(self, snapshot: StateSnapshot, place: Place) -> StateSnapshot:
        """Copy a snapshot to the other place and drop it where it was; ContractError when there is no room."""
        saved = self._saved(snapshot)
        require(place != snapshot.place, f"snapshot {snapshot.serial} is in {place} memory already")
        moved = self._save(saved, snapshot.n_tokens, place)
        self.release(snapshot)
        return moved

    def held_drafts(self, slot: int, index: int, anchor: int) -> tuple[Draft, ...]:
        """Drafts behind token ``index`` of the slot's sequence if that is ``anchor``, none behind another one."""
        held = self.held[slot]
        return held.drafts if held is not None and (held.index, held.anchor) == (index, anchor) else ()

    def _empty(self, device: torch.device) -> Recurrent:
        return empty_recurrent(self._spec, self._dtype, device, proposes=self._proposes)

    def _save(self, state: Recurrent, n_tokens: int, place: Place) -> StateSnapshot:
        limit = self._limits.device_snapshots if place == "device" else self._limits.host_snapshots
        alive = sum(other == place for other, _ in self._snapshots.values())
        require(alive < limit, f"{alive} {place} snapshots are alive, the program was planned for {limit}")
        saved = self._empty(self._device if place == "device" else torch.device("cpu"))
        saved.copy_from(state)
        snapshot = StateSnapshot(next(self._serials), n_tokens, place)
        self._snapshots[snapshot.serial] = (place, saved)
        return snapshot

    def _saved(self, snapshot: StateSnapshot) -> Recurrent:
        require(snapshot.serial in self._snapshots, f"snapshot {snapshot.serial} was released or belongs elsewhere")
        return self._snapshots[snapshot.serial][1]
