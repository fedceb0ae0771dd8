"""A migration that fails, is killed or loses power at any call: the file is whole, or a rerun makes it so."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ninfer_format.errors import MigrationError, StorageError
from ninfer_format.header_rewrite import Disk, backup_path
from ninfer_format.migration import migrate
from tests.format.samples import GOLDEN, small_v1, write_v1

IDENTITY = "test-model/groupwise-int"
V1 = (GOLDEN / "tiny_v1.ninfer").read_bytes()
V2 = (GOLDEN / "tiny_v1_migrated.ninfer").read_bytes()


@pytest.fixture
def v1(tmp_path: Path) -> Path:
    path = tmp_path / "a.ninfer"
    path.write_bytes(V1)
    return path


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


class Killed(BaseException):
    """The process is gone: nothing after this may reach the disk."""


class FaultyDisk(Disk):
    """Counts the calls; at number ``at`` it dies (before, halfway or after) or fails, once or from then on."""

    def __init__(self, at: int, mode: str) -> None:
        self.at, self.mode, self.calls, self.dead = at, mode, 0, False

    def _do(self, act: Callable[[], int | None], half: Callable[[], None] | None = None) -> int:
        if self.dead:
            raise Killed
        self.calls += 1
        if self.calls == self.at or (self.mode == "stays full" and self.calls > self.at):
            if self.mode in ("fails", "stays full"):
                raise OSError(errno.ENOSPC, "No space left on device")
            if self.mode == "after":
                act()
            elif self.mode == "half" and half is not None:
                half()
            self.dead = True
            raise Killed
        return act() or 0

    def open(self, path: Path) -> int:
        return self._do(lambda: Disk.open(self, path))

    def create(self, path: Path) -> int:
        return self._do(lambda: Disk.create(self, path))

    def write_at(self, descriptor: int, content: bytes, position: int) -> None:
        self._do(
            lambda: Disk.write_at(self, descriptor, content, position),
            lambda: Disk.write_at(self, descriptor, content[: len(content) // 2], position),
        )

    def sync(self, descriptor: int) -> None:
        self._do(lambda: None)

    def rename(self, source: Path, target: Path) -> None:
        self._do(lambda: Disk.rename(self, source, target))

    def remove(self, path: Path) -> None:
        self._do(lambda: Disk.remove(self, path))

    def sync_folder(self, folder: Path) -> None:
        self._do(lambda: None)


def calls_of_a_whole_run(path: Path) -> int:
    disk = FaultyDisk(0, "before")
    migrate(path, identity=IDENTITY, disk=disk)
    path.write_bytes(V1)
    return disk.calls


@pytest.mark.parametrize("mode", ["before", "half", "after"])
def test_killed_at_any_call_the_file_is_whole_or_a_rerun_makes_it_so(v1: Path, mode: str) -> None:
    total = calls_of_a_whole_run(v1)
    assert total >= 12
    for at in range(1, total + 1):
        v1.write_bytes(V1)
        with pytest.raises(Killed):
            migrate(v1, identity=IDENTITY, disk=FaultyDisk(at, mode))
        state = v1.read_bytes()
        assert state in (V1, V2) or backup_path(v1).read_bytes() == V1[:4096]
        assert migrate(v1, identity=IDENTITY).action in ("migrated", "already version 2")
        assert (v1.read_bytes(), names(v1.parent)) == (V2, ["a.ninfer"]), f"after call {at}"


def test_killed_again_while_recovering_it_still_recovers(v1: Path) -> None:
    total = calls_of_a_whole_run(v1)
    for first in range(1, total + 1):
        for second in range(1, total + 6):
            v1.write_bytes(V1)
            with pytest.raises(Killed):
                migrate(v1, identity=IDENTITY, disk=FaultyDisk(first, "half"))
            try:
                migrate(v1, identity=IDENTITY, disk=FaultyDisk(second, "half"))
            except Killed:
                migrate(v1, identity=IDENTITY)
            assert (v1.read_bytes(), names(v1.parent)) == (V2, ["a.ninfer"]), f"calls {first}, {second}"


def test_failing_at_any_call_the_original_comes_back_and_the_error_says_so(v1: Path) -> None:
    for at in range(1, calls_of_a_whole_run(v1) + 1):
        v1.write_bytes(V1)
        with pytest.raises(StorageError) as caught:
            migrate(v1, identity=IDENTITY, disk=FaultyDisk(at, "fails"))
        assert caught.value.exit_code == 3
        assert str(v1) in str(caught.value) or v1.name in str(caught.value)
        assert v1.read_bytes() in (V1, V2)
        assert (v1.read_bytes() == V2) == ("is version 2 now" in str(caught.value)), f"call {at}: {caught.value}"
        migrate(v1, identity=IDENTITY)
        assert (v1.read_bytes(), names(v1.parent)) == (V2, ["a.ninfer"]), f"call {at}"


def test_disk_that_stays_full_leaves_a_way_back(v1: Path) -> None:
    for at in range(1, calls_of_a_whole_run(v1) + 1):
        v1.write_bytes(V1)
        with pytest.raises(StorageError):
            migrate(v1, identity=IDENTITY, disk=FaultyDisk(at, "stays full"))
        assert v1.read_bytes() in (V1, V2) or backup_path(v1).read_bytes() == V1[:4096]
        migrate(v1, identity=IDENTITY)
        assert (v1.read_bytes(), names(v1.parent)) == (V2, ["a.ninfer"]), f"call {at}"


def test_interrupt_while_rewriting_puts_the_original_back(v1: Path) -> None:
    class Interrupted(Disk):
        def sync(self, descriptor: int) -> None:
            if backup_path(v1).exists() and v1.read_bytes()[:8] == V2[:8]:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        migrate(v1, identity=IDENTITY, disk=Interrupted())
    assert (v1.read_bytes(), names(v1.parent)) == (V1, ["a.ninfer"])


def test_result_that_reads_back_wrong_is_rolled_back(v1: Path) -> None:
    class Lossy(Disk):
        def write_at(self, descriptor: int, content: bytes, position: int) -> None:
            Disk.write_at(self, descriptor, content.replace(b"groupwise", b"groupwisf"), position)

    with pytest.raises(MigrationError, match="reads back different"):
        migrate(v1, identity=IDENTITY, disk=Lossy())
    assert (v1.read_bytes(), names(v1.parent)) == (V1, ["a.ninfer"])


class LosingPower(FaultyDisk):
    """Dies, and of everything not synced keeps a random part: sectors of writes, renames and removals."""

    def __init__(self, at: int, rng: random.Random) -> None:
        super().__init__(at, "after")
        self.rng = rng
        self.writes: list[tuple[int, int, bytes]] = []  # inode, position, what was there before
        self.undo: list[Callable[[], None]] = []
        self.paths: dict[int, Path] = {}

    def open(self, path: Path) -> int:
        descriptor = super().open(path)
        self.paths[os.fstat(descriptor).st_ino] = path
        return descriptor

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self.paths[os.fstat(descriptor).st_ino] = path
        return descriptor

    def write_at(self, descriptor: int, content: bytes, position: int) -> None:
        old = os.pread(descriptor, len(content), position) if os.fstat(descriptor).st_size else b""
        self.writes.append((os.fstat(descriptor).st_ino, position, old.ljust(len(content), b"\xee")))
        super().write_at(descriptor, content, position)

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.writes = [write for write in self.writes if write[0] != os.fstat(descriptor).st_ino]

    def rename(self, source: Path, target: Path) -> None:
        self.undo.append(lambda: os.rename(target, source))
        self.paths = {inode: target if path == source else path for inode, path in self.paths.items()}
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        content = path.read_bytes()
        self.undo.append(lambda: void(path.write_bytes(content)))
        super().remove(path)

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self.undo.clear()

    def lose(self) -> None:
        for inode, position, old in self.writes:
            path = self.paths[inode]
            if not path.exists():
                continue
            with open(path, "r+b") as stream:
                for sector in range(0, len(old), 512 - position % 512):
                    if self.rng.random() < 0.5:
                        stream.seek(position + sector)
                        stream.write(old[sector : sector + 512])
        for undo in reversed(self.undo):
            if self.rng.random() < 0.5:
                undo()


def void(value: object) -> None:
    """Drop a value."""


def test_power_lost_at_any_call_leaves_a_file_that_a_rerun_finishes(tmp_path: Path, fresh_seed: int) -> None:
    rng = random.Random(fresh_seed)
    path = write_v1(tmp_path / "a.ninfer", small_v1(n_norms=60))
    old = path.read_bytes()
    migrate(path, identity="old-model/weights")
    new = path.read_bytes()
    for round_number in range(8):
        for at in range(1, 14):
            path.write_bytes(old)
            disk = LosingPower(at, rng)
            try:
                migrate(path, identity="old-model/weights", disk=disk)
            except Killed:
                disk.lose()
            migrate(path, identity="old-model/weights")
            assert (path.read_bytes(), names(tmp_path)) == (new, ["a.ninfer"]), f"round {round_number}, call {at}"


SLOW_RUN = """
import sys, time
from pathlib import Path
from ninfer_format.header_rewrite import Disk
from ninfer_format.migration import migrate

class Slow(Disk):
    def __getattribute__(self, name):
        time.sleep(0.004)
        return object.__getattribute__(self, name)

    def write_at(self, descriptor, content, position):
        for i in range(0, len(content), 1500):
            Disk.write_at(self, descriptor, content[i : i + 1500], position + i)
            time.sleep(0.002)

print("ready", flush=True)
migrate(sys.argv[1], identity="old-model/weights", disk=Slow())
print("done", flush=True)
"""


def test_kill_minus_9_at_20_random_moments_loses_nothing(tmp_path: Path, fresh_seed: int) -> None:
    rng = random.Random(fresh_seed)
    path = write_v1(tmp_path / "a.ninfer", small_v1(n_norms=200))
    old = path.read_bytes()
    migrate(path, identity="old-model/weights")
    new = path.read_bytes()
    states: list[str] = []
    for _ in range(20):
        path.write_bytes(old)
        process = subprocess.Popen([sys.executable, "-c", SLOW_RUN, path], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0, 0.25))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        content = path.read_bytes()
        states.append("old" if content == old else "new" if content == new else "torn")
        assert states[-1] != "torn" or backup_path(path).read_bytes() == old[: len(backup_path(path).read_bytes())]
        migrate(path, identity="old-model/weights")
        assert (path.read_bytes(), names(tmp_path)) == (new, ["a.ninfer"])
    print(states)
