"""Outputs a model might write: well-formed, damaged, in many scripts, with tags where none belong."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ninfer_runtime.text.stream import StreamOptions
from ninfer_runtime.text.tool_calls import Tool

TOOLS = (
    Tool("now", {}),
    Tool(
        "search",
        {
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "exact": {"type": "boolean"},
                "since": {"type": ["string", "null"]},
            }
        },
    ),
    Tool("write_file", {"properties": {"path": {"type": "string"}, "text": {"type": "string"}}}),
    Tool(
        "plot", {"properties": {"points": {"type": "array"}, "style": {"type": "object"}, "scale": {"type": "number"}}}
    ),
)
TAGS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=search>", "<function=other>", "</function>",
    "<parameter=query>", "<parameter=limit>", "<parameter=text>", "</parameter>", "<|im_end|>",
)  # fmt: skip
STOPS = ((), (), ("STOP",), ("\n\n\n", "b,c"), ("STOP", "ST", "TOPaz"), ("</parameter>",))

WORDS = ("alpha", "beta", "it", "is", "so", "STOP", "ST", "b,c", "null", "True", "<", "</", "a<b", "`<tool_call>`")
SCRIPTS = (
    "größe",
    "naïve",
    "日本語",
    "한국어",
    "العربية",
    "हिन्दी",
    "🙂",
    "👩‍👧",
    "e\u0301",
    "𝔘",
    "\u200b",
    "ﬃ",
    "\ufeff",
)
SPACES = (" ", " ", " ", "\n", "\n\n", "\t", "  ", " \n ")
VALUES: Mapping[str, tuple[str, ...]] = {
    "query": ("Paris", "null", "7", '"quoted"', "back\\slash", "a </parameter> b", "日本語 🙂", "", "\n", "  x  "),
    "limit": ("7", "007", "3.0", "many", "None"),
    "exact": ("True", "false", "1", "perhaps"),
    "since": ("null", "2026-01-15", "nul", "None", ""),
    "path": ("a/b.py", "größe.txt"),
    "text": (
        "    def f():\n\treturn 1\n\n",
        "<tool_call>",
        "</function>",
        "<function=now>",
        "x\n</parameter>\ny",
        "🙂\n",
    ),
    "points": ("[1, 2]", "[(1, 2)]", "[1,", '["ü"]'),
    "style": ("{}", '{"a": {"b": null}}', "{'a': True}"),
    "scale": (".5", "1e3", "-0", "NaN"),
}


@dataclass(frozen=True, slots=True)
class Output:
    """One output with how it is to be read."""

    kind: str
    text: str
    options: StreamOptions


def prose(draw: random.Random, words: Sequence[str] = WORDS, most: int = 8) -> str:
    """Words with some white space between them."""
    return "".join(draw.choice(words) + draw.choice(SPACES) for _ in range(draw.randint(0, most)))


def call(draw: random.Random) -> str:
    """A call of an offered function, well-formed."""
    tool = draw.choice(TOOLS)
    gap = draw.choice(("\n", "\n", "", " ", "\n\n"))
    keys = draw.sample(sorted(tool.declared), draw.randint(0, len(tool.declared)))
    frame = draw.choice(("\n", "\n", ""))
    body = "".join(f"<parameter={key}>{frame}{draw.choice(VALUES[key])}{frame}</parameter>{gap}" for key in keys)
    return f"<tool_call>{gap}<function={tool.name}>{gap}{body}</function>{gap}</tool_call>"


def well_formed(draw: random.Random) -> str:
    """Thinking, then an answer with calls in it."""
    thinking = f"{prose(draw)}\n</think>\n\n" if draw.random() < 0.7 else ""
    return thinking + "".join(
        draw.choice((prose, call))(draw) + draw.choice(("", "\n")) for _ in range(draw.randint(1, 4))
    )


def malformed(draw: random.Random) -> str:
    """A well-formed one with pieces cut out, doubled, or put elsewhere."""
    text = well_formed(draw) + call(draw)
    for _ in range(draw.randint(1, 3)):
        tags = [match.start() for match in re.finditer("<", text)]
        begin = draw.choice(tags) if tags and draw.random() < 0.7 else draw.randint(0, len(text))
        end = min(len(text), begin + draw.choice((1, 3, 12, 40)))
        piece, at = text[begin:end], draw.randint(0, len(text))
        kept = text[:begin] + text[end:]
        text = draw.choice((kept, text[:end] + piece + text[end:], kept[:at] + piece + kept[at:], text[:end]))
    return text


def unicode(draw: random.Random) -> str:
    """Many scripts, joiners and marks, in thinking, answer and arguments."""
    words = (*SCRIPTS, *SCRIPTS, *WORDS)
    value = prose(draw, words)
    made = f"<tool_call>\n<function=write_file>\n<parameter=text>\n{value}\n</parameter>\n</function>\n</tool_call>"
    return f"{prose(draw, words)}</think>{prose(draw, words)}{made if draw.random() < 0.5 else ''}{prose(draw, words)}"


def nested(draw: random.Random) -> str:
    """Tags wherever they can stand: in thinking, in prose, in values, in each other, torn and repeated."""
    pieces: tuple[Callable[[], str], ...] = (
        lambda: draw.choice(TAGS),
        lambda: draw.choice(TAGS),
        lambda: draw.choice(TAGS)[: draw.randint(1, 9)],
        lambda: prose(draw, most=2),
        lambda: call(draw),
        lambda: f"<think>{call(draw)}</think>",
        lambda: f"<tool_call>{call(draw)}</tool_call>",
    )
    return "".join(draw.choice(pieces)() for _ in range(draw.randint(2, 9)))


KINDS: Mapping[str, Callable[[random.Random], str]] = {
    "well-formed": well_formed,
    "malformed": malformed,
    "unicode": unicode,
    "nested": nested,
}


def model_outputs(seed: int, n: int) -> Iterator[Output]:
    """``n`` outputs, the kinds in turn."""
    draw = random.Random(seed)
    for i in range(n):
        kind = list(KINDS)[i % len(KINDS)]
        text = KINDS[kind](draw)
        options = StreamOptions(
            starts_inside=("</think>" in text) != (draw.random() < 0.2),
            tools=TOOLS if draw.random() < 0.85 else (),
            stops=draw.choice(STOPS),
            reasoning_stops=draw.choice(((), (), (), ("STOP",))),
            include_stop=draw.random() < 0.2,
            raw=draw.random() < 0.05,
            tolerant_tool_calls=draw.random() < 0.2,
        )
        yield Output(kind, text, options)
