"""Chunked prefill of Gated DeltaNet under the emulator, against the recurrence in float32."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ninfer_runtime.backends.cuda.ops.gdn_state import GdnGeometry
from tests.emulator.device import EmulatedDevice
from tests.runtime.cuda.gdn_rig import (
    Rig,
    Row,
    device_state,
    empty_state,
    floats,
    random_layer,
    random_projections,
    random_state,
    relative_error,
)

BOUND = 0.01


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice() as emulated:
        yield emulated


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 63, 64, 65, 127, 128, 200])
def test_prefill_follows_the_recurrence(device: EmulatedDevice, n_tokens: int, fresh_seed: int) -> None:
    generator = torch.Generator().manual_seed(fresh_seed)
    layer = random_layer(GdnGeometry(1, 3, 1), generator)
    rig = Rig(device, layer, 2)
    state = random_state(layer, generator)
    rig.write_state(1, 0, *device_state(state))
    x = random_projections(layer.geometry, n_tokens, generator)
    out = floats(rig.prefill(1, x))
    expected = layer.run(state, x, None, torch.bfloat16)
    matrix, history = rig.read_state(1)
    wanted, wanted_history = device_state(state)
    print(relative_error(out, expected), relative_error(matrix, wanted))
    assert relative_error(out, expected) < BOUND
    assert relative_error(matrix, wanted) < BOUND
    assert np.array_equal(history, wanted_history)


@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 6), (2, 4), (1, 1), (2, 10)])
def test_every_ratio_of_heads(device: EmulatedDevice, key_heads: int, value_heads: int, fresh_seed: int) -> None:
    generator = torch.Generator().manual_seed(fresh_seed)
    layer = random_layer(GdnGeometry(key_heads, value_heads, 1), generator)
    rig = Rig(device, layer, 1)
    state = empty_state(layer)
    rig.write_state(0, 0, *device_state(state))
    x = random_projections(layer.geometry, 70, generator)
    out = floats(rig.prefill(0, x))
    assert relative_error(out, layer.run(state, x, None, torch.bfloat16)) < BOUND
    assert relative_error(rig.read_state(0)[0], device_state(state)[0]) < BOUND


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("slowest", [1e-4, 0.05, 5.0])
def test_error_is_bounded_for_correlated_keys_and_every_decay(
    device: EmulatedDevice, correlation: float, slowest: float, fresh_seed: int
) -> None:
    """Decays from about 0.9999 to e^-20 per token, keys from orthogonal to nearly parallel."""
    generator = torch.Generator().manual_seed(fresh_seed)
    layer = random_layer(GdnGeometry(1, 2, 1), generator, slowest)
    rig = Rig(device, layer, 1)
    state = empty_state(layer)
    rig.write_state(0, 0, *device_state(state))
    x = random_projections(layer.geometry, 192, generator, correlation)
    out = floats(rig.prefill(0, x))
    error = relative_error(out, layer.run(state, x, None, torch.bfloat16))
    error_of_state = relative_error(rig.read_state(0)[0], device_state(state)[0])
    print(correlation, slowest, error, error_of_state)
    assert error < BOUND
    assert error_of_state < BOUND


def test_cuts_into_calls_agree(device: EmulatedDevice, fresh_seed: int) -> None:
    generator = torch.Generator().manual_seed(fresh_seed)
    layer = random_layer(GdnGeometry(1, 2, 1), generator)
    x = random_projections(layer.geometry, 150, generator)
    results = []
    for cuts in ([150], [64, 86], [1, 2, 3, 100, 44]):
        rig = Rig(device, layer, 1)
        rig.write_state(0, 0, *device_state(empty_state(layer)))
        outs, done = [], 0
        for n in cuts:
            outs.append(rig.prefill(0, x[done : done + n]))
            done += n
        results.append((floats(np.concatenate(outs)), *rig.read_state(0)))
    for out, matrix, history in results[1:]:
        assert relative_error(out, results[0][0]) < BOUND
        assert relative_error(matrix, results[0][1]) < BOUND
        assert np.array_equal(history, results[0][2])


def test_a_round_continues_a_prefill(device: EmulatedDevice, fresh_seed: int) -> None:
    generator = torch.Generator().manual_seed(fresh_seed)
    layer = random_layer(GdnGeometry(1, 3, 1), generator)
    rig = Rig(device, layer, 1)
    state = empty_state(layer)
    rig.write_state(0, 0, *device_state(state))
    x = random_projections(layer.geometry, 68, generator)
    rig.prefill(0, x[:66])
    out = floats(rig.round([Row(0, 2, 0, 0)], 2, x[66:]))
    assert relative_error(out[0], layer.run(state, x, None, torch.bfloat16)[66:]) < BOUND
