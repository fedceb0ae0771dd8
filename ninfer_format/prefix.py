"""The first 16 bytes of a container and the positions that follow from them (specs/container.md)."""

import struct
from dataclasses import dataclass

from ninfer_format.errors import ArtifactError, DirectoryError, TruncatedError, VersionError
from ninfer_format.geometry import up

MAGIC_STEM = b"NINFER\x00"
PREFIX_BYTES = 16
PAYLOAD_ALIGNMENT = 4096
MAX_JSON_BYTES = 8 << 20
"""Cap of the directory text; real ones are below 256 KiB."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Framing facts: container ``version`` and directory length ``json_bytes`` in bytes."""

    version: int
    json_bytes: int

    @property
    def payload_offset(self) -> int:
        """File offset of the payload area: the directory's end rounded up to 4096."""
        return payload_offset_for(self.json_bytes)


def payload_offset_for(json_bytes: int) -> int:
    """File offset of the payload area behind a directory of ``json_bytes`` bytes."""
    return up(PREFIX_BYTES + json_bytes, PAYLOAD_ALIGNMENT)


def prefix_bytes(version: int, json_bytes: int) -> bytes:
    """The 16 bytes that start a container of ``version`` with a directory of ``json_bytes`` bytes."""
    return MAGIC_STEM + bytes([version]) + struct.pack("<Q", json_bytes)


def read_prefix(head: bytes, file_bytes: int) -> Prefix:
    """Parse the first 16 bytes of a file of ``file_bytes`` bytes; versions 1 and 2 are understood.

    Every range is checked before anything of that size is read. Raises ArtifactError for another kind of file,
    VersionError for version 0 or 3 and later, DirectoryError for an impossible directory length and TruncatedError
    when the file ends before the payload area starts.
    """
    if len(head) < PREFIX_BYTES or file_bytes < PREFIX_BYTES:
        raise TruncatedError(f"the file has {file_bytes} bytes; a container starts with a {PREFIX_BYTES}-byte prefix")
    if head[:7] != MAGIC_STEM:
        raise ArtifactError(
            f"not a .ninfer container: it starts with {head[:8].hex(' ')}, expected 4e 49 4e 46 45 52 00 02"
        )
    version = head[7]
    if version not in (1, 2):
        raise VersionError(
            f"container version {version} is not supported; this release reads version 2 (and migrates version 1). "
            "Use a newer ninfer, or get the artifact in version 2"
        )
    (json_bytes,) = struct.unpack("<Q", head[8:16])
    if json_bytes == 0:
        raise DirectoryError("the prefix says the directory has 0 bytes; it must hold at least one object")
    if json_bytes > file_bytes - PREFIX_BYTES:
        raise TruncatedError(
            f"the prefix says the directory has {json_bytes} bytes, but only {file_bytes - PREFIX_BYTES} follow it"
        )
    if json_bytes > MAX_JSON_BYTES:
        raise DirectoryError(f"the directory has {json_bytes} bytes; the limit is {MAX_JSON_BYTES}")
    prefix = Prefix(version, json_bytes)
    if file_bytes < prefix.payload_offset:
        raise TruncatedError(f"the file has {file_bytes} bytes, but its payload area starts at {prefix.payload_offset}")
    return prefix
