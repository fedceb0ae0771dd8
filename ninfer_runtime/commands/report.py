"""What a command says on stderr besides the answer: aligned ``phase | detail | value`` lines."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ninfer_runtime.backends.kv_numeric import QUANTIZED
from ninfer_runtime.commands.answer import Answer
from ninfer_runtime.commands.session import Session
from ninfer_runtime.config import EngineConfig, SamplingParams
from ninfer_runtime.engine.sequence import Drafting, MissReason, Reuse

if TYPE_CHECKING:
    from ninfer_runtime.engine.engine import Engine

Row = tuple[str, str, str]


def say(line: str) -> None:
    """One line on stderr."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def say_rows(rows: Iterable[Row]) -> None:
    """Aligned rows on stderr."""
    listed = list(rows)
    phase, detail = (max(len(row[i]) for row in listed) for i in (0, 1))
    for row in listed:
        say(f"{row[0]:<{phase}} | {row[1]:<{detail}} | {row[2]}")


def sampling_text(sampling: SamplingParams, seed: int) -> str:
    """The parameters in force; the seed only where it is used."""
    penalties = f"presence={sampling.presence_penalty:g} frequency={sampling.frequency_penalty:g}"
    if sampling.is_greedy:
        return "greedy (temperature 0)" + (f" {penalties}" if sampling.has_penalties else "")
    return (
        f"temperature={sampling.temperature:g} top_p={sampling.top_p:g} top_k={sampling.top_k} "
        f"min_p={sampling.min_p:g} {penalties} seed={seed}"
    )


def sampling_json(sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """The same for documents."""
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
    return {**{name: getattr(sampling, name) for name in names}, "seed": None if sampling.is_greedy else seed}


def start_rows(session: Session, config: EngineConfig, engine: "Engine") -> list[Row]:
    """What was started, known before the first token."""
    recipe = session.model_config.recipe.name
    rows = [
        ("model", "file", f"{session.artifact.path} ({session.artifact.file_bytes:,} bytes)"),
        ("model", "identity", f"{session.artifact.identity} ({session.architecture}, recipe {recipe})"),
        ("engine", "backend", f"{config.backend} on {config.device}, {config.dtype}"),
        ("engine", "context", f"{config.max_context} tokens, prefill chunk {engine.plan.limits.prefill_chunk}"),
    ]
    rows += format_rows(config)
    rows += [("engine", label, f"{n_bytes / 2**20:,.1f} MiB") for label, n_bytes in engine.plan.rows() if n_bytes]
    rows += [("engine", label, text) for label, text in engine.program.notes]
    return [*rows, ("engine", "start", f"{session.engine_seconds:.2f} s")]


def answer_rows(answer: Answer, sampling: SamplingParams, prepare_seconds: float) -> list[Row]:
    """The summary of one answer."""
    finish = answer.finish
    seconds = finish.prefill_seconds + finish.decode_seconds
    overall = finish.n_generated / seconds if seconds > 0 else 0.0
    thinking = f" ({answer.n_reasoning_tokens} of thinking)" if answer.n_reasoning_tokens else ""
    return [
        ("answer", "sampling", sampling_text(sampling, finish.seed)),
        ("answer", "finish", answer.reason.value),
        ("tokens", "prompt", str(finish.n_prompt)),
        *reuse_rows(finish.reuse),
        ("tokens", "generated", f"{finish.n_generated}{thinking}"),
        *draft_rows(finish.drafting),
        ("time", "prepare", f"{prepare_seconds:.3f} s"),
        ("time", "prefill", f"{finish.prefill_seconds:.3f} s"),
        ("time", "decode", f"{finish.decode_seconds:.3f} s"),
        ("speed", "prefill", f"{finish.prefill_rate:.1f} tokens/s"),
        ("speed", "decode", f"{finish.decode_rate:.1f} tokens/s"),
        ("speed", "overall", f"{overall:.1f} tokens/s"),
    ]


def reuse_rows(reuse: Reuse) -> list[Row]:
    """How much of the prompt was not computed, and why not more; nothing for an engine that keeps nothing."""
    if reuse.reason is MissReason.OFF:
        return []
    where = "" if reuse.first_difference is None else f" at token {reuse.first_difference}"
    why = "" if reuse.reason is MissReason.NONE else f" ({reuse.reason.value}{where})"
    return [("tokens", "reused", f"{reuse.n_tokens}{why}")]


def format_rows(config: EngineConfig) -> list[Row]:
    """How keys and values are stored, and what drafts, where it is not the plain thing."""
    rows: list[Row] = []
    if config.kv_dtype in QUANTIZED:
        rows.append(("engine", "keys and values", config.kv_dtype + (", rotated" if config.kv_rotation else "")))
    if config.spec != "none":
        head = ", small head" if config.lm_head_draft else ""
        rule = f", accepted by {config.acceptance}" if config.acceptance != "equal" else ""
        rows.append(("engine", "drafts", f"{config.draft_tokens} by {config.spec}{head}{rule}"))
    return rows


def draft_rows(drafting: Drafting) -> list[Row]:
    """How many drafts were evaluated and accepted; nothing where none were."""
    if not drafting.n_drafted:
        return []
    share = drafting.n_accepted / drafting.n_drafted
    at = ", ".join(map(str, drafting.accepted_at))
    return [
        ("tokens", "drafts", f"{drafting.n_accepted} of {drafting.n_drafted} accepted ({share:.0%}), by position {at}")
    ]


def answer_json(answer: Answer, session: Session, sampling: SamplingParams, prepare_seconds: float) -> dict[str, Any]:
    """The document of ``generate --json``, schema ninfer.generate/1."""
    reply, finish = answer.reply, answer.finish
    return {
        "schema": "ninfer.generate/1",
        "model": str(session.artifact.identity),
        "content": reply.content,
        "reasoning": reply.reasoning,
        "tool_calls": [
            {"id": call.call_id, "name": call.name, "arguments": call.arguments} for call in reply.tool_calls
        ],
        "finish_reason": answer.reason.value,
        "stop": reply.stop.stop if reply.stop is not None else None,
        "prompt_tokens": finish.n_prompt,
        "generated_tokens": finish.n_generated,
        "reasoning_tokens": answer.n_reasoning_tokens,
        "token_ids": list(answer.token_ids),
        "sampling": sampling_json(sampling, finish.seed),
        "seconds": {
            "start": session.engine_seconds,
            "prepare": prepare_seconds,
            "prefill": finish.prefill_seconds,
            "decode": finish.decode_seconds,
        },
    }
