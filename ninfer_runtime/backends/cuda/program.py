"""The CUDA program: rounds are captured graphs, prompts are queued chunks; the rules are those of ``backends/base.py``.

A round is one upload, one graph, one download; the next one may be launched before it is read. State changes only when
a record is folded: by the next round of the slot, or by a flush before anything else touches it.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ninfer_format.geometry import up
from ninfer_format.hashing import Progress, silent
from ninfer_runtime.backends.base import (
    MAX_ROUNDS_IN_FLIGHT,
    Float32s,
    Int32s,
    Logprobs,
    MemoryPlan,
    Place,
    PrefillChunk,
    PrefillResult,
    Round,
    RoundResult,
    StateSnapshot,
    Ticket,
)
from ninfer_runtime.backends.checks import (
    check_ids,
    check_masks,
    check_prefill,
    check_round,
    check_row,
    check_slot,
    require,
)
from ninfer_runtime.backends.cuda import draft_pass, matrices, prompt_pass, round_pass
from ninfer_runtime.backends.cuda.arena import Arena
from ninfer_runtime.backends.cuda.book import NO_BUFFER, Launched, RoundBook, evaluated_columns
from ninfer_runtime.backends.cuda.device import Array, Device, Event, Stream
from ninfer_runtime.backends.cuda.draft_pass import DraftPass
from ninfer_runtime.backends.cuda.drafting import Drafting, check_position
from ninfer_runtime.backends.cuda.host_store import HostStore
from ninfer_runtime.backends.cuda.memory import head_rows, lay_out, prompt_tokens, round_columns
from ninfer_runtime.backends.cuda.ops import linear_large, repack
from ninfer_runtime.backends.cuda.ops.copy_pages import CopyPages
from ninfer_runtime.backends.cuda.ops.gdn_decode import GdnFold, fold_entries
from ninfer_runtime.backends.cuda.ops.gdn_state import GdnStateLayout
from ninfer_runtime.backends.cuda.ops.round_begin import Counts, RoundBegin
from ninfer_runtime.backends.cuda.ops.round_state import ROW_STATE, RoundBuffers
from ninfer_runtime.backends.cuda.ops.sampling import Sampler
from ninfer_runtime.backends.cuda.planning import residency_notes
from ninfer_runtime.backends.cuda.prompt_pass import PromptPass
from ninfer_runtime.backends.cuda.prompt_products import paths
from ninfer_runtime.backends.cuda.ring import Ring
from ninfer_runtime.backends.cuda.round_graphs import RoundGraphs
from ninfer_runtime.backends.cuda.round_pass import RoundPass
from ninfer_runtime.backends.cuda.snapshots import Part, Snapshots
from ninfer_runtime.backends.cuda.staging import Staging
from ninfer_runtime.backends.cuda.starting import Networks, NoCpu, clear, load_weights, networks_on_cpu
from ninfer_runtime.backends.cuda.weights import DeviceWeights
from ninfer_runtime.models.binder import BoundModel

_FLOAT = 4


class CudaProgram:
    """``backends.base.Program`` on one card, or on anything that answers like one (``device.Device``)."""

    name = "cuda"
    runs_ahead = True

    def __init__(self, model: BoundModel, plan: MemoryPlan, device: Device, *, progress: Progress = silent) -> None:
        """Compile, allocate the plan, load, capture. A DeviceError names what does not fit."""
        self.model, self.plan, self.device = model, plan, device
        self.stream = device.stream()
        self._host = HostStore(device, plan.host_weight_bytes)
        self._arena = Arena(device, plan.device_bytes)
        self._cpu: Networks = NoCpu()
        try:
            self._start(progress)
        except BaseException:
            self._cpu.close()
            self._arena.close()
            self._host.close()
            raise

    def _start(self, progress: Progress) -> None:
        """Lay out, compile, load, capture."""
        model, plan, device = self.model, self.plan, self.device
        limits, spec = plan.limits, model.spec
        self._regions = lay_out(model, limits, plan.options, device, self._arena, self._host)
        r = self._regions
        columns = round_columns(limits)
        self.ring = None if r.weights.ring is None else Ring(device, r.weights.ring, plan.options.residency.slowdown)
        uses = {} if self.ring is None else self.ring.uses()
        self._small = matrices.SmallMatrices(device, self._arena, r, columns, uses)
        device.prepare(
            [
                *self._small.specs,
                *matrices.large_specs(r),
                *round_pass.specs(r, spec, limits.max_columns),
                *prompt_pass.specs(r, spec),
                *draft_pass.specs(r, spec, limits.max_columns),
                *repack.specs({matrix.format for matrix in r.weights.matrices}),
            ]
        )
        clear(device, self.stream, model, r)
        self.load_report = load_weights(device, model, r, progress)
        if self.ring is not None:
            self.ring.fill()
        self._small.prepare()
        large = matrices.LargeMatrices(device, r, spec.norm_eps, max(prompt_tokens(limits), columns), head_rows(limits))
        linear_large.clear_workspace(device, r.linear_large_workspace)
        small, prompt = self._small, matrices.PromptMatrices(r, self._small, large, columns)
        drafts = self._drafting = None
        if r.draft is not None:
            own = matrices.PromptMatrices(r, small, large, columns, x=r.draft.memory.x)
            drafts = DraftPass(device, r, spec, small, own, limits)
            self._drafting = Drafting(device, self.stream, r, drafts, self._send)
            self._drafting.load(model)
        self._cpu = networks_on_cpu(device, model, plan.options.residency, columns)
        self._round_pass = RoundPass(device, r, spec, small, limits.max_columns, drafts, self._cpu.of_layer)
        self.bench_state_writes = self._round_pass.carrying.writes_per_round
        self._prompt_pass = PromptPass(device, r, spec, prompt, drafts)
        self._fold = GdnFold(device, r.gdn)
        self._copy_pages = CopyPages(device, r.kv)
        self._counts = Counts(device, r.counts, self.stream)
        self._prompt_begin = RoundBegin(device, r.prompt_memory, r.counts)
        self._prompt_sampler = Sampler(device, r.sampler_shape, r.prompt_sampler, r.prompt_memory, r.counts)
        self._buffers = [RoundBuffers(device, r.round_memory.layout) for _ in range(MAX_ROUNDS_IN_FLIGHT + 1)]
        self._prompt_buffers = RoundBuffers(device, r.prompt_memory.layout)
        self._events = [device.event() for _ in self._buffers]
        self._staging = Staging(device, 4 * max(4 * prompt_tokens(limits), 2 * limits.n_pages, 4 * limits.n_slots, 64))
        self._book = RoundBook(limits.n_slots)
        self._snapshots = Snapshots(device, self.stream, limits, self._state_parts())
        self._forced = 0.0
        self._spans: list[tuple[Event, Event]] = []
        self._n_spans = 0
        device.synchronize()
        self._graphs = RoundGraphs(device, self.stream, limits, self._round_pass.queue, self._drafting, self.ring)

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """The card, how loading went, which path the matrices take, what is captured."""
        d, load = self.device, self.load_report
        return (
            ("device", f"{d.name}, {d.arch}, {d.n_sms} SMs"),
            ("loading", f"{load.n_bytes:,} bytes in {load.seconds:.2f} s, {load.gigabytes_per_second:.1f} GB/s"),
            ("matrices", paths(self._regions.weights.matrices, self._regions.prompt_rows)),
            *residency_notes(self.model, self._regions, self.plan),
            *self._graphs.notes,
        )

    def enter_thread(self) -> None:
        self.device.activate()

    # ---- slots -------------------------------------------------------------------------------
    def length(self, slot: int) -> int:
        self._check_slot_exists(slot)
        self._book.resolve(wait=True)
        return self._book.lanes[slot].length

    def reset(self, slot: int) -> None:
        self._check_slot(slot)
        lane = self._book.lanes[slot]
        lane.make_whole(0)
        lane.position = (0, 0, 0)
        self._snapshots.clear(slot)
        self._counts.reset(self.stream, slot)
        if self._drafting is not None:
            self._drafting.drop(slot)

    def set_output_counts(self, slot: int, token_ids: Int32s) -> None:
        self._check_slot(slot)
        check_ids("token_ids", token_ids, self.model.spec.text.vocab_rows)
        self._counts.reset(self.stream, slot)
        for begin in range(0, len(token_ids), self.plan.limits.prefill_chunk):
            part = np.ascontiguousarray(token_ids[begin : begin + self.plan.limits.prefill_chunk], np.int32)
            self._send(self._regions.prompt.tokens, part)
            self._counts.add_list(self.stream, slot, self._regions.prompt.tokens, len(part))

    def snapshot(self, slot: int, place: Place = "device") -> StateSnapshot:
        self._check_slot(slot)
        self._flush(slot)
        lane = self._book.lanes[slot]
        return self._snapshots.save(slot, lane.length, lane.position, place)

    def restore(self, slot: int, snapshot: StateSnapshot) -> None:
        self._check_slot(slot)
        lane = self._book.lanes[slot]
        lane.position = self._snapshots.load(slot, snapshot)
        lane.make_whole(snapshot.n_tokens)
        self._counts.reset(self.stream, slot)
        if self._drafting is not None:
            self._drafting.drop(slot)

    def release(self, snapshot: StateSnapshot) -> None:
        self._snapshots.release(snapshot)

    def relocate(self, snapshot: StateSnapshot, place: Place) -> StateSnapshot:
        return self._snapshots.relocate(snapshot, place)

    # ---- keys and values ---------------------------------------------------------------------
    def copy_pages(self, sources: Int32s, targets: Int32s) -> None:
        require(sources.shape == targets.shape, f"{sources.shape} sources for {targets.shape} targets")
        check_ids("sources", sources, self.plan.limits.n_pages)
        check_ids("targets", targets, self.plan.limits.n_pages)
        if len(sources):
            pairs = np.ascontiguousarray(np.stack([sources, targets], axis=1), np.int32)
            self._send(self._regions.page_pairs, pairs)
            self._copy_pages.launch(
                self.stream, pool=self._regions.kv_pool, pairs=self._regions.page_pairs, n_pairs=len(pairs)
            )

    # ---- prompts -----------------------------------------------------------------------------
    def prefill(self, chunk: PrefillChunk) -> PrefillResult:
        slot, n_tokens, spec = chunk.slot, len(chunk.token_ids), self.model.spec
        self._check_slot(slot)
        lane = self._book.lanes[slot]
        check_prefill(chunk, lane.length, self.plan.limits, spec)
        if chunk.logits_mask is not None:
            check_masks(chunk.logits_mask, spec.n_addressable)
        self._flush(slot)
        positions = prompt_pass.positions_of(chunk)
        self._send_prompt(chunk, positions)
        self._prompt_pass.queue(self.stream, slot, chunk.start, n_tokens, has_own_rows=chunk.embeddings is not None)
        lane.length += n_tokens
        hidden = None
        if chunk.want_hidden:
            self._prompt_pass.hidden(self.stream, n_tokens, self._regions.prompt.own_rows)
            hidden = np.empty((n_tokens, spec.text.hidden), np.float32)
            self.device.download(self._regions.prompt.own_rows, hidden, self.stream)
        n_wanted = {"none": 0, "last": 1, "all": n_tokens}[chunk.logits]
        logits = self._prompt_logits(n_tokens, n_wanted)
        is_finite = bool(np.isfinite(logits[:, : spec.n_addressable]).all())
        token_id = logprobs = None
        if chunk.sampling is not None:
            if n_wanted == 0:
                self._prompt_pass.logits(self.stream, range(n_tokens - 1, n_tokens))
            last = self._regions.activations.logits + _FLOAT * self._last_logits_row(n_wanted) * self._logits_stride
            token_id, logprobs = self._draw(chunk, last)
            is_finite = is_finite and token_id is not None
            if not is_finite:
                token_id = logprobs = None
            else:
                self._counts.add_rows(self.stream, [slot], [[token_id or 0]])
        drafts = None
        if self._drafting is not None:
            drafts = self._drafting.follow_prompt(chunk, lane, positions, token_id, self._prompt_buffers)
        lane.position = (int(positions[0, -1]), int(positions[1, -1]), int(positions[2, -1]))
        return PrefillResult(token_id, logits, hidden, logprobs, is_finite, drafts)

    # ---- rounds ------------------------------------------------------------------------------
    def launch(self, round_: Round) -> Ticket:
        previous = self._book.previous_of(round_)
        limits, spec = self.plan.limits, self.model.spec
        check_round(round_, limits, spec)
        if previous is None:
            self._book.resolve(wait=True)
        record_buffers = np.zeros(round_.n_rows, np.int32)
        fold_columns, fold_buffers = np.zeros_like(record_buffers), np.zeros_like(record_buffers)
        max_starts, ends = round_.starts.copy(), round_.starts + round_.budget
        if not round_.verify:
            ends += round_.n_columns - 1
        for b, slot in enumerate(round_.slots.tolist()):
            self._check_slot_exists(slot)
            lane = self._book.lanes[slot]
            if previous is None:
                require(round_.budget[b] >= 1, f"row {b} has a budget of {round_.budget[b]}, expected at least 1")
                fold_columns[b], fold_buffers[b], length = lane.pending_columns, lane.pending_buffer, lane.length
                if self._drafting is not None:
                    check_position(b, lane, int(round_.starts[b] + round_.rope_deltas[b]))
            else:
                fold_buffers[b] = previous.record_buffers[b]
                max_starts[b], ends[b] = previous.latest_start(b), previous.ends[b]
                length = int(max_starts[b])
            record_buffers[b] = 1 - max(0, fold_buffers[b])
            start, n_columns = int(max_starts[b]), int(round_.n_columns[b])
            n_drafts = 0 if round_.n_drafts is None else int(round_.n_drafts[b])
            behind = max(0, min(n_drafts, int(ends[b]) - start - 1 - n_columns))
            check_row(b, round_.token_ids[b, :n_columns], start, length, round_.pages[b], limits, spec, behind)
        if round_.logits_mask is not None:
            for b in range(round_.n_rows):
                check_masks(round_.logits_mask[b, : round_.n_columns[b]], spec.n_addressable)
        index = self._book.free_buffer()
        buffers, memory = self._buffers[index], self._regions.round_memory
        buffers.pack(round_, fold_columns, fold_buffers, record_buffers)
        buffers.force(self._forced)
        if previous is not None:
            self._book.commit_by_own_counts(previous)
        for b, slot in enumerate(round_.slots.tolist()):
            self._book.lanes[slot].pend(0, int(record_buffers[b]))
        self.device.upload(memory.input, buffers.packed, self.stream)
        if buffers.packed_masks.size:
            self.device.upload(memory.masks, buffers.packed_masks, self.stream)
        span = self._begin_span()
        extra = self._graphs.launch(round_, self._extras)
        self._end_span(span)
        self.device.download(memory.result, buffers.result, self.stream)
        self._events[index].record(self.stream)
        launched = Launched(
            serial=self._book.next_serial(),
            round=round_,
            buffer=index,
            record_buffers=record_buffers,
            max_starts=max_starts,
            ends=ends,
            wait=lambda: self._finish(round_, index, extra),
        )
        return self._book.add(launched)

    def read(self, ticket: Ticket) -> RoundResult:
        return self._book.read(ticket)

    def commit(self, ticket: Ticket, columns: Int32s | None = None) -> None:
        launched = self._book.unsettled(ticket)
        n_counted = self._book.commit(launched, columns)
        result = launched.outcome()
        tokens = [result.token_ids[b, :n].tolist() for b, n in enumerate(n_counted.tolist())]
        self._counts.add_rows(self.stream, launched.round.slots.tolist(), tokens)

    def rollback(self, ticket: Ticket) -> None:
        self._book.roll_back(self._book.unsettled(ticket))

    def close(self) -> None:
        self.device.synchronize()
        self._graphs.close()
        self._cpu.close()
        self._arena.close()
        self._host.close()

    # ---- hooks of the benchmarks ---------------------------------------------------------------
    @property
    def weights(self) -> DeviceWeights:
        """The tensors in device memory."""
        return self._regions.weights

    def bench_set_length(self, slot: int, n_tokens: int) -> None:
        """Make the slot ``n_tokens`` long without a prompt; its state stays, its pages hold what they hold."""
        self._check_slot(slot)
        self._flush(slot)
        lane = self._book.lanes[slot]
        lane.length, lane.position = n_tokens, (n_tokens - 1,) * 3

    def bench_recurrence(self, n_rows: int, n_columns: int) -> list[Callable[[Stream], None]]:
        """One launch per recurrent layer: rows fold ``n_columns`` - 1 recorded columns and record ``n_columns``."""
        rows = np.zeros(n_rows, ROW_STATE)
        rows["slot"], rows["n_columns"] = np.arange(n_rows), n_columns
        rows["fold_columns"], rows["record_buffer"], rows["log_record"] = n_columns - 1, 1, n_columns - 1
        self.device.upload(self._regions.round_memory.rows, rows)
        return self._round_pass.recurrences(n_rows, n_columns)

    def bench_copies(self) -> float:
        """Seconds that the copies of a round's streamed networks take alone; 0 where none are streamed."""
        self.device.synchronize()
        return 0.0 if self.ring is None or not self.ring.layout.is_moving else self.ring.seconds_of_copies()

    def bench_routing(self, n_columns: int) -> Int32s:
        """int32 [layers, n_columns, k]: the experts of the last round of so many columns; [0, …] for a dense model."""
        r = self._regions
        if r.experts is None:
            return np.zeros((0, n_columns, 0), np.int32)
        k, n_layers = self.model.spec.text.experts_per_token, len(r.weights.layers)
        found = np.empty((n_layers, r.experts.layer_ids_bytes // (4 * k), k), np.int32)
        self.device.synchronize(self.stream)
        self.device.download(r.experts.ids, found)
        return found[:, :n_columns]

    def bench_accept(self, probability: float) -> None:
        """From the next round on take every draft with this probability, whatever was drawn; 0: as it was drawn."""
        self._forced = probability

    def bench_spans(self, n_rounds: int | None) -> list[tuple[float, float]]:
        """Start timing up to ``n_rounds`` graph launches, or (None) end and return (start, end) seconds of each."""
        if n_rounds is not None:
            self._spans, self._n_spans = [], n_rounds
            return []
        self.device.synchronize(self.stream)
        spans, self._spans, self._n_spans = self._spans, [], 0
        if not spans:
            return []
        first = spans[0][0]
        return [(begin.elapsed_ms(first) / 1e3, end.elapsed_ms(first) / 1e3) for begin, end in spans]

    # ---- inside ------------------------------------------------------------------------------
    @property
    def _logits_stride(self) -> int:
        return up(self.model.spec.text.vocab_rows, 4)

    def _state_parts(self) -> list[Part]:
        """What a slot's state consists of."""
        r = self._regions
        parts = [Part(r.states, r.snapshots, GdnStateLayout(r.gdn).state_bytes_per_slot)]
        if r.draft is not None:
            parts.append(Part(r.draft.memory.hidden, r.draft.snapshots, r.draft.hidden_bytes))
        return parts

    def _check_slot_exists(self, slot: int) -> None:
        check_slot(slot, self.plan.limits, ())

    def _check_slot(self, slot: int) -> None:
        self._book.resolve(wait=True)
        check_slot(slot, self.plan.limits, self._book.busy_slots())

    def _flush(self, slot: int) -> None:
        """Fold now what the slot's state lacks."""
        lane = self._book.lanes[slot]
        if lane.pending_buffer != NO_BUFFER:
            r = self._regions
            self._send(r.fold_entries, fold_entries([(slot, lane.pending_columns, lane.pending_buffer)]))
            self._fold.launch(self.stream, n_entries=1, entries=r.fold_entries, states=r.states, records=r.records)
            if self._drafting is not None and lane.pending_columns:
                self._drafting.fold(r.fold_entries)
            lane.make_whole(lane.length)

    def _send(self, pointer: int, array: Array) -> None:
        self._staging.send(self.device, pointer, array, self.stream)

    def _send_prompt(self, chunk: PrefillChunk, positions: Int32s) -> None:
        r, n_tokens = self._regions.prompt, len(chunk.token_ids)
        self._send(r.tokens, chunk.token_ids)
        self._send(r.positions, positions)
        self._send(r.pages, chunk.pages[: self.plan.limits.pages_per_row])
        if chunk.embeddings is not None:
            own = np.full(n_tokens, -1, np.int32)
            own[chunk.embeddings.indices] = np.arange(len(chunk.embeddings.indices), dtype=np.int32)
            self._send(r.own_index, own)
            self.device.upload(r.own_rows, np.ascontiguousarray(chunk.embeddings.rows), self.stream)

    def _prompt_logits(self, n_tokens: int, n_wanted: int) -> Float32s:
        """The last ``n_wanted`` rows, on the host."""
        vocab_rows, step = self.model.spec.text.vocab_rows, head_rows(self.plan.limits)
        out = np.empty((n_wanted, vocab_rows), np.float32)
        for begin in range(0, n_wanted, step):
            n_rows = min(step, n_wanted - begin)
            first = n_tokens - n_wanted + begin
            self._prompt_pass.logits(self.stream, range(first, first + n_rows))
            out[begin : begin + n_rows] = self._download_logits(n_rows)
        return out

    def _last_logits_row(self, n_wanted: int) -> int:
        return (n_wanted - 1) % head_rows(self.plan.limits) if n_wanted else 0

    def _download_logits(self, n_rows: int) -> Float32s:
        rows = np.empty((n_rows, self._logits_stride), np.float32)
        self.device.download(self._regions.activations.logits, rows, self.stream)
        return rows[:, : self.model.spec.text.vocab_rows]

    def _draw(self, chunk: PrefillChunk, logits: int) -> tuple[int | None, Logprobs | None]:
        memory, buffers = self._regions.prompt_memory, self._prompt_buffers
        buffers.pack_prompt(chunk)
        self.device.upload(memory.input, buffers.packed, self.stream)
        if buffers.packed_masks.size:
            self.device.upload(memory.masks, buffers.packed_masks, self.stream)
        self._prompt_begin.launch(self.stream, 1, 1)
        self._prompt_sampler.launch(self.stream, 1, 1, logits)
        self.device.download(memory.result, buffers.result, self.stream)
        self.stream.synchronize()
        return buffers.unpack_prompt(chunk)

    def _begin_span(self) -> tuple[Event, Event] | None:
        if len(self._spans) >= self._n_spans:
            return None
        span = self.device.event(timing=True), self.device.event(timing=True)
        span[0].record(self.stream)
        return span

    def _end_span(self, span: tuple[Event, Event] | None) -> None:
        if span is not None:
            span[1].record(self.stream)
            self._spans.append(span)

    def _extras(self, round_: Round) -> Callable[[RoundResult], RoundResult]:
        """Logits and hidden rows that were asked for; fetching them waits for the round."""
        b, q = round_.token_ids.shape
        logits = hidden = None
        if round_.want_logits:
            logits = self._download_logits(b * q).reshape(b, q, -1).copy()
        if round_.want_hidden:
            self._prompt_pass.hidden(self.stream, b * q, self._regions.prompt.own_rows)
            hidden = np.empty((b, q, self.model.spec.text.hidden), np.float32)
            self.device.download(self._regions.prompt.own_rows, hidden, self.stream)

        def add(result: RoundResult) -> RoundResult:
            evaluated = np.arange(q) < evaluated_columns(round_, result)[:, None]
            return replace(result, logits=_only(logits, evaluated), hidden=_only(hidden, evaluated))

        return add

    def _finish(self, round_: Round, index: int, extra: Callable[[RoundResult], RoundResult]) -> RoundResult:
        self._events[index].synchronize()
        self._cpu.check()
        return extra(self._buffers[index].unpack(round_))


def _only(values: Float32s | None, keep: NDArray[np.bool_]) -> Float32s | None:
    """Zero where not evaluated."""
    return None if values is None else np.where(keep[..., None], values, np.float32(0))
