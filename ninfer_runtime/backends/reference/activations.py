"""Rows in front of NVFP4 matrices as prompts may have them: rounded to bfloat16, then to NVFP4 under a fixed divisor.

Numpy oracle: ``ninfer_format/numeric/nvfp4_activations.py``.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ninfer_format.activation_stats import site_of
from ninfer_format.directory import TensorEntry
from ninfer_format.geometry import up
from ninfer_format.numeric.nvfp4 import BLOCK, E2M1, E4M3FN
from ninfer_format.reader import Artifact
from ninfer_format.roles import role_of
from ninfer_runtime.backends.base import MemoryPlan

_LARGEST_SCALE = 448.0
_COLUMN_TILE = 8
_EXPERTS = "text/layers/*/moe/"
_MIDPOINTS = ((0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True))
"""Between E2M1 words w and w + 1, and whether it belongs to w."""


def quantized(x: Tensor, divisor: float) -> Tensor:
    """code · scale / divisor of rows [T, K], K a multiple of 16; float32 [T, K]."""
    d = torch.tensor(divisor, dtype=torch.float32, device=x.device)
    blocks = x.bfloat16().float().reshape(x.shape[0], -1, BLOCK)
    scale = (blocks.abs().amax(-1, keepdim=True) * d / 6).clamp(max=_LARGEST_SCALE)
    words = scale.to(torch.float8_e4m3fn).view(torch.uint8).long()
    scale = torch.from_numpy(E4M3FN.copy()).to(x.device)[words]
    scaled = blocks * d
    magnitude = scaled.abs() / scale
    codes = torch.zeros_like(words.expand(blocks.shape))
    for middle, below in _MIDPOINTS:
        codes = codes + ((magnitude > middle) if below else (magnitude >= middle))
    values = torch.copysign(torch.from_numpy(E2M1[:8].copy()).to(x.device)[codes], scaled) * scale
    return torch.where(scale == 0, 0.0, values).reshape(x.shape) / d


def prompts_quantize(plan: MemoryPlan, n_tokens: int) -> bool:
    """Whether a prompt chunk of ``n_tokens`` multiplies quantized rows: when asked for, beyond a round's columns."""
    columns_of_round = up(plan.limits.max_rows * plan.limits.max_columns, _COLUMN_TILE)
    return plan.options.nvfp4_activations == "a4" and n_tokens > columns_of_round


class ActivationFormats:
    """Which matrices multiply quantized rows, and whether they do so at the moment."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._divisors: dict[str, float | None] = {}
        self._active = False

    @contextmanager
    def active(self, active: bool) -> Iterator[None]:
        """Within the block rows are quantized, if ``active``."""
        self._active = active
        try:
            yield
        finally:
            self._active = False

    def rows(self, x: Tensor, matrix: str) -> Tensor:
        """What the stored ``matrix`` multiplies in the place of ``x``."""
        divisor = self._divisor(matrix) if self._active else None
        return x if divisor is None else quantized(x, divisor)

    def _divisor(self, matrix: str) -> float | None:
        if matrix not in self._divisors:
            self._divisors[matrix] = input_divisor(self._artifact, matrix)
        return self._divisors[matrix]


def input_divisor(artifact: Artifact, matrix: str) -> float | None:
    """Divisor of the rows that an NVFP4 matrix multiplies; None for other matrices, and where the artifact has none.

    Matrices of experts multiply rows as they are: an expert has few of them, its weights are what takes the time.
    """
    objects, site = artifact.objects, None if role_of(matrix)[0].startswith(_EXPERTS) else site_of(matrix)
    entry = objects[matrix]
    if not isinstance(entry, TensorEntry) or entry.format != "NVFP4" or site is None or site not in objects.names():
        return None
    return float(artifact.tensor(site))
