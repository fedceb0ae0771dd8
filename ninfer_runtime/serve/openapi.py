"""The OpenAPI document: request schemas from the table of fields, every route with its errors."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ninfer_runtime.serve.fields import request_schema, schema_of_rows
from ninfer_runtime.serve.tokens import ROUTES

REQUEST_SCHEMAS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": request_schema("chat"),
    "/v1/completions": request_schema("completions"),
    "/v1/responses": request_schema("responses"),
    "/v1/responses/input_tokens": request_schema("input_tokens"),
    "/v1/messages": request_schema("messages"),
    "/v1/messages/count_tokens": request_schema("count_tokens"),
    **{path: schema_of_rows(rows) for path, (rows, _) in ROUTES.items()},
}
"""Path of a POST → schema of its body."""

_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string", "minLength": 1}},
    "additionalProperties": False,
}
_TEXT = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1, "items": _TEXT_PART}]}
_CALL = {
    "type": "object",
    "required": ["id", "type", "function"],
    "properties": {
        "id": {"type": "string", "minLength": 1},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                "arguments": {"type": "string", "description": "The text of a JSON object."},
            },
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}


def _turn(roles: list[str], required: list[str], **more: Any) -> dict[str, Any]:
    properties = {"role": {"enum": roles}, "content": _TEXT, **more}
    return {
        "type": "object",
        "required": ["role", *required],
        "properties": properties,
        "additionalProperties": False,
    }


CHAT_MESSAGE = {
    "anyOf": [
        _turn(["system", "developer", "user"], ["content"]),
        _turn(["assistant"], ["content"], reasoning_content={"type": "string"}),
        _turn(["assistant"], ["tool_calls"], tool_calls={"type": "array", "minItems": 1, "items": _CALL}),
        _turn(["tool"], ["content", "tool_call_id"], tool_call_id={"type": "string", "minLength": 1}),
    ]
}
ANTHROPIC_MESSAGE = {"anyOf": [_turn(["user", "assistant"], ["content"])]}
MESSAGE_ITEMS = {
    "/v1/chat/completions": CHAT_MESSAGE,
    "/apply-template": CHAT_MESSAGE,
    "/v1/messages": ANTHROPIC_MESSAGE,
    "/v1/messages/count_tokens": ANTHROPIC_MESSAGE,
}
"""Path of a POST → schema of an item of its ``messages``. What is read is more: null members, aliases, media parts that
are refused by name."""

ERROR_STATUSES = (400, 401, 403, 404, 405, 413, 415, 429, 500, 503)
_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def described(app: FastAPI, model_id: str) -> None:
    """Give the application its document; it is made when it is first asked for."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            for path, operations in made["paths"].items():
                for method, operation in operations.items():
                    _describe(path, method, operation, model_id)
            made.pop("components", None)
            made["components"] = {
                "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
                "schemas": {"OpenAIError": _OPENAI_ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            }
            made["security"] = [{}, {"bearer": []}]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _describe(path: str, method: str, operation: dict[str, Any], model_id: str) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    name = "AnthropicError" if path.startswith("/v1/messages") else "OpenAIError"
    for status in ERROR_STATUSES:
        error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        responses.setdefault(str(status), {"description": "An error.", "content": error})
    if path in ("/health", "/ready"):
        responses["503"] = {"description": "Not so.", "content": {"application/json": {"schema": {"type": "object"}}}}
    if path == "/metrics":
        responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
        return
    if method == "post" and path in REQUEST_SCHEMAS:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _body_schema(path, model_id)}},
        }
    if path in STREAMING_PATHS:
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}


def _body_schema(path: str, model_id: str) -> dict[str, Any]:
    """The request's schema with what only this server knows."""
    schema = REQUEST_SCHEMAS[path]
    properties = dict(schema["properties"])
    if "model" in properties and path not in ANY_MODEL_PATHS:
        properties["model"] = {"enum": [model_id], "description": properties["model"].get("description", "")}
    if path in MESSAGE_ITEMS:
        properties["messages"] = {**properties["messages"], "items": MESSAGE_ITEMS[path]}
    return {**schema, "properties": properties}


ANY_MODEL_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
STREAMING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
