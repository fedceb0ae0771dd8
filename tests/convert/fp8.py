"""FP8 checkpoints for the tests: tensors as E4M3 codes and scales, and the float32 values they mean.

Written with ml_dtypes and plain broadcasting, without the code under test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.convert.tiny import TinyCheckpoint, Words

Granularity = Literal["tensor", "row", "block"]
Floats = NDArray[np.float32]
E4M3: Any = ml_dtypes.float8_e4m3fn
SCALE_TYPES: dict[str, Any] = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3": E4M3,
}


def floats(words: Words) -> Floats:
    """BF16 words as float32."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def spread(scales: Floats, rows: int, width: int, block: tuple[int, int]) -> Floats:
    """Scales of blocks over the whole matrix, edge blocks cut."""
    return scales.repeat(block[0], axis=-2)[..., :rows, :].repeat(block[1], axis=-1)[..., :width]


def random_fp8(
    rng: np.random.Generator, shape: tuple[int, ...], granularity: Granularity, scale_type: str, block: tuple[int, int]
) -> tuple[Any, Any, Floats]:
    """Random finite codes, scales of the fitting shape, and their float32 products."""
    *lead, rows, width = shape
    codes = rng.integers(0, 256, shape, np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x38
    scale_shape: tuple[int, ...] = {
        "tensor": (), "row": (*lead, rows, 1), "block": (*lead, -(-rows // block[0]), -(-width // block[1])),
    }[granularity]  # fmt: skip
    scales = np.exp(rng.uniform(-9, 1, scale_shape)).astype(np.float32).astype(SCALE_TYPES[scale_type])
    blocks = {"tensor": (rows, width), "row": (1, width), "block": block}[granularity]
    spreaded = spread(scales.astype(np.float32).reshape(scale_shape or (1, 1)), rows, width, blocks)
    coded = codes.view(E4M3)
    return coded, scales, coded.astype(np.float32) * spreaded


def to_fp8(
    checkpoint: TinyCheckpoint,
    names: Iterable[str],
    rng: np.random.Generator,
    granularity: Granularity = "block",
    scale_type: str = "F32",
    block: tuple[int, int] = (16, 24),
    part: str = "weight_scale_inv",
) -> dict[str, Floats]:
    """Replace tensors ``names`` by random FP8 codes and scales; what they mean, by name. Saves nothing.

    Scales are called ``part``, or ``…_scale_inv`` beside an expert bank.
    """
    values = {}
    for name in names:
        coded, scales, values[name] = random_fp8(rng, checkpoint.tensors[name].shape, granularity, scale_type, block)
        checkpoint.tensors[name] = coded
        bank = not name.endswith(".weight")
        checkpoint.tensors[f"{name}_scale_inv" if bank else f"{name.removesuffix('weight')}{part}"] = scales
    checkpoint.config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    return values


def meaning(checkpoint: TinyCheckpoint, quantized: Mapping[str, Floats]) -> dict[str, Floats]:
    """float32 values of every weight of ``checkpoint``, those that ``to_fp8`` replaced included."""
    plain = {name: floats(words) for name, words in checkpoint.tensors.items() if words.dtype == np.uint16}
    return plain | dict(quantized)
