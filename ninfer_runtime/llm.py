"""A model in this process: prompts in, answers out, many at a time (``specs/python-api.md``)."""

import operator
import os
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex

from ninfer_format.errors import RequestError, UsageError
from ninfer_format.model_config import config_of
from ninfer_format.reader import Artifact
from ninfer_runtime.backends import default_device
from ninfer_runtime.config import EngineConfig, SamplingParams
from ninfer_runtime.engine.asking import Wanted, answers_to, default_sampling, text_prompt
from ninfer_runtime.engine.engine import Engine
from ninfer_runtime.engine.interrupts import cancel_on_interrupt
from ninfer_runtime.engine.stats import EngineStats
from ninfer_runtime.llm_outputs import GrowingAnswer, RequestOutput, StreamedOutput
from ninfer_runtime.llm_params import ChatOptions, Params, each_of, tool_choice_of, wanted_of
from ninfer_runtime.text.frontend import Frontend, Prompt
from ninfer_runtime.text.messages import Conversation, parse_conversation
from ninfer_runtime.text.tokenizer import Tokenizer

TextOrIds = str | Sequence[int]
Messages = str | Sequence[Mapping[str, Any]]
Pieces = Generator[StreamedOutput, None, None]

CONTEXT = 8192
"""Tokens of a sequence where the caller names none and the model was made for as many."""
_DEFAULTS: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "max_concurrency": 8,
    "kv_capacity": "auto",
    "prefix_reuse": True,
    "snapshots": 4,
    "host_snapshots": 12,
}


class LLM:
    """An open ``.ninfer`` file that answers. Use as a context manager, or ``close`` it.

    Everything runs in the caller's thread, one thread at a time; several streams may be open at once. Prompts run
    together, up to ``max_concurrency``. What one answers does not depend on the others: a seed, or temperature 0,
    repeats it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        chat_template: str | os.PathLike[str] | None = None,
        config: EngineConfig | None = None,
        **fields: Any,
    ) -> None:
        """Open ``path`` and start.

        chat_template   a file in place of the artifact's own template
        config          all of the engine's settings; or single ``fields`` of ``EngineConfig``, the others being: the
                        backend's own device, bfloat16, a context of 8192 tokens or what the model was made for, 8
                        sequences at once, as much KV as fits, prefix reuse

        Raises the ArtifactError tree, UnsupportedError, UsageError, MissingExtraError.
        """
        if config is not None and fields:
            raise UsageError(f"config and {sorted(fields)[0]} were given, expected one or the other")
        self._artifact = Artifact.open(path)
        try:
            template = None if chat_template is None else Path(chat_template)
            self.frontend = Frontend.open(self._artifact, template)
            self.engine = Engine(self._artifact, config or _config(self._artifact, fields))
        except BaseException:
            self._artifact.close()
            raise
        self._architecture = config_of(self._artifact).geometry.architecture

    # ---- asking ------------------------------------------------------------------------------
    def generate(
        self,
        prompts: TextOrIds | Sequence[TextOrIds],
        sampling_params: Params | Sequence[Params] | None = None,
    ) -> list[RequestOutput]:
        """Let texts go on, without a template: one ``RequestOutput`` per prompt, in order.

        A prompt is a text, in which control tokens count, or token ids. Raises RequestError before anything runs,
        NonFiniteError, KeyboardInterrupt (nothing keeps running).
        """
        return self._whole(self._texts(prompts, sampling_params))

    def generate_stream(
        self,
        prompts: TextOrIds | Sequence[TextOrIds],
        sampling_params: Params | Sequence[Params] | None = None,
    ) -> Pieces:
        """The same in pieces, as they come. An iterator that is closed or dropped ends its answers."""
        return self._pieces(self._texts(prompts, sampling_params))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        thinking: bool = True,
        reasoning_effort: str | None = None,
        preserve_thinking: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several: one ``RequestOutput`` per conversation, in order.

        messages      OpenAI-style messages; a text stands for one user message
        tools         OpenAI-style function definitions, on offer in every conversation
        tool_choice   "none", "auto", "required", or {"type": "function", "function": {"name": …}}; the last two always
                      give calls that fit their schemas
        parallel_tool_calls   False: an answer ends after its first call
        thinking, reasoning_effort, preserve_thinking   switches of the template, where it has them

        Raises RequestError and UsageError before anything runs; otherwise as ``generate``.
        """
        options = ChatOptions(tools, tool_choice, parallel_tool_calls, thinking, reasoning_effort, preserve_thinking)
        return self._whole(self._conversations(messages, sampling_params, options))

    def chat_stream(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        thinking: bool = True,
        reasoning_effort: str | None = None,
        preserve_thinking: bool | None = None,
    ) -> Pieces:
        """``chat`` in pieces, as they come. An iterator that is closed or dropped ends its answers."""
        options = ChatOptions(tools, tool_choice, parallel_tool_calls, thinking, reasoning_effort, preserve_thinking)
        return self._pieces(self._conversations(messages, sampling_params, options))

    # ---- the model ---------------------------------------------------------------------------
    @property
    def tokenizer(self) -> Tokenizer:
        """Between texts and token ids."""
        return self.frontend.tokenizer

    def default_sampling(self, *, thinking: bool = True) -> SamplingParams:
        """The model's own values for prompts of that mode."""
        generation, identity = self.frontend.generation, self._artifact.identity
        return default_sampling(identity, generation, self._architecture, thinking=thinking)

    def stats(self) -> EngineStats:
        """Sequences, pages and totals as of now, from any thread."""
        return self.engine.stats()

    def close(self) -> None:
        """End what runs and give everything back. Safe to call twice."""
        self.engine.close()
        self._artifact.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---- preparing ---------------------------------------------------------------------------
    def _texts(
        self, prompts: TextOrIds | Sequence[TextOrIds], params: Params | Sequence[Params] | None
    ) -> list[GrowingAnswer]:
        listed = _prompts(prompts)
        default, limit = self.default_sampling(thinking=False), self.engine.plan.limits.max_context
        answers = []
        for i, (text, own) in enumerate(zip(listed, each_of(params, len(listed)), strict=True)):
            wanted = wanted_of(own, default, limit, raw=True)
            prompt = text_prompt(self.frontend, text)
            answers += self._checked(i, prompt, Conversation(()), wanted)
        return answers

    def _conversations(
        self,
        messages: Messages | Sequence[Messages],
        params: Params | Sequence[Params] | None,
        options: ChatOptions,
    ) -> list[GrowingAnswer]:
        choice = tool_choice_of(options.tool_choice, options.tools)
        tools = [] if choice.mode == "none" else _plain(options.tools)
        one_call = not options.parallel_tool_calls
        listed = _turns(messages)
        limit = self.engine.plan.limits.max_context
        answers = []
        for i, (turns, own) in enumerate(zip(listed, each_of(params, len(listed)), strict=True)):
            conversation = parse_conversation(_plain(turns), tools)
            prompt = self.frontend.prompt(
                conversation,
                thinking=options.thinking,
                reasoning_effort=options.reasoning_effort,
                preserve_thinking=options.preserve_thinking,
            )
            default = self.default_sampling(thinking=prompt.thinking)
            wanted = wanted_of(own, default, limit, tool_choice=choice, one_call=one_call)
            answers += self._checked(i, prompt, conversation, wanted)
        return answers

    def _checked(self, i: int, prompt: Prompt, conversation: Conversation, wanted: Wanted) -> list[GrowingAnswer]:
        spec, limit = self.engine.model.spec, self.engine.plan.limits.max_context
        own_stops = frozenset(wanted.stop_token_ids)
        answers = []
        for index, asked in enumerate(answers_to(self.frontend, prompt, conversation, wanted)):
            asked.request.check(spec.n_addressable, spec.text.vocab_rows, limit)
            answers.append(GrowingAnswer(i, index, prompt, asked, own_stops))
        return answers

    # ---- running -----------------------------------------------------------------------------
    def _whole(self, answers: Sequence[GrowingAnswer]) -> list[RequestOutput]:
        for _ in self._run(answers):
            pass
        outputs: dict[int, RequestOutput] = {}
        for answer in answers:
            assert answer.output is not None, "every answer has ended"
            prompt = answer.prompt
            before = outputs.get(answer.request_index) or RequestOutput(prompt.text or None, prompt.token_ids, ())
            outputs[answer.request_index] = replace(before, outputs=(*before.outputs, answer.output))
        return list(outputs.values())

    def _pieces(self, answers: Sequence[GrowingAnswer]) -> Pieces:
        with closing(self._run(answers)) as growing:
            for answer in growing:
                yield answer.piece(self.tokenizer)

    def _run(self, answers: Sequence[GrowingAnswer]) -> Generator[GrowingAnswer, None, None]:
        """Every answer each time there is news of it, last when it has ended. So many are in the engine at once that
        none of its places stays empty."""
        waiting, running = deque(answers), list[GrowingAnswer]()
        is_interrupted = False

        def interrupt() -> None:
            nonlocal is_interrupted
            is_interrupted = True
            for answer in running:
                if answer.handle is not None:
                    answer.handle.cancel()

        try:
            while waiting or running:
                while waiting and len(running) < 2 * self.engine.plan.limits.max_rows:
                    answer = waiting.popleft()
                    answer.handle = self.engine.generate(answer.asked.request)
                    running.append(answer)
                with cancel_on_interrupt(interrupt):
                    self.engine.advance(*(answer.handle for answer in running if answer.handle is not None))
                if is_interrupted:
                    raise KeyboardInterrupt
                for answer in tuple(running):
                    if answer.handle is None or not answer.handle.has_news:
                        continue
                    answer.take(self.tokenizer)
                    if answer.output is not None:
                        running.remove(answer)
                    yield answer
        finally:
            for answer in running:
                if answer.handle is not None:
                    answer.handle.close()


def _config(artifact: Artifact, fields: Mapping[str, Any]) -> EngineConfig:
    """``EngineConfig`` of ``fields`` and what they leave open."""
    limit = config_of(artifact).text_config.get("max_position_embeddings")
    settings = {
        **_DEFAULTS,
        "device": default_device(fields.get("backend", "reference")),
        "max_context": min(CONTEXT, limit) if isinstance(limit, int) else CONTEXT,
    }
    if fields.get("prefix_reuse") is False:
        settings["snapshots"] = settings["host_snapshots"] = 0
    if unknown := fields.keys() - EngineConfig.__dataclass_fields__.keys():
        raise UsageError(f"{sorted(unknown)[0]!r} is no setting of an engine; see EngineConfig")
    return EngineConfig(**{**settings, **fields})


def _prompts(prompts: TextOrIds | Sequence[TextOrIds]) -> list[TextOrIds]:
    """One prompt or several; a list that begins with a number is one."""
    given: Any = prompts
    is_one = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], SupportsIndex))
    return [_prompt(prompt, i) for i, prompt in enumerate([given] if is_one else given)]


def _prompt(prompt: Any, i: int) -> TextOrIds:
    if isinstance(prompt, str) and prompt:
        return prompt
    try:
        token_ids = [] if isinstance(prompt, str) else [operator.index(token_id) for token_id in prompt]
    except TypeError:
        raise RequestError(f"prompt {i} is {prompt!r}, expected a text or token ids") from None
    if not token_ids:
        raise RequestError(f"prompt {i} is empty, expected a text or token ids")
    return token_ids


def _plain(members: Sequence[Any]) -> list[Any]:
    """Mappings as dicts; what is none stays, to be refused with its place."""
    return [dict(member) if isinstance(member, Mapping) else member for member in members]


def _turns(messages: Messages | Sequence[Messages]) -> list[Sequence[Mapping[str, Any]]]:
    """The messages of one conversation or of several; a list that begins with a message is one."""
    given: Any = messages
    is_one = isinstance(given, str) or not given or isinstance(given[0], Mapping)
    listed = [given] if is_one else given
    return [[{"role": "user", "content": turns}] if isinstance(turns, str) else turns for turns in listed]
