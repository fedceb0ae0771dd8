"""Artifacts are mapped without copying; written files appear whole or not at all."""

import errno
import gc
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from ninfer_format import Artifact, ArtifactWriter
from ninfer_format.directory import Directory, Identity, ResourceEntry, TensorEntry, canonical_json
from ninfer_format.errors import ArtifactError, DiskFullError, StorageError, UsageError, VersionError
from ninfer_format.writer import storage_error, write_atomically

GOLDEN = Path(__file__).parents[1] / "golden"
DIRECTORY = Directory(
    Identity("m", "w"),
    (
        ResourceEntry("r", "raw-bytes-v1", 0, 5),
        TensorEntry("t", (3,), "FP32", "contiguous-le-v1", 256, 12),
        TensorEntry("s", (), "I32", "contiguous-le-v1", 512, 4),
    ),
)
PAYLOADS = {
    "r": b"hello",
    "t": np.array([1.5, -0.0, np.nan], "<f4").tobytes(),
    "s": np.array(-7, "<i4").tobytes(),
}


def write(path: Path, order: tuple[str, ...] = ("r", "t", "s")) -> Path:
    with ArtifactWriter(path, DIRECTORY) as writer:
        for name in order:
            writer.write(name, PAYLOADS[name])
        writer.commit()
    return path


def test_golden_container_is_reproduced_byte_for_byte_in_any_object_order(tmp_path: Path) -> None:
    golden = GOLDEN / "tiny_v2.ninfer"
    with Artifact.open(golden) as artifact:
        payloads = {name: bytes(artifact.payload(name)) for name in artifact.objects.names()}
        seed = int.from_bytes(os.urandom(4), "little")
        print("seed", seed)
        for order in (
            list(payloads),
            list(reversed(payloads)),
            list(np.random.default_rng(seed).permutation(list(payloads))),
        ):
            out = tmp_path / "out.ninfer"
            with ArtifactWriter(out, artifact.directory, overwrite=True) as writer:
                for name in order:
                    writer.write(str(name), payloads[str(name)])
                writer.commit()
            assert out.read_bytes() == golden.read_bytes()


def test_objects_are_found_by_position_and_by_name(tmp_path: Path) -> None:
    with Artifact.open(write(tmp_path / "a.ninfer")) as artifact:
        assert artifact.identity == Identity("m", "w")
        assert [e.name for e in artifact.objects] == ["r", "t", "s"]
        assert artifact.objects["t"] is artifact.objects[1]
        names: tuple[object, ...] = ("t", "x")
        assert [name in artifact.objects for name in names] == [True, False]
        assert bytes(artifact.payload("r")) == b"hello"
        np.testing.assert_array_equal(artifact.tensor("t"), np.array([1.5, -0.0, np.nan], np.float32))
        assert artifact.tensor("s").shape == ()
        assert int(artifact.tensor("s")) == -7
        assert artifact.words("t").codes.view(np.uint32).tobytes() == PAYLOADS["t"]


def test_payload_is_a_read_only_view_of_the_map(tmp_path: Path) -> None:
    with Artifact.open(write(tmp_path / "a.ninfer")) as artifact:
        view = artifact.payload("t")
        assert view.readonly
        assert view.nbytes == 12
        address = np.frombuffer(view, np.uint8).ctypes.data - np.frombuffer(artifact.map, np.uint8).ctypes.data
        assert address == artifact.span("t")[0]


def test_views_outlive_close_and_the_closed_artifact_says_so(tmp_path: Path) -> None:
    artifact = Artifact.open(write(tmp_path / "a.ninfer"))
    view = artifact.payload("r")
    artifact.close()
    artifact.close()
    assert bytes(view) == b"hello"
    with pytest.raises(ArtifactError, match="closed"):
        artifact.payload("r")
    del view
    gc.collect()


def test_unknown_object_and_resource_as_tensor_are_named(tmp_path: Path) -> None:
    with Artifact.open(write(tmp_path / "a.ninfer")) as artifact:
        with pytest.raises(ArtifactError, match="'nope'"):
            artifact.payload("nope")
        with pytest.raises(ArtifactError, match="resource"):
            artifact.tensor("r")


def test_version_1_names_the_way_on() -> None:
    with pytest.raises(VersionError, match="migrate"):
        Artifact.open(GOLDEN / "tiny_v1.ninfer")


def test_missing_file_folder_and_fifo_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none", tmp_path, tmp_path / "pipe"):
        with pytest.raises((UsageError, StorageError)):
            Artifact.open(path)


def test_nothing_appears_under_the_final_name_before_commit(tmp_path: Path) -> None:
    out = tmp_path / "a.ninfer"
    writer = ArtifactWriter(out, DIRECTORY)
    writer.write("r", b"hello")
    assert not out.exists()
    assert writer.temporary.exists()
    with pytest.raises(UsageError, match="not completely written"):
        writer.commit()
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_leaving_the_block_without_commit_removes_the_temporary(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ArtifactWriter(tmp_path / "a.ninfer", DIRECTORY):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_wrong_lengths_unknown_names_and_ranges_are_refused(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a.ninfer", DIRECTORY) as writer:
        for name, payload in (("r", b"four"), ("r", b"sixsix"), ("zz", b"")):
            with pytest.raises(UsageError):
                writer.write(name, payload)
        with pytest.raises(UsageError):
            writer.write_at("t", 8, b"12345")


def test_existing_output_is_kept_unless_asked(tmp_path: Path) -> None:
    out = write(tmp_path / "a.ninfer")
    before = out.read_bytes()
    with pytest.raises(UsageError, match="already exists"):
        ArtifactWriter(out, DIRECTORY)
    assert out.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.ninfer"]


def test_links_are_never_written_through(tmp_path: Path) -> None:
    target = tmp_path / "cache.bin"
    target.write_bytes(b"precious")
    link = tmp_path / "a.ninfer"
    link.symlink_to(target)
    with pytest.raises(UsageError, match="link"):
        ArtifactWriter(link, DIRECTORY, overwrite=True)
    (tmp_path / ".b.ninfer.partial").symlink_to(target)
    with pytest.raises((UsageError, StorageError)):
        ArtifactWriter(tmp_path / "b.ninfer", DIRECTORY)
    assert target.read_bytes() == b"precious"


def test_kept_temporary_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.ninfer").read_bytes()
    out = tmp_path / "a.ninfer"
    writer = ArtifactWriter(out, DIRECTORY)
    writer.write("t", PAYLOADS["t"])
    writer.sync()
    writer.abort(keep=True)
    with ArtifactWriter(out, DIRECTORY, resume=True) as again:
        assert again.read("t") == PAYLOADS["t"]
        again.mark_written("t")
        again.write("r", PAYLOADS["r"])
        again.write("s", PAYLOADS["s"])
        again.commit()
    assert out.read_bytes() == whole


def test_parts_of_one_object_may_come_from_several_threads(tmp_path: Path) -> None:
    size = 1 << 20
    directory = Directory(Identity("m", "w"), (ResourceEntry("big", "raw-bytes-v1", 0, size),))
    content = np.random.default_rng().integers(0, 256, size, np.uint8)
    with ArtifactWriter(tmp_path / "a.ninfer", directory) as writer:
        step = size // 64
        threads = [
            threading.Thread(target=writer.write_at, args=("big", i * step, content[i * step : (i + 1) * step].data))
            for i in range(64)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.commit()
    assert (tmp_path / "a.ninfer").read_bytes()[-size:] == content.tobytes()


def test_errno_decides_between_disk_full_and_storage() -> None:
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        assert isinstance(storage_error(OSError(code, "x"), "p", "writing"), DiskFullError)
    error = storage_error(OSError(errno.EIO, "I/O error"), "p", "writing")
    assert type(error) is StorageError
    assert error.exit_code == 3


LIMITED = """
import resource, sys
from pathlib import Path
from ninfer_format import ArtifactWriter, DiskFullError
from ninfer_format.directory import Directory, Identity, ResourceEntry
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
directory = Directory(Identity("m", "w"), (ResourceEntry("r", "raw-bytes-v1", 0, 1_000_000),))
try:
    with ArtifactWriter(Path(sys.argv[1]) / "a.ninfer", directory) as writer:
        writer.write("r", bytes(1_000_000))
        writer.commit()
except DiskFullError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_file_size_limit_is_disk_full_and_leaves_nothing(tmp_path: Path) -> None:
    # -B: Python itself would leave its byte code cut off at the limit, for every later process to trip over.
    run = [sys.executable, "-B", "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "file size limit" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_offsets_beyond_four_gigabytes_keep_all_their_bits(tmp_path: Path) -> None:
    far = (5 << 30) + 256
    directory = Directory(
        Identity("m", "w"),
        (
            ResourceEntry("hole", "raw-bytes-v1", 0, 5 << 30),
            TensorEntry("t", (2,), "I32", "contiguous-le-v1", far, 8),
        ),
    )
    with ArtifactWriter(tmp_path / "a.ninfer", directory) as writer:
        writer.mark_written("hole")
        writer.write("t", np.array([1, -2], "<i4").tobytes())
        writer.commit()
    with Artifact.open(tmp_path / "a.ninfer") as artifact:
        assert artifact.file_bytes == 4096 + far + 8
        np.testing.assert_array_equal(artifact.tensor("t"), [1, -2])
        assert bytes(artifact.payload("hole")[(5 << 30) - 4 :]) == bytes(4)


def test_opening_a_huge_artifact_does_not_read_it(tmp_path: Path) -> None:
    directory = Directory(Identity("m", "w"), (ResourceEntry("hole", "raw-bytes-v1", 0, 40 << 30),))
    with ArtifactWriter(tmp_path / "a.ninfer", directory) as writer:
        writer.mark_written("hole")
        writer.commit()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Artifact.open(tmp_path / "a.ninfer").close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_small_files_are_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["note.json"]


def test_a_header_over_the_cap_is_not_written(tmp_path: Path) -> None:
    objects = tuple(ResourceEntry(f"object-{i:06d}", "raw-bytes-v1", i, 1) for i in range(90_000))
    directory = Directory(Identity("m", "w"), objects)
    assert len(canonical_json(directory)) > 8 << 20
    with pytest.raises(UsageError, match="limit"):
        ArtifactWriter(tmp_path / "a.ninfer", directory)
