"""The inner loop of the group encoder: a block of rows on one device, written in the subset that TorchScript accepts.

A scripted function runs all its operations without Python's interpreter lock, so worker threads scale with the cores;
the same function runs as plain Python where scripting is gone or unsupported (Python 3.14) and on CUDA, where the
script's fuser must not be given the chance to contract a multiplication and an addition.
"""

import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Scratch(NamedTuple):
    """Buffers for one block, each with the views of its storage that the loop needs (a script cannot reinterpret)."""

    x: Tensor
    """float32 [lanes]: the values, later their errors."""
    n: Tensor
    """float32 [lanes]: magnitudes, then values in steps, then rounded codes."""
    n_words: Tensor
    amax: Tensor
    """float32 [groups]."""
    amax_words: Tensor
    codes: Tensor
    """uint8 [lanes]: codes in two's complement."""
    codes_16: Tensor
    codes_32: Tensor
    codes_64: Tensor
    fields_32: Tensor
    """uint8 [lanes] seen as int32, for high fields and shifted nibbles."""
    fields_64: Tensor


def make_scratch(lanes: int, device: torch.device) -> Scratch:
    """Buffers for blocks of up to ``lanes`` lanes, a multiple of 128."""
    x = torch.zeros(lanes, dtype=torch.float32, device=device)
    n, amax = torch.zeros_like(x), torch.zeros(lanes // 32, dtype=torch.float32, device=device)
    codes, fields = (torch.zeros(lanes, dtype=torch.uint8, device=device) for _ in range(2))
    int16, int32, int64 = torch.int16, torch.int32, torch.int64
    views = codes, codes.view(int16), codes.view(int32), codes.view(int64), fields.view(int32), fields.view(int64)
    return Scratch(x, n, n.view(int32), amax, amax.view(int32), *views)


def encode_block(
    source: Tensor,
    rows_per_step: int,
    scale_words: Tensor,
    inverses: Tensor,
    scales: Tensor,
    by_word: bool,
    first_refused: float,
    first_normal: float,
    group: int,
    bits: int,
    qmin: int,
    qmax: int,
    known_largest: float,
    base_out: Tensor,
    high_out: Tensor,
    scales_out: Tensor,
    x_all: Tensor,
    n_all: Tensor,
    n_words: Tensor,
    amax_all: Tensor,
    amax_words: Tensor,
    codes_8: Tensor,
    codes_16: Tensor,
    codes_32: Tensor,
    codes_64: Tensor,
    fields_32: Tensor,
    fields_64: Tensor,
) -> tuple[bool, float, float, float]:
    """Encode ``source`` [n, K] (BF16 or float32), ``rows_per_step`` rows at a time, into flat planes of those rows.

    ``scale_words`` int16, ``inverses`` and ``scales`` float32 are indexed by the BF16 word of a group's largest
    magnitude (``by_word``) or by the number of the group in ``source``. Returns whether all magnitudes were below
    ``first_refused`` (if not, output is incomplete), the larger of ``known_largest`` and the largest error, the sum of
    squared errors, the sum of squares.
    """
    n_rows, k = source.size(0), source.size(1)
    k_pad = (k + 127) // 128 * 128
    largest, squares, source_squares = known_largest, 0.0, 0.0
    row, lanes = 0, min(n_rows, rows_per_step) * k_pad
    x, n, amax = x_all[:lanes], n_all[:lanes], amax_all[: lanes // group]
    groups_x, groups_n = x.view(-1, group), n.view(-1, group)
    rows_x = x.view(-1, k_pad)[:, :k]
    while row < n_rows:
        end = min(n_rows, row + rows_per_step)
        first, last = row * k_pad, end * k_pad
        if last - first != lanes:  # views are made anew for a shorter last step only: making them costs as an operation
            lanes = last - first
            x, n, amax = x_all[:lanes], n_all[:lanes], amax_all[: lanes // group]
            groups_x, groups_n = x.view(-1, group), n.view(-1, group)
            rows_x = x.view(-1, k_pad)[:, :k]
        g0, g1 = first // group, last // group
        if k < k_pad:
            x.view(-1, k_pad)[:, k:].zero_()
        rows_x.copy_(source[row:end])
        torch.abs(x, out=n)
        torch.amax(groups_n, 1, out=amax)
        low, top = torch.aminmax(amax)
        largest_amax = float(top)
        if not largest_amax < first_refused:
            return False, largest, squares, source_squares
        row = end
        if largest_amax == 0.0:
            base_out[g0 * 32 : g1 * 32].zero_()
            high_out[first * (bits - 4) // 8 : last * (bits - 4) // 8].zero_()
            scales_out[g0:g1].zero_()
            continue
        if by_word:
            index = torch.bitwise_right_shift(amax_words[: g1 - g0], 16)
        else:
            index = torch.arange(g0, g1, dtype=torch.int32, device=source.device)
        torch.index_select(scale_words, 0, index, out=scales_out[g0:g1])
        inverse = torch.index_select(inverses, 0, index).view(-1, 1)
        scale = torch.index_select(scales, 0, index).view(-1, 1)
        source_squares += float(torch.dot(x, x))
        torch.mul(groups_x, inverse, out=groups_n)
        clamped = float(low) < first_normal
        if clamped:
            n.clamp_(qmin, qmax)
        # Adding 1.5 * 2^23 rounds |n| < 2^22 to an integer, ties to even, and leaves it in the low mantissa bits: the
        # low byte of the float32 word is then the code in two's complement. One pass rounds and converts.
        n.add_(12582912.0)
        if bits == 8:
            base_out[first:last].copy_(n_words[:lanes])
        else:
            codes_8[:lanes].copy_(n_words[:lanes])
            eights, shifted = codes_64[: lanes // 8], fields_64[: lanes // 8]
            # One multiplication moves the high bits of all lanes of a word side by side into its top byte.
            if bits == 5:
                torch.bitwise_right_shift(eights, 4, out=shifted)
                shifted.bitwise_and_(0x0101010101010101).mul_(0x0102040810204080).bitwise_right_shift_(56)
                high_out[first // 8 : last // 8].copy_(shifted)
            elif bits == 6:
                fours = fields_32[: lanes // 4]
                torch.bitwise_right_shift(codes_32[: lanes // 4], 4, out=fours)
                fours.bitwise_and_(0x03030303).mul_(0x01041040).bitwise_right_shift_(24)
                high_out[first // 4 : last // 4].copy_(fours)
            eights.bitwise_and_(0x0F0F0F0F0F0F0F0F)
            torch.bitwise_right_shift(eights, 4, out=shifted)
            eights.bitwise_or_(shifted)
            base_out[first // 2 : last // 2].copy_(codes_16[: lanes // 2])
        n.sub_(12582912.0)
        torch.addcmul(groups_x, groups_n, scale, value=-1.0, out=groups_x)
        # While scales are normal and nothing is clamped, |x - s*q| <= s/2 and s <= amax / qmax, but for roundings.
        if clamped or 0.5005 * largest_amax / qmax > largest:
            least, most = torch.aminmax(x)
            largest = max(largest, max(float(most), -float(least)))
        squares += float(torch.dot(x, x))
    return True, largest, squares, source_squares


_FIRST_USE = threading.Lock()


def scripted_block() -> Callable[..., Any]:
    """``encode_block`` under TorchScript, or as it is where that cannot be had. Any thread may ask first."""
    with _FIRST_USE:
        return _compiled()


@cache
def _compiled() -> Callable[..., Any]:
    # MKL loads itself on first use and has been seen to end the process when two threads do that at once.
    torch.dot(torch.ones(2), torch.ones(2))
    script = getattr(torch.jit, "script", None)
    if script is None or sys.version_info >= (3, 14):
        return encode_block
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            compiled: Callable[..., Any] = script(encode_block)
        except (RuntimeError, NotImplementedError):
            return encode_block
    return compiled
