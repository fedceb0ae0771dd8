"""Where the rows of a stored object come from."""

from dataclasses import dataclass
from typing import Literal

Transform = Literal["rows", "widen", "conv_transpose", "packed", "input_divisor", "draft_rows", "draft_ids", "resource"]
Origin = Literal["base", "packed", "dflash"]


@dataclass(frozen=True, slots=True)
class RowRun:
    """``count`` consecutive rows of one source tensor from row ``begin``, in rows of the object's ``row_width``."""

    tensor: str
    begin: int
    count: int


@dataclass(frozen=True, slots=True)
class ObjectSource:
    """How one stored object is made.

    Every source tensor is viewed as a C-order matrix of rows of ``row_width`` elements (the object's last dimension,
    except for ``conv_transpose``), whatever its rank; row ``i`` of the fused matrix is row ``i`` of the concatenated
    runs. Then, by ``transform``:

    - ``rows``: stored (quantized or BF16) as it is; rank-1 objects are one row;
    - ``packed``: like ``rows``, but the stored words of NVFP4 tensors are taken over instead of values;
    - ``input_divisor``: the activation divisor of the NVFP4 matrix that has these runs; ``row_width`` is 0;
    - ``widen``: BF16 words widened to FP32;
    - ``conv_transpose``: rows of taps, stored[tap][channel] = row[channel][tap];
    - ``draft_rows``: the rows whose numbers the plan's ``draft_ids`` gives, in that order;
    - ``draft_ids``: the plan's ``draft_ids`` themselves; ``resource``: the plan's ``resources[name]``; no runs.
    """

    name: str
    transform: Transform
    runs: tuple[RowRun, ...] = ()
    row_width: int = 0
    origin: Origin = "base"
    """Which checkpoint holds the tensors: the model's own folder, the prepacked one beside it, or the companion."""

    @property
    def n_rows(self) -> int:
        """Rows of the fused matrix before the transform."""
        return sum(run.count for run in self.runs)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Source tensor names in order of first use."""
        return tuple(dict.fromkeys(run.tensor for run in self.runs))
