"""A server's own thinking budget: for requests that set none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.serve.live import LiveServer


def thinking_tokens(server: LiveServer, **fields: Any) -> int:
    usage = server.chat("What is 12 + 7?", temperature=0, max_tokens=60, **fields).json["usage"]
    n_tokens: int = usage["completion_tokens_details"]["reasoning_tokens"]
    return n_tokens


def test_the_servers_budget_is_for_requests_without_one(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    free = thinking_tokens(server)
    n_closing = thinking_tokens(server, thinking_budget=9) - 9
    assert n_closing > 0
    monkeypatch.setattr(server.service, "settings", replace(server.service.settings, max_thinking=4))
    assert thinking_tokens(server) == 4 + n_closing < free
    assert thinking_tokens(server, thinking_budget=9) == 9 + n_closing
    assert thinking_tokens(server, enable_thinking=False) == 0
