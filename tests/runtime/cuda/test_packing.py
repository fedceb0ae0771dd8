"""The packed device layout of weights: what is packed comes back, and the positions the kernels rely on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_format.errors import SignatureError
from ninfer_format.numeric.nvfp4 import MAX_SCALE
from ninfer_runtime.backends.cuda.packing import (
    TILE_FORMATS,
    PackedMatrix,
    activation_stride,
    pack_matrix,
    pair_columns,
    unpack_matrix,
)


def random_words(matrix: PackedMatrix, seed: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes over the whole range and any scale words; BF16 words for BF16."""
    rng = np.random.default_rng(seed)
    tile = matrix.tile
    if tile.floating:
        n_blocks = -(-matrix.k // tile.group)
        scales8 = rng.integers(0, MAX_SCALE + 1, (matrix.n_rows, n_blocks), np.uint8)
        return rng.integers(0, 16, (matrix.n_rows, matrix.k)), scales8
    if not tile.group:
        return rng.integers(0, 1 << 16, (matrix.n_rows, matrix.k)), None
    half = 1 << (tile.bits - 1)
    codes = rng.integers(-half, half, (matrix.n_rows, matrix.k))
    scales = rng.integers(0, 0x7C00, (matrix.n_rows, -(-matrix.k // tile.group))).astype(np.uint16)
    return codes, scales


@given(
    format=st.sampled_from(sorted(TILE_FORMATS)),
    n=st.integers(1, 70),
    k=st.integers(1, 400),
    interleaved=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_unpacking_returns_what_was_packed(format: str, n: int, k: int, interleaved: bool, seed: int) -> None:
    matrix = PackedMatrix("m", format, 2 * n if interleaved else n, k, interleaved=interleaved)
    codes, scales = random_words(matrix, seed)
    packed = pack_matrix(matrix, codes, scales)
    assert packed.size == matrix.n_bytes
    back, back_scales = unpack_matrix(matrix, packed)
    assert np.array_equal(back, codes)
    if scales is None:
        assert back_scales is None
    else:
        assert back_scales is not None
        assert np.array_equal(back_scales, scales)


def test_every_column_of_a_group_belongs_to_one_pair() -> None:
    columns = pair_columns()
    for rows in (columns[:, 0::2], columns[:, 1::2]):  # pairs of row g, pairs of row g + 8
        assert sorted(rows.reshape(-1)) == list(range(64))


def test_operand_b_of_a_lane_is_two_runs_of_eight_columns() -> None:
    for t, pairs in enumerate(pair_columns()):
        order = pairs.reshape(4, 4, 2)[:, 0::2].reshape(-1)  # a0, a2 of each mma: what b0, b1 must hold
        assert list(order) == [*range(8 * t, 8 * t + 8), *range(32 + 8 * t, 40 + 8 * t)]


def test_block_sizes() -> None:
    sizes = {name: (tile.step, tile.block_bytes) for name, tile in TILE_FORMATS.items()}
    assert sizes == {
        "Q4G64_F16S": (128, 1088),
        "Q5G64_F16S": (128, 1344),
        "Q6G64_F16S": (128, 1600),
        "W8G32_F16S": (64, 1088),
        "BF16": (64, 2048),
        "NVFP4": (128, 1152),
    }


def test_packed_bytes_of_the_large_matrices_stay_near_the_file() -> None:
    gate_up = PackedMatrix("gate_up", "Q4G64_F16S", 34816, 5120, interleaved=True)
    assert gate_up.n_bytes == 34816 * 5120 // 64 * 34
    fp4 = PackedMatrix("gate_up", "NVFP4", 34816, 5120, interleaved=True)
    assert fp4.n_bytes == 34816 * 5120 // 16 * 9
    head = PackedMatrix("head", "Q6G64_F16S", 248320, 5120)
    assert head.n_bytes == 993_280_000


def test_lane_zero_word_zero_of_q4() -> None:
    codes = np.arange(16 * 64).reshape(16, 64) % 16 - 8
    packed = pack_matrix(PackedMatrix("m", "Q4G64_F16S", 16, 64), codes, np.ones((16, 1), np.uint16))
    word = int(packed[:4].view(np.uint32)[0])
    u = codes + 8
    expected = 0
    for j, column in enumerate((0, 4, 32, 36)):  # a0 of the four mma: row 0, columns c and c + 1
        expected |= int(u[0, column]) << (4 * j) | int(u[0, column + 1]) << (4 * j + 16)
    assert word == expected


def test_words_of_nvfp4_are_registers_of_the_fp4_product(fresh_seed: int) -> None:
    """Word w of a lane: the eight codes of a_w of mma.m16n8k64, even columns in the low half, odd ones in the high."""
    matrix = PackedMatrix("m", "NVFP4", 16, 256)
    codes, scales = random_words(matrix, fresh_seed)
    assert scales is not None
    blocks = pack_matrix(matrix, codes, scales).reshape(2, 1152)
    words = blocks[:, :1024].copy().view(np.uint32).reshape(2, 2, 32, 4)
    for step, group, lane, w in np.ndindex(words.shape):
        row, column = lane // 4 + 8 * (w % 2), 128 * step + 64 * group + 32 * (w // 2) + 8 * (lane % 4)
        nibbles = int(words[step, group, lane, w]) >> np.arange(0, 32, 4) & 15
        assert list(nibbles) == [*codes[row, column : column + 8 : 2], *codes[row, column + 1 : column + 9 : 2]]
    stored = blocks[:, 1024:].reshape(2, 8, 2, 8)
    for row in range(16):
        assert np.array_equal(stored[:, row % 8, row // 8], scales[row].reshape(2, 8))


def test_interleaved_rows_pair_gate_with_up() -> None:
    codes = np.repeat(np.arange(32)[:, None], 64, axis=1)  # row number as the BF16 word
    packed = pack_matrix(PackedMatrix("m", "BF16", 32, 64, interleaved=True), codes, None)
    tiles = packed.reshape(2, -1, 2048)
    first = tiles[1, 0].view(np.uint32).reshape(4, 32, 4)
    lane = 4 * 3  # g = 3, t = 0
    assert first[0, lane, 0] == 11 * 0x10001  # gate row 8 + 3
    assert first[0, lane, 1] == 27 * 0x10001  # its up row, 16 + 11


def test_formats_without_a_packed_layout_and_odd_gate_up_are_refused() -> None:
    with pytest.raises(SignatureError, match="FP32"):
        PackedMatrix("m", "FP32", 128, 64)
    with pytest.raises(SignatureError, match="equal number"):
        PackedMatrix("m", "BF16", 3, 64, interleaved=True)


def test_activation_rows_end_on_whole_groups_of_columns() -> None:
    assert [activation_stride(k) for k in (1, 128, 129, 5120)] == [128, 128, 256, 5120]
