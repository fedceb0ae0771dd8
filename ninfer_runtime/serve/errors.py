"""What a client is told when something goes wrong: one ``Problem``, in the envelope of the API that was called.

OpenAI routes (and every path that is no API's) answer ``{"error": {"message", "type", "param", "code"}}``, Anthropic
routes ``{"type": "error", "error": {"type", "message", "details"}, "request_id"}``.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ninfer_format.errors import (
    ArtifactError,
    EngineStoppedError,
    GenerationError,
    MemberError,
    NinferError,
    NonFiniteError,
    OverloadedError,
    QueueTimeoutError,
    RequestError,
    UsageError,
    VisionDisabledError,
)
from ninfer_runtime.media.errors import MediaBudgetError, MediaError, MediaFetchError, MediaTimeoutError

Dialect = Literal["openai", "anthropic"]

ANTHROPIC_PATHS = ("/v1/messages",)
_PLACE = re.compile(r"[A-Za-z_]\w{0,40}(\.[A-Za-z_]\w{0,40}|\[\d{1,7}\]){0,12}", re.ASCII)
RETRY_SECONDS = 1
"""What ``Retry-After`` says when nothing better is known."""

_OPENAI_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_CODES: Mapping[int, str] = {
    400: "invalid_request",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "server_overloaded",
    503: "service_unavailable",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One failure as a client sees it. ``code`` is stable, ``param`` the field's path, ``retry_after`` in seconds."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after: int | None = None

    def body(self, dialect: Dialect, request_id: str | None = None) -> dict[str, Any]:
        """The JSON body."""
        if dialect == "anthropic":
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            details = {"error_code": self.code, "param": self.param}
            error = {"type": kind, "message": self.message, "details": details}
            return {"type": "error", "error": error, "request_id": request_id}
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def encoded(self, dialect: Dialect, request_id: str | None = None) -> bytes:
        """``body`` as bytes; text that is no Unicode (lone surrogates) is escaped."""
        return json.dumps(self.body(dialect, request_id)).encode()

    @property
    def logged_param(self) -> str | None:
        """``param`` for logs: None when it may be text of the request, as the name of a field that nobody knows is."""
        return self.param if self.param is not None and _PLACE.fullmatch(self.param) else None

    @property
    def headers(self) -> dict[str, str]:
        """Headers beside the content type."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


class ApiError(NinferError):
    """A request that the server refuses or has to end, with everything its client is told."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.problem = Problem(status, message, code or _CODES.get(status, "error"), param, retry_after)


@dataclass(frozen=True, slots=True)
class _Row:
    status: int
    code: str
    retry_after: int | None = None
    message: str | None = None
    """Said instead of the error's own words, which are about the server's insides."""


_INTERNAL = _Row(500, "internal_error", message="the server failed on this request; its log says how")
_ROWS: tuple[tuple[type[BaseException], _Row], ...] = (
    (VisionDisabledError, _Row(400, "vision_disabled")),
    (MediaBudgetError, _Row(400, "media_budget_exceeded")),
    (MediaError, _Row(400, "invalid_media")),
    (MediaTimeoutError, _Row(504, "media_fetch_timeout")),
    (MediaFetchError, _Row(502, "media_fetch_failed")),
    (RequestError, _Row(400, "invalid_request")),
    (OverloadedError, _Row(429, "server_overloaded", RETRY_SECONDS)),
    (QueueTimeoutError, _Row(503, "request_queue_timeout", RETRY_SECONDS)),
    (EngineStoppedError, _Row(503, "service_unavailable", RETRY_SECONDS)),
    (NonFiniteError, _Row(500, "non_finite_logits")),
    (GenerationError, _Row(500, "generation_failed")),
    (UsageError, _Row(400, "invalid_request")),
    # A template that fails on these messages; the artifact itself was checked at the start.
    (ArtifactError, _Row(400, "chat_template_failed")),
)


def problem_of(error: BaseException) -> Problem:
    """What a client is told about ``error``; anything unforeseen is a 500 that tells nothing."""
    if isinstance(error, ApiError):
        return error.problem
    row = next((row for kind, row in _ROWS if isinstance(error, kind)), _INTERNAL)
    message = row.message or str(error)
    place = error.place if isinstance(error, MemberError) else None
    return Problem(row.status, message, row.code, place, row.retry_after)


def dialect_of(path: str) -> Dialect:
    """Which envelope a path's errors take."""
    under = (path == root or path.startswith(root + "/") for root in ANTHROPIC_PATHS)
    return "anthropic" if any(under) else "openai"


# ---- refusals that several APIs share -----------------------------------------------------------
def context_length_exceeded(n_prompt: int, max_context: int, param: str) -> ApiError:
    """A prompt that leaves no room for output; both counts are in the message."""
    return ApiError(
        f"the prompt has {n_prompt} tokens; this model's context holds {max_context} tokens with at least one of "
        "output. Shorten the prompt",
        code="context_length_exceeded",
        param=param,
    )


def model_not_found(name: str, offered: str) -> ApiError:
    """A model that is not the one this server runs."""
    return ApiError(
        f"the model {name!r} does not exist here; this server runs {offered!r}",
        status=404,
        code="model_not_found",
        param="model",
    )


def unsupported(name: str, why: str, code: str = "unsupported_parameter") -> ApiError:
    """A field of the API that this server does not have."""
    return ApiError(f"{name} is not supported: {why}", code=code, param=name)
