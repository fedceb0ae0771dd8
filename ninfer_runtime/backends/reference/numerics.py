"""The rounding profile: values live in the program's dtype, arithmetic runs in float32, each result rounds once.

In float32 programs the rounding is the identity. Small per-token scalars (gates, decay, router weights) are taken in
float64 and rounded to float32: vector and scalar code paths of the CPU differ in the last bit there, and results
must not depend on how many tokens share a call. Specification: ``specs/models.md``.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ninfer_runtime.config import Dtype

TORCH_DTYPES: Mapping[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


ROW_TILE = 16
"""Rows of every reduction and matrix product. Fewer waste less on one row, more are faster on prompts: on two cores
[R, 5120] × [5120, 17408] takes 76, 98 and 122 ms for R = 8, 16 and 32; a small model decodes 160, 180 and 144 tok/s."""


def by_row_tiles(function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """``function`` on ROW_TILE rows of every operand at a time, the last tile filled up with zeros.

    BLAS and reduction kernels choose their summation order by the shape of a call; here every call has the same shape,
    so a row's result depends neither on its neighbours nor on how many of them there are.
    """
    n_rows = operands[0].shape[0]
    padding = -n_rows % ROW_TILE
    if padding:
        operands = tuple(torch.cat([x, x.new_zeros((padding, *x.shape[1:]))]) for x in operands)
    tiles = [function(*(x[i : i + ROW_TILE] for x in operands)) for i in range(0, n_rows, ROW_TILE)]
    return torch.cat(tiles)[:n_rows] if len(tiles) > 1 else tiles[0][:n_rows]


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x) in float32."""
    x = x.float()
    return x * torch.sigmoid(x)


def exact_sigmoid(x: Tensor) -> Tensor:
    """sigmoid in float64, rounded to float32; for the few values per token whose tensors are narrow."""
    return torch.sigmoid(x.double()).float()
