"""Large payloads go to the disk past the page cache; only what does not fill whole blocks goes through it.

A build syncs everything it writes before it ends, so the cache gains it nothing, and copying into new pages costs the
processor about as much as hashing the bytes does. Where the file system has no direct writes, the cache is used.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path

from ninfer_format.geometry import up
from ninfer_format.writer import ArtifactWriter, storage_error

BLOCK_BYTES = 4096
"""Alignment of direct writes, in the file and in memory."""


class DirectFile:
    """The temporary file of ``writer``, also open for direct writes if its file system has them. Thread-safe."""

    def __init__(self, writer: ArtifactWriter) -> None:
        self._writer = writer
        self._path: Path = writer.temporary
        self._descriptor = -1
        with suppress(OSError, AttributeError):
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)

    def write(self, name: str, offset: int, file_offset: int, content: memoryview) -> None:
        """Write ``content`` at ``offset`` in object ``name``, which is ``file_offset`` in the file.

        Whole blocks go directly, for which the address of ``content`` must be ``file_offset`` modulo the block size.
        DiskFullError or StorageError if the system refuses.
        """
        begin = min(up(file_offset, BLOCK_BYTES) - file_offset, len(content))
        end = max(begin, (file_offset + len(content)) // BLOCK_BYTES * BLOCK_BYTES - file_offset)
        done = begin
        if self._descriptor >= 0:
            done += self._write_blocks(content[begin:end], file_offset + begin)
        for part_begin, part_end in ((0, begin), (done, len(content))):
            if part_begin < part_end:
                self._writer.write_at(name, offset + part_begin, content[part_begin:part_end])

    def _write_blocks(self, content: memoryview, file_offset: int) -> int:
        """Bytes that could be written directly: all of them, or fewer if the file system turns out not to do it."""
        done = 0
        while done < len(content):
            try:
                done += os.pwrite(self._descriptor, content[done:], file_offset + done)
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                    return done
                raise storage_error(error, self._path, "writing") from None
            if done % BLOCK_BYTES:  # a short write ended inside a block; the rest is not aligned any more
                return done
        return done

    def close(self) -> None:
        """Close the second descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
