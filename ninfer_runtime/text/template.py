"""The artifact's own chat template, in a sandbox: conversation to prompt.

Jinja with ``trim_blocks``, ``lstrip_blocks``, loop controls, ``tojson``, ``raise_exception`` and ``strftime_now``.
Size and time are bounded, so a broken template ends in an error and not in a hung process.
"""

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ninfer_format.errors import ArtifactError, NinferError, RequestError
from ninfer_runtime.text.reasoning import THINK_CLOSE, THINK_OPEN
from ninfer_runtime.text.template_marks import Marks, free_block, mark_emitted
from ninfer_runtime.text.tokenizer import Segment

TEMPLATE_FILE = "chat_template.jinja"
TURN_OPEN = "<|im_start|>"
MAX_TEMPLATE_CHARS = 1 << 20
MAX_PROMPT_CHARS = 1 << 26
MAX_REPEATED_CHARS = 1 << 20
MAX_SECONDS = 10.0
EFFORT_LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_PROBE = ({"role": "user", "content": "?"},)


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a request may ask of the template; None leaves the choice to it."""

    thinking: bool | None = None
    preserve_thinking: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True

    def variables(self) -> dict[str, Any]:
        """Template variables of the options that are set."""
        chosen = {
            "enable_thinking": self.thinking,
            "preserve_thinking": self.preserve_thinking,
            "reasoning_effort": self.reasoning_effort,
        }
        set_ones = {name: value for name, value in chosen.items() if value is not None}
        return {**set_ones, "add_generation_prompt": self.add_generation_prompt}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the template reacts to. ``effort_levels`` in rising order; empty when it knows no effort."""

    thinking_switch: bool
    thinks_by_default: bool
    effort_levels: tuple[str, ...]
    default_effort: str | None


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """``text`` is what the template says; in ``segments`` its own special tokens are apart from all other text.

    ``starts_inside``: it ends within an open thinking block.
    """

    text: str
    segments: tuple[Segment, ...]
    starts_inside: bool


class _RefusalError(Exception):
    """The template called raise_exception."""


class _LimitError(Exception):
    """A limit of time or size was reached."""


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.until = threading.local()

    def tick(self) -> str:
        """Called on every loop pass and macro call."""
        if time.monotonic() > self.until.time:
            raise _LimitError(f"it ran for more than {MAX_SECONDS:g} s")
        return ""

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Products and powers, as long as they stay small."""
        size = max((len(side) for side in (left, right) if isinstance(side, str | list | tuple)), default=1)
        times = max((abs(side) for side in (left, right) if isinstance(side, int)), default=1)
        if size * times > MAX_REPEATED_CHARS or (operator == "**" and times > 64):
            raise _LimitError(f"{operator!r} makes something longer than {MAX_REPEATED_CHARS} characters or digits")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """One template. ``tokens``: texts of the vocabulary's added tokens; ``variables``: e.g. ``eos_token``; ``name``:
    what errors call it."""

    def __init__(
        self,
        source: str,
        tokens: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        name: str = TEMPLATE_FILE,
    ) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ArtifactError(f"{name} has {len(source)} characters, expected at most {MAX_TEMPLATE_CHARS}")
        self.name = name
        self._source = source
        self._tokens = frozenset(tokens)
        self._literals = tuple(dict.fromkeys((*tokens, THINK_OPEN, THINK_CLOSE)))
        self._variables = dict(variables or {})
        self._sandbox = _Sandbox()
        self._plain = self._compile(None)
        self._marks = Marks(self._literals)
        if (first := free_block(self._marks.size, source)) != self._marks.first:
            self._marks = Marks(self._literals, first)
        self._marked = self._compile(self._marks)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: TemplateOptions | None = None,
    ) -> RenderedPrompt:
        """The prompt of normalised messages (``messages.template_messages``).

        RequestError when the template refuses them, ArtifactError when it fails on them.
        """
        marks, marked_template = self._marks, self._marked
        first = free_block(marks.size, json.dumps([messages, tools], ensure_ascii=False) + self._source)
        if first != marks.first:
            marks = Marks(self._literals, first)
            marked_template = self._compile(marks)
        variables = {**(options or TemplateOptions()).variables(), "tools": list(tools) or None}
        variables["messages"] = _place_systems(messages, marks)
        plain = _restore_systems(self._run(self._plain, {**self._variables, **variables}), marks)
        marked_variables = {name: marks.mark(text) for name, text in self._variables.items()}
        try:
            marked = _restore_systems(self._run(marked_template, {**marked_variables, **variables}), marks)
        except NinferError:
            marked = ""
        if marks.unmark(marked) != plain:
            marked = self._render_broken_up(messages, variables, marks)
        segments = marks.split(marked)
        spelled_out = (Segment(part.text, part.control and part.text in self._tokens) for part in segments)
        return RenderedPrompt(marks.unmark(marked), tuple(spelled_out), _ends_inside(segments))

    @cached_property
    def capabilities(self) -> Capabilities:
        """Found by rendering a one-line conversation with each setting."""
        default = self.render(_PROBE)
        on = self.render(_PROBE, options=TemplateOptions(thinking=True))
        off = self.render(_PROBE, options=TemplateOptions(thinking=False))
        levels, default_level = self._efforts()
        return Capabilities(on.text != off.text, default.text == on.text and on.text != off.text, levels, default_level)

    def _efforts(self) -> tuple[tuple[str, ...], str | None]:
        def rendered(effort: str | None) -> str | None:
            try:
                return self.render(_PROBE, options=TemplateOptions(thinking=True, reasoning_effort=effort)).text
            except NinferError:
                return None

        if "reasoning_effort" not in self._source:
            return (), None
        # A level is known when it renders, and not just as any word would.
        nonsense, unset = rendered("no such level"), rendered(None)
        texts = {level: text for level in EFFORT_LEVELS if (text := rendered(level)) is not None and text != nonsense}
        return tuple(texts), next((level for level, text in texts.items() if text == unset), None)

    def _render_broken_up(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], marks: Marks
    ) -> str:
        """The marked prompt of a template whose logic depends on the literals it emits.

        Its literals cannot be told apart in parsed form, so those in everybody's text are broken up instead.
        """

        def broken(value: Any) -> Any:
            return _map_strings(value, lambda text: text.replace("<", "<" + marks.joint))

        parts = {"messages": _place_systems(broken(messages), marks), "tools": broken(variables["tools"])}
        rendered = _restore_systems(self._run(self._plain, {**self._variables, **variables, **parts}), marks)
        return marks.mark(rendered).replace(marks.joint, "")

    def _compile(self, marks: Marks | None) -> jinja2.Template:
        try:
            parsed = self._sandbox.parse(self._source)
            for node in parsed.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
                assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
                tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
                node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
            if marks is not None:
                mark_emitted(parsed, marks)
            return self._sandbox.from_string(parsed)
        except jinja2.TemplateSyntaxError as error:
            raise ArtifactError(f"{self.name} line {error.lineno}: {error.message}") from None
        except RecursionError:
            raise ArtifactError(f"{self.name} is nested too deeply") from None

    def _run(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        self._sandbox.until.time = time.monotonic() + MAX_SECONDS
        pieces: list[str] = []
        length = 0
        try:
            for piece in template.generate(variables):
                length += len(piece)
                if length > MAX_PROMPT_CHARS:
                    raise _LimitError(f"the prompt grew beyond {MAX_PROMPT_CHARS} characters")
                pieces.append(piece)
        except _RefusalError as refusal:
            raise RequestError(f"the chat template refuses the messages: {refusal}") from None
        except _LimitError as limit:
            raise ArtifactError(f"{self.name} was stopped: {limit}") from None
        except Exception as error:  # whatever an expression in a template can raise
            raise ArtifactError(f"{self.name} fails on these messages: {type(error).__name__}: {error}") from None
        return "".join(pieces)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise _RefusalError(message)


def _place_systems(messages: Sequence[Mapping[str, Any]], marks: Marks) -> list[Mapping[str, Any]]:
    """The messages with every system turn but a leading one in a form that templates accept anywhere."""
    return [
        _as_user(message, marks) if position and message["role"] == "system" else message
        for position, message in enumerate(messages)
    ]


def _as_user(message: Mapping[str, Any], marks: Marks) -> dict[str, Any]:
    """A later system turn in a form the template takes for a tool result, so no rule about user turns applies to it."""
    text = message["content"].strip()
    return {"role": "user", "content": f"<tool_response>{marks.system_begin}{text}{marks.system_end}</tool_response>"}


def _restore_systems(text: str, marks: Marks) -> str:
    """The system turns of ``_as_user`` under their own name, where the template wrote them as a turn of their own."""
    begin, end = marks.system_begin, marks.system_end
    if begin not in text:
        return text
    text = re.sub(rf"user(\n?)<tool_response>{begin}([^{end}]*){end}</tool_response>", r"system\1\2", text)
    return re.sub(rf"(<tool_response>)?{begin}|{end}(</tool_response>)?", "", text)


def _ends_inside(segments: Sequence[Segment]) -> bool:
    """Is the last thinking tag that the template wrote in the last turn an opening one?"""
    for segment in reversed(segments):
        if segment.control and segment.text in (THINK_OPEN, THINK_CLOSE, TURN_OPEN):
            return segment.text == THINK_OPEN
    return False


def _map_strings(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key) if isinstance(key, str) else key: _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value
