"""Each operator against its formula in float64 numpy, written without looking at the operator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ninfer_runtime.backends.reference.attention import attend
from ninfer_runtime.backends.reference.gdn import advance_history, convolve, gates, step
from ninfer_runtime.backends.reference.moe import route
from ninfer_runtime.backends.reference.norm import gated_rms_norm, l2_norm, rms_norm
from ninfer_runtime.backends.reference.rope import rope_tables, rotate
from ninfer_runtime.models.binder import BoundModel

Float64s = NDArray[np.float64]


def normal(seed: int, *shape: int) -> Float64s:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(np.float64)


def tensor(values: Float64s) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


def close(found: torch.Tensor, expected: Float64s, atol: float = 2e-6) -> None:
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=2e-6, atol=atol)


def sigmoid(x: Float64s) -> Float64s:
    return 1 / (1 + np.exp(-x))


def test_text_norms_add_one_and_the_deltanet_norm_does_not(fresh_seed: int) -> None:
    x, w, z = normal(fresh_seed, 5, 96), normal(fresh_seed + 1, 96), normal(fresh_seed + 2, 5, 96)
    rms = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    close(rms_norm(tensor(x), tensor(w), 1e-6), rms * (1 + w))
    close(gated_rms_norm(tensor(x), tensor(w), tensor(z), 1e-6), rms * w * z * sigmoid(z))


def test_epsilon_stands_under_the_root(fresh_seed: int) -> None:
    x = normal(fresh_seed, 3, 64) * 1e-4
    close(rms_norm(tensor(x), torch.zeros(64), 1e-6), x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6))
    close(l2_norm(tensor(x), 1e-6), x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6))
    assert not rms_norm(torch.zeros(1, 64), torch.zeros(64), 1e-6).any()


def test_bfloat16_norm_rounds_once(fresh_seed: int) -> None:
    x, w = normal(fresh_seed, 50, 128), normal(fresh_seed + 1, 128)
    x = torch.from_numpy(x).bfloat16().double().numpy()
    exact = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + w)
    found = rms_norm(tensor(x).bfloat16(), tensor(w), 1e-6)
    assert found.dtype == torch.bfloat16
    half_ulp = 2.0**-9 * 2.0 ** np.ceil(np.log2(np.abs(exact)))
    # What is rounded to bfloat16 is itself rounded in float32: 128 additions under a root, and eight operations more.
    in_float32 = (128 / 2 + 8) * 2.0**-24 * np.abs(exact)
    assert (np.abs(found.double().numpy() - exact) <= half_ulp + in_float32).all()


def test_rotary_pairs_axes_and_pass_through(dense: BoundModel, fresh_seed: int) -> None:
    spec = dense.spec
    assert (spec.rotary_dim, spec.rope_theta) == (64, 1e7)
    assert [i for i in range(32) if spec.rope_axes[i] == 1] == list(range(1, 32, 3))
    assert [i for i in range(32) if spec.rope_axes[i] == 2] == list(range(2, 30, 3))
    positions = np.random.default_rng(fresh_seed).integers(0, 3000, (3, 4))
    x = normal(fresh_seed, 4, 2, 256)
    expected = x.copy()
    for t in range(4):
        for i in range(32):
            angle = positions[spec.rope_axes[i], t] * 1e7 ** (-2 * i / 64)
            a, b = x[t, :, i], x[t, :, i + 32]
            expected[t, :, i] = a * np.cos(angle) - b * np.sin(angle)
            expected[t, :, i + 32] = b * np.cos(angle) + a * np.sin(angle)
    found = rotate(tensor(x), *rope_tables(torch.from_numpy(positions), spec))
    # A float32 angle of 3000 radians is off by up to 1.2e-4.
    close(found, expected, atol=2e-3)
    assert np.array_equal(found[..., 64:].numpy(), x[..., 64:].astype(np.float32))


def test_query_heads_share_key_value_heads_in_consecutive_groups(fresh_seed: int) -> None:
    heads, kv_heads, n, dim = 6, 2, 9, 16
    q, k, v = (
        normal(fresh_seed, heads, dim),
        normal(fresh_seed + 1, kv_heads, n, dim),
        normal(fresh_seed + 2, kv_heads, n, dim),
    )
    expected = np.empty((heads, dim))
    for j in range(heads):
        scores = k[j // 3] @ q[j] / np.sqrt(dim)
        p = np.exp(scores - scores.max())
        expected[j] = p / p.sum() @ v[j // 3]
    close(attend(tensor(q), tensor(k), tensor(v)), expected)


def test_convolution_is_causal_and_its_last_tap_is_the_current_token(fresh_seed: int) -> None:
    history, p, taps = normal(fresh_seed, 3, 10), normal(fresh_seed + 1, 7, 10), normal(fresh_seed + 2, 4, 10)
    columns = np.concatenate([history, p])
    total = np.stack([sum(taps[j] * columns[t + j] for j in range(4)) for t in range(7)])
    close(convolve(tensor(history), tensor(p), tensor(taps)), total * sigmoid(total))
    for n in (1, 2, 3, 7):
        expected = np.concatenate([history, p[:n]])[-3:]
        assert np.array_equal(advance_history(tensor(history), tensor(p[:n])).numpy(), expected.astype(np.float32))


def test_gates_use_softplus_with_its_identity_branch(fresh_seed: int) -> None:
    a, b, a_log = normal(fresh_seed, 4, 3) * 20, normal(fresh_seed + 1, 4, 3), normal(fresh_seed + 2, 3)
    dt_bias = np.array([0.0, -3.0, 25.0])
    x = a + dt_bias
    softplus = np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 30))))
    found = gates(tensor(a), tensor(b), tensor(a_log), tensor(dt_bias))
    close(found.alpha, np.exp(-np.exp(a_log) * softplus))
    close(found.beta, sigmoid(b))


def _random_drivers(seed: int, n: int, heads: int, dk: int, dv: int) -> tuple[Float64s, ...]:
    q, k, v = (normal(seed + i, n, heads, d) for i, d in enumerate((dk, dk, dv)))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -np.abs(normal(seed + 3, n, heads)) * 0.2
    return q, k, v, g, sigmoid(normal(seed + 4, n, heads))


def _chunked(
    q: Float64s, k: Float64s, v: Float64s, g: Float64s, beta: Float64s, s0: Float64s
) -> tuple[Float64s, Float64s]:
    """One head of the chunked form: outputs [C, dv] and the state after the chunk."""
    total = np.cumsum(g)
    decay = np.exp(np.minimum(total[:, None] - total[None], 0))
    a = np.tril(beta[:, None] * (k @ k.T) * decay, -1)
    solve = np.linalg.inv(np.eye(len(g)) + a)
    u, w = solve @ (beta[:, None] * v), solve @ ((beta * np.exp(total))[:, None] * k)
    new = u - w @ s0
    out = np.exp(total)[:, None] * (q @ s0) + np.tril((q @ k.T) * decay) @ new
    state = np.exp(total[-1]) * s0 + (np.exp(total[-1] - total)[:, None] * k).T @ new
    return out, state


def test_recurrence_equals_the_chunked_form(fresh_seed: int) -> None:
    n, heads, dk, dv = 100, 3, 32, 24
    q, k, v, g, beta = _random_drivers(fresh_seed, n, heads, dk, dv)
    start = normal(fresh_seed + 9, heads, dk, dv)
    state, outputs = tensor(start), []
    for t in range(n):
        step(state, tensor(k[t]), tensor(v[t]), tensor(np.exp(g[t])), tensor(beta[t]))
        outputs.append(torch.einsum("hk,hkv->hv", tensor(q[t]), state))
    for h in range(heads):
        at, expected = start[h], []
        for begin in range(0, n, 64):
            span = slice(begin, begin + 64)
            out, at = _chunked(q[span, h], k[span, h], v[span, h], g[span, h], beta[span, h], at)
            expected.append(out)
        close(torch.stack(outputs)[:, h], np.concatenate(expected), atol=2e-5)
        close(state[h], at, atol=2e-5)


def test_zero_beta_without_decay_leaves_the_state_alone(fresh_seed: int) -> None:
    start = normal(fresh_seed, 2, 8, 8)
    state = tensor(start)
    step(state, tensor(normal(1, 2, 8)), tensor(normal(2, 2, 8)), torch.ones(2), torch.zeros(2))
    assert np.array_equal(state.numpy(), start.astype(np.float32))


def test_router_takes_the_largest_lower_id_on_ties_and_renormalises(fresh_seed: int) -> None:
    logits = normal(fresh_seed, 20, 16)
    logits[:, 5] = logits[:, 11] = 9.0
    ids, weights = route(tensor(logits), 4)
    assert ids[:, :2].tolist() == [[5, 11]] * 20
    for t in range(20):
        expected = sorted(range(16), key=lambda e, t=t: (-logits[t, e], e))[:4]  # type: ignore[misc]
        assert ids[t].tolist() == expected
        top = np.exp(logits[t, expected])
        close(weights[t], top / top.sum())


@pytest.mark.parametrize("n_experts", [1, 3, 4])
def test_router_may_use_every_expert(n_experts: int) -> None:
    ids, weights = route(torch.zeros(2, n_experts), n_experts)
    assert ids.tolist() == [list(range(n_experts))] * 2
    np.testing.assert_allclose(weights.numpy(), 1 / n_experts)


def test_sections_that_leave_an_axis_out_turn_it_temporal(dense: BoundModel) -> None:
    one = replace(dense.spec, rope_axes=(0,) * 32)
    positions = torch.tensor([[5], [900], [700]])
    cos, _ = rope_tables(positions, one)
    plain, _ = rope_tables(torch.full((3, 1), 5), one)
    assert torch.equal(cos, plain)
