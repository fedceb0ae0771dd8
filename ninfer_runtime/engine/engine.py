"""The engine: one artifact, one program, several sequences at a time, with or without a thread of its own."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import numpy as np

from ninfer_format.errors import GenerationError, OverloadedError, RequestError
from ninfer_format.reader import Artifact
from ninfer_runtime.backends import backend
from ninfer_runtime.backends.base import Float32s, Int32s, MemoryPlan, Program
from ninfer_runtime.config import EngineConfig
from ninfer_runtime.engine.core import EngineCore
from ninfer_runtime.engine.handle import Handle, Listener, stopped
from ninfer_runtime.engine.memory_plan import plan_engine
from ninfer_runtime.engine.sequence import Request, check_tokens
from ninfer_runtime.engine.stats import EngineStats
from ninfer_runtime.engine.teacher import Score, hidden_chunks, score, teacher_forced_chunks
from ninfer_runtime.engine.worker import Worker
from ninfer_runtime.models.binder import BoundModel, bind

SLOT = 0
"""The slot of texts that are only looked at, while nothing runs."""
POLL_SECONDS = 1.0


class Engine:
    """An open artifact, ready to generate. Use as a context manager, or ``close`` it.

    Everything that can be refused is refused in ``open``: the file, the hyperparameters, the memory plan. Requests run
    together, up to ``max_concurrency``. ``generate`` works in the caller's thread while it takes events; ``submit``
    starts a worker thread, which then drives every request.
    """

    def __init__(self, artifact: Artifact, config: EngineConfig) -> None:
        """Bind an open artifact and allocate; the engine does not close it."""
        model = bind(artifact)
        maker = backend(config.backend)
        plan = plan_engine(maker, model, config)
        self._start(maker.create(model, plan), config)
        self.artifact = artifact

    @classmethod
    def open(cls, path: str | os.PathLike[str], config: EngineConfig | None = None) -> "Engine":
        """Open ``path`` and start. Raises the ArtifactError tree, UnsupportedError, UsageError, MissingExtraError."""
        artifact = Artifact.open(path)
        try:
            engine = cls(artifact, config or EngineConfig())
        except BaseException:
            artifact.close()
            raise
        engine._owns_artifact = True
        return engine

    @classmethod
    def of_program(cls, program: Program, config: EngineConfig) -> "Engine":
        """An engine on a program that exists already, which it closes at its end."""
        engine = cls.__new__(cls)
        engine._start(program, config)
        engine.artifact = program.model.artifact
        return engine

    def _start(self, program: Program, config: EngineConfig) -> None:
        self.config = config
        self.program = program
        self.model: BoundModel = program.model
        self.plan: MemoryPlan = program.plan
        self.core = EngineCore(program, config)
        self._worker: Worker | None = None
        self._lock = threading.Lock()
        self._n_submitted = 0
        self._is_draining = False
        self._is_closed = False
        self._owns_artifact = False

    # ---- requests ----------------------------------------------------------------------------
    def generate(self, request: Request) -> Handle:
        """Start a request; RequestError if it could never run. Any number may be open at once.

        The prompt is processed when the first event is taken, unless another request's events are taken before.
        """
        handle = self._checked(request, None)
        if self._worker is None:
            self.core.add(handle)
        else:
            self._worker.post(lambda: self.core.add(handle))
        return handle

    def submit(self, request: Request, listener: Listener | None = None) -> Handle:
        """Start a request in the engine's worker, from any thread.

        Raises RequestError if it could never run, OverloadedError while ``max_concurrency + max_pending`` requests are
        alive, EngineStoppedError after a fault or the beginning of the end. ``pending_seconds`` limits the wait for a
        place (QueueTimeoutError on the handle).
        """
        handle = self._checked(request, listener)
        patience = self.config.pending_seconds
        deadline = None if patience is None else time.perf_counter() + patience
        limit = self.config.max_concurrency + self.config.max_pending
        with self._lock:
            if self._n_submitted + self.core.n_alive >= limit:
                raise OverloadedError(f"{limit} requests run or wait, and no more may; try again later")
            self._n_submitted += 1
            if self._worker is None:
                self._worker = Worker(self.core)
                self._worker.start()

        def add() -> None:
            with self._lock:
                self._n_submitted -= 1
                if self.core.fault is None:
                    self.core.add(handle, deadline=deadline)
                    return
            handle.end(None, stopped(self.core.fault))

        self._worker.post(add)
        return handle

    def _checked(self, request: Request, listener: Listener | None) -> Handle:
        if self.core.fault is not None or self._is_draining:
            raise stopped(self.core.fault or "it is closing")
        spec, limit = self.model.spec, self.plan.limits.max_context
        prompt = request.check(spec.n_addressable, spec.text.vocab_rows, limit)
        return Handle(request, len(prompt), self, listener)

    def advance(self, handle: Handle, *others: Handle) -> None:
        """For handles: return once there is news of one of them; of the first, when a worker drives them."""
        worker = self._worker
        if worker is None:
            handles = (handle, *others)
            while not any(handle.has_news for handle in handles):
                has_worked = self.core.step()
                if not has_worked and self.core.is_idle:
                    for handle in handles:
                        handle.end(None, stopped(self.core.fault or "it lost the request"))
            return
        while not handle.has_news:
            if not worker.is_alive:
                handle.end(None, stopped(self.core.fault or "its worker has ended"))
            handle.wait(POLL_SECONDS)

    def withdraw(self, handle: Handle) -> None:
        """For handles: end the request and return when it holds nothing any more."""
        if handle.done or self.core.fault is not None:
            return
        worker = self._worker
        if worker is None:
            self.core.withdraw(handle)
            return
        worker.post(lambda: self.core.withdraw(handle))
        while worker.is_alive:
            with handle.changed:
                if handle.changed.wait_for(lambda: handle.done, POLL_SECONDS):
                    return

    def stats(self) -> EngineStats:
        """Numbers as of now, from any thread."""
        return self.core.stats()

    # ---- texts that are there already --------------------------------------------------------
    def teacher_forced_logits(self, token_ids: Sequence[int]) -> Float32s:
        """float32 [T, head rows]: row t is what the model says after token t. RequestError for a bad prompt."""
        return np.concatenate(list(self.teacher_forced_chunks(token_ids)))

    def teacher_forced_chunks(self, token_ids: Sequence[int]) -> Iterator[Float32s]:
        """The rows of ``teacher_forced_logits`` in order, a chunk at a time, for prompts whose logits fill memory."""
        prompt = self._known_tokens(token_ids, self.plan.limits.max_context)
        with self._whole_pool() as pages:
            yield from teacher_forced_chunks(self.program, SLOT, prompt, pages)

    def hidden_chunks(self, token_ids: Sequence[int]) -> Iterator[Float32s]:
        """Final-normed hidden rows in order, float32 [n, hidden] a prefill chunk at a time; no head is evaluated."""
        prompt = self._known_tokens(token_ids, self.plan.limits.max_context)
        with self._whole_pool() as pages:
            yield from hidden_chunks(self.program, SLOT, prompt, pages)

    def score(self, token_ids: Sequence[int], *, overlap: int | None = None) -> Score:
        """Perplexity of a text of any length; see ``teacher.score``. RequestError for fewer than two tokens."""
        prompt = self._known_tokens(token_ids, None)
        with self._whole_pool() as pages:
            return score(self.program, SLOT, prompt, pages, overlap=overlap)

    def _known_tokens(self, token_ids: Sequence[int], limit: int | None) -> Int32s:
        spec = self.model.spec
        ids = check_tokens(token_ids, spec.text.vocab_rows)
        if limit is not None and len(ids) > limit:
            raise RequestError(f"{len(ids)} tokens were given, the context holds {limit}; raise --max-context")
        if int(ids.max()) >= spec.n_addressable and limit is None:
            raise RequestError(f"token id {int(ids.max())} cannot be scored, expected 0 to {spec.n_addressable - 1}")
        return ids

    @contextmanager
    def _whole_pool(self) -> Iterator[Int32s]:
        """Pages for one context, int32, while nothing else runs; what was kept for reuse makes room."""
        if self._worker is not None or not self.core.is_idle:
            raise GenerationError("requests are running; take all their events or close them first")
        limits, pool = self.plan.limits, self.core.pages
        wanted = min(limits.pages_per_row, limits.n_pages)
        if pool.n_free < wanted:
            self.core.cache.clear()
        pages = pool.allocate(wanted)
        try:
            yield np.array(pages, np.int32)
        finally:
            pool.release(pages)

    # ---- the end -----------------------------------------------------------------------------
    def drain(self, seconds: float | None = None) -> bool:
        """Take no more requests and wait for those that run; False when the time was not enough."""
        self._is_draining = True
        end = None if seconds is None else time.perf_counter() + seconds
        while self._worker is not None and self._worker.is_alive and (self._n_submitted or not self.core.is_idle):
            if end is not None and time.perf_counter() >= end:
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        """End what runs, free the program, and close the artifact if this engine opened it. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = self._is_draining = True
        if self._worker is not None:
            self._worker.stop()
        self.core.close()
        self.program.close()
        if self._owns_artifact:
            self.artifact.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
