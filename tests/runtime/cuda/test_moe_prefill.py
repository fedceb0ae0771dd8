"""Experts of prompt chunks under the emulator: routing, order, and sums against float64 on the weights kernels make."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from ninfer_runtime.backends.cuda.arena import Arena
from ninfer_runtime.backends.cuda.ops.moe_prefill import COLUMN_TOKENS, MoePrefill, PromptExperts, most_columns
from ninfer_runtime.backends.cuda.packing import TILE_FORMATS, PackedMatrix, activation_stride
from ninfer_runtime.backends.cuda.weights import MlpTensors, MoeTensors
from tests.emulator.device import EmulatedDevice
from tests.runtime.cuda.test_linear_large import Weight, bf16_words, random_weight, to_bf16

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer]

EXPERTS, PER_TOKEN = 12, 3


@dataclass(frozen=True)
class Bank:
    """Matrices of equal shape: packed one after the other, and as the operands that the kernel makes of them."""

    matrix: PackedMatrix
    operands: list[Floats]


def random_bank(
    device: EmulatedDevice, rng: np.random.Generator, name: str, n_rows: int, k: int, *, glu: bool = False
) -> Bank:
    parts = [random_weight(device, rng, name, n_rows, k, glu) for _ in range(EXPERTS)]
    first = parts[0].matrix
    packed = [device.get(part.matrix.pointer, np.uint8, (part.matrix.n_bytes,)) for part in parts]
    matrix = replace(first, n_rows=EXPERTS * n_rows, n_experts=EXPERTS).at(device.put(np.concatenate(packed)))
    return Bank(matrix, [part.operand * (part.matrix.divisor / first.divisor) for part in parts])  # one of all experts


class Rig:
    """One network on an emulated device."""

    def __init__(
        self,
        device: EmulatedDevice,
        rng: np.random.Generator,
        max_tokens: int,
        *,
        formats: tuple[str, str] = ("Q4G64_F16S", "Q5G64_F16S"),
        hidden: int = 136,
        width: int = 40,
    ) -> None:
        self.device, self.hidden, self.width = device, hidden, width
        self.router: Weight = random_weight(device, rng, "BF16", EXPERTS + 1, hidden)
        self.gate_up = random_bank(device, rng, formats[0], 2 * width, hidden, glu=True)
        self.down = random_bank(device, rng, formats[1], hidden, width)
        self.shared_gate_up = random_weight(device, rng, "W8G32_F16S", 2 * width, hidden, glu=True)
        self.shared_down = random_weight(device, rng, "W8G32_F16S", hidden, width)
        self.tensors = MoeTensors(
            self.router.matrix,
            self.gate_up.matrix,
            self.down.matrix,
            MlpTensors(self.shared_gate_up.matrix, self.shared_down.matrix),
            PER_TOKEN,
        )
        arena = Arena(device, 1 << 22)
        self.memory = PromptExperts.take(arena, self.tensors, max_tokens)
        for begin, n_bytes in ((self.memory.inner, max_tokens * PER_TOKEN), (self.memory.shared_inner, max_tokens)):
            device.fill(begin, 0, n_bytes * activation_stride(width) * 2, device.stream())
        self.op = MoePrefill(device, self.tensors, self.memory, max_tokens=max_tokens)

    def put_rows(self, values: Floats) -> int:
        """bf16 rows, zero from ``hidden`` to the stride."""
        words = np.zeros((len(values), activation_stride(self.hidden)), np.uint16)
        words[:, : self.hidden] = bf16_words(values)
        return self.device.put(words)

    def force(self, ids: Ints, rng: np.random.Generator) -> Floats:
        """Logits that route token t to ``ids[t]``, in that order: float64 [T, experts + 1], on the device."""
        logits = rng.uniform(-4, -2, (len(ids), EXPERTS + 1)).astype(np.float32)
        falling = np.sort(rng.uniform(0, 2, ids.shape).astype(np.float32), axis=1)[:, ::-1]
        np.put_along_axis(logits, ids.astype(np.int64), falling, axis=1)
        self.device.upload(self.memory.logits, logits)
        return logits.astype(np.float64)

    def get(self, pointer: int, dtype: type[np.generic], *shape: int) -> npt.NDArray[np.generic]:
        return self.device.get(pointer, dtype, shape)


def mlp(x: Floats, gate_up: Floats, down: Floats) -> tuple[Floats, Floats]:
    """Result of bf16 rows with bf16 between and behind the products, and how far a kernel may be from it."""
    gate, up = np.split(x @ gate_up.T, 2, axis=-1)
    inner = to_bf16(gate / (1 + np.exp(-gate)) * up)
    out = to_bf16(inner @ down.T)
    size = np.linalg.norm(inner, axis=-1)[:, None] * np.linalg.norm(down, axis=-1)[None]
    return out, 2.0**-7 * size + 2.0**-8 * np.abs(out)


def expected_sum(rig: Rig, x: Floats, ids: Ints, logits: Floats) -> tuple[Floats, Floats]:
    """Σ share · expert + shared share · shared expert in float64, and its tolerance."""
    chosen = np.take_along_axis(logits, ids.astype(np.int64), axis=1)
    shares = np.exp(chosen - chosen.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    out, error = mlp(x, rig.shared_gate_up.operand, rig.shared_down.operand)
    gate = 1 / (1 + np.exp(-logits[:, EXPERTS:]))
    out, error = gate * out, gate * error
    for expert in range(EXPERTS):
        rows, ranks = np.nonzero(ids == expert)
        if rows.size:
            one, limit = mlp(x[rows], rig.gate_up.operands[expert], rig.down.operands[expert])
            out[rows] += shares[rows, ranks, None] * one
            error[rows] += shares[rows, ranks, None] * limit
    return out, error


def random_ids(rng: np.random.Generator, n_tokens: int) -> Ints:
    return np.argsort(rng.random((n_tokens, EXPERTS)), axis=1)[:, :PER_TOKEN].astype(np.int32)


def crowded_ids(rng: np.random.Generator, n_tokens: int) -> Ints:
    """Every token goes to expert 5, all but a few to 7 and 2, most experts have none."""
    ids = np.tile(np.array([7, 5, 2], np.int32), (n_tokens, 1))
    some = rng.random(n_tokens) < 0.1
    ids[some] = np.array([5, 11, 0])
    return ids


def check_groups(rig: Rig, ids: Ints) -> None:
    """Pairs lie by expert, then by token; columns cut every expert's run, those of most token tiles come first."""
    m, (n_tokens, k) = rig.memory, ids.shape
    assert np.array_equal(rig.get(m.ids, np.int32, n_tokens, k), ids)
    order = rig.get(m.order, np.int32, n_tokens * k)
    place = rig.get(m.place, np.int32, n_tokens * k)
    by_expert = np.argsort(ids.reshape(-1), kind="stable")
    assert np.array_equal(place[by_expert], np.arange(n_tokens * k))
    assert np.array_equal(order, by_expert // k)
    counts = np.bincount(ids.reshape(-1), minlength=EXPERTS)
    columns, first = [], 0
    for expert, count in enumerate(counts):
        runs = range(0, count, COLUMN_TOKENS)
        columns += [(expert, first + at, min(count - at, COLUMN_TOKENS), 0) for at in runs]
        first += count
    columns.sort(key=lambda column: -(-column[2] // 8), reverse=True)
    n_columns = int(rig.get(m.n_columns, np.int32, 1)[0])
    assert n_columns == len(columns) <= most_columns(rig.tensors, n_tokens)
    assert np.array_equal(rig.get(m.columns, np.int32, n_columns, 4), columns)


def check_experts(rig: Rig, ids: Ints, logits: Floats, x: Floats, seed: int) -> None:
    """From forced logits to the residual stream."""
    rng, n_tokens = np.random.default_rng(seed), len(x)
    residual = rng.standard_normal((n_tokens, rig.hidden)).astype(np.float32)
    out, rows, stream = rig.device.put(residual), rig.put_rows(x), rig.device.stream()
    rig.op.route(stream, n_tokens)
    rig.op.experts(stream, rows)
    rig.op.shared(stream, rows)
    rig.op.reduce(stream, n_tokens, out)
    rig.device.synchronize()
    check_groups(rig, ids)
    expected, error = expected_sum(rig, x, ids, logits)
    found = rig.device.get(out, np.float32, residual.shape)
    assert np.all(np.abs(found - residual - expected) <= error + 2.0**-22 * np.abs(found))


@pytest.mark.slow
@pytest.mark.parametrize("name", TILE_FORMATS)
def test_formats_in_both_banks(name: str, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    with EmulatedDevice(n_sms=2) as device:
        rig = Rig(device, rng, 65, formats=(name, name))
        ids, x = random_ids(rng, 65), to_bf16(rng.standard_normal((65, rig.hidden)))
        check_experts(rig, ids, rig.force(ids, rng), x, fresh_seed)


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 49, 64, 127, 255])
def test_token_counts(n_tokens: int, crowded: bool, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    with EmulatedDevice(n_sms=2) as device:
        rig = Rig(device, rng, 255)
        ids = crowded_ids(rng, n_tokens) if crowded else random_ids(rng, n_tokens)
        x = to_bf16(rng.standard_normal((n_tokens, rig.hidden)))
        check_experts(rig, ids, rig.force(ids, rng), x, fresh_seed)


def test_rows_that_fill_several_row_tiles(fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    with EmulatedDevice(n_sms=2) as device:
        rig = Rig(device, rng, 70, hidden=296, width=136)
        ids, x = crowded_ids(rng, 70), to_bf16(rng.standard_normal((70, rig.hidden)))
        check_experts(rig, ids, rig.force(ids, rng), x, fresh_seed)


def test_whole_network_routes_by_its_own_logits_and_repeats(fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    n_tokens = 100
    x = to_bf16(rng.standard_normal((n_tokens, 136)))
    results = []
    for n_sms in (1, 3):
        with EmulatedDevice(n_sms=n_sms) as device:
            rig = Rig(device, np.random.default_rng(fresh_seed), n_tokens)
            out, rows = device.put(np.zeros((n_tokens, rig.hidden), np.float32)), rig.put_rows(x)
            rig.op.launch(device.stream(), n_tokens, rows, out)
            device.synchronize()
            results.append(device.get(out, np.float32, (n_tokens, rig.hidden)))
            logits = device.get(rig.memory.logits, np.float32, (n_tokens, EXPERTS + 1)).astype(np.float64)
            assert np.allclose(logits, x @ rig.router.operand.T, rtol=0, atol=2e-5)
            ids = np.argsort(-logits[:, :EXPERTS], axis=1, kind="stable")[:, :PER_TOKEN]
            check_groups(rig, ids)
            expected, error = expected_sum(rig, x, ids, logits)
            assert np.all(np.abs(results[-1] - expected) <= error + 1e-6)
    assert np.array_equal(results[0], results[1])


def test_equal_logits_choose_the_lower_ids(fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    logits = rng.integers(-1, 2, (33, EXPERTS + 1)).astype(np.float32)
    logits[0] = 0.0
    logits[1, 1::2] = -0.0
    with EmulatedDevice(n_sms=1) as device:
        rig = Rig(device, rng, 33)
        device.upload(rig.memory.logits, logits)
        rig.op.route(device.stream(), 33)
        device.synchronize()
        check_groups(rig, np.argsort(-logits[:, :EXPERTS], axis=1, kind="stable")[:, :PER_TOKEN])
        shares = device.get(rig.memory.shares, np.float32, (33, PER_TOKEN))
        shared = device.get(rig.memory.shared_shares, np.float32, 33)
        assert np.allclose(shares.sum(axis=1), 1.0, rtol=1e-6)
        assert np.array_equal(shares[0], np.full(PER_TOKEN, np.float32(1) / np.float32(3)))
        assert np.allclose(shared, 1 / (1 + np.exp(-logits[:, EXPERTS].astype(np.float64))), rtol=1e-6)
