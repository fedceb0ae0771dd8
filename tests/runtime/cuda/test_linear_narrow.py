"""linear_narrow.cu under the emulator: every variant, several matrices, outputs of both types against float64."""

import numpy as np
import pytest

from ninfer_format.errors import SignatureError
from ninfer_runtime.backends.cuda.ops.linear_narrow import LinearNarrow, NarrowOutput, block_tile_rows, spec
from ninfer_runtime.backends.cuda.packing import PackedMatrix
from tests.emulator.device import EmulatedDevice
from tests.runtime.cuda.test_linear_large import bound, check_bf16, random_activations, random_weight


@pytest.mark.parametrize("n_tokens", [1, 32, 49, 65])
@pytest.mark.parametrize(("rows", "k", "tile_rows"), [((48, 3), 264, 1), ((100,), 128, 2), ((257,), 700, 5)])
def test_product(rows: tuple[int, ...], k: int, tile_rows: int, n_tokens: int, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    with EmulatedDevice(n_sms=2) as device:
        weights = [random_weight(device, rng, "BF16", n, k) for n in rows]
        assert block_tile_rows([w.matrix for w in weights]) == tile_rows
        x, x_stride, values = random_activations(device, rng, n_tokens, k)
        wide = [device.empty(n_tokens * (n + 1) * 4) for n in rows]
        words = [device.empty(n_tokens * n * 2) for n in rows]
        op, stream = LinearNarrow(device, [w.matrix for w in weights]), device.stream()
        floats = [NarrowOutput(out, True, n + 1) for out, n in zip(wide, rows, strict=True)]
        op.launch(stream, n_tokens, x, x_stride, floats)
        op.launch(
            stream, n_tokens, x, x_stride, [NarrowOutput(out, False, n) for out, n in zip(words, rows, strict=True)]
        )
        for i, (weight, n) in enumerate(zip(weights, rows, strict=True)):
            expected, error = values @ weight.operand.T, bound(values, weight.operand)
            found = device.get(wide[i], np.float32, (n_tokens, n + 1))
            assert np.all(np.abs(found[:, :n] - expected) <= error)
            assert np.all(np.isnan(found[:, n]))
            check_bf16(device.get(words[i], np.uint16, (n_tokens, n)), expected, error)


def test_other_formats_are_refused() -> None:
    with pytest.raises(SignatureError):
        spec([PackedMatrix("router", "W8G32_F16S", 17, 128)])
