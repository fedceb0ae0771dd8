"""How values become codes: the method, and what is known about the activations that the matrices multiply."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ninfer_convert.problems import Problem
from ninfer_format import Inventory, NinferError, TensorEntry
from ninfer_format.activation_stats import ActivationStats, SiteStats, read_activation_stats, site_of
from ninfer_format.numeric.least_squares import Floats
from ninfer_format.numeric.nvfp4_divisor import max_divisor

if TYPE_CHECKING:
    from ninfer_format.numeric.nvfp4_encode import Method

METHODS = ("max", "mse", "canonical")
"""``canonical`` is what ``max`` is called where codes are grouped integers; they are one method."""


@dataclass(frozen=True, slots=True)
class Coding:
    """The method, and activation statistics with the digest of their file."""

    method: "Method" = "max"
    stats: ActivationStats | None = None
    stats_sha256: str | None = None

    def with_method(self, method: str) -> "Coding":
        """The same with another method."""
        return Coding("mse" if method == "mse" else "max", self.stats, self.stats_sha256)

    def importance(self, entry: TensorEntry) -> Floats | None:
        """Weights float32 [K] of the columns of ``entry``'s errors; None where all count alike."""
        site = self._site(entry)
        if self.method != "mse" or site is None or site.mean_square is None:
            return None
        return site.mean_square if site.mean_square.any() else None

    def input_divisor(self, name: str) -> np.float32 | None:
        """Activation divisor of the site ``name``: its largest magnitude becomes 6 * 448. None if that is not known."""
        site = self.stats.sites.get(name) if self.stats is not None else None
        return max_divisor(np.float32(site.amax)) if site is not None and site.amax > 0 else None

    def _site(self, entry: TensorEntry) -> SiteStats | None:
        name = site_of(entry.name) if self.stats is not None else None
        return self.stats.sites.get(name) if self.stats is not None and name is not None else None


def read_coding(method: str, stats: Path | None, problems: list[Problem]) -> Coding:
    """The coding that options ask for; statistics that cannot be read become a problem."""
    plain: Method = "mse" if method == "mse" else "max"
    if stats is None:
        return Coding(plain)
    try:
        read = read_activation_stats(stats)
        return Coding(plain, read, hashlib.sha256(stats.read_bytes()).hexdigest())
    except (NinferError, OSError) as error:
        problems.append(Problem("bad-activation-stats", str(error), "--activation-stats", "give another file"))
        return Coding(plain)


def stats_problems(coding: Coding, inventory: Inventory) -> Iterator[Problem]:
    """Statistics that belong to another model: no site in common, or other widths."""
    if coding.stats is None:
        return
    advice = "calibrate an artifact of this model"
    known = {site_of(entry.name) for entry in inventory.tensors} - {None}
    if not known & coding.stats.sites.keys():
        message = f"the activation statistics are of {coding.stats.model} and have no site of this model"
        yield Problem("bad-activation-stats", message, "--activation-stats", advice)
    for entry in inventory.tensors:
        site = coding.stats.sites.get(site_of(entry.name) or "")
        if site is not None and site.mean_square is not None and site.mean_square.size != entry.shape[-1]:
            message = f"{entry.name} has {entry.shape[-1]} columns, its statistics {site.mean_square.size}"
            yield Problem("bad-activation-stats", message, "--activation-stats", advice)
            return
