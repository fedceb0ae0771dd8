"""A live server on the real engine and a program that says what the test wrote (``scripts/scripted_program.py``)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ninfer_format import Artifact
from ninfer_runtime.config import EngineConfig
from ninfer_runtime.engine.engine import Engine
from ninfer_runtime.models.binder import bind
from ninfer_runtime.serve.settings import ServeSettings
from ninfer_runtime.text.frontend import Frontend
from scripts.scripted_program import ScriptedProgram
from tests.serve.live import LiveServer, service_of, serving

CONFIG = EngineConfig(max_context=4096, prefill_chunk=128, max_concurrency=2, prefix_reuse=True, snapshots=2)


class PausedProgram(ScriptedProgram):
    """Waits in every chunk or round while ``gate`` is closed, so that a test knows where a request is."""

    def prepare(self) -> None:
        """Before the first use."""
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        """Released once per chunk or round that begins."""

    def _work(self, seconds: float) -> None:
        self.entered.release()
        assert self.gate.wait(60), "the test has closed the gate and forgotten it"
        super()._work(seconds)


@contextmanager
def programmed(
    path: Path, text: str = "again ", config: EngineConfig = CONFIG, settings: ServeSettings | None = None
) -> Iterator[tuple[LiveServer, PausedProgram]]:
    """A server whose answers are ``text`` again and again, wherever a prompt ends in it."""
    with Artifact.open(path) as artifact:
        tokenizer = Frontend.open(artifact).tokenizer
        script = tokenizer.encode_segments(tokenizer.split(text))
        program = PausedProgram.for_config(bind(artifact), config, script)
        program.prepare()
        with Engine.of_program(program, config) as engine, serving(service_of(artifact, engine, settings)) as server:
            try:
                yield server, program
            finally:
                program.gate.set()
