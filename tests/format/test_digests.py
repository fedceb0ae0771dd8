"""The chunk index: what it holds, what it finds, and what it refuses to read."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
import zstandard

from ninfer_format.damage import compare_with_index
from ninfer_format.digests import (
    CHUNK_BYTES,
    INDEX_SCHEMA,
    MAX_INDEX_BYTES,
    FileIndex,
    build_index,
    dump_index,
    index_path,
    parse_index,
    read_index,
    write_index,
)
from ninfer_format.errors import (
    DigestError,
    DiskFullError,
    MissingExtraError,
    StorageError,
    UnsupportedError,
    VersionError,
)
from ninfer_format.hashing import Advance, first_nonzero, sha256_file
from ninfer_format.reader import Artifact
from tests.format.samples import CHUNKY, GOLDEN, region_of, write_artifact

ROOT = Path(__file__).parents[2]

TINY = GOLDEN / "tiny_v2.ninfer"


@pytest.fixture(scope="module")
def chunky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of four chunks with ten trailing bytes."""
    path = write_artifact(tmp_path_factory.mktemp("chunky") / "chunky.ninfer", CHUNKY, seed=7)
    with open(path, "ab") as stream:
        stream.write(b"\x01" * 10)
    return path


@pytest.fixture(scope="module")
def index(chunky: Path) -> FileIndex:
    return build_index(chunky)


def compare(path: Path, index: FileIndex, jobs: int | None = None) -> list[tuple[str, int, int]]:
    with open(path, "rb") as stream:
        found = compare_with_index(stream.fileno(), path.stat().st_size, index, jobs=jobs)
    return [(d.region.name, d.begin, d.end) for d in found.damage]


def test_index_holds_the_digests_of_file_objects_and_chunks(chunky: Path, index: FileIndex) -> None:
    content = chunky.read_bytes()
    assert index.file_bytes == len(content)
    assert index.sha256 == hashlib.sha256(content).digest()
    chunks = [content[i : i + CHUNK_BYTES] for i in range(0, len(content), CHUNK_BYTES)]
    assert len(chunks) == 4
    assert index.chunk_sha256 == tuple(hashlib.sha256(chunk).digest() for chunk in chunks)
    with Artifact.open(chunky) as artifact:
        expected = {n: hashlib.sha256(artifact.payload(n)).hexdigest() for n in artifact.objects.names()}
        assert index.directory == artifact.directory
        assert index.payload_offset == artifact.payload_offset
    assert index.object_sha256() == expected
    assert index.region_sha256 == tuple(hashlib.sha256(content[r.begin : r.end]).digest() for r in index.regions)


def test_regions_cover_the_file_without_overlap(chunky: Path, index: FileIndex) -> None:
    cursor = 0
    for region in index.regions:
        assert region.begin == cursor < region.end
        cursor = region.end
    assert cursor == index.file_bytes
    assert [r.kind for r in index.regions] == [
        "header", "padding", "object", "padding", "object", "padding", "object", "padding", "object", "padding",
        "object", "trailing",
    ]  # fmt: skip


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_index_does_not_depend_on_the_number_of_threads(chunky: Path, index: FileIndex, jobs: int) -> None:
    assert build_index(chunky, jobs=jobs) == index


def test_index_file_is_the_documented_msgpack_map_in_zstandard(chunky: Path, index: FileIndex, tmp_path: Path) -> None:
    out = tmp_path / "x.idx"
    size = write_index(index, out)
    assert out.stat().st_size == size
    members = msgpack.unpackb(zstandard.ZstdDecompressor().decompress(out.read_bytes()))
    assert members == {
        "schema": "ninfer.index/1",
        "identity": "chunky/test",
        "file_bytes": index.file_bytes,
        "payload_offset": 4096,
        "chunk_bytes": 8_388_608,
        "sha256": index.sha256,
        "directory_sha256": hashlib.sha256(index.directory_text).digest(),
        "directory": index.directory_text,
        "region_sha256": b"".join(index.region_sha256),
        "chunk_sha256": b"".join(index.chunk_sha256),
    }
    assert read_index(out) == index
    assert [p.name for p in tmp_path.iterdir()] == ["x.idx"]


def test_index_stands_beside_its_file() -> None:
    assert index_path("some/dir/a.ninfer") == Path("some/dir/a.ninfer.idx")


@pytest.mark.parametrize("jobs", [1, 2])
def test_untouched_file_agrees_with_its_index(chunky: Path, index: FileIndex, jobs: int) -> None:
    assert compare(chunky, index, jobs) == []


def damage(source: Path, out: Path, positions: list[int]) -> Path:
    content = bytearray(source.read_bytes())
    for position in positions:
        content[position] ^= 0x10
    out.write_bytes(content)
    return out


def test_one_changed_byte_names_its_region_and_a_range_around_it(
    chunky: Path, index: FileIndex, tmp_path: Path, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    for region in index.regions:
        for position in {region.begin, region.end - 1, rng.randrange(region.begin, region.end)}:
            ((name, begin, end),) = compare(damage(chunky, tmp_path / "bad", [position]), index)
            assert name == region.name
            assert name in (region_of(chunky, position), "header")
            assert begin <= position < end
            assert end - begin <= CHUNK_BYTES


def test_damage_in_several_chunks_is_joined_into_ranges(chunky: Path, index: FileIndex, tmp_path: Path) -> None:
    big = next(r for r in index.regions if r.name == "text/big")
    middle = (big.begin // CHUNK_BYTES + 1) * CHUNK_BYTES
    bad = damage(chunky, tmp_path / "bad", [5, big.begin + 1, middle + 1])
    assert compare(bad, index) == [
        ("header", 0, 16 + len(index.directory_text)),
        ("text/big", big.begin, middle + CHUNK_BYTES),
    ]
    far = damage(chunky, tmp_path / "far", [big.begin + 1, big.end - 1])
    found = compare(far, index)
    assert [name for name, _, _ in found] == ["text/big", "text/big"]
    assert found[0][2] < found[1][1]


@pytest.mark.parametrize("cut", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 5])
def test_partial_file_is_compared_chunk_by_whole_chunk(
    chunky: Path, index: FileIndex, tmp_path: Path, cut: int
) -> None:
    part = tmp_path / "part"
    part.write_bytes(chunky.read_bytes()[:cut])
    with open(part, "rb") as stream:
        found = compare_with_index(stream.fileno(), cut, index)
    assert (found.n_compared, found.n_chunks, found.damage) == (cut // CHUNK_BYTES, 4, ())


def test_damage_in_a_partial_file_is_named_even_inside_the_unfinished_object(
    chunky: Path, index: FileIndex, tmp_path: Path
) -> None:
    big = next(r for r in index.regions if r.name == "text/big")
    cut = 3 * CHUNK_BYTES + 17
    assert big.begin < CHUNK_BYTES < cut < big.end
    for positions, expected in (
        ([2 * CHUNK_BYTES + 1], [("text/big", 2 * CHUNK_BYTES, 3 * CHUNK_BYTES)]),
        ([big.begin - 3], [("padding", big.begin - 190, big.begin)]),
        ([cut - 1], []),
    ):
        bad = damage(chunky, tmp_path / "bad", positions)
        os.truncate(bad, cut)
        found = compare(bad, index)
        assert [name for name, _, _ in found] == [name for name, _, _ in expected]
        assert all(begin <= positions[0] < end for _, begin, end in found)


def test_version_1_and_damaged_files_are_not_indexed(tmp_path: Path) -> None:
    with pytest.raises(VersionError, match="migrate"):
        build_index(GOLDEN / "tiny_v1.ninfer")
    short = tmp_path / "short.ninfer"
    short.write_bytes(TINY.read_bytes()[:-1])
    with pytest.raises(Exception, match="incomplete"):
        build_index(short)


def changing(change: Callable[[], Any]) -> Any:
    """A progress that changes the file once, while it is read."""

    @contextmanager
    def progress(total: int, description: str) -> Iterator[Advance]:
        change()
        yield lambda n_bytes: None

    return progress


def test_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.ninfer"
    path.write_bytes(TINY.read_bytes())
    with pytest.raises(DigestError, match="changed while"):
        build_index(path, progress=changing(lambda: path.write_bytes(TINY.read_bytes() + b"x")))
    path.write_bytes(TINY.read_bytes())
    with pytest.raises(StorageError, match="shorter"):
        build_index(path, progress=changing(lambda: os.truncate(path, 5000)))
    path.write_bytes(TINY.read_bytes())
    with pytest.raises(StorageError, match="shorter"):
        sha256_file(path, progress=changing(lambda: os.truncate(path, 5000)))


def test_disk_full_leaves_no_index(index: FileIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError):
        write_index(index, tmp_path / "x.idx")
    assert list(tmp_path.iterdir()) == []


# --- reading hostile indexes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_members() -> dict[str, Any]:
    raw = zstandard.ZstdDecompressor().decompress(dump_index(build_index(TINY)))
    members: dict[str, Any] = msgpack.unpackb(raw)
    return members


def compressed(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(raw)


def replaced(members: dict[str, Any], **changes: Any) -> bytes:
    return compressed(msgpack.packb(members | changes))


LIES: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "empty": lambda m: b"",
    "not zstandard": lambda m: b"SHA256SUMS",
    "not msgpack": lambda m: compressed(b"\xc1"),
    "cut": lambda m: compressed(msgpack.packb(m)[:-40]),
    "bytes behind the map": lambda m: compressed(msgpack.packb(m) + b"\xc0"),
    "garbage behind the frame": lambda m: replaced(m) + b"garbage",
    "second frame": lambda m: replaced(m) + replaced(m),
    "array": lambda m: compressed(msgpack.packb([])),
    "integer": lambda m: compressed(msgpack.packb(7)),
    "nested": lambda m: replaced(m, chunk_bytes=[]),
    "deeply nested": lambda m: compressed(b"\x91" * 100_000),
    "extension type": lambda m: replaced(m, identity=msgpack.ExtType(1, b"x")),
    "timestamp": lambda m: replaced(m, sha256=msgpack.Timestamp(1)),
    "member missing": lambda m: compressed(msgpack.packb({k: v for k, v in m.items() if k != "sha256"})),
    "member extra": lambda m: replaced(m, note="x"),
    "member twice": lambda m: compressed(
        bytes([0x80 + len(m)]) + b"".join(msgpack.packb(k) + msgpack.packb(m[k]) for k in [*list(m)[:-1], "schema"])
    ),
    "integer key": lambda m: compressed(msgpack.packb(dict([*m.items(), (5, 5)]))),
    "null": lambda m: replaced(m, file_bytes=None),
    "boolean": lambda m: replaced(m, file_bytes=True),
    "real": lambda m: replaced(m, file_bytes=float(m["file_bytes"])),
    "text for bytes": lambda m: replaced(m, directory=m["directory"].decode()),
    "no schema": lambda m: replaced(m, schema="x"),
    "negative size": lambda m: replaced(m, file_bytes=-1),
    "size of 2^64 - 1": lambda m: replaced(m, file_bytes=2**64 - 1),
    "size one short": lambda m: replaced(m, file_bytes=m["file_bytes"] - 1),
    "other chunk size": lambda m: replaced(m, chunk_bytes=1),
    "chunk size 0": lambda m: replaced(m, chunk_bytes=0),
    "other payload offset": lambda m: replaced(m, payload_offset=8192),
    "other identity": lambda m: replaced(m, identity="a/b"),
    "other directory digest": lambda m: replaced(m, directory_sha256=bytes(32)),
    "directory is no directory": lambda m: replaced(m, directory=b"{}"),
    "directory of nine megabytes": lambda m: replaced(m, directory=b" " * (9 << 20)),
    "short file digest": lambda m: replaced(m, sha256=bytes(31)),
    "region digest missing": lambda m: replaced(m, region_sha256=m["region_sha256"][32:]),
    "chunk digest missing": lambda m: replaced(m, chunk_sha256=b""),
    "chunk digest too many": lambda m: replaced(m, chunk_sha256=m["chunk_sha256"] * 2),
}


@pytest.mark.parametrize("lie", LIES)
def test_index_that_lies_is_refused_in_one_sentence(lie: str, tiny_members: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "x.idx"
    path.write_bytes(LIES[lie](tiny_members))
    with pytest.raises(DigestError) as caught:
        read_index(path)
    assert str(path) in str(caught.value)
    assert "ninfer-verify index" in str(caught.value)
    assert len(str(caught.value)) < 700


def test_honest_neighbour_of_the_lies_is_read(tiny_members: dict[str, Any]) -> None:
    assert parse_index(replaced(tiny_members)) == build_index(TINY)
    turned = dict(reversed(tiny_members.items()))
    assert parse_index(compressed(msgpack.packb(turned))) == build_index(TINY)


def test_later_index_schema_is_unsupported(tiny_members: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=INDEX_SCHEMA):
        parse_index(replaced(tiny_members, schema="ninfer.index/2"))


def test_every_flipped_bit_of_an_index_is_refused_or_harmless(tiny_members: dict[str, Any]) -> None:
    honest = build_index(TINY)
    content = dump_index(honest)
    for position in range(len(content)):
        bad = bytearray(content)
        bad[position] ^= 1 << (position % 8)
        with suppress(DigestError):
            assert parse_index(bytes(bad)) == honest


BOMBS = {
    "zeros": "zstandard.ZstdCompressor(level=19).compress(bytes(1 << 30))",
    "zeros without a content size": "b''.join([c.compress(bytes(1 << 28)) for _ in range(4)] + [c.flush()])",
    "array of nils": "zstandard.ZstdCompressor().compress(b'\\xdd\\x03\\xff\\0\\0' + b'\\xc0' * 0x3ff0000)",
    "huge window": "zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters("
    "window_log=27, write_content_size=False)).compress(bytes(1 << 28))",
    "many small arrays": "zstandard.ZstdCompressor().compress(b'\\xdc\\xff\\xff' + b'\\x91\\xc0' * 65535 * 100)",
    "deep maps": "zstandard.ZstdCompressor().compress(b'\\x81\\xa1a' * (8 << 20))",
}
MEASURE = """
import sys
from ninfer_format.digests import parse_index
from ninfer_format.errors import DigestError
from tests.peak_memory import peak_rss_bytes
content = open(sys.argv[1], "rb").read()
try:
    parse_index(content)
except DigestError as error:
    print(peak_rss_bytes() >> 20, error)
"""


@pytest.mark.parametrize("bomb", BOMBS)
def test_decompression_and_unpacking_are_bounded(bomb: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.idx"
    make = "import zstandard, sys; c = zstandard.ZstdCompressor().compressobj(); "
    make += f"open(sys.argv[1], 'wb').write({BOMBS[bomb]})"
    subprocess.run([sys.executable, "-c", make, path], check=True, timeout=120)
    assert path.stat().st_size < MAX_INDEX_BYTES
    run = [sys.executable, "-c", MEASURE, str(path)]
    ran = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    print(ran.stdout)
    assert int(ran.stdout.split()[0]) < 300


def test_oversized_index_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "x.idx"
    with open(path, "wb") as stream:
        stream.truncate(MAX_INDEX_BYTES + 1)
    with pytest.raises(DigestError, match="too large"):
        read_index(path)


# --- imports, threads, small helpers --------------------------------------------------------------------------------


def test_importing_the_module_loads_neither_msgpack_nor_zstandard() -> None:
    code = "import sys, ninfer_format.digests; print({'msgpack', 'zstandard', 'typer', 'rich'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b"set()"


@pytest.mark.parametrize("module", ["msgpack", "zstandard"])
def test_missing_dependency_is_named(module: str, index: FileIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=f"{module}.*pip install"):
        dump_index(index)


def test_first_nonzero_finds_the_position_across_buffers(tmp_path: Path) -> None:
    path = tmp_path / "zeros"
    with open(path, "wb") as stream:
        stream.truncate(3 << 20)
    with open(path, "r+b") as stream:
        descriptor = stream.fileno()
        assert first_nonzero(descriptor, 0, 3 << 20) is None
        assert first_nonzero(descriptor, 5, 5) is None
        os.pwrite(descriptor, b"\x01", (2 << 20) + 9)
        assert first_nonzero(descriptor, 7, 3 << 20) == (2 << 20) + 9
        assert first_nonzero(descriptor, 7, (2 << 20) + 9) is None


def test_memory_of_indexing_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "a.ninfer", CHUNKY)
    with open(path, "ab") as stream:
        stream.truncate(400 << 20)
    code = f"""
from ninfer_format.digests import build_index
from tests.peak_memory import peak_rss_bytes
build_index({str(path)!r}, jobs=2)
print(peak_rss_bytes())
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    peak = int(ran.stdout)
    print("peak", peak >> 20, "MiB")
    assert peak < 200 << 20
