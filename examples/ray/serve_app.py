"""Several engines behind one address: a Ray Serve application with one ninfer engine per GPU.

    serve run serve_app:build artifact=/models/model.ninfer replicas=4

``Front`` takes HTTP, finds the session of a request and hands it to ``Engine``, whose replicas are chosen by
``SessionRouter``. Each replica is a whole ninfer server without a socket: its ASGI application is called directly.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from lost import LOST, TOO_LARGE, error_event, refusal
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from router import SessionRouter
from sessions import Sessions
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ninfer_runtime.commands.options import EngineOptions, SamplingOptions
from ninfer_runtime.commands.serve import ServeEngineOptions, facts_of, served_context, warm_up
from ninfer_runtime.commands.session import open_session
from ninfer_runtime.config import Proposer
from ninfer_runtime.serve.app import build_app
from ninfer_runtime.serve.auth import check_bind, read_keys
from ninfer_runtime.serve.service import Service
from ninfer_runtime.serve.settings import MIB, ServeSettings
from ninfer_runtime.text.frontend import Frontend

REPLICA_HEADER = "x-ninfer-replica"
MAX_TRIES = 3
"""A request whose replica dies before its answer has begun goes to another one."""
Message = dict[str, Any]


class Args(BaseModel):
    """What ``serve run`` and config files set.

    artifact       the model, at the same path on every node
    replicas, gpus engines, and GPUs of each; ``gpus`` 0 with the backend "reference" runs anywhere
    host           where Ray's proxy listens (``serve start --http-host``): beyond loopback a key is needed
    api_key_file   keys, one a line; ``NINFER_API_KEY`` in the replicas' environment adds more
    version        any text: changing it restarts the engines one by one
    """

    model_config = ConfigDict(extra="forbid")

    artifact: str
    replicas: int = 1
    gpus: float = 1
    cpus: float = 1
    backend: str = "cuda"
    model_id: str | None = None
    max_context: int | None = None
    max_concurrency: int = 4
    max_pending: int = 16
    spec: Proposer = "none"
    draft_tokens: int = 0
    host: str = "127.0.0.1"
    insecure: bool = False
    api_key_file: str | None = None
    max_request_mib: int = 384
    drain_seconds: float = 60.0
    health_seconds: float = 5.0
    version: str = "1"


@serve.deployment(name="Engine")
class Engine:
    """One engine with all of the server's routes."""

    async def __init__(self, args: Args) -> None:
        self._open = contextlib.AsyncExitStack()
        self._id = serve.get_replica_context().replica_id.unique_id
        self._service = self._started(args)
        self._app = build_app(self._service)
        inner = self._app.app
        await self._open.enter_async_context(inner.router.lifespan_context(inner))

    def _started(self, args: Args) -> Service:
        keys = read_keys(Path(args.api_key_file) if args.api_key_file else None)
        settings = ServeSettings(
            host=args.host,
            api_keys=keys,
            insecure=args.insecure,
            model_id=args.model_id,
            drain_seconds=args.drain_seconds,
            max_request_bytes=args.max_request_mib * MIB,
        )
        check_bind(settings)
        options = EngineOptions(
            Path(args.artifact), backend=args.backend, max_context=args.max_context,
            max_concurrency=args.max_concurrency, spec=args.spec, draft_tokens=args.draft_tokens,
        )  # fmt: skip
        session = self._open.enter_context(open_session(options))
        config = ServeEngineOptions(max_pending=args.max_pending).of(session.engine_config(served_context(session)))
        engine = self._open.enter_context(session.engine(config))
        frontend = Frontend.open(session.artifact)
        warm_up(engine, frontend)
        return Service(engine, frontend, settings, facts_of(session, engine, settings, SamplingOptions()))

    async def ask(self, session: str, scope: Message, body: bytes) -> AsyncIterator[list[Message]]:
        """One HTTP request: what the application sends, as many messages at once as there are."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        left = asyncio.Event()
        received = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            if (message := next(received, None)) is not None:
                return message
            await left.wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(self._app(scope, receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            is_over = False
            while not is_over:
                batch = [await sent.get()]
                while not sent.empty():
                    batch.append(sent.get_nowait())
                is_over = batch[-1] is None
                if messages := [self._marked(message) for message in batch if message is not None]:
                    yield messages
            await task
        finally:
            left.set()

    def _marked(self, message: Message) -> Message:
        if message["type"] == "http.response.start":
            message = {
                **message,
                "headers": [*message.get("headers", ()), (REPLICA_HEADER.encode(), self._id.encode())],
            }
        return message

    async def check_health(self) -> None:
        """Called by Ray Serve; it replaces a replica whose engine has failed."""
        if not self._service.life.is_healthy:
            raise RuntimeError(f"the engine has failed: {self._service.life.fault}")

    async def __del__(self) -> None:
        """Called by Ray Serve when the replica has no requests left."""
        await self._open.aclose()


@serve.deployment(name="Front")
class Front:
    """HTTP on one side, replicas of ``Engine`` on the other."""

    def __init__(self, engines: Any, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._engines = engines.options(method_name="ask", stream=True)
        self._sessions = Sessions()

    async def __call__(self, request: Request) -> Response:
        """Any request of any API."""
        path, received = request.url.path, bytearray()
        async for chunk in request.stream():
            received += chunk
            if len(received) > self._max_bytes:
                return Response(refusal(path, TOO_LARGE), TOO_LARGE.status, media_type="application/json")
        body = bytes(received)
        key = self._sessions.key(path, request.headers, body)
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method, "path": path,
            "raw_path": path.encode(), "query_string": request.scope["query_string"], "root_path": "", "scheme": "http",
            "headers": [tuple(pair) for pair in request.scope["headers"]], "client": None, "server": None,
        }  # fmt: skip
        for _ in range(MAX_TRIES):
            answer = self._engines.remote(key, scope, body)
            messages = aiter(answer)
            try:
                first = await anext(messages)
            except RayActorError:
                continue
            except BaseException:
                answer.cancel()
                raise
            start = first[0]
            content = self._content(path, key, first[1:], messages, answer)
            headers = {name.decode(): value.decode() for name, value in start["headers"]}
            return StreamingResponse(content, start["status"], headers)
        return Response(refusal(path, LOST), LOST.status, LOST.headers, "application/json")

    async def _content(
        self, path: str, key: str, first: list[Message], rest: AsyncIterator[list[Message]], answer: Any
    ) -> AsyncIterator[bytes]:
        """The body as it comes; an error event if the replica dies meanwhile."""
        n_events, is_new, is_complete = 0, True, False
        messages = first
        try:
            while True:
                chunk = b"".join(message.get("body", b"") for message in messages)
                n_events += chunk.count(b"\ndata: ")
                is_new = is_new and self._sessions.learn(path, key, chunk)
                if chunk:
                    yield chunk
                messages = await anext(rest)
        except StopAsyncIteration:
            is_complete = True
        except RayActorError:
            is_complete = True
            yield error_event(path, n_events)
        finally:
            if not is_complete:  # the client has left
                answer.cancel()


def build(args: Args) -> Any:
    """The application, for ``serve run`` and config files."""
    engines = Engine.options(
        num_replicas=args.replicas,
        max_ongoing_requests=args.max_concurrency + args.max_pending,
        ray_actor_options={"num_gpus": args.gpus, "num_cpus": args.cpus},
        request_router_config=RequestRouterConfig(request_router_class=SessionRouter),
        health_check_period_s=args.health_seconds,
        health_check_timeout_s=max(30.0, args.health_seconds),
        graceful_shutdown_timeout_s=args.drain_seconds,
    ).bind(args)
    return Front.options(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1}).bind(
        engines, args.max_request_mib * MIB
    )
