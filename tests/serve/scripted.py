"""An engine that says what it was told: written token ids through the readers and listeners of real requests."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ninfer_format import Artifact
from ninfer_runtime.engine.engine import Engine
from ninfer_runtime.engine.handle import Handle, Listener
from ninfer_runtime.engine.sequence import Finish, FinishReason, Forced, Request, Reuse, TokenEvent
from ninfer_runtime.engine.stats import EngineStats
from tests.serve.live import CONFIG, LiveServer, service_of, serving

BURST = 4
"""Most tokens of one step."""
ERROR_SECONDS = 0.3
"""Between the last token and an error: what was said has been sent by then."""


class ScriptedEngine:
    """Stands in for ``Engine``: every request is answered with ``script``, in steps of 1 to ``BURST`` tokens."""

    def __init__(self, real: Engine, seed: int = 0) -> None:
        self.script: Sequence[int] = ()
        self.first: deque[Sequence[int]] = deque()
        """Scripts of the next requests, in front of ``script``."""
        self.reuse = Reuse()
        self.error: BaseException | None = None
        """Ends every request after its script, in place of a stop token."""
        self._real = real
        self._draw = random.Random(seed)

    def submit(self, request: Request, listener: Listener | None = None) -> Handle:
        """Answer in a thread of its own, as the worker would."""
        handle = Handle(request, len(request.token_ids), self, listener)
        script = self.first.popleft() if self.first else self.script
        sizes = [self._draw.randint(1, BURST) for _ in range(len(script) + 1)]
        threading.Thread(target=self._answer, args=(handle, list(script), sizes), daemon=True).start()
        return handle

    def stats(self) -> EngineStats:
        """Of an engine that has nothing to do."""
        return self._real.stats()

    def close(self) -> None:
        """Nothing to end."""

    def advance(self, handle: Handle) -> None:
        """Handles with listeners are not iterated."""
        raise NotImplementedError

    def withdraw(self, handle: Handle) -> None:
        """The answering thread sees that the handle was asked to end."""

    def _answer(self, handle: Handle, script: list[int], sizes: list[int]) -> None:
        request = handle.request
        n_said, reason = 0, FinishReason.OUTPUT_LIMIT
        stop_id = min(request.stop_ids)
        waiting = script if self.error else [*script, stop_id]
        is_over = False
        for size in sizes:
            events: list[TokenEvent] = []
            while waiting and len(events) < size and not is_over:
                token_id = waiting.pop(0)
                index = handle.n_prompt + n_said
                n_said += 1
                if token_id in request.stop_ids:
                    events.append(TokenEvent(token_id, index, is_stop=True))
                    reason, is_over = FinishReason.STOP_TOKEN, True
                    break
                events.append(TokenEvent(token_id, index, logprob=-0.5 if request.n_top_logprobs is not None else None))
                verdict = request.reader.feed(token_id) if request.reader is not None else None
                if isinstance(verdict, Forced):
                    waiting = [*verdict.token_ids, *waiting]
                elif verdict is not None:
                    reason, is_over = verdict, True
                elif n_said == request.max_new:
                    is_over = True
            if events:
                handle.deliver(tuple(events))
            if handle.asked_to_end is not None:
                reason = handle.asked_to_end
                break
        if self.error is not None:
            time.sleep(ERROR_SECONDS)
            handle.end(None, self.error)
            return
        handle.end(Finish(reason, handle.n_prompt, n_said, n_said, 0, 0.0, 0.0, reuse=self.reuse))


@contextmanager
def scripted(path: Path, seed: int = 0) -> Iterator[tuple[LiveServer, ScriptedEngine]]:
    """A running server over a scripted engine; the artifact gives tokenizer and template."""
    with Artifact.open(path) as artifact, Engine(artifact, CONFIG) as real:
        engine = ScriptedEngine(real, seed)
        with serving(service_of(artifact, real, standing_in=engine)) as server:
            yield server, engine
