"""``ninfer-run serve``: one model behind the HTTP APIs."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ninfer_format.command import require_extra
from ninfer_format.errors import RequestError, UsageError
from ninfer_runtime.commands.options import SERVED_CONTEXT, EngineOptions, SamplingOptions
from ninfer_runtime.commands.report import say_rows, start_rows
from ninfer_runtime.commands.sampling_defaults import resolve_sampling
from ninfer_runtime.commands.session import Session, open_session
from ninfer_runtime.config import EngineConfig, SamplingParams
from ninfer_runtime.engine.sequence import Request
from ninfer_runtime.serve.auth import check_bind, is_loopback
from ninfer_runtime.serve.request_log import check_path
from ninfer_runtime.serve.settings import Facts, ServeSettings
from ninfer_runtime.text.frontend import Frontend
from ninfer_runtime.text.grammar import Choice, grammar_for

if TYPE_CHECKING:
    from ninfer_runtime.engine.engine import Engine
    from ninfer_runtime.serve.service import Service

LOG = logging.getLogger("ninfer.serve")
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class ServeEngineOptions:
    """What the engine of a server has beside ``EngineOptions``."""

    prefix_reuse: bool = True
    snapshots: int = 4
    host_snapshots: int = 12
    max_pending: int = 16
    pending_seconds: float | None = 30.0

    def of(self, config: EngineConfig) -> EngineConfig:
        """``config`` with these."""
        return replace(
            config,
            prefix_reuse=self.prefix_reuse,
            snapshots=self.snapshots if self.prefix_reuse else 0,
            host_snapshots=self.host_snapshots if self.prefix_reuse else 0,
            max_pending=self.max_pending,
            pending_seconds=self.pending_seconds,
        )


def serve(
    engine_options: EngineOptions,
    serve_engine: ServeEngineOptions,
    sampling_options: SamplingOptions,
    settings: ServeSettings,
) -> int:
    """Serve until told to stop; the exit code. What can be refused is refused before the model is loaded."""
    check_bind(settings)
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        require_extra(module, "serve")
    if settings.request_log is not None:
        check_path(settings.request_log, engine_options.path)
    if settings.ready_file is not None and not settings.ready_file.parent.is_dir():
        raise UsageError(f"--ready-file {settings.ready_file}: the folder {settings.ready_file.parent} does not exist")
    from ninfer_runtime.serve.server import bind, run, set_up_logging
    from ninfer_runtime.serve.service import Service

    set_up_logging(settings.log_level)
    if not settings.api_keys and not is_loopback(settings.host):
        LOG.warning("--insecure: whoever reaches %s may use this server", settings.host)
    with open_session(engine_options) as session:
        frontend = Frontend.open(session.artifact, settings.chat_template)
        if not settings.thinking and not frontend.template.capabilities.thinking_switch:
            raise UsageError("the chat template of this artifact cannot switch thinking off; leave out --no-thinking")
        bound = bind(settings)
        try:
            config = serve_engine.of(session.engine_config(served_context(session)))
            with session.engine(config) as engine:
                say_rows(start_rows(session, config, engine))
                warm_up(engine, frontend)
                service = Service(engine, frontend, settings, facts_of(session, engine, settings, sampling_options))
                service.log.server_started(start_event(service))
                if settings.media.roots or settings.media.allowed_networks:
                    LOG.warning("the model does not see yet: requests with media are refused, --media-* change nothing")
                return run(service, bound)
        finally:
            bound.close()


def served_context(session: Session) -> int:
    """The context without ``--max-context``: less if the model was made for less."""
    limit = session.model_config.text_config.get("max_position_embeddings")
    return min(SERVED_CONTEXT, limit) if isinstance(limit, int) else SERVED_CONTEXT


def warm_up(engine: "Engine", frontend: Frontend) -> None:
    """A short answer that nobody sees: what is found out or loaded on first use is so now."""
    _ = frontend.template.capabilities
    with suppress(RequestError):  # a vocabulary in which no form can be prescribed
        grammar_for(Choice(("a",)), frontend.tokenizer, frontend.generation.stop_ids, starts_inside=True)
    request = Request((0, 0), SamplingParams.greedy(), WARM_UP_TOKENS, reuse=False)
    for _ in engine.generate(request):
        pass


def facts_of(session: Session, engine: "Engine", settings: ServeSettings, sampling_options: SamplingOptions) -> Facts:
    """What is true of the model until the process ends."""
    artifact, config, plan = session.artifact, engine.config, engine.plan
    sampling = {mode: resolve_sampling(session, sampling_options, thinking=mode) for mode in (True, False)}
    identity = artifact.identity
    return Facts(
        model_id=settings.model_id or identity.model_id,
        artifact_model_id=identity.model_id,
        weights_id=identity.weights_id,
        architecture=session.architecture,
        created=int(artifact.path.stat().st_mtime),
        max_context=plan.limits.max_context,
        max_rows=plan.limits.max_rows,
        max_pending=config.max_pending,
        n_addressable=engine.model.spec.n_addressable,
        vocab_rows=session.vocab_rows,
        sampling=sampling,
        is_greedy_forced=sampling_options.greedy,
        backend=config.backend,
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        proposer=config.spec,
        draft_tokens=config.draft_tokens,
        prefix_reuse=config.prefix_reuse,
        device_bytes=plan.device_bytes,
        memory_rows=tuple((label, n, "host" if label.startswith("host") else "device") for label, n in plan.rows()),
    )


def start_event(service: "Service") -> Mapping[str, Any]:
    """What the request log says first: never a key."""
    facts, settings = service.facts, service.settings
    return {
        "model": facts.model_id,
        "artifact": f"{facts.artifact_model_id}/{facts.weights_id}",
        "architecture": facts.architecture,
        "backend": facts.backend,
        "device": facts.device,
        "max_context": facts.max_context,
        "max_rows": facts.max_rows,
        "max_pending": facts.max_pending,
        "proposer": facts.proposer,
        "draft_tokens": facts.draft_tokens,
        "prefix_reuse": facts.prefix_reuse,
        "device_bytes": facts.device_bytes,
        "host": settings.host,
        "has_keys": bool(settings.api_keys),
        "log_content": settings.log_content,
    }
