"""``POST /v1/responses``: a Responses request to a ``Question``, pieces of the answer to items and events."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ninfer_format.errors import NinferError
from ninfer_runtime.engine.asking import ToolChoice
from ninfer_runtime.engine.sequence import FinishReason
from ninfer_runtime.serve import fields
from ninfer_runtime.serve.answering import Answers, Ending, Piece
from ninfer_runtime.serve.errors import ApiError, Dialect, Problem, problem_of
from ninfer_runtime.serve.exchange import AnswerResponse
from ninfer_runtime.serve.fields import Api, Values
from ninfer_runtime.serve.kinds import shown, wrong
from ninfer_runtime.serve.limits import read_json
from ninfer_runtime.serve.openai_chat import tool_choice_of
from ninfer_runtime.serve.openai_words import format_of, logprob_entries
from ninfer_runtime.serve.question import Question, log_fields_of, render, sampling_of, thinking_of
from ninfer_runtime.serve.responses_items import Item, conversation_of, new_id, read_input, read_tools
from ninfer_runtime.serve.responses_output import Frame, Logprobs, OutputItems
from ninfer_runtime.serve.responses_store import ResponseStore, Stored, invalid_pagination, n_bytes_of, page_of
from ninfer_runtime.serve.sse import KEEP_ALIVE, compact_json, named_frame

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

    from ninfer_runtime.serve.service import Service
    from ninfer_runtime.text.grammar import GrammarSpec

LOGPROBS = "message.output_text.logprobs"
MAX_PAGE = 100
INCLUDES = ("include", "include[]")
RETRIEVE_QUERY = frozenset({*INCLUDES, "stream"})
PAGE_QUERY = frozenset({*INCLUDES, "after", "limit", "order"})
_INCOMPLETE = (FinishReason.OUTPUT_LIMIT, FinishReason.CONTEXT_CAPACITY)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as read: what the engine is asked, and what the response repeats of it."""

    question: Question
    values: Values
    earlier: Stored | None
    given: tuple[Item, ...]
    is_stored: bool


def asked_of(service: "Service", store: ResponseStore, values: Values, api: Api = "responses") -> Asked:
    """What the request asks; ApiError or RequestError for what it must not ask."""
    service.check_model(values["model"])
    if "input" not in values:
        raise ApiError("the parameter 'input' is missing", code="missing_parameter", param="input")
    earlier = None
    if "previous_response_id" in values:
        earlier = store.get(values["previous_response_id"], "previous_response_id")
    before = earlier.history if earlier is not None else ()
    given = tuple(read_input(values["input"], (item["id"] for item in before)))
    tools = read_tools(values.get("tools", []))
    choice, tools = tool_choice_among(values.get("tool_choice"), tools)
    reasoning = values.get("reasoning", {})
    asked = thinking_of(values, reasoning.get("effort"))
    preserve = asked.preserve_thinking
    if preserve is None and earlier is not None:
        preserve = earlier.preserve_thinking
    budget = values.get("thinking_budget")
    is_stored = values.get("store", True) and api == "responses"
    if is_stored:
        store.check_room((earlier.n_history if earlier is not None else 0) + n_bytes_of(given))
    question = Question(
        api=api,
        conversation=conversation_of(values.get("instructions"), (*before, *given), tools),
        prompt_param="input",
        thinking=False if budget == 0 else asked.thinking,
        reasoning_effort=asked.reasoning_effort,
        effort_param="reasoning.effort",
        preserve_thinking=preserve,
        thinking_budget=budget or None,
        sampling=sampling_of(values),
        max_new=values.get("max_output_tokens"),
        n_top_logprobs=_n_top_logprobs(values),
        tool_choice=choice,
        one_call=values.get("parallel_tool_calls") is False,
        grammar=_format_of(values),
        stream=values.get("stream", False),
        log_fields=log_fields_of(values),
    )
    return Asked(question, values, earlier, given, is_stored)


def _format_of(values: Values) -> "GrammarSpec | None":
    text = values.get("text", {})
    return format_of(text["format"], "text.format") if "format" in text else None


def _n_top_logprobs(values: Values) -> int | None:
    """Log probabilities are asked for by ``include``; ``top_logprobs`` says how many."""
    include = values.get("include", [])
    for i, name in enumerate(include):
        if name != LOGPROBS:
            raise not_included(f"include[{i}]", name)
    if not include:
        if values.get("top_logprobs"):
            raise ApiError(f"top_logprobs needs include: [{LOGPROBS!r}]", param="top_logprobs")
        return None
    count: int = values.get("top_logprobs", 0)
    return count


def tool_choice_among(choice: Any, tools: Sequence[dict[str, Any]]) -> tuple[ToolChoice, tuple[dict[str, Any], ...]]:
    """The choice, and the tools it leaves: ``allowed_tools`` offers only those it lists."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tool_choice_of(choice, tools), tuple(tools)
    mode, listed = choice.get("mode"), choice.get("tools")
    if unknown := sorted(choice.keys() - {"type", "mode", "tools"}):
        path = f"tool_choice.{unknown[0]}"
        raise ApiError(f"the parameter {path!r} is unknown", code="unknown_parameter", param=path)
    if mode not in ("auto", "required"):
        raise wrong("tool_choice.mode", mode, "'auto' or 'required'")
    if not isinstance(listed, list) or not listed:
        raise wrong("tool_choice.tools", listed, "an array with at least one function")
    names = [tool_choice_of(one, tools).name for one in listed]
    left = tuple(tool for tool in tools if tool["function"]["name"] in names)
    return tool_choice_of(mode, left), left


def add_routes(app: "FastAPI", service: "Service") -> None:
    """Create, fetch, list, delete; count; and the two that are always refused."""
    from fastapi import Request
    from fastapi.responses import JSONResponse, Response

    store = ResponseStore(service.settings.store_records, service.settings.store_bytes)

    @app.post("/v1/responses", tags=["Responses"])
    async def create(request: Request) -> Response:
        """Answer items."""
        values = fields.read("responses", await read_json(request, service))
        asked = asked_of(service, store, values)
        return AnswerResponse(service, asked.question, lambda answers: ResponseWriter(service, store, asked, answers))

    @app.post("/v1/responses/input_tokens", tags=["Responses"])
    async def input_tokens(request: Request) -> Response:
        """How many tokens the prompt of a request has."""
        values = fields.read("input_tokens", await read_json(request, service))
        asked = asked_of(service, store, values, "input_tokens")
        (prompt,) = await service.in_thread(render, service, asked.question)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})

    @app.post("/v1/responses/compact", tags=["Responses"])
    async def compact() -> Response:
        """Always refused."""
        raise ApiError("responses are not compacted; send fewer items", code="compaction_not_supported")

    @app.get("/v1/responses/{response_id}", tags=["Responses"])
    async def retrieve(request: Request, response_id: str) -> Response:
        """A stored response."""
        check_query(request, RETRIEVE_QUERY)
        return JSONResponse(store.get(response_id).document)

    @app.delete("/v1/responses/{response_id}", tags=["Responses"])
    async def delete(response_id: str) -> Response:
        """Forget a stored response; those that continue it stay."""
        store.delete(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @app.get("/v1/responses/{response_id}/input_items", tags=["Responses"])
    async def input_items(request: Request, response_id: str) -> Response:
        """What a stored response answers, a page at a time."""
        after, limit, order = page_query(request)
        stored = store.get(response_id)
        return JSONResponse(page_of((*stored.before, *stored.given), after, limit, order))

    @app.post("/v1/responses/{response_id}/cancel", tags=["Responses"])
    async def cancel(response_id: str) -> Response:
        """Always refused: closing the connection cancels."""
        raise ApiError("no response runs in the background; close the connection", code="background_not_supported")


def check_query(request: "Request", known: Collection[str]) -> None:
    """ApiError for a query parameter that would be ignored."""
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise ApiError(f"the query parameter {name!r} is unknown", code="unknown_parameter", param=name)
        if name in INCLUDES and value != LOGPROBS:
            raise ApiError(
                f"{name} is {value!r}; this server has {LOGPROBS!r} only", code="include_not_supported", param=name
            )
        if name == "stream" and value.lower() != "false":
            raise ApiError("stored responses are not streamed again", code="stream_option_not_supported", param=name)


def not_included(place: str, value: Any) -> ApiError:
    """Something that responses of this server do not include."""
    return ApiError(
        f"{place} is {shown(value)}; this server has {LOGPROBS!r} only", code="include_not_supported", param=place
    )


def page_query(request: "Request") -> tuple[str | None, int, str]:
    """``after``, ``limit`` and ``order`` of a list."""
    check_query(request, PAGE_QUERY)
    query = request.query_params
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_PAGE):
        raise invalid_pagination("limit", limit, f"a number from 1 to {MAX_PAGE}")
    if order not in ("asc", "desc"):
        raise invalid_pagination("order", order, "'asc' or 'desc'")
    return query.get("after"), int(limit), order


class ResponseWriter:
    """A response's events, or the whole of it; kept in the store when it is complete."""

    dialect: Dialect = "openai"
    keep_alive = KEEP_ALIVE
    is_pure = False

    def __init__(self, service: "Service", store: ResponseStore, asked: Asked, answers: Answers) -> None:
        self._service = service
        self._store = store
        self._asked = asked
        self._answers = answers
        self._id = new_id("resp")
        self._created = int(time.time())
        self._n_sent = 0
        self._ending: Ending | None = None
        self._output = OutputItems(keeps_failed=asked.question.stream)

    # ---- a stream ----------------------------------------------------------------------------
    def begin(self) -> bytes:
        """The response as it is before there is any of it."""
        started = {"response": self._document("in_progress")}
        return self._framed([("response.created", started), ("response.in_progress", started)])

    def feed(self, pieces: list[Piece]) -> bytes:
        """Events of these pieces."""
        return b"".join(self._framed(self._grow(piece)) for piece in pieces)

    def end(self) -> bytes:
        """The end of the last item, and the whole response."""
        frames = self._output.end(is_incomplete=self._status == "incomplete")
        document = self._document(self._status, completed=True)
        try:
            self._keep(document)
        except NinferError as error:
            return self._framed(frames) + self.failed(problem_of(error))
        return self._framed([*frames, (f"response.{self._status}", {"response": document})])

    def failed(self, problem: Problem) -> bytes:
        """The response as it is, failed."""
        document = self._document("failed")
        document["error"] = {"code": _error_code(problem), "message": problem.message}
        for item in document["output"]:
            if item["status"] == "in_progress":
                item["status"] = "incomplete"
        return self._framed([("response.failed", {"response": document})])

    def _grow(self, piece: Piece) -> list[Frame]:
        if piece.ending is not None:
            self._ending = piece.ending
        return self._output.feed(piece.events, self._logprobs(piece))

    def _logprobs(self, piece: Piece) -> Logprobs | None:
        return logprob_entries(self._service.frontend.tokenizer, piece.drawn) if piece.drawn else None

    def _framed(self, frames: Sequence[Frame]) -> bytes:
        out = []
        for name, members in frames:
            out.append(named_frame(name, compact_json({"type": name, "sequence_number": self._n_sent, **members})))
            self._n_sent += 1
        return b"".join(out)

    # ---- a whole answer ----------------------------------------------------------------------
    def document(self, pieces: list[Piece]) -> dict[str, Any]:
        """The response."""
        for piece in pieces:
            self._grow(piece)
        self._output.end(is_incomplete=self._status == "incomplete")
        document = self._document(self._status, completed=True)
        self._keep(document)
        return document

    def _keep(self, document: dict[str, Any]) -> None:
        if self._asked.is_stored:
            asked = self._asked
            self._store.put(Stored.of(document, asked.given, asked.earlier, asked.question.preserve_thinking))

    @property
    def _status(self) -> str:
        reason = self._ending.reason if self._ending is not None else FinishReason.CANCELLED
        if reason in _INCOMPLETE:
            return "incomplete"
        return "cancelled" if reason is FinishReason.CANCELLED else "completed"

    def _document(self, status: str, *, completed: bool = False) -> dict[str, Any]:
        asked, values, sampling = self._asked, self._asked.values, self._answers.prepared.sampling
        question = asked.question
        is_cut = status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": values.get("instructions"),
            "max_output_tokens": values.get("max_output_tokens"),
            "max_tool_calls": None,
            "metadata": values.get("metadata", {}),
            "model": self._service.facts.model_id,
            "output": [dict(item) for item in self._output.items],
            "parallel_tool_calls": not question.one_call,
            "previous_response_id": values.get("previous_response_id"),
            "prompt_cache_key": values.get("prompt_cache_key"),
            "reasoning": {"effort": question.reasoning_effort, "summary": None},
            "safety_identifier": values.get("safety_identifier"),
            "service_tier": "default",
            "store": asked.is_stored,
            "temperature": sampling.temperature,
            "text": {"format": values.get("text", {}).get("format", {"type": "text"})},
            "tool_choice": values.get("tool_choice", "auto"),
            "tools": values.get("tools", []),
            "top_logprobs": question.n_top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": usage_document(self._answers) if completed else None,
            "user": values.get("user"),
        }


def usage_document(answers: Answers) -> dict[str, Any]:
    """Token counts in this API's words."""
    usage = answers.usage
    return {
        "input_tokens": usage.n_prompt,
        "input_tokens_details": {"cached_tokens": usage.n_cached, "cache_write_tokens": 0},
        "output_tokens": usage.n_generated,
        "output_tokens_details": {"reasoning_tokens": usage.n_reasoning},
        "total_tokens": usage.n_total,
    }


def _error_code(problem: Problem) -> str:
    """The code of a failed response; those of the API where one fits."""
    return "rate_limit_exceeded" if problem.status == 429 else problem.code
