"""Who may ask, and what is checked before a body is parsed; nothing secret is told or written down."""

from __future__ import annotations

import gzip
import hmac
import json
import logging
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from ninfer_format.errors import StorageError, UsageError
from ninfer_runtime.serve.auth import Gate, check_bind, is_loopback, read_keys
from ninfer_runtime.serve.errors import ApiError
from ninfer_runtime.serve.limits import check_depth, parse_body
from ninfer_runtime.serve.settings import ServeSettings
from tests.runtime.conftest import ArtifactOf
from tests.serve.live import MODEL, LiveServer
from tests.serve.programmed import programmed

KEYS = ("first-key-1234", "second-key-5678")
CHAT = "/v1/chat/completions"
MESSAGE = {"model": MODEL, "messages": [{"role": "user", "content": "my secret words"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def guarded(artifact_of: ArtifactOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with keys, small limits and a request log."""
    log = tmp_path_factory.mktemp("log") / "requests.jsonl"
    settings = ServeSettings(api_keys=KEYS, max_request_bytes=20_000, max_depth=20, request_log=log, cors=True)
    with programmed(artifact_of("dense", "bf16"), settings=settings) as (server, _):
        yield server


# ---- addresses and keys ----------------------------------------------------------------------------
def test_c30_the_default_is_loopback_without_a_key() -> None:
    assert is_loopback(ServeSettings().host)
    check_bind(ServeSettings())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com"])
def test_c30_the_network_needs_a_key_or_the_word_insecure(host: str) -> None:
    with pytest.raises(UsageError, match="--api-key-file"):
        check_bind(ServeSettings(host=host))
    check_bind(ServeSettings(host=host, api_keys=KEYS))
    check_bind(ServeSettings(host=host, insecure=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "a.localhost"])
def test_loopback_has_many_names(host: str) -> None:
    assert is_loopback(host)


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# who\n\n  {KEYS[0]}  \n{KEYS[1]}\n{KEYS[0]}\n")
    assert read_keys(file, {}) == KEYS
    assert read_keys(None, {"NINFER_API_KEY": f"{KEYS[1]}, third-key-90"}) == (KEYS[1], "third-key-90")
    assert read_keys(None, {}) == ()
    for text in ("", "# nothing\n", "short\n", "has a blank in it\n", "schlüssel-lang\n"):
        file.write_text(text)
        with pytest.raises(UsageError):
            read_keys(file, {})
    with pytest.raises(StorageError):
        read_keys(tmp_path / "nothing", {})


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/messages", "/v1/models", "/metrics", "/props", "/stats", "/tokenize", "/no"]
)
def test_without_a_key_nothing_is_answered(guarded: LiveServer, path: str) -> None:
    wrong: list[dict[str, str]] = [
        {}, {"authorization": "Bearer wrong-key-1"}, {"x-api-key": KEYS[0][:-1]}, {"authorization": f"Basic {KEYS[0]}"},
        {"authorization": KEYS[0]}, {"authorization": "Bearer "}, {"x-api-key": ""}, {"api-key": KEYS[0]},
    ]  # fmt: skip
    for headers in wrong:
        for method, body in (("GET", None), ("POST", MESSAGE)):
            answer = guarded.ask(method, path, body, headers)
            assert answer.status == 401
            error = answer.json["error"]
            if path == "/v1/messages":
                assert answer.json["type"] == "error"
                assert error["type"] == "authentication_error"
            else:
                assert error["code"] == "invalid_api_key"


def test_either_key_in_either_header_opens(guarded: LiveServer) -> None:
    for key in KEYS:
        for headers in ({"authorization": f"Bearer {key}"}, {"Authorization": f"bearer  {key}"}, {"x-api-key": key}):
            assert guarded.ask("GET", "/v1/models", headers=headers).status == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/"])
def test_health_and_the_page_need_no_key(guarded: LiveServer, path: str) -> None:
    assert guarded.ask("GET", path).status == 200


def test_the_official_client_has_its_own_error_for_it(guarded: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong-key-123", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert client.with_options(api_key=KEYS[1]).models.list().data[0].id == MODEL


def test_keys_are_compared_in_constant_time_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, real = [], hmac.compare_digest

    def noting(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", noting)
    gate = Gate(ServeSettings(api_keys=KEYS))
    for key in ("x", KEYS[0], "y" * 1000):
        compared.clear()
        try:
            gate.check("GET", "/v1/models", [(b"x-api-key", key.encode())])
        except ApiError:
            assert key != KEYS[0]
        assert len(compared) == 4
        assert {size for pair in compared for size in pair} == {32}


# ---- names a browser could use ---------------------------------------------------------------------
def test_a_foreign_host_header_is_refused_on_a_loopback_server_without_keys() -> None:
    gate = Gate(ServeSettings(allowed_hosts=("my.box",)))
    for host in ("localhost:8080", "127.0.0.1:9", "[::1]:8080", "my.box:80", "MY.box", "", "a.localhost"):
        gate.check("GET", "/v1/models", [(b"host", host.encode())])
    for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example"):
        with pytest.raises(ApiError) as caught:
            gate.check("GET", "/v1/models", [(b"host", host.encode())])
        assert caught.value.problem.status == 403
    Gate(ServeSettings(api_keys=KEYS)).check(
        "GET", "/v1/models", [(b"host", b"evil.example"), (b"x-api-key", KEYS[0].encode())]
    )


def test_pages_of_other_origins_are_let_in_only_if_asked(guarded: LiveServer, server: LiveServer) -> None:
    origin = {"origin": "https://page.example", "access-control-request-method": "POST"}
    preflight = guarded.ask("OPTIONS", CHAT, headers=origin)
    assert preflight.status == 204
    assert preflight.headers["access-control-allow-origin"] == "*"
    assert {"authorization", "*"} <= set(preflight.headers["access-control-allow-headers"].split(", "))
    refused = server.ask("OPTIONS", CHAT, headers=origin)
    assert refused.status == 405
    assert not any(name.startswith("access-control") for name in refused.headers)
    assert not any(name.startswith("access-control") for name in server.chat(max_tokens=1).headers)


# ---- bodies ----------------------------------------------------------------------------------------
def post(server: LiveServer, body: bytes, **headers: str) -> Any:
    sent = {"x-api-key": KEYS[0], "content-type": "application/json"}
    return server.ask("POST", CHAT, body, {**sent, **{name.replace("_", "-"): v for name, v in headers.items()}})


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/tokenize"])
def test_c21_errors_have_the_envelope_of_their_api(guarded: LiveServer, path: str) -> None:
    key = {"x-api-key": KEYS[0]}
    as_json = {**key, "content-type": "application/json"}
    cases = [
        (guarded.ask("POST", path, b'{"model": ', as_json), 400),
        (guarded.ask("POST", path, b"\xff", as_json), 400),
        (guarded.ask("POST", path, b"[1]", as_json), 400),
        (guarded.ask("POST", path, b"", as_json), 400),
        (guarded.ask("POST", path, b"{}", {**key, "content-type": "text/plain"}), 415),
        (guarded.ask("POST", path, b"{}", {**key, "content-type": ""}), 415),
        (guarded.ask("POST", path, gzip.compress(b"{}"), {**as_json, "content-encoding": "gzip"}), 415),
        (guarded.ask("POST", path, b" " * 30_000, as_json), 413),
        (guarded.ask("GET", path, None, key), 405),
        (guarded.ask("PUT", path, b"{}", as_json), 405),
        (guarded.ask("POST", path + "/nothing/here", b"{}", as_json), 404),
    ]
    for answer, status in cases:
        assert answer.status == status, answer.body
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-request-id"].startswith("req_")
        error = answer.json["error"]
        assert error["message"]
        if path == "/v1/messages":
            assert answer.json["type"] == "error"
        else:
            assert set(error) == {"message", "type", "param", "code"}


def test_a_body_is_cut_off_at_the_limit_whatever_its_header_says(guarded: LiveServer) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-api-key: {KEYS[0]}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=20) as client:
        client.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        found = b""
        try:
            for _ in range(1000):
                client.sendall(b"1000\r\n" + b" " * 0x1000 + b"\r\n")
        except OSError:
            pass
        try:
            found = client.recv(1 << 16)
        except OSError:
            found = b""
    assert not found or b" 413 " in found
    assert guarded.ask("GET", "/health").status == 200
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=20) as client:
        client.sendall(f"{head}Content-Length: 999999999999\r\n\r\n".encode())
        assert b" 413 " in client.recv(1 << 16)


def test_nesting_is_limited_before_parsing(guarded: LiveServer) -> None:
    deep = b'{"messages": ' + b"[" * 19 + b"]" * 19 + b"}"
    assert post(guarded, deep).json["error"]["code"] != "nesting_too_deep"
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        answer = post(guarded, b'{"messages": ' + opening * 20 + b"1" + closing * 20 + b"}")
        assert (answer.status, answer.json["error"]["code"]) == (400, "nesting_too_deep")
    in_text = json.dumps({**MESSAGE, "messages": [{"role": "user", "content": '[{"' * 100}]}).encode()
    assert post(guarded, in_text).status == 200


def test_depth_counts_brackets_and_not_texts() -> None:
    check_depth(b'["[[[[", "\\"[[[[", "\\\\", {"{{{": "}}}"}]', 2)
    for body in (b"[[[", b'["a", ["b", []]]', b'["\\\\", [[]]]', b'{"a": {"b": {}}}', b'"[[[[[[[', b'["x\\'):
        if body.startswith((b'"', b'["x')):
            with pytest.raises(ApiError):
                parse_body(body, 2)
            continue
        with pytest.raises(ApiError, match="nested"):
            check_depth(body, 2)


def test_depth_is_counted_in_a_time_that_grows_with_the_body_alone() -> None:
    import time

    for body in (b"[" * 1_000_000, b'"' * 1_000_001, b"\\" * 1_000_000, b'"\\' * 500_000, b'["' * 500_000):
        begin = time.process_time()
        check_depth(body, 10_000_000)
        assert time.process_time() - begin < 5


@pytest.mark.parametrize(
    "body", [b'{"a": 1, "a": 2}', b'{"a": NaN}', b"\xef\xbb\xbf{}", b'{"a": 1e999}', b"{'a': 1}", b'{"a": 1,}', b"nul"]
)
def test_json_is_taken_strictly(guarded: LiveServer, body: bytes) -> None:
    answer = post(guarded, body)
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_json")


# ---- what is written down --------------------------------------------------------------------------
def test_neither_keys_nor_prompts_are_in_any_log(guarded: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("ninfer")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG, "ninfer"):
            assert post(guarded, json.dumps(MESSAGE).encode()).status == 200
            for wrong in (
                {"temperature": 9}, {"messages": "my secret words"}, {"my secret words": 1},
                {"model": "my secret words"}, {"stream": "my secret words"},
                {"messages": [{"role": "user", "content": "a", "my secret words": 1}]},
                {"tool_choice": {"type": "function", "function": {"name": "my secret words"}}},
                {"response_format": {"type": "my secret words"}}, {"logit_bias": {"my secret words": 1}},
                {"structured_outputs": {"regex": "(my secret words"}},
            ):  # fmt: skip
                assert 400 <= post(guarded, json.dumps({**MESSAGE, **wrong}).encode()).status < 500
            guarded.ask("POST", CHAT, MESSAGE, {"x-api-key": "an-attempted-key"})
            guarded.wait_until_idle()
    finally:
        logger.removeHandler(caplog.handler)
    log = guarded.service.settings.request_log
    assert log is not None
    written = caplog.text + log.read_text()
    assert "request_done" in written
    for secret in ("my secret words", "attempted", *KEYS):
        assert secret not in written


def test_the_request_log_is_for_its_owner_alone(guarded: LiveServer) -> None:
    log = guarded.service.settings.request_log
    assert log is not None
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", 70000), ("log_level", "loud"), ("metrics_prefix", "a:b"), ("model_id", ""), ("api_keys", ("",))],
)
def test_settings_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError):
        replace(ServeSettings(), **{name: value})


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10 ** 9) %}{% for j in range(10 ** 9) %}{% endfor %}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 'a' * 10 ** 12 }}",
        "{% for m in messages %}{{ m.content * 10 ** 9 }}{% endfor %}",
    ],
)
def test_a_template_can_neither_run_for_ever_nor_get_out(template: str) -> None:
    from ninfer_format.errors import NinferError
    from ninfer_runtime.text.template import ChatTemplate

    with pytest.raises(NinferError):
        ChatTemplate(template, ()).render([{"role": "user", "content": "a"}])
