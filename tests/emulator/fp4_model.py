"""What ``mma.sync.m16n8k64 … kind::mxf4nvf4.block_scale.scale_vec::4X`` (E2M1, UE4M3 scales) computes, in numpy.

Written from the PTX ISA ("Matrix Fragments for mma.m16n8k64", "Block Scaling for mma.sync"), without the kernels' or
the emulator's code: elements are placed one by one by the formulas of the text.

    A  register r, nibble i:  row = group + 8 (r % 2),  k = 8 · quad + i + 32 (r // 2)        group = lane // 4
    B  register r, nibble i:  column = group,           k = 8 · quad + i + 32 r                 quad = lane % 4
    C  register i:            row = group + 8 (i // 2), column = 2 · quad + i % 2
    scale of A's row m:       lane 4 (m % 8) + 2 · pair_a + m // 8, byte k // 16
    scale of B's column n:    lane 4 n + lane_b, byte k // 16

The four blocks' sums are exact in float32, 20 bits each; their sum with C is taken exactly here and rounded once. In
which order hardware adds them is not written down, so a comparison is bit for bit where every order is exact.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_format.numeric.nvfp4 import E2M1, E4M3FN

Words = NDArray[np.uint32]
LANES = 32


def a_place(lane: int, register: int, nibble: int) -> tuple[int, int]:
    """Row and k of an element of A."""
    return lane // 4 + 8 * (register % 2), 8 * (lane % 4) + nibble + 32 * (register // 2)


def b_place(lane: int, register: int, nibble: int) -> tuple[int, int]:
    """k and column of an element of B."""
    return 8 * (lane % 4) + nibble + 32 * register, lane // 4


def c_place(lane: int, register: int) -> tuple[int, int]:
    """Row and column of an element of C or D."""
    return lane // 4 + 8 * (register // 2), 2 * (lane % 4) + register % 2


def product(a: Words, b: Words, c: NDArray[np.float32], scales: Words, pair_a: int, lane_b: int) -> NDArray[np.float32]:
    """D of a warp, float32 [32, 4], from registers a [32, 4], b [32, 2], c [32, 4] and scales [32, 2] of A and of B."""
    left, right = np.zeros((16, 64)), np.zeros((64, 8))
    for lane in range(LANES):
        for nibble in range(8):
            for register in range(4):
                left[a_place(lane, register, nibble)] = E2M1[int(a[lane, register]) >> 4 * nibble & 15]
            for register in range(2):
                right[b_place(lane, register, nibble)] = E2M1[int(b[lane, register]) >> 4 * nibble & 15]
    of_a: NDArray[Any] = np.zeros((16, 4))
    of_b: NDArray[Any] = np.zeros((4, 8))
    for block in range(4):
        for m in range(16):
            of_a[m, block] = E4M3FN[int(scales[4 * (m % 8) + 2 * pair_a + m // 8, 0]) >> 8 * block & 255]
        for n in range(8):
            of_b[block, n] = E4M3FN[int(scales[4 * n + lane_b, 1]) >> 8 * block & 255]
    blocks = np.einsum("mbk,bkn->bmn", left.reshape(16, 4, 16), right.reshape(4, 16, 8))
    sums = (blocks * of_a.T[:, :, None] * of_b[:, None, :]).sum(0)
    out = np.zeros((LANES, 4), np.float32)
    for lane in range(LANES):
        for register in range(4):
            out[lane, register] = np.float32(sums[c_place(lane, register)] + float(c[lane, register]))
    return out
