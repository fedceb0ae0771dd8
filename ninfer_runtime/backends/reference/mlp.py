"""SwiGLU: down(silu(gate x) · (up x)), the product rounded once."""

from torch import Tensor

from ninfer_runtime.models.qwen3_5 import MlpWeights

from .linear import linear, project
from .numerics import silu
from .weights import Weights


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up in float32, rounded to the operands' dtype."""
    return (silu(gate) * up.float()).to(gate.dtype)


def mlp(x: Tensor, weights: Weights, w: MlpWeights) -> Tensor:
    """[T, hidden] → [T, hidden]."""
    gate, up = project(x, weights, (w.gate, w.up))
    return linear(swiglu(gate, up), weights, w.down)
