"""Clients that leave, servers that stop, engines that fail: what is held is given back, and everybody is told."""

from __future__ import annotations

import json
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ninfer_runtime.serve import openai_chat
from ninfer_runtime.serve.life import EXIT_FAULT, EXIT_GOOD, EXIT_INTERRUPTED
from ninfer_runtime.serve.question import prepare
from ninfer_runtime.serve.settings import ServeSettings
from tests.runtime.conftest import ArtifactOf
from tests.serve.live import MODEL, Answered, LiveServer
from tests.serve.programmed import CONFIG, PausedProgram, programmed

CHAT = "/v1/chat/completions"
SLOW = 0.02
ONE = replace(CONFIG, max_concurrency=1)


@pytest.fixture(scope="module")
def artifact(artifact_of: ArtifactOf) -> Path:
    return artifact_of("dense", "bf16")


@pytest.fixture(scope="module")
def one_row(artifact: Path) -> Iterator[tuple[LiveServer, PausedProgram]]:
    """One answer at a time, every piece of work takes 20 ms."""
    with programmed(artifact, config=ONE) as (server, program):
        program.chunk_seconds = program.round_seconds = SLOW
        yield server, program


def body(text: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 3000, **fields}


def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def close(client: socket.socket) -> None:
    client.close()


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def half_close(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)


LEAVING = [close, reset, half_close]


# ---- clients that leave ----------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", LEAVING)
def test_c16_a_client_that_leaves_an_answer_ends_it(
    one_row: tuple[LiveServer, PausedProgram], stream: bool, leave: Callable[[socket.socket], None]
) -> None:
    server, program = one_row
    cancelled = server.service.engine.stats().requests_finished.get("cancelled", 0)
    left, rounds = server.service.metrics.n_left, program.n_rounds
    client = server.raw(CHAT, body(stream=stream))
    until(lambda: program.n_rounds >= rounds + 3)
    leave(client)
    server.wait_until_idle()
    assert program.n_rounds < rounds + 50
    assert server.service.engine.stats().requests_finished["cancelled"] == cancelled + 1
    assert server.service.metrics.n_left == left + 1
    client.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", LEAVING)
def test_c15_a_client_that_leaves_a_prompt_frees_the_slot_within_a_chunk(
    one_row: tuple[LiveServer, PausedProgram], stream: bool, leave: Callable[[socket.socket], None]
) -> None:
    server, program = one_row
    before, left = program.n_chunks, server.service.metrics.n_left
    text = f"{random.random()} " + "abc xyz " * 500
    client = server.raw(CHAT, body(text, stream=stream, max_tokens=10))
    until(lambda: program.n_chunks >= before + 2)
    program.gate.clear()
    at = program.n_chunks
    leave(client)
    until(lambda: server.service.metrics.n_left == left + 1)
    program.gate.set()
    server.wait_until_idle()
    assert program.n_chunks < at + 8, "the whole prompt has more than 20 chunks"
    client.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_the_queue_is_taken_out_of_it(
    one_row: tuple[LiveServer, PausedProgram], stream: bool
) -> None:
    server, program = one_row
    first = server.raw(CHAT, body(stream=True))
    rounds = program.n_rounds
    until(lambda: program.n_rounds > rounds)
    second = server.raw(CHAT, body(stream=stream))
    until(lambda: server.service.engine.stats().waiting == 1)
    second.close()
    until(lambda: server.service.engine.stats().waiting == 0 and server.service.n_alive == 1)
    assert server.service.engine.stats().running == 1
    first.close()
    server.wait_until_idle()


def test_a_client_that_leaves_while_its_prompt_is_made_asks_the_engine_nothing(
    one_row: tuple[LiveServer, PausedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, program = one_row
    begun, may_end = threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> Any:
        begun.set()
        assert may_end.wait(60)
        return prepare(*arguments)

    monkeypatch.setattr("ninfer_runtime.serve.service.prepare", slowly)
    chunks = program.n_chunks
    client = server.raw(CHAT, body())
    assert begun.wait(20)
    assert server.service.n_alive == 1
    client.close()
    until(lambda: server.service.n_alive == 0)
    may_end.set()
    time.sleep(0.4)
    assert program.n_chunks == chunks
    server.wait_until_idle()


def test_a_client_that_leaves_in_the_middle_of_its_request_is_nobodys_error(
    one_row: tuple[LiveServer, PausedProgram],
) -> None:
    server, _ = one_row
    failures = sum(server.service.metrics.problems.values())
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        client.sendall(b'Content-Length: 1000\r\n\r\n{"model"')
        time.sleep(0.05)
    assert server.ask("GET", "/health").status == 200
    assert sum(server.service.metrics.problems.values()) == failures


def test_c17_a_crowd_that_connects_and_drops_leaves_nothing_behind(artifact: Path, fresh_seed: int) -> None:
    draw = random.Random(fresh_seed)
    with programmed(artifact, config=replace(CONFIG, max_pending=100)) as (server, program):
        program.chunk_seconds = program.round_seconds = 0.001
        clients = []
        for _ in range(50):
            text = "abc " * draw.randrange(1, 200)
            clients.append(server.raw(CHAT, body(text, stream=draw.random() < 0.5, max_tokens=draw.randrange(1, 300))))
            if draw.random() < 0.5:
                draw.choice(LEAVING)(clients.pop(draw.randrange(len(clients))))
        draw.shuffle(clients)
        for client in clients:
            time.sleep(draw.random() * 0.01)
            draw.choice(LEAVING)(client)
        server.wait_until_idle()
        for client in clients:
            client.close()
        assert server.chat("Hi", max_tokens=3).json["usage"]["completion_tokens"] == 3
        server.wait_until_idle()
        assert server.service.active == set()


def test_connections_that_are_silently_gone_are_found_out() -> None:
    from ninfer_runtime.serve.server import bind

    with bind(ServeSettings(port=0)) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()):
            accepted, _ = listening.accept()
            with accepted:
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 0


def test_a_client_that_reads_slowly_gets_it_all_and_holds_nobody_up(artifact: Path) -> None:
    with programmed(artifact) as (server, _), socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(60)
        slow.connect(("127.0.0.1", server.port))
        asked = json.dumps(body(stream=True, n=2, stream_options={"include_usage": True})).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        slow.sendall(f"{head}Content-Length: {len(asked)}\r\n\r\n".encode() + asked)
        # The engine is done with both answers long before anybody has read them.
        until(lambda: server.service.engine.stats().requests_finished.get("output-limit") == 2)
        assert server.chat("Hi", max_tokens=50, stream=True).events[-1]["choices"][0]["finish_reason"] == "length"
        events = rest(slow).events
        assert events[-1]["usage"]["completion_tokens"] == 6000
        texts = ["", ""]
        for choice in (choice for event in events for choice in event["choices"]):
            texts[choice["index"]] += choice["delta"].get("reasoning_content", "")
        whole = server.chat("Hi", n=2, max_tokens=3000).json["choices"]
        assert texts == [choice["message"]["reasoning_content"] for choice in whole]


# ---- too much at once ------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [True, False])
def test_overload_is_429_and_says_when_to_come_back(artifact: Path, stream: bool) -> None:
    with programmed(artifact, config=replace(ONE, max_pending=1)) as (server, program):
        program.gate.clear()
        clients = [server.raw(CHAT, body()) for _ in range(2)]
        until(lambda: server.service.n_alive == 2)
        refused = server.chat("Hi", stream=stream)
        assert (refused.status, refused.json["error"]["code"]) == (429, "server_overloaded")
        assert refused.json["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        for client in clients:
            client.close()
        program.gate.set()
        server.wait_until_idle()
        assert server.chat("Hi", max_tokens=1, stream=stream).status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_waits_too_long_is_503_and_nothing_else_ends(artifact: Path, stream: bool) -> None:
    with programmed(artifact, config=replace(ONE, pending_seconds=0.2)) as (server, program):
        program.round_seconds = 0.01
        first = server.raw(CHAT, body(stream=True))
        until(lambda: program.n_rounds > 0)
        refused = server.chat("Hi", stream=stream)
        assert (refused.status, refused.json["error"]["code"]) == (503, "request_queue_timeout")
        assert server.service.engine.stats().running == 1
        first.close()
        server.wait_until_idle()


# ---- requests that fail ----------------------------------------------------------------------------
def test_c20_nan_fails_its_request_alone(artifact: Path) -> None:
    with programmed(artifact) as (server, program):
        n_prompt = server.chat("Hi", max_tokens=1).json["usage"]["prompt_tokens"]
        program.not_finite_at = n_prompt
        for stream in (True, False):
            at_once = server.chat("Hi", stream=stream)
            assert (at_once.status, at_once.json["error"]["code"]) == (500, "non_finite_logits")
        program.not_finite_at, program.round_seconds = n_prompt + 20, 0.002
        later = server.chat("Hi", max_tokens=100, stream=True)
        assert later.status == 200
        assert later.events[-1]["error"]["code"] == "non_finite_logits"
        assert later.body.endswith(b"data: [DONE]\n\n")
        assert server.chat("Hi", max_tokens=100).status == 500
        assert server.chat("Hi", max_tokens=20).status == 200
        assert server.ask("GET", "/health").json == {"status": "ok"}
        server.wait_until_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_an_unforeseen_failure_is_an_error_that_tells_nothing(
    one_row: tuple[LiveServer, PausedProgram], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    server, _ = one_row
    what = "feed" if stream else "document"

    def breaks(*_: Any) -> bytes:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(openai_chat.ChatWriter, what, breaks)
    answer = server.chat("Hi", max_tokens=4, stream=stream)
    error = answer.events[-1]["error"] if stream else answer.json["error"]
    assert answer.status == (200 if stream else 500)
    assert error["code"] == "internal_error"
    assert b"secret" not in answer.body
    monkeypatch.undo()
    assert server.chat("Hi", max_tokens=1, stream=stream).status == 200
    server.wait_until_idle()


# ---- the end of a server ---------------------------------------------------------------------------
@contextmanager
def streaming(server: LiveServer, program: PausedProgram, **fields: Any) -> Iterator[socket.socket]:
    """A stream that has begun."""
    rounds = program.n_rounds
    with server.raw(CHAT, body(stream=True, **fields)) as client:
        until(lambda: program.n_rounds > rounds + 2)
        yield client


def rest(client: socket.socket) -> Answered:
    """All that comes until the server closes or the answer ends."""
    client.settimeout(30)
    found = b""
    while not found.endswith(b"0\r\n\r\n") and (piece := client.recv(1 << 16)):
        found += piece
    events = [line for line in found.split(b"\n") if line.startswith(b"data: ")]
    return Answered(200, {}, b"\n".join(events))


def interrupt(server: LiveServer) -> None:
    server.server.handle_exit(signal.SIGINT, None)


def wait_for_end(server: LiveServer) -> int:
    until(lambda: not server._thread.is_alive())
    return server.service.life.exit_code


def test_a_first_signal_lets_running_answers_end_and_takes_no_more(artifact: Path) -> None:
    with programmed(artifact) as (server, program):
        program.round_seconds = 0.01
        with streaming(server, program, max_tokens=150) as client:
            assert server.ask("GET", "/ready").json == {"status": "ready"}
            program.gate.clear()
            interrupt(server)
            until(lambda: server.ask("GET", "/ready").status == 503)
            assert server.ask("GET", "/ready").json == {"status": "draining"}
            assert server.ask("GET", "/health").status == 200
            refused = server.chat("Hi")
            assert (refused.status, refused.json["error"]["code"]) == (503, "service_unavailable")
            assert "retry-after" in refused.headers
            program.gate.set()
            events = rest(client).events
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert wait_for_end(server) == EXIT_GOOD


def test_a_prompt_that_is_being_made_counts_as_running(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def slowly(*arguments: Any) -> Any:
        begun.append(1)
        time.sleep(0.8)
        return prepare(*arguments)

    monkeypatch.setattr("ninfer_runtime.serve.service.prepare", slowly)
    with programmed(artifact) as (server, _), server.raw(CHAT, body(max_tokens=3)) as client:
        until(lambda: bool(begun))
        interrupt(server)
        client.settimeout(20)
        assert b"200 OK" in client.recv(1 << 16)
        assert wait_for_end(server) == EXIT_GOOD


def test_a_clockwork_that_fails_once_goes_on(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with programmed(artifact) as (server, _):
        failures = []

        def fails(*_: Any) -> None:
            failures.append(1)
            raise OSError("a log that is gone")

        monkeypatch.setattr(server.service.log, "tick", fails)
        until(lambda: bool(failures))
        monkeypatch.undo()
        interrupt(server)
        assert wait_for_end(server) == EXIT_GOOD


def test_an_idle_server_ends_on_the_first_signal(artifact: Path) -> None:
    with programmed(artifact) as (server, _):
        interrupt(server)
        assert wait_for_end(server) == EXIT_GOOD


def test_a_second_signal_ends_running_answers_with_an_error_event(artifact: Path) -> None:
    with programmed(artifact) as (server, program):
        program.round_seconds = 0.01
        with streaming(server, program) as client, server.raw(CHAT, body()) as other:
            until(lambda: server.service.n_alive == 2)
            interrupt(server)
            until(lambda: server.service.life.state == "draining")
            interrupt(server)
            events = rest(client).events
            assert b" 503 " in other.recv(1 << 16)
        assert events[-1]["error"]["code"] == "service_unavailable"
        assert wait_for_end(server) == EXIT_INTERRUPTED


def test_a_drain_has_its_time(artifact: Path) -> None:
    with programmed(artifact, settings=ServeSettings(drain_seconds=0.3)) as (server, program):
        program.round_seconds = 0.01
        with streaming(server, program) as client:
            interrupt(server)
            assert rest(client).events[-1]["error"]["code"] == "service_unavailable"
        assert wait_for_end(server) == EXIT_GOOD


def test_c19_a_device_fault_is_told_to_everybody_and_ends_the_server(artifact: Path) -> None:
    with programmed(artifact, config=ONE) as (server, program):
        program.round_seconds = 0.01
        with streaming(server, program) as client, server.raw(CHAT, body()) as queued:
            until(lambda: server.service.engine.stats().waiting == 1)
            program.fails = RuntimeError("an illegal memory access")
            events = rest(client).events
            assert events[-1]["error"]["code"] == "service_unavailable"
            assert b"503" in queued.recv(100)
            health = server.ask("GET", "/health")
            assert health.status == 503
            assert health.json["status"] == "failed"
            assert "illegal memory access" in health.json["fault"]
            assert server.ask("GET", "/ready").status == 503
            assert server.chat("Hi").status == 503
            assert b"healthy" in server.ask("GET", "/metrics").body
        assert wait_for_end(server) == EXIT_FAULT


def test_c19_a_fault_between_requests_is_found_too(artifact: Path) -> None:
    with programmed(artifact) as (server, program):
        program.fails = RuntimeError("gone")
        answer = server.chat("Hi", stream=True)
        assert (answer.status, answer.json["error"]["code"]) == (503, "service_unavailable")
        assert wait_for_end(server) == EXIT_FAULT


def test_a_stream_that_waits_long_is_kept_alive(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ninfer_runtime.serve import life

    monkeypatch.setattr(life, "KEEP_ALIVE_SECONDS", 0.2)
    with programmed(artifact) as (server, program):
        program.gate.clear()
        with server.raw(CHAT, body(stream=True, max_tokens=3)) as client:
            client.settimeout(20)
            found = b""
            while b": still working" not in found:
                found += client.recv(1 << 16)
            assert b"text/event-stream" in found
            program.gate.set()
            events = rest(client).events
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert any(event["choices"][0]["delta"].get("reasoning_content") for event in events)
