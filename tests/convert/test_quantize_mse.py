"""Group scales of least squared error on torch: the words of numpy, figures, refusals, and gains on trained weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ninfer_convert.checkpoint import Checkpoint
from ninfer_convert.quantize import group_search
from ninfer_convert.quantize.bad_value import BadValue
from ninfer_convert.quantize.groupwise import encode_matrix, plane_rows
from ninfer_convert.quantize.groupwise_mse import ColumnImportance, GroupMseEncoder, SearchedSums, encode_matrix_mse
from ninfer_format import EncodeError, decode_tensor, pack_tensor
from ninfer_format.formats import NUMERIC_FORMATS, ROW_SPLIT, row_split_planes
from ninfer_format.numeric.grouped_mse import quantize_groups_mse
from tests.format.test_grouped_mse import SHARE_OF_NORMAL, drawn

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny"
FORMATS = ("Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S")
# Columns around the group of 32, the group of 64 and the padding to 128; one row wider than a step.
SHAPES = ((1, 1), (3, 31), (2, 32), (5, 33), (3, 64), (4, 65), (17, 127), (2, 128), (3, 129), (2, 2100))

Words = NDArray[np.uint16]
Floats = NDArray[np.float32]


def bf16_words(values: Floats) -> Words:
    """The leading halves of float32 words: BF16 by truncation."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def floats(words: Words) -> Floats:
    return (words.astype(np.uint32) << 16).view(np.float32)


def numpy_payload(values: Floats, format: str, importance: Floats | None = None) -> bytes:
    words = quantize_groups_mse(values, NUMERIC_FORMATS[format], importance)
    return pack_tensor(words.codes, words.scales, None, format, ROW_SPLIT)


def test_the_search_is_scripted_where_torch_can() -> None:
    assert isinstance(group_search.scripted_search(), torch.jit.ScriptFunction)


@pytest.mark.parametrize("scripted", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_payloads_equal_numpy_at_boundary_shapes(
    format: str, scripted: bool, fresh_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not scripted:
        monkeypatch.setattr(group_search, "scripted_search", lambda: group_search.search_rows)
    rng = np.random.default_rng(fresh_seed)
    for shape in SHAPES:
        values = rng.standard_normal(shape, np.float32)
        words = bf16_words(values)
        for lanes in (1, 1 << 12):
            assert encode_matrix_mse(values, format, lanes=lanes)[0] == numpy_payload(values, format), shape
            assert encode_matrix_mse(words, format, lanes=lanes)[0] == numpy_payload(floats(words), format), shape


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_payloads_equal_numpy_for_every_distribution(format: str, weighted: bool, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    for name, values in drawn(fresh_seed).items():
        importance = None
        if weighted:
            importance = np.exp(4 * rng.standard_normal(values.shape[1])).astype(np.float32)
            importance[rng.random(values.shape[1]) < 0.2] = 0
        words = bf16_words(values)
        sources: list[tuple[Any, Floats]] = [(values, values), (words, floats(words))]
        for rows, source in sources:
            payload, _ = encode_matrix_mse(rows, format, importance=importance, lanes=int(rng.integers(256, 4096)))
            assert payload == numpy_payload(source, format, importance), name


@pytest.mark.parametrize("format", FORMATS)
def test_figures_are_those_of_the_payload(format: str, fresh_seed: int) -> None:
    values = np.random.default_rng(fresh_seed).standard_normal((200, 300), np.float32)
    payload, sums = encode_matrix_mse(values, format)
    errors = values.astype(np.float64) - decode_tensor(payload, format, ROW_SPLIT, values.shape)
    _, canonical = encode_matrix(values, format)
    assert sums.figures.squares == pytest.approx((errors**2).sum(), rel=1e-5)
    assert sums.figures.largest == pytest.approx(np.abs(errors).max(), rel=1e-5)
    assert sums.weighted == pytest.approx(sums.figures.squares, rel=1e-5)
    assert sums.weighted_canonical == pytest.approx(canonical.squares, rel=1e-5)
    assert sums.removed == pytest.approx(SHARE_OF_NORMAL[format], abs=0.04)


def test_figures_of_pieces_add_up(fresh_seed: int) -> None:
    values = np.random.default_rng(fresh_seed).standard_normal((64, 200), np.float32)
    format, planes = "Q5G64_F16S", row_split_planes("Q5G64_F16S", values.shape)
    columns = np.linspace(0, 2, 200, dtype=np.float32)
    importance, encoder, sums = ColumnImportance(columns), GroupMseEncoder(1 << 12), SearchedSums()
    payload = np.zeros(planes.total_bytes, np.uint8)
    for begin, end in ((40, 64), (0, 7), (7, 40)):
        out = plane_rows(payload, planes, begin, end)
        fmt = NUMERIC_FORMATS[format]
        sums = sums.merged(encoder.encode(values[begin:end], fmt, out, importance=importance, first_row=begin))
    expected, whole = encode_matrix_mse(values, format, importance=columns)
    assert payload.tobytes() == expected
    assert sums.removed == pytest.approx(whole.removed, rel=1e-6)
    assert sums.figures.squares == pytest.approx(whole.figures.squares, rel=1e-6)
    assert SearchedSums().removed == 0


@pytest.mark.parametrize("format", FORMATS)
def test_values_that_cannot_be_stored_are_refused_as_by_the_canonical_encoder(format: str) -> None:
    qmax = NUMERIC_FORMATS[format].qmax
    for bad in (np.nan, np.inf, -np.inf, np.float32(65520 * qmax)):
        values = np.zeros((4, 100), np.float32)
        values[2, 71] = bad
        with pytest.raises(BadValue) as expected:
            encode_matrix(values, format)
        with pytest.raises(BadValue) as found:
            encode_matrix_mse(values, format)
        assert str(found.value) == str(expected.value)
        assert (found.value.row, found.value.column) == (2, 71)


def test_importance_must_belong_to_the_matrix() -> None:
    with pytest.raises(EncodeError, match="32 columns does not belong to a matrix of 64"):
        encode_matrix_mse(np.ones((2, 64), np.float32), "Q4G64_F16S", importance=np.ones(32, np.float32))


def trained_weights() -> list[tuple[str, Words]]:
    """Every matrix of the tiny trained checkpoints, banks as one matrix."""
    found = []
    for model in ("dense", "moe"):
        with Checkpoint.open(TINY / model) as checkpoint:
            for name, tensor in checkpoint.tensors.items():
                n_rows = int(np.prod(tensor.shape[:-1]))
                if len(tensor.shape) >= 2 and tensor.shape[-1] >= 64 and n_rows >= 64:
                    found.append((f"{model}/{name}", checkpoint.read_words(name, 0, n_rows)))
    return found


@pytest.mark.parametrize("format, least, on_average", [(FORMATS[0], 0.19, 0.21), (FORMATS[3], 0.06, 0.11)])
def test_trained_weights_lose_a_stated_share_of_their_error(format: str, least: float, on_average: float) -> None:
    weights = trained_weights()
    assert len(weights) > 60
    removed = {name: encode_matrix_mse(words, format)[1].removed for name, words in weights}
    assert min(removed.values()) > least, min(removed, key=lambda name: removed[name])
    assert float(np.mean(list(removed.values()))) > on_average


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_cuda_payloads_equal_cpu_payloads(format: str, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    cases: dict[str, Any] = dict(drawn(fresh_seed))
    cases["every magnitude"] = np.arange(0x4800, dtype=np.uint16).reshape(-1, 64)
    cases["large"] = bf16_words(rng.standard_t(4, (4096, 4096)).astype(np.float32))
    encode: Callable[..., Any] = encode_matrix_mse
    for name, values in cases.items():
        for importance in (None, np.exp(3 * rng.standard_normal(values.shape[1])).astype(np.float32)):
            cpu, cuda = (encode(values, format, importance=importance, device=d)[0] for d in ("cpu", "cuda"))
            assert cuda == cpu, name
