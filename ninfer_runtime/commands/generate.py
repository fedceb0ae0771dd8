"""``ninfer-run generate``: one prompt, one answer."""

import json
import sys
import time
from dataclasses import dataclass

from ninfer_format.errors import UsageError
from ninfer_runtime.commands import parsing
from ninfer_runtime.commands.answer import Answer, Console, run_answer
from ninfer_runtime.commands.options import AnswerOptions, EngineOptions, SamplingOptions
from ninfer_runtime.commands.report import answer_json, answer_rows, say, say_rows, start_rows
from ninfer_runtime.commands.sampling_defaults import resolve_sampling
from ninfer_runtime.commands.session import Session, open_session
from ninfer_runtime.config import SamplingParams
from ninfer_runtime.engine.asking import Asked, Wanted, answers_to
from ninfer_runtime.engine.sequence import FinishReason
from ninfer_runtime.text.frontend import Prompt
from ninfer_runtime.text.messages import Conversation, parse_message_file


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Exactly one of the three: text (``-`` = standard input), a message file, token ids."""

    prompt: str | None = None
    messages: str | None = None
    ids: str | None = None


def generate(
    engine_options: EngineOptions,
    prompt_options: PromptOptions,
    sampling_options: SamplingOptions,
    options: AnswerOptions,
    *,
    as_json: bool,
) -> int:
    """Run one request; the exit code. Everything that can be refused is refused before the engine starts."""
    conversation, ids = read_prompt(prompt_options)
    with open_session(engine_options) as session:
        started = time.perf_counter()
        prompt = prompt_of(session, conversation, ids, options)
        prepare_seconds = time.perf_counter() - started
        sampling = resolve_sampling(session, sampling_options, thinking=prompt.thinking)
        config = session.engine_config()
        # The document lists calls; as text, the answer is shown as the model wrote it.
        asked = asked_of(session, prompt, conversation, sampling, options, read_calls=as_json)
        asked.request.check(session.frontend.tokenizer.n_addressable, session.vocab_rows, config.max_context)
        say_notes(session)
        with session.engine(config) as engine:
            say_rows(start_rows(session, config, engine))
            if as_json:
                answer = run_answer(engine, asked, lambda events: None)
                sys.stdout.write(json.dumps(answer_json(answer, session, sampling, prepare_seconds), indent=2) + "\n")
            else:
                console = Console()
                try:
                    answer = run_answer(engine, asked, console.show)
                finally:
                    console.close()
        if options.print_token_ids:
            say("token ids: " + ",".join(map(str, answer.token_ids)))
        say_rows(answer_rows(answer, sampling, prepare_seconds))
    return exit_code_of(answer)


def read_prompt(options: PromptOptions) -> tuple[Conversation, tuple[int, ...] | None]:
    """The conversation, or an empty one beside the given ids. UsageError unless exactly one source was given."""
    given = [value for value in (options.prompt or None, options.messages, options.ids) if value is not None]
    if len(given) != 1:
        raise UsageError(f"{len(given)} prompts were given, expected exactly one of --prompt, --messages and --ids")
    if options.ids is not None:
        return Conversation(()), parsing.token_ids(options.ids)
    if options.messages is not None:
        return parse_message_file(parsing.read_bytes(options.messages), options.messages), None
    text = options.prompt or ""
    if text == parsing.STDIN and not (text := parsing.read_text(parsing.STDIN)):
        raise UsageError("standard input is empty, expected the prompt")
    return Conversation.of_prompt(text), None


def prompt_of(
    session: Session, conversation: Conversation, ids: tuple[int, ...] | None, options: AnswerOptions
) -> Prompt:
    """The rendered conversation, or the ids as they are."""
    if ids is None:
        return session.frontend.prompt(
            conversation, thinking=options.thinking, reasoning_effort=options.reasoning_effort
        )
    if options.reasoning_effort is not None:
        raise UsageError("--reasoning-effort needs a template; leave it out with --ids")
    return Prompt("", ids, session.frontend.ends_inside(ids), options.thinking)


def asked_of(
    session: Session,
    prompt: Prompt,
    conversation: Conversation,
    sampling: SamplingParams,
    options: AnswerOptions,
    *,
    read_calls: bool = True,
) -> Asked:
    """The engine's request and its reader. UsageError for stop ids outside the vocabulary, RequestError for a form that
    cannot be followed."""
    n_ids = session.frontend.tokenizer.n_addressable
    for token_id in options.stop_token_ids:
        if token_id >= n_ids:
            raise UsageError(f"--stop-token-id {token_id}: expected an id from 0 to {n_ids - 1}")
    wanted = Wanted(
        sampling,
        options.max_new,
        stops=options.stops,
        reasoning_stops=options.reasoning_stops,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        form=options.form,
        max_thinking=options.max_thinking,
        raw=options.raw_output,
        read_calls=read_calls,
    )
    (asked,) = answers_to(session.frontend, prompt, conversation, wanted)
    return asked


def say_notes(session: Session) -> None:
    """What the artifact asks for and does not get."""
    for name in session.frontend.generation.unsupported:
        say(f"note: generation_config.json sets {name}, which is not offered")


def exit_code_of(answer: Answer) -> int:
    """130 for an answer that Ctrl-C ended, otherwise 0."""
    return 130 if answer.reason is FinishReason.CANCELLED else 0
