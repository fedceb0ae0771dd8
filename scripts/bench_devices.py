"""`ninfer-convert build` on CPU and CUDA for a slice of the 27B geometry: GB/s of source, and whether bytes agree.

    python scripts/bench_devices.py [--layers 12] [--recipes groupwise-int,nvfp4] [--folder DIR] [--out FILE]

The slice has the widths of Qwen3.6-27B, fewer layers and a quarter of its vocabulary, normal weights, shards of about
1 GB, all in the page cache. Every recipe is built once to warm up and three times per device. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.bench_convert import BUILD, make_in_child, timed  # noqa: E402

SCHEMA = "ninfer.bench-devices/1"
RUNS = 3
SLICE = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "vocab_size": 62080,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def bench(folder: Path, out_folder: Path, recipe: str) -> dict[str, Any]:
    """Rates of both devices and the digests of what they wrote."""
    rates, digests, peaks, plans = {}, {}, {}, {}
    for device in ("cpu", "cuda"):
        out = out_folder / f"{device}.ninfer"
        options = ["--recipe", recipe, "--device", device, "--model-id", "slice", "--force", "--json", "--quiet"]
        runs = [timed(["-c", BUILD, "build", str(folder), str(out), *options]) for _ in range(RUNS + 1)][1:]
        rates[device] = round(statistics.median(r["source_bytes"] / 1e9 / r["elapsed_seconds"] for r in runs), 3)
        digests[device] = digest(out)
        peaks[device], plans[device] = max(r["peak_rss_bytes"] for r in runs), runs[0]["memory_bytes"]
    return {
        "recipe": recipe,
        "source_bytes": runs[0]["source_bytes"],
        "gb_per_s": rates,
        "sha256": digests,
        "identical": digests["cpu"] == digests["cuda"],
        "peak_rss_bytes": peaks,
        "planned_memory_bytes": plans,
    }


def main() -> None:
    """Parse, make the slice if needed, build, print and optionally store one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--recipes", default="groupwise-int,w8,nvfp4")
    parser.add_argument("--folder", type=Path, help="checkpoint to use; made there if it does not exist")
    parser.add_argument("--out", type=Path, help="also write the document there")
    arguments = parser.parse_args()
    import torch

    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "checkpoint"
        if not folder.exists():
            make_in_child(folder, text=SLICE, layers=arguments.layers)
        results = [bench(folder, Path(temporary), recipe) for recipe in arguments.recipes.split(",")]
    device = {"device": torch.cuda.get_device_name(), "cpus": os.cpu_count(), "torch": torch.__version__}
    facts = {"schema": SCHEMA} | device
    text = json.dumps(facts | {"layers": arguments.layers, "recipes": results}, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
