"""Chat completions over HTTP: what a client gets, whole and streamed."""

from __future__ import annotations

from tests.serve.live import LiveServer


def test_an_answer_streamed_joins_to_the_whole_one(server: LiveServer) -> None:
    whole = server.chat(seed=5, max_tokens=40).json
    streamed = server.chat(seed=5, max_tokens=40, stream=True).events
    assert whole["choices"][0]["message"]["reasoning_content"]
    for member in ("content", "reasoning_content"):
        text = "".join(chunk["choices"][0]["delta"].get(member) or "" for chunk in streamed)
        assert text == (whole["choices"][0]["message"].get(member) or "")
    assert streamed[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
