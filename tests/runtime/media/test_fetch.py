"""Media by URL: what the policy lets in, and every way around it that is known."""

from __future__ import annotations

import base64
import http.server
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ninfer_format.errors import NinferError, UsageError
from ninfer_runtime.media import remote
from ninfer_runtime.media.errors import MediaBudgetError, MediaError, MediaFetchError, MediaTimeoutError
from ninfer_runtime.media.fetch import Medium, fetch
from ninfer_runtime.media.policy import MediaBudget, MediaPolicy, is_public, read_networks
from ninfer_runtime.serve.errors import problem_of

PIXEL = bytes(range(256)) * 3
POLICY = MediaPolicy(connect_seconds=2, total_seconds=5, max_item_bytes=10_000, max_total_bytes=15_000, max_items=3)
LOOPBACK = replace(POLICY, allowed_networks=read_networks(["127.0.0.0/8"]))

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


def get(url: str, policy: MediaPolicy = POLICY) -> Medium:
    return fetch(url, policy, MediaBudget(policy))


@contextmanager
def web(**pages: Answer) -> Iterator[str]:
    """A server on 127.0.0.1 whose page ``/name`` is answered by a function."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages[self.path.strip("/").partition("?")[0]](self)

        def log_message(self, *_: Any) -> None:
            """Nothing is logged."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def sends(content: bytes, status: int = 200, **headers: str) -> Answer:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content_Length": str(len(content)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def redirects(to: str, status: int = 302) -> Answer:
    return sends(b"", status, Location=to)


# ---- data: -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64," + base64.b64encode(PIXEL).decode(),
        "DATA:image/png;BASE64," + base64.b64encode(PIXEL + b"\0").decode().rstrip("="),
        "  data:image/png;base64,\n" + base64.encodebytes(PIXEL).decode(),
        "data:image/png;charset=x;base64," + base64.urlsafe_b64encode(PIXEL).decode(),
        "data:image/png;base64," + base64.b64encode(PIXEL).decode().replace("+", "%2B").replace("/", "%2F"),
    ],
)
def test_g6_data_urls_that_are_unambiguous_are_taken(url: str) -> None:
    medium = get(url)
    assert medium.content.rstrip(b"\0") == PIXEL.rstrip(b"\0")
    assert medium.media_type == "image/png"


def test_a_data_url_need_not_be_base64() -> None:
    assert get("data:,a%20b").content == b"a b"


@pytest.mark.parametrize("url", ["data:image/png;base64,A", "data:;base64,AA*A", "data:;base64,", "data:,", "data:x"])
def test_g6_other_data_urls_are_refused(url: str) -> None:
    with pytest.raises(MediaError):
        get(url)


@pytest.mark.parametrize("head", ["data:;base64,", "data:,"])
def test_g6_size_is_checked_before_decoding(head: str) -> None:
    with pytest.raises(MediaBudgetError):
        get(head + "A" * 100_000)
    with pytest.raises(MediaBudgetError):
        get(head + "A" * (10_004 * 4 // 3 + 4))


def test_a_request_has_a_budget_of_items_and_bytes() -> None:
    budget, url = MediaBudget(POLICY), "data:," + "a" * 8000
    fetch(url, POLICY, budget)
    with pytest.raises(MediaBudgetError):
        fetch(url, POLICY, budget)
    fetch("data:,a", POLICY, budget)
    with pytest.raises(MediaBudgetError, match="more than 3"):
        fetch("data:,a", POLICY, budget)


# ---- remote ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "localhost", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0.0.0.0", "[::1]",
        "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::]", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254",
        "[fe80::1]", "[fd00::1]", "224.0.0.1", "255.255.255.255", "100.64.0.1", "[64:ff9b::7f00:1]", "[2002:7f00:1::]",
        "[::127.0.0.1]",
    ],
)  # fmt: skip
def test_c28_addresses_that_are_not_public_are_refused_however_they_are_spelled(host: str) -> None:
    with pytest.raises((MediaError, MediaFetchError)) as caught:
        get(f"http://{host}:1/x.png")
    assert isinstance(caught.value, MediaError) or "not known" in str(caught.value)


def test_public_and_other_addresses() -> None:
    for text in ("8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8", "64:ff9b::808:808"):
        assert is_public(ipaddress.ip_address(text)), text
    for text in ("198.18.0.1", "240.0.0.1", "2001:db8::1", "ff02::1", "fec0::1", "2001:0:7f00:1::"):
        assert not is_public(ipaddress.ip_address(text)), text


def test_c28_a_name_that_resolves_to_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = []

    def lookup(host: str, port: int, **_: Any) -> list[Any]:
        looked_up.append(host)
        return [(socket.AF_INET, 1, 6, "", (ip, port)) for ip in ("8.8.8.8", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with pytest.raises(MediaError, match="not public"):
        get("http://innocent.example/x.png")
    assert looked_up == ["innocent.example"]


def test_c28_the_address_that_was_checked_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves differently the second time gains nothing: there is no second time."""
    looked_up: list[str] = []

    def look_up(host: str, port: int, found: list[Any]) -> None:
        looked_up.append(host)
        found.append(["127.0.0.1"])

    seen: list[str] = []
    page = sends(PIXEL)

    def noting(handler: http.server.BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers["Host"])
        page(handler)

    with web(x=noting) as url:
        port = int(url.rpartition(":")[2])
        monkeypatch.setattr(remote, "_look_up", look_up)
        assert get(f"http://turning.example:{port}/x", LOOPBACK).content == PIXEL
    assert looked_up == ["turning.example"]
    assert seen == [f"turning.example:{port}"]


def test_c28_every_hop_of_a_redirect_is_checked() -> None:
    with web(inside=sends(PIXEL)) as target:
        hidden = target.replace("127.0.0.1", "127.0.0.2")
        for to in (hidden + "/inside", target.replace("127.0.0.1", "2130706434") + "/inside"):
            with web(x=redirects(to)) as url:
                only_one = replace(POLICY, allowed_networks=read_networks(["127.0.0.1/32"]))
                with pytest.raises(MediaError, match="not public"):
                    get(url + "/x", only_one)


def test_redirects_are_followed_so_far_and_no_further() -> None:
    with web(a=redirects("/b", 301), b=redirects("c?q=1", 307), c=redirects("/d", 308), d=sends(PIXEL)) as url:
        assert get(url + "/a", LOOPBACK).content == PIXEL
        with pytest.raises(MediaFetchError, match="more than 2 times"):
            get(url + "/a", replace(LOOPBACK, max_redirects=2))
    with web(a=redirects("/a")) as url, pytest.raises(MediaFetchError, match="more than"):
        get(url + "/a", LOOPBACK)


@pytest.mark.parametrize(
    "to", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://user:pass@127.0.0.1/", "http://", ""]
)
def test_redirects_lead_to_nothing_else(to: str) -> None:
    with web(x=redirects(to)) as url, pytest.raises((MediaError, MediaFetchError)):
        get(url + "/x", LOOPBACK)


def test_what_is_sent_is_read_with_its_type() -> None:
    with web(x=sends(PIXEL, Content_Type="Image/PNG; charset=x")) as url:
        medium = get(f"  {url}/x?token=secret ", LOOPBACK)
    assert (medium.content, medium.media_type) == (PIXEL, "image/png")
    assert "secret" not in medium.source


def dripping(n: int, seconds: float) -> Answer:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(n):
            try:
                handler.wfile.write(b"x")
                time.sleep(seconds)
            except OSError:
                return

    return answer


def test_slow_hosts_are_given_up() -> None:
    policy = replace(LOOPBACK, total_seconds=0.4, connect_seconds=0.4)
    is_over = threading.Event()

    def silent(_: http.server.BaseHTTPRequestHandler) -> None:
        is_over.wait(60)

    with web(drip=dripping(1000, 0.05), silent=silent) as url:
        for page in ("drip", "silent"):
            begin = time.monotonic()
            with pytest.raises(MediaTimeoutError):
                get(f"{url}/{page}", policy)
            assert time.monotonic() - begin < 20
        is_over.set()


def test_a_header_that_never_ends_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            client, _ = listening.accept()
            with client:
                try:
                    client.sendall(b"HTTP/1.1 200 OK\r\n")
                    for _ in range(1000):
                        client.sendall(b"x")
                        time.sleep(0.05)
                except OSError:
                    return

        threading.Thread(target=drip, daemon=True).start()
        begin = time.monotonic()
        with pytest.raises(MediaTimeoutError):
            get(f"http://127.0.0.1:{listening.getsockname()[1]}/x", replace(LOOPBACK, total_seconds=0.4))
        assert time.monotonic() - begin < 20


def endless(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"x" * 4096)
    except OSError:
        return


def test_size_is_limited_whatever_the_header_says() -> None:
    with web(big=sends(b"x" * 20_000), endless=endless) as url:
        for page in ("big", "endless"):
            with pytest.raises(MediaBudgetError):
                get(f"{url}/{page}", LOOPBACK)


@pytest.mark.parametrize(
    "answer",
    [
        sends(PIXEL, 404), sends(b"", 204), sends(b""), sends(PIXEL, Content_Encoding="gzip"),
        sends(PIXEL, Content_Length="9000"), redirects("", 302),
    ],
)  # fmt: skip
def test_hosts_that_do_not_deliver(answer: Answer) -> None:
    with web(x=answer) as url, pytest.raises(MediaFetchError):
        get(url + "/x", replace(LOOPBACK, total_seconds=1))


def test_a_host_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(MediaFetchError):
        get(f"http://127.0.0.1:{port}/x", LOOPBACK)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.com/x", "javascript:alert(1)", "http://u:p@example.com/x", "http:///x", "http://[::1", "gopher://x",
        "http://example.com/a b", "http://example.com/\r\nX: y", "http://example.com:99999/x", "x" * 9000,
    ],
)  # fmt: skip
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(MediaError):
        get(url)


def test_remote_media_can_be_switched_off() -> None:
    with pytest.raises(MediaError, match="not allowed here"):
        get("https://example.com/x.png", replace(POLICY, remote=False))


# ---- files -----------------------------------------------------------------------------------------
@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a b.png").write_bytes(PIXEL)
    (tmp_path / "secret").write_bytes(b"secret")
    return folder


def test_c29_files_are_read_under_their_root(root: Path) -> None:
    policy = replace(POLICY, roots=(root,))
    for url in (f"file://{root}/sub/a%20b.png", f"file://localhost{root}/sub/a%20b.png", f"FILE:{root}/sub/a%20b.png"):
        assert get(url, policy).content == PIXEL
    (root / "plain.png").write_bytes(PIXEL)
    assert get("plain.png", policy).content == PIXEL
    assert get(str(root / "sub" / ".." / "plain.png"), policy).content == PIXEL


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret", "sub/../../secret", "sub", ".", "", "nothing.png", "\0"])
def test_c29_everything_else_is_refused(root: Path, path: str) -> None:
    for url in (path, f"file://{path}" if path.startswith("/") else path):
        with pytest.raises(MediaError):
            get(url, replace(POLICY, roots=(root,)))
        with pytest.raises(MediaError):
            get(url)
    with pytest.raises(MediaError):
        get(f"file://elsewhere{root}/plain.png", replace(POLICY, roots=(root,)))


def test_c29_links_are_not_followed(root: Path) -> None:
    policy = replace(POLICY, roots=(root,))
    (root / "file.png").symlink_to(root.parent / "secret")
    (root / "folder").symlink_to(root.parent)
    (root / "good.png").symlink_to(root / "sub" / "a b.png")
    for path in ("file.png", "folder/secret", "good.png"):
        with pytest.raises(MediaError, match="cannot be read"):
            get(path, policy)


def test_only_regular_files_of_the_right_size(root: Path) -> None:
    policy = replace(POLICY, roots=(root,))
    os.mkfifo(root / "pipe")
    (root / "big").write_bytes(b"x" * 10_001)
    with pytest.raises(MediaError, match="regular"):
        get("pipe", policy)
    with pytest.raises(MediaBudgetError):
        get("big", policy)


def test_a_root_must_be_a_folder_and_a_network_one(root: Path) -> None:
    with pytest.raises(UsageError, match="--media-root"):
        MediaPolicy(roots=(root / "nothing",))
    with pytest.raises(UsageError, match="--media-allow-net"):
        read_networks(["10.0.0.0/33"])


def test_errors_have_their_status_and_code() -> None:
    expected: list[tuple[NinferError, int, str]] = [
        (MediaError("x"), 400, "invalid_media"),
        (MediaBudgetError("x"), 400, "media_budget_exceeded"),
        (MediaFetchError("x"), 502, "media_fetch_failed"),
        (MediaTimeoutError("x"), 504, "media_fetch_timeout"),
    ]
    for error, status, code in expected:
        problem = problem_of(error)
        assert (problem.status, problem.code) == (status, code)
