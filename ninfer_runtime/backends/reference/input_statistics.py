"""What the inputs of the decoder's matrices look like: largest magnitude and mean square per channel, by site."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ninfer_format.activation_stats import SiteStats, site_of
from ninfer_format.errors import NonFiniteError


class InputStatistics:
    """An observer of ``ReferenceProgram.observing``; ``matrices`` are the stored matrices it may meet.

    Matrices of one site multiply the same rows, so only the first of them counts.
    """

    def __init__(self, matrices: Iterable[str], *, channels: bool) -> None:
        first: dict[str, str] = {}
        for name in matrices:
            if (site := site_of(name)) is not None:
                first.setdefault(site, name)
        self._site_of = {name: site for site, name in first.items()}
        self._channels = channels
        self._rows = dict.fromkeys(first, 0)
        self._amax: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}

    def __call__(self, matrix: str, x: Tensor) -> None:
        """Count the rows x [T, K], in float32 and float64, on their own device."""
        site = self._site_of.get(matrix)
        if site is None or x.shape[0] == 0:
            return
        self._rows[site] += x.shape[0]
        largest = x.abs().amax().float()
        self._amax[site] = torch.maximum(self._amax[site], largest) if site in self._amax else largest
        if self._channels:
            squares = x.double().square().sum(0)
            self._squares[site] = self._squares[site] + squares if site in self._squares else squares

    def results(self) -> dict[str, SiteStats]:
        """Every site in the order of its matrices. NonFiniteError names the first that met NaN or infinity."""
        return {site: self._result(site, n_rows) for site, n_rows in self._rows.items()}

    def _result(self, site: str, n_rows: int) -> SiteStats:
        if n_rows == 0:
            return SiteStats(0.0, 0)
        amax = self._amax[site].cpu()
        if not amax.isfinite():
            raise NonFiniteError(f"the inputs of {site!r} hold NaN or infinity; check the artifact, or try float32")
        squares = self._squares.get(site)
        mean = None if squares is None else (squares / n_rows).float().cpu().numpy()
        return SiteStats(float(amax), n_rows, mean)
