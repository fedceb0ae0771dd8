"""How near `ninfer-convert build` comes to what the machine allows, per recipe.

    python scripts/bench_limits.py [--gb 2.2] [--runs 3] [--folder DIR] [--recipes groupwise-int,bf16,w8,nvfp4]
                                   [--device cpu|cuda]

Three limits are measured in the same rounds, all as source bytes per second: the encoders alone on all cores, fed from
memory; SHA-256 of the output on one core; plain writing of the output with one sync. `build` reads, fuses, encodes,
measures errors, hashes, writes and syncs. Prints one JSON document; shares are of the tightest limit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.bench_convert import BUILD, make_in_child, timed  # noqa: E402

SCHEMA = "ninfer.bench-limits/1"
WRITE_BYTES = 4 << 20
POOL_WORDS = 1 << 27
"""Words that the encoders alone are fed from, one piece after another: more than caches hold, as with a checkpoint."""


def encoders_alone(folder: Path, recipe: str, device: str) -> float:
    """Seconds that all workers need for the pieces of all objects when rows come from memory, not from files."""
    from ninfer_convert.memory import worker_count
    from ninfer_convert.plan import BuildOptions, make_plan
    from ninfer_convert.quantize.torch_threads import one_thread_here
    from ninfer_convert.stored_object import StoredObject
    from ninfer_convert.workspace import Workspace, lanes_for

    plan = make_plan(BuildOptions(folder, recipe=recipe))
    target = plan.require()
    lanes = lanes_for(device, max(source.row_width for source in target.sources))
    values = np.random.default_rng().standard_normal(1 << 24, np.float32) * np.float32(0.02)
    words = (values.view(np.uint32) >> 16).astype(np.uint16)

    class FromMemory(Workspace):
        begin = 0

        def read(self, reader: Any, begin: int, end: int, out: Any = None, *, words: bool = False) -> Any:
            del words
            size = (end - begin) * reader.width
            self.begin = 0 if self.begin + size > pool.size else self.begin
            rows = pool[self.begin : self.begin + size].reshape(end - begin, reader.width)
            self.begin += size
            if out is None:
                return rows
            out[...] = rows
            return out

    items = [
        (StoredObject(plan, entry, source, lanes.piece), np.full(entry.n_bytes, 1, np.uint8))  # pages touched now
        for entry, source in zip(target.inventory.objects, target.sources, strict=True)
    ]
    pool, advanced = np.resize(words, POOL_WORDS), threading.Condition()
    pieces = iter([(item, number) for item, _ in items for number in range(item.n_pieces)])

    def work() -> None:
        one_thread_here()
        space = FromMemory(lanes, device)
        while True:
            with advanced:
                item, number = next(pieces, (None, 0))
                if item is None:
                    return
                while not item.may_start(number):
                    advanced.wait()
            result = item.work(number, space)
            with advanced:
                over = item.finish_piece(number, result)
            if over:
                item.close_round(space)
                with advanced:
                    item.end_round()
                    advanced.notify_all()

    for item, buffer in items:
        item.begin(buffer)
    threads = [threading.Thread(target=work) for _ in range(worker_count(0))]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def hash_rate() -> float:
    """Bytes per second of SHA-256 on one core."""
    block = np.random.default_rng().integers(0, 256, 1 << 28, np.uint8).data
    started = time.perf_counter()
    digest = hashlib.sha256()
    for begin in range(0, len(block), WRITE_BYTES):
        digest.update(block[begin : begin + WRITE_BYTES])
    return len(block) / (time.perf_counter() - started)


def write_rate(folder: Path, n_bytes: int) -> float:
    """Bytes per second of writing ``n_bytes`` to a new file in ``folder``, the final sync included."""
    block = np.random.default_rng().integers(0, 256, WRITE_BYTES, np.uint8).data
    path = folder / "plain"
    os.sync()
    started = time.perf_counter()
    with open(path, "wb", buffering=0) as stream:
        for _ in range(-(-n_bytes // WRITE_BYTES)):
            stream.write(block)
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return n_bytes / seconds


def bench(folder: Path, out_folder: Path, recipe: str, device: str, n_runs: int) -> dict[str, Any]:
    """Build and limits for one recipe, in rounds; the first build is a warm-up.

    Every build writes a new file, as the plain writing does: giving back the blocks of an old one is neither's work,
    so the disk has done with it before the clock starts.
    """
    out = out_folder / f"{recipe}.ninfer"
    build = ["-c", BUILD, "build", str(folder), str(out), "--recipe", recipe, "--device", device, "--json"]
    me, alone = str(Path(__file__).resolve()), ["--alone", recipe, "--folder", str(folder), "--device", device]
    runs: list[dict[str, Any]] = []
    seconds: dict[str, list[float]] = {"encode": [], "sha256": [], "write": []}
    for number in range(n_runs + 1):
        out.unlink(missing_ok=True)
        os.sync()
        run, n_bytes = timed(build), out.stat().st_size
        if number:
            runs.append(run)
            # In a process of its own: what this one allocates would count as the peak of the next build it starts.
            seconds["encode"].append(timed([me, *alone])["elapsed_seconds"])
            seconds["sha256"].append(n_bytes / hash_rate())
            seconds["write"].append(n_bytes / write_rate(out_folder, n_bytes))
    source = runs[0]["source_bytes"]
    rates = {name: source / statistics.median(measured) for name, measured in seconds.items()}
    built = statistics.median(source / run["elapsed_seconds"] for run in runs)
    tightest = min(rates, key=lambda name: rates[name])
    peak = max(run["peak_rss_bytes"] for run in runs)
    return {
        "recipe": recipe,
        "output_bytes": out.stat().st_size,
        "build_mb_per_s": round(built / 1e6, 1),
        "limits_mb_per_s": {name: round(rate / 1e6, 1) for name, rate in rates.items()},
        "tightest": tightest,
        "share": round(built / rates[tightest], 3),
        "peak_rss_bytes": peak,
        "planned_memory_bytes": runs[0]["memory_bytes"],
        "within_planned_memory": peak <= runs[0]["memory_bytes"],
    }


def main() -> None:
    """Parse, make the checkpoint if needed, run every recipe, print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="checkpoint to use; made there if it does not exist")
    parser.add_argument("--recipes", default="groupwise-int,bf16,w8,nvfp4")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--alone", metavar="RECIPE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        seconds = encoders_alone(arguments.folder, arguments.alone, arguments.device)
        print(json.dumps({"elapsed_seconds": seconds}))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "checkpoint"
        if not folder.exists():
            make_in_child(folder, arguments.gb * 1e9)
        results = []
        for recipe in arguments.recipes.split(","):
            results.append(bench(folder, Path(temporary), recipe, arguments.device, arguments.runs))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(
        json.dumps({"schema": SCHEMA, "cpus": os.cpu_count(), "device": arguments.device, "recipes": results}, indent=2)
    )


if __name__ == "__main__":
    main()
