"""Rows in front of matrices as prompts may have them: rounded to bfloat16, then to NVFP4 under a fixed divisor where
the matrix is NVFP4, or to signed bytes where it has integer codes.

Numpy oracles: ``ninfer_format/numeric/nvfp4_activations.py`` and ``int8_activations.py``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from ninfer_format.activation_stats import HEAD_SITE, site_of
from ninfer_format.directory import TensorEntry
from ninfer_format.formats import NUMERIC_FORMATS
from ninfer_format.geometry import up
from ninfer_format.numeric.int8_activations import GROUP, LARGEST
from ninfer_format.numeric.nvfp4 import BLOCK, E2M1, E4M3FN
from ninfer_format.reader import Artifact
from ninfer_format.roles import role_of
from ninfer_runtime.backends.base import MemoryPlan

Kind = Literal["nvfp4", "int8"]

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


def as_bytes(x: Tensor) -> Tensor:
    """code · scale of rows [T, K], K a multiple of 64; float32 [T, K]."""
    groups = x.bfloat16().float().reshape(x.shape[0], -1, GROUP)
    amax = groups.abs().amax(-1, keepdim=True)
    codes = torch.where(amax == 0, 0.0, (groups * (LARGEST / amax)).round())
    return (codes * (amax / LARGEST)).reshape(x.shape)


def kinds_of(plan: MemoryPlan, n_tokens: int) -> frozenset[Kind]:
    """Which matrices a prompt chunk of ``n_tokens`` multiplies by quantized rows: as asked for, beyond a round's
    columns."""
    if n_tokens <= up(plan.limits.max_rows * plan.limits.max_columns, _COLUMN_TILE):
        return frozenset()
    wanted: list[Kind] = ["nvfp4"] if plan.options.nvfp4_activations == "a4" else []
    return frozenset([*wanted, "int8"] if plan.options.prefill_activations == "int8" else wanted)


class ActivationFormats:
    """Which matrices multiply quantized rows, and whether they do so at the moment."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._divisors: dict[str, float | None] = {}
        self._active: frozenset[Kind] = frozenset()

    @contextmanager
    def active(self, kinds: frozenset[Kind]) -> Iterator[None]:
        """Within the block rows in front of matrices of these kinds are quantized."""
        self._active = kinds
        try:
            yield
        finally:
            self._active = frozenset()

    def rows(self, x: Tensor, matrix: str) -> Tensor:
        """What the stored ``matrix`` multiplies in the place of ``x``."""
        divisor = self._divisor(matrix) if "nvfp4" in self._active else None
        if divisor is not None:
            return quantized(x, divisor)
        return as_bytes(x) if "int8" in self._active and has_integer_codes(self._artifact, matrix) else x

    def _divisor(self, matrix: str) -> float | None:
        if matrix not in self._divisors:
            self._divisors[matrix] = input_divisor(self._artifact, matrix)
        return self._divisors[matrix]


def input_divisor(artifact: Artifact, matrix: str) -> float | None:
    """Divisor of the rows that an NVFP4 matrix multiplies; None for other matrices, and where the artifact has none.

    Matrices of experts multiply rows as they are: an expert has few of them, its weights are what takes the time.
    """
    objects, site = artifact.objects, _site(matrix)
    entry = objects[matrix]
    if not isinstance(entry, TensorEntry) or entry.format != "NVFP4" or site is None or site not in objects.names():
        return None
    return float(artifact.tensor(site))


def has_integer_codes(artifact: Artifact, matrix: str) -> bool:
    """Whether the matrix is one of the decoder's, of grouped integer codes, and no expert's."""
    entry = artifact.objects[matrix]
    grouped = isinstance(entry, TensorEntry) and NUMERIC_FORMATS[entry.format].kind == "grouped"
    return grouped and _site(matrix) not in (None, HEAD_SITE)


def _site(matrix: str) -> str | None:
    return None if role_of(matrix)[0].startswith(_EXPERTS) else site_of(matrix)
