"""A server under mixed clients that come and go: does it answer as in a quiet run, and give everything back?

    python scripts/soak_serve.py [--model FILE] [--seconds 600] [--clients 8] [--seed N] [-- OPTIONS OF THE SERVER]

`ninfer-run serve` runs as a process of its own on the reference backend. First every question is asked alone. Then
clients ask at random, whole and streamed, over all APIs; some leave in the middle of an answer, some half-close or
reset their connection, some send nonsense. Checked at the end: every answer that was read to its end equals the quiet
one; no slot, page or request is held; memory has stopped growing; the process ends with 0 on the first signal. Prints
one JSON document; exit code 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.bench_serve import model_file  # noqa: E402

SCHEMA = "ninfer.soak-serve/1"
MODEL = "tiny"
ROWS = 4
PENDING = 16
SAMPLE_SECONDS = 1.0
GROWTH_BYTES = 24 << 20
"""More growth than this between the second and the last quarter of the run is a leak."""
START_SECONDS = 120
PATIENCE_SECONDS = 120.0
LEAVERS = 0.3
"""Share of the requests whose client leaves before the end."""
NONSENSE = 0.05
VOLATILE = frozenset({"id", "created", "created_at", "completed_at", "item_id", "call_id", "previous_response_id"})
"""Members that differ between two runs of one request."""
CACHE = frozenset({
    "prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens", "cache_creation_input_tokens",
    "input_tokens",
})  # fmt: skip
"""Members that say what was reused, which depends on what ran before."""

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA_ASKED = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
TEXTS = ("What is 2 + 3?", "Name a colour.", "Write a poem about the sea.", "Hello 🙂, wie geht's?", "日本語で話して")


@dataclass(frozen=True)
class Question:
    """One request."""

    path: str
    body: dict[str, Any]


def questions() -> list[Question]:
    """What the clients ask, each with a seed."""
    out = []
    for seed, text in enumerate(TEXTS):
        chat = {"model": MODEL, "messages": [{"role": "user", "content": text}], "seed": seed, "max_tokens": 60}
        turns = [
            {"role": "system", "content": "You are brief."},
            {"role": "user", "content": text},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Go on."},
        ]
        chats: list[dict[str, Any]] = [
            chat,
            {**chat, "temperature": 0, "max_tokens": 150},
            {**chat, "messages": turns, "enable_thinking": False},
            {**chat, "n": 2, "logprobs": True, "top_logprobs": 3, "max_tokens": 20},
            {**chat, "tools": [TOOL], "tool_choice": "required"},
            {**chat, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA_ASKED}}},
            {**chat, "thinking_budget": 5, "stop": ["e"]},
            {**chat, "presence_penalty": 1.0, "min_p": 0.05},
        ]
        out += [Question("/v1/chat/completions", body) for body in chats]
        out.append(Question("/v1/completions", {"model": MODEL, "prompt": text * 8, "seed": seed, "max_tokens": 40}))
        out.append(Question("/v1/responses", {"model": MODEL, "input": text, "seed": seed, "max_output_tokens": 40}))
        messages = [{"role": "user", "content": text}]
        out.append(Question("/v1/messages", {"model": MODEL, "messages": messages, "seed": seed, "max_tokens": 40}))
    return out


NONSENSE_BODIES: tuple[tuple[str, bytes], ...] = (
    ("/v1/chat/completions", b"{"),
    ("/v1/chat/completions", b"[" * 100_000),
    ("/v1/chat/completions", json.dumps({"model": MODEL, "messages": []}).encode()),
    ("/v1/completions", json.dumps({"model": MODEL, "prompt": "a" * 9000}).encode()),
    ("/v1/completions", json.dumps({"model": MODEL, "prompt": ""}).encode()),
    ("/v1/messages", json.dumps({"model": MODEL, "messages": 3}).encode()),
    ("/tokenize", b"\xff\xfe"),
)  # fmt: skip


def settled(value: Any) -> Any:
    """A decoded answer without what may differ."""
    match value:
        case dict():
            return {name: settled(inner) for name, inner in value.items() if name not in VOLATILE | CACHE}
        case list():
            return [settled(inner) for inner in value]
    return value


def text_of(events: list[Any]) -> str:
    """All texts of a stream, in order, whatever events they were sent in."""
    out: dict[str, list[str]] = {}
    for event in events:
        _collect(event, "", out)
    return json.dumps({name: "".join(texts) for name, texts in out.items()}, sort_keys=True)


_GROWING = frozenset({"content", "reasoning_content", "text", "delta", "thinking", "partial_json", "arguments"})


def _collect(value: Any, place: str, out: dict[str, list[str]]) -> None:
    if isinstance(value, dict):
        kind = f"{place}{value.get('index', '')}{value.get('type', '') if place == '' else ''}"
        for name, inner in value.items():
            if isinstance(inner, str) and name in _GROWING:
                out.setdefault(f"{kind}.{name}", []).append(inner)
            else:
                _collect(inner, f"{kind}.{name}", out)
    elif isinstance(value, list):
        for inner in value:
            _collect(inner, place, out)


@dataclass
class Server:
    """The process, and what it says of itself."""

    process: subprocess.Popen[str]
    port: int

    def get(self, path: str) -> Any:
        """A document."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    @property
    def resident_bytes(self) -> int:
        """Memory in use."""
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def running_server(model: Path, more: Sequence[str] = ()) -> Iterator[Server]:
    """`ninfer-run serve` on a free port, with ``more`` options; killed if it has not ended behind the block."""
    options = {
        "--port": 0, "--model-id": MODEL, "--max-context": 512, "--max-concurrency": ROWS, "--max-pending": PENDING,
        "--pending-seconds": 0, "--log-level": "info", "--log-stats-seconds": 0,
    }  # fmt: skip
    flags = [*(str(part) for pair in options.items() for part in pair), *more]
    start = "import sys; from ninfer_runtime.cli import main; sys.exit(main())"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", start, "serve", str(model), *flags],
        stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", line):
                break
            sys.stderr.write(line)
        else:
            raise SystemExit("the server has not started")
        drain = threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True)
        drain.start()
        yield Server(process, int(found.group(1)))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@dataclass
class Tally:
    """What the clients saw; they share it."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str) -> None:
        """One more."""
        with self.lock:
            self.counts[what] += 1

    def complain(self, what: str) -> None:
        """Something is wrong."""
        with self.lock:
            self.counts["wrong"] += 1
            if len(self.wrong) < 20:
                self.wrong.append(what)


def ask(server: Server, question: Question, *, stream: bool) -> tuple[int, Any]:
    """Status and what the answer says: a settled document, or the joined texts of a stream."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_SECONDS)
    try:
        body = {**question.body, "stream": stream}
        connection.request("POST", question.path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
    finally:
        connection.close()
    if response.status != 200 or not stream:
        return response.status, settled(json.loads(data))
    lines = [line[6:] for line in data.decode().split("\n") if line.startswith("data: {")]
    return response.status, text_of([json.loads(line) for line in lines])


def leave(server: Server, question: Question, draw: random.Random) -> None:
    """Ask, read a little or nothing, and go."""
    body = json.dumps({**question.body, "stream": draw.random() < 0.6}).encode()
    head = f"POST {question.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS) as connection:
        sent = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        connection.sendall(sent[: draw.choice([len(sent), len(sent), len(sent), len(sent) // 2])])
        if draw.random() < 0.5:
            connection.settimeout(draw.random())
            with suppress(TimeoutError):
                connection.recv(draw.choice([1, 100, 10_000]))
        else:
            time.sleep(draw.random() * 0.2)
        match draw.randrange(3):
            case 0:
                # A reset instead of an orderly end.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            case 1:
                connection.shutdown(socket.SHUT_WR)
                time.sleep(draw.random() * 0.1)


def send_nonsense(server: Server, tally: Tally, draw: random.Random) -> None:
    """A body that is refused with 400."""
    path, body = draw.choice(NONSENSE_BODIES)
    connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_SECONDS)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
    finally:
        connection.close()
    tally.add("refused" if response.status == 400 else "nonsense answered otherwise")
    if response.status != 400:
        tally.complain(f"{path} {body[:60]!r}: status {response.status}")


def client(server: Server, known: dict[tuple[int, bool], Any], until: float, tally: Tally, draw: random.Random) -> None:
    """One client's life."""
    asked = questions()
    while time.monotonic() < until:
        index, stream = draw.randrange(len(asked)), draw.random() < 0.5
        kind = draw.random()
        try:
            if kind < NONSENSE:
                send_nonsense(server, tally, draw)
            elif kind < NONSENSE + LEAVERS:
                leave(server, asked[index], draw)
                tally.add("left")
            else:
                status, said = ask(server, asked[index], stream=stream)
                if status == 429:
                    tally.add("told to wait")
                    time.sleep(draw.random() * 0.2)
                elif said != known[index, stream]:
                    tally.complain(f"question {index} stream={stream} status {status}: {str(said)[:300]}")
                else:
                    tally.add("answered alike")
        except OSError as error:
            tally.complain(f"question {index}: {type(error).__name__}: {error}")


def watch(server: Server, until: float) -> list[int]:
    """Memory in use, sampled to the end."""
    out = []
    while time.monotonic() < until:
        out.append(server.resident_bytes)
        time.sleep(SAMPLE_SECONDS)
    return out


def wait_until_idle(server: Server) -> dict[str, Any]:
    """The engine's numbers once nothing runs or waits any more."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        stats: dict[str, Any] = server.get("/stats")
        if not stats["running"] and not stats["waiting"]:
            return stats
        if time.monotonic() > until:
            raise SystemExit(f"still at work: {stats}")
        time.sleep(0.1)


def soak(
    model: Path, seconds: float, n_clients: int, seed: int, more: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """The document and what is wrong."""
    with running_server(model, more) as server:
        known: dict[tuple[int, bool], Any] = {}
        problems = []
        for index, question in enumerate(questions()):
            for stream in (False, True):
                status, said = ask(server, question, stream=stream)
                if status != 200:
                    problems.append(f"quiet run, question {index} {question.path}: status {status}: {said}")
                known[index, stream] = said
        tally = Tally()
        until = time.monotonic() + seconds
        threads = [
            threading.Thread(target=client, args=(server, known, until, tally, random.Random(seed * 1000 + i)))
            for i in range(n_clients)
        ]
        for thread in threads:
            thread.start()
        resident = watch(server, until)
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        stats = wait_until_idle(server)
        problems += tally.wrong
        if stats["pages_used"] != stats["pages_cached"]:
            problems.append(f"{stats['pages_used'] - stats['pages_cached']} pages are held by nobody")
        quarter = max(1, len(resident) // 4)
        second, last = (
            statistics.median(part) for part in (resident[quarter : 2 * quarter] or resident, resident[-quarter:])
        )
        if last - second > GROWTH_BYTES:
            problems.append(f"memory grew by {last - second:.0f} bytes")
        for index, question in enumerate(questions()):
            if ask(server, question, stream=False)[1] != known[index, False]:
                problems.append(f"question {index} is answered differently afterwards")
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(PATIENCE_SECONDS)
        if code != 0:
            problems.append(f"the server ended with {code}")
    document = {
        "schema": SCHEMA,
        "seconds": seconds,
        "clients": n_clients,
        "seed": seed,
        "options": list(more),
        "requests": dict(tally.counts),
        "resident_mib": {"second_quarter": round(second / 2**20, 1), "last_quarter": round(last / 2**20, 1)},
        "pages": {name: stats[f"pages_{name}"] for name in ("used", "cached", "total")},
        "finished": stats["requests_finished"],
        "clients_left": stats["clients_left"],
        "problems": problems,
    }
    return document, problems


def main() -> int:
    """Parse and print."""
    parser = argparse.ArgumentParser(description="A server under mixed clients that come and go.")
    parser.add_argument("--model", type=Path, help="an artifact; the tiny one if not given")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("options", nargs="*", help="further options of the server, behind --")
    arguments = parser.parse_args()
    with model_file(arguments.model) as model:
        options = arguments.options
        document, problems = soak(model, arguments.seconds, arguments.clients, arguments.seed, options)
    print(json.dumps(document, indent=2))
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
