"""A mixture of experts in rounds on the card: routing, forced routing against float64, boundary column counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ninfer_runtime.backends.cuda.launch import CudaDevice
from tests.runtime.cuda.moe_rig import MoeRig, Shape
from tests.runtime.cuda.test_moe_round import logits_of, run_forced

pytestmark = pytest.mark.gpu

COLUMNS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 47, 48)
PUBLISHED = Shape(hidden=512, width=128, shared_width=128, n_experts=256, top_k=8)
WIDE = Shape(hidden=2048, width=512, shared_width=512, n_experts=16, top_k=8, down="Q6G64_F16S")


class Card:
    """The card with the emulated device's ways of making buffers; fresh ones are NaN."""

    def __init__(self) -> None:
        self._device = CudaDevice()
        self._taken: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def put(self, array: npt.NDArray[Any]) -> int:
        pointer = self._device.allocate(array.nbytes)
        self._taken.append(pointer)
        self._device.upload(pointer, np.ascontiguousarray(array))
        return pointer

    def empty(self, n_bytes: int) -> int:
        return self.put(np.full(n_bytes, 0xFF, np.uint8))

    def get(self, pointer: int, dtype: type[np.generic], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        self._device.synchronize()
        out = np.empty(shape, dtype)
        self._device.download(pointer, out)
        return out

    def close(self) -> None:
        """Give the buffers back."""
        self._device.synchronize()
        for pointer in self._taken:
            self._device.free(pointer)


@pytest.fixture
def card() -> Iterator[Card]:
    device = Card()
    yield device
    device.close()


@pytest.mark.parametrize("load", ["random", "crowded", "tied"])
@pytest.mark.parametrize("shape", [PUBLISHED, WIDE], ids=["256 experts", "2048 wide"])
def test_experts_are_the_float64_ones_at_boundary_columns(card: Card, shape: Shape, load: str, fresh_seed: int) -> None:
    rig = MoeRig(card, shape, max(COLUMNS), fresh_seed)
    for n_columns in COLUMNS:
        logits = logits_of(load, shape, n_columns, rig.rng)
        run_forced(rig, n_columns, logits, rms=n_columns % 2 == 1)


@pytest.mark.parametrize("format", ["BF16", "W8G32_F16S", "NVFP4", "Q4G64_F16S", "Q5G64_F16S"])
def test_every_format_serves_every_matrix(card: Card, format: str, fresh_seed: int) -> None:
    shape = Shape(hidden=640, width=192, shared_width=256, n_experts=24, top_k=6, gate_up=format, down=format)
    rig = MoeRig(card, shape, 40, fresh_seed)
    for n_columns in (1, 8, 40):
        run_forced(rig, n_columns, logits_of("random", shape, n_columns, rig.rng), rms=True)


def test_thousand_launches_have_the_same_bits(card: Card, fresh_seed: int) -> None:
    """All three launches behind each other, whatever runs beside whatever."""
    rig = MoeRig(card, PUBLISHED, 8, fresh_seed)
    pointer, _ = rig.columns(8)
    residual, _ = rig.residual(8)
    zero = np.zeros((8, PUBLISHED.hidden), np.float32)
    first = b""
    for _ in range(50):
        card.upload(residual.x, zero)
        for _ in range(20):
            rig.op.launch(rig.stream, 8, pointer, None, residual)
        found = card.get(residual.x, np.float32, zero.shape).tobytes()
        assert not first or found == first
        first = found
