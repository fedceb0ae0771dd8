"""How far drawn numbers may lie from expected ones by chance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def chance_at_most(observed: NDArray[Any], expected: NDArray[np.float64]) -> float:
    """An upper bound of the chance that draws are as far from their distribution as these are.

    ``observed`` how often every cell was drawn, ``expected`` the mean number, of one shape; expected ones add up to the
    number of draws. 0.0 where a cell was drawn that expects none.

    Of n draws from k cells, n · KL(observed ‖ expected) is g > k - 1 or more with a chance of at most
    e^-g (e g / (k - 1))^(k - 1) (Agrawal, "Finite-sample concentration of the multinomial in relative entropy", 2020).
    Unlike a chi-square's tail this is proven for cells that expect however little.
    """
    seen = observed > 0
    if (expected[seen] == 0).any():
        return 0.0
    g = float((observed[seen] * np.log(observed[seen] / expected[seen])).sum())
    degrees = int((expected > 0).sum()) - 1
    if g <= degrees or not degrees:
        return 1.0
    return math.exp(degrees - g + degrees * math.log(g / degrees))
