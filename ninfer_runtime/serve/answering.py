"""One request of any API on the engine: submitted, brought into the event loop, cancelled when its client goes.

The worker reads each answer's tokens (``AnswerReader``) and posts what they say; the loop is woken once per step of the
engine, whatever the number of answers. An API module turns ``Piece`` after ``Piece`` into its own words.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from ninfer_format.errors import NinferError
from ninfer_runtime.engine.asking import answers_to
from ninfer_runtime.engine.sequence import Finish, FinishReason, Request, Reuse, TokenEvent
from ninfer_runtime.serve.errors import ApiError
from ninfer_runtime.serve.question import Prepared, wanted_of
from ninfer_runtime.serve.reader import ChoiceReader, Drawn
from ninfer_runtime.text.events import ContentText, Event, ReasoningText, StopHit, ToolCallArguments, ToolCallEnd
from ninfer_runtime.text.messages import Conversation

if TYPE_CHECKING:
    from ninfer_runtime.engine.handle import Handle
    from ninfer_runtime.serve.service import Service


class ClientGoneError(NinferError):
    """The client has closed its connection; nobody reads what would be sent."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How one answer ended. ``stop`` is the stop string that ended it, if one did."""

    reason: FinishReason
    finish: Finish
    stop: StopHit | None
    n_reasoning_tokens: int
    has_calls: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """News of one answer. ``drawn`` are its tokens, in requests that ask for log probabilities; ``ending`` is set once,
    in the last piece."""

    index: int
    events: list[Event]
    drawn: tuple[Drawn, ...] = ()
    ending: Ending | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request, all its answers together; a prompt counts once however many answers it has."""

    n_prompt: int
    n_generated: int
    n_cached: int
    n_reasoning: int
    reuse: Reuse | None = None
    """Of the first answer, once it has ended."""

    @property
    def n_total(self) -> int:
        """Prompt and answers."""
        return self.n_prompt + self.n_generated


class Choice:
    """One answer of a request, on the worker's side: the engine's listener."""

    def __init__(self, answers: "Answers", index: int, reader: ChoiceReader) -> None:
        self.answers = answers
        self.index = index
        self.reader = reader
        self.handle: Handle | None = None
        self.first_token_at: float | None = None
        self.last_token_at = 0.0
        self.n_tokens = 0
        self.has_calls = False
        self.ending: Ending | None = None
        self.error: BaseException | None = None
        self.kept_events: list[Event] | None = [] if answers.service.settings.log_content else None
        """Everything the answer says, for a log that shows it."""

    def listen(self, handle: "Handle", tokens: tuple[TokenEvent, ...]) -> None:
        """In the worker: tokens of one step, or () at the end."""
        self.answers.service.mailbox.post(self, self._news(handle, tokens))

    def take(self, piece: object) -> None:
        """In the loop: one of the pieces ``listen`` made."""
        assert isinstance(piece, Piece)
        self.answers.take(self, piece)

    def _news(self, handle: "Handle", tokens: tuple[TokenEvent, ...]) -> Piece:
        if tokens:
            before, now = self.last_token_at, time.perf_counter()
            if self.first_token_at is None:
                self.first_token_at = now
                self.answers.service.metrics.first_token(now - self.answers.started_at)
            else:
                self.answers.service.metrics.next_tokens(now - before, len(tokens))
            self.last_token_at = now
            self.n_tokens += len(tokens)
            events = self.reader.take()
            self.has_calls = self.has_calls or any(type(event) is ToolCallEnd for event in events)
            return Piece(self.index, events, self.reader.drawn(tokens))
        events, self.error = self.reader.flush(), handle.error
        self.has_calls = self.has_calls or any(type(event) is ToolCallEnd for event in events)
        if handle.finish is not None:
            reason = self.reader.reason(handle.finish.reason)
            n_reasoning = self.reader.n_reasoning_tokens
            self.ending = Ending(reason, handle.finish, self.reader.stop, n_reasoning, self.has_calls)
        return Piece(self.index, events, self.reader.drawn(()), self.ending)


class Answers:
    """All answers of one request. Made and used in the loop's thread."""

    def __init__(self, service: "Service", prepared: Prepared, request_id: str) -> None:
        self.service = service
        self.prepared = prepared
        self.request_id = request_id
        self.started_at = time.perf_counter()
        self.choices: list[Choice] = []
        self.is_started = False
        """The engine has all of it."""
        self.client_is_gone = False
        self.error: BaseException | None = None
        self._pieces: list[Piece] = []
        self._n_open = 0
        self.is_quiet = False
        """No news has been read for a while."""
        self._is_streaming = prepared.question.stream
        self._reader: asyncio.Future[None] | None = None

    # ---- life --------------------------------------------------------------------------------
    def submit(self, requests: Sequence[tuple[Request, ChoiceReader]]) -> None:
        """Give every answer to the engine, or none: RequestError, OverloadedError, EngineStoppedError at once."""
        for index, (request, reader) in enumerate(requests):
            choice = Choice(self, index, reader)
            try:
                choice.handle = self.service.engine.submit(request, choice.listen)
            except BaseException:
                self.cancel()
                raise
            self.choices.append(choice)
            self._n_open += 1

    def cancel(self) -> None:
        """End what still runs, at the engine's next boundary."""
        for choice in self.choices:
            if choice.handle is not None and choice.ending is None:
                choice.handle.cancel()

    def client_left(self) -> None:
        """Nobody reads any more: cancel, and let ``news`` end with ClientGoneError."""
        self.client_is_gone = True
        self.cancel()
        self._wake()

    def abort(self, error: BaseException) -> None:
        """End everything with ``error``, which ``news`` raises."""
        self.error = self.error or error
        self.cancel()
        self._wake()

    @property
    def is_done(self) -> bool:
        """Every answer has ended and all pieces have been read."""
        return self._n_open == 0 and not self._pieces

    # ---- reading -----------------------------------------------------------------------------
    async def news(self) -> list[Piece]:
        """The pieces since the last call, at most one per answer, texts of one kind joined; waits for at least one.

        An empty list is a sign of life while nothing comes: the time to send a keep-alive. Raises what ended an answer
        (the others are cancelled), ClientGoneError when the client has left.
        """
        while not self._has_news:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
            if not self._has_news:
                return []
        if self.client_is_gone:
            raise ClientGoneError("the client has closed its connection")
        if self.error is not None:
            raise self.error
        pieces, self._pieces = self._pieces, []
        self.is_quiet = False
        return joined(pieces) if len(pieces) > 1 else pieces

    @property
    def _has_news(self) -> bool:
        return bool(self._pieces) or self.error is not None or self.client_is_gone

    def poke(self) -> None:
        """Called every few seconds: if there was no news since the last call, let ``news`` return without any."""
        if self.is_quiet and self._is_streaming:
            self._wake()
        self.is_quiet = True

    def take(self, choice: Choice, piece: Piece) -> None:
        """A piece has come into the loop."""
        if choice.kept_events is not None:
            choice.kept_events += piece.events
        is_last = piece.ending is not None or choice.error is not None
        if is_last:
            self._n_open -= 1
        if choice.error is not None and self.error is None:
            self.error = choice.error
            self.cancel()
        if piece.events or piece.drawn or is_last:
            self._pieces.append(piece)
            if self._is_streaming or self._n_open == 0:
                self._wake()
        if is_last:
            self.service.answer_ended(self, choice)
            if self._n_open == 0:
                self.service.request_ended(self)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # ---- totals ------------------------------------------------------------------------------
    @property
    def usage(self) -> Usage:
        """Token counts; complete once ``is_done``."""
        endings = [choice.ending for choice in self.choices if choice.ending is not None]
        firsts = [choice.ending.finish for choice in self.choices[:: self.prepared.question.n] if choice.ending]
        return Usage(
            self.prepared.n_prompt,
            sum(choice.n_tokens for choice in self.choices),
            sum(finish.reuse.n_tokens for finish in firsts),
            sum(ending.n_reasoning_tokens for ending in endings),
            firsts[0].reuse if firsts else None,
        )


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with those of one answer in one, in the order of their first news."""
    by_index: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_index.setdefault(piece.index, []).append(piece)
    return [same[0] if len(same) == 1 else _one_piece(same) for same in by_index.values()]


def _one_piece(pieces: Sequence[Piece]) -> Piece:
    events = joined_events(event for piece in pieces for event in piece.events)
    drawn = tuple(one for piece in pieces for one in piece.drawn)
    return Piece(pieces[0].index, events, drawn, pieces[-1].ending)


def joined_events(events: Iterable[Event]) -> list[Event]:
    """The events with neighbouring texts of one kind, and neighbouring pieces of one call's arguments, joined.

    The time is linear: each run is joined once, not piece by piece.
    """
    out: list[Event] = []
    for _, run in groupby(events, _run_of):
        same = list(run)
        match same[0]:
            case ContentText():
                out.append(ContentText("".join(event.text for event in same if isinstance(event, ContentText))))
            case ReasoningText():
                out.append(ReasoningText("".join(event.text for event in same if isinstance(event, ReasoningText))))
            case ToolCallArguments(index):
                fragments = (event.fragment for event in same if isinstance(event, ToolCallArguments))
                out.append(ToolCallArguments(index, "".join(fragments)))
            case _:
                out += same
    return out


def _run_of(event: Event) -> tuple[type[Event], int]:
    return type(event), event.index if isinstance(event, ToolCallArguments) else 0


def engine_requests(service: "Service", prepared: Prepared) -> list[tuple[Request, ChoiceReader]]:
    """What the engine is asked, with who reads it: all answers of the first prompt first. Blocks: a grammar may take
    its time to compile."""
    question, wanted = prepared.question, wanted_of(service, prepared)
    conversation = question.conversation or Conversation(())
    requests = []
    for prompt in prepared.prompts:
        for asked in answers_to(service.frontend, prompt, conversation, wanted):
            reader = ChoiceReader(asked.reader, keep_drawn=question.n_top_logprobs is not None)
            requests.append((replace(asked.request, reader=reader), reader))
    return requests


def check_count(service: "Service", n_answers: int) -> None:
    """ApiError for more answers than could ever wait at once."""
    room = service.facts.max_rows + service.facts.max_pending
    if n_answers > room:
        raise ApiError(f"the request asks for {n_answers} answers; this server takes at most {room} at once", param="n")
