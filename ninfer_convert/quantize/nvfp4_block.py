"""The inner loop of the NVFP4 encoder: some rows on one device, in the subset of Python that TorchScript accepts.

Blocks lie across the first dimension: lane i of all blocks is one contiguous row of [16, blocks], so that whatever
belongs to a block spreads over its lanes by plain broadcasting, and sums over lanes are additions of rows in a fixed
order. See ``ninfer_convert/quantize/block.py`` for why the loop is scripted on a CPU and plain on CUDA.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ninfer_convert.quantize.scripted import scripted


class Scratch(NamedTuple):
    """Buffers for one step, with the integer views of their words that a script cannot make."""

    z: Tensor
    """float32 [lanes]: magnitudes times the divisor."""
    z_words: Tensor
    y: Tensor
    """float32 [lanes]: magnitudes in steps of the scale, then rounded, then their errors."""
    y_words: Tensor
    m: Tensor
    """float32 [lanes]: octaves."""
    m_words: Tensor
    e: Tensor
    """float32 [lanes / 16]: errors of blocks, or largest magnitudes over 6."""
    e_words: Tensor
    nibbles: Tensor
    """uint8 [lanes]."""
    signs: Tensor
    others: Tensor


SCRATCH_BYTES_PER_LANE = 16
"""15.25, rounded up. Nothing else of the size of a step is allocated: fresh pages cost more than the arithmetic."""


def make_scratch(lanes: int, device: torch.device) -> Scratch:
    """Buffers for steps of up to ``lanes`` lanes, a multiple of 16."""
    z, y, m, e = (torch.zeros(n, dtype=torch.float32, device=device) for n in (lanes, lanes, lanes, lanes // 16))
    nibbles, signs, others = (torch.zeros(lanes, dtype=torch.uint8, device=device) for _ in range(3))
    int32 = torch.int32
    return Scratch(z, z.view(int32), y, y.view(int32), m, m.view(int32), e, e.view(int32), nibbles, signs, others)


def start_words(amax: Tensor, divisor: float, six: Tensor, e: Tensor, e_words: Tensor) -> Tensor:
    """Scale words of method ``max``, int32 [blocks], as ``nvfp4_encode.scale_words``; changes ``e``.

    ``six`` is a tensor on the device, so that the division is one.
    """
    torch.div(amax, six, out=e)
    e.mul_(divisor)
    subnormal = torch.round(e * 512.0).clamp_max_(8.0).to(torch.int32)
    odd = torch.bitwise_right_shift(e_words, 20).bitwise_and_(1)
    normal = odd.add_(e_words).add_(0x7FFFF).bitwise_right_shift_(20).sub_(960)
    return torch.maximum(normal, subnormal).clamp_(1, 126)


def round_e2m1(y: Tensor, y_words: Tensor, m: Tensor, m_words: Tensor) -> None:
    """``y`` ≥ 0 → E2M1 values, nearest with ties to even, still biased by 6291457 m; ``m`` ← their octaves 1, 2, 4.

    6291457 = 1.5 * 2^22 + 1: the addition rounds y to multiples of m / 2 and leaves, in the low byte of the float32
    word, that multiple plus 2. All products with m are exact, so it does not matter whether they are fused.
    """
    y.clamp_max_(6.0)
    torch.bitwise_and(y_words, 0x7F800000, out=m_words)
    m.clamp_min_(1.0)
    y.add_(m, alpha=6291457.0)


def block_errors(
    z: Tensor, s: Tensor, weights: Tensor, y: Tensor, y_words: Tensor, m: Tensor, m_words: Tensor, e: Tensor
) -> None:
    """``e`` [blocks] ← squared errors of ``z`` [16, blocks] under scales ``s``, as ``nvfp4_encode.block_errors``.

    ``weights`` [16, 1, blocks of a row], or empty.
    """
    torch.div(z, s, out=y)
    round_e2m1(y, y_words, m, m_words)
    y.sub_(m, alpha=6291457.0)
    torch.addcmul(z, y, s, value=-1.0, out=y)
    y.mul_(y)
    if weights.numel() > 0:
        y.view(16, -1, weights.size(2)).mul_(weights)
    y[:8].add_(y[8:])
    y[:4].add_(y[4:8])
    y[:2].add_(y[2:4])
    torch.add(y[0], y[1], out=e)


def search_scales(
    z: Tensor,
    amax: Tensor,
    start: Tensor,
    scales: Tensor,
    weights: Tensor,
    least_weights: Tensor,
    keep: float,
    limits: tuple[int, int, int],
    y: Tensor,
    y_words: Tensor,
    m: Tensor,
    m_words: Tensor,
    e: Tensor,
    e_words: Tensor,
) -> Tensor:
    """Words of least error near ``start`` int32 [blocks], as ``nvfp4_encode.search_scales``; ``e`` ← their errors.

    Errors ≥ 0 order like their words, so one integer holds error and scale word and its minimum breaks ties to the
    lower word; ``start`` takes part as word 0. Descending stops where clipping the largest magnitude alone costs
    every block more than its best error so far.
    """
    steps_down, steps_up, low_words = limits
    block_errors(z, torch.index_select(scales, 0, start), weights, y, y_words, m, m_words, e)
    start_errors = e.clone()
    e.mul_(keep)
    best, keys = e.clone(), e_words.to(torch.int64).bitwise_left_shift_(8)
    highest = (start + steps_up).clamp_(low_words, 126)
    first = max(steps_up, low_words - int(start.min()))
    for step in range(first, -steps_down - 1, -1):
        if step == 0:
            continue
        unclamped = start + step
        tried = torch.minimum(unclamped.clamp(1, 126), highest)
        s = torch.index_select(scales, 0, tried)
        if step < 0:
            clipped = torch.sub(amax, s, alpha=6.0).clamp_min_(0.0)
            clipped.mul_(clipped)
            if weights.numel() > 0:
                clipped.view(-1, weights.size(2)).mul_(least_weights)
            if bool((clipped > best).logical_or_(unclamped < 1).all()):
                break
        block_errors(z, s, weights, y, y_words, m, m_words, e)
        torch.minimum(best, e, out=best)
        torch.minimum(keys, e_words.to(torch.int64).bitwise_left_shift_(8).bitwise_or_(tried), out=keys)
    words = keys.bitwise_and(0xFF).to(torch.int32)
    stays = words == 0
    words.add_(start.mul(stays))
    e.copy_(torch.where(stays, start_errors, best))
    return words


def write_codes(
    z: Tensor,
    s: Tensor,
    words: Tensor,
    codes_out: Tensor,
    y: Tensor,
    y_words: Tensor,
    m: Tensor,
    m_words: Tensor,
    nibbles: Tensor,
    signs: Tensor,
    others: Tensor,
) -> None:
    """Packed codes of ``z`` [16, blocks] under ``s`` to ``codes_out`` uint8 [blocks, 8]; ``words`` of zero blocks ← 0.

    ``signs`` hold bit 3 of negative lanes and anything below it. Leaves the magnitudes of the codes' values in ``y``.
    """
    torch.div(z, s, out=y)
    round_e2m1(y, y_words, m, m_words)
    # Octaves 1, 2, 4 add 0, 2, 4 to the code; their words end, shifted, in 254, 0, 2, and 2 came with the rounding.
    nibbles.copy_(y_words)
    y.sub_(m, alpha=6291457.0)
    nibbles.add_(others.copy_(m_words.bitwise_right_shift_(22)))
    words.masked_fill_(torch.amax(nibbles, 0) == 0, 0)
    torch.add(nibbles, 7, out=others)
    nibbles.bitwise_or_(signs.bitwise_and_(others).bitwise_and_(8))
    codes_out.copy_(nibbles[1::2].bitwise_left_shift(4).bitwise_or_(nibbles[0::2]).t())


def exact_total(errors: Tensor, totals: Tensor) -> None:
    """Add ``errors`` [blocks] to ``totals`` int64 [2], whole and parts as in ``SquaredError``; changes ``errors``."""
    floor = errors.floor()
    totals[0] += floor.to(torch.int64).sum()
    totals[1] += errors.sub_(floor).mul_(16777216.0).to(torch.int64).sum()


def encode_rows(
    source: Tensor,
    rows_per_step: int,
    divisor: float,
    guard: float,
    search: bool,
    scales: Tensor,
    six: Tensor,
    weights: Tensor,
    least_weights: Tensor,
    keep: float,
    steps_down: int,
    steps_up: int,
    low_words: int,
    codes_out: Tensor,
    scales_out: Tensor,
    z_all: Tensor,
    z_words: Tensor,
    y_all: Tensor,
    y_words: Tensor,
    m_all: Tensor,
    m_words: Tensor,
    e_all: Tensor,
    e_words: Tensor,
    nibbles_all: Tensor,
    signs_all: Tensor,
    others_all: Tensor,
) -> tuple[Tensor, Tensor]:
    """Encode ``source`` [n, K] (BF16 or float32, finite) with ``divisor``, ``rows_per_step`` rows at a time.

    ``codes_out`` uint8 [n, K/2] and ``scales_out`` uint8 [n, K/16] in natural order; both empty to only measure.
    ``guard`` > 0 also measures method ``max`` under that divisor. Returns int64 [4]: whole and parts of the error, if
    ``search``, and of the error of ``max``; and float64 [3]: largest error, sum of squared errors, sum of squares, in
    units of weight * divisor, unless only measuring.
    """
    n_rows, blocks = source.size(0), source.size(1) // 16
    totals = torch.zeros(4, dtype=torch.int64, device=source.device)
    figures = torch.zeros(3, dtype=torch.float64, device=source.device)
    row = 0
    while row < n_rows:
        end = min(n_rows, row + rows_per_step)
        n = (end - row) * blocks
        lanes = n * 16
        z, zw = z_all[:lanes].view(16, n), z_words[:lanes].view(16, n)
        y, yw = y_all[:lanes].view(16, n), y_words[:lanes].view(16, n)
        m, mw = m_all[:lanes].view(16, n), m_words[:lanes].view(16, n)
        e, ew = e_all[:n], e_words[:n]
        lying = source[row:end].reshape(n, 16).t()
        if guard > 0.0:
            z.copy_(lying).abs_()
            plain = torch.index_select(scales, 0, start_words(torch.amax(z, 0), guard, six, e, ew))
            z.mul_(guard)
            block_errors(z, plain, weights, y, yw, m, mw, e)
            exact_total(e, totals[2:])
        z.copy_(lying)
        nibbles, signs = nibbles_all[:lanes].view(16, n), signs_all[:lanes].view(16, n)
        others = others_all[:lanes].view(16, n)
        if codes_out.numel() > 0:
            torch.bitwise_right_shift(zw, 28, out=mw)
            signs.copy_(mw)
        amax = torch.amax(z.abs_(), 0)
        words = start_words(amax, divisor, six, e, ew)
        z.mul_(divisor)
        if search:
            amax.mul_(divisor)
            limits = steps_down, steps_up, low_words
            words = search_scales(z, amax, words, scales, weights, least_weights, keep, limits, y, yw, m, mw, e, ew)
            exact_total(e, totals[:2])
        if codes_out.numel() > 0:
            s = torch.index_select(scales, 0, words)
            write_codes(z, s, words, codes_out[row:end].view(n, 8), y, yw, m, mw, nibbles, signs, others)
            scales_out[row:end].copy_(words.view(end - row, blocks))
            torch.addcmul(z, y, s, value=-1.0, out=y)
            flat = y.view(-1)
            figures[1] += torch.dot(flat, flat)
            figures[2] += torch.dot(z.view(-1), z.view(-1))
            figures[0] = torch.maximum(figures[0], torch.amax(torch.amax(y.abs_(), 0), 0))
        row = end
    return totals, figures


def scripted_rows() -> Callable[..., Any]:
    """``encode_rows`` under TorchScript, or as it is where that cannot be had."""
    return scripted(encode_rows)
