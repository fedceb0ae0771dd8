"""The pages of the APIs say what the server reads; its table of fields knows every field of the official clients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from anthropic.resources.beta.messages import Messages as BetaMessages
from anthropic.resources.messages import Messages
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from openai.resources.responses import Responses
from openai.resources.responses.input_tokens import InputTokens

from ninfer_runtime.serve.fields import FIELDS, Api
from scripts.api_tables import PAGES, TABLE, written

OF_THE_CLIENT = {
    "self", "extra_headers", "extra_query", "extra_body", "timeout", "output_format",
}  # fmt: skip
"""Parameters that are no fields; ``output_format`` is sent as ``output_config.format``."""


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_tables_of_a_page_are_those_of_the_server(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert TABLE.search(text)
    assert written(text) == text, "run python -m scripts.api_tables"


@pytest.mark.parametrize(
    ("api", "method"),
    [
        ("chat", ChatCompletions.create),
        ("completions", Completions.create),
        ("responses", Responses.create),
        ("input_tokens", InputTokens.count),
        ("messages", Messages.create),
        ("messages", BetaMessages.create),
        ("count_tokens", Messages.count_tokens),
    ],
)
def test_c22_every_field_of_the_official_client_is_in_the_table(api: Api, method: Callable[..., Any]) -> None:
    known = {row.name for row in FIELDS[api]}
    assert set(inspect.signature(method).parameters) - OF_THE_CLIENT <= known
