"""The request log: one JSON document a line. Never a key, and never text of prompts or answers unless asked for."""

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ninfer_format.errors import StorageError, UsageError
from ninfer_runtime.engine.stats import EngineStats
from ninfer_runtime.serve.errors import Problem
from ninfer_runtime.serve.settings import ServeSettings
from ninfer_runtime.text.stream import join

if TYPE_CHECKING:
    from ninfer_runtime.serve.answering import Answers

LOG = logging.getLogger("ninfer.serve")
SCHEMA = "ninfer.request-log/1"


def check_path(path: Path, artifact: Path) -> None:
    """UsageError for a log that would be written into the artifact or beside no folder."""
    if path.exists() and artifact.exists() and path.samefile(artifact):
        raise UsageError(f"--request-log {path} is the artifact itself")
    if not path.parent.is_dir():
        raise UsageError(f"--request-log {path}: the folder {path.parent} does not exist")


class RequestLog:
    """Writes events to the file of the settings, if any, and short lines to the console."""

    def __init__(self, settings: ServeSettings, instance: str) -> None:
        self._settings = settings
        self._instance = instance
        self._file: TextIO | None = None
        self._stats_at = time.monotonic()
        self._before: EngineStats | None = None
        if settings.request_log is not None:
            try:
                descriptor = os.open(settings.request_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                self._file = os.fdopen(descriptor, "w", encoding="utf-8", buffering=1)
            except OSError as error:
                raise StorageError(f"--request-log {settings.request_log}: {error.strerror}") from None

    def server_started(self, facts: Mapping[str, Any]) -> None:
        """What runs, and how."""
        self._write("server_start", facts)

    def started(self, answers: "Answers") -> None:
        """A request is with the engine."""
        if self._file is None:
            return
        prepared, question = answers.prepared, answers.prepared.question
        conversation, sampling = question.conversation, prepared.sampling
        event: dict[str, Any] = {
            "request_id": answers.request_id,
            "protocol": question.api,
            "stream": question.stream,
            "n": question.n,
            "messages": len(conversation.messages) if conversation else None,
            "tools": len(conversation.tools) if conversation else 0,
            "tool_choice": question.tool_choice.mode,
            "structured": type(question.grammar).__name__ if question.grammar is not None else None,
            "thinking": prepared.prompts[0].thinking,
            "reasoning_effort": question.reasoning_effort,
            "thinking_budget": question.thinking_budget,
            "prompt_tokens": prepared.n_prompt,
            "max_new": prepared.max_new,
            "sampling": {
                name: getattr(sampling, name)
                for name in (
                    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed",
                )
            },
            **question.log_fields,
        }  # fmt: skip
        if self._settings.log_content:
            event["prompts"] = [prompt.text or list(prompt.token_ids) for prompt in prepared.prompts]
        self._write("request_start", event)

    def ended(self, answers: "Answers") -> None:
        """All answers of a request have ended."""
        prepared, now = answers.prepared, time.perf_counter()
        results = [_result(answers, i, self._settings.log_content) for i in range(len(answers.choices))]
        firsts = [choice.first_token_at for choice in answers.choices if choice.first_token_at is not None]
        ttft = min(firsts) - answers.started_at if firsts else None
        self._write(
            "request_done",
            {
                "request_id": answers.request_id,
                "protocol": prepared.question.api,
                "client_left": answers.client_is_gone,
                "prompt_tokens": prepared.n_prompt,
                "results": results,
                "timings_seconds": {
                    "prepare": prepared.seconds,
                    "ttft": ttft,
                    "total": now - answers.started_at,
                },
            },
        )
        if LOG.isEnabledFor(logging.INFO) and results:
            first, usage = results[0], answers.usage
            LOG.info(
                "%s %s: %s, %d prompt (%d cached, %s), %d generated, ttft %s, %.2f s",
                answers.request_id,
                prepared.question.api,
                "client left" if answers.client_is_gone else first["finish_reason"],
                usage.n_prompt,
                usage.n_cached,
                first.get("prefix_miss_reason"),
                usage.n_generated,
                "-" if ttft is None else f"{ttft * 1000:.0f} ms",
                now - answers.started_at,
            )

    def failed(self, request_id: str, problem: Problem) -> None:
        """A request was refused or broke."""
        self._write(
            "request_error",
            {"request_id": request_id, "status": problem.status, "code": problem.code, "param": problem.logged_param},
        )

    def tick(self, stats: EngineStats) -> None:
        """Called every fraction of a second: writes a throughput line when it is time and something happened."""
        seconds, now = self._settings.log_stats_seconds, time.monotonic()
        if self._before is None:
            self._before = stats
        if not seconds or now - self._stats_at < seconds:
            return
        elapsed, before = now - self._stats_at, self._before
        self._stats_at, self._before = now, stats
        prefilled = stats.computed_prefill_tokens - before.computed_prefill_tokens
        generated, rounds = stats.generated_tokens - before.generated_tokens, stats.rounds - before.rounds
        if not (prefilled or generated or stats.running or stats.waiting):
            return
        row_rounds, drafted = stats.row_rounds - before.row_rounds, stats.drafted - before.drafted
        event = {
            "seconds": round(elapsed, 3),
            "prefill_tokens_per_second": round(prefilled / elapsed, 1),
            "generated_tokens_per_second": round(generated / elapsed, 1),
            "mean_batch": round(row_rounds / rounds, 2) if rounds else 0,
            "acceptance": round((stats.accepted - before.accepted) / drafted, 3) if drafted else None,
            "running": stats.running,
            "waiting": stats.waiting,
            "pages_used": stats.pages_used,
            "pages_total": stats.pages_total,
        }
        self._write("throughput", event)
        LOG.info("throughput: %s", ", ".join(f"{name} {value}" for name, value in event.items()))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: str, members: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        document = {
            "schema": SCHEMA,
            "event": event,
            "timestamp_unix_ms": int(time.time() * 1000),
            "server_instance_id": self._instance,
            **members,
        }
        try:
            self._file.write(json.dumps(document) + "\n")
        except OSError as error:  # a full disk must not end the server
            LOG.error("the request log cannot be written: %s; it is closed", error.strerror)
            self._file = None


def _result(answers: "Answers", index: int, with_content: bool) -> dict[str, Any]:
    """How one answer ended."""
    choice = answers.choices[index]
    if choice.ending is None:
        return {"index": index, "finish_reason": "error", "error": type(choice.error).__name__}
    ending, finish = choice.ending, choice.ending.finish
    result: dict[str, Any] = {
        "index": index,
        "finish_reason": ending.reason.value,
        "completion_tokens": finish.n_generated,
        "reasoning_tokens": ending.n_reasoning_tokens,
        "prefix_cache_hit_tokens": finish.reuse.n_tokens,
        "prefix_known_tokens": finish.reuse.n_known,
        "prefix_miss_reason": finish.reuse.reason.value,
        "prefix_first_difference": finish.reuse.first_difference,
        "has_calls": ending.has_calls,
        "seed": finish.seed,
        "queue_seconds": finish.queue_seconds,
        "prefill_seconds": finish.prefill_seconds,
        "decode_seconds": finish.decode_seconds,
        "rounds": finish.n_rounds,
        "drafted_tokens": finish.drafting.n_drafted,
        "accepted_tokens": finish.drafting.n_accepted,
        "accepted_per_position": list(finish.drafting.accepted_at),
    }
    if with_content and choice.kept_events is not None:
        reply = join(choice.kept_events)
        result["reasoning"], result["content"] = reply.reasoning, reply.content
        result["tool_calls"] = [[call.name, call.arguments] for call in reply.tool_calls]
    return result
