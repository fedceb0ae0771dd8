"""Choose on this card which launches of a round begin early, and write the choice into its tuning file.

    python scripts/tune_round.py ARTIFACT [--context 7680] [--write]

Every choice of ``EarlyStart`` is captured as one round and replayed, all choices in turn and several times over, on a
warm card; the fastest median wins. The captured round of each choice must emit the token of the first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from ninfer_format import Artifact
from ninfer_runtime.backends.base import ProgramLimits, ProgramOptions, Round
from ninfer_runtime.backends.cuda.backend import CudaBackend
from ninfer_runtime.backends.cuda.device import Graph
from ninfer_runtime.backends.cuda.ops.linear_small_tuning import FOLDER
from ninfer_runtime.backends.cuda.round_pass import EarlyStart
from ninfer_runtime.config import PAGE_TOKENS, SamplingParams
from ninfer_runtime.models.binder import bind

TURNS, REPLAYS, WARM_UP_SECONDS = 7, 10, 0.5


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--context", type=int, default=7680)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with Artifact.open(args.artifact) as artifact:
        model, backend = bind(artifact), CudaBackend()
        n_pages = -(-(args.context + 256) // PAGE_TOKENS)
        limits = ProgramLimits(max_context=PAGE_TOKENS * n_pages, n_pages=n_pages, prefill_chunk=128)
        options = ProgramOptions(device="cuda", dtype="bfloat16", kv_dtype="int8")
        program = backend.create(model, backend.plan_memory(model, limits, options))
        program.bench_set_length(0, args.context)
        ones = np.ones(1, np.int32)
        round_ = Round(
            slots=ones - 1,
            token_ids=np.array([[5]], np.int32),
            n_columns=ones,
            starts=ones * args.context,
            rope_deltas=ones - 1,
            pages=np.arange(n_pages, dtype=np.int32)[None],
            sampling=(SamplingParams.greedy(),),
            stop_ids=(frozenset[int](),),
            budget=ones * 100,
        )
        device, stream, queue = program.device, program.stream, program._round_pass
        program.rollback(program.launch(round_))
        graphs: dict[EarlyStart, Graph] = {}
        times: dict[EarlyStart, list[float]] = {}
        for mixer, after in itertools.product((True, False), repeat=2):
            queue.early = EarlyStart(mixer, after)
            with device.capture(stream) as graph:
                queue.queue(stream, 1, 1)
            graphs[queue.early], times[queue.early] = graph, []
        until = time.perf_counter() + WARM_UP_SECONDS
        while time.perf_counter() < until:
            for graph in graphs.values():
                graph.launch(stream)
            device.synchronize(stream)
        start, stop = device.event(timing=True), device.event(timing=True)
        for _ in range(TURNS):
            for choice, graph in graphs.items():
                start.record(stream)
                for _ in range(REPLAYS):
                    graph.launch(stream)
                stop.record(stream)
                device.synchronize(stream)
                times[choice].append(stop.elapsed_ms(start) * 1000 / REPLAYS)
        medians = {choice: statistics.median(values) for choice, values in times.items()}
        for choice, median in sorted(medians.items(), key=lambda item: item[1]):
            print(f"{choice}: {median:.1f} us a round of {model.spec.text.n_layers} layers", file=sys.stderr)
        best = min(medians, key=lambda choice: medians[choice])
        row = {"mixer": best.mixer, "after_mixer": best.after_mixer}
        file = FOLDER / f"{device.arch}-{device.n_sms}.json"
        if args.write:
            document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            document["round"] = row
            file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print(json.dumps(row))
        for graph in graphs.values():
            graph.close()
        program.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
