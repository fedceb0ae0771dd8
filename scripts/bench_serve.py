"""What the server adds to a model: streamed tokens per second, latency per token, stalls of the event loop.

    python scripts/bench_serve.py [--model FILE] [--clients 8] [--requests 10] [--tokens 2000] [--profile]

The backend costs nothing (`scripts/scripted_program.py`); engine, tokenizer, text chain, JSON, events and HTTP are the
real ones. The server is a process of its own; clients are raw sockets in this one.

throughput   all clients stream at once, the backend never waits: tokens of all of them per second of wall time. What
             the engine says faster than the loop can send is sent together
steady       the same with a round every 1.25 ms, which leaves the loop time to send every token by itself
latency      one client, the backend draws a token every 5 ms: from each draw to the arrival of its event
stalls       how late a 1 ms timer of the server's loop is during ``throughput``, beside the same timer in the idle loop
             of a third process at the same time

Prints one JSON document; ``--profile`` also the functions that take most time, of the loop and of the engine's thread.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SCHEMA = "ninfer.bench-serve/1"
PACE_SECONDS = 0.005
STEADY_SECONDS = 0.00125
TIMER_SECONDS = 0.001
ROWS = 8
PROMPT_TOKENS = 256
"""More than the prompt has; the context holds it and the longest answer."""
SHOWN = 25
THINKING = "The user greets me. I should answer politely, and at some length: naïve, 日本語, and 🙂 are words too. "
PROSE = (
    "A server that adds nothing would be a wire. This one reads tokens, holds back what is not yet certain, and sends "
    "the rest at once: letters like é, 語 and 🙂 whole, `code` as it is, numbers such as 3.14 and lists, too.\n\n"
)
QUESTION = {"role": "user", "content": "Hello! Please tell me something long."}


# ---- the server's process --------------------------------------------------------------------------
def serve(model: Path, n_tokens: int, profile: bool) -> None:
    """Serve until stdin ends. Lines there: ``pace F`` (seconds per round), ``mark`` (forget), ``report``."""
    import asyncio
    import cProfile

    from ninfer_format import Artifact
    from ninfer_runtime.commands.options import EngineOptions, SamplingOptions
    from ninfer_runtime.commands.serve import facts_of
    from ninfer_runtime.commands.session import Session
    from ninfer_runtime.config import EngineConfig
    from ninfer_runtime.engine.engine import Engine
    from ninfer_runtime.models.binder import bind as bind_model
    from ninfer_runtime.serve.server import HttpServer, bind, run, set_up_logging
    from ninfer_runtime.serve.service import Service
    from ninfer_runtime.serve.settings import ServeSettings
    from ninfer_runtime.text.frontend import Frontend
    from scripts.scripted_program import ScriptedProgram

    set_up_logging("warning")
    config = EngineConfig(
        max_context=n_tokens + PROMPT_TOKENS, max_concurrency=ROWS, max_pending=ROWS, prefix_reuse=True, snapshots=4
    )
    settings = ServeSettings(port=0, model_id="free", log_stats_seconds=0)
    profiles = {"loop": cProfile.Profile(), "engine": cProfile.Profile()}
    with Artifact.open(model) as artifact:
        frontend = Frontend.open(artifact)
        tokenizer = frontend.tokenizer
        start = tokenizer.encode_text(THINKING * 4) + tokenizer.encode_segments(tokenizer.split("\n</think>\n\n"))
        prose = tokenizer.encode_text(PROSE)
        script = start + prose * (config.max_context // len(prose) + 1)
        program = ScriptedProgram.for_config(bind_model(artifact), config, script)
        draws: list[float] = []
        late: list[float] = []
        program.on_draw = lambda _: draws.append(time.perf_counter())
        if profile:
            program.enter_thread = profiles["engine"].enable  # type: ignore[method-assign]
        with Engine.of_program(program, config) as engine:
            session = Session(artifact, EngineOptions(model))
            service = Service(engine, frontend, settings, facts_of(session, engine, settings, SamplingOptions()))
            bound = bind(settings)

            async def beside() -> None:
                print(json.dumps({"port": bound.getsockname()[1]}), flush=True)
                if profile:
                    profiles["loop"].enable()
                timer = asyncio.create_task(watch_timer(late))
                async for line in lines_of(sys.stdin):
                    match line.split():
                        case ["pace", seconds]:
                            program.round_seconds = float(seconds)
                        case ["mark"]:
                            draws.clear()
                            late.clear()
                        case ["report"]:
                            print(json.dumps({"late": late, "draws": draws}), flush=True)
                timer.cancel()
                service.life.on_stop()

            class Server(HttpServer):
                async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                    await super().startup(sockets)
                    self.beside = asyncio.create_task(beside())

            run(service, bound, Server)
    if profile:
        import pstats

        for name, found in profiles.items():
            print(f"---- {name}", file=sys.stderr)
            pstats.Stats(found, stream=sys.stderr).sort_stats("tottime").print_stats(SHOWN)


def control() -> None:
    """An idle loop with the same timer; same lines on stdin."""
    import asyncio

    async def idle() -> None:
        late: list[float] = []
        timer = asyncio.create_task(watch_timer(late))
        print(json.dumps({}), flush=True)
        async for line in lines_of(sys.stdin):
            if line == "mark":
                late.clear()
            elif line == "report":
                print(json.dumps({"late": late}), flush=True)
        timer.cancel()

    asyncio.run(idle())


async def watch_timer(late: list[float]) -> None:
    """Note how much later than asked a timer fires, again and again."""
    import asyncio

    while True:
        begin = time.perf_counter()
        await asyncio.sleep(TIMER_SECONDS)
        late.append(time.perf_counter() - begin - TIMER_SECONDS)


async def lines_of(stream: IO[str]) -> Any:
    """Lines of a pipe as they come."""
    import asyncio

    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stream)
    while line := await reader.readline():
        yield line.decode().strip()


# ---- this process: clients -------------------------------------------------------------------------
class Child:
    """A process of this script, spoken to in lines."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.hello: dict[str, Any] = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a process of the benchmark has ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def tell(self, line: str) -> None:
        """One line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def report(self) -> dict[str, Any]:
        """What it has noted since the last mark."""
        self.tell("report")
        return self._read()

    def end(self) -> None:
        """Close its input and wait."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@contextmanager
def child(*arguments: str) -> Iterator[Child]:
    """A process that ends with the block."""
    started = Child(*arguments)
    try:
        yield started
    finally:
        started.end()


@dataclass
class Client:
    """One keep-alive connection that streams one answer after another."""

    port: int
    n_requests: int
    n_tokens: int
    arrivals: list[float] | None = None
    n_events: int = 0
    n_received: int = 0
    connection: socket.socket = field(init=False)
    _tail: bytes = b""

    def __post_init__(self) -> None:
        self.connection = socket.create_connection(("127.0.0.1", self.port))
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self) -> None:
        """Send the next request."""
        body = {
            "model": "free",
            "messages": [QUESTION],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self.n_tokens,
        }
        payload = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.connection.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        self.n_requests -= 1

    def read(self) -> bool:
        """Take what has arrived; False once all answers have ended."""
        piece = self.connection.recv(1 << 18)
        now = time.perf_counter()
        if not piece:
            raise SystemExit("the server has closed a connection")
        text = self._tail + piece
        n_new = text.count(b"}\n\n")
        self.n_events += n_new
        if self.arrivals is not None:
            self.arrivals += [now] * n_new
        # What counts may be cut by the end of a piece, and nothing is counted twice: it has three bytes.
        self._tail = text[-2:]
        if not text.endswith(b"\r\n0\r\n\r\n") and not text.endswith(b"0\r\n\r\n"):
            return True
        usage = text.rpartition(b'"completion_tokens":')[2].partition(b",")[0]
        self.n_received += int(usage)
        self._tail = b""
        if self.n_requests == 0:
            return False
        self.ask()
        return True


def stream_all(clients: list[Client]) -> float:
    """Let all clients stream at once; the seconds it took."""
    selector = selectors.DefaultSelector()
    for client in clients:
        selector.register(client.connection, selectors.EVENT_READ, client)
    begin = time.perf_counter()
    for client in clients:
        client.ask()
    n_open = len(clients)
    while n_open:
        for key, _ in selector.select():
            if not key.data.read():
                selector.unregister(key.fileobj)
                n_open -= 1
    seconds = time.perf_counter() - begin
    selector.close()
    for client in clients:
        client.connection.close()
    return seconds


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Mean and percentiles."""
    ordered = sorted(seconds)
    at = {name: ordered[min(len(ordered) - 1, int(len(ordered) * q))] for name, q in PERCENTILES.items()}
    return {name: round(value * 1000, 3) for name, value in {"mean": statistics.fmean(ordered), **at}.items()}


PERCENTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}


def throughput(
    server: Child, idle: Child, n_clients: int, n_requests: int, n_tokens: int, pace: float = 0.0
) -> dict[str, Any]:
    """All clients at once, and both timers."""
    server.tell(f"pace {pace}")
    clients = [Client(server.hello["port"], n_requests, n_tokens) for _ in range(n_clients)]
    server.tell("mark")
    idle.tell("mark")
    seconds = stream_all(clients)
    here, beside = server.report()["late"], idle.report()["late"]
    received = sum(client.n_received for client in clients)
    if received != n_clients * n_requests * n_tokens:
        raise SystemExit(f"{received} tokens arrived, expected {n_clients * n_requests * n_tokens}")
    here_ms, beside_ms = milliseconds(here), milliseconds(beside)
    return {
        "clients": n_clients,
        "tokens": received,
        "round_ms": pace * 1000,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(received / seconds),
        "tokens_per_event": round(received / sum(client.n_events for client in clients), 2),
        "loop_late_ms": here_ms,
        "idle_loop_late_ms": beside_ms,
        "p99.9_ratio": round(here_ms["p99.9"] / max(beside_ms["p99.9"], 1e-6), 2),
    }


def latency(server: Child, n_tokens: int) -> dict[str, Any]:
    """One client, paced: from draw to arrival."""
    server.tell(f"pace {PACE_SECONDS}")
    arrivals: list[float] = []
    client = Client(server.hello["port"], 1, n_tokens, arrivals)
    server.tell("mark")
    stream_all([client])
    server.tell("pace 0")
    draws = server.report()["draws"]
    # Events of the role, the end and the usage stand around those of the tokens; a token that completes nothing
    # has none, and the one that does comes later: the i-th event is never earlier than the i-th token.
    texts = arrivals[1:-2]
    return {
        "tokens": len(draws),
        "events": len(texts),
        "pace_ms": PACE_SECONDS * 1000,
        "draw_to_arrival_ms": milliseconds(paired(draws, texts)),
    }


def paired(draws: list[float], arrivals: list[float]) -> list[float]:
    """Seconds from the last draw before each arrival to it: what is sent waits for no later token."""
    out, i = [], 0
    for arrival in arrivals:
        while i + 1 < len(draws) and draws[i + 1] <= arrival:
            i += 1
        out.append(arrival - draws[i])
    return out


@contextmanager
def model_file(given: Path | None) -> Iterator[Path]:
    """The model of the text side: given, or the tiny one of the repository, converted."""
    if given is not None:
        yield given
        return
    from ninfer_convert.pipeline import build
    from ninfer_convert.plan import BuildOptions, make_plan

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tiny.ninfer"
        build(make_plan(BuildOptions(ROOT / "examples" / "tiny" / "dense", out, recipe="bf16", jobs=1)))
        yield out


def measure(model: Path, n_clients: int, n_requests: int, n_tokens: int, profile: bool = False) -> dict[str, Any]:
    """The whole document."""
    serving = ["--serve", "--model", str(model), "--tokens", str(n_tokens), *(["--profile"] if profile else [])]
    with child(*serving) as server, child("--control") as idle:
        stream_all([Client(server.hello["port"], 1, min(200, n_tokens)) for _ in range(n_clients)])
        return {
            "schema": SCHEMA,
            "cores": os.cpu_count(),
            "throughput": throughput(server, idle, n_clients, n_requests, n_tokens),
            "steady": throughput(server, idle, n_clients, n_requests, n_tokens, STEADY_SECONDS),
            "latency": latency(server, min(n_tokens, 1000)),
        }


def main() -> None:
    """Parse and print."""
    parser = argparse.ArgumentParser(description="What the server adds to a model.")
    parser.add_argument("--model", type=Path, help="an artifact whose text side is used; its weights are not")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--control", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.control:
        control()
    elif arguments.serve:
        serve(arguments.model, arguments.tokens, arguments.profile)
    else:
        with model_file(arguments.model) as model:
            document = measure(model, arguments.clients, arguments.requests, arguments.tokens, arguments.profile)
        print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
