"""The tiny model behind the real engine, text chain and HTTP server, made to say what ``answers.py`` says.

    python -m tests.serve.page.scripted FILE --port N [--token-seconds F] [--key KEY]

Every request gets a grammar that allows one continuation only, so that prefill, drafts, acceptance, pages, streams and
their cancelling are real, and what is read on the page makes sense.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ninfer_format import Artifact
from ninfer_runtime.backends.base import Uint32s
from ninfer_runtime.config import EngineConfig
from ninfer_runtime.engine.engine import Engine
from ninfer_runtime.engine.sequence import Request
from ninfer_runtime.engine.stats import EngineStats
from ninfer_runtime.serve.server import bind, run
from ninfer_runtime.serve.settings import ServeSettings
from ninfer_runtime.text.frontend import Frontend
from tests.serve.live import service_of
from tests.serve.page.answers import answer_to

if TYPE_CHECKING:
    from ninfer_runtime.engine.handle import Handle, Listener

CONFIG = EngineConfig(
    max_context=2048,
    max_concurrency=4,
    prefix_reuse=True,
    snapshots=4,
    host_snapshots=4,
    max_pending=4,
    spec="mtp",
    draft_tokens=2,
)


class Script:
    """``engine.sequence.Grammar`` that allows ``token_ids`` and nothing else, each at most every ``token_seconds``."""

    def __init__(self, token_ids: Sequence[int], token_seconds: float) -> None:
        self._token_ids = token_ids
        self._token_seconds = token_seconds
        self._at = 0

    def masks(self, drafts: Sequence[int], out: Uint32s) -> int:
        """The one id of each place, up to the first draft that differs."""
        rows = 0
        for ahead in range(len(out)):
            token_id = self._token_ids[min(self._at + ahead, len(self._token_ids) - 1)]
            out[ahead] = 0
            out[ahead, token_id // 32] = np.uint32(1 << token_id % 32)
            rows += 1
            if ahead == len(drafts) or drafts[ahead] != token_id:
                break
        return rows

    def advance(self, token_id: int) -> None:
        """Wait a moment: a real model takes its time as well."""
        time.sleep(self._token_seconds)
        self._at += 1


class ScriptedEngine:
    """``serve.service.EngineLike``: an engine whose requests follow the script."""

    def __init__(self, engine: Engine, frontend: Frontend, token_seconds: float) -> None:
        self._engine = engine
        self._tokenizer = frontend.tokenizer
        self._token_seconds = token_seconds

    def submit(self, request: Request, listener: Listener | None = None) -> Handle:
        """Start a request with its script."""
        answer = answer_to(self._tokenizer.decode(request.token_ids))
        token_ids = self._tokenizer.encode_segments(self._tokenizer.split(answer))
        return self._engine.submit(replace(request, grammar=Script(token_ids, self._token_seconds)), listener)

    def stats(self) -> EngineStats:
        """The engine's."""
        return self._engine.stats()

    def close(self) -> None:
        """The engine is closed by who opened it."""


def serve(path: Path, port: int, token_seconds: float, keys: tuple[str, ...]) -> int:
    """Serve until a signal; the exit code."""
    settings = ServeSettings(port=port, api_keys=keys, model_id="tiny-dense", drain_seconds=1.0)
    bound = bind(settings)
    with Artifact.open(path) as artifact, Engine(artifact, CONFIG) as engine:
        scripted = ScriptedEngine(engine, Frontend.open(artifact), token_seconds)
        return run(service_of(artifact, engine, settings, scripted), bound)


def main() -> None:
    """Read the arguments and serve."""
    parser = argparse.ArgumentParser(description="A server that says what a script says.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-seconds", type=float, default=0.004)
    parser.add_argument("--key", default=None)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    keys = (arguments.key,) if arguments.key else ()
    sys.exit(serve(arguments.file, arguments.port, arguments.token_seconds, keys))


if __name__ == "__main__":
    main()
