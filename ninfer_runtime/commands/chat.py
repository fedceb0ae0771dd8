"""``ninfer-run chat``: a conversation on the terminal, or line by line from a pipe."""

import sys
import time
from dataclasses import replace

from ninfer_format.errors import GenerationError, RequestError, UsageError
from ninfer_runtime.commands.answer import Answer, Console, run_answer
from ninfer_runtime.commands.generate import asked_of, say_notes
from ninfer_runtime.commands.options import AnswerOptions, EngineOptions, SamplingOptions
from ninfer_runtime.commands.parsing import as_text
from ninfer_runtime.commands.report import answer_rows, say, say_rows, start_rows
from ninfer_runtime.commands.sampling_defaults import resolve_sampling
from ninfer_runtime.commands.session import Session, open_session
from ninfer_runtime.engine.engine import Engine
from ninfer_runtime.engine.sequence import FinishReason
from ninfer_runtime.text.messages import Conversation, Message

HELP = "/reset forgets the conversation, /quit leaves; Ctrl-C stops an answer, a second one leaves"
INTERRUPTED = 130
KEPT_STATES = 4
"""In host memory: a conversation has that many places to be taken up from (``text/anchors.py``)."""


def chat(
    engine_options: EngineOptions, sampling_options: SamplingOptions, options: AnswerOptions, *, statistics: bool
) -> int:
    """Read lines until /quit or the end of input; the exit code."""
    with open_session(engine_options) as session:
        config = replace(session.engine_config(), prefix_reuse=True, host_snapshots=KEPT_STATES)
        check_options(session, sampling_options, options)
        say_notes(session)
        with session.engine(config) as engine:
            say_rows(start_rows(session, config, engine))
            say(HELP)
            return _Chat(session, engine, sampling_options, options, statistics).run()


def check_options(session: Session, sampling_options: SamplingOptions, options: AnswerOptions) -> None:
    """Refuse what could never work before the engine starts, with a one-word conversation."""
    conversation = Conversation.of_prompt("?")
    prompt = session.frontend.prompt(conversation, thinking=options.thinking, reasoning_effort=options.reasoning_effort)
    sampling = resolve_sampling(session, sampling_options, thinking=prompt.thinking)
    asked_of(session, prompt, conversation, sampling, options)


class _Chat:
    def __init__(
        self,
        session: Session,
        engine: Engine,
        sampling_options: SamplingOptions,
        options: AnswerOptions,
        statistics: bool,
    ) -> None:
        self._session = session
        self._engine = engine
        self._sampling_options = sampling_options
        self._options = options
        self._statistics = statistics
        self._history: list[Message] = []
        self._interrupted = False

    def run(self) -> int:
        while True:
            try:
                line = read_line()
            except KeyboardInterrupt:
                if self._interrupted:
                    say("")
                    return INTERRUPTED
                self._interrupted = True
                say("\n(Ctrl-C again or /quit to leave)")
                continue
            except UsageError as error:
                say(f"error: {error}")
                continue
            if line is None or line.strip() in ("/quit", "/exit"):
                return 0
            self._take(line)

    def _take(self, line: str) -> None:
        self._interrupted = False
        text = line.strip()
        if text == "/reset":
            self._history.clear()
            say("the conversation is forgotten")
        elif text.startswith("/"):
            say(HELP)
        elif text:
            try:
                self._answer(line)
            except (GenerationError, RequestError) as error:  # the engine stays usable
                say(f"error: {error}")

    def _answer(self, text: str) -> None:
        session, options = self._session, self._options
        messages = [*self._history, Message("user", text)]
        started = time.perf_counter()
        conversation = Conversation(tuple(messages))
        prompt = session.frontend.prompt(
            conversation, thinking=options.thinking, reasoning_effort=options.reasoning_effort
        )
        prepare_seconds = time.perf_counter() - started
        sampling = resolve_sampling(session, self._sampling_options, thinking=prompt.thinking)
        asked = asked_of(session, prompt, conversation, sampling, options)
        request, n_ids = asked.request, session.frontend.tokenizer.n_addressable
        request.check(n_ids, session.vocab_rows, self._engine.config.max_context)
        console = Console()
        try:
            answer = run_answer(self._engine, asked, console.show)
        finally:
            console.close()
        self._interrupted = answer.reason is FinishReason.CANCELLED
        self._history = [*messages, _as_message(answer)]
        if options.print_token_ids:
            say("token ids: " + ",".join(map(str, answer.token_ids)))
        if self._statistics:
            say_rows(answer_rows(answer, sampling, prepare_seconds))


def _as_message(answer: Answer) -> Message:
    reply = answer.reply
    return Message("assistant", reply.content, reply.reasoning or None)


def read_line() -> str | None:
    """The next line without its newline, None at the end of input. On a terminal it can be edited.

    UsageError when it is not UTF-8.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        import readline  # noqa: F401 - importing it is what gives ``input`` editing and history

        try:
            return input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return None
        except UnicodeDecodeError as error:
            raise UsageError(f"the line is not UTF-8: byte {error.start} cannot be decoded") from None
    line = sys.stdin.buffer.readline()
    return as_text(line, "the line").rstrip("\r\n") if line else None
