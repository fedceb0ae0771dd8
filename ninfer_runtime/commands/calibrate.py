"""``ninfer-run calibrate``: statistics of what the decoder's matrices multiply, for the converter."""

import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ninfer_format.activation_stats import ActivationStats, SiteStats, dump_activation_stats
from ninfer_format.errors import UsageError
from ninfer_format.writer import write_atomically
from ninfer_runtime.commands import parsing
from ninfer_runtime.commands.options import EngineOptions
from ninfer_runtime.commands.report import say, say_rows, start_rows
from ninfer_runtime.commands.session import Session, open_session
from ninfer_runtime.text.messages import parse_message_file

if TYPE_CHECKING:
    from torch import Tensor

    from ninfer_runtime.engine.engine import Engine


@runtime_checkable
class Observable(Protocol):
    """A program that shows the inputs of its matrices."""

    def observing(self, observer: "Callable[[str, Tensor], None]") -> AbstractContextManager[None]:
        """Call ``observer(matrix, x)`` with the rows of every matrix product in the block."""
        ...


@dataclass(frozen=True, slots=True)
class CalibrationSources:
    """Files to feed, ``-`` for standard input; of their tokens at most ``max_tokens``, in this order.

    ``texts`` are encoded as ordinary text, ``messages`` rendered with the artifact's template.
    """

    texts: Sequence[str]
    messages: Sequence[str] = ()
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Text:
    source: str
    sha256: str
    token_ids: Sequence[int]


def calibrate(engine_options: EngineOptions, sources: CalibrationSources, out: Path, *, channels: bool) -> int:
    """Feed the texts and write the statistics to ``out``; the exit code.

    Every text is read in windows of the context, each from an empty state. ``channels`` also keeps mean squares.
    """
    if out.is_dir() or not out.parent.is_dir():
        raise UsageError(f"{out}: cannot be written; expected a file name in a folder that exists")
    with open_session(engine_options) as session:
        texts = _read(session, sources)
        config = session.engine_config()
        with session.engine(config) as engine:
            say_rows(start_rows(session, config, engine))
            sites = _statistics(engine, texts, channels=channels)
        counts = tuple((text.sha256, len(text.token_ids)) for text in texts)
        n_tokens = sum(count for _, count in counts)
        identity = str(session.artifact.identity)
    stats = ActivationStats(identity, config.dtype, n_tokens, config.max_context, counts, sites)
    write_atomically(out, dump_activation_stats(stats))
    sys.stdout.write(f"{out}: {len(sites)} sites from {n_tokens:,} tokens of {len(texts)} texts\n")
    return 0


def _read(session: Session, sources: CalibrationSources) -> list[_Text]:
    """The texts that the token limit leaves something of. UsageError for an empty one, or none at all."""
    if not sources.texts and not sources.messages:
        raise UsageError("nothing to feed; give --text FILE or --messages FILE, each as often as you like")
    encode, left = session.frontend.tokenizer.encode_text, sources.max_tokens or sys.maxsize
    found: list[_Text] = []
    for source in (*sources.texts, *sources.messages):
        content = parsing.read_bytes(source)
        if len(found) < len(sources.texts):
            token_ids: Sequence[int] = encode(parsing.as_text(content, source))
        else:
            token_ids = session.frontend.prompt(parse_message_file(content, source)).token_ids
        if not token_ids:
            raise UsageError(f"{source}: the text is empty")
        found.append(_Text(source, hashlib.sha256(content).hexdigest(), token_ids[:left]))
        left -= len(found[-1].token_ids)
    return [text for text in found if text.token_ids]


def _statistics(engine: "Engine", texts: Sequence[_Text], *, channels: bool) -> Mapping[str, SiteStats]:
    """Run every window of every text; what its matrices multiplied."""
    import torch

    from ninfer_runtime.backends.reference.input_statistics import InputStatistics

    program = engine.program
    if not isinstance(program, Observable):
        raise UsageError(f"backend {program.name!r} does not show its inputs; use --backend reference")
    window, head = engine.config.max_context, engine.model.output_head.name
    statistics = InputStatistics((entry.name for entry in engine.artifact.objects), channels=channels)
    with program.observing(statistics):
        for text in texts:
            started, n_tokens = time.perf_counter(), len(text.token_ids)
            for begin in range(0, n_tokens, window):
                for hidden in engine.hidden_chunks(text.token_ids[begin : begin + window]):
                    # The head is not evaluated: its inputs are known without its product.
                    statistics(head, torch.from_numpy(hidden))
            say(f"{text.source}: {n_tokens:,} tokens, {n_tokens / (time.perf_counter() - started):.1f} tokens/s")
    return statistics.results()
