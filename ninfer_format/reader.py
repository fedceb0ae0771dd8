"""Memory-mapped reading: an Artifact hands out zero-copy payload views and decoded tensors.

Opening checks everything a generic reader must (framing, schema, registries, sizes, geometry) and touches no payload.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, overload

from ninfer_format.directory import (
    Directory,
    DirectoryV1,
    Entry,
    Identity,
    TensorEntry,
    check_objects,
    parse_directory,
    parse_directory_v1,
)
from ninfer_format.errors import ArtifactError, StorageError, TruncatedError, UsageError, VersionError
from ninfer_format.prefix import PREFIX_BYTES, Prefix, read_prefix

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ninfer_format.codec import Words


class Objects(Sequence[Entry]):
    """Objects in physical order; index by position or by name, test names with ``in``."""

    __slots__ = ("_by_name", "_entries")

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = tuple(entries)
        self._by_name = {entry.name: entry for entry in self._entries}

    @overload
    def __getitem__(self, key: int | str) -> Entry: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Entry]: ...
    def __getitem__(self, key: int | str | slice) -> Entry | Sequence[Entry]:
        return self._by_name[key] if isinstance(key, str) else self._entries[key]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._by_name if isinstance(key, str) else key in self._entries

    def names(self) -> tuple[str, ...]:
        """Object names in physical order."""
        return tuple(self._by_name)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; UsageError if it does not exist or is not a file, StorageError otherwise."""
    try:
        # O_NONBLOCK: opening a FIFO by mistake must not wait for a writer; it changes nothing for regular files.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be opened: {error.strerror}") from None
    if not os.path.isfile(descriptor):
        os.close(descriptor)
        raise UsageError(f"{path}: not a regular file")
    return os.fdopen(descriptor, "rb")


def read_header(stream: BinaryIO) -> tuple[Prefix, bytes, int]:
    """Framing of an open file: its prefix, the directory text, and the file size in bytes."""
    file_bytes = os.fstat(stream.fileno()).st_size
    stream.seek(0)
    prefix = read_prefix(stream.read(PREFIX_BYTES), file_bytes)
    text = stream.read(prefix.json_bytes)
    if len(text) != prefix.json_bytes:
        raise TruncatedError(f"the directory should have {prefix.json_bytes} bytes, only {len(text)} could be read")
    return prefix, text, file_bytes


class Artifact:
    """An open, validated version-2 container.

    Payload views stay valid while the Artifact is open; ``close`` drops the map once no view is left.
    """

    def __init__(self, path: Path, directory: Directory, prefix: Prefix, mapping: mmap.mmap) -> None:
        self.path = path
        self.directory = directory
        self.objects = Objects(directory.objects)
        self.payload_offset = prefix.payload_offset
        self.json_bytes = prefix.json_bytes
        self.file_bytes = len(mapping)
        self._mapping: mmap.mmap | None = mapping

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Artifact":
        """Map ``path`` and check header, schema, registries, sizes and geometry.

        Raises an ArtifactError subclass when the file is wrong, VersionError for version 1 (migrate it) and 3 or
        later, RegistryError for unknown names, UsageError when there is no such file.
        """
        with open_regular(path) as stream:
            prefix, text, file_bytes = read_header(stream)
            if prefix.version == 1:
                raise VersionError(f"{path}: container version 1; run `ninfer-verify migrate` on it once")
            directory = parse_directory(text)
            check_objects(directory.objects, file_bytes - prefix.payload_offset)
            return cls(Path(path), directory, prefix, _map(stream))

    @property
    def identity(self) -> Identity:
        """``model_id`` and ``weights_id`` of the file."""
        return self.directory.identity

    @property
    def map(self) -> memoryview:
        """The whole file as a read-only view, header included."""
        if self._mapping is None:
            raise ArtifactError(f"{self.path}: the artifact is closed")
        return memoryview(self._mapping)

    def span(self, name: str) -> tuple[int, int]:
        """File offsets [begin, end) of an object's payload, in bytes."""
        entry = self._entry(name)
        begin = self.payload_offset + entry.offset
        return begin, begin + entry.n_bytes

    def payload(self, name: str) -> memoryview:
        """The stored bytes of one object, read-only and zero-copy."""
        begin, end = self.span(name)
        return self.map[begin:end]

    def words(self, name: str) -> "Words":
        """The stored words of a tensor (see ``codec.Words``): codes, scale words and divisor, undecoded."""
        from ninfer_format.codec import unpack_tensor

        entry = self._tensor_entry(name)
        return unpack_tensor(self.payload(name), entry.format, entry.layout, entry.shape)

    def tensor(self, name: str) -> "NDArray[Any]":
        """Decoded values of a tensor in its logical shape: float32, or int32 for format I32."""
        from ninfer_format.codec import decode_tensor

        entry = self._tensor_entry(name)
        return decode_tensor(self.payload(name), entry.format, entry.layout, entry.shape)

    def rows(self, name: str, rows: "slice | NDArray[np.integer[Any]] | Sequence[int]") -> "NDArray[np.float32]":
        """Decoded float32 rows [len(rows), K] of a matrix; only these rows are read."""
        from ninfer_format.codec import decode_rows

        entry = self._tensor_entry(name)
        return decode_rows(self.payload(name), entry.format, entry.layout, entry.shape, rows)

    def close(self) -> None:
        """Release the mapping; views still in use keep it alive until they are gone."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with suppress(BufferError):  # a payload view still in use owns the map from now on
                mapping.close()

    def __enter__(self) -> "Artifact":
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Artifact {self.identity} {len(self.objects)} objects, {self.file_bytes} bytes, {self.path}>"

    def _entry(self, name: str) -> Entry:
        try:
            return self.objects[name]
        except KeyError:
            count = len(self.objects)
            raise ArtifactError(f"{self.path}: no object named {name!r} among its {count} objects") from None

    def _tensor_entry(self, name: str) -> TensorEntry:
        entry = self._entry(name)
        if not isinstance(entry, TensorEntry):
            raise ArtifactError(f"{self.path}: object {name!r} is a resource, not a tensor; read it with payload()")
        return entry


def _map(stream: BinaryIO) -> mmap.mmap:
    try:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StorageError(f"{stream.name}: cannot be mapped: {error.strerror}") from None


def read_directory_v1(path: str | os.PathLike[str]) -> tuple[Prefix, bytes, DirectoryV1, int]:
    """Header of a version-1 file, validated like an Artifact: prefix, directory text, directory, file size in bytes.

    Raises VersionError when the file is of another version.
    """
    with open_regular(path) as stream:
        prefix, text, file_bytes = read_header(stream)
    if prefix.version != 1:
        raise VersionError(f"{path}: container version {prefix.version}, expected version 1")
    directory = parse_directory_v1(text)
    check_objects(directory.objects, file_bytes - prefix.payload_offset)
    return prefix, text, directory, file_bytes
