"""The norm against the reference's formula, in every output form and at odd widths."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ninfer_runtime.backends.cuda.ops.rms_norm import OUTPUTS, RmsNorm, RmsNormOutput
from ninfer_runtime.backends.cuda.packing import activation_stride
from ninfer_runtime.backends.reference.norm import rms_norm
from tests.emulator.device import EmulatedDevice

EPS = 1e-6


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice() as device:
        yield device


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("hidden", [4, 128, 132, 2048, 5120])
def test_rows_equal_the_reference(device: EmulatedDevice, hidden: int, output: RmsNormOutput, fresh_seed: int) -> None:
    rng, n_rows = np.random.default_rng(fresh_seed), 5
    x = (rng.normal(0.0, 1.0, (n_rows, hidden)) * [[1.0], [1e-3], [1e3], [30.0], [0.0]]).astype(np.float32)
    weight = torch.from_numpy(rng.normal(0.0, 0.4, hidden).astype(np.float32)).bfloat16()
    expected = rms_norm(torch.from_numpy(x), weight.float(), EPS).numpy()
    stride = activation_stride(hidden) if output == "bf16" else hidden
    n_bytes = (2 if output == "bf16" else 4) * n_rows * stride
    y = device.empty(n_bytes)
    words = device.put(weight.view(torch.int16).numpy())
    RmsNorm(device, hidden, EPS, output).launch(device.stream(), n_rows, device.put(x), words, y)
    device.synchronize()
    if output == "bf16":
        stored = torch.from_numpy(device.get(y, np.int16, (n_rows, stride))).view(torch.bfloat16)
        assert not stored[:, hidden:].any()
        found = stored[:, :hidden].float().numpy()
    else:
        found = device.get(y, np.float32, (n_rows, hidden))
    if output == "float":
        np.testing.assert_allclose(found, expected, rtol=2e-6)
    else:
        # One rounding to bf16; a value on the edge between two may fall to either side.
        np.testing.assert_allclose(found, expected, rtol=2**-8)
        nearest = torch.from_numpy(expected).bfloat16().float().numpy()
        assert (found != nearest).mean() < 0.01
