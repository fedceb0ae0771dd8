"""Experts of prompt chunks on the card at the sizes of a 35B-A3B, against float64 on the weights that kernels make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ninfer_runtime.backends.cuda.arena import Arena, ArenaPlan
from ninfer_runtime.backends.cuda.launch import CudaDevice
from ninfer_runtime.backends.cuda.ops.moe_prefill import MoePrefill, PromptExperts, specs
from ninfer_runtime.backends.cuda.packing import PackedMatrix, activation_stride
from ninfer_runtime.backends.cuda.weights import MlpTensors, MoeTensors
from tests.gpu.test_linear_large import Product

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

Ints = npt.NDArray[np.integer]

EXPERTS, PER_TOKEN, HIDDEN, WIDTH = 256, 8, 2048, 512
MAX_TOKENS = 1024
PATTERNS = 6
"""Different experts; the others repeat them in no order."""
PAIRS = (
    ("Q4G64_F16S", "Q5G64_F16S"),
    ("Q4G64_F16S", "Q6G64_F16S"),
    ("W8G32_F16S", "W8G32_F16S"),
    ("NVFP4", "NVFP4"),
    ("BF16", "BF16"),
)


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    card = CudaDevice()
    yield card
    card.close()


class Bank:
    """``EXPERTS`` matrices, each one of ``PATTERNS``."""

    def __init__(self, rng: np.random.Generator, name: str, shape: tuple[int, int], which: Ints, *, glu: bool) -> None:
        n_rows, k = shape
        parts = [Product(rng, name, n_rows, k, glu=glu) for _ in range(PATTERNS)]
        first = parts[0].matrix
        self.bytes = torch.stack([part.bytes for part in parts])[torch.from_numpy(which).cuda()].contiguous()
        self.operands = [part.operand * (part.matrix.divisor / first.divisor) for part in parts]
        self.matrix: PackedMatrix = replace(first, n_rows=EXPERTS * n_rows, n_experts=EXPERTS).at(self.bytes.data_ptr())


class Network:
    """A layer's experts, with memory for a chunk of ``MAX_TOKENS``."""

    def __init__(self, device: CudaDevice, formats: tuple[str, str]) -> None:
        rng = np.random.default_rng(len(formats[0]) + ord(formats[1][1]))
        self.device, self.which = device, rng.integers(0, PATTERNS, EXPERTS)
        self.router = Product(rng, "BF16", EXPERTS + 1, HIDDEN)
        self.gate_up = Bank(rng, formats[0], (2 * WIDTH, HIDDEN), self.which, glu=True)
        self.down = Bank(rng, formats[1], (HIDDEN, WIDTH), self.which, glu=False)
        self.shared = Product(rng, "W8G32_F16S", 2 * WIDTH, HIDDEN, glu=True), Product(rng, "W8G32_F16S", HIDDEN, WIDTH)
        shared = MlpTensors(self.shared[0].matrix, self.shared[1].matrix)
        tensors = MoeTensors(self.router.matrix, self.gate_up.matrix, self.down.matrix, shared, PER_TOKEN)
        device.prepare(specs(tensors))
        plan = ArenaPlan()
        PromptExperts.take(plan, tensors, MAX_TOKENS)
        self.arena = Arena(device, plan.n_bytes)
        self.memory = PromptExperts.take(self.arena, tensors, MAX_TOKENS)
        device.fill(self.memory.logits, 0xFF, plan.n_bytes - 256, device.stream())
        device.synchronize()
        self.op = MoePrefill(device, tensors, self.memory, max_tokens=MAX_TOKENS)

    def run(self, x: torch.Tensor, logits: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """The residual stream afterwards; routed by ``logits`` where they are given."""
        out, rows, n = residual.clone(), torch.zeros(len(x), activation_stride(HIDDEN), dtype=x.dtype).cuda(), len(x)
        rows[:, :HIDDEN] = x
        torch.cuda.synchronize()
        stream = self.device.stream()
        if logits is None:
            self.op.launch(stream, n, rows.data_ptr(), out.data_ptr())
        else:
            self.device.upload(self.memory.logits, logits.cpu().numpy())
            self.op.route(stream, n)
            self.op.experts(stream, rows.data_ptr())
            self.op.shared(stream, rows.data_ptr())
            self.op.reduce(stream, n, out.data_ptr())
        self.device.synchronize()
        return out

    def logits(self, n_tokens: int) -> torch.Tensor:
        found = np.empty((n_tokens, EXPERTS + 1), np.float32)
        self.device.download(self.memory.logits, found)
        self.device.synchronize()
        return torch.from_numpy(found).cuda()

    def expected(self, x: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Σ share · expert + shared share · shared expert in float64, and how far a kernel may be from it."""
        rows, exact = x.double(), logits.double()
        chosen, ids = torch.sort(exact[:, :EXPERTS], dim=1, descending=True, stable=True)
        shares = torch.softmax(chosen[:, :PER_TOKEN], dim=1)
        pattern = torch.from_numpy(self.which).cuda()[ids[:, :PER_TOKEN]]
        out, error = mlp(rows, self.shared[0].operand, self.shared[1].operand)
        gate = torch.sigmoid(exact[:, EXPERTS:])
        out, error = gate * out, gate * error
        for i in range(PATTERNS):
            share = (shares * (pattern == i)).sum(dim=1, keepdim=True)
            one, limit = mlp(rows, self.gate_up.operands[i], self.down.operands[i])
            out += share * one
            error += share * limit
        return out, error


def mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 between and behind the products."""
    gate, up = (x @ gate_up.T).chunk(2, dim=1)
    inner = (torch.nn.functional.silu(gate) * up).bfloat16().double()
    out = (inner @ down.T).bfloat16().double()
    size = inner.norm(dim=1)[:, None] * down.norm(dim=1)[None]
    return out, 2.0**-7 * size + 2.0**-8 * out.abs()


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: "-".join(pair))
def network(request: pytest.FixtureRequest, device: CudaDevice) -> Iterator[Network]:
    made = Network(device, request.param)
    yield made
    made.arena.close()


def random_rows(rng: np.random.Generator, n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.from_numpy(rng.standard_normal((n_tokens, HIDDEN))).bfloat16().cuda()
    return x, torch.from_numpy(rng.standard_normal((n_tokens, HIDDEN))).float().cuda()


@pytest.mark.parametrize("n_tokens", [1, 49, 64, 65, 127, 128, 255, 1000, 1024])
@pytest.mark.parametrize("crowded", [False, True])
def test_forced_routing(network: Network, n_tokens: int, crowded: bool, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    x, residual = random_rows(rng, n_tokens)
    logits = torch.from_numpy(rng.standard_normal((n_tokens, EXPERTS + 1))).float().cuda()
    if crowded:
        logits[:, 100:107] += 8
    found = network.run(x, logits, residual)
    expected, error = network.expected(x, logits)
    assert bool(((found.double() - residual.double() - expected).abs() <= error + 2.0**-22 * found.abs()).all())


@pytest.mark.parametrize("n_tokens", [49, 1024])
def test_own_routing_repeats_bit_for_bit(network: Network, n_tokens: int, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    x, residual = random_rows(rng, n_tokens)
    found = [network.run(x, None, residual) for _ in range(3)]
    logits = network.logits(n_tokens)
    router = x.double() @ network.router.operand.T
    assert bool(((logits.double() - router).abs() <= 2e-4).all())
    expected, error = network.expected(x, logits)
    assert bool(((found[0].double() - residual.double() - expected).abs() <= error + 2.0**-22 * found[0].abs()).all())
    assert all(torch.equal(found[0], other) for other in found[1:])
