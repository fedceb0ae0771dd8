"""The engine: one artifact, one program, one sequence at a time, blocking."""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import numpy as np

from ninfer_format.errors import GenerationError, RequestError
from ninfer_format.reader import Artifact
from ninfer_runtime.backends import backend
from ninfer_runtime.backends.base import Float32s, Int32s, MemoryPlan, Program
from ninfer_runtime.cache.pages import PagePool, pages_for
from ninfer_runtime.config import EngineConfig
from ninfer_runtime.engine.generation import SLOT, Admitted, Generation
from ninfer_runtime.engine.memory_plan import plan_engine
from ninfer_runtime.engine.sequence import Request, check_tokens
from ninfer_runtime.engine.teacher import Score, hidden_chunks, score, teacher_forced_chunks
from ninfer_runtime.models.binder import BoundModel, bind


class Engine:
    """An open artifact, ready to generate. Use as a context manager, or ``close`` it.

    Everything that can be refused is refused in ``open``: the file, the hyperparameters, the memory plan.
    """

    def __init__(self, artifact: Artifact, config: EngineConfig) -> None:
        """Bind an open artifact and allocate; the engine does not close it."""
        self.config = config
        self.artifact = artifact
        self.model: BoundModel = bind(artifact)
        maker = backend(config.backend)
        self.plan: MemoryPlan = plan_engine(maker, self.model, config)
        self.program: Program = maker.create(self.model, self.plan)
        self._pages = PagePool(self.plan.limits.n_pages)
        self._generation: Generation | None = None
        self._owns_artifact = False

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

    def generate(self, request: Request) -> Generation:
        """Start a request; RequestError if it could never run, GenerationError while another one is running.

        The prompt is processed when the first event is taken.
        """
        if self._generation is not None:
            raise GenerationError("a generation is running; take all its events or close it first")
        spec, limit = self.model.spec, self.plan.limits.max_context
        prompt = request.check(spec.n_addressable, spec.text.vocab_rows, limit)
        n_new = min(request.max_new, limit - len(prompt))
        # The last emitted token enters no state, so it needs no place.
        pages = self._pages.allocate(pages_for(len(prompt) + n_new - 1))
        sampling = request.sampling
        if sampling.seed is None:
            sampling = sampling.merged(seed=secrets.randbits(64))
        admitted = Admitted(request, prompt, sampling, pages, n_new, n_new < request.max_new)

        def ended() -> None:
            self._pages.release(pages)
            self._generation = None

        self._generation = Generation(self.program, admitted, ended)
        return self._generation

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
        """Pages for one context, int32, while nothing else runs."""
        if self._generation is not None:
            raise GenerationError("a generation is running; take all its events or close it first")
        limits = self.plan.limits
        pages = self._pages.allocate(min(limits.pages_per_row, limits.n_pages))
        try:
            yield np.array(pages, np.int32)
        finally:
            self._pages.release(pages)

    def close(self) -> None:
        """Free the program, end a running generation, and close the artifact if this engine opened it."""
        if self._generation is not None:
            self._generation.close()
        self.program.close()
        if self._owns_artifact:
            self.artifact.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
