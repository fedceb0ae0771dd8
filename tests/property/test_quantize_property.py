"""Any finite BF16 matrix: the torch encoder's bytes are the numpy encoder's, whatever the step size."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ninfer_convert.quantize.groupwise import encode_matrix
from ninfer_convert.quantize.scales import scale_table
from ninfer_format import NUMERIC_FORMATS, decode_tensor, encode_tensor
from ninfer_format.formats import ROW_SPLIT

FORMATS = st.sampled_from(("Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S"))


@st.composite
def matrices(draw: st.DrawFn) -> tuple[str, NDArray[np.uint16]]:
    """A format and BF16 words [N, K] that it can hold; exponents from a drawn range, with zeros and subnormals."""
    format = draw(FORMATS)
    shape = draw(st.integers(1, 6)), draw(st.integers(1, 300))
    top = int(np.float32(scale_table(NUMERIC_FORMATS[format]).first_refused).view(np.uint32)) >> 16
    low = draw(st.integers(0, top - 1))
    high = draw(st.integers(low + 1, top))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    magnitudes = rng.integers(low, high, shape, dtype=np.uint16)
    magnitudes[rng.random(shape) < draw(st.sampled_from((0.0, 0.3, 0.98)))] = 0
    signs = rng.integers(0, 2, shape, dtype=np.uint16) << np.uint16(15)
    return format, (magnitudes | signs).astype(np.uint16)


@settings(max_examples=300, deadline=None)
@given(matrices(), st.sampled_from((128, 384, 1 << 12, 1 << 19)))
def test_torch_bytes_equal_numpy_bytes(matrix: tuple[str, NDArray[np.uint16]], lanes: int) -> None:
    format, words = matrix
    values = (words.astype(np.uint32) << 16).view(np.float32)
    expected = encode_tensor(values, format, ROW_SPLIT)
    payload, sums = encode_matrix(words, format, lanes=lanes)
    assert payload == expected
    assert encode_matrix(values, format, lanes=lanes)[0] == expected
    error = np.abs(values.astype(np.float64) - decode_tensor(payload, format, ROW_SPLIT, words.shape)).max()
    assert np.isclose(sums.largest, error, rtol=1e-6, atol=0)
