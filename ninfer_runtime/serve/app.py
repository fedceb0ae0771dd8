"""The application: routes, the gate in front of them, and errors in the envelope of the API that was called."""

import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from ninfer_format.errors import NinferError
from ninfer_runtime.serve import anthropic, fields, info, openai_chat, openai_completions, openai_responses, tokens
from ninfer_runtime.serve.answering import ClientGoneError
from ninfer_runtime.serve.auth import Gate
from ninfer_runtime.serve.errors import ApiError, dialect_of, problem_of
from ninfer_runtime.serve.exchange import REQUEST_ID, AnswerResponse, log_failure, send_problem
from ninfer_runtime.serve.limits import read_json
from ninfer_runtime.serve.openapi import described
from ninfer_runtime.serve.service import Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LOG = logging.getLogger("ninfer.serve")

CORS_HEADERS = (
    (b"access-control-allow-origin", b"*"),
    (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
    # The asterisk stands for every header but this one.
    (b"access-control-allow-headers", b"authorization, *"),
    (b"access-control-expose-headers", b"x-request-id, retry-after"),
    (b"access-control-max-age", b"86400"),
)
NO_SNIFF = (b"x-content-type-options", b"nosniff")
ANSWERED = "ninfer.answered"
"""Key in the ASGI scope of a request whose unforeseen failure has had its response."""


def build_app(service: Service) -> Any:
    """The ASGI application of one service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> "AsyncIterator[None]":
        service.start()
        service.life.start()
        yield
        service.life.end()
        service.close()

    app = FastAPI(
        title="ninfer",
        description="OpenAI chat, completions and responses, and Anthropic messages, on one model.",
        version="1",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    add_info_routes(app, service)
    add_token_routes(app, service)
    add_openai_routes(app, service)
    openai_responses.add_routes(app, service)
    anthropic.add_routes(app, service)
    if service.settings.with_page:
        add_page(app)
    add_error_handlers(app, service)
    described(app, service.facts.model_id)
    return Front(app, service)


def request_id_of(request: Request) -> str:
    """The id under which logs know the request."""
    return str(request.scope.get(REQUEST_ID, ""))


# ---- routes ------------------------------------------------------------------------------------
def add_openai_routes(app: FastAPI, service: Service) -> None:
    """Chat and text completions."""

    @app.post("/v1/chat/completions", tags=["OpenAI"])
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        values = fields.read("chat", await read_json(request, service))
        question = openai_chat.question_of(service, values)
        return AnswerResponse(service, question, lambda answers: openai_chat.ChatWriter(service, values, answers))

    @app.post("/v1/completions", tags=["OpenAI"])
    async def completions(request: Request) -> Response:
        """Go on with a text."""
        values = fields.read("completions", await read_json(request, service))
        question = openai_completions.question_of(service, values)
        writer_of = openai_completions.CompletionWriter
        return AnswerResponse(service, question, lambda answers: writer_of(service, values, answers))


def add_info_routes(app: FastAPI, service: Service) -> None:
    """Health, models, properties, numbers."""

    @app.get("/health", tags=["Server"])
    async def health() -> Response:
        """200 while the engine can run, 503 after a fault."""
        status, document = info.health_document(service)
        return JSONResponse(document, status)

    @app.get("/ready", tags=["Server"])
    async def ready() -> Response:
        """200 while new requests are taken."""
        status, document = info.ready_document(service)
        return JSONResponse(document, status)

    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> Response:
        """The one model, with its limits and features."""
        return JSONResponse(info.models_document(service))

    @app.get("/v1/models/{model_id:path}", tags=["OpenAI"])
    async def model(model_id: str) -> Response:
        """One model by name."""
        return JSONResponse(info.one_model(service, model_id))

    @app.get("/props", tags=["Server"])
    async def props() -> Response:
        """What does not change until the process ends."""
        return JSONResponse(info.props_document(service))

    @app.get("/stats", tags=["Server"])
    async def stats() -> Response:
        """The engine's numbers as of now."""
        return JSONResponse(info.stats_document(service))

    @app.get("/metrics", tags=["Server"])
    async def metrics() -> Response:
        """Prometheus families."""
        body, media_type = service.metrics.exposition()
        return Response(body, headers={"Content-Type": media_type})


def add_token_routes(app: FastAPI, service: Service) -> None:
    """The text side alone."""

    def add(
        path: str, rows: tuple[fields.Field, ...], answer: Callable[[Service, fields.Values], dict[str, Any]]
    ) -> None:
        async def endpoint(request: Request) -> Response:
            body = await read_json(request, service)
            if not isinstance(body, dict):
                raise ApiError("the body is not a JSON object", code="invalid_body")
            values = fields.read_rows(rows, body)
            return JSONResponse(await service.in_thread(answer, service, values))

        endpoint.__doc__ = answer.__doc__
        app.post(path, tags=["Text"], name=path.strip("/"))(endpoint)

    for path, (rows, answer) in tokens.ROUTES.items():
        add(path, rows, answer)


def add_page(app: FastAPI) -> None:
    """The page at ``/`` and its files."""
    from ninfer_runtime.serve.page import page_files, page_response

    async def page(request: Request) -> Response:
        found = page_response(request.url.path, request.headers.get("if-none-match"))
        if found is None:
            raise HTTPException(404)
        return Response(found.body, found.status, dict(found.headers))

    for path in page_files():
        app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(page)


# ---- errors ------------------------------------------------------------------------------------
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


def add_error_handlers(app: FastAPI, service: Service) -> None:
    """Every failure in front of the first byte of a response, as JSON."""

    def respond(request: Request, error: BaseException, headers: dict[str, str] | None = None) -> Response:
        if isinstance(error, ClientGoneError):
            return Response(status_code=499)
        problem = problem_of(error)
        log_failure(service, request_id_of(request), error, problem)
        body = problem.encoded(dialect_of(request.url.path), request_id_of(request))
        return Response(body, problem.status, {**problem.headers, **(headers or {})}, "application/json")

    @app.exception_handler(NinferError)
    async def on_known(request: Request, error: NinferError) -> Response:
        return respond(request, error)

    @app.exception_handler(Exception)
    async def on_unforeseen(request: Request, error: Exception) -> Response:
        # Starlette raises it again behind the response; the front then knows that it has been answered.
        request.scope[ANSWERED] = True
        return respond(request, error)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        path, status = request.url.path, error.status_code
        message = {
            404: f"there is nothing at {path!r}",
            405: f"{request.method} is not a method of {path!r}",
        }.get(status, str(error.detail))
        known = ApiError(message, status=status, code=_HTTP_CODES.get(status, "http_error"))
        return respond(request, known, dict(error.headers or {}))


class Front:
    """In front of all routes: an id for the request, the gate, CORS, and a last resort for failures nobody foresaw."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        self.app = app
        self._service = service
        self._gate = Gate(service.settings)
        self._extra = (NO_SNIFF, *(CORS_HEADERS if service.settings.cors else ()))

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope[REQUEST_ID] = request_id = f"req_{secrets.token_hex(8)}"
        extra = [(b"x-request-id", request_id.encode()), *self._extra]
        has_started = False

        async def send_with(message: Any) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        dialect = dialect_of(scope["path"])
        try:
            self._gate.check(scope["method"], scope["path"], scope["headers"])
            if scope["method"] == "OPTIONS" and self._service.settings.cors:
                await send_with({"type": "http.response.start", "status": 204, "headers": []})
                await send_with({"type": "http.response.body", "body": b""})
                return
            await self.app(scope, receive, send_with)
        except NinferError as error:
            await send_problem(self._service, scope, send_with, error, dialect)
        except Exception as error:
            if scope.get(ANSWERED):
                return
            if has_started:
                log_failure(self._service, request_id, error, problem_of(error))
                raise
            await send_problem(self._service, scope, send_with, error, dialect)
