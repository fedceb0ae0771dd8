"""Which special tokens of a rendered prompt did the template write, and which are somebody's text?

Every special-token literal that the template *emits* is replaced, in its parsed form, by one private character. After
rendering, those characters are control tokens and every other spelling of a token is ordinary text. Literals the
template only compares with (``content.startswith('<tool_response>')``) stay, so its logic sees what it always saw.
"""

import re
from collections.abc import Sequence

from jinja2 import nodes

from ninfer_format.errors import RequestError
from ninfer_runtime.text.tokenizer import Segment

PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
FIRST_MARK = 0x100000
LAST_MARK = 0x10FFFD

_EMITTING_FILTERS = frozenset({"default", "d", "join"})
_COMPARING_FUNCTIONS = frozenset({"raise_exception", "strftime_now", "range"})


class Marks:
    """One private character per literal (at least one), two that frame a system turn, and one to break text up."""

    def __init__(self, literals: Sequence[str], first: int = FIRST_MARK) -> None:
        self.first = first
        self.size = len(literals) + 3
        self.system_begin, self.system_end, self.joint = (chr(first + i) for i in range(3))
        self._mark_of = {literal: chr(first + 3 + i) for i, literal in enumerate(literals)}
        self._literal_of = {mark: literal for literal, mark in self._mark_of.items()}
        longest_first = sorted(literals, key=len, reverse=True)
        self._literals = re.compile("|".join(map(re.escape, longest_first)))
        self._marks = re.compile(f"[{chr(first + 3)}-{chr(first + self.size - 1)}]")

    def mark(self, text: str) -> str:
        """``text`` with every literal as its private character."""
        return self._literals.sub(lambda match: self._mark_of[match.group()], text)

    def unmark(self, text: str) -> str:
        """The inverse of ``mark``."""
        return self._marks.sub(lambda match: self._literal_of[match.group()], text)

    def split(self, text: str) -> list[Segment]:
        """Marked text as segments: each mark a control segment, what lies between them ordinary text."""
        segments: list[Segment] = []
        position = 0
        for match in self._marks.finditer(text):
            if match.start() > position:
                segments.append(Segment(text[position : match.start()]))
            segments.append(Segment(self._literal_of[match.group()], control=True))
            position = match.end()
        if position < len(text):
            segments.append(Segment(text[position:]))
        return segments


def free_block(size: int, texts: str) -> int:
    """The first code point of ``size`` private characters of which ``texts`` has none."""
    first = FIRST_MARK
    for code in sorted({ord(letter) for letter in PRIVATE.findall(texts)}):
        if first <= code < first + size:
            first = code + 1
    if first + size > LAST_MARK + 1:
        raise RequestError("the messages use too many private-use characters (plane 16); remove them")
    return first


def mark_emitted(template: nodes.Template, marks: Marks) -> None:
    """Mark the literals that the parsed template emits, in place."""
    _visit(template, marks, emitted=True)


def _visit(node: nodes.Node, marks: Marks, *, emitted: bool) -> None:
    compared: list[nodes.Node] = []
    match node:
        case nodes.TemplateData():
            node.data = marks.mark(node.data)
        case nodes.Const():
            if emitted and isinstance(node.value, str):
                node.value = marks.mark(node.value)
        case nodes.If() | nodes.CondExpr():
            compared = [node.test]
        case nodes.For():
            compared = [node.test] if node.test is not None else []
        case nodes.Compare() | nodes.Test() | nodes.Not():
            compared = list(node.iter_child_nodes())
        case nodes.Getitem():
            compared = [node.arg]
        case nodes.Pair():
            compared = [node.key]
        case nodes.Filter() if node.name not in _EMITTING_FILTERS:
            compared = [child for child in node.iter_child_nodes() if child is not node.node]
        case nodes.Call() if _is_comparing(node.node):
            compared = [child for child in node.iter_child_nodes() if child is not node.node]
    for child in node.iter_child_nodes():
        _visit(child, marks, emitted=emitted and not any(child is other for other in compared))


def _is_comparing(function: nodes.Expr) -> bool:
    """Methods and a few functions look at their arguments; macros emit them."""
    if isinstance(function, nodes.Name):
        return function.name in _COMPARING_FUNCTIONS
    return isinstance(function, nodes.Getattr)
