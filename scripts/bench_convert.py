"""How fast `ninfer-convert build` is, beside a plain torch script that quantizes the same tensors and writes nothing.

    python scripts/bench_convert.py [--gb 2.2] [--pairs 5] [--folder DIR] [--recipe groupwise-int]

Interleaved pairs, each run in a process of its own, on a synthetic BF16 checkpoint with the proportions of the 27B
model, in the page cache. The plain script maps the shards and goes through every matrix in 256-row chunks with
whole-chunk torch operations on all cores: once to codes and scales only, once to the packed planes that `build`
stores. `build` also reads, fuses, packs, measures errors, hashes, writes and syncs. Prints one JSON document with
medians, and peak resident memory beside the figure that the plan promised.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SCHEMA = "ninfer.bench-convert/1"
BUILD = "from ninfer_convert.cli import main; main()"
CHUNK_ROWS = 256
TEXT: Mapping[str, int] = {
    "hidden_size": 2560,
    "intermediate_size": 8704,
    "vocab_size": 32768,
    "head_dim": 256,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 24,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def make_checkpoint(
    folder: Path, n_bytes: float = 0.0, *, text: Mapping[str, int] = TEXT, layers: int | None = None
) -> None:
    """A dense checkpoint of ``layers`` layers, or of at least ``n_bytes``: real names, shards of about 1 GB.

    ``text`` replaces sizes of its text config; weights are normal.
    """
    import numpy as np

    from tests.convert.tiny import INDEX, frontend_files, model_config, shapes_of, write_safetensors

    config = model_config(moe=False)
    sizes = config["text_config"]
    sizes |= text
    config["vision_config"]["out_hidden_size"] = sizes["hidden_size"]

    def stack(n_layers: int) -> None:
        sizes["num_hidden_layers"] = n_layers
        sizes["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * (n_layers // 4)

    stack(layers or 4)
    while layers is None and 2 * sum(int(np.prod(shape)) for shape in shapes_of(config).values()) < n_bytes:
        stack(sizes["num_hidden_layers"] + 4)
    rng = np.random.default_rng(0)
    values = rng.standard_normal(1 << 26, np.float32) * np.float32(0.02)
    pool = (values.view(np.uint32) >> 16).astype(np.uint16)
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    batch, size = {}, 0
    shapes = list(shapes_of(config).items())
    for number, (name, shape) in enumerate(shapes):
        count = int(np.prod(shape))
        begin = int(rng.integers(0, 1 << 20))
        batch[name] = np.resize(pool[begin:], count).reshape(shape)
        size += 2 * count
        if size >= 1e9 or number == len(shapes) - 1:
            file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
            write_safetensors(folder / file, batch)
            weight_map |= dict.fromkeys(batch, file)
            batch, size = {}, 0
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    for file, content in frontend_files().items():
        (folder / file).write_bytes(content)


def make_in_child(folder: Path, n_bytes: float = 0.0, **options: Any) -> None:
    """``make_checkpoint`` in a process of its own: the peak of this one would count as that of those it starts."""
    child = multiprocessing.get_context("spawn").Process(target=make_checkpoint, args=(folder, n_bytes), kwargs=options)
    child.start()
    child.join()
    if child.exitcode:
        sys.exit(f"making {folder} ended with {child.exitcode}")


def plain_quantize(folder: Path, recipe: str, *, packed: bool) -> None:
    """The yardstick; prints seconds and source bytes as JSON. Asks the product only which tensor gets which format."""
    import torch
    from safetensors import safe_open

    from ninfer_convert.plan import BuildOptions, make_plan
    from ninfer_format import TensorEntry
    from ninfer_format.formats import NUMERIC_FORMATS

    plan = make_plan(BuildOptions(folder, recipe=recipe))
    target = plan.require()
    started, n_bytes = time.perf_counter(), 0
    shards = {s.file: safe_open(folder / s.file, framework="pt") for s in plan.checkpoint.shards}
    for entry, source in zip(target.inventory.objects, target.sources, strict=True):
        if not isinstance(entry, TensorEntry) or NUMERIC_FORMATS[entry.format].kind != "grouped":
            continue
        fmt = NUMERIC_FORMATS[entry.format]
        parts = []
        for name in source.tensors:
            stored = shards[plan.checkpoint.tensors[name].file].get_tensor(name).view(-1, source.row_width)
            runs = [run for run in source.runs if run.tensor == name]
            if source.transform == "draft_rows":
                parts.append(stored[torch.from_numpy(target.draft_ids).long()])
            elif sum(run.count for run in runs) == len(stored):
                parts.append(stored)
            else:
                parts.append(torch.cat([stored[run.begin : run.begin + run.count] for run in runs]))
        for matrix in parts:
            n_bytes += matrix.numel() * 2
            for begin in range(0, len(matrix), CHUNK_ROWS):
                chunk = plain_chunk(matrix[begin : begin + CHUNK_ROWS].float(), fmt)
                if packed:
                    plain_pack(*chunk, fmt)
    print(json.dumps({"elapsed_seconds": time.perf_counter() - started, "source_bytes": n_bytes}))


def plain_chunk(values: Any, fmt: Any) -> tuple[Any, Any]:
    """Codes int8 [rows, groups, G] and binary16 scales of one chunk, as the format's specification reads."""
    import torch

    if values.shape[1] % 128:
        values = torch.nn.functional.pad(values, (0, -values.shape[1] % 128))
    groups = values.view(len(values), -1, fmt.group)
    amax = groups.abs().amax(-1, keepdim=True)
    scale = (amax / torch.tensor(float(fmt.qmax))).half()
    scale = torch.where((scale == 0) & (amax > 0), torch.tensor(2.0**-24, dtype=torch.half), scale)
    inverse = torch.where(scale == 0, torch.zeros(()), 1.0 / scale.float())
    codes = (groups * inverse).round_().clamp_(fmt.qmin, fmt.qmax).to(torch.int8)
    return codes, scale


def plain_pack(codes: Any, scales: Any, fmt: Any) -> tuple[Any, Any, Any]:
    """Base, high and scale planes of one chunk."""
    import torch

    if fmt.bits == 8:
        return codes, None, scales
    words = codes.view(torch.uint8)
    base = (words[..., 0::2] & 15) | (words[..., 1::2] << 4)
    if not fmt.high_bits:
        return base, None, scales
    lanes = 8 // fmt.high_bits
    fields = ((words >> 4) & ((1 << fmt.high_bits) - 1)).view(*words.shape[:-1], -1, lanes)
    high = fields[..., 0]
    for lane in range(1, lanes):
        high = high | (fields[..., lane] << (lane * fmt.high_bits))
    return base, high, scales


def timed(arguments: list[str]) -> dict[str, Any]:
    """Run a process; its JSON output, wall seconds and peak resident bytes."""
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([sys.executable, *arguments], stdout=output, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{' '.join(arguments)} ended with {process.returncode}")
        wall = time.perf_counter() - started
        output.seek(0)
        document: dict[str, Any] = json.loads(output.read().splitlines()[-1])
    return document | {"wall_seconds": wall, "peak_rss_bytes": usage.ru_maxrss << 10}


def median(runs: list[dict[str, Any]], member: str) -> float:
    """Median of one member over runs."""
    return float(statistics.median(run[member] for run in runs))


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of one kind of run; ``seconds`` and MB/s (of source words) leave out the start of the process."""
    rates = [run["source_bytes"] / 1e6 / run["elapsed_seconds"] for run in runs]
    return {
        "seconds": round(median(runs, "elapsed_seconds"), 3),
        "process_seconds": round(median(runs, "wall_seconds"), 3),
        "megabytes_per_second": round(statistics.median(rates), 1),
        "peak_rss_bytes": max(run["peak_rss_bytes"] for run in runs),
    }


def bench(folder: Path, out: Path, recipe: str, n_pairs: int) -> dict[str, Any]:
    """All runs, interleaved; the first of each kind is a warm-up and does not count."""
    me = str(Path(__file__).resolve())
    kinds = {
        "build": ["-c", BUILD, "build", str(folder), str(out), "--recipe", recipe, "--force", "--json"],
        "plain_codes": [me, "--plain", "codes", "--folder", str(folder), "--recipe", recipe],
        "plain_packed": [me, "--plain", "packed", "--folder", str(folder), "--recipe", recipe],
    }
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(n_pairs + 1):
        for kind, arguments in kinds.items():
            runs[kind].append(timed(arguments))
            print(f"{kind}: {runs[kind][-1]['elapsed_seconds']:.2f} s", file=sys.stderr, flush=True)
    runs = {kind: measured[1:] for kind, measured in runs.items()}
    build, memory = summary(runs["build"]), runs["build"][0]["memory_bytes"]
    ratios = {
        f"speed_over_{kind}": round(
            statistics.median(
                p["elapsed_seconds"] / b["elapsed_seconds"] * b["source_bytes"] / p["source_bytes"]
                for b, p in zip(runs["build"], runs[kind], strict=True)
            ),
            3,
        )
        for kind in ("plain_codes", "plain_packed")
    }
    return {
        "schema": SCHEMA,
        "cpus": len(os.sched_getaffinity(0)),
        "recipe": recipe,
        "pairs": n_pairs,
        "source_bytes": runs["build"][0]["source_bytes"],
        "output_bytes": runs["build"][0]["bytes"],
        **{kind: summary(measured) for kind, measured in runs.items()},
        **ratios,
        "planned_memory_bytes": memory,
        "within_planned_memory": build["peak_rss_bytes"] <= memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.2, help="size of the synthetic checkpoint in GB")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="checkpoint to use; made there if it does not exist")
    parser.add_argument("--recipe", default="groupwise-int")
    parser.add_argument("--plain", choices=("codes", "packed"), help=argparse.SUPPRESS)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        make_in_child(arguments.folder, arguments.gb * 1e9)
    elif arguments.plain:
        plain_quantize(arguments.folder, arguments.recipe, packed=arguments.plain == "packed")
    else:
        # Anything heavy happens in child processes: a process starts with the peak memory of the one it came from.
        work = Path(tempfile.mkdtemp(prefix="ninfer-bench-"))
        try:
            folder = arguments.folder or work / "checkpoint"
            if not folder.exists():
                make = [str(Path(__file__).resolve()), "--make", "--folder", str(folder), "--gb", str(arguments.gb)]
                subprocess.run([sys.executable, *make], check=True)
            print(json.dumps(bench(folder, work / "out.ninfer", arguments.recipe, arguments.pairs), indent=2))
        finally:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
