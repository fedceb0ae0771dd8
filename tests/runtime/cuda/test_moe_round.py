"""A mixture of experts in rounds under the emulator: routing, experts with their routing forced, and all of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from ninfer_format.errors import UnsupportedError
from ninfer_runtime.backends.cuda.packing import activation_stride
from tests.emulator.device import EmulatedDevice
from tests.runtime.cuda.moe_rig import Floats, MoeRig, Shape, expected_routing, from_words, silu

BOUNDARY_COLUMNS = (1, 2, 7, 8, 9, 17, 32, 48)
ODD = Shape(hidden=328, width=72, shared_width=40, n_experts=11, top_k=3)
ROUNDING = 2.0**-8


def logits_of(kind: str, shape: Shape, n_columns: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Router logits [T, experts + 1] with a kind of load."""
    logits = rng.standard_normal((n_columns, shape.n_experts + 1)).astype(np.float32)
    if kind == "crowded":  # all columns on the same experts
        logits[:, : shape.n_experts] = 0.01 * logits[:, : shape.n_experts] + rng.permutation(shape.n_experts)
    if kind == "tied":  # few values, both zeros among them
        logits[:, : shape.n_experts] = rng.choice([-1.5, -0.0, 0.0, 0.25], (n_columns, shape.n_experts))
    return logits


def run_forced(rig: MoeRig, n_columns: int, logits: npt.NDArray[np.float32], *, rms: bool) -> bytes:
    """Gate and up, then down, with ``logits``; everything checked. The residual stream's bytes."""
    shape, device = rig.shape, rig.device
    pointer, x = rig.columns(n_columns)
    scale = None
    if rms:
        scale, factor = rig.rms(n_columns)
        x = x * factor
    shared_h = np.zeros((n_columns, activation_stride(shape.shared_width)), np.uint16)
    shared_h[:, : shape.shared_width] = rig.rng.integers(0x3C00, 0x3FFF, (n_columns, shape.shared_width))
    device.upload(rig.memory.shared_h, shared_h)
    rig.force(logits)
    residual, before = rig.residual(n_columns)
    rig.op.launch_gate_up(rig.stream, n_columns, pointer, scale)
    rig.op.launch_down(rig.stream, n_columns, residual)

    ids, shares, own = rig.routing(n_columns)
    expected_ids, expected_shares = expected_routing(logits, shape.top_k)
    assert np.array_equal(ids, expected_ids)
    assert np.allclose(shares, expected_shares, rtol=1e-6, atol=1e-9)
    assert np.allclose(own, 1 / (1 + np.exp(-logits[:, -1].astype(np.float64))), rtol=1e-6)

    h = rig.inner(rig.memory.h, n_columns * shape.top_k, shape.width).reshape(n_columns, shape.top_k, shape.width)
    expected = rig.expected_inner(x, ids)
    assert np.all(np.abs(h - expected) <= ROUNDING * np.abs(expected) + 2e-5 * np.abs(x).max())

    expected = before + rig.expected_sum(h, from_words(shared_h[:, : shape.shared_width]), ids, shares, own)
    found = device.get(residual.x, np.float32, (n_columns, shape.hidden))
    sizes = np.einsum("tk,tkf->t", shares, h**2) ** 0.5 + 40
    assert np.all(np.abs(found - expected) <= 2e-6 * sizes[:, None])
    check_next(rig, residual.normed, residual.next_norm, residual.ss, found)
    return bytes(found.tobytes())


def check_next(rig: MoeRig, normed: int, next_norm: int, ss: int, x: npt.NDArray[np.float32]) -> None:
    """What the next matrix reads is the residual stream's."""
    n_columns, hidden = x.shape
    weight = from_words(rig.device.get(next_norm, np.uint16, (hidden,)))
    found = from_words(rig.device.get(normed, np.uint16, (n_columns, activation_stride(hidden)))[:, :hidden])
    expected = x.astype(np.float64) * (1 + weight)
    assert np.all(np.abs(found - expected) <= ROUNDING * np.abs(expected))
    parts = rig.device.get(ss, np.float32, (rig.op.ss_parts, n_columns))
    assert np.allclose(parts.sum(axis=0), (x.astype(np.float64) ** 2).sum(axis=1), rtol=1e-5)


@pytest.mark.parametrize("load", ["random", "crowded", "tied"])
@pytest.mark.parametrize("n_columns", BOUNDARY_COLUMNS)
def test_experts_are_the_float64_ones_whatever_the_load(n_columns: int, load: str, fresh_seed: int) -> None:
    with EmulatedDevice(n_sms=3) as device:
        rig = MoeRig(device, ODD, n_columns, fresh_seed)
        logits = logits_of(load, ODD, n_columns, rig.rng)
        run_forced(rig, n_columns, logits, rms=n_columns % 2 == 1)


@pytest.mark.parametrize("n_columns", [1, 3, 48])
def test_routing_of_the_published_number_of_experts(n_columns: int, fresh_seed: int) -> None:
    shape = Shape(width=8, n_experts=256, top_k=8)
    with EmulatedDevice(n_sms=2) as device:
        rig = MoeRig(device, shape, n_columns, fresh_seed)
        for load in ("random", "tied", "crowded"):
            run_forced(rig, n_columns, logits_of(load, shape, n_columns, rig.rng), rms=True)


@pytest.mark.parametrize("n_columns", [2, 9])
@pytest.mark.parametrize(
    "formats",
    [
        ("BF16", "BF16", "BF16"),
        ("W8G32_F16S", "W8G32_F16S", "W8G32_F16S"),
        ("NVFP4", "NVFP4", "NVFP4"),
        ("Q5G64_F16S", "Q6G64_F16S", "Q4G64_F16S"),
    ],
)
def test_every_format_serves_every_matrix(formats: tuple[str, str, str], n_columns: int, fresh_seed: int) -> None:
    gate_up, down, shared = formats
    shape = Shape(hidden=256, gate_up=gate_up, down=down, shared=shared, shared_width=256)
    with EmulatedDevice(n_sms=4) as device:
        rig = MoeRig(device, shape, n_columns, fresh_seed)
        run_forced(rig, n_columns, logits_of("random", shape, n_columns, rig.rng), rms=True)


@pytest.mark.parametrize("n_columns", [1, 6, 20])
def test_the_three_launches_follow_the_router(n_columns: int, fresh_seed: int) -> None:
    shape = Shape(hidden=192, width=136, n_experts=13, top_k=4)
    with EmulatedDevice(n_sms=4) as device:
        rig = MoeRig(device, shape, n_columns, fresh_seed)
        scale, factor = rig.rms(n_columns)
        while True:  # one column in a thousand has two experts that rounding may exchange
            pointer, x = rig.columns(n_columns)
            x = x * factor
            logits = x @ rig.router.T
            ranked = -np.sort(-logits[:, :-1], axis=1)
            clear = np.all(ranked[:, :4] - ranked[:, 1:5] > 1e-4, axis=1)
            if clear.any():
                break
        residual, before = rig.residual(n_columns)
        rig.op.launch(rig.stream, n_columns, pointer, scale, residual)
        ids, shares, own = rig.routing(n_columns)
        expected_ids, expected_shares = expected_routing(logits, shape.top_k)
        assert np.array_equal(ids[clear], expected_ids[clear])
        assert np.allclose(shares[clear], expected_shares[clear], rtol=1e-4)
        assert np.allclose(own, 1 / (1 + np.exp(-logits[:, -1])), rtol=1e-4)
        found = device.get(residual.x, np.float32, (n_columns, shape.hidden)) - before
        shared_h = silu(x @ rig.shared_gate_up[0].T) * (x @ rig.shared_gate_up[1].T)
        expected = rig.expected_sum(rig.expected_inner(x, ids), shared_h, ids, shares, own)
        assert np.linalg.norm(found - expected) <= ROUNDING * np.linalg.norm(expected)


def test_a_columns_bits_depend_on_no_other_column(fresh_seed: int) -> None:
    """The same column alone in its tile of eight, then beside others on the same and on other experts."""
    with EmulatedDevice(n_sms=4) as device:
        rig = MoeRig(device, ODD, 8, fresh_seed)
        pointer, _ = rig.columns(8)
        logits = logits_of("random", ODD, 8, rig.rng)
        rig.force(logits)
        found = []
        for n_columns in (2, 8):
            x = device.put(np.ones((n_columns, ODD.hidden), np.float32))
            residual = replace(rig.residual(n_columns)[0], x=x)
            shared_h = np.full((8, activation_stride(ODD.shared_width)), 0x3F80, np.uint16)
            device.upload(rig.memory.shared_h, shared_h)
            rig.op.launch_gate_up(rig.stream, n_columns, pointer, None)
            rig.op.launch_down(rig.stream, n_columns, residual)
            found.append(device.get(x, np.float32, (n_columns, ODD.hidden))[:2])
        assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize("n_columns", [5, 30])
def test_two_launches_have_the_same_bits(n_columns: int, fresh_seed: int) -> None:
    found = []
    for n_sms in (4, 4):
        with EmulatedDevice(n_sms=n_sms) as device:
            rig = MoeRig(device, ODD, n_columns, fresh_seed)
            found.append(run_forced(rig, n_columns, logits_of("random", ODD, n_columns, rig.rng), rms=True))
    assert found[0] == found[1]


def test_a_prompt_without_a_next_norm_leaves_only_the_residual_stream(fresh_seed: int) -> None:
    with EmulatedDevice(n_sms=4) as device:
        rig = MoeRig(device, Shape(), 4, fresh_seed)
        pointer, x = rig.columns(4)
        residual, before = rig.residual(4)
        residual = replace(residual, normed=0, next_norm=0)
        rig.op.launch(rig.stream, 4, pointer, None, residual)
        ids, shares, own = rig.routing(4)
        shared_h = silu(x @ rig.shared_gate_up[0].T) * (x @ rig.shared_gate_up[1].T)
        expected = rig.expected_sum(rig.expected_inner(x, ids), shared_h, ids, shares, own)
        found: Floats = device.get(residual.x, np.float32, (4, 128)) - before
        assert np.linalg.norm(found - expected) <= ROUNDING * np.linalg.norm(expected)


def test_shapes_without_kernels_are_refused(fresh_seed: int) -> None:
    with EmulatedDevice(n_sms=2) as device, pytest.raises(UnsupportedError, match="40 per token"):
        MoeRig(device, Shape(n_experts=64, top_k=40, width=8), 1, fresh_seed)
    with EmulatedDevice(n_sms=2) as device, pytest.raises(UnsupportedError, match="stages in shared memory"):
        MoeRig(device, Shape(n_experts=32, top_k=32, width=8), 48, fresh_seed)
