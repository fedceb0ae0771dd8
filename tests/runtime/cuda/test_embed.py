"""Rows of every stored format equal the codec's, rounded to bf16; the normed copy and the sum of squares follow."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ninfer_format.codec import decode_tensor, encode_tensor
from ninfer_format.errors import UnsupportedError
from ninfer_format.formats import layout_for
from ninfer_runtime.backends.cuda.ops.embed import FORMATS, Embed
from ninfer_runtime.backends.cuda.packing import activation_stride
from tests.emulator.device import EmulatedDevice

N_ROWS = 37


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice() as device:
        yield device


def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Nearest bf16, as float32."""
    return torch.from_numpy(values).bfloat16().float().numpy()


def matrix(rng: np.random.Generator, format: str, hidden: int) -> tuple[bytes, NDArray[np.float32]]:
    """(payload, values rounded to bf16) of a random embedding."""
    values = rounded(rng.normal(0.0, 0.5, (N_ROWS, hidden)).astype(np.float32))
    payload = encode_tensor(values, format, layout_for(format))
    return payload, rounded(decode_tensor(payload, format, layout_for(format), (N_ROWS, hidden)))


@pytest.mark.parametrize("hidden", [128, 136, 2104])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_equal_the_codec(device: EmulatedDevice, format: str, hidden: int, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    payload, expected = matrix(rng, format, hidden)
    pointer = device.put(np.frombuffer(payload, np.uint8))
    tokens = np.array([0, N_ROWS - 1, 5, 5, *rng.integers(0, N_ROWS, 3)], np.int32)
    norm = rounded(rng.normal(0.0, 0.3, hidden).astype(np.float32))
    stride, n = activation_stride(hidden), len(tokens)
    x, xn, ss = device.empty(4 * n * hidden), device.empty(2 * n * stride), device.empty(4 * n)
    words = torch.from_numpy(norm).bfloat16().view(torch.int16).numpy()
    stream = device.stream()
    Embed(device, format, N_ROWS, hidden, pointer).launch(
        stream, n, device.put(tokens), x, norm_weight=device.put(words), xn=xn, ss=ss
    )
    device.synchronize()
    rows = expected[tokens]
    assert np.array_equal(device.get(x, np.float32, (n, hidden)), rows)
    normed = torch.from_numpy(device.get(xn, np.int16, (n, stride))).view(torch.bfloat16).float().numpy()
    assert np.array_equal(normed[:, :hidden], rounded(rows * (1 + norm)))
    assert not normed[:, hidden:].any()
    squares = (rows.astype(np.float64) ** 2).sum(-1)
    np.testing.assert_allclose(device.get(ss, np.float32, n), squares, rtol=1e-6)


def test_rows_of_the_caller_take_the_place_of_tokens(device: EmulatedDevice, fresh_seed: int) -> None:
    rng, hidden = np.random.default_rng(fresh_seed), 128
    payload, expected = matrix(rng, "Q6G64_F16S", hidden)
    pointer = device.put(np.frombuffer(payload, np.uint8))
    tokens, own_index = np.array([3, 4, 5, 6], np.int32), np.array([-1, 1, -1, 0], np.int32)
    own = rng.normal(0.0, 1.0, (2, hidden)).astype(np.float32)
    x = device.empty(4 * 4 * hidden)
    Embed(device, "Q6G64_F16S", N_ROWS, hidden, pointer).launch(
        device.stream(), 4, device.put(tokens), x, own_index=device.put(own_index), own_rows=device.put(own)
    )
    device.synchronize()
    rows = np.stack([expected[3], rounded(own)[1], expected[5], rounded(own)[0]])
    assert np.array_equal(device.get(x, np.float32, (4, hidden)), rows)


@pytest.mark.parametrize(("format", "hidden"), [("NVFP4", 128), ("BF16", 132)])
def test_what_cannot_be_read_is_refused(device: EmulatedDevice, format: str, hidden: int) -> None:
    with pytest.raises(UnsupportedError):
        Embed(device, format, N_ROWS, hidden, 0)
