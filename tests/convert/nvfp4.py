"""NVFP4 checkpoints for the tests: a prepacked folder beside its BF16 base, at widths that NVFP4 can store.

Written with ml_dtypes, without the code under test. Which matrices stay BF16 follows the published artifact's pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.convert.tiny import TinyCheckpoint, Words, frontend_files, model_config, random_words, shapes_of

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Tool = Literal["compressed-tensors", "modelopt"]
E4M3: Any = ml_dtypes.float8_e4m3fn
LAYERS = "model.language_model.layers."
KEPT = (
    "3.self_attn.q_proj", "3.self_attn.k_proj", "3.self_attn.v_proj", "3.self_attn.o_proj", "4.linear_attn.out_proj",
)  # fmt: skip
"""Linears that the prepacked folder stores in BF16, besides in_proj_a and in_proj_b."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("in_proj_qkv", "in_proj_z"), ("gate_proj", "up_proj"))
LINEARS = (*(name for group in FUSED for name in group), "o_proj", "out_proj", "down_proj")
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True, slots=True)
class Matrix:
    """NVFP4 words of one linear; ``codes`` packed [N, K/2], ``scales`` E4M3 words [N, K/16]."""

    codes: Bytes
    scales: Bytes
    divisor: np.float32
    input_divisor: np.float32

    def values(self) -> Floats:
        """What the words mean, float32 [N, K]."""
        codes = np.stack([self.codes & 15, self.codes >> 4], axis=-1).reshape(len(self.codes), -1)
        scales = self.scales.view(E4M3).astype(np.float32).repeat(16, axis=1)
        decoded: Floats = _E2M1[codes] * scales / self.divisor
        return decoded


def random_matrix(
    rng: np.random.Generator, shape: tuple[int, ...], divisor: float, input_divisor: float, largest: int = 0x7E
) -> Matrix:
    """Any legal words."""
    rows, width = shape
    codes = rng.integers(0, 256, (rows, width // 2), np.uint8)
    scales = rng.integers(0, largest + 1, (rows, width // 16), np.uint8)
    return Matrix(codes, scales, np.float32(divisor), np.float32(input_divisor))


def stored(stem: str, matrix: Matrix, tool: Tool) -> dict[str, Any]:
    """The tensors in which ``tool`` stores ``matrix``."""
    scales = matrix.scales.view(E4M3)
    if tool == "modelopt":
        return {
            f"{stem}.weight": matrix.codes,
            f"{stem}.weight_scale": scales,
            f"{stem}.weight_scale_2": np.array(np.float32(1) / matrix.divisor, np.float32),
            f"{stem}.input_scale": np.array(np.float32(1) / matrix.input_divisor, np.float32),
        }
    return {
        f"{stem}.weight_packed": matrix.codes,
        f"{stem}.weight_scale": scales,
        f"{stem}.weight_global_scale": np.array([matrix.divisor], np.float32),
        f"{stem}.input_global_scale": np.array([matrix.input_divisor], np.float32),
    }


def wide_config(*, moe: bool = False, n_layers: int = 8) -> dict[str, Any]:
    """A config whose decoder matrices all have rows % 128 = 0 and columns % 64 = 0."""
    config = model_config(moe=moe)
    config["text_config"] |= {
        "hidden_size": 128,
        "num_hidden_layers": n_layers,
        "layer_types": ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(n_layers)],
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 48,
    }
    config["text_config"] |= (
        {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 192} if moe else {"intermediate_size": 320}
    )
    config["vision_config"]["out_hidden_size"] = 128
    return config


QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "group_0": {
            "format": "nvfp4-pack-quantized",
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
                "dynamic": False, "scale_dtype": "torch.float8_e4m3fn",
            },
            "input_activations": {
                "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
                "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn",
            },
        }
    },
    "ignore": ["lm_head"],
}  # fmt: skip


@dataclass
class Pair:
    """A prepacked folder, its base, and the words of every NVFP4 linear by stem."""

    source: TinyCheckpoint
    base: TinyCheckpoint
    matrices: dict[str, Matrix]
    tool: Tool

    def save(self) -> Pair:
        """Write both folders."""
        self.source.save()
        self.base.save()
        return self

    def put(self, stem: str, matrix: Matrix) -> None:
        """Store other words for a linear."""
        self.matrices[stem] = matrix
        self.source.tensors |= stored(stem, matrix, self.tool)


def linears(names: Iterable[str]) -> Iterator[str]:
    """Stems of the decoder's linears that a quantizer would take."""
    for name in names:
        if name.startswith(LAYERS) and name.split(".")[-2] in LINEARS:
            yield name.removesuffix(".weight")


def nvfp4_pair(
    folder: Path, *, seed: int = 0, tool: Tool = "compressed-tensors", kept: tuple[str, ...] = KEPT, moe: bool = False
) -> Pair:
    """A pair in ``folder``/nvfp4 and ``folder``/base, saved; the base's own values of NVFP4 linears are others."""
    rng, config = np.random.default_rng(seed), wide_config(moe=moe)
    plain: dict[str, Words] = {name: random_words(shape, rng) for name, shape in shapes_of(config).items()}
    base = TinyCheckpoint(folder / "base", config, plain, frontend_files())
    quantized = deepcopy(config | {"quantization_config": QUANTIZATION})
    source = TinyCheckpoint(folder / "nvfp4", quantized, dict(plain), {})
    pair = Pair(source, base, {}, tool)
    globals_of: dict[str, tuple[float, float]] = {}
    for stem in list(linears(plain)):
        if stem.removeprefix(LAYERS) in kept:
            continue
        block, _, name = stem.rpartition(".")
        group = next((g for g in FUSED if name in g), (name,))
        key = block + group[0]
        globals_of.setdefault(key, (float(rng.uniform(50, 5000)), float(rng.uniform(1, 500))))
        shape = source.tensors.pop(stem + ".weight").shape
        pair.put(stem, random_matrix(rng, shape, *globals_of[key]))
    return pair.save()
