"""Conversations that are left and taken up again, asked of two engines of which one keeps what it computed."""

from __future__ import annotations

from collections.abc import Iterator

from ninfer_runtime import Engine, FinishReason, Request, SamplingParams
from ninfer_runtime.engine.sequence import Finish, TokenEvent
from ninfer_runtime.text.frontend import Frontend
from ninfer_runtime.text.messages import Conversation, Message

TURNS = (
    ("What is 13 + 14?", "Tens: 10 + 10 = 20. Ones: 3 + 4 = 7. 20 + 7 = 27.", "13 + 14 = 27."),
    ("Spell the word window.", "The letters of window, one by one.", "w-i-n-d-o-w."),
    ("What is the capital of Japan?", "The user asks about Japan.", "The capital of Japan is Tokyo."),
    ("Which day comes after Monday?", "After Monday comes Tuesday.", "Tuesday comes after Monday."),
)
ORDER = ((2, 0), (3, 0), (3, 1), (2, 0), (4, 0), (3, 0))
"""(turns asked, which of the questions is the last one, counted from that place): branches, and ways back."""
GAP = 0.1
"""Nats between the two most likely tokens, within which another order of sums may choose the other one."""


def revisits(frontend: Frontend, max_new: int) -> Iterator[Request]:
    """Greedy requests, rendered by the artifact's template."""
    for n_turns, shift in ORDER:
        messages = []
        for question, thinking, answer in TURNS[: n_turns - 1]:
            messages += [Message("user", question), Message("assistant", answer, thinking)]
        messages.append(Message("user", TURNS[(n_turns - 1 + shift) % len(TURNS)][0]))
        prompt = frontend.prompt(Conversation(tuple(messages)))
        stops, greedy = frontend.generation.stop_ids, SamplingParams.greedy()
        yield Request(prompt.token_ids, greedy, max_new, stops, n_top_logprobs=2, anchors=prompt.anchors)


def ask(engine: Engine, request: Request) -> tuple[list[TokenEvent], Finish]:
    handle = engine.generate(request)
    events = list(handle)
    assert handle.finish is not None
    return events, handle.finish


def assert_warm_is_cold(warm: Engine, cold: Engine, frontend: Frontend, max_new: int) -> int:
    """Equal tokens up to one that was nearly tied; the prompt tokens that were reused."""
    n_reused = 0
    for request in revisits(frontend, max_new):
        (found, finish), (expected, _) = ask(warm, request), ask(cold, request)
        pairs = zip(found, expected, strict=False)
        parted = next((pair for pair in pairs if pair[0].token_id != pair[1].token_id), None)
        if parted is None:
            assert len(found) == len(expected)
        else:
            (_, first), (_, second) = parted[1].top_logprobs
            assert first - second < GAP, f"token {parted[1].index} differs where {first - second:.3f} nats tell apart"
        assert finish.reason in (FinishReason.STOP_TOKEN, FinishReason.OUTPUT_LIMIT)
        n_reused += finish.reuse.n_tokens
    return n_reused
