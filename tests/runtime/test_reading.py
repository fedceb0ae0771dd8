"""The reader of an answer: events, verdicts, and the thinking budget that closes a block once."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ninfer_format import Artifact
from ninfer_format.errors import RequestError
from ninfer_runtime.engine.reading import AnswerReader, ThinkingBudget, reader_for
from ninfer_runtime.engine.sequence import FinishReason, Forced, Verdict
from ninfer_runtime.text.events import ReasoningText
from ninfer_runtime.text.frontend import Frontend, Prompt
from ninfer_runtime.text.messages import Conversation
from ninfer_runtime.text.stream import StreamOptions, join
from tests.runtime.conftest import ArtifactOf

QUESTION = Conversation.of_prompt("Why?")


@pytest.fixture(scope="module")
def frontend(artifact_of: ArtifactOf) -> Frontend:
    with Artifact.open(artifact_of("dense", "bf16")) as artifact:
        return Frontend.open(artifact)


@pytest.fixture(scope="module")
def prompt(frontend: Frontend) -> Prompt:
    prompt = frontend.prompt(QUESTION)
    assert prompt.starts_inside
    return prompt


def ids_of(frontend: Frontend, text: str) -> list[int]:
    return frontend.tokenizer.encode_segments(frontend.tokenizer.split(text))


def drive(reader: AnswerReader, token_ids: Iterable[int]) -> tuple[list[int], Verdict]:
    """Feed like the engine does: forced tokens go in between, a reason ends it. What was fed, the last verdict."""
    fed: list[int] = []
    for token_id in token_ids:
        queue = [token_id]
        while queue:
            fed.append(queue.pop(0))
            match reader.feed(fed[-1]):
                case Forced(more):
                    assert not queue, "forced while forcing"
                    queue = list(more)
                case FinishReason() as reason:
                    return fed, reason
    return fed, None


def test_events_wait_until_they_are_taken(frontend: Frontend, prompt: Prompt) -> None:
    reader = reader_for(frontend, prompt, QUESTION)
    ids = ids_of(frontend, "Because.\n</think>\n\nYes.")
    assert drive(reader, ids[:3]) == (ids[:3], None)
    first = reader.take()
    assert reader.take() == []
    drive(reader, ids[3:])
    rest = reader.flush()
    assert all(isinstance(event, ReasoningText) for event in first)
    reply = join(first + rest)
    assert (reply.reasoning, reply.content) == ("Because.", "Yes.")
    assert reader.n_reasoning_tokens == ids.index(frontend.tokenizer.added["</think>"].token_id) + 1


def test_a_stop_string_ends_after_the_token_that_completes_it(frontend: Frontend, prompt: Prompt) -> None:
    reader = reader_for(frontend, prompt, QUESTION, stops=["stop here"])
    before, after = ids_of(frontend, "x\n</think>\n\nGo on, stop here"), ids_of(frontend, " and more")
    fed, verdict = drive(reader, before + after)
    assert (fed, verdict) == (before, FinishReason.STOP_STRING)
    assert join(reader.flush()).content == "Go on, "
    assert reader.reason(FinishReason.OUTPUT_LIMIT) is FinishReason.STOP_STRING
    assert reader.reason(FinishReason.CANCELLED) is FinishReason.CANCELLED


def test_a_spelled_out_end_of_turn_is_a_stop_token(frontend: Frontend) -> None:
    stream = frontend.stream(StreamOptions())
    spelled = AnswerReader(type(stream)(frontend.tokenizer, StreamOptions(), end_markers=("<|im_end|>",)))
    fed, verdict = drive(spelled, frontend.tokenizer.encode_text("Done<|im_end|> never"))
    assert verdict is FinishReason.STOP_TOKEN
    assert join(spelled.flush()).content == "Done"
    assert len(fed) < len(frontend.tokenizer.encode_text("Done<|im_end|> never"))


@pytest.mark.parametrize("limit", [1, 2, 5, 9])
def test_a_spent_budget_closes_the_block_once(frontend: Frontend, prompt: Prompt, limit: int) -> None:
    reader = reader_for(frontend, prompt, QUESTION, max_thinking=limit)
    closing = ids_of(frontend, "\n</think>\n\n")
    thoughts = ids_of(frontend, "one two three four five six seven")
    answer = ids_of(frontend, "So be it.")
    fed, verdict = drive(reader, thoughts[:limit] + answer)
    assert verdict is None
    assert fed == thoughts[:limit] + closing + answer
    reply = join(reader.flush())
    assert reply.reasoning == frontend.tokenizer.decode(thoughts[:limit])
    assert reply.content == "So be it."
    assert reader.n_reasoning_tokens == limit + closing.index(frontend.tokenizer.added["</think>"].token_id) + 1


def test_a_block_that_is_opened_again_is_not_closed_a_second_time(frontend: Frontend, prompt: Prompt) -> None:
    reader = reader_for(frontend, prompt, QUESTION, max_thinking=2)
    fed, _ = drive(reader, ids_of(frontend, "ab<think>again and again"))
    assert fed.count(frontend.tokenizer.added["</think>"].token_id) == 1


def test_thinking_that_ends_in_time_is_left_alone(frontend: Frontend, prompt: Prompt) -> None:
    ids = ids_of(frontend, "a b\n</think>\n\nThe answer is long, longer than any thought.")
    n_thinking = ids.index(frontend.tokenizer.added["</think>"].token_id) + 1
    reader = reader_for(frontend, prompt, QUESTION, max_thinking=n_thinking)
    assert drive(reader, ids) == (ids, None)


def test_an_answer_without_thinking_has_no_budget_to_spend(frontend: Frontend) -> None:
    prompt = frontend.prompt(QUESTION, thinking=False)
    reader = reader_for(frontend, prompt, QUESTION, max_thinking=1)
    ids = ids_of(frontend, "A plain answer.")
    assert drive(reader, ids) == (ids, None)


def test_a_character_is_not_cut_in_two(frontend: Frontend, prompt: Prompt) -> None:
    smile = frontend.tokenizer.encode_text("😀")
    assert len(smile) > 2
    reader = reader_for(frontend, prompt, QUESTION, max_thinking=2)
    fed, _ = drive(reader, smile)
    assert fed[: len(smile)] == smile
    assert fed[len(smile) :] == ids_of(frontend, "\n</think>\n\n")
    assert join(reader.flush()).reasoning == "😀"


def test_the_closing_phrase_is_thinking(frontend: Frontend, prompt: Prompt) -> None:
    reader = reader_for(frontend, prompt, QUESTION, max_thinking=1, closing_phrase=" Enough.")
    drive(reader, ids_of(frontend, "a"))
    assert join(reader.flush()).reasoning == "a Enough."


@pytest.mark.parametrize("limit", [0, -1])
def test_a_budget_of_nothing_is_refused(frontend: Frontend, limit: int) -> None:
    with pytest.raises(RequestError, match="thinking budget is"):
        ThinkingBudget.of(frontend.tokenizer, limit)


def test_phrases_and_raw_output_that_cannot_work_are_refused(frontend: Frontend, prompt: Prompt) -> None:
    with pytest.raises(RequestError, match="closing phrase"):
        ThinkingBudget.of(frontend.tokenizer, 5, "stop</think>")
    with pytest.raises(RequestError, match="raw output"):
        reader_for(frontend, prompt, QUESTION, raw=True, max_thinking=5)
