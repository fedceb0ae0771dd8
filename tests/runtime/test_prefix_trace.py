"""An agent's 20 turns through the engine: what is computed of its prompts, and that the policy is what saves it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from scripts.prefix_trace import (
    POLICIES,
    SOURCE,
    THINKING,
    Line,
    Thinking,
    frontend_of,
    lines_of,
    main,
    pool_of,
    run,
    trace,
)

AT_MOST = 0.08
"""Of the prompt tokens after turn 1, new ones included."""


@pytest.fixture(scope="module")
def pool() -> int:
    return pool_of(frontend_of(SOURCE), trace(1, 20))


def lines(thinking: Thinking, n_turns: int = 20) -> Sequence[Line]:
    return list(lines_of(frontend_of(SOURCE), trace(1, n_turns), thinking))


@pytest.mark.parametrize("thinking", THINKING)
def test_little_of_an_agents_prompts_is_computed_and_next_to_nothing_twice(thinking: Thinking, pool: int) -> None:
    found = run(frontend_of(SOURCE), lines(thinking), thinking, "anchors", pool)
    assert found.agent.n_requests > 40
    assert found.share <= AT_MOST
    assert found.agent.again <= found.agent.prompt / 200


def test_one_state_or_ends_alone_would_not_do(pool: int) -> None:
    asked = lines("dropped", 8)
    of_policy = {policy: run(frontend_of(SOURCE), asked, "dropped", policy, pool) for policy in POLICIES}
    assert of_policy["anchors"].share < of_policy["frontiers"].share / 3
    assert of_policy["frontiers"].share < of_policy["last frontier"].share


def test_the_script_prints_one_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["prefix_trace.py", "--turns", "2", "--json"])
    main()
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "ninfer.prefix-trace/1"
    assert [(row["thinking"], row["policy"]) for row in document["rows"]] == [
        (t, p) for t in THINKING for p in POLICIES
    ]
