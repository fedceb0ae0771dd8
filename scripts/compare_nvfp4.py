"""Squared error of our NVFP4 encoder beside llm-compressor's, on the same matrices.

    python scripts/compare_nvfp4.py                    our two methods beside the recorded peer
    python scripts/compare_nvfp4.py --record FILE      measure the peer too and write FILE

Recording needs an environment of its own: `pip install llmcompressor` there (it pins older packages), then run this
script with that interpreter. The peer's observers choose scales and its `quantize` the codes, once from float32 weights
and once from BF16 ones, in which it then computes; everything is decoded in float64 from codes, E4M3 scales and global
scale. Errors are Σ (x − y)² / Σ x².
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ninfer_convert.checkpoint import Checkpoint  # noqa: E402
from ninfer_format.numeric.direct import round_bf16, widen_bf16  # noqa: E402
from ninfer_format.numeric.nvfp4 import BLOCK, dequantize  # noqa: E402
from ninfer_format.numeric.nvfp4_encode import Nvfp4Words, encode_nvfp4  # noqa: E402

SCHEMA = "ninfer.nvfp4-peer/1"
GOLDEN = ROOT / "tests" / "golden" / "nvfp4_peer.json"
SEED = 20
OBSERVERS = ("memoryless_minmax", "memoryless_mse", "nvfp4_expanded_mse")
"""The peer's default, its search downwards from the default, and its search in both directions."""
DTYPES = ("float32", "bfloat16")

_TINY_PARTS = ("embed_tokens", ".layers.0.", ".layers.3.", "visual.blocks.", "visual.merger.")
_LEAST_ROWS = 16

Floats = NDArray[np.float32]


def drawn_matrices() -> Iterator[tuple[str, Floats]]:
    """Name and values float32 [256, 512], all BF16, of matrices with weights of several shapes of distribution."""
    rng, shape = np.random.default_rng(SEED), (256, 512)
    outliers = rng.standard_normal(shape)
    outliers[:, ::64] *= 20
    drawn = {
        "normal": rng.standard_normal(shape) * 0.02,
        "student-t-3": rng.standard_t(3, shape) * 0.02,
        "laplace": rng.laplace(size=shape),
        "uniform": rng.uniform(-1, 1, shape),
        "outlier-columns": outliers,
        "rows-of-all-sizes": rng.standard_normal(shape) * np.exp(rng.standard_normal((shape[0], 1))),
    }
    for name, values in drawn.items():
        yield name, widen_bf16(round_bf16(values.astype(np.float32)))


def trained_matrices() -> Iterator[tuple[str, Floats]]:
    """Name and values float32 [N, K] of weights of the two tiny trained models; fused banks as one matrix."""
    for model in ("dense", "moe"):
        with Checkpoint.open(ROOT / "examples" / "tiny" / model) as checkpoint:
            for name, tensor in checkpoint.tensors.items():
                k = tensor.shape[-1]
                n_rows = int(np.prod(tensor.shape[:-1]))
                if len(tensor.shape) < 2 or k % BLOCK or n_rows < _LEAST_ROWS:
                    continue
                if any(part in name for part in _TINY_PARTS):
                    yield f"{model}/{name}", widen_bf16(checkpoint.read_words(name, 0, n_rows))


def matrices() -> Iterator[tuple[str, Floats]]:
    """All matrices of the comparison."""
    yield from drawn_matrices()
    yield from trained_matrices()


def digest(values: Floats) -> str:
    """SHA-256 of the float32 words of ``values``."""
    return hashlib.sha256(np.ascontiguousarray(values).astype("<f4").tobytes()).hexdigest()


def relative_error(values: Floats, decoded: NDArray[np.float64]) -> float:
    """Σ (x − y)² / Σ x²."""
    source = values.astype(np.float64)
    return float(((source - decoded) ** 2).sum() / (source**2).sum())


def decoded_words(words: Nvfp4Words) -> NDArray[np.float64]:
    """float64 [N, K] of encoded words."""
    out = np.empty((words.codes.shape[0], words.codes.shape[1] * 2), np.float64)
    dequantize(words.codes, words.scales, words.divisor, out)
    return out


def peer_errors(values: Floats) -> dict[str, dict[str, float]]:
    """The peer's error by weight type and observer."""
    import torch
    from compressed_tensors.quantization.lifecycle import quantize  # type: ignore[import-not-found]
    from compressed_tensors.quantization.quant_scheme import NVFP4A16  # type: ignore[import-not-found]
    from llmcompressor.observers import Observer  # type: ignore[import-not-found]

    errors: dict[str, dict[str, float]] = {}
    for dtype in DTYPES:
        weight = torch.from_numpy(values).to(getattr(torch, dtype))
        errors[dtype] = {}
        for name in OBSERVERS:
            args = NVFP4A16["weights"].model_copy(deep=True)
            observer = Observer.load_from_registry(name, base_name="weight", args=args)
            observer(weight)
            found = observer.get_qparams()
            divisor = found["global_scale"]
            codes = quantize(weight, found["scale"], found["zero_point"], args, global_scale=divisor)
            stored = found["scale"].to(torch.float8_e4m3fn).double()
            blocks = codes.double().unflatten(-1, (-1, BLOCK)) * stored.unsqueeze(-1) / divisor.double()
            errors[dtype][name] = relative_error(values, blocks.flatten(-2).numpy())
    return errors


def record(path: Path) -> dict[str, Any]:
    """Measure the peer on all matrices and write ``path``."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "versions": {name: version(name) for name in ("llmcompressor", "compressed-tensors", "torch", "numpy")},
        "matrices": {},
    }
    for name, values in matrices():
        document["matrices"][name] = {
            "shape": list(values.shape),
            "sha256": digest(values),
            "relative_squared_error": peer_errors(values),
        }
        print(f"measured {name}", file=sys.stderr)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="FILE", help="measure the peer and write FILE")
    arguments = parser.parse_args()
    document = record(arguments.record) if arguments.record else json.loads(GOLDEN.read_text())
    print("peer:", ", ".join(f"{name} {number}" for name, number in document["versions"].items()))
    columns = [f"{dtype[:2]}{dtype[-2:]} {name}" for dtype in DTYPES for name in OBSERVERS]
    print(f"{'error, ×1e-3':56}" + "".join(f"{c:>24}" for c in ("max", "mse", *columns)))
    seconds = {"max": 0.0, "mse": 0.0}
    totals = np.zeros(2 + len(columns))
    for name, values in matrices():
        row = []
        for method in ("max", "mse"):
            started = time.process_time()
            words = encode_nvfp4(values, method=method)
            seconds[method] += time.process_time() - started
            row.append(relative_error(values, decoded_words(words)))
        peer = document["matrices"][name]["relative_squared_error"]
        row += [peer[dtype][observer] for dtype in DTYPES for observer in OBSERVERS]
        totals += np.array(row)
        print(f"{name[-55:]:56}" + "".join(f"{value * 1e3:24.5f}" for value in row))
    print(f"{'sum over matrices, relative to max':56}" + "".join(f"{value:24.5f}" for value in totals / totals[0]))
    print("numpy, seconds:", json.dumps(seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
