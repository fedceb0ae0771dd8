"""The repack kernel under the emulator: bytes equal to the numpy packer's, whatever the chunks."""

from math import gcd

import numpy as np
import pytest

from ninfer_format.codec import pack_tensor
from ninfer_format.formats import layout_for
from ninfer_format.numeric.nvfp4 import MAX_SCALE
from ninfer_runtime.backends.cuda.loader import Upload
from ninfer_runtime.backends.cuda.ops.repack import uploads
from ninfer_runtime.backends.cuda.packing import TILE_FORMATS, PackedMatrix, pack_matrix, unpack_matrix
from tests.emulator.device import EmulatedDevice

FILE_BEGIN = 4096


def random_object(matrix: PackedMatrix, seed: int) -> tuple[bytes, np.ndarray]:
    """Payload as stored in a file, and the packed bytes of the numpy packer."""
    rng = np.random.default_rng(seed)
    shape = (matrix.n_rows, matrix.k)
    if not matrix.tile.group:
        words = rng.integers(0, 0x7F00, shape).astype(np.uint16)
        return words.tobytes(), pack_matrix(matrix, words, None)
    if matrix.tile.floating:
        words = rng.integers(0, 16, shape).astype(np.uint8)
        scales = rng.integers(0, MAX_SCALE + 1, (matrix.n_rows, matrix.k // 16)).astype(np.uint8)
        payload = pack_tensor(words, scales, np.float32(3), matrix.format, layout_for(matrix.format))
        return payload, pack_matrix(matrix, words, scales)
    half = 1 << (matrix.tile.bits - 1)
    codes = rng.integers(-half + (matrix.tile.bits == 8), half, shape).astype(np.int8)
    scales = rng.integers(1, 0x7C00, (matrix.n_rows, -(-matrix.k // matrix.tile.group))).astype(np.uint16)
    payload = pack_tensor(codes, scales, None, matrix.format, layout_for(matrix.format))
    return payload, pack_matrix(matrix, codes, scales)


def run(device: EmulatedDevice, plan: list[Upload], file: bytes) -> None:
    """What the loader does: stage each upload's pieces, then finish it."""
    stream = device.stream()
    for upload in plan:
        staging = device.empty(upload.staging_bytes)
        for piece in upload.pieces:
            part = np.frombuffer(file, np.uint8)[piece.begin : piece.begin + piece.n_bytes].copy()
            assert part.size == piece.n_bytes
            assert piece.target + piece.n_bytes <= upload.staging_bytes
            device.upload(staging + piece.target, part)
        assert upload.finish is not None
        upload.finish(staging, stream)
        stream.synchronize()
        device.free(staging)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("n,k", [(1, 1), (8, 64), (23, 130), (70, 257)])
@pytest.mark.parametrize("format", sorted(TILE_FORMATS.keys() - {"NVFP4"}))
def test_repacked_bytes_are_the_packers(format: str, n: int, k: int, interleaved: bool, fresh_seed: int) -> None:
    matrix = PackedMatrix("m", format, 2 * n if interleaved else n, k, interleaved=interleaved)
    check_repacked(matrix, fresh_seed)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("n,k", [(128, 64), (384, 192), (640, 128)])
def test_nvfp4_is_repacked_from_swizzled_scales(n: int, k: int, interleaved: bool, fresh_seed: int) -> None:
    check_repacked(PackedMatrix("m", "NVFP4", n, k, interleaved=interleaved), fresh_seed)


def check_repacked(matrix: PackedMatrix, seed: int) -> None:
    """The same bytes, however much is staged at a time."""
    payload, expected = random_object(matrix, seed)
    with EmulatedDevice(n_sms=2) as device:
        matrix = matrix.at(device.empty(matrix.n_bytes))
        for staging in (1, 30_000, 1 << 30):
            device.fill(matrix.pointer, 0xFF, matrix.n_bytes, device.stream())
            plan = uploads(device, matrix, FILE_BEGIN, staging)
            # Scales of 128 rows are read twice where a run of rows begins among them.
            more = 2 * len(plan) * 128 * matrix.k // 16 if matrix.tile.floating else 0
            assert staging == 1 or sum(upload.n_bytes for upload in plan) <= len(payload) + more
            run(device, plan, bytes(FILE_BEGIN) + payload)
            assert np.array_equal(device.get(matrix.pointer, np.uint8, matrix.n_bytes), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("n", [8, 21, 64])
@pytest.mark.parametrize("format", ["Q4G64_F16S", "Q6G64_F16S", "BF16", "NVFP4"])
def test_experts_of_a_bank_are_packed_each_by_itself(format: str, n: int, interleaved: bool, fresh_seed: int) -> None:
    n_experts, n_rows, k = 3, 2 * n if interleaved else n, 130
    if format == "NVFP4":  # as many experts and columns as fill its tiles
        n_experts, k = 128 // gcd(n_rows, 128), 192
    bank = PackedMatrix("bank", format, n_experts * n_rows, k, interleaved=interleaved, n_experts=n_experts)
    payload, expected = random_object(bank, fresh_seed)
    with EmulatedDevice(n_sms=2) as device:
        bank = bank.at(device.empty(bank.n_bytes))
        for staging in (1, 40_000, 1 << 30):
            device.fill(bank.pointer, 0xFF, bank.n_bytes, device.stream())
            run(device, uploads(device, bank, FILE_BEGIN, staging), bytes(FILE_BEGIN) + payload)
            assert np.array_equal(device.get(bank.pointer, np.uint8, bank.n_bytes), expected)
    words = unpack_matrix(bank, expected)[0]
    one = PackedMatrix("one", format, n_rows, k, interleaved=interleaved)
    for e in range(n_experts):
        own = expected[e * one.n_bytes : (e + 1) * one.n_bytes]
        assert np.array_equal(unpack_matrix(one, own)[0], words[e * n_rows : (e + 1) * n_rows])


def test_chunks_stay_within_the_staging_memory() -> None:
    matrix = PackedMatrix("head", "Q6G64_F16S", 248320, 5120)
    with EmulatedDevice() as device:
        plan = uploads(device, matrix, 0, 64 << 20)
    assert max(upload.staging_bytes for upload in plan) <= 64 << 20
    assert sum(upload.n_bytes for upload in plan) == 993_280_000
    assert len(plan) == 15
