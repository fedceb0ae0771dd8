"""The process around a service: a bound socket, the HTTP server on it, its signals and its exit code."""

import asyncio
import json
import logging
import os
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from ninfer_format.errors import UsageError
from ninfer_runtime.serve.app import build_app
from ninfer_runtime.serve.service import Service
from ninfer_runtime.serve.settings import MAX_KEEPALIVE_SECONDS, LogLevel, ServeSettings

LOG = logging.getLogger("ninfer.serve")
BACKLOG = 2048
LAST_SECONDS = 3
"""Connections get this long to end once the server stops; then they are closed."""
SILENCE_OPTIONS = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 120_000))
"""Seconds without a word before the first question, between questions, questions; milliseconds for what was sent."""
SWITCH_SECONDS = 0.0005
"""How long the engine's Python may keep the interpreter while the event loop waits for it; 5 ms is Python's own."""


def bind(settings: ServeSettings) -> socket.socket:
    """The listening address, taken before a model is loaded; nobody can connect yet. UsageError when it is not free."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        find_out_silence(bound)
        bound.bind(address)
    except OSError as error:
        raise UsageError(f"--host {settings.host} --port {settings.port}: {error.strerror or error}") from None
    return bound


def find_out_silence(bound: socket.socket) -> None:
    """Let the kernel end accepted connections whose other side is gone without a word."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in SILENCE_OPTIONS:
        if (option := getattr(socket, name, None)) is not None:
            bound.setsockopt(socket.IPPROTO_TCP, option, value)


def url_of(bound: socket.socket) -> str:
    """Where the server answers."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def write_ready_file(file: Path, bound: socket.socket) -> None:
    """Whole or not at all: whoever waits for the file finds it complete."""
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    beside.write_text(json.dumps({"url": url_of(bound), "pid": os.getpid()}) + "\n", encoding="utf-8")
    beside.replace(file)


class HttpServer(uvicorn.Server):
    """uvicorn, with signals and the end left to the service's ``Life``."""

    def __init__(self, service: Service) -> None:
        config = uvicorn.Config(
            build_app(service),
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            backlog=BACKLOG,
            timeout_keep_alive=MAX_KEEPALIVE_SECONDS,
            timeout_graceful_shutdown=LAST_SECONDS,
        )
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        service.life.on_stop = self.stop

    def stop(self) -> None:
        """Stop listening and end."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal arrived in the main thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._service.life.signal)
        else:
            self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for bound in sockets or ():
            LOG.info("listening on %s", url_of(bound))
            if (file := self._service.settings.ready_file) is not None:
                write_ready_file(file, bound)


def run(service: Service, bound: socket.socket, server_of: type[HttpServer] = HttpServer) -> int:
    """Serve until a signal or a fault; the exit code."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        server_of(service).run([bound])
    finally:
        sys.setswitchinterval(before)
        bound.close()
        if service.settings.ready_file is not None:
            service.settings.ready_file.unlink(missing_ok=True)
    return service.life.exit_code


class _Lines(logging.Formatter):
    """``[2026-01-31 12:00:00.000] [info] text``."""

    default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        text = f"[{self.formatTime(record)}] [{record.levelname.lower()}] {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def set_up_logging(level: LogLevel, stream: Any = None) -> None:
    """Lines of this server and of uvicorn on stderr."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Lines())
    for name, least in (("ninfer", level), ("uvicorn", "warning" if level == "info" else level)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(least.upper())
        logger.propagate = False
