"""Everything between people and token ids that one artifact brings: tokenizer, chat template, generation defaults."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ninfer_format.command import require_extra
from ninfer_format.errors import ArtifactError, StorageError, UsageError
from ninfer_format.published import PUBLISHED
from ninfer_format.reader import Artifact
from ninfer_runtime.engine.sequence import Anchors
from ninfer_runtime.text.anchors import TURN_OPEN, prompt_anchors
from ninfer_runtime.text.generation_config import GENERATION_CONFIG, GenerationDefaults
from ninfer_runtime.text.messages import Conversation
from ninfer_runtime.text.reasoning import THINK_CLOSE, THINK_OPEN
from ninfer_runtime.text.stream import StreamOptions, TextStream
from ninfer_runtime.text.tokenizer import TOKENIZER_CONFIG, TOKENIZER_JSON, Tokenizer
from ninfer_runtime.text.tool_calls import new_call_id, tools_from

if TYPE_CHECKING:
    from ninfer_runtime.text.template import ChatTemplate

FOLDER = "frontend/"
TEMPLATE_FILE = "chat_template.jinja"
PREPROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json")
_TURN_MARKS = (THINK_OPEN, THINK_CLOSE, TURN_OPEN)
END_OF_TURN = ("<|im_end|>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation. ``starts_inside``: it ends within an open thinking block; ``thinking``: its mode;
    ``anchors``: where its state is worth keeping."""

    text: str
    token_ids: tuple[int, ...]
    starts_inside: bool
    thinking: bool
    anchors: Anchors = field(default_factory=Anchors)


class Frontend:
    """The text side of one artifact."""

    def __init__(
        self, tokenizer: Tokenizer, template: "ChatTemplate", generation: GenerationDefaults, eos: str | None
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.generation = generation
        markers = dict.fromkeys((*END_OF_TURN, *([eos] if eos else [])))
        self.end_markers = tuple(marker for marker in markers if not tokenizer.is_single_token(marker))

    @classmethod
    def open(cls, artifact: Artifact, chat_template: Path | None = None) -> "Frontend":
        """Read and check the artifact's frontend resources.

        chat_template   a file whose template stands in for the artifact's own

        ArtifactError when a resource is absent, broken, or not what a published identity must have, and when the file's
        template does not parse; StorageError when the file cannot be read.
        """
        require_extra("jinja2", "cpu")
        from ninfer_runtime.text.template import ChatTemplate

        tokenizer_config = _resource(artifact, TOKENIZER_CONFIG)
        tokenizer = Tokenizer.from_files(_resource(artifact, TOKENIZER_JSON), tokenizer_config)
        source = _text(_resource(artifact, TEMPLATE_FILE))
        names = special_names(tokenizer_config)
        if chat_template is None:
            template = ChatTemplate(source, tuple(tokenizer.added), names)
        else:
            own = _text(_file(chat_template), chat_template.name)
            template = ChatTemplate(own, tuple(tokenizer.added), names, name=chat_template.name)
        generation = GenerationDefaults.from_file(_resource(artifact, GENERATION_CONFIG), tokenizer.n_addressable)
        if artifact.identity in PUBLISHED:
            from ninfer_runtime.text.frontend_checks import check_preprocessor, check_published

            check_published(tokenizer, tokenizer_config, source)
            for name in PREPROCESSOR_FILES:
                check_preprocessor(_resource(artifact, name), name)
        return cls(tokenizer, template, generation, names.get("eos_token"))

    def prompt(
        self,
        conversation: Conversation,
        *,
        thinking: bool = True,
        reasoning_effort: str | None = None,
        preserve_thinking: bool | None = None,
    ) -> Prompt:
        """Render and encode a conversation up to the assistant's turn.

        UsageError for a switch the template does not have, RequestError when it refuses the messages.
        """
        from ninfer_runtime.text.template import TemplateOptions

        capabilities = self.template.capabilities
        if not thinking and not capabilities.thinking_switch:
            raise UsageError("the chat template of this artifact cannot switch thinking off; leave out --no-thinking")
        if reasoning_effort is not None:
            levels = capabilities.effort_levels
            if not thinking:
                raise UsageError("a reasoning effort needs thinking; leave out --no-thinking or --reasoning-effort")
            if reasoning_effort not in levels:
                known = f"one of {', '.join(levels)}" if levels else "none: the chat template of this artifact has none"
                raise UsageError(f"the reasoning effort is {reasoning_effort!r}, expected {known}")
        switch = thinking if capabilities.thinking_switch else None
        options = TemplateOptions(switch, preserve_thinking, reasoning_effort)
        messages = [message.for_template() for message in conversation.messages]
        rendered = self.template.render(messages, conversation.tools, options)
        token_ids = tuple(self.tokenizer.encode_segments(rendered.segments))
        thinks = thinking and (capabilities.thinking_switch or rendered.starts_inside)
        turn_open = self.tokenizer.added.get(TURN_OPEN)
        opened = None if turn_open is None else turn_open.token_id
        anchors = prompt_anchors(rendered.segments, token_ids, opened, options)
        return Prompt(rendered.text, token_ids, rendered.starts_inside, thinks, anchors)

    def ends_inside(self, token_ids: Sequence[int]) -> bool:
        """Does a prompt given as ids end within an open thinking block of its last turn?"""
        added = self.tokenizer.added
        marks = {added[text].token_id: text == THINK_OPEN for text in _TURN_MARKS if text in added}
        return next((marks[token_id] for token_id in reversed(token_ids) if token_id in marks), False)

    def stream(self, options: StreamOptions, call_id: Callable[[], str] = new_call_id) -> TextStream:
        """The chain that reads one answer."""
        hidden = self.generation.stop_ids
        return TextStream(self.tokenizer, options, hidden_ids=hidden, end_markers=self.end_markers, call_id=call_id)

    def stream_options(
        self,
        prompt: Prompt,
        conversation: Conversation,
        *,
        stops: Sequence[str] = (),
        reasoning_stops: Sequence[str] = (),
        raw: bool = False,
    ) -> StreamOptions:
        """How to read the answer to a prompt."""
        return StreamOptions(
            starts_inside=prompt.starts_inside,
            tools=tools_from(conversation.tools),
            stops=tuple(stops),
            reasoning_stops=tuple(reasoning_stops),
            raw=raw,
        )


def special_names(tokenizer_config: bytes) -> dict[str, str]:
    """The template variables ``bos_token``, ``eos_token`` … that tokenizer_config.json sets."""
    from ninfer_runtime.text.json_input import parse_json

    config = parse_json(tokenizer_config, TOKENIZER_CONFIG)
    names: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) and value:
            names[key] = value
    return names


def _resource(artifact: Artifact, name: str) -> bytes:
    if FOLDER + name not in artifact.objects.names():
        raise ArtifactError(f"{artifact.path}: no resource {FOLDER + name!r}; convert the checkpoint again with {name}")
    return bytes(artifact.payload(FOLDER + name))


def _file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path}: the chat template cannot be read: {error.strerror}") from None


def _text(document: bytes, name: str = TEMPLATE_FILE) -> str:
    try:
        return document.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{name} is not UTF-8: byte {error.start} cannot be decoded") from None
