"""Output items of a response as they grow, and the stream events that say so."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ninfer_runtime.serve.responses_items import PREFIX, Item, new_id
from ninfer_runtime.text.events import (
    ContentText,
    Event,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallFailed,
    ToolCallStart,
)

Frame = tuple[str, dict[str, Any]]
"""A stream event: its type, and its members beside ``type`` and ``sequence_number``."""
Logprobs = list[dict[str, Any]]


class OutputItems:
    """Items from events. ``feed`` and ``end`` return what a stream says of them; ``items`` are complete after ``end``.

    keeps_failed   a call that turned out not to be one stays as an ``incomplete`` item, because it has been announced;
                   otherwise it is left out. Its text follows in a message either way.
    """

    def __init__(self, *, keeps_failed: bool, id_of: Callable[[str], str] = new_id) -> None:
        self.items: list[Item] = []
        self._keeps_failed = keeps_failed
        self._id_of = id_of
        self._open: Item | None = None
        self._texts: list[str] = []
        self._logprobs: Logprobs = []  # of tokens whose text has not been sent
        self._of_call: Logprobs = []  # of the tags that opened the call

    @property
    def has_calls(self) -> bool:
        """A complete call is among the items."""
        return any(item["type"] == "function_call" and item["status"] == "completed" for item in self.items)

    def feed(self, events: Iterable[Event], logprobs: Logprobs | None = None) -> list[Frame]:
        """More of the answer; ``logprobs`` are of its tokens outside of thinking, None where nobody asked."""
        frames: list[Frame] = []
        if logprobs:
            self._logprobs += logprobs
        for event in events:
            match event:
                case ReasoningText(text):
                    self._ensure("reasoning", frames)
                    self._texts.append(text)
                    frames.append(("response.reasoning_text.delta", self._at(content_index=0, delta=text)))
                case ContentText(text):
                    self._ensure("message", frames)
                    self._texts.append(text)
                    frames.append(
                        ("response.output_text.delta", self._at(content_index=0, delta=text, **self._taken()))
                    )
                case ToolCallStart(_, call_id, name):
                    self._of_call, self._logprobs = self._logprobs, []
                    self._close(frames)
                    self._begin({"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}, frames)
                case ToolCallArguments(_, fragment):
                    self._texts.append(fragment)
                    frames.append(("response.function_call_arguments.delta", self._at(delta=fragment)))
                case ToolCallEnd():
                    self._logprobs = []
                    self._close(frames)
                case ToolCallFailed():
                    self._logprobs = self._of_call + self._logprobs
                    self._fail(frames)
        return frames

    def end(self, *, is_incomplete: bool) -> list[Frame]:
        """The end of the answer; one that was cut off leaves its last item incomplete."""
        frames: list[Frame] = []
        if not is_incomplete and not any(item["type"] != "reasoning" for item in self.items):
            self._ensure("message", frames)
        self._close(frames, "incomplete" if is_incomplete else "completed")
        return frames

    # ---- one item ----------------------------------------------------------------------------
    def _ensure(self, kind: str, frames: list[Frame]) -> None:
        """An item of this kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return
        self._close(frames)
        if kind == "message":
            self._begin({"type": "message", "role": "assistant", "content": []}, frames)
        else:
            self._begin({"type": "reasoning", "summary": [], "content": []}, frames)
        frames.append(("response.content_part.added", self._at(content_index=0, part=_part(kind, "", []))))

    def _begin(self, members: dict[str, Any], frames: list[Frame]) -> None:
        kind = members["type"]
        item = {"id": self._id_of(PREFIX[kind]), "type": kind, "status": "in_progress", **members}
        self.items.append(item)
        self._open, self._texts = item, []
        if kind == "message":
            item["content"] = [_part(kind, "", [])]
        frames.append(("response.output_item.added", {"output_index": self._index, "item": _as_added(item)}))

    def _close(self, frames: list[Frame], status: str = "completed") -> None:
        """The open item, if one is, is done."""
        item, text = self._open, "".join(self._texts)
        if item is None:
            return
        kind = item["type"]
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            if status == "completed":
                done = self._at(arguments=text, name=item["name"])
                frames.append(("response.function_call_arguments.done", done))
        else:
            part = item["content"][0] if kind == "message" else _part(kind, "", [])
            part["text"] = text
            if kind == "message":
                part["logprobs"] += self._logprobs
                self._logprobs = []
            item["content"] = [part]
            extra = {"logprobs": part["logprobs"]} if kind == "message" else {}
            name = "output_text" if kind == "message" else "reasoning_text"
            frames.append((f"response.{name}.done", self._at(content_index=0, text=text, **extra)))
            frames.append(("response.content_part.done", self._at(content_index=0, part=part)))
        frames.append(("response.output_item.done", {"output_index": self._index, "item": dict(item)}))
        self._open = None

    def _fail(self, frames: list[Frame]) -> None:
        if self._keeps_failed:
            self._close(frames, "incomplete")
        else:
            self.items.pop()
            self._open = None

    def _taken(self) -> dict[str, Logprobs]:
        """Log probabilities that go with a delta of the open message."""
        assert self._open is not None
        taken, self._logprobs = self._logprobs, []
        self._open["content"][0]["logprobs"] += taken
        return {"logprobs": taken}

    def _at(self, **members: Any) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": self._index, **members}

    @property
    def _index(self) -> int:
        return len(self.items) - 1


def _part(kind: str, text: str, logprobs: Logprobs) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"type": "reasoning_text", "text": text}


def _as_added(item: Item) -> Item:
    """An item as it is announced: its parts follow."""
    return {**item, "content": []} if "content" in item else dict(item)


def texts_of(items: Sequence[Item]) -> str:
    """The answer's text, all messages together."""
    return "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
