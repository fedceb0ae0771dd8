"""The 16-byte prefix is checked against the file size before anything is read or allocated."""

import struct

import pytest

from ninfer_format.errors import ArtifactError, DirectoryError, NinferError, TruncatedError, VersionError
from ninfer_format.prefix import MAX_JSON_BYTES, Prefix, payload_offset_for, prefix_bytes, read_prefix


def head(json_bytes: int, version: int = 2) -> bytes:
    return b"NINFER\0" + bytes([version]) + struct.pack("<Q", json_bytes)


def test_prefix_round_trips_and_places_the_payload() -> None:
    assert prefix_bytes(2, 174_218) == head(174_218)
    assert read_prefix(head(174_218), 1 << 40) == Prefix(2, 174_218)
    assert read_prefix(head(174_218), 1 << 40).payload_offset == 176_128
    assert payload_offset_for(4080) == 4096
    assert payload_offset_for(4081) == 8192


@pytest.mark.parametrize("json_bytes", [2**64 - 1, 2**63, 4097, 4081])
def test_directory_longer_than_the_file_is_refused_with_both_numbers(json_bytes: int) -> None:
    with pytest.raises(TruncatedError, match=str(json_bytes)) as caught:
        read_prefix(head(json_bytes), 4096)
    assert "4080" in str(caught.value)


def test_empty_directory_and_directory_over_the_cap_are_refused() -> None:
    with pytest.raises(DirectoryError):
        read_prefix(head(0), 4096)
    with pytest.raises(DirectoryError, match=str(MAX_JSON_BYTES)):
        read_prefix(head(MAX_JSON_BYTES + 1), 1 << 40)
    assert read_prefix(head(MAX_JSON_BYTES), 1 << 40).json_bytes == MAX_JSON_BYTES


def test_file_that_ends_before_its_payload_area_is_refused() -> None:
    with pytest.raises(TruncatedError, match="4096"):
        read_prefix(head(100), 4095)
    assert read_prefix(head(100), 4096).payload_offset == 4096


@pytest.mark.parametrize("version", [0, 3, 4, 255])
def test_other_versions_are_unsupported(version: int) -> None:
    with pytest.raises(VersionError) as caught:
        read_prefix(head(100, version), 1 << 20)
    assert caught.value.exit_code == 4


def test_every_cut_of_the_prefix_is_refused() -> None:
    whole = head(100)
    for size in range(16):
        with pytest.raises(TruncatedError):
            read_prefix(whole[:size], size)


def test_every_flipped_bit_of_the_magic_is_refused() -> None:
    for bit in range(64):
        damaged = bytearray(head(100))
        damaged[bit // 8] ^= 1 << bit % 8
        if damaged[7] == 1 and bit // 8 == 7:
            continue
        with pytest.raises(NinferError) as caught:
            read_prefix(bytes(damaged), 1 << 20)
        assert isinstance(caught.value, ArtifactError | VersionError)
