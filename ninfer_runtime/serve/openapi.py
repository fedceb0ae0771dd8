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


def described(app: FastAPI) -> None:
    """Give the application its document; it is made when it is first asked for."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            for path, operations in made["paths"].items():
                for method, operation in operations.items():
                    _describe(path, method, operation)
            made.pop("components", None)
            made["components"] = {
                "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
                "schemas": {"OpenAIError": _OPENAI_ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            }
            made["security"] = [{}, {"bearer": []}]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _describe(path: str, method: str, operation: dict[str, Any]) -> None:
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
            "content": {"application/json": {"schema": REQUEST_SCHEMAS[path]}},
        }
    if path in STREAMING_PATHS:
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}


STREAMING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
