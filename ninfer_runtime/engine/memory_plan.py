"""From an ``EngineConfig`` to a memory plan, before anything is allocated."""

from ninfer_format.errors import UsageError
from ninfer_runtime.backends.base import Backend, MemoryPlan, ProgramLimits, ProgramOptions
from ninfer_runtime.config import EngineConfig
from ninfer_runtime.models.binder import BoundModel

MAX_LOGITS_ROWS = 256
"""Rows of logits per teacher-forced call: 254 MB of float32 at 248,320 rows."""


def program_options(config: EngineConfig) -> ProgramOptions:
    """The part of the config that a backend sees."""
    return ProgramOptions(
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        weight_budget=config.weight_budget,
        kv_rotation=config.kv_rotation,
        proposer=config.spec,
        draft_head=config.lm_head_draft,
        acceptance=config.acceptance,
    )


def program_limits(config: EngineConfig) -> ProgramLimits:
    """Limits of a program that serves this config; with ``kv_capacity`` "auto" those of the largest pool."""
    chunk = min(config.prefill_chunk, config.max_context)
    return ProgramLimits(
        max_rows=config.max_concurrency,
        max_columns=1 + config.draft_tokens,
        max_context=config.max_context,
        n_pages=config.n_pages,
        n_slots=config.max_concurrency,
        prefill_chunk=chunk,
        logits_rows=min(chunk, MAX_LOGITS_ROWS),
        device_snapshots=config.snapshots,
        host_snapshots=config.host_snapshots,
        max_drafts=config.draft_tokens,
    )


def plan_engine(backend: Backend, model: BoundModel, config: EngineConfig) -> MemoryPlan:
    """The plan of an engine, or UsageError when the device has too little free memory for it.

    The message says how much is missing, what takes most, and which flag helps.
    """
    limit = model.spec.max_position
    if limit is not None and config.max_context > limit:
        raise UsageError(f"max_context is {config.max_context}, the model was made for {limit}; lower --max-context")
    options = program_options(config)
    plan = backend.plan_memory(model, program_limits(config), options)
    free = backend.free_memory(options)
    if plan.device_bytes > free:
        parts = ", ".join(f"{label} {n_bytes / 2**20:.0f} MiB" for label, n_bytes in plan.rows() if n_bytes)
        raise UsageError(
            f"the plan needs {plan.device_bytes / 2**20:.0f} MiB on {options.device}, {free / 2**20:.0f} MiB are free "
            f"({parts}); lower --max-context, --kv-capacity or --prefill-chunk"
        )
    return plan
