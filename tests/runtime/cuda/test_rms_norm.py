"""The norm against the reference's formula, in every output form and at odd widths."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ninfer_format.errors import UnsupportedError
from ninfer_runtime.backends.cuda.ops.rms_norm import OUTPUTS, RmsNormOutput, kernel_spec
from tests.emulator.device import EmulatedDevice
from tests.runtime.cuda.small_ops import check_rms_norm


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice() as device:
        yield device


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("hidden", [4, 128, 132, 2048, 5120])
def test_rows_equal_the_reference(device: EmulatedDevice, hidden: int, output: RmsNormOutput, fresh_seed: int) -> None:
    check_rms_norm(device, hidden, output, 6, fresh_seed)


def test_a_width_that_is_not_whole_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="hidden width 130"):
        kernel_spec(130, "bf16")
