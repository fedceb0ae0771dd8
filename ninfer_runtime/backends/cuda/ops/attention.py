"""What both attention operators share: the geometry they are specialised for, and the rotary table."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_format.errors import UnsupportedError
from ninfer_runtime.backends.cuda.ops.kv_cache import HEAD_DIM, KvFormat
from ninfer_runtime.models.spec import ModelSpec

MAX_RATIO = 8

Defines = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """Compile-time constants of the attention kernels; every head has 256 dims.

    ratio     query heads per KV head, 1..8: query head j reads KV head j // ratio
    rotation  quantized keys, values and queries are times the Walsh-Hadamard matrix; never with bf16
    """

    n_heads: int
    n_kv_heads: int
    rotary_dim: int
    norm_eps: float
    format: KvFormat
    rotation: bool = False

    def __post_init__(self) -> None:
        heads, kv_heads = self.n_heads, self.n_kv_heads
        if kv_heads < 1 or heads % kv_heads or heads // kv_heads > MAX_RATIO:
            raise UnsupportedError(
                f"{heads} query heads over {kv_heads} KV heads: the cuda backend needs 1 to {MAX_RATIO} query heads "
                "per KV head; use --backend reference"
            )
        if not 0 < self.rotary_dim <= HEAD_DIM or self.rotary_dim % 2:
            raise UnsupportedError(f"rotary dim {self.rotary_dim}, expected an even number up to {HEAD_DIM}")

    @property
    def ratio(self) -> int:
        """Query heads per KV head."""
        return self.n_heads // self.n_kv_heads

    @property
    def projection_rows(self) -> int:
        """Rows of query_key and of gate_value: query (gate) heads, then key (value) heads."""
        return (self.n_heads + self.n_kv_heads) * HEAD_DIM

    @property
    def defines(self) -> Defines:
        """As the kernels take them."""
        return (
            ("N_HEADS", self.n_heads),
            ("N_KV_HEADS", self.n_kv_heads),
            ("ROTARY_DIM", self.rotary_dim),
            ("KV_INT8", int(self.format == "int8")),
            ("KV_FP6", int(self.format == "fp6")),
        )


def attention_geometry(spec: ModelSpec, format: KvFormat, *, rotation: bool = False) -> AttentionGeometry:
    """Geometry of a model. UnsupportedError for head sizes and ratios that the kernels do not have."""
    text = spec.text
    if text.head_dim != HEAD_DIM:
        raise UnsupportedError(
            f"attention heads of {text.head_dim} dims: the cuda backend has {HEAD_DIM} only; use --backend reference"
        )
    turns = rotation and format != "bf16"
    return AttentionGeometry(text.n_heads, text.n_kv_heads, spec.rotary_dim, spec.norm_eps, format, turns)


def rope_table(spec: ModelSpec) -> NDArray[Any]:
    """uint8 [4 · rotary_dim] to keep on the device: per pair its float32 frequency, then per pair its int32 axis.

    Frequencies as in ``backends/reference/rope.py``: float32 throughout, ``1 / theta^(2i / rotary_dim)``.
    """
    exponents = np.arange(0, spec.rotary_dim, 2, dtype=np.float32) / np.float32(spec.rotary_dim)
    frequencies = np.float32(1.0) / np.power(np.float32(spec.rope_theta), exponents, dtype=np.float32)
    axes = np.asarray(spec.rope_axes, np.int32)
    return np.concatenate([frequencies.view(np.uint8), axes.view(np.uint8)])
