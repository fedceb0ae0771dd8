"""What storing keys and values in fewer bits costs: perplexity and logits of trained models, and constructed outliers.

    python scripts/score_kv.py [SOURCE…] [--documents 60] [--json]

SOURCE is a folder as tests/oracle/train_tiny.py writes it (default: the two in examples/tiny). Held-out documents are
scored in float32 arithmetic, so that the storage is all that differs; logit errors are against float32 storage.

Every model is scored twice. "+ outliers" computes the same function with eight channels of every key and value sixteen
times as large: the norm of the keys and the rows of the value projection are multiplied, the norm of the queries and
the columns of the output projection divided. The last block has no model: heads of random queries, keys and values,
eight channels of each ten times as large.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.pipeline import build
from ninfer_convert.plan import BuildOptions, make_plan
from ninfer_runtime.backends.kv_numeric import decode_fp6, decode_int8, encode_fp6, encode_int8, head_bytes, rotate
from ninfer_runtime.config import EngineConfig, KvDtype, KvStorage
from ninfer_runtime.engine.engine import Engine

sys.path.insert(0, str(Path(__file__).resolve().parent))
score_recipes = import_module("score_recipes")

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "ninfer.kv-scores/1"
OUTLIERS = " + outliers"
SOURCES = tuple(ROOT / "examples" / "tiny" / name for name in ("dense", "moe"))
CHOICES: tuple[tuple[KvDtype, bool], ...] = (
    ("auto", False),
    ("bf16", False),
    ("int8", False),
    ("int8", True),
    ("fp6", False),
    ("fp6", True),
)
HEAD_DIM, N_TOKENS, N_OUTLIERS, SCORE_DEVIATION = 256, 512, 8, 2
HEAD_FACTOR, MODEL_FACTOR = 10, 16
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class ModelScore:
    """One model with one storage: perplexity, and the largest and the root mean square logit error."""

    perplexity: float
    max_logit_error: float
    rms_logit_error: float


@dataclass(frozen=True)
class OutlierScore:
    """Heads with outlier channels: relative errors as stored and of attention, the largest and the mean of scores."""

    stored: float
    max_score_error: float
    rms_score_error: float
    attention: float


def stored(x: Floats, storage: KvStorage, *, rotation: bool) -> Floats:
    """What is read back of ``x``, rotated back where it was rotated."""
    turned = rotate(x) if rotation else x
    if storage == "float32":
        return x
    if storage == "bf16":
        return (turned.view(np.uint32) + 0x7FFF + (turned.view(np.uint32) >> 16 & 1) & 0xFFFF0000).view(np.float32)
    back = decode_int8(*encode_int8(turned)) if storage == "int8" else decode_fp6(*encode_fp6(turned))
    return rotate(back) if rotation else back


def relative_error(found: NDArray[Any], exact: NDArray[Any]) -> float:
    """Root mean square of the difference over that of the exact values."""
    difference = found.astype(np.float64) - exact
    return float(np.sqrt(np.mean(difference**2) / np.mean(exact.astype(np.float64) ** 2)))


def scores_of(query: Floats, keys: Floats) -> NDArray[np.float64]:
    """q·k / sqrt(d) for every pair."""
    return query.astype(np.float64) @ keys.T / math.sqrt(HEAD_DIM)


def attention(scores: NDArray[np.float64], values: Floats) -> NDArray[np.float64]:
    """softmax(scores) v for every query."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed: NDArray[np.float64] = (weights / weights.sum(-1, keepdims=True)) @ values
    return mixed


def outlier_score(storage: KvStorage, *, rotation: bool) -> OutlierScore:
    """On constructed heads; queries are scaled so that scores have a standard deviation of two."""
    rng = np.random.default_rng(0)
    query, keys, values = (rng.standard_normal((N_TOKENS, HEAD_DIM)).astype(np.float32) for _ in range(3))
    channels = rng.choice(HEAD_DIM, N_OUTLIERS, replace=False)
    for x in (query, keys, values):
        x[:, channels] *= np.float32(HEAD_FACTOR)
    query *= np.float32(SCORE_DEVIATION / scores_of(query, keys).std())
    found_keys, found_values = (stored(x, storage, rotation=rotation) for x in (keys, values))
    exact, found = scores_of(query, keys), scores_of(query, found_keys)
    return OutlierScore(
        stored=relative_error(found_keys, keys),
        max_score_error=float(np.abs(found - exact).max()),
        rms_score_error=float(np.sqrt(np.mean((found - exact) ** 2))),
        attention=relative_error(attention(found, found_values), attention(exact, values)),
    )


def with_outliers(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint that computes the same, with outlier channels in every cached head."""
    from safetensors.torch import load_file, save_file

    out = folder / f"{source.name}{OUTLIERS}"
    shutil.copytree(source, out)
    config = json.loads((source / "config.json").read_text())["text_config"]
    head_dim, n_kv = config["head_dim"], config["num_key_value_heads"]
    first = int(head_dim * config["partial_rotary_factor"])  # channels that no position turns
    channels = first + np.random.default_rng(0).choice(head_dim - first, N_OUTLIERS, replace=False)
    for path in sorted(out.glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            part = name.rpartition("self_attn.")[2]
            if part == "k_norm.weight":  # stored around zero
                tensor[channels] = (1 + tensor[channels]) * MODEL_FACTOR - 1
            elif part == "q_norm.weight":
                tensor[channels] = (1 + tensor[channels]) / MODEL_FACTOR - 1
            elif part == "v_proj.weight":
                tensor.view(n_kv, head_dim, -1)[:, channels] *= MODEL_FACTOR
            elif part == "o_proj.weight":
                tensor.view(tensor.shape[0], -1, head_dim)[..., channels] /= MODEL_FACTOR
        save_file(tensors, path, metadata={"format": "pt"})
    return out


def model_scores(source: Path, n_documents: int) -> list[ModelScore]:
    """One score per choice, on the same documents."""
    texts = score_recipes.documents(source, n_documents)
    exact: list[NDArray[np.float32]] = []
    scores = []
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "model.ninfer"
        build(make_plan(BuildOptions(source, artifact, recipe="bf16")))
        for kv_dtype, rotation in CHOICES:
            config = EngineConfig(dtype="float32", kv_dtype=kv_dtype, kv_rotation=rotation)
            nats, n_tokens, worst, squares, n_logits = 0.0, 0, 0.0, 0.0, 0
            with Engine.open(artifact, config) as engine:
                n_ids = engine.model.spec.n_addressable
                for i, ids in enumerate(texts):
                    logits = engine.teacher_forced_logits(ids)[:, :n_ids]
                    nats, n_tokens = nats + negative_log_likelihood(logits, ids), n_tokens + len(ids) - 1
                    if kv_dtype == "auto":
                        exact.append(logits)
                    difference = np.abs(logits - exact[i]).astype(np.float64)
                    worst, squares = max(worst, float(difference.max())), squares + float((difference**2).sum())
                    n_logits += difference.size
            scores.append(ModelScore(math.exp(nats / n_tokens), worst, math.sqrt(squares / n_logits)))
    return scores


def negative_log_likelihood(logits: NDArray[np.float32], ids: list[int]) -> float:
    """Sum over every token after the first, in nats."""
    rows = logits[:-1].astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    chosen = rows[np.arange(len(rows)), ids[1:]]
    return float((np.log(np.exp(rows).sum(-1)) - chosen).sum())


def scored_rows(sources: Sequence[Path], n_documents: int) -> list[dict[str, Any]]:
    """One row per storage: what a head takes, and the scores of every model and of the constructed heads."""
    with tempfile.TemporaryDirectory() as folder:
        every = [path for source in sources for path in (source, with_outliers(source, Path(folder)))]
        models = {path.name: model_scores(path, n_documents) for path in every}
    rows: list[dict[str, Any]] = []
    for i, (kv_dtype, rotation) in enumerate(CHOICES):
        storage: KvStorage = "float32" if kv_dtype == "auto" else kv_dtype
        rows.append(
            {
                "storage": storage,
                "rotation": rotation,
                "bytes": head_bytes(storage, HEAD_DIM),
                "models": {name: asdict(scores[i]) for name, scores in models.items()},
                "heads": asdict(outlier_score(storage, rotation=rotation)),
            }
        )
    return rows


def printed(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The lines of the table: a block per model, and one of heads."""
    blocks = [(name, [row["models"][name] for row in rows]) for name in rows[0]["models"]]
    for name, scores in [*blocks, ("heads", [row["heads"] for row in rows])]:
        yield f"{name:<20}{'rotated':<9}{'bytes':>6}" + "".join(f"{key:>18}" for key in scores[0])
        for row, score in zip(rows, scores, strict=True):
            cells = "".join(f"{value:>18.5f}" for value in score.values())
            yield f"  {row['storage']:<18}{'on' if row['rotation'] else 'off':<9}{row['bytes']:>6}{cells}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", type=Path, metavar="SOURCE", default=SOURCES)
    parser.add_argument("--documents", type=int, default=60, help="held-out documents (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    given = parser.parse_args()
    rows = scored_rows(given.sources, given.documents)
    if given.json:
        print(json.dumps({"schema": SCHEMA, "documents": given.documents, "rows": rows}, indent=2))
    else:
        print("\n".join(printed(rows)))


if __name__ == "__main__":
    main()
