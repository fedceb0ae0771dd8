"""Output items of a response and the events that say so: deltas join to the items, whatever the answer was."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import count
from typing import Any

import pytest

from ninfer_runtime.serve.responses_output import Frame, OutputItems, texts_of
from ninfer_runtime.text.stream import StreamOptions
from tests.property.model_outputs import TOOLS, model_outputs
from tests.runtime.chain import call, events_of

PARIS = call("search", ("query", "Paris"))


def ids() -> Any:
    numbers = count()
    return lambda prefix: f"{prefix}_{next(numbers)}"


def run(
    *pieces: str, keeps_failed: bool = True, is_incomplete: bool = False, **options: Any
) -> tuple[OutputItems, list[Frame]]:
    output = OutputItems(keeps_failed=keeps_failed, id_of=ids())
    frames: list[Frame] = []
    for event in events_of(pieces, StreamOptions(tools=TOOLS, **options)):
        frames += output.feed([event])
    return output, [*frames, *output.end(is_incomplete=is_incomplete)]


def check_frames(frames: list[Frame], items: list[dict[str, Any]]) -> None:
    """Every item is added, grows by its deltas, and is done with what they join to; one after the other."""
    deltas: dict[int, str] = defaultdict(str)
    open_index: int | None = None
    for name, members in frames:
        index = members["output_index"]
        kind = name.removeprefix("response.")
        if kind == "output_item.added":
            assert open_index is None
            assert members["item"]["status"] == "in_progress"
            open_index = index
        assert index == open_index
        if "item_id" in members:
            assert members["item_id"] == items[index]["id"]
        if kind.endswith(".delta"):
            deltas[index] += members["delta"]
        if kind in ("output_text.done", "reasoning_text.done"):
            assert members["text"] == deltas[index]
        if kind == "function_call_arguments.done":
            assert members["arguments"] == deltas[index]
            assert isinstance(json.loads(deltas[index]), dict)
        if kind == "output_item.done":
            assert members["item"] == items[index]
            open_index = None
    assert open_index is None
    for index, item in enumerate(items):
        assert deltas[index] == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def test_thinking_answer_and_call_are_items_in_their_order() -> None:
    output, frames = run(f"why\n</think>\n\nI look.\n{PARIS}\n{call('now')} Done.", starts_inside=True)
    assert [item["type"] for item in output.items] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert [item["id"] for item in output.items] == ["rs_0", "msg_1", "fc_2", "fc_3", "msg_4"]
    assert all(item["status"] == "completed" for item in output.items)
    assert [item["arguments"] for item in output.items if "arguments" in item] == ['{"query": "Paris"}', "{}"]
    assert output.has_calls
    assert texts_of(output.items) == "I look.\nDone."
    check_frames(frames, output.items)


def test_the_order_of_events_is_the_documented_one() -> None:
    _, frames = run("why\n</think>\n\nHello", starts_inside=True)
    assert [name.removeprefix("response.") for name, _ in frames] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
    ]  # fmt: skip
    _, frames = run(call("now"))
    assert [name.removeprefix("response.") for name, _ in frames] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip


def test_d16_a_call_that_was_announced_and_failed_is_incomplete_and_its_text_follows() -> None:
    cut = PARIS[:-30]
    output, frames = run("I look.\n" + cut, is_incomplete=True)
    assert [(item["type"], item["status"]) for item in output.items] == [
        ("message", "completed"), ("function_call", "incomplete"), ("message", "incomplete"),
    ]  # fmt: skip
    assert not output.has_calls
    assert texts_of(output.items) == "I look.\n" + cut
    assert not any(name == "response.function_call_arguments.done" for name, _ in frames)
    check_frames(frames, output.items)


def test_a_call_that_failed_unannounced_is_text_alone() -> None:
    output, _ = run("I look.\n" + PARIS[:-30], keeps_failed=False)
    assert [item["type"] for item in output.items] == ["message", "message"]
    assert texts_of(output.items) == "I look.\n" + PARIS[:-30]


def test_an_answer_without_words_is_one_empty_message() -> None:
    output, frames = run("")
    assert [(item["type"], item["content"][0]["text"]) for item in output.items] == [("message", "")]
    check_frames(frames, output.items)


def test_d23_thinking_that_is_cut_off_is_all_there_is() -> None:
    output, frames = run("so so so", starts_inside=True, is_incomplete=True)
    assert [(item["type"], item["status"]) for item in output.items] == [("reasoning", "incomplete")]
    check_frames(frames, output.items)


@pytest.mark.parametrize("keeps_failed", [True, False])
def test_whatever_was_answered_the_deltas_join_to_the_items(fresh_seed: int, keeps_failed: bool) -> None:
    for drawn in model_outputs(fresh_seed, 300):
        output = OutputItems(keeps_failed=keeps_failed, id_of=ids())
        frames: list[Frame] = []
        for event in events_of([drawn.text[i : i + 3] for i in range(0, len(drawn.text), 3)], drawn.options):
            frames += output.feed([event])
        frames += output.end(is_incomplete=False)
        if keeps_failed:
            check_frames(frames, output.items)
        assert output.items, drawn
        assert all(item["status"] != "in_progress" for item in output.items)
        for item in output.items:
            if item["type"] == "function_call" and item["status"] == "completed":
                assert isinstance(json.loads(item["arguments"]), dict)


def test_log_probabilities_go_with_the_text_and_not_with_calls() -> None:
    output = OutputItems(keeps_failed=True, id_of=ids())
    frames: list[Frame] = []
    for event in events_of(["a", "b", call("now")], StreamOptions(tools=TOOLS)):
        frames += output.feed([event], [{"token": type(event).__name__}])
    frames += output.end(is_incomplete=False)
    text = output.items[0]["content"][0]
    deltas = [entry for name, members in frames if name.endswith("text.delta") for entry in members["logprobs"]]
    assert text["logprobs"] == deltas == [{"token": "ContentText"}, {"token": "ContentText"}]
