"""The search for group scales of least squared error: some rows on one device, in TorchScript's subset of Python.

Groups lie across the first dimension, as blocks do in ``nvfp4_block.py``, which says why.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ninfer_convert.quantize.scripted import scripted


class Scratch(NamedTuple):
    """Buffers for one step, with the views of their words that a script cannot make."""

    x: Tensor
    """float32 [lanes]: rows with their padding."""
    z: Tensor
    """float32 [lanes]: values over the power of two of their group's largest magnitude, lanes first."""
    y: Tensor
    """float32 [lanes]: codes, then errors."""
    a: Tensor
    """float32 [groups]: largest magnitudes."""
    a_words: Tensor
    up: Tensor
    """float32 [groups]: powers of two."""
    up_words: Tensor
    down: Tensor
    down_words: Tensor
    e: Tensor
    """float32 [groups]: errors."""
    e_words: Tensor
    half: Tensor
    """float16 [groups]: scales."""
    half_words: Tensor


def make_scratch(lanes: int, device: torch.device) -> Scratch:
    """Buffers for steps of up to ``lanes`` lanes, a multiple of 128."""
    x, z, y = (torch.zeros(lanes, dtype=torch.float32, device=device) for _ in range(3))
    a, up, down, e = (torch.zeros(lanes // 32, dtype=torch.float32, device=device) for _ in range(4))
    half = torch.zeros(lanes // 32, dtype=torch.float16, device=device)
    int32 = torch.int32
    pairs = a, a.view(int32), up, up.view(int32), down, down.view(int32), e, e.view(int32)
    return Scratch(x, z, y, *pairs, half, half.view(torch.int16))


def scratch_bytes(lanes: int) -> int:
    """Bytes of the buffers that ``make_scratch`` allocates."""
    return lanes * 12 + lanes // 32 * 18


def group_errors(
    z: Tensor,
    half: Tensor,
    up: Tensor,
    down: Tensor,
    one: Tensor,
    qmin: int,
    qmax: int,
    weights: Tensor,
    y: Tensor,
    e: Tensor,
) -> None:
    """``e`` [groups] ← squared errors of ``z`` [G, groups] under scales ``half``, as ``grouped_mse.search_scales``.

    ``weights`` [G, 1, groups of a row], or empty. ``one`` is a tensor on the device, so that 1 / scale is a division.
    """
    scale = half.to(torch.float32)
    torch.mul(z, torch.div(one, scale).mul_(up), out=y)
    y.round_().clamp_(qmin, qmax)
    torch.addcmul(z, y, scale.mul_(down), value=-1.0, out=y)
    y.mul_(y)
    if weights.numel() > 0:
        y.view(y.size(0), -1, weights.size(2)).mul_(weights)
    n = y.size(0) // 2
    while n > 1:
        y[:n].add_(y[n : 2 * n])
        n = n // 2
    torch.add(y[0], y[1], out=e)


def try_scales(
    base: Tensor,
    factors: list[float],
    keys: Tensor,
    z: Tensor,
    half: Tensor,
    half_words: Tensor,
    up: Tensor,
    down: Tensor,
    one: Tensor,
    qmin: int,
    qmax: int,
    weights: Tensor,
    y: Tensor,
    e: Tensor,
    e_words: Tensor,
) -> None:
    """Lower ``keys`` int64 [groups] to the best of the scales ``base`` times ``factors``.

    Errors ≥ 0 order like their words, so one integer holds error and scale word and its minimum breaks ties to the
    lower word. The canonical scale takes part as word 0.
    """
    for factor in factors:
        torch.mul(base, factor, out=e)
        half.copy_(e)
        half_words.clamp_(1, 0x7BFF)
        group_errors(z, half, up, down, one, qmin, qmax, weights, y, e)
        torch.minimum(keys, e_words.to(torch.int64).bitwise_left_shift_(16).bitwise_or_(half_words), out=keys)


def search_rows(
    source: Tensor,
    rows_per_step: int,
    first_refused: float,
    group: int,
    qmin: int,
    qmax: int,
    coarse: list[float],
    fine: list[float],
    keep: float,
    one: Tensor,
    weights: Tensor,
    words_out: Tensor,
    x_all: Tensor,
    z_all: Tensor,
    y_all: Tensor,
    a_all: Tensor,
    a_words: Tensor,
    up_all: Tensor,
    up_words: Tensor,
    down_all: Tensor,
    down_words: Tensor,
    e_all: Tensor,
    e_words: Tensor,
    half_all: Tensor,
    half_words: Tensor,
) -> tuple[bool, Tensor]:
    """Scale words of ``source`` [n, K] (BF16 or float32) to flat ``words_out`` int32, padding groups included.

    Returns whether all magnitudes were below ``first_refused`` (if not, output is incomplete), and float64 [2]: the
    (weighted) sums of squared errors of the canonical encoder and of the scales found.
    """
    n_rows, k = source.size(0), source.size(1)
    k_pad = (k + 127) // 128 * 128
    sums = torch.zeros(2, dtype=torch.float64, device=source.device)
    steps = one * float(qmax)
    row = 0
    while row < n_rows:
        end = min(n_rows, row + rows_per_step)
        lanes = (end - row) * k_pad
        n = lanes // group
        x = x_all[:lanes].view(-1, k_pad)
        if k < k_pad:
            x[:, k:].zero_()
        x[:, :k].copy_(source[row:end])
        z, y = z_all[:lanes].view(group, n), y_all[:lanes].view(group, n)
        z.copy_(x.view(n, group).t())
        torch.abs(z, out=y)
        a, aw, e, ew = a_all[:n], a_words[:n], e_all[:n], e_words[:n]
        up, down, half, hw = up_all[:n], down_all[:n], half_all[:n], half_words[:n]
        torch.amax(y, 0, out=a)
        if not float(a.max()) < first_refused:
            return False, sums
        torch.bitwise_and(aw, 0x7F800000, out=up_words[:n])
        up_words[:n].clamp_min_(0x00800000)
        torch.sub(torch.full_like(ew, 0x7F000000), up_words[:n], out=down_words[:n])
        z.mul_(down)
        half.copy_(torch.div(a, steps))
        canonical = hw.to(torch.int32)
        start = torch.where(a > 0.0, canonical.clamp_min(1), canonical)
        hw.clamp_min_(1)
        group_errors(z, half, up, down, one, qmin, qmax, weights, y, e)
        start_errors = e.clone()
        e.mul_(keep)
        keys = ew.to(torch.int64).bitwise_left_shift_(16)
        try_scales(a, coarse, keys, z, half, hw, up, down, one, qmin, qmax, weights, y, e, ew)
        best = keys.bitwise_and(0xFFFF).to(torch.int32)
        hw.copy_(torch.where(best == 0, start, best).clamp_min_(1))
        settled = half.to(torch.float32)
        try_scales(settled, fine, keys, z, half, hw, up, down, one, qmin, qmax, weights, y, e, ew)
        best = keys.bitwise_and(0xFFFF).to(torch.int32)
        stays = best == 0
        words_out[row * (k_pad // group) : end * (k_pad // group)] = torch.where(stays, start, best)
        ew.copy_(keys.bitwise_right_shift(16))
        unit = up.to(torch.float64)
        unit.mul_(unit)
        sums[0] += torch.dot(start_errors.to(torch.float64), unit)
        sums[1] += torch.dot(torch.where(stays, start_errors, e).to(torch.float64), unit)
        row = end
    return True, sums


def scripted_search() -> Callable[..., Any]:
    """``search_rows`` under TorchScript, or as it is where that cannot be had."""
    return scripted(search_rows)
