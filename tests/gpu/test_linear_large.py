"""linear_large on the card against float64 on the weights that the kernel makes: formats, epilogues, token counts."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ninfer_runtime.backends.cuda.launch import CudaDevice
from ninfer_runtime.backends.cuda.ops.linear_large import (
    Epilogue,
    LinearLarge,
    Output,
    clear_workspace,
    specs,
    workspace_bytes,
)
from ninfer_runtime.backends.cuda.packing import TILE_FORMATS, PackedMatrix, activation_stride, pack_matrix
from tests.runtime.cuda.random_nvfp4 import random_nvfp4

pytestmark = pytest.mark.gpu

FORMATS = tuple(TILE_FORMATS)
TOKENS = (49, 64, 65, 127, 128, 255, 1000, 1024)


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    card = CudaDevice()
    plain = [PackedMatrix(name, name, 32, 128) for name in FORMATS]
    pairs = [PackedMatrix(name, name, 32, 128, interleaved=True) for name in FORMATS]
    wanted = [spec for epilogue in (Epilogue.STORE, Epilogue.RESIDUAL) for m in plain for spec in specs([m], epilogue)]
    wanted += [spec for m in pairs for spec in specs([m], Epilogue.SWIGLU)]
    card.prepare([*wanted, *specs([PackedMatrix("small", "BF16", 32, 128)] * 2, Epilogue.STORE)])
    yield card
    card.close()


@pytest.fixture(scope="module")
def workspace(device: CudaDevice) -> int:
    pointer = device.allocate(workspace_bytes(device))
    clear_workspace(device, pointer)
    return pointer


class Product:
    """A random matrix on the card, with the operand that the kernel makes of it as float64 [n_rows, k]."""

    def __init__(self, rng: np.random.Generator, name: str, n_rows: int, k: int, *, glu: bool = False) -> None:
        matrix = PackedMatrix(name, name, n_rows, k, interleaved=glu)
        tile = matrix.tile
        if tile.floating:
            matrix, codes, scale_words, values = random_nvfp4(rng, matrix)
            packed = pack_matrix(matrix, codes, scale_words)
            self.operand = torch.from_numpy(values).cuda()
        elif tile.group:
            top = 1 << (tile.bits - 1)
            codes = rng.integers(-top, top, (n_rows, k))
            steps = rng.uniform(0.2, 2.0, (n_rows, -(-k // tile.group))) / (top * k**0.5)
            words = steps.astype(np.float16).view(np.uint16)
            packed = pack_matrix(matrix, codes, words)
            scale = torch.from_numpy(np.repeat(words.view(np.float16), tile.group, axis=1)[:, :k]).cuda().double()
            code = torch.from_numpy(codes).cuda().double()
            self.operand = (code * scale.bfloat16().double()).bfloat16().double()
        else:
            rounded = torch.from_numpy(rng.standard_normal((n_rows, k)) / k**0.5).bfloat16()
            packed = pack_matrix(matrix, rounded.view(torch.int16).numpy().view(np.uint16), None)
            self.operand = rounded.cuda().double()
        self.bytes = torch.from_numpy(packed).cuda()
        self.matrix = matrix.at(self.bytes.data_ptr())


def activations(rng: np.random.Generator, n_tokens: int, k: int) -> torch.Tensor:
    """bf16 [n_tokens, stride], zero from K on."""
    x = torch.zeros(n_tokens, activation_stride(k), dtype=torch.bfloat16)
    x[:, :k] = torch.from_numpy(rng.standard_normal((n_tokens, k))).bfloat16()
    return x.cuda()


def launch(
    device: CudaDevice, workspace: int, products: list[Product], epilogue: Epilogue, x: torch.Tensor, outs: list[Output]
) -> None:
    op = LinearLarge(device, [p.matrix for p in products], epilogue, max_tokens=1024, workspace=workspace)
    torch.cuda.synchronize()
    op.launch(device.stream(), len(x), x.data_ptr(), x.shape[1], outs)
    device.synchronize()


def bound(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Largest error of fp32 sums: 2e-6 |x| |w|."""
    limit: torch.Tensor = 2e-6 * x.norm(dim=1)[:, None] * w.norm(dim=1)[None]
    return limit


@pytest.mark.parametrize("n_tokens", TOKENS)
@pytest.mark.parametrize("name", FORMATS)
def test_stored_product(device: CudaDevice, workspace: int, name: str, n_tokens: int, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    n_rows, k = 1043, 2000 - n_tokens % 7
    product, x = Product(rng, name, n_rows, k), activations(rng, n_tokens, k)
    out = torch.full((n_tokens, n_rows), torch.nan, device="cuda")
    launch(device, workspace, [product], Epilogue.STORE, x, [Output(out.data_ptr(), "fp32")])
    values = x[:, :k].double()
    expected = values @ product.operand.T
    assert bool(((out.double() - expected).abs() <= bound(values, product.operand)).all())
    words = torch.full((n_tokens, n_rows), torch.nan, device="cuda", dtype=torch.bfloat16)
    launch(device, workspace, [product], Epilogue.STORE, x, [Output(words.data_ptr())])
    assert torch.equal(words, out.bfloat16())


@pytest.mark.parametrize("n_tokens", [65, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_swiglu(device: CudaDevice, workspace: int, name: str, n_tokens: int, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    width, k = 1100, 640
    product, x = Product(rng, name, 2 * width, k, glu=True), activations(rng, n_tokens, k)
    out = torch.full((n_tokens, width), torch.nan, device="cuda", dtype=torch.bfloat16)
    launch(device, workspace, [product], Epilogue.SWIGLU, x, [Output(out.data_ptr())])
    gate, up = (x[:, :k].double() @ product.operand.T).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    error = (2.0**-8 + 1e-5) * expected.abs() + 3e-4
    assert bool(((out.double() - expected).abs() <= error).all())


@pytest.mark.parametrize("n_tokens", [49, 128, 1024])
@pytest.mark.parametrize("name", FORMATS)
def test_residual_repeats_bit_for_bit(
    device: CudaDevice, workspace: int, name: str, n_tokens: int, fresh_seed: int
) -> None:
    rng = np.random.default_rng(fresh_seed)
    n_rows, k = 2600, 1536
    product, x = Product(rng, name, n_rows, k), activations(rng, n_tokens, k)
    residual = torch.from_numpy(rng.standard_normal((n_tokens, n_rows))).float().cuda()
    outs = [residual.clone() for _ in range(3)]
    for out in outs:
        launch(device, workspace, [product], Epilogue.RESIDUAL, x, [Output(out.data_ptr(), "fp32")])
    values = x[:, :k].double()
    expected = residual.double() + values @ product.operand.T
    error = bound(values, product.operand) + 2.0**-23 * expected.abs()
    assert bool(((outs[0].double() - expected).abs() <= error).all())
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("n_tokens", [64, 1000])
def test_matrices_of_several_formats(device: CudaDevice, workspace: int, n_tokens: int, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    k, rows = 1280, {"Q4G64_F16S": 4096, "Q5G64_F16S": 1300, "BF16": 48}
    products = [Product(rng, name, n, k) for name, n in [*rows.items(), ("BF16", 48)]]
    x = activations(rng, n_tokens, k)
    outs = [torch.full((n_tokens, p.matrix.n_rows), torch.nan, device="cuda") for p in products]
    launch(device, workspace, products, Epilogue.STORE, x, [Output(out.data_ptr(), "fp32") for out in outs])
    values = x[:, :k].double()
    for product, out in zip(products, outs, strict=True):
        difference = (out.double() - values @ product.operand.T).abs()
        assert bool((difference <= bound(values, product.operand)).all())
