"""Time of prompts, and of the attention in them at long contexts."""

import time
from dataclasses import dataclass

from ninfer_runtime.backends.base import PrefillChunk, PrefillResult
from ninfer_runtime.bench.bytes_moved import attention_flops, kv_bytes_per_token, prefill_flops
from ninfer_runtime.bench.report import Result
from ninfer_runtime.bench.running import GREEDY, Room, Running, SetsLength, in_range

REPEATS = 3


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of ``n_tokens`` random tokens."""

    n_tokens: int

    @property
    def room(self) -> Room:
        """What the program must be able to hold."""
        return Room(context=self.n_tokens + 64, tokens=self.n_tokens + 64)


@dataclass(frozen=True, slots=True)
class LateChunk:
    """One chunk of ``n_tokens`` behind a context of ``start`` tokens."""

    start: int
    n_tokens: int

    @property
    def room(self) -> Room:
        """What the program must be able to hold."""
        return Room(context=self.start + self.n_tokens + 64, tokens=self.start + self.n_tokens + 64)


def prefill(run: Running, prompt: Prompt, seed: int) -> Result:
    """``prefill/…``: a prompt in chunks, until its next token is on the host; the median of ``REPEATS`` runs."""
    program, pages, drawn, seconds = run.program, run.pages(0, 1), [], []
    for _ in range(1 + REPEATS):
        program.reset(0)
        started = time.perf_counter()
        result = run.prefill(0, 0, prompt.n_tokens, pages, seed)
        seconds.append(time.perf_counter() - started)
        drawn.append(result)
    flops = prefill_flops(run.artifact.directory.objects, run.model.spec.text, prompt.n_tokens)
    took, options = sorted(seconds[1:])[REPEATS // 2], run.plan.options
    kinds = [kind for kind in (options.nvfp4_activations, options.prefill_activations) if kind not in ("auto", "bf16")]
    return Result(
        id="/".join(["prefill", str(run.identity), str(prompt.n_tokens), *kinds]),
        value=prompt.n_tokens / took,
        unit="tok/s",
        limit="mma_tflops",
        achieved=flops / took / 1e12,
        check=f"token drawn in {len(drawn)} runs equal, logits finite",
        problem=_problem(run, drawn),
        details={
            "chunk": run.plan.limits.prefill_chunk,
            "flops": flops,
            "bytes": run.artifact.file_bytes,
            "seconds": took,
            "worst_seconds": max(seconds[1:]),
        },
    )


def attention(run: Running, late: LateChunk, seed: int) -> Result | None:
    """``attention/…``: what a chunk takes longer behind a long context than at the start, against the operations more.

    Needs a program that can pretend a length; None otherwise.
    """
    if not isinstance(run.program, SetsLength):
        return None
    early, first = _chunk_seconds(run, 0, late.n_tokens, seed)
    later, second = _chunk_seconds(run, late.start, late.n_tokens, seed)
    text = run.model.spec.text
    flops = attention_flops(text, late.start, late.n_tokens) - attention_flops(text, 0, late.n_tokens)
    took = later - early
    return Result(
        id=f"attention/{run.identity}/{late.start // 1024}k",
        value=flops / took / 1e12,
        unit="TFLOP/s",
        limit="mma_tflops",
        achieved=flops / took / 1e12,
        check="tokens drawn in all runs equal, logits finite",
        problem=_problem(run, first) or _problem(run, second),
        details={
            "chunk": late.n_tokens,
            "context": late.start,
            "chunk_seconds": later,
            "chunk_seconds_at_0": early,
            "flops": flops,
            "bytes": late.start * kv_bytes_per_token(text, run.kv_dtype),
            "seconds": took,
            "kv_dtype": run.kv_dtype,
        },
    )


def _chunk_seconds(run: Running, start: int, n_tokens: int, seed: int) -> tuple[float, list[PrefillResult]]:
    """Median seconds of a chunk at ``start``, and what it drew each time."""
    program, seconds, drawn = run.program, [], []
    ids = run.random_ids(n_tokens, seed)
    for _ in range(1 + REPEATS):
        pages = run.pages(0, 1)
        if start:
            run.fill([0], start, seed)
        else:
            program.reset(0)
        started = time.perf_counter()
        drawn.append(program.prefill(PrefillChunk(0, ids, start, pages, sampling=GREEDY)))
        seconds.append(time.perf_counter() - started)
    return sorted(seconds[1:])[REPEATS // 2], drawn


def _problem(run: Running, drawn: list[PrefillResult]) -> str:
    tokens = {result.token_id for result in drawn}
    if not all(result.finite for result in drawn) or None in tokens:
        return "logits were not finite"
    if len(tokens) != 1:
        return f"equal prompts drew tokens {sorted(token for token in tokens if token is not None)}"
    return "" if in_range(run.model, [token for token in tokens if token is not None]) else "a token out of range"
