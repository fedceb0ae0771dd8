"""Random NVFP4 matrices: every code, every legal scale, a divisor."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ninfer_format.numeric.nvfp4 import BLOCK, E2M1, E4M3FN, MAX_SCALE
from ninfer_runtime.backends.cuda.packing import PackedMatrix

Random = tuple[PackedMatrix, npt.NDArray[np.integer], npt.NDArray[np.uint8], npt.NDArray[np.float64]]


def random_nvfp4(rng: np.random.Generator, matrix: PackedMatrix) -> Random:
    """``matrix`` with a divisor that makes sums about 1 for inputs of about 1, its codes, scales, and values [N, K]."""
    n, k = matrix.n_rows, matrix.k
    codes = rng.integers(0, 16, (n, k))
    scales = rng.integers(0, MAX_SCALE + 1, (n, -(-k // BLOCK)), np.uint8)
    divisor = float(np.float32(rng.uniform(200, 400) * np.sqrt(k)))
    products = E2M1[codes] * np.repeat(E4M3FN[scales].astype(np.float64), BLOCK, axis=1)[:, :k]
    return replace(matrix, divisor=divisor), codes, scales, products / divisor
