"""What the server is and does: models, health, properties, numbers, metrics."""

import dataclasses
import datetime
import time
from typing import TYPE_CHECKING, Any

from ninfer_runtime.config import PAGE_TOKENS, SamplingParams
from ninfer_runtime.serve.errors import model_not_found

if TYPE_CHECKING:
    from ninfer_runtime.serve.service import Service

SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
FEATURES = (
    "chat", "completions", "responses", "messages", "streaming", "tools", "json_schema", "logprobs", "n", "seed",
    "thinking_budget",
)  # fmt: skip


def model_document(service: "Service") -> dict[str, Any]:
    """One entry of ``GET /v1/models``: the OpenAI members, and what clients of this and other servers look for."""
    facts = service.facts
    capabilities = service.frontend.template.capabilities
    features = [*FEATURES, *(["thinking"] if capabilities.thinking_switch or capabilities.thinks_by_default else [])]
    features += ["prefix_cache"] if facts.prefix_reuse else []
    features += ["speculation"] if facts.proposer != "none" else []
    return {
        "id": facts.model_id,
        "object": "model",
        "created": facts.created,
        "owned_by": "ninfer",
        "context_length": facts.max_context,
        "max_model_len": facts.max_context,
        "max_output_tokens": facts.max_output,
        "quantization": facts.weights_id,
        "architecture": facts.architecture,
        "features": features,
        "input_modalities": ["text"],
        "output_modalities": ["text"],
        "default_sampling": _sampling(service),
        # The Anthropic client's names.
        "type": "model",
        "display_name": facts.model_id,
        "created_at": datetime.datetime.fromtimestamp(facts.created, datetime.UTC).isoformat(),
        "max_input_tokens": facts.max_context,
        "max_tokens": facts.max_output,
        # As llama.cpp's server has it.
        "meta": {"n_ctx_train": facts.max_context, "n_ctx": facts.max_context, "n_vocab": facts.n_addressable},
    }


def models_document(service: "Service") -> dict[str, Any]:
    """``GET /v1/models``."""
    name = service.facts.model_id
    paging = {"first_id": name, "last_id": name, "has_more": False}
    return {"object": "list", "data": [model_document(service)], **paging}


def one_model(service: "Service", name: str) -> dict[str, Any]:
    """``GET /v1/models/{id}``; ApiError 404 for another name."""
    if name != service.facts.model_id:
        raise model_not_found(name, service.facts.model_id)
    return model_document(service)


def health_document(service: "Service") -> tuple[int, dict[str, Any]]:
    """``GET /health``: 200 while the engine can run, also while it drains; 503 after a fault."""
    if service.life.is_healthy:
        return 200, {"status": "ok"}
    return 503, {"status": "failed", "fault": service.life.fault}


def ready_document(service: "Service") -> tuple[int, dict[str, Any]]:
    """``GET /ready``: 200 while new requests are taken."""
    if service.life.is_ready:
        return 200, {"status": "ready"}
    return 503, {"status": service.life.state}


def props_document(service: "Service") -> dict[str, Any]:
    """``GET /props``: what does not change until the process ends."""
    from importlib.metadata import version

    facts, settings = service.facts, service.settings
    capabilities = service.frontend.template.capabilities
    return {
        "version": version("ninfer"),
        "instance": service.instance,
        "model": {
            "id": facts.model_id,
            "model_id": facts.artifact_model_id,
            "weights_id": facts.weights_id,
            "architecture": facts.architecture,
            "n_vocab": facts.n_addressable,
        },
        "backend": facts.backend,
        "device": facts.device,
        "dtype": facts.dtype,
        "limits": {
            "max_context": facts.max_context,
            "max_output_tokens": facts.max_output,
            "default_max_tokens": min(settings.default_max_tokens, facts.max_output),
            "max_rows": facts.max_rows,
            "max_pending": facts.max_pending,
            "max_request_bytes": settings.max_request_bytes,
        },
        "thinking": {
            "has_switch": capabilities.thinking_switch,
            "is_default": settings.thinking if capabilities.thinking_switch else capabilities.thinks_by_default,
            "effort_levels": list(capabilities.effort_levels),
            "default_effort": capabilities.default_effort,
            "has_budget": True,
        },
        "sampling": _sampling(service),
        "speculation": {"proposer": facts.proposer, "draft_tokens": facts.draft_tokens},
        "prefix_reuse": facts.prefix_reuse,
        "vision": False,
        "kv": {"dtype": facts.kv_dtype, "page_tokens": PAGE_TOKENS},
        "memory_plan": {
            "device_bytes": facts.device_bytes,
            "rows": [{"label": label, "bytes": n, "place": place} for label, n, place in facts.memory_rows],
        },
        # As llama.cpp's server has it.
        "default_generation_settings": {"n_ctx": facts.max_context},
        "total_slots": facts.max_rows,
    }


def stats_document(service: "Service") -> dict[str, Any]:
    """``GET /stats``: the engine's numbers as of now."""
    stats = service.engine.stats()
    numbers = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    numbers["requests_finished"] = dict(stats.requests_finished)
    numbers["is_healthy"] = stats.is_healthy
    return {
        "instance": service.instance,
        "uptime_seconds": round(time.perf_counter() - service.started_at, 3),
        "state": service.life.state,
        "clients_left": service.metrics.n_left,
        **numbers,
    }


def _sampling(service: "Service") -> dict[str, dict[str, Any]]:
    """Defaults by the mode of the prompt."""

    def values(params: SamplingParams) -> dict[str, Any]:
        return {name: getattr(params, name) for name in SAMPLING_NAMES}

    sampling = service.facts.sampling
    return {"thinking": values(sampling[True]), "plain": values(sampling[False])}
