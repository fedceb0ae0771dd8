"""A real server on loopback for tests: its own thread, a free port, the reference backend on a tiny model."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from ninfer_format import Artifact
from ninfer_runtime.commands.options import EngineOptions, SamplingOptions
from ninfer_runtime.commands.serve import facts_of
from ninfer_runtime.commands.session import Session
from ninfer_runtime.config import EngineConfig
from ninfer_runtime.engine.engine import Engine
from ninfer_runtime.serve.server import HttpServer, bind
from ninfer_runtime.serve.service import EngineLike, Service
from ninfer_runtime.serve.settings import Facts, ServeSettings
from ninfer_runtime.text.frontend import Frontend

START_SECONDS = 30.0
MODEL = "tiny"
CONFIG = EngineConfig(
    max_context=512, max_concurrency=4, prefix_reuse=True, snapshots=4, host_snapshots=4, max_pending=16
)


@dataclass(frozen=True)
class Answered:
    """One whole HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body's value."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The values of the ``data`` lines, the end mark left out."""
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


class LiveServer:
    """A running server and what is needed to talk to it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._socket = bind(service.settings)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = HttpServer(service)
        self._thread = threading.Thread(target=self.server.run, args=([self._socket],), name="test-server")

    def start(self) -> None:
        """Begin, and wait until it listens."""
        self._thread.start()
        until = time.monotonic() + START_SECONDS
        while not self.server.started:
            assert self._thread.is_alive(), "the server has ended"
            assert time.monotonic() < until, "the server has not started"
            time.sleep(0.01)

    def stop(self) -> None:
        """End it."""
        self.server.should_exit = True
        self._thread.join(START_SECONDS)
        assert not self._thread.is_alive(), "the server has not ended"
        self._socket.close()

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 60.0
    ) -> Answered:
        """One request on a connection of its own; a body that is not bytes is sent as JSON."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        sent = {} if body is None else {"content-type": "application/json"}
        payload = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, payload, {**sent, **(headers or {})})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answered(response.status, found, response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> Answered:
        """A POST of JSON."""
        return self.ask("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})

    def chat(self, text: str = "What is 2 + 3?", **fields: Any) -> Answered:
        """A chat completion of one user message."""
        messages = fields.pop("messages", [{"role": "user", "content": text}])
        return self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})

    def raw(self, path: str, body: Any) -> socket.socket:
        """A socket on which the request has been sent and nothing has been read."""
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        client.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        return client

    def wait_until_idle(self, seconds: float = 20.0) -> None:
        """Return when no request is alive; the engine's pages are then free or kept for reuse."""
        until = time.monotonic() + seconds
        while True:
            stats = self.service.engine.stats()
            if not (stats.running or stats.waiting or self.service.active or self.service.n_alive):
                assert stats.pages_used == stats.pages_cached, "a page has an owner that is gone"
                return
            assert time.monotonic() < until, f"still at work: {stats}, {self.service.n_alive} alive"
            time.sleep(0.01)


@contextmanager
def serving(service: Service) -> Iterator[LiveServer]:
    """A running server; it has ended behind the block."""
    server = LiveServer(service)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def served(
    path: Path, config: EngineConfig = CONFIG, settings: ServeSettings | None = None, **facts: Any
) -> Iterator[LiveServer]:
    """The artifact at ``path`` behind a real engine."""
    with (
        Artifact.open(path) as artifact,
        Engine(artifact, config) as engine,
        serving(service_of(artifact, engine, settings, **facts)) as server,
    ):
        yield server


def leave_an_answer(server: LiveServer, path: str, body: dict[str, Any]) -> int:
    """Ask and go, a stream behind its first bytes; how many answers the engine has cancelled for it.

    An answer may have ended before the client is gone: a stream is asked for again until one has not.
    """

    def n_cancelled() -> int:
        return server.service.engine.stats().requests_finished.get("cancelled", 0)

    before = n_cancelled()
    for _ in range(50):
        client = server.raw(path, body)
        if body["stream"]:
            assert client.recv(100)
        client.close()
        server.wait_until_idle()
        if n_cancelled() > before or not body["stream"]:
            break
    return n_cancelled() - before


def service_of(
    artifact: Artifact,
    engine: Engine,
    settings: ServeSettings | None = None,
    standing_in: EngineLike | None = None,
    **facts: Any,
) -> Service:
    """The service of an engine, or of something that stands in for it."""
    chosen = settings or ServeSettings()
    chosen = replace(chosen, port=0, model_id=chosen.model_id or MODEL)
    session = Session(artifact, EngineOptions(Path(artifact.path)))
    found: Facts = replace(facts_of(session, engine, chosen, SamplingOptions()), **facts)
    return Service(standing_in or engine, Frontend.open(artifact, chosen.chat_template), chosen, found)
