"""The NVFP4 encoder on torch: the words of the numpy encoder, its passes and pieces, and errors beside a peer's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ninfer_convert.quantize import nvfp4
from ninfer_convert.quantize.bad_value import BadValue
from ninfer_convert.quantize.nvfp4 import (
    EncodedSums,
    Importance,
    MatrixChoice,
    Nvfp4Encoder,
    accepted,
    block_rows,
    encode_matrix,
    largest_magnitude,
    store_divisor,
)
from ninfer_convert.quantize.nvfp4_block import encode_rows, scripted_rows
from ninfer_format import EncodeError, pack_tensor
from ninfer_format.formats import BLOCKSCALE, blockscale_planes
from ninfer_format.numeric import nvfp4_divisor
from ninfer_format.numeric.nvfp4_divisor import max_divisor, sample_bands
from ninfer_format.numeric.nvfp4_encode import Method, Nvfp4Words, encode_nvfp4
from scripts.compare_nvfp4 import (
    DTYPES,
    GOLDEN,
    OBSERVERS,
    decoded_words,
    digest,
    drawn_matrices,
    matrices,
    relative_error,
)
from tests.format.test_nvfp4_encode import misleading_matrix, shapes_of_weights, squared_error

Words = NDArray[np.uint16]
Floats = NDArray[np.float32]
METHODS: tuple[Method, ...] = ("max", "mse")
# Rows and blocks around the sizes that the loops step by; one row wider than the step.
SHAPES = ((1, 16), (2, 32), (3, 48), (17, 80), (32, 64), (5, 2048))


def bf16_words(values: Floats) -> Words:
    """The leading halves of float32 words: BF16 by truncation."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def floats(words: Words) -> Floats:
    return (words.astype(np.uint32) << 16).view(np.float32)


def assert_same(found: Nvfp4Words, expected: Nvfp4Words, what: object = "") -> None:
    assert found.divisor == expected.divisor, what
    assert (found.scales == expected.scales).all(), what
    assert (found.codes == expected.codes).all(), what


@pytest.fixture(params=["scripted", "plain"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The inner loop under TorchScript and as plain Python."""
    if request.param == "plain":
        monkeypatch.setattr(nvfp4, "scripted_rows", lambda: encode_rows)
    return str(request.param)


def test_the_loop_is_scripted_where_torch_can() -> None:
    assert isinstance(scripted_rows(), torch.jit.ScriptFunction)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_words_equal_numpy_at_boundary_shapes(
    loop: str, method: Method, shape: tuple[int, int], fresh_seed: int
) -> None:
    rng = np.random.default_rng(fresh_seed)
    values = rng.standard_normal(shape, np.float32)
    words = bf16_words(values)
    for lanes in (shape[1], 3 * shape[1] + 1, 1 << 14):
        assert_same(encode_matrix(values, method=method, lanes=lanes)[0], encode_nvfp4(values, method=method))
        assert_same(encode_matrix(words, method=method, lanes=lanes)[0], encode_nvfp4(floats(words), method=method))


@pytest.mark.parametrize("weighted", [False, True])
def test_words_equal_numpy_for_every_distribution(weighted: bool, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    for name, values in shapes_of_weights(fresh_seed).items():
        importance = None
        if weighted:
            importance = np.exp(4 * rng.standard_normal(values.shape[1])).astype(np.float32)
            importance[rng.random(values.shape[1]) < 0.2] = 0
        else:
            assert_same(encode_matrix(values)[0], encode_nvfp4(values), name)
        words = bf16_words(values)
        sources: list[tuple[Any, Floats]] = [(values, values), (words, floats(words))]
        for rows, source in sources:
            expected = encode_nvfp4(source, method="mse", importance=importance)
            lanes = int(rng.integers(values.shape[1], 4096))
            assert_same(encode_matrix(rows, method="mse", importance=importance, lanes=lanes)[0], expected, name)


def test_every_bf16_magnitude_gets_the_words_of_numpy() -> None:
    magnitudes = np.arange(0x7F80, dtype=np.uint16).reshape(-1, 32)
    for method in METHODS:
        assert_same(
            encode_matrix(magnitudes, method=method)[0], encode_nvfp4(floats(magnitudes), method=method), method
        )


def test_results_do_not_depend_on_torch_threads(fresh_seed: int) -> None:
    values = np.random.default_rng(fresh_seed).standard_normal((300, 512), np.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, _ = encode_matrix(values, method="mse")
        torch.set_num_threads(4)
        four, _ = encode_matrix(values, method="mse")
    finally:
        torch.set_num_threads(before)
    assert_same(four, one)


@pytest.mark.parametrize("method", METHODS)
def test_error_figures_are_those_of_the_words(method: Method, fresh_seed: int) -> None:
    values = np.random.default_rng(fresh_seed).standard_t(4, (200, 256)).astype(np.float32)
    words, figures = encode_matrix(values, method=method)
    errors = values - decoded_words(words)
    assert figures.largest == pytest.approx(np.abs(errors).max(), rel=1e-5)
    assert figures.squares == pytest.approx((errors**2).sum(), rel=1e-5)
    assert figures.source_squares == pytest.approx((values.astype(np.float64) ** 2).sum(), rel=1e-5)


# --- passes and pieces ----------------------------------------------------------------------------------------------


def encode_in_pieces(
    values: Floats | Words, method: Method, pieces: list[tuple[int, int]], importance: Importance | None = None
) -> tuple[bytes, MatrixChoice, EncodedSums]:
    """A payload as a pipeline makes it: the largest magnitude, the sample, pieces of rows in the given order."""
    shape = values.shape
    encoder = Nvfp4Encoder(max(shape[1], 1 << 12))
    amax = max(largest_magnitude(values[begin:end], begin) for begin, end in pieces)
    sample = [values[begin:end] for begin, end in sample_bands(*shape)]
    choice = encoder.settle(amax, method, sample, importance)
    payload = np.zeros(blockscale_planes(shape).total_bytes, np.uint8)
    while True:
        sums = EncodedSums()
        for begin, end in pieces:
            out = block_rows(payload, shape, begin, end)
            sums = sums.merged(encoder.encode_into(values[begin:end], choice, out, importance=importance))
        if accepted(choice, sums):
            break
        choice = choice.fallback()
    store_divisor(payload, shape, choice.divisor)
    return payload.tobytes(), choice, sums


@pytest.mark.parametrize("method", METHODS)
def test_pieces_in_any_order_make_the_payload_of_the_whole(method: Method, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    words = bf16_words(rng.standard_t(3, (512, 192)).astype(np.float32))
    expected = pack_tensor(*encode_nvfp4(floats(words), method=method), "NVFP4", BLOCKSCALE)
    for pieces in ([(0, 512)], [(384, 512), (0, 128), (128, 384)], [(i, i + 128) for i in (256, 0, 384, 128)]):
        assert encode_in_pieces(words, method, pieces)[0] == expected


def test_a_sample_that_misleads_ends_in_the_divisor_of_max(monkeypatch: pytest.MonkeyPatch) -> None:
    values = misleading_matrix()
    monkeypatch.setattr(nvfp4_divisor, "SAMPLE_VALUES", 2 * values.shape[1])
    plain = max_divisor(np.float32(1.9))
    encoder = Nvfp4Encoder(1 << 12)
    first = encoder.settle(np.float32(1.9), "mse", [values[b:e] for b, e in sample_bands(*values.shape)])
    assert first.guarded
    payload, choice, sums = encode_in_pieces(values, "mse", [(0, 128)])
    assert choice == MatrixChoice("mse", plain, plain)
    assert sums.error.of_weights(plain) <= sums.error_of_max.of_weights(plain)
    assert payload == pack_tensor(*encode_nvfp4(values, method="mse"), "NVFP4", BLOCKSCALE)
    assert_same(encode_matrix(values, method="mse")[0], encode_nvfp4(values, method="mse"))


def test_exact_errors_of_both_methods_come_with_the_words(fresh_seed: int) -> None:
    values = np.random.default_rng(fresh_seed).standard_normal((256, 128), np.float32)
    _, choice, sums = encode_in_pieces(values, "mse", [(0, 128), (128, 256)])
    mse, plain = (encode_nvfp4(values, method=method) for method in ("mse", "max"))
    assert float(sums.error.of_weights(choice.divisor)) == pytest.approx(squared_error(values, mse), rel=1e-5)
    assert float(sums.error_of_max.of_weights(choice.plain)) == pytest.approx(squared_error(values, plain), rel=1e-5)


def test_planes_are_written_in_whole_row_tiles() -> None:
    payload = np.zeros(blockscale_planes((256, 64)).total_bytes, np.uint8)
    for begin, end in ((0, 100), (1, 129), (64, 128)):
        with pytest.raises(ValueError, match="tiles of 128"):
            block_rows(payload, (256, 64), begin, end)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -np.nan])
@pytest.mark.parametrize("bf16", [False, True])
def test_non_finite_values_are_found_by_place(bad: float, bf16: bool) -> None:
    values = np.linspace(-3e38, 3e38, 5 * 32, dtype=np.float32).reshape(5, 32)
    values[3, 9], values[4, 1] = bad, np.inf
    with pytest.raises(BadValue) as error:
        largest_magnitude(bf16_words(values) if bf16 else values, first_row=1000)
    assert (error.value.row, error.value.column) == (1003, 9)
    assert np.float32(error.value.value) == np.float32(bad) or np.isnan(bad)


@pytest.mark.parametrize("bf16", [False, True])
def test_largest_magnitude_of_either_sign(bf16: bool, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    for sign in (1, -1, 0):
        values = rng.standard_normal((7, 16), np.float32)
        values = np.abs(values) * np.float32(sign) if sign else values
        rows: Any = bf16_words(values) if bf16 else values
        expected = np.abs(floats(rows) if bf16 else rows).max()
        assert largest_magnitude(rows) == expected
    assert largest_magnitude(np.array([[-0.0, 0.0]], np.float32)) == 0


def test_importance_must_belong_to_the_matrix(fresh_seed: int) -> None:
    values = np.random.default_rng(fresh_seed).standard_normal((4, 64), np.float32)
    columns = np.ones(32, np.float32)
    with pytest.raises(EncodeError, match="32 columns does not belong to a matrix of 64"):
        encode_matrix(values, method="mse", importance=columns)
    with pytest.raises(EncodeError, match="method mse"):
        encode_matrix(values, method="max", importance=np.ones(64, np.float32))
    columns[7] = -1
    with pytest.raises(EncodeError, match="column 7 is -1"):
        Importance(columns)


def test_rows_wider_than_the_scratch_are_refused() -> None:
    encoder = Nvfp4Encoder(64)
    choice = MatrixChoice("max", np.float32(1), np.float32(1))
    with pytest.raises(ValueError, match="128 lanes exceed the encoder's 64"):
        encoder.encode(np.zeros((1, 128), np.float32), choice, np.empty((1, 64), np.uint8), np.empty((1, 8), np.uint8))


# --- beside a peer --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peer() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(GOLDEN.read_text())
    assert set(document["versions"]) >= {"llmcompressor", "compressed-tensors", "torch"}
    return document["matrices"]  # type: ignore[no-any-return]


def test_recorded_peer_covers_the_matrices_that_are_made_here(peer: dict[str, Any]) -> None:
    names = {name: digest(values) for name, values in matrices()}
    assert {name: entry["sha256"] for name, entry in peer.items()} == names
    assert len(names) > 60


def test_max_errs_no_more_than_the_peer_does_by_default(peer: dict[str, Any]) -> None:
    for name, values in matrices():
        error = relative_error(values, decoded_words(encode_matrix(values)[0]))
        assert error <= peer[name]["relative_squared_error"]["float32"]["memoryless_minmax"] * (1 + 1e-6), name


def test_mse_errs_less_than_the_peer_with_any_of_its_searches(peer: dict[str, Any]) -> None:
    for name, values in matrices():
        error = relative_error(values, decoded_words(encode_matrix(values, method="mse")[0]))
        for dtype in DTYPES:
            for observer in OBSERVERS:
                assert error < peer[name]["relative_squared_error"][dtype][observer], (name, dtype, observer)


# --- CUDA -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_cuda_words_equal_cpu_words(method: Method, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    cases: dict[str, Any] = dict(drawn_matrices()) | shapes_of_weights(fresh_seed)
    cases["every magnitude"] = np.arange(0x7F80, dtype=np.uint16).reshape(-1, 32)
    cases["large"] = bf16_words(rng.standard_t(4, (4096, 4096)).astype(np.float32))
    encode: Callable[..., Any] = encode_matrix
    for name, values in cases.items():
        k = values.shape[1]
        for importance in (None, np.exp(3 * rng.standard_normal(k)).astype(np.float32)):
            if importance is not None and method == "max":
                continue
            cpu, cuda = (
                encode(values, method=method, importance=importance, device=device)[0] for device in ("cpu", "cuda")
            )
            assert_same(cuda, cpu, name)
