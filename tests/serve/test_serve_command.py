"""``ninfer-run serve`` as a process: what it says at the start, its signals and exit codes, and what it refuses."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.conftest import ArtifactOf
from tests.runtime.run_command import Ninfer, in_this_process

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "import sys; from ninfer_runtime.cli import main; sys.exit(main())", "serve"]
SMALL = ("--max-context", "512", "--port", "0")


@pytest.fixture(scope="module")
def artifact(artifact_of: ArtifactOf) -> Path:
    return artifact_of("dense", "bf16")


@pytest.fixture
def ninfer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Ninfer]:
    loggers = [logging.getLogger(name) for name in ("ninfer", "uvicorn")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield in_this_process(capsys, monkeypatch)
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


class Running:
    """The process, and where it listens."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        found = {name: value for name, value in os.environ.items() if name != "NINFER_API_KEY"}
        self.ready_file = folder / "ready.json"
        self.log = folder / "stderr"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *arguments, "--ready-file", str(self.ready_file)],
                cwd=ROOT, env={**found, **environment}, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        until = time.monotonic() + 60
        while not self.ready_file.exists():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < until, self.said
            time.sleep(0.02)
        ready = json.loads(self.ready_file.read_text())
        assert ready["pid"] == self.process.pid
        self.url = ready["url"]
        self.port = int(self.url.rpartition(":")[2])

    @property
    def said(self) -> str:
        """Everything on stderr so far."""
        return self.log.read_text()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            sent = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def end(self, *signals: signal.Signals) -> int:
        """Send the signals, each when the one before has been seen; the exit code."""
        for i, number in enumerate(signals):
            self.process.send_signal(number)
            while i + 1 < len(signals) and self.ask("GET", "/ready")[0] != 503:
                time.sleep(0.02)
        out, _ = self.process.communicate(timeout=60)
        assert out == ""
        assert not self.ready_file.exists()
        return self.process.returncode


@contextmanager
def running(folder: Path, *arguments: str, **environment: str) -> Iterator[Running]:
    started = Running(folder, *arguments, **environment)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.communicate()


def test_it_says_what_it_runs_answers_and_ends_on_sigterm(artifact: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    options = ("--model-id", "mine", "--request-log", str(log), "--greedy", "--no-thinking", "--max-concurrency", "2")
    with running(tmp_path, str(artifact), *SMALL, *options, NINFER_API_KEY="a-key-of-mine") as server:
        said = server.said
        assert "engine | context" in said
        assert re.search(
            r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\] \[info\] listening on http://127\.0\.0\.1:\d+", said
        )
        assert "a-key-of-mine" not in said
        assert server.ask("GET", "/v1/models")[0] == 401
        chat = {"model": "mine", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 20}
        answers = [
            server.ask("POST", "/v1/chat/completions", {**chat, **more}, authorization="Bearer a-key-of-mine")
            for more in ({}, {"temperature": 2.0})
        ]
        assert [status for status, _ in answers] == [200, 200]
        messages = [document["choices"][0]["message"] for _, document in answers]
        # --greedy holds whatever a request says, and nothing was thought.
        assert messages[0] == messages[1]
        assert messages[0]["content"]
        assert "reasoning_content" not in messages[0]
        assert server.end(signal.SIGTERM) == 0
    written = [json.loads(line) for line in log.read_text().splitlines()]
    assert written[0]["event"] == "server_start"
    assert written[0]["has_keys"] is True
    assert "a-key-of-mine" not in log.read_text()


def test_two_interrupts_end_a_running_answer(artifact: Path, tmp_path: Path) -> None:
    with running(
        tmp_path, str(artifact), *SMALL, "--no-page", "--log-level", "warning", "--max-context", "4096"
    ) as server:
        assert server.ask("GET", "/")[0] == 404
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
            body = json.dumps({
                "model": "dense", "prompt": "a", "max_tokens": 4000, "stream": True, "ignore_eos": True,
            })  # fmt: skip
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            assert b"200 OK" in client.recv(1 << 16)
            assert server.end(signal.SIGINT, signal.SIGINT) == 130
            found = b""
            while piece := client.recv(1 << 16):
                found += piece
        assert b"service_unavailable" in found
    assert "Traceback" not in server.said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--host", "0.0.0.0"), ("--api-key-file", "--insecure")),
        (("--port", "70000"), ("--port", "65535")),
        (("--log-level", "loud"), ("loud",)),
        (("--model-id", ""), ("--model-id",)),
        (("--request-log", "/no/such/folder/log"), ("--request-log", "/no/such/folder")),
        (("--ready-file", "/no/such/folder/ready"), ("--ready-file", "/no/such/folder")),
        (("--media-root", "/no/such/folder"), ("--media-root",)),
        (("--media-allow-net", "10.0.0.0/99"), ("--media-allow-net",)),
        (("--max-context", "999999999"), ("--max-context",)),
        (("--max-concurrency", "9"), ("max_concurrency",)),
        (("--spec", "mtp", "--draft-tokens", "9"), ("draft_tokens",)),
        (("--metrics-prefix", "a:b"), ("--metrics-prefix",)),
        (("--max-pending", "0"), ("--max-pending",)),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    ninfer: Ninfer, artifact: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    found = ninfer("serve", artifact, *SMALL, *options)
    assert found.code == 2
    for word in words:
        assert word in found.err, found.err


def test_an_open_server_says_so(ninfer: Ninfer, artifact: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = str(taken.getsockname()[1])
        found = ninfer("serve", artifact, "--host", "0.0.0.0", "--insecure", "--port", port, "--max-context", "512")
    assert found.code == 2
    assert "whoever reaches 0.0.0.0 may use this server" in found.err


def test_an_address_that_is_taken_is_said(ninfer: Ninfer, artifact: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        found = ninfer("serve", artifact, "--port", port, "--max-context", "512")
    assert found.code == 2
    assert f"--port {port}" in found.err


def test_a_file_that_is_none_is_said(ninfer: Ninfer) -> None:
    found = ninfer("serve", "/no/such/file.ninfer", *SMALL)
    assert found.code not in (0, 1)
    assert "/no/such/file.ninfer" in found.err


def test_the_specs_name_every_option() -> None:
    from typer.main import get_command

    from ninfer_runtime.cli import app

    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    page = (ROOT / "specs" / "cli.md").read_text(encoding="utf-8")
    assert len(options) > 40
    missing = {name for name in options - {"--help"} if f"`{name}" not in page}
    assert not missing
