"""The application of this folder on one machine: two replicas of a tiny model, no GPU.

    NINFER_ARTIFACT=tiny.ninfer pytest examples/ray

The tests of a running cluster need Ray (``pip install "ray[serve]"``) and an artifact; the others need neither.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from lost import LOST, error_event, refusal  # noqa: E402
from sessions import Sessions, ranked  # noqa: E402

try:
    import ray
except ImportError:
    ray = None

ARTIFACT = os.environ.get("NINFER_ARTIFACT")
needs_ray = pytest.mark.skipif(ray is None or not ARTIFACT, reason="needs Ray, and an artifact in NINFER_ARTIFACT")
PORT = int(os.environ.get("NINFER_RAY_PORT", "18123"))
MODEL = "tiny"
APP = "ninfer"
RETURN_SECONDS = 120.0
LONG: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 200}
"""A form that takes longer to write than the tests need."""


# ---- sessions, without a cluster -----------------------------------------------------------------
def key_of(body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str) -> str:
    return Sessions().key(path, headers, json.dumps(body).encode())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_replica_that_leaves_moves_its_own_sessions_only() -> None:
    replicas = ["a", "b", "c", "d"]
    keys = [str(i) for i in range(400)]
    before = {key: ranked(key, replicas)[0] for key in keys}
    assert all(60 < list(before.values()).count(replica) < 140 for replica in replicas)
    for key in keys:
        after = ranked(key, ["d", "b", "a"])[0]
        assert after == before[key] or before[key] == "c"
        assert ranked(key, replicas)[1:] == [other for other in ranked(key, replicas) if other != before[key]]


def test_a_conversation_keeps_its_session_as_it_grows() -> None:
    first, more = [user("hi")], [user("hi"), {"role": "assistant", "content": "Hello"}, user("again")]
    system = {"role": "system", "content": "Be brief."}
    assert key_of({"messages": first}) == key_of({"messages": more, "temperature": 1})
    assert key_of({"messages": [system, *first]}) == key_of({"messages": [system, *more]})
    assert key_of({"input": first}, "/v1/responses") == key_of({"input": more}, "/v1/responses")
    different = [
        {"messages": first}, {"messages": [user("ho")]}, {"messages": [system, *first]},
        {"messages": first, "system": "x"}, {"messages": first, "tools": [{}]}, {"prompt": "hi"}, {"prompt": "ho"}, {},
    ]  # fmt: skip
    assert len({key_of(body) for body in different}) == len(different)


def test_a_session_that_is_named_goes_before_what_was_said() -> None:
    assert key_of({"messages": [user("a")], "prompt_cache_key": "k"}) == "k"
    assert Sessions().key("/v1/messages", {"x-session-id": "s"}, b'{"prompt_cache_key": "k"}') == "s"
    for body in (b"", b"[", b"[]", b"7", b"[" * 100_000):
        assert Sessions().key("/v1/models", {}, body)


def test_a_stored_response_is_looked_for_where_it_was_made() -> None:
    sessions = Sessions(most=2)
    response_ids = [f"resp_{i:032x}" for i in range(3)]
    for i, response_id in enumerate(response_ids):
        chunk = f'event: response.created\ndata: {{"response":{{"id":"{response_id}"'.encode()
        assert not sessions.learn("/v1/responses", f"key {i}", chunk)
    assert sessions.learn("/v1/responses", "key", b": still working\n\n")
    assert not sessions.learn("/v1/messages", "key", b'"id":"' + response_ids[0].encode() + b'"')
    follow = json.dumps({"previous_response_id": response_ids[2]}).encode()
    assert sessions.key("/v1/responses", {}, follow) == "key 2"
    assert sessions.key(f"/v1/responses/{response_ids[1]}/input_items", {}, b"") == "key 1"
    assert sessions.key(f"/v1/responses/{response_ids[0]}", {}, b"") != "key 0"


def test_a_lost_replica_is_told_in_the_words_of_the_api() -> None:
    assert error_event("/v1/chat/completions", 3).endswith(b"data: [DONE]\n\n")
    assert b'"sequence_number":7' in error_event("/v1/responses", 7)
    assert error_event("/v1/messages", 3).startswith(b"event: error\n")
    assert json.loads(refusal("/v1/messages", LOST))["type"] == "error"
    assert json.loads(refusal("/v1/responses", LOST))["error"]["code"] == "replica_lost"


# ---- a cluster -----------------------------------------------------------------------------------
def application(**changes: Any) -> Any:
    from serve_app import Args, build

    return build(
        Args(
            artifact=str(ARTIFACT), replicas=2, gpus=0, cpus=0.5, backend="reference", model_id=MODEL, max_context=512,
            health_seconds=1.0, max_request_mib=1, drain_seconds=30.0, **changes,
        )
    )  # fmt: skip


class Cluster:
    """The running application and its clients."""

    def __init__(self) -> None:
        import anthropic
        import openai

        url = f"http://127.0.0.1:{PORT}"
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=120)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=120)

    def replica_of(self, session: str) -> str:
        """Which replica answers a session."""
        made = self.openai.chat.completions.with_raw_response.create(
            model=MODEL, messages=[user("hi")], max_tokens=1, extra_headers={"x-session-id": session}
        )
        return made.headers["x-ninfer-replica"]

    def stats(self, session: str) -> dict[str, Any]:
        """Numbers of the session's engine."""
        connection = HTTPConnection("127.0.0.1", PORT, timeout=60)
        connection.request("GET", "/stats", headers={"x-session-id": session})
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        return found

    def replicas(self) -> set[str]:
        """Those that answer now."""
        return {self.replica_of(f"probe {i}") for i in range(12)}

    def wait_for(self, expected: Callable[[set[str]], bool]) -> set[str]:
        """Return once the answering replicas are as expected."""
        until = time.monotonic() + RETURN_SECONDS
        while not expected(found := self.replicas()):
            assert time.monotonic() < until, f"still {found}"
            time.sleep(0.5)
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    from ray import serve

    paths = os.pathsep.join((str(HERE), str(HERE.parents[1])))
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )  # fmt: skip
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        serve.run(application(), name=APP, route_prefix="/")
        yield Cluster()
    finally:
        serve.shutdown()
        ray.shutdown()


@needs_ray
def test_a_session_stays_with_its_replica_and_finds_its_prefix_there(cluster: Cluster) -> None:
    homes = {session: cluster.replica_of(session) for session in map(str, range(12))}
    assert len(set(homes.values())) == 2
    assert all(cluster.replica_of(session) == home for session, home in homes.items())
    turns: list[Any] = [user("What is 2 + 3? Say it slowly, and then say it again.")]
    cached, seen = [], set()
    for _ in range(3):
        raw = cluster.openai.chat.completions.with_raw_response.create(
            model=MODEL, messages=turns, max_tokens=30, seed=1
        )
        made = raw.parse()
        seen.add(raw.headers["x-ninfer-replica"])
        assert made.usage is not None
        assert made.usage.prompt_tokens_details is not None
        cached.append(made.usage.prompt_tokens_details.cached_tokens)
        turns += [{"role": "assistant", "content": made.choices[0].message.content or "-"}, user("And again?")]
    assert len(seen) == 1
    assert cached[2] > 0


@needs_ray
def test_errors_come_through_as_they_are(cluster: Cluster) -> None:
    import anthropic
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        cluster.openai.chat.completions.create(model=MODEL, messages=[user("hi")], temperature=9)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
    with pytest.raises(anthropic.NotFoundError):
        cluster.anthropic.messages.batches.retrieve("none")
    with pytest.raises(openai.APIStatusError) as too_large:
        cluster.openai.responses.create(model=MODEL, input="x" * (1 << 20))
    assert (too_large.value.status_code, too_large.value.code) == (413, "request_too_large")


@needs_ray
def test_stored_responses_are_continued_where_they_are(cluster: Cluster) -> None:
    for i in range(4):
        made = cluster.openai.responses.create(model=MODEL, input=f"Count to {i}.", max_output_tokens=16)
        for _ in range(2):
            made = cluster.openai.responses.create(
                model=MODEL, input="Go on.", previous_response_id=made.id, max_output_tokens=16
            )
            assert cluster.openai.responses.retrieve(made.id).id == made.id


@needs_ray
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_cancels_its_answer(cluster: Cluster, is_stream: bool) -> None:
    connection = HTTPConnection("127.0.0.1", PORT, timeout=60)
    asked = {"model": MODEL, "messages": [user("Count.")], "max_tokens": 480, "ignore_eos": True, "stream": is_stream}
    headers = {"x-session-id": "gone", "content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(asked), headers)
    response = connection.getresponse() if is_stream else None
    assert response is None or response.read(100)
    until = time.monotonic() + 30
    while cluster.stats("gone")["running"] == 0:
        assert time.monotonic() < until
    if response is not None:
        response.close()
    connection.close()
    before = time.monotonic()
    while cluster.stats("gone")["running"]:
        assert time.monotonic() < until
        time.sleep(0.02)
    print(f"cancelled after {time.monotonic() - before:.2f} s")
    assert cluster.stats("gone")["requests_finished"]["cancelled"] >= 1


class Stream(threading.Thread):
    """One stream of one API, read to its end or to its error."""

    def __init__(self, cluster: Cluster, api: str, session: str) -> None:
        super().__init__(daemon=True)
        self.api = api
        self.cluster = cluster
        self.headers = {"x-session-id": session}
        self.n_events = 0
        self.last: Any = None
        self.error: BaseException | None = None

    def open(self) -> Any:
        """The events."""
        headers, question = self.headers, "Count."
        schema: dict[str, Any] = {"type": "json_schema", "schema": LONG}
        match self.api:
            case "chat":
                return self.cluster.openai.chat.completions.create(
                    model=MODEL, messages=[user(question)], stream=True, max_tokens=400, extra_headers=headers,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
            case "responses":
                return self.cluster.openai.responses.create(
                    model=MODEL, input=question, stream=True, max_output_tokens=400, extra_headers=headers,
                    text={"format": {**schema, "name": "numbers"}}, reasoning={"effort": "none"},
                )  # fmt: skip
        return self.cluster.anthropic.messages.create(
            model=MODEL, messages=[user(question)], stream=True, max_tokens=400, extra_headers=headers,
            output_config={"format": schema}, thinking={"type": "disabled"},
        )  # fmt: skip

    def run(self) -> None:
        try:
            for event in self.open():
                self.n_events += 1
                self.last = event
        except Exception as error:
            self.error = error


@needs_ray
def test_a_killed_replica_ends_its_own_streams_with_an_error_and_comes_back(cluster: Cluster) -> None:
    sessions: dict[str, list[str]] = {}
    for session in map(str, range(40)):
        sessions.setdefault(cluster.replica_of(session), []).append(session)
    victim, survivor = sessions
    streams = {
        home: [
            Stream(cluster, api, session)
            for api, session in zip(("chat", "responses", "messages"), sessions[home], strict=False)
        ]
        for home in (victim, survivor)
    }
    every = [stream for home in streams.values() for stream in home]
    for stream in every:
        stream.start()
    until = time.monotonic() + 60
    while any(stream.n_events < 5 for stream in every):
        assert time.monotonic() < until, [(stream.api, stream.n_events, stream.error) for stream in every]
        time.sleep(0.02)
    killed_at = time.monotonic()
    ray.kill(replica_actor(victim))
    # Meanwhile everybody is answered: the victim's sessions by the other one, its own as before.
    for session in (*sessions[victim][:4], *sessions[survivor][:4]):
        assert cluster.replica_of(session) != victim
    assert all(cluster.replica_of(session) == survivor for session in sessions[survivor])
    for stream in every:
        stream.join(120)
        assert not stream.is_alive()
    for stream in streams[survivor]:
        assert stream.error is None, stream.error
        kind = getattr(stream.last, "type", None)
        assert kind in (None, "message_stop", "response.completed", "response.incomplete")
    for stream in streams[victim]:
        failed = stream.error or stream.last
        assert "replica" in str(failed), (stream.api, failed)
        assert stream.error is not None or stream.last.type == "error"
        print(f"{stream.api}: {type(failed).__name__} after {stream.n_events} events")
    found = cluster.wait_for(lambda replicas: len(replicas) == 2)
    assert victim not in found
    assert survivor in found
    print(f"two replicas again {time.monotonic() - killed_at:.1f} s after one was killed")


@needs_ray
def test_engines_restart_one_by_one_and_nobody_notices(cluster: Cluster) -> None:
    from ray import serve

    before = cluster.replicas()
    failures: list[BaseException] = []
    n_answered = 0
    is_over = threading.Event()

    def ask() -> None:
        nonlocal n_answered
        while not is_over.is_set():
            try:
                cluster.replica_of(f"rolling {n_answered}")
                n_answered += 1
            except Exception as error:
                failures.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    serve.run(application(version="2"), name=APP, route_prefix="/")
    found = cluster.wait_for(lambda replicas: len(replicas) == 2 and not replicas & before)
    is_over.set()
    asking.join(60)
    print(f"{n_answered} answers while {sorted(before)} became {sorted(found)}")
    assert not failures, failures[:3]
    assert n_answered > 10


@needs_ray
def test_the_config_file_is_one() -> None:
    import yaml
    from ray.serve.schema import ServeDeploySchema
    from serve_app import Args

    config = ServeDeploySchema.model_validate(yaml.safe_load((HERE / "config.yaml").read_text("utf-8")))
    (application_config,) = config.applications
    assert Args(**application_config.args).gpus == 1


@needs_ray
def test_a_replica_whose_engine_has_failed_says_so() -> None:
    from serve_app import Engine

    check = Engine.func_or_class.check_health
    good, bad = (SimpleNamespace(is_healthy=not fault, fault=fault) for fault in (None, "the device is gone"))
    asyncio.run(check(SimpleNamespace(_service=SimpleNamespace(life=good))))
    with pytest.raises(RuntimeError, match="the device is gone"):
        asyncio.run(check(SimpleNamespace(_service=SimpleNamespace(life=bad))))


def replica_actor(unique_id: str) -> Any:
    """The actor behind a replica."""
    for found in ray.util.list_named_actors(all_namespaces=True):
        if found["name"].endswith(f"#Engine#{unique_id}"):
            return ray.get_actor(found["name"], found["namespace"])
    raise AssertionError(f"no actor of {unique_id}")
