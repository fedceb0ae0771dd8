"""What recipes cost in perplexity: held-out documents of tests/oracle/train_tiny.py, scored by the engine in float32.

    python scripts/score_recipes.py SOURCE… [--documents 60] [--json]

SOURCE is a folder as train_tiny.py writes it. Every recipe and method is built into a temporary folder; documents are
drawn with a seed that training never used and scored one by one, control tokens included. The columns beside
perplexity: bits per matrix weight as stored, and the relative error of all quantized weights together.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from ninfer_convert.pipeline import build
from ninfer_convert.plan import BuildOptions, make_plan
from ninfer_format import NUMERIC_FORMATS, Artifact, TensorEntry
from ninfer_runtime.config import EngineConfig
from ninfer_runtime.engine.engine import Engine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "oracle"))
train_tiny = import_module("train_tiny")

SCHEMA = "ninfer.recipe-scores/1"
DOCUMENT_SEED = 987_654
CHOICES = (("bf16", "max"), ("w8", "max"), ("w8", "mse"), ("groupwise-int", "max"), ("groupwise-int", "mse"))
NVFP4_CHOICES = (("nvfp4", "max"), ("nvfp4", "mse"))


def documents(source: Path, n_documents: int) -> list[list[int]]:
    """Token ids of held-out documents, as the training rendered and tokenized them."""
    from tokenizers import Tokenizer

    tokenizer, template = Tokenizer.from_file(str(source / "tokenizer.json")), train_tiny.renderer()
    rng = random.Random(DOCUMENT_SEED)
    return [tokenizer.encode(train_tiny.document(rng, template)).ids for _ in range(n_documents)]


def perplexity(path: Path, texts: list[list[int]]) -> float:
    """exp of the mean negative log likelihood of every token after the first of its document."""
    nats, n_tokens = 0.0, 0
    with Engine.open(path, EngineConfig(dtype="float32")) as engine:
        for ids in texts:
            found = engine.score(ids)
            nats, n_tokens = nats - found.total_log_probability, n_tokens + found.n_scored
    return math.exp(nats / n_tokens)


def stored_bits(path: Path) -> float:
    """Bits per weight over the matrices of the artifact, scales and padding included."""
    with Artifact.open(path) as artifact:
        matrices = [e for e in artifact.objects if isinstance(e, TensorEntry) and len(e.shape) == 2]
        kinds = [e for e in matrices if NUMERIC_FORMATS[e.format].kind != "direct" or e.format == "BF16"]
        return 8 * sum(e.n_bytes for e in kinds) / sum(math.prod(e.shape) for e in kinds)


def score(source: Path, n_documents: int) -> list[dict[str, Any]]:
    """One row per recipe and method."""
    texts, rows = documents(source, n_documents), []
    with tempfile.TemporaryDirectory() as folder:
        for recipe, method in (*CHOICES, *NVFP4_CHOICES):
            out = Path(folder) / f"{recipe}-{method}.ninfer"
            plan = make_plan(BuildOptions(source, out, recipe=recipe, method=method))
            result = build(plan)
            sizes = {e.name: math.prod(e.shape) for e in plan.require().inventory.tensors}
            errors = [(sizes[done.name], done.error) for done in result.finished.values() if done.error]
            squares = sum(n * error["rms"] ** 2 for n, error in errors)
            source_squares = sum(n * error["source_rms"] ** 2 for n, error in errors)
            rows.append(
                {
                    "recipe": recipe,
                    "method": method,
                    "bits": round(stored_bits(out), 3),
                    "relative_error": round(math.sqrt(squares / source_squares), 5) if errors else 0.0,
                    "perplexity": round(perplexity(out, texts), 5),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE")
    parser.add_argument("--documents", type=int, default=60, help="held-out documents (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    given = parser.parse_args()
    scores = {str(source): score(source, given.documents) for source in given.sources}
    if given.json:
        print(json.dumps({"schema": SCHEMA, "documents": given.documents, "scores": scores}, indent=2))
        return
    for name, rows in scores.items():
        print(f"{name}\n{'recipe':<15}{'method':<8}{'bits':>7}{'rel. error':>12}{'perplexity':>12}")
        for row in rows:
            print(
                f"{row['recipe']:<15}{row['method']:<8}{row['bits']:>7.3f}{row['relative_error']:>12.5f}"
                f"{row['perplexity']:>12.5f}"
            )


if __name__ == "__main__":
    main()
