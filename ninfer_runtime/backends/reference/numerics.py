"""The rounding profile: values live in the program's dtype, arithmetic runs in float32, each result rounds once.

In float32 programs the rounding is the identity. Small per-token scalars (gates, decay, router weights) are taken in
float64 and rounded to float32: vector and scalar code paths of the CPU differ in the last bit there, and results
must not depend on how many tokens share a call. Specification: ``specs/models.md``.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ninfer_runtime.config import Dtype

TORCH_DTYPES: Mapping[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x) in float32."""
    x = x.float()
    return x * torch.sigmoid(x)


def exact_sigmoid(x: Tensor) -> Tensor:
    """sigmoid in float64, rounded to float32; for the few values per token whose tensors are narrow."""
    return torch.sigmoid(x.double()).float()
