"""Time the Gated DeltaNet kernels of a 27B-sized model: python scripts/lab_gdn.py [decode] [flush] [prefill].

Rounds run as a graph of all 48 layers with programmatic edges, over the states of as many slots as rows (144 MB and
more: cold in L2), once per variant of the kernel; prefill as a graph of 16 layers that share a workspace. Prints
microseconds per layer, and the share of ``READ_GBPS`` that reading (and writing) states and records takes.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ninfer_runtime.backends.cuda.device import Stream
from ninfer_runtime.backends.cuda.launch import CudaDevice
from ninfer_runtime.backends.cuda.ops.gdn_decode import GdnDecode, GdnFold, fold_entries, specs
from ninfer_runtime.backends.cuda.ops.gdn_prefill import GdnPrefill, workspace_bytes
from ninfer_runtime.backends.cuda.ops.gdn_state import GdnGeometry
from ninfer_runtime.backends.cuda.ops.round_state import ROW_STATE
from tests.runtime.cuda.gdn_rig import Rig, random_layer, random_projections

GEOMETRY = GdnGeometry(16, 48, 48)
READ_GBPS = 4390.0
REPEATS = 5
PREFILL_LAYERS = 16
ROWS = (1, 2, 4, 8)
VARIANTS = {
    "ring": (1, True, 2),
    "no hint": (0, True, 2),
    "stores": (2, True, 2),
    "ring of 1": (1, True, 1),
    "no ring": (1, True, 0),
    "not ahead": (1, False, 0),
}
"""``hints``, ``fetches_ahead`` and ``ring`` of ``GdnDecode``."""


@dataclass(frozen=True, slots=True)
class Case:
    """Rows that evaluate ``columns`` behind ``pending`` ones, which are written back or not."""

    columns: int
    pending: int
    keeps: bool = False

    def n_bytes(self) -> int:
        """Of one row and layer: state, keys, corrections, decays and windows."""
        g = GEOMETRY
        column = 2 * g.channels + 4 * (g.key_width + g.value_width + g.value_heads)
        passes = 2 if self.pending and not self.keeps else 1
        return passes * g.value_heads * 128 * 128 * 4 + (self.columns + self.pending) * column


CASES = (
    Case(0, 3),
    Case(1, 0),
    Case(1, 1),
    Case(1, 3, True),
    Case(1, 5, True),
    Case(1, 6),
    Case(4, 3),
    Case(4, 3, True),
)


def microseconds(device: CudaDevice, stream: Stream, work: Callable[[], None], launches: int) -> float:
    """Median time of one of the ``launches`` launches that ``work`` queues, as a graph."""
    work()
    device.synchronize()
    with device.capture(stream) as graph:
        work()
    times = []
    for _ in range(REPEATS + 1):
        begin, end = device.event(timing=True), device.event(timing=True)
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        times.append(1e3 * end.elapsed_ms(begin) / launches)
    graph.close()
    return float(np.median(times[1:]))


class Lab:
    """States of eight slots, all zero, and inputs for calls of up to 1024 tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.device = CudaDevice()
        self.stream = self.device.stream()
        self.rig = Rig(self.device, random_layer(GEOMETRY, generator), 8)
        layout = self.rig.layout
        self.device.fill(self.rig.states, 0, 8 * layout.state_bytes_per_slot, self.stream)
        self.device.fill(self.rig.records, 0, 8 * layout.record_bytes_per_slot, self.stream)
        self.inputs = self.rig.inputs(random_projections(GEOMETRY, 1024, generator))
        self.out = self.rig.poisoned(1024 * GEOMETRY.value_width * 2)
        self.device.prepare([spec for hints in (0, 1, 2) for spec in specs(GEOMETRY, hints)])
        self.decodes = {
            name: GdnDecode(self.device, GEOMETRY, hints=hints, fetches_ahead=ahead, ring=ring)
            for name, (hints, ahead, ring) in VARIANTS.items()
        }
        self.fold = GdnFold(self.device, GEOMETRY)

    def time(self, label: str, work: Callable[[], None], launches: int, n_bytes: int = 0) -> None:
        """Print one line."""
        time = microseconds(self.device, self.stream, work, launches)
        share = f", {n_bytes / time / 1e3 / READ_GBPS:.0%} of the memory's rate" if n_bytes else ""
        print(f"{label}: {time:.2f} us{share}", flush=True)

    def round(self, decode: GdnDecode, n_rows: int, n_columns: int, rows: int) -> None:
        """All layers of a round."""
        for i in range(GEOMETRY.n_layers):
            state = self.rig.layout.layer(i, self.rig.states, self.rig.records)
            decode.launch(
                self.stream, n_rows=n_rows, n_columns=n_columns, rows=rows, inputs=self.inputs,
                weights=self.rig.weights, state=state, out=self.out,
            )  # fmt: skip

    def chunk(self, prefill: GdnPrefill, workspace: int, n_tokens: int, parts: tuple[str, ...]) -> None:
        """Prefill of some layers; ``parts`` of ``GdnPrefill`` are left out."""
        for i in range(PREFILL_LAYERS):
            state = self.rig.layout.layer(i, self.rig.states, self.rig.records)
            prefill.launch(
                self.stream, n_tokens=n_tokens, slot=0, inputs=self.inputs, weights=self.rig.weights, out=self.out,
                state=state, workspace=workspace, skip=parts,
            )  # fmt: skip


def time_rounds(lab: Lab) -> None:
    """Every case at every number of rows: microseconds per layer and share of the rate, a column per variant."""
    print("rows x columns, pending | " + " | ".join(VARIANTS))
    for n_rows in ROWS:
        for case in CASES:
            rows = np.zeros(n_rows, ROW_STATE)
            rows["slot"], rows["n_columns"], rows["fold_columns"] = np.arange(n_rows), case.columns, case.pending
            rows["record_buffer"], rows["log_record"], rows["keeps_state"] = 1, case.pending, case.keeps
            at, cells = lab.rig.put(rows), []
            for decode in lab.decodes.values():
                work = partial(lab.round, decode, n_rows, max(1, case.columns), at)
                time = microseconds(lab.device, lab.stream, work, GEOMETRY.n_layers)
                cells.append(f"{time:6.2f} us {n_rows * case.n_bytes() / time / 1e3 / READ_GBPS:4.0%}")
            label = f"{n_rows} x {case.columns}, {case.pending} {'kept' if case.keeps else 'written'}"
            print(f"{label:22} | " + " | ".join(cells), flush=True)


def time_flushes(lab: Lab) -> None:
    """Flushes of all layers of one and of eight slots."""
    head_bytes = GEOMETRY.value_heads * 128 * 128 * 4
    for n_entries in (1, 8):
        entries = lab.rig.put(fold_entries([(slot, 3, 0) for slot in range(n_entries)]))
        regions = {"states": lab.rig.states, "records": lab.rig.records}
        work = partial(lab.fold.launch, lab.stream, n_entries=n_entries, entries=entries, **regions)
        lab.time(f"flush of {n_entries} x 3", work, 1, 2 * n_entries * head_bytes * GEOMETRY.n_layers)


def time_prefill(lab: Lab) -> None:
    """Calls of several lengths, and one kernel at a time."""
    prefill, workspace = GdnPrefill(lab.device, GEOMETRY), lab.device.allocate(workspace_bytes(GEOMETRY, 1024))
    for n_tokens in (1, 64, 256, 512, 1024):
        lab.time(f"prefill of {n_tokens}", partial(lab.chunk, prefill, workspace, n_tokens, ()), PREFILL_LAYERS)
    for part in ("chunks", "state", "output"):
        others = tuple(name for name in ("chunks", "state", "output") if name != part)
        lab.time(f"prefill of 1024, {part} alone", partial(lab.chunk, prefill, workspace, 1024, others), PREFILL_LAYERS)


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["decode", "flush", "prefill"]
    laboratory = Lab()
    if "decode" in wanted:
        time_rounds(laboratory)
    if "flush" in wanted:
        time_flushes(laboratory)
    if "prefill" in wanted:
        time_prefill(laboratory)
