"""``POST /v1/completions``: texts that go on, without a template. Prompts are trusted: control tokens in them count."""

import time
from typing import TYPE_CHECKING, Any

from ninfer_runtime.serve.answering import Answers, Piece
from ninfer_runtime.serve.errors import ApiError, Dialect, Problem
from ninfer_runtime.serve.fields import Values
from ninfer_runtime.serve.kinds import shown
from ninfer_runtime.serve.openai_chat import check_stream_options, stop_token_ids_of
from ninfer_runtime.serve.openai_words import fingerprint, finish_reason, grammar_of, new_id, stop_text, usage_of
from ninfer_runtime.serve.question import Question, log_fields_of, sampling_of
from ninfer_runtime.serve.reader import Drawn
from ninfer_runtime.serve.sse import DONE, KEEP_ALIVE, compact_json, data_frame
from ninfer_runtime.text.events import ContentText

if TYPE_CHECKING:
    from ninfer_runtime.serve.service import Service

DEFAULT_MAX_TOKENS = 16
"""The API's own default."""
MAX_PROMPTS = 128


def question_of(service: "Service", values: Values) -> Question:
    """What the request asks; ApiError or RequestError for what it must not ask."""
    service.check_model(values["model"])
    check_stream_options(values)
    if values.get("echo") and "logprobs" in values:
        raise ApiError("echo and logprobs exclude each other: the prompt's tokens have none here", param="echo")
    return Question(
        api="completions",
        texts=prompts_of(values["prompt"], service.facts.n_addressable),
        prompt_param="prompt",
        thinking=False,
        sampling=sampling_of(values),
        max_new=values.get("max_tokens", DEFAULT_MAX_TOKENS),
        min_new=values.get("min_tokens", 0),
        stops=values.get("stop", ()),
        include_stop=values.get("include_stop_str_in_output", False),
        stop_token_ids=stop_token_ids_of(values),
        ignore_eos=values.get("ignore_eos", False),
        n=values.get("n", 1),
        n_top_logprobs=values.get("logprobs"),
        grammar=grammar_of(values),
        cache_salt=values.get("cache_salt", ""),
        stream=values.get("stream", False),
        log_fields=log_fields_of(values),
    )


def prompts_of(prompt: Any, n_addressable: int) -> tuple[str | tuple[int, ...], ...]:
    """A text, a list of token ids, or a list of either; none of them empty."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(map(_is_integer, prompt))):
        return (_prompt(prompt, "prompt", n_addressable),)
    if not isinstance(prompt, list) or not 1 <= len(prompt) <= MAX_PROMPTS:
        raise ApiError(
            f"prompt is {shown(prompt)}, expected a text, token ids, or an array of 1 to {MAX_PROMPTS} of them",
            param="prompt",
        )
    return tuple(_prompt(item, f"prompt[{i}]", n_addressable) for i, item in enumerate(prompt))


def _prompt(prompt: Any, place: str, n_addressable: int) -> str | tuple[int, ...]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(map(_is_integer, prompt)):
        for i, token_id in enumerate(prompt):
            if not 0 <= token_id < n_addressable:
                raise ApiError(f"{place}[{i}] is {token_id}, expected an id from 0 to {n_addressable - 1}", param=place)
        return tuple(prompt)
    raise ApiError(f"{place} is {shown(prompt)}, expected a text or token ids, not empty", param=place)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class CompletionWriter:
    """A completion's chunks, or the whole of it. Choices of the first prompt come first."""

    dialect: Dialect = "openai"
    keep_alive = KEEP_ALIVE
    is_pure = True

    def __init__(self, service: "Service", values: Values, answers: Answers) -> None:
        self._service = service
        self._answers = answers
        options = values.get("stream_options", {})
        self._with_usage = options.get("include_usage", False)
        self._always_usage = options.get("continuous_usage_stats", False)
        self._with_logprobs = answers.prepared.question.n_top_logprobs is not None
        self._echo = values.get("echo", False)
        self._n_chars = [0] * len(answers.choices)
        self._undelivered: list[list[Drawn]] = [[] for _ in answers.choices]
        self._head_members = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.facts.model_id,
            "system_fingerprint": fingerprint(service),
        }
        self._head = compact_json(self._head_members)[:-1] + ',"choices":['
        self._tail = '],"usage":null}' if self._with_usage and not self._always_usage else "]}"

    # ---- a stream ----------------------------------------------------------------------------
    def begin(self) -> bytes:
        """The prompts, if they are echoed."""
        if not self._echo:
            return b""
        return b"".join(self._chunk(i, self._prompt_text(i)) for i in range(len(self._answers.choices)))

    def feed(self, pieces: list[Piece]) -> bytes:
        """A chunk per piece of text."""
        frames = []
        for piece in pieces:
            self._undelivered[piece.index] += piece.drawn
            text = _text(piece)
            if text:
                frames.append(self._chunk(piece.index, text))
            if piece.ending is not None:
                more = f',"stop_reason":{compact_json(stop_text(piece.ending))}'
                frames.append(self._chunk(piece.index, "", finish_reason(piece.ending), more))
        return b"".join(frames)

    def end(self) -> bytes:
        """Usage if asked for, and the mark of the end."""
        if not self._with_usage:
            return DONE
        return data_frame(f'{self._head}],"usage":{compact_json(usage_of(self._answers))}}}') + DONE

    def failed(self, problem: Problem) -> bytes:
        """An error event ends the stream."""
        return data_frame(compact_json(problem.body("openai"))) + DONE

    def _chunk(self, index: int, text: str, finish: str | None = None, more: str = "") -> bytes:
        reason = f'"{finish}"' if finish is not None else "null"
        logprobs = "null"
        if self._with_logprobs and self._undelivered[index]:
            drawn, self._undelivered[index] = self._undelivered[index], []
            logprobs = compact_json(self._logprobs(index, drawn))
        tail = self._tail
        if self._always_usage:
            tail = f'],"usage":{compact_json(usage_of(self._answers))}}}'
        body = f'"index":{index},"text":{compact_json(text)},"logprobs":{logprobs},"finish_reason":{reason}{more}'
        return f"data: {self._head}{{{body}}}{tail}\n\n".encode()

    # ---- a whole answer ----------------------------------------------------------------------
    def document(self, pieces: list[Piece]) -> dict[str, Any]:
        """The completion."""
        choices = []
        for piece in sorted(pieces, key=lambda piece: piece.index):
            assert piece.ending is not None, "a whole answer has ended"
            text = (self._prompt_text(piece.index) if self._echo else "") + _text(piece)
            choices.append(
                {
                    "index": piece.index,
                    "text": text,
                    "logprobs": self._logprobs(piece.index, piece.drawn) if self._with_logprobs else None,
                    "finish_reason": finish_reason(piece.ending),
                    "stop_reason": stop_text(piece.ending),
                }
            )
        return {**self._head_members, "choices": choices, "usage": usage_of(self._answers)}

    def _prompt_text(self, index: int) -> str:
        prepared = self._answers.prepared
        prompt = prepared.prompts[index // prepared.question.n]
        return prompt.text or self._service.frontend.tokenizer.decode(prompt.token_ids)

    def _logprobs(self, index: int, drawn: tuple[Drawn, ...] | list[Drawn]) -> dict[str, Any]:
        """The old form: parallel lists. Offsets count characters of the tokens' own texts."""
        tokenizer = self._service.frontend.tokenizer
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for item in drawn:
            text = tokenizer.token_bytes(item.token.token_id).decode("utf-8", "replace")
            lists["tokens"].append(text)
            lists["token_logprobs"].append(item.token.logprob)
            tops = {
                tokenizer.token_bytes(token_id).decode("utf-8", "replace"): value
                for token_id, value in reversed(item.token.top_logprobs)
            }
            lists["top_logprobs"].append(tops or None)
            lists["text_offset"].append(self._n_chars[index])
            self._n_chars[index] += len(text)
        return lists


def _text(piece: Piece) -> str:
    return "".join(event.text for event in piece.events if type(event) is ContentText)
