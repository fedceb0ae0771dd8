"""Embedding and norm on any device, against the codec's values and the reference's formula at boundary sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from ninfer_format.codec import decode_tensor, encode_tensor
from ninfer_format.formats import layout_for
from ninfer_runtime.backends.cuda.device import Device
from ninfer_runtime.backends.cuda.ops.embed import Embed
from ninfer_runtime.backends.cuda.ops.rms_norm import RmsNorm, RmsNormOutput
from ninfer_runtime.backends.cuda.packing import activation_stride
from ninfer_runtime.backends.reference.norm import rms_norm

N_ROWS = 37
EPS = 1e-6


def put(device: Device, array: NDArray[Any]) -> int:
    """Address of a copy of ``array``."""
    pointer = device.allocate(array.nbytes)
    device.upload(pointer, np.ascontiguousarray(array))
    return pointer


def poisoned(device: Device, n_bytes: int) -> int:
    """Memory that holds NaN whatever its type."""
    return put(device, np.full(n_bytes, 0xFF, np.uint8))


def get(device: Device, pointer: int, dtype: DTypeLike, shape: int | tuple[int, ...]) -> NDArray[Any]:
    """What lies there once everything queued is done."""
    array = np.empty(shape, dtype)
    device.synchronize()
    device.download(pointer, array)
    return array


def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Nearest bf16, as float32."""
    return torch.from_numpy(values).bfloat16().float().numpy()


def bf16_words(values: NDArray[np.float32]) -> NDArray[np.int16]:
    """The words of bf16 values."""
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy()


def from_bf16(words: NDArray[np.int16]) -> NDArray[np.float32]:
    """Values of bf16 words."""
    return torch.from_numpy(words).view(torch.bfloat16).float().numpy()


def matrix(rng: np.random.Generator, format: str, hidden: int) -> tuple[bytes, NDArray[np.float32]]:
    """(payload, values rounded to bf16) of a random embedding."""
    values = rounded(rng.normal(0.0, 0.5, (N_ROWS, hidden)).astype(np.float32))
    payload = encode_tensor(values, format, layout_for(format))
    return payload, rounded(decode_tensor(payload, format, layout_for(format), (N_ROWS, hidden)))


def check_embed(device: Device, format: str, hidden: int, n_tokens: int, seed: int) -> None:
    """Rows and normed rows exactly, sums of squares to 1e-6."""
    rng = np.random.default_rng(seed)
    payload, expected = matrix(rng, format, hidden)
    pointer = put(device, np.frombuffer(payload, np.uint8))
    tokens = rng.integers(0, N_ROWS, n_tokens).astype(np.int32)
    tokens[0] = N_ROWS - 1
    norm = rounded(rng.normal(0.0, 0.3, hidden).astype(np.float32))
    stride = activation_stride(hidden)
    sizes = (4 * n_tokens * hidden, 2 * n_tokens * stride, 4 * n_tokens)
    x, xn, ss = (poisoned(device, size) for size in sizes)
    Embed(device, format, N_ROWS, hidden, pointer).launch(
        device.stream(), n_tokens, put(device, tokens), x, norm_weight=put(device, bf16_words(norm)), xn=xn, ss=ss
    )
    rows = expected[tokens]
    assert np.array_equal(get(device, x, np.float32, (n_tokens, hidden)), rows)
    normed = from_bf16(get(device, xn, np.int16, (n_tokens, stride)))
    assert np.array_equal(normed[:, :hidden], rounded(rows * (1 + norm)))
    assert not normed[:, hidden:].any()
    squares = (rows.astype(np.float64) ** 2).sum(-1)
    np.testing.assert_allclose(get(device, ss, np.float32, n_tokens), squares, rtol=1e-6)


def check_own_rows(device: Device, seed: int) -> None:
    """Rows of the caller in the place of tokens."""
    rng, hidden = np.random.default_rng(seed), 128
    payload, expected = matrix(rng, "Q6G64_F16S", hidden)
    pointer = put(device, np.frombuffer(payload, np.uint8))
    tokens, own_index = np.array([3, 4, 5, 6], np.int32), np.array([-1, 1, -1, 0], np.int32)
    own = rng.normal(0.0, 1.0, (2, hidden)).astype(np.float32)
    x = poisoned(device, 4 * 4 * hidden)
    Embed(device, "Q6G64_F16S", N_ROWS, hidden, pointer).launch(
        device.stream(), 4, put(device, tokens), x, own_index=put(device, own_index), own_rows=put(device, own)
    )
    rows = np.stack([expected[3], rounded(own)[1], expected[5], rounded(own)[0]])
    assert np.array_equal(get(device, x, np.float32, (4, hidden)), rows)


def check_rms_norm(device: Device, hidden: int, output: RmsNormOutput, n_rows: int, seed: int) -> None:
    """Rows of many magnitudes, one of zeros."""
    rng = np.random.default_rng(seed)
    scales = np.array([1.0, 1e-3, 1e3, 30.0, 0.0], np.float32)[np.arange(n_rows) % 5, None]
    x = rng.normal(0.0, 1.0, (n_rows, hidden)).astype(np.float32) * scales
    weight = rounded(rng.normal(0.0, 0.4, hidden).astype(np.float32))
    expected = rms_norm(torch.from_numpy(x), torch.from_numpy(weight), EPS).numpy()
    stride = activation_stride(hidden) if output == "bf16" else hidden
    y = poisoned(device, (2 if output == "bf16" else 4) * n_rows * stride)
    RmsNorm(device, hidden, EPS, output).launch(
        device.stream(), n_rows, put(device, x), put(device, bf16_words(weight)), y
    )
    if output == "bf16":
        stored = from_bf16(get(device, y, np.int16, (n_rows, stride)))
        assert not stored[:, hidden:].any()
        found = stored[:, :hidden]
    else:
        found = get(device, y, np.float32, (n_rows, hidden))
    if output == "float":
        np.testing.assert_allclose(found, expected, rtol=2e-6)
        return
    # One rounding to bf16; a value on the edge between two may fall to either side.
    np.testing.assert_allclose(found, expected, rtol=2**-8)
    assert (found != rounded(expected)).mean() < 0.01
