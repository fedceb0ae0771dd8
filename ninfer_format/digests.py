"""The chunk index ``FILE.idx``: digests that let a file be checked in parallel and in part (specs/index.md).

It holds the file's directory text, the digest of every region (header, padding, each object, bytes behind the last
object) and of every 8 MiB chunk, and records the digest of the whole file.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ninfer_format.command import require_extra
from ninfer_format.directory import Directory, Entry, check_objects, parse_directory
from ninfer_format.errors import ArtifactError, DigestError, UnsupportedError, VersionError
from ninfer_format.hashing import Advance, Progress, available_cores, hash_range, parallel, read_exactly, silent
from ninfer_format.prefix import MAX_JSON_BYTES, PREFIX_BYTES, payload_offset_for
from ninfer_format.reader import open_regular, read_header
from ninfer_format.writer import write_atomically

INDEX_SCHEMA = "ninfer.index/1"
INDEX_SUFFIX = ".idx"
CHUNK_BYTES = 8 << 20
MAX_INDEX_BYTES = 64 << 20
"""Cap of an index, compressed and decompressed; 64 MiB describe a file of several TiB."""

_WINDOW_BYTES = 4 * CHUNK_BYTES
_MAX_ZSTD_WINDOW = 8 << 20
_DIGEST = 32

RegionKind = Literal["header", "padding", "object", "trailing"]


@dataclass(frozen=True, slots=True)
class Region:
    """One part of a file, [begin, end) in file bytes; ``name`` is the object's name, or the kind for the others."""

    kind: RegionKind
    name: str
    begin: int
    end: int


def file_regions(objects: Sequence[Entry], json_bytes: int, file_bytes: int) -> tuple[Region, ...]:
    """The regions of a valid file in order: they are disjoint, nonempty and cover all ``file_bytes``."""
    payload_offset = payload_offset_for(json_bytes)
    cursor = PREFIX_BYTES + json_bytes
    regions = [Region("header", "header", 0, cursor)]
    for entry in objects:
        begin = payload_offset + entry.offset
        if begin > cursor:
            regions.append(Region("padding", "padding", cursor, begin))
        cursor = begin + entry.n_bytes
        regions.append(Region("object", entry.name, begin, cursor))
    if file_bytes > cursor:
        regions.append(Region("trailing", "trailing", cursor, file_bytes))
    return tuple(regions)


@dataclass(frozen=True)
class FileIndex:
    """What an index says about one version-2 file.

    ``directory_text`` is the file's JSON; ``file_bytes`` its size; ``sha256`` the recorded digest of the whole file;
    ``region_sha256`` one digest per entry of ``regions``; ``chunk_sha256`` one per ``CHUNK_BYTES`` of the file.
    """

    directory_text: bytes
    file_bytes: int
    sha256: bytes
    region_sha256: tuple[bytes, ...]
    chunk_sha256: tuple[bytes, ...]

    @cached_property
    def directory(self) -> Directory:
        """The parsed directory of the indexed file."""
        return parse_directory(self.directory_text)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The regions of the indexed file, in file order."""
        return file_regions(self.directory.objects, len(self.directory_text), self.file_bytes)

    @property
    def payload_offset(self) -> int:
        """File offset of the payload area in bytes."""
        return payload_offset_for(len(self.directory_text))

    @property
    def directory_sha256(self) -> bytes:
        """SHA-256 of the directory text."""
        return hashlib.sha256(self.directory_text).digest()

    def object_sha256(self) -> dict[str, str]:
        """Object name → SHA-256 of its payload in hexadecimal."""
        pairs = zip(self.regions, self.region_sha256, strict=True)
        return {region.name: digest.hex() for region, digest in pairs if region.kind == "object"}


def index_path(path: str | os.PathLike[str]) -> Path:
    """Where the index of ``path`` is kept: ``FILE.idx`` beside it."""
    return Path(os.fspath(path) + INDEX_SUFFIX)


def chunk_digests(
    descriptor: int, n_bytes: int, n_chunks: int, jobs: int | None, advance: Advance
) -> Iterator[tuple[int, bytes]]:
    """(chunk number, SHA-256) of the first ``n_chunks`` chunks of a file of ``n_bytes``, hashed in parallel."""

    def one(number: int) -> tuple[int, bytes]:
        begin = number * CHUNK_BYTES
        return number, hash_range(descriptor, begin, min(begin + CHUNK_BYTES, n_bytes), advance=advance)

    return parallel(one, range(n_chunks), jobs)


class _RegionHashes:
    """Digests of consecutive regions, fed with the file's bytes in order."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._ends = [region.end for region in regions]
        self._position = 0
        self._open = hashlib.sha256()
        self.digests: list[bytes] = []

    def feed(self, window: memoryview) -> None:
        while window:
            take = min(len(window), self._ends[len(self.digests)] - self._position)
            self._open.update(window[:take])
            self._position += take
            if self._position == self._ends[len(self.digests)]:
                self.digests.append(self._open.digest())
                self._open = hashlib.sha256()
            window = window[take:]


def build_index(path: str | os.PathLike[str], *, jobs: int | None = None, progress: Progress = silent) -> FileIndex:
    """Read a valid version-2 file once and digest it three ways: whole, by region, by chunk.

    Raises the errors of ``Artifact.open`` for a bad file and DigestError if the file changes meanwhile.
    """
    with open_regular(path) as stream:
        descriptor = stream.fileno()
        before = os.fstat(descriptor)
        prefix, text, file_bytes = read_header(stream)
        if prefix.version != 2:
            raise VersionError(f"{path}: container version 1; run `ninfer-verify migrate` on it before indexing")
        directory = parse_directory(text)
        check_objects(directory.objects, file_bytes - prefix.payload_offset)
        whole, regions = hashlib.sha256(), _RegionHashes(file_regions(directory.objects, len(text), file_bytes))
        chunks: list[bytes] = []
        buffers = (memoryview(bytearray(_WINDOW_BYTES)), memoryview(bytearray(_WINDOW_BYTES)))

        def window_at(begin: int) -> memoryview:
            window = buffers[begin // _WINDOW_BYTES % 2][: max(0, file_bytes - begin)]
            read_exactly(descriptor, window, begin)
            return window

        with ThreadPoolExecutor(jobs or available_cores()) as pool, progress(file_bytes, "indexing") as advance:
            window = window_at(0)
            for begin in range(0, file_bytes, _WINDOW_BYTES):
                streams = [pool.submit(whole.update, window), pool.submit(regions.feed, window)]
                parts = [window[i : i + CHUNK_BYTES] for i in range(0, len(window), CHUNK_BYTES)]
                hashes = [pool.submit(hashlib.sha256, part) for part in parts]
                advance(len(window))
                window = window_at(begin + _WINDOW_BYTES)  # read ahead while the threads hash
                chunks += [future.result().digest() for future in hashes]
                for stream_done in streams:
                    stream_done.result()
        after = os.fstat(descriptor)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise DigestError(f"{path}: the file was changed while it was read; run it again")
    return FileIndex(text, file_bytes, whole.digest(), tuple(regions.digests), tuple(chunks))


def dump_index(index: FileIndex) -> bytes:
    """The bytes of an index file: one msgpack map in one zstandard frame with a checksum."""
    msgpack, zstandard = require_extra("msgpack", "all"), require_extra("zstandard", "all")
    members = {
        "schema": INDEX_SCHEMA,
        "identity": str(index.directory.identity),
        "file_bytes": index.file_bytes,
        "payload_offset": index.payload_offset,
        "chunk_bytes": CHUNK_BYTES,
        "sha256": index.sha256,
        "directory_sha256": index.directory_sha256,
        "directory": index.directory_text,
        "region_sha256": b"".join(index.region_sha256),
        "chunk_sha256": b"".join(index.chunk_sha256),
    }
    packed: bytes = msgpack.packb(members, use_bin_type=True)
    compressed: bytes = zstandard.ZstdCompressor(level=9, write_checksum=True, write_content_size=True).compress(packed)
    if max(len(packed), len(compressed)) > MAX_INDEX_BYTES:
        raise DigestError(f"the index would take {len(packed)} bytes; the limit is {MAX_INDEX_BYTES}")
    return compressed


def _decompress(compressed: bytes) -> bytes:
    """At most MAX_INDEX_BYTES of content, whatever the frame header claims."""
    zstandard = require_extra("zstandard", "all")
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW)
    try:
        with decompressor.stream_reader(compressed, read_across_frames=True) as reader:
            parts, total = [], 0
            while part := reader.read(1 << 20):
                total += len(part)
                if total > MAX_INDEX_BYTES:
                    raise DigestError(f"the index unpacks to more than {MAX_INDEX_BYTES} bytes")
                parts.append(part)
    except zstandard.ZstdError as error:
        raise DigestError(f"the index is damaged or not an index: {error}") from None
    return b"".join(parts)


_MEMBERS: dict[str, type] = {
    "schema": str,
    "identity": str,
    "file_bytes": int,
    "payload_offset": int,
    "chunk_bytes": int,
    "sha256": bytes,
    "directory_sha256": bytes,
    "directory": bytes,
    "region_sha256": bytes,
    "chunk_sha256": bytes,
}


def _unpack(raw: bytes) -> dict[str, Any]:
    """The closed map of scalars; anything nested is refused before it is built, so memory stays near ``len(raw)``."""
    msgpack = require_extra("msgpack", "all")
    repeated: list[str] = []

    def unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        members = dict(pairs)
        repeated.extend(key for key, _ in pairs[len(members) :])
        return members

    try:
        value = msgpack.unpackb(
            raw, raw=False, strict_map_key=True, object_pairs_hook=unique, max_array_len=0, max_ext_len=0,
            max_map_len=len(_MEMBERS), max_bin_len=MAX_INDEX_BYTES, max_str_len=MAX_JSON_BYTES,
        )  # fmt: skip
    except Exception as error:  # msgpack raises ValueErrors, its own types and UnicodeDecodeError
        raise DigestError(f"the index is damaged or not an index: {type(error).__name__} {error}".rstrip()) from None
    if not isinstance(value, dict) or repeated:
        raise DigestError("the index is not one msgpack map with unique members")
    schema = value.get("schema")
    if isinstance(schema, str) and schema.startswith("ninfer.index/") and schema != INDEX_SCHEMA:
        raise UnsupportedError(f"index schema {schema!r:.60} is not supported; this release reads {INDEX_SCHEMA}")
    wrong = [m for m, kind in _MEMBERS.items() if type(value.get(m)) is not kind] or sorted(set(value) - set(_MEMBERS))
    if wrong or schema != INDEX_SCHEMA:
        raise DigestError(f"not an index of schema {INDEX_SCHEMA}: member {wrong[0] if wrong else 'schema'!r} is wrong")
    return value


def _digests(joined: bytes, count: int, what: str) -> tuple[bytes, ...]:
    if len(joined) != count * _DIGEST:
        raise DigestError(f"the index holds {len(joined)} bytes of {what} digests, expected {count} of {_DIGEST} bytes")
    return tuple(joined[i : i + _DIGEST] for i in range(0, len(joined), _DIGEST))


def parse_index(compressed: bytes) -> FileIndex:
    """Read an index strictly; DigestError says what is wrong, UnsupportedError names another schema version."""
    members = _unpack(_decompress(compressed))
    text, file_bytes = members["directory"], members["file_bytes"]
    bare = FileIndex(text, file_bytes, members["sha256"], (), ())
    if len(text) > MAX_JSON_BYTES:
        raise DigestError(f"the index holds a directory of {len(text)} bytes; the limit is {MAX_JSON_BYTES}")
    try:
        check_objects(bare.directory.objects, file_bytes - bare.payload_offset)
    except (ArtifactError, UnsupportedError) as error:
        raise DigestError(f"the index describes no valid file: {error}") from None
    derived = {
        "identity": str(bare.directory.identity),
        "payload_offset": bare.payload_offset,
        "chunk_bytes": CHUNK_BYTES,
        "directory_sha256": bare.directory_sha256,
    }
    if wrong := [member for member, value in derived.items() if members[member] != value]:
        raise DigestError(f"the index contradicts itself: {wrong[0]} does not follow from its directory")
    _digests(members["sha256"], 1, "whole-file")
    regions = _digests(members["region_sha256"], len(bare.regions), "region")
    chunks = _digests(members["chunk_sha256"], -(-file_bytes // CHUNK_BYTES), "chunk")
    return FileIndex(text, file_bytes, members["sha256"], regions, chunks)


def read_index(path: str | os.PathLike[str]) -> FileIndex:
    """Read and check an index file; DigestError names the file and what is wrong with it."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > MAX_INDEX_BYTES:
            raise DigestError(f"{path}: {size} bytes is too large for an index; the limit is {MAX_INDEX_BYTES}")
        compressed = stream.read(MAX_INDEX_BYTES + 1)
    try:
        return parse_index(compressed)
    except (DigestError, UnsupportedError) as error:
        raise type(error)(f"{path}: {error}; make a new one with `ninfer-verify index`") from None


def write_index(index: FileIndex, path: str | os.PathLike[str]) -> int:
    """Write an index atomically and return its size in bytes; StorageError or DiskFullError when that fails."""
    content = dump_index(index)
    write_atomically(Path(path), content)
    return len(content)
