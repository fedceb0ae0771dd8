"""``ninfer-verify`` around its answers: odd file names, closed pipes, signals, terminals and locales."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.format.samples import CHUNKY, GOLDEN, ninfer_verify, write_artifact

TINY = GOLDEN / "tiny_v2.ninfer"
COMMAND = [sys.executable, "-c", "from ninfer_format.cli import main; main()"]
ANSI = re.compile(r"\x1b")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "a.ninfer"
    path.write_bytes(TINY.read_bytes())
    return path


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid file of 3 GiB, nearly all holes: seconds of hashing."""
    path = write_artifact(tmp_path_factory.mktemp("big") / "big.ninfer", CHUNKY)
    os.truncate(path, 3 << 30)
    return path


ODD_FILES = [
    "\udcff\udcfe.ninfer",
    "h\u00e9llo w\u00f6rld.ninfer",
    "\x1b[31mred.ninfer",
    "-dash",
    "new\nline",
    "\u202egnp.ninfer",
]


@pytest.mark.parametrize("name", ODD_FILES, ids=ascii)
def test_odd_file_names_are_checked_and_printed_harmlessly(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(TINY.read_bytes())
    for arguments in (
        ("check", "--full"),
        ("show",),
        ("index",),
        ("check", "--json"),
        ("show", "--html", "x"),
        ("migrate",),
    ):
        ran = ninfer_verify(*arguments, "--", name)
        assert (ran.code, ran.err) == (0, ""), ran
        assert all(c.isprintable() or c == "\n" for c in ran.out), ran.out
    assert "<svg" in Path("x").read_text(encoding="utf-8")
    ran = ninfer_verify("check", "--", name + "absent")
    assert (ran.code, [c for c in ran.out + ran.err if not c.isprintable() and c != "\n"]) == (2, [])


def test_undecodable_argument_of_a_real_process_is_understood(tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"\xff.ninfer")
    with open(path, "wb") as stream:
        stream.write(TINY.read_bytes())
    ran = subprocess.run([*COMMAND, "check", path], capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert ran.stdout.splitlines()[0].endswith(b": OK")


def test_output_in_an_ascii_locale_does_not_fail(tiny: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    for arguments in (["show"], ["check"], ["inventory", "qwen3.6-27b/nvfp4"]):
        files = [] if arguments[0] == "inventory" else [str(tiny)]
        ran = subprocess.run([*COMMAND, *arguments, *files], capture_output=True, env=environment, check=False)
        assert (ran.returncode, ran.stderr) == (0, b"")
        ran.stdout.decode("ascii")


def test_closed_pipe_is_quiet() -> None:
    process = subprocess.Popen(
        [*COMMAND, "inventory", "qwen3.6-27b/nvfp4"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() in (0, 128 + signal.SIGPIPE)
    process.stderr.close()


@pytest.mark.parametrize("command", [["check", "--full"], ["index"], ["index", "--jobs", "1"], ["sums"]], ids=" ".join)
def test_interrupt_ends_with_130_and_no_traceback(command: list[str], big: Path) -> None:
    process = subprocess.Popen([*COMMAND, *command, big], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(0.9)
    if process.poll() is not None:
        pytest.fail("the file is too small to be interrupted")
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, b"")
    assert err in (b"", b"interrupted\n")
    assert time.monotonic() - started < 5
    assert not big.with_name(big.name + ".idx").exists()


def on_a_terminal(arguments: list[str], **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout (a pipe) and what a terminal on stderr received."""
    master, slave = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=slave, env={**env, **environment})
    os.close(slave)
    received = b""
    while True:
        ready, _, _ = select.select([master], [], [], 60)
        try:
            part = os.read(master, 65536) if ready else b""
        except OSError:
            break
        if not part:
            break
        received += part
    assert process.stdout is not None
    out = process.stdout.read().decode()
    process.stdout.close()
    os.close(master)
    return process.wait(), out, received.decode()


def test_progress_shows_bytes_on_a_terminal_only(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "a.ninfer", CHUNKY)
    os.truncate(path, 150 << 20)
    code, out, terminal = on_a_terminal(["check", "--full", str(path)], TERM="xterm-256color")
    assert code == 0
    assert re.search(r"sha256.*157\.3 MB", terminal, re.DOTALL)
    assert not ANSI.search(out)
    code, out, terminal = on_a_terminal(["check", "--full", str(path)], TERM="xterm-256color", NO_COLOR="1")
    assert (code, "sha256" in terminal) == (0, True)
    assert not re.search(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|9[0-7])[;m]", terminal)
    ran = subprocess.run([*COMMAND, "check", "--full", path], capture_output=True, check=True)
    assert ran.stderr == b""
    assert b"\x1b" not in ran.stdout


def test_dumb_terminal_gets_no_escape_sequences(tiny: Path) -> None:
    code, out, terminal = on_a_terminal(["check", "--full", str(tiny)], TERM="dumb")
    assert code == 0
    assert not ANSI.search(out + terminal)


def run_show(**environment: str) -> Any:
    return subprocess.run(
        [*COMMAND, "show", TINY], capture_output=True, text=True, env={**os.environ, **environment}, check=True
    )


@pytest.mark.parametrize("columns", ["20", "40", "80", "300"])
def test_show_fits_narrow_and_wide_terminals(columns: str) -> None:
    lines = run_show(COLUMNS=columns, PYTHONIOENCODING="utf-8").stdout.splitlines()
    bars = [line for line in lines if "%" in line]
    assert len(bars) > 10
    assert max(map(len, bars)) <= max(int(columns), 70)
