"""Rows of every stored format equal the codec's, rounded to bf16; the normed copy and the sum of squares follow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ninfer_format.errors import UnsupportedError
from ninfer_runtime.backends.cuda.ops.embed import FORMATS, Embed
from tests.emulator.device import EmulatedDevice
from tests.runtime.cuda.small_ops import N_ROWS, check_embed, check_own_rows


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice() as device:
        yield device


@pytest.mark.parametrize("hidden", [128, 136, 2104])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_equal_the_codec(device: EmulatedDevice, format: str, hidden: int, fresh_seed: int) -> None:
    check_embed(device, format, hidden, 7, fresh_seed)


def test_rows_of_the_caller_take_the_place_of_tokens(device: EmulatedDevice, fresh_seed: int) -> None:
    check_own_rows(device, fresh_seed)


@pytest.mark.parametrize(("format", "hidden"), [("NVFP4", 128), ("BF16", 132)])
def test_what_cannot_be_read_is_refused(device: EmulatedDevice, format: str, hidden: int) -> None:
    with pytest.raises(UnsupportedError):
        Embed(device, format, N_ROWS, hidden, 0)
