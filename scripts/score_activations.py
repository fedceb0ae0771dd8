"""What quantized activations in prompts cost: perplexity and logits of trained models.

    python scripts/score_activations.py [SOURCE…] [--documents 60] [--json]

SOURCE is a folder as tests/oracle/train_tiny.py writes it (default: examples/tiny/dense). Held-out documents are scored
in float32 arithmetic by the reference. NVFP4 weights: rows as they are, rows quantized with divisors of 1 (a conversion
without statistics), and with divisors measured on other documents. Integer codes (groupwise-int): rows as they are, and
signed bytes. Errors of logits are against rows as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.pipeline import build
from ninfer_convert.plan import BuildOptions, make_plan
from ninfer_format.activation_stats import ActivationStats, dump_activation_stats
from ninfer_runtime.backends.reference.input_statistics import InputStatistics
from ninfer_runtime.config import EngineConfig
from ninfer_runtime.engine.engine import Engine

sys.path.insert(0, str(Path(__file__).resolve().parent))
score_recipes = import_module("score_recipes")
score_kv = import_module("score_kv")

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "ninfer.activation-scores/1"
SOURCE = ROOT / "examples" / "tiny" / "dense"


@dataclass(frozen=True)
class Score:
    """One way of multiplying: perplexity, change of the mean loss in percent, root mean square error of logits.

    ``standard_error`` is that of the change, from the changes of single documents.
    """

    rows: str
    perplexity: float
    loss_change: float
    standard_error: float
    rms_logit_error: float


def with_measured_divisors(source: Path, plain: Path, out: Path, texts: Sequence[list[int]]) -> None:
    """Build ``out`` with the divisors that ``texts`` give the model ``plain``."""
    with Engine.open(plain, EngineConfig(dtype="float32")) as engine:
        program: Any = engine.program
        statistics = InputStatistics(engine.artifact.objects.names(), channels=False)
        with program.observing(statistics):
            for ids in texts:
                engine.teacher_forced_logits(ids)
        of = (("0" * 64, sum(map(len, texts))),)
        stats = ActivationStats(str(engine.artifact.identity), "float32", of[0][1], 2048, of, statistics.results())
    path = out.with_suffix(".json")
    path.write_bytes(dump_activation_stats(stats))
    build(make_plan(BuildOptions(source, out, recipe="nvfp4", activation_stats=path)))


def scores(source: Path, n_documents: int) -> list[Score]:
    """Every way of multiplying, on the same documents."""
    texts = score_recipes.documents(source, 2 * n_documents)
    texts, others = texts[:n_documents], texts[n_documents:]
    with tempfile.TemporaryDirectory() as folder:
        plain, measured = Path(folder) / "plain.ninfer", Path(folder) / "measured.ninfer"
        build(make_plan(BuildOptions(source, plain, recipe="nvfp4")))
        with_measured_divisors(source, plain, measured, others)
        grouped = Path(folder) / "grouped.ninfer"
        build(make_plan(BuildOptions(source, grouped, recipe="groupwise-int")))
        exact = EngineConfig(dtype="float32")
        a4, int8 = replace(exact, nvfp4_activations="a4"), replace(exact, prefill_activations="int8")
        nvfp4 = [
            ("NVFP4 weights, rows as they are", plain, exact),
            ("NVFP4 rows, divisors 1", plain, a4),
            ("NVFP4 rows, measured divisors", measured, a4),
        ]
        codes = [("integer codes, rows as they are", grouped, exact), ("signed bytes", grouped, int8)]
        return [score for ways in (nvfp4, codes) for score in _of_ways(ways, texts)]


def _of_ways(ways: Sequence[tuple[str, Path, EngineConfig]], texts: Sequence[list[int]]) -> list[Score]:
    """The first is what the others are measured against."""
    exact: list[NDArray[np.float32]] = []
    found: list[Score] = []
    plain: NDArray[np.float64] = np.empty(0)
    for name, artifact, config in ways:
        nats: NDArray[np.float64] = np.empty(len(texts))
        squares, n_logits = 0.0, 0
        with Engine.open(artifact, config) as engine:
            n_ids = engine.model.spec.n_addressable
            for i, ids in enumerate(texts):
                logits = engine.teacher_forced_logits(ids)[:, :n_ids]
                nats[i] = score_kv.negative_log_likelihood(logits, ids)
                if len(exact) == i:
                    exact.append(logits)
                squares += float(((logits - exact[i]).astype(np.float64) ** 2).sum())
                n_logits += logits.size
        plain = plain if plain.size else nats
        changes = 100 * (nats - plain) / plain.sum()
        error = math.sqrt(len(texts)) * float(changes.std(ddof=1))
        perplexity = math.exp(nats.sum() / sum(len(ids) - 1 for ids in texts))
        found.append(Score(name, perplexity, float(changes.sum()), error, math.sqrt(squares / n_logits)))
    return found


def main() -> int:
    """Print a table or a document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sources", nargs="*", type=Path, metavar="SOURCE", default=[SOURCE])
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = {source.name: scores(source, args.documents) for source in args.sources}
    if args.json:
        document = {name: [asdict(score) for score in found] for name, found in results.items()}
        print(json.dumps({"schema": SCHEMA, "documents": args.documents, "models": document}, indent=1))
        return 0
    for name, found in results.items():
        print(f"{name:34} perplexity  loss                   logits rms")
        for score in found:
            change = f"{score.loss_change:+8.3f} % ± {score.standard_error:5.3f}"
            print(f"  {score.rows:32} {score.perplexity:10.4f}  {change}  {score.rms_logit_error:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
