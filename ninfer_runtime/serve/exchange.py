"""One answered HTTP request: asks the engine, watches the client, and sends the answer whole or as a stream.

An API module gives a ``Writer``, which turns pieces into its API's words; everything about connections is here.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import Response

from ninfer_format.errors import NinferError
from ninfer_runtime.serve.answering import Answers, ClientGoneError, Piece, joined
from ninfer_runtime.serve.errors import Dialect, Problem, problem_of
from ninfer_runtime.serve.question import Question
from ninfer_runtime.serve.sse import STREAM_HEADERS, Receive, Scope, Send

if TYPE_CHECKING:
    from ninfer_runtime.serve.service import Service

LOG = logging.getLogger("ninfer.serve")
MANY_TOKENS = 256
"""Answers with log probabilities of more tokens are put into words beside the loop: 50 µs a token with 20 others."""
REQUEST_ID = "ninfer.request_id"
"""Key of a request's id in its ASGI scope."""


class Writer(Protocol):
    """An API's words for one request. Frames are whole server-sent events; b"" sends nothing."""

    dialect: Dialect
    keep_alive: bytes
    is_pure: bool
    """``document`` changes nothing, and may be called beside the loop."""

    def begin(self) -> bytes:
        """Frames in front of the first piece."""

    def feed(self, pieces: list[Piece]) -> bytes:
        """Frames for these pieces."""

    def end(self) -> bytes:
        """Frames behind the last piece."""

    def failed(self, problem: Problem) -> bytes:
        """Frames that end a stream which cannot go on."""

    def document(self, pieces: list[Piece]) -> dict[str, Any] | bytes:
        """The body of a whole answer; ``pieces`` has one per answer."""


WriterOf = Callable[[Answers], Writer]


class AnswerResponse(Response):
    """The answer to ``question``. An error before the first byte has a status of its own; later ones are events."""

    def __init__(
        self, service: "Service", question: Question, writer_of: WriterOf, dialect: Dialect = "openai"
    ) -> None:
        super().__init__()
        self._service = service
        self._question = question
        self._writer_of = writer_of
        self._dialect: Dialect = dialect

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it all."""
        request_id = scope.get(REQUEST_ID, "")
        watch = asyncio.create_task(_client_left(receive))
        answers: Answers | None = None
        try:
            answers = await self._ask(request_id, watch)
            watch.add_done_callback(lambda _: _note_left(answers))
            writer = self._writer_of(answers)
            if self._question.stream:
                await self._send_stream(answers, writer, send)
            else:
                await self._send_document(answers, writer, send)
        except ClientGoneError:
            LOG.debug("%s: the client has left", request_id)
        except NinferError as error:
            await send_problem(self._service, scope, send, error, self._dialect)
        finally:
            watch.cancel()
            if answers is not None:
                answers.cancel()

    async def _ask(self, request_id: str, watch: "asyncio.Task[None]") -> Answers:
        """The answers under way, unless the client leaves before."""
        asking = asyncio.create_task(self._service.answers(self._question, request_id))
        try:
            both: list[asyncio.Task[Any]] = [asking, watch]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not asking.done():
                asking.cancel()
        if watch.done() and not asking.done():
            raise ClientGoneError("the client left while its prompt was prepared")
        return asking.result()

    async def _send_stream(self, answers: Answers, writer: Writer, send: Send) -> None:
        # Until the first news, what goes wrong is an HTTP status; a long wait opens the stream all the same.
        pieces = await answers.news()
        await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
        frames = writer.begin()
        try:
            while True:
                frames += writer.feed(pieces) if pieces else writer.keep_alive
                if answers.is_done:
                    frames += writer.end()
                    break
                if frames:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                frames = b""
                pieces = await answers.news()
        except ClientGoneError:
            raise
        except Exception as error:
            problem = problem_of(error)
            log_failure(self._service, answers.request_id, error, problem)
            frames += writer.failed(problem)
        await send({"type": "http.response.body", "body": frames, "more_body": False})

    async def _send_document(self, answers: Answers, writer: Writer, send: Send) -> None:
        pieces = await answers.news()
        while not answers.is_done:
            pieces += await answers.news()
        pieces = joined(pieces)
        if writer.is_pure and sum(len(piece.drawn) for piece in pieces) > MANY_TOKENS:
            body = await self._service.in_thread(whole, writer, pieces)
        else:
            body = whole(writer, pieces)
        await send_bytes(send, 200, body)


def whole(writer: Writer, pieces: list[Piece]) -> bytes:
    """The body of a whole answer."""
    document = writer.document(pieces)
    return document if isinstance(document, bytes) else encoded(document)


async def _client_left(receive: Receive) -> None:
    """Return when the connection is closed from the other side."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _note_left(answers: Answers) -> None:
    if not answers.is_done:
        answers.client_left()


def encoded(document: Any) -> bytes:
    """JSON in ASCII, on one line; NaN and infinity never pass."""
    import json

    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


async def send_bytes(send: Send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    """One whole JSON response."""
    pairs = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    pairs += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_problem(service: "Service", scope: Scope, send: Send, error: BaseException, dialect: Dialect) -> None:
    """The error as a response of its own."""
    problem = problem_of(error)
    request_id = scope.get(REQUEST_ID, "")
    log_failure(service, request_id, error, problem)
    await send_bytes(send, problem.status, problem.encoded(dialect, request_id), problem.headers)


def log_failure(service: "Service", request_id: str, error: BaseException, problem: Problem) -> None:
    """Count it and write it down; a failure nobody foresaw with its traceback.

    What a refusal says may quote the request: it is left out unless contents are logged.
    """
    service.metrics.failed(problem)
    service.log.failed(request_id, problem)
    if problem.status >= 500:
        unforeseen = not isinstance(error, NinferError)
        message = str(error) or type(error).__name__
        LOG.error("%s: %d %s: %s", request_id, problem.status, problem.code, message, exc_info=unforeseen and error)
        return
    about = problem.message if service.settings.log_content else problem.logged_param or ""
    LOG.info("%s: %d %s %s", request_id, problem.status, problem.code, about)
