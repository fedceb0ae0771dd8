"""ninfer-run chat: history, commands, interrupts, from a pipe and on a terminal."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.conftest import ArtifactOf
from tests.runtime.run_command import GREEDY, PROGRAM, ROOT, Ninfer, in_this_process, started


@pytest.fixture(scope="module")
def model(artifact_of: ArtifactOf) -> Path:
    """The trained tiny dense checkpoint as groupwise-int."""
    return artifact_of("dense", "groupwise-int")


@pytest.fixture
def ninfer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ninfer:
    return in_this_process(capsys, monkeypatch)


def test_chat_remembers_resets_and_quits_on_piped_lines(ninfer: Ninfer, model: Path) -> None:
    lines = "What is 3 + 4?\n\nWhat is 5 + 6?\n/reset\n/nonsense\nWhat is 5 + 6?\n/quit\nnever\n"
    run = ninfer("chat", model, *GREEDY, "--no-thinking", "--statistics", stdin=lines.encode())
    assert run.code == 0
    assert run.out.splitlines()[0] == "3 + 4 = 7."
    assert run.out.splitlines()[2] == "5 + 6 = 11."
    prompts = [int(line.split("|")[2]) for line in run.err.splitlines() if line.startswith("tokens | prompt")]
    assert prompts[1] > prompts[0] == prompts[2]
    assert "forgotten" in run.err


def test_chat_takes_up_the_conversation_where_it_was(ninfer: Ninfer, model: Path) -> None:
    question = "What is 3 + 4?" + " Please answer in one line, as always." * 3
    run = ninfer("chat", model, *GREEDY, "--statistics", stdin=f"{question}\n{question}\n".encode())
    assert run.code == 0
    reused = [line.split("|")[2].strip() for line in run.err.splitlines() if line.startswith("tokens | reused")]
    assert reused[0] == "0 (empty)"
    n_tokens, _, why = reused[1].partition(" ")
    assert int(n_tokens) > 32
    assert why.startswith("(differs at token "), "the thinking of the first answer is dropped"


def test_chat_goes_on_after_a_question_that_does_not_fit(ninfer: Ninfer, model: Path) -> None:
    lines = "x" * 500 + "\nWhat is 3 + 4?\n"
    run = ninfer("chat", model, *GREEDY, "--no-thinking", "--max-context", 64, stdin=lines.encode())
    assert (run.code, run.out) == (0, "3 + 4 = 7.\n")
    assert "error: the prompt has" in run.err


def test_chat_goes_on_after_a_line_that_is_no_utf8(ninfer: Ninfer, model: Path) -> None:
    run = ninfer("chat", model, *GREEDY, "--no-thinking", stdin=b"\xff\xfe\nWhat is 3 + 4?\r\n")
    assert (run.code, run.out) == (0, "3 + 4 = 7.\n")
    assert "not UTF-8: byte 0" in run.err


def test_chat_refuses_bad_options_before_it_starts(ninfer: Ninfer, model: Path) -> None:
    for arguments in (("--top-p", "2"), ("--stop", ""), ("--reasoning-effort", "low"), ("--stop-token-id", "999")):
        assert ninfer("chat", model, *arguments, stdin=b"hi\n").code == 2


def test_an_interrupt_stops_an_answer_and_the_chat_goes_on(model: Path) -> None:
    process = started("chat", model, *GREEDY, "--no-thinking", "--max-new", 1800, "--stop-token-id", 0)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("Tell me a story about a fox and a lamp.\n")
    process.stdin.flush()
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("What is 3 + 4?\n/quit\n", timeout=60)
    assert process.returncode == 0, err
    assert len(out.splitlines()) == 2


def test_chat_on_a_terminal_edits_lines_and_leaves_on_the_second_interrupt(model: Path) -> None:
    pty = pytest.importorskip("pty")
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", PROGRAM, "chat", str(model), *GREEDY, "--no-thinking"])
    seen = ""

    def until(text: str) -> None:
        nonlocal seen
        limit = time.monotonic() + 60
        while text not in seen:
            assert select.select([terminal], [], [], max(0.0, limit - time.monotonic()))[0], seen
            seen += os.read(terminal, 4096).decode(errors="replace")
        seen = seen[seen.index(text) + len(text) :]

    def interrupt() -> None:
        # The prompt is out a moment before readline waits, and a signal between the two is lost.
        n_asleep = 0
        while n_asleep < 20:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(") ")[2][0]
            n_asleep = n_asleep + 1 if state == "S" else 0
            time.sleep(0.02)
        os.write(terminal, b"\x03")

    until("> ")
    os.write(terminal, b"What is 3 + 4?\n")
    until("3 + 4 = 7.")
    until("> ")
    interrupt()
    until("Ctrl-C again")
    until("> ")
    interrupt()
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
