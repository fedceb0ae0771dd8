"""A Hub on the loopback interface: as much of its protocol as huggingface_hub needs to list and download files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(/.*)?)?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """Files of one commit; ``token`` makes it private, ``gated`` refuses everybody."""

    folder: Path
    revisions: tuple[str, ...] = ("main", COMMIT)
    token: str | None = None
    gated: bool = False
    cut: dict[str, int] = field(default_factory=dict)
    """File → after how many bytes the next whole download of it breaks off."""

    def files(self) -> dict[str, Path]:
        return {path.name: path for path in sorted(self.folder.iterdir()) if path.is_file()}


@dataclass
class Hub:
    """The running server. ``requests`` has (method, path, range header, bytes sent) of everything asked."""

    url: str
    repositories: dict[str, Repository]
    requests: list[tuple[str, str, str | None, int]] = field(default_factory=list)

    def sent(self, suffix: str) -> int:
        """Bytes sent of files that end in ``suffix``."""
        return sum(n for method, path, _, n in self.requests if method == "GET" and path.endswith(suffix))


@contextmanager
def running(repositories: dict[str, Repository]) -> Iterator[Hub]:
    """Serve ``org/name`` → repository on a free port of 127.0.0.1."""
    hub = Hub("", repositories)

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if match := _API.fullmatch(path):
            self._api(match[1], match[2], match[3], body)
        elif match := _FILE.fullmatch(path):
            self._file(*match.groups())
        else:
            self._error(404, "EntryNotFound", "no such page")

    def _repository(self, name: str, revision: str | None) -> Repository | None:
        """The repository if the request may have it; otherwise the error has been sent."""
        repository = self.state.repositories.get(name)
        allowed = repository is not None and (
            repository.token is None or self.headers.get("Authorization") == f"Bearer {repository.token}"
        )
        if repository is None or not allowed:
            self._error(401, "RepoNotFound", "Repository not found")
        elif repository.gated:
            self._error(403, "GatedRepo", "Access to this model is restricted")
        elif revision is not None and revision not in repository.revisions:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repository
        return None

    def _api(self, name: str, what: str | None, revision: str | None, body: bytes) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        if what in ("tree", "paths-info"):
            wanted = None
            if what == "paths-info":
                is_json = "json" in (self.headers.get("Content-Type") or "")
                wanted = json.loads(body)["paths"] if is_json else parse_qs(body.decode())["paths"]
            rows = [_row(path) for file, path in repository.files().items() if wanted is None or file in wanted]
            self._json(rows)
            return
        siblings = [{"rfilename": file} for file in repository.files()]
        self._json({"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "private": False, "siblings": siblings})

    def _json(self, document: Any) -> None:
        content = json.dumps(document).encode()
        self._send(200, {"Content-Type": "application/json"}, content, len(content))

    def _file(self, name: str, revision: str, file: str) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        path = repository.files().get(file)
        if path is None:
            self._error(404, "EntryNotFound", f"{file} does not exist")
            return
        content = path.read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        status = 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            begin, size = int(asked[1]), len(content)
            end = min(int(asked[2]) + 1 if asked[2] else size, size)
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
            content, status = content[begin:end], 206
        length = len(content)
        if self.command == "GET" and status == 200 and file in repository.cut:
            content = content[: repository.cut.pop(file)]
        self._send(status, headers, content, length)

    def _error(self, status: int, code: str, message: str) -> None:
        content = json.dumps({"error": message}).encode()
        self._send(status, {"X-Error-Code": code, "X-Error-Message": message}, content, len(content))

    def _send(self, status: int, headers: dict[str, str], content: bytes, length: int) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        sent = 0
        if self.command != "HEAD":
            self.wfile.write(content)
            sent = len(content)
        self.state.requests.append((self.command, unquote(urlsplit(self.path).path), self.headers.get("Range"), sent))
        if self.command != "HEAD" and len(content) < length:
            self.close_connection = True


def _row(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    oid = hashlib.sha1(content).hexdigest()
    row: dict[str, Any] = {"type": "file", "path": path.name, "size": len(content), "oid": oid}
    if path.suffix == ".safetensors":
        row["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return row
