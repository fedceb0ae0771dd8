"""One artifact opened for a command: its text side first, the engine when everything else has been checked."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from ninfer_format.errors import UsageError
from ninfer_format.model_config import ModelConfig, config_of
from ninfer_format.reader import Artifact
from ninfer_runtime.backends import NAMES, default_device
from ninfer_runtime.commands.options import EngineOptions
from ninfer_runtime.config import Architecture, EngineConfig
from ninfer_runtime.text.frontend import Frontend

if TYPE_CHECKING:
    from ninfer_runtime.engine.engine import Engine

DEFAULT_CONTEXT = 2048


class Session:
    """An open artifact and what the command asked for. Made by ``open_session``."""

    def __init__(self, artifact: Artifact, options: EngineOptions) -> None:
        self.artifact = artifact
        self.options = options
        self.engine_seconds = 0.0

    @cached_property
    def model_config(self) -> ModelConfig:
        """The artifact's own, or the built-in one of a published identity."""
        return config_of(self.artifact)

    @cached_property
    def frontend(self) -> Frontend:
        """Tokenizer, template and generation defaults, checked."""
        return Frontend.open(self.artifact)

    @property
    def architecture(self) -> Architecture:
        """Which of the two architectures it is."""
        return self.model_config.geometry.architecture

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the head, padding included."""
        return self.model_config.geometry.text.vocab_rows

    def engine_config(self, context: int | None = None) -> EngineConfig:
        """The config of the options; ``context`` stands in for a --max-context that was not given."""
        options = self.options
        limit = self.model_config.text_config.get("max_position_embeddings")
        wanted = options.max_context or context or DEFAULT_CONTEXT
        if options.max_context is None and context is None and isinstance(limit, int):
            wanted = min(wanted, limit)
        return EngineConfig(
            backend=options.backend,
            device=options.device or default_device(options.backend),
            dtype=options.dtype,
            kv_dtype=options.kv_dtype,
            max_context=wanted,
            prefill_chunk=options.prefill_chunk,
            kv_rotation=options.kv_rotation,
            nvfp4_activations=options.nvfp4_activations,
            prefill_activations=options.prefill_activations,
            kv_capacity=options.kv_capacity,
            max_concurrency=options.max_concurrency,
            spec=options.spec,
            draft_tokens=options.draft_tokens,
            lm_head_draft=options.lm_head_draft,
            acceptance=options.draft_acceptance,
            draft_backoff=options.draft_backoff,
            weight_residency=options.weight_residency,
            n_ffn_layers=options.n_ffn_layers,
            ffn_cpu=options.ffn_cpu,
            host_embedding=options.host_embedding,
            memory_limit=options.memory_limit,
            host_link_limit=options.host_link_limit,
        )

    @contextmanager
    def engine(self, config: EngineConfig) -> Iterator["Engine"]:
        """A started engine, closed at the end."""
        from ninfer_runtime.engine.engine import Engine

        started = time.perf_counter()
        with Engine(self.artifact, config) as engine:
            self.engine_seconds = time.perf_counter() - started
            yield engine


@contextmanager
def open_session(options: EngineOptions) -> Iterator[Session]:
    """Open the artifact; UsageError for a backend that does not exist, before anything is read."""
    if options.backend not in NAMES:
        raise UsageError(f"--backend is {options.backend!r}, expected one of {', '.join(NAMES)}")
    with Artifact.open(options.path) as artifact:
        yield Session(artifact, options)
