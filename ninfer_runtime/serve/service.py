"""What every route works with: the engine, the text side, the settings, and the way a request goes through them."""

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ninfer_runtime.engine.sequence import Request
from ninfer_runtime.engine.stats import EngineStats
from ninfer_runtime.serve.answering import Answers, Choice, check_count, engine_requests
from ninfer_runtime.serve.delivery import Mailbox
from ninfer_runtime.serve.errors import ApiError, model_not_found
from ninfer_runtime.serve.life import Life
from ninfer_runtime.serve.metrics import Metrics
from ninfer_runtime.serve.question import Question, prepare
from ninfer_runtime.serve.request_log import RequestLog
from ninfer_runtime.serve.settings import Facts, ServeSettings
from ninfer_runtime.text.frontend import Frontend

if TYPE_CHECKING:
    from ninfer_runtime.engine.handle import Handle, Listener

T = TypeVar("T")

PREPARING_THREADS = 4
"""Requests whose prompts are rendered and encoded at the same time."""


class EngineLike(Protocol):
    """What the server asks of ``Engine``."""

    def submit(self, request: Request, listener: "Listener | None" = None) -> "Handle":
        """Start a request."""

    def stats(self) -> EngineStats:
        """Numbers as of now."""

    def close(self) -> None:
        """End everything."""


class Service:
    """One running server. Everything but the engine's listeners happens in the loop's thread."""

    def __init__(self, engine: EngineLike, frontend: Frontend, settings: ServeSettings, facts: Facts) -> None:
        self.engine = engine
        self.frontend = frontend
        self.settings = settings
        self.facts = facts
        self.instance = secrets.token_hex(8)
        self.created = int(time.time())
        self.started_at = time.perf_counter()
        self.life = Life(self)
        self.metrics = Metrics(self)
        self.log = RequestLog(settings, self.instance)
        self.active: set[Answers] = set()
        self.n_alive = 0
        self._pool = ThreadPoolExecutor(PREPARING_THREADS, "ninfer-prepare")
        self._mailbox: Mailbox | None = None

    @property
    def mailbox(self) -> Mailbox:
        """The way from the engine's worker into the loop."""
        assert self._mailbox is not None, "the service has started"
        return self._mailbox

    def start(self) -> None:
        """Called in the running loop, before the first request."""
        self._mailbox = Mailbox(asyncio.get_running_loop())

    # ---- a request's way ---------------------------------------------------------------------
    async def in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run something that blocks beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(call, *arguments))

    def check_model(self, name: str) -> None:
        """ApiError 404 unless ``name`` is what this server runs."""
        if name != self.facts.model_id:
            raise model_not_found(name, self.facts.model_id)

    async def answers(self, question: Question, request_id: str) -> Answers:
        """The question on its way through the engine; what can be refused has been refused before this returns."""
        self.life.check_accepting()
        n_answers = question.n * max(1, len(question.texts))
        check_count(self, n_answers)
        if self.n_alive + n_answers > self.facts.max_rows + self.facts.max_pending:
            raise ApiError(
                f"{self.n_alive} answers run or wait, and this server takes no more; try again later",
                status=429,
                retry_after=1,
            )
        self.n_alive += n_answers
        answers: Answers | None = None
        try:
            prepared = await self.in_thread(prepare, self, question)
            requests = await self.in_thread(engine_requests, self, prepared)
            answers = Answers(self, prepared, request_id)
            answers.submit(requests)
        except BaseException:
            # What the engine has of it already is cancelled and counts down by itself.
            self.n_alive -= n_answers - (len(answers.choices) if answers else 0)
            raise
        answers.is_started = True
        self.active.add(answers)
        self.metrics.started(answers)
        self.log.started(answers)
        return answers

    def answer_ended(self, answers: Answers, choice: Choice) -> None:
        """One answer of a request has ended."""
        self.n_alive -= 1
        if answers.is_started:
            self.metrics.answer_ended(answers, choice)
        if choice.error is not None:
            self.life.note_error(choice.error)

    def request_ended(self, answers: Answers) -> None:
        """All answers of a request have ended."""
        self.active.discard(answers)
        if not answers.is_started:
            return
        self.metrics.request_ended(answers)
        self.log.ended(answers)

    def close(self) -> None:
        """End the threads and files; the engine stays open."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.log.close()
