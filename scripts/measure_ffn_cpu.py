"""What the CPU takes for a feed-forward network, and what giving it some makes of rounds on a card that is not there.

    python scripts/measure_ffn_cpu.py [IDENTITY] [--gpu rtx5060ti] [--context 96000] [--threads N] [--cores N]

Times one network of the model with random weights, as `--ffn-cpu` multiplies it, in rounds of 1, 4 and 8 columns; then
prints the plans of the card with INT8 keys and values, a host embedding and streamed networks: with none on the CPU and
with as many as make rounds shortest, plain and with three drafts. --cores predicts for so many cores of this kind.
Copies to a card, which read host memory too, are no part of it; a start with `--ffn-cpu auto` measures with them.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ninfer_runtime.backends.base import ProgramLimits, ProgramOptions
from ninfer_runtime.backends.cuda.card import CardBackend, card_named
from ninfer_runtime.backends.cuda.cpu_networks import CpuNetwork, random_network
from ninfer_runtime.backends.cuda.planned import planned_model
from ninfer_runtime.backends.cuda.planning import Forecast
from ninfer_runtime.backends.cuda.residency import CpuSeconds
from ninfer_runtime.config import PAGE_TOKENS, Residency
from ninfer_runtime.models.binder import BoundModel

N_DRAFTS = 3
COLUMNS = (1, 1 + N_DRAFTS, 8)
SAMPLES = 5


def seconds_of(network: CpuNetwork, n_columns: int, hidden: int) -> float:
    """The median of some calls after one."""
    x, samples = torch.randn(n_columns, hidden), []
    with torch.inference_mode():
        for _ in range(1 + SAMPLES):
            began = time.perf_counter()
            network(x)
            samples.append(time.perf_counter() - began)
    return float(np.median(samples[1:]))


def forecast(model: BoundModel, gpu: str, context: int, n_drafts: int, cpu: CpuSeconds | None) -> tuple[int, Forecast]:
    """Networks on the CPU, and the rounds of the card's plan; ``cpu`` None: none."""
    card = card_named(gpu)
    assert card.rates is not None
    backend = CardBackend(replace(card, rates=replace(card.rates, cpu=cpu)))
    residency = Residency("ffn", host_embedding=True, n_cpu_layers=0 if cpu is None else None)
    options = ProgramOptions("cuda", "bfloat16", "int8", proposer="mtp" if n_drafts else "none", residency=residency)
    limits = ProgramLimits(
        max_context=context, n_pages=-(-context // PAGE_TOKENS), max_columns=1 + n_drafts, max_drafts=n_drafts
    )
    plan = backend.plan_memory(model, limits, options)
    found = backend.forecast(model, plan)
    assert found is not None
    return len(plan.options.residency.on_cpu), found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("identity", nargs="?", default="qwen3.6-27b/groupwise-int")
    parser.add_argument("--gpu", default="rtx5060ti")
    parser.add_argument("--context", type=int, default=96_000)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cores", type=int)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    model = planned_model(given.identity)
    network, hidden = random_network(model), model.spec.text.hidden
    n_bytes = network.gate_up.n_bytes + network.down.n_bytes
    print(f"{given.identity}: {n_bytes / 1e6:.1f} MB a network, {torch.get_num_threads()} threads")
    seconds = {n: seconds_of(network, n, hidden) for n in COLUMNS}
    for n, took in seconds.items():
        print(f"{n} columns: {took * 1e3:.2f} ms, {n_bytes / took / 1e9:.1f} GB/s")
    scale = 1.0 if given.cores is None else torch.get_num_threads() / given.cores
    measured = CpuSeconds(seconds[1] * scale, seconds[8] * scale)
    for n_drafts in (0, N_DRAFTS):
        for cpu in (None, measured):
            n, found = forecast(model, given.gpu, given.context, n_drafts, cpu)
            round_, rate = (found.drafting, found.drafting_rate) if n_drafts else (found.plain, found.plain_rate)
            assert round_ is not None
            print(
                f"{n_drafts} drafts, {n} networks on the CPU: a round of {round_.seconds * 1e3:.1f} ms (copies "
                f"{round_.copy * 1e3:.1f}, products {round_.compute * 1e3:.1f}, {round_.cpu * 1e3:.1f} of them the "
                f"CPU's), {rate:.1f} tokens/s"
            )


if __name__ == "__main__":
    main()
