"""What a client puts together from a stream, per API, with the rules of its stream checked on the way."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

Event = dict[str, Any]
VOLATILE = frozenset({"id", "call_id", "item_id", "created", "created_at", "completed_at", "instance"})
"""Members that two answers to one question do not share."""


def plain(value: Any) -> Any:
    """A document without what is different in every answer."""
    if isinstance(value, dict):
        return {name: plain(member) for name, member in value.items() if name not in VOLATILE}
    return [plain(item) for item in value] if isinstance(value, list) else value


def is_object(text: str) -> bool:
    """Complete arguments are the text of one JSON object; those of a call that failed are not."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def chat(events: list[Event]) -> dict[str, Any]:
    """The one choice of a chat completion, as the whole answer has it; calls that failed left out."""
    texts: dict[str, str] = defaultdict(str)
    names: dict[int, str] = {}
    arguments: dict[int, str] = defaultdict(str)
    ends: list[dict[str, Any]] = []
    for event in events:
        for choice in event["choices"]:
            assert not ends, "nothing follows the finish reason"
            delta = choice["delta"]
            assert len(delta.keys() - {"role"}) <= 1, "one kind of news at a time"
            for member in ("content", "reasoning_content"):
                texts[member] += delta.get(member) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(names)
                    names[call["index"]] = call["function"]["name"]
                assert call["index"] == len(names) - 1
                arguments[call["index"]] += call["function"]["arguments"]
            if choice["finish_reason"] is not None:
                ends.append({name: choice[name] for name in ("finish_reason", "stop_reason")})
    (end,) = ends
    calls = [
        {"type": "function", "function": {"name": name, "arguments": arguments[index]}}
        for index, name in names.items()
        if is_object(arguments[index])
    ]
    message: dict[str, Any] = {"role": "assistant", "content": texts["content"], "refusal": None}
    if texts["reasoning_content"]:
        message["reasoning_content"] = texts["reasoning_content"]
    if calls:
        message |= {"content": texts["content"] or None, "tool_calls": calls}
    return {"index": 0, "message": message, "logprobs": None, **end}


def completion(events: list[Event]) -> dict[str, Any]:
    """The one choice of a text completion."""
    choices = [choice for event in events for choice in event["choices"]]
    return {**choices[-1], "text": "".join(choice["text"] for choice in choices)}


def response(events: list[Event]) -> dict[str, Any]:
    """The response of the last event, after its items have been put together from the others."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(json.loads(json.dumps(event["item"])))
        elif kind == "content_part.added":
            items[-1]["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            items[-1]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert items[-1]["arguments"] == event["arguments"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert items[-1]["content"][0]["text"] == event["text"]
        elif kind == "content_part.done":
            assert items[-1]["content"][event["content_index"]]["text"] == event["part"]["text"]
        else:
            assert kind == "output_item.done"
            items[-1]["status"] = event["item"]["status"]
            assert items[-1] == event["item"]
    final: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{final['status']}"
    assert final["output"] == items
    assert {event["response"]["id"] for event in (*events[:2], events[-1])} == {final["id"]}
    return final


def without_failed(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of a response without calls that were announced and came to nothing."""
    return [item for item in items if item["type"] != "function_call" or item["status"] == "completed"]


def message(events: list[Event]) -> dict[str, Any]:
    """The Anthropic message; uses that failed left out."""
    events = [event for event in events if event["type"] != "ping"]
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
    made: dict[str, Any] = json.loads(json.dumps(events[0]["message"]))
    inputs: dict[int, str] = defaultdict(str)
    is_open = False
    for event in events[1:-2]:
        blocks, kind = made["content"], event["type"].removeprefix("content_block_")
        assert is_open == (kind != "start")
        is_open = kind != "stop"
        if kind == "start":
            blocks.append(event["content_block"])
        assert event["index"] == len(blocks) - 1
        if kind == "delta":
            delta = event["delta"]
            member = delta["type"].removesuffix("_delta")
            if member == "input_json":
                inputs[event["index"]] += delta["partial_json"]
            else:
                blocks[-1][member] += delta[member]
    assert not is_open
    for index, text in inputs.items():
        assert text, "an announced use has input"
        made["content"][index]["input"] = json.loads(text) if is_object(text) else None
    made["content"] = [block for block in made["content"] if block.get("input", {}) is not None]
    return {**made, **events[-2]["delta"], "usage": events[-2]["usage"]}
