"""Embedding and norm on the card, at boundary numbers of tokens and the widths of real models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ninfer_runtime.backends.cuda.launch import CudaDevice
from ninfer_runtime.backends.cuda.ops.embed import FORMATS
from ninfer_runtime.backends.cuda.ops.rms_norm import OUTPUTS, RmsNormOutput
from tests.runtime.cuda.small_ops import check_embed, check_own_rows, check_rms_norm

pytestmark = pytest.mark.gpu

TOKENS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 47, 48, 64, 65, 127, 128, 255, 1000, 1024)


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    card = CudaDevice()
    yield card
    card.close()


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_every_format_equal_the_codec(device: CudaDevice, format: str, fresh_seed: int) -> None:
    check_embed(device, format, 5120, 48, fresh_seed)
    check_embed(device, format, 136, 9, fresh_seed)


@pytest.mark.parametrize("n_tokens", TOKENS)
def test_rows_of_any_number_of_tokens(device: CudaDevice, n_tokens: int, fresh_seed: int) -> None:
    check_embed(device, "Q6G64_F16S", 5120, n_tokens, fresh_seed)


def test_rows_of_the_caller_take_the_place_of_tokens(device: CudaDevice, fresh_seed: int) -> None:
    check_own_rows(device, fresh_seed)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("n_rows", TOKENS)
def test_norms_equal_the_reference(device: CudaDevice, n_rows: int, output: RmsNormOutput, fresh_seed: int) -> None:
    check_rms_norm(device, 5120, output, n_rows, fresh_seed)
