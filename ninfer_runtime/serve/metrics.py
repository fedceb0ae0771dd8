"""Prometheus families under the names that dashboards for vLLM know, with another prefix (``--metrics-prefix``).

What the engine counts is read from ``Engine.stats()`` at each scrape; here are only latencies and what HTTP adds.
Counting costs no lock: each histogram is written by one thread, and a scrape may be one observation behind.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ninfer_runtime.engine.sequence import FinishReason
from ninfer_runtime.serve.errors import Problem

if TYPE_CHECKING:
    from ninfer_runtime.serve.answering import Answers, Choice
    from ninfer_runtime.serve.service import Service

_SHORT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5)

HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From a request's arrival at the engine to its first token", _LONG),
    "inter_token_latency_seconds": ("Between tokens of one answer, per token", _SHORT),
    "request_time_per_output_token_seconds": ("Decoding time per token after the first, per answer", _SHORT),
    "e2e_request_latency_seconds": ("From a request's arrival at the engine to its last token", _LONG),
    "request_queue_time_seconds": ("Before the prompt begins", _LONG),
    "request_prefill_time_seconds": ("The prompt up to the first token", _LONG),
    "request_decode_time_seconds": ("From the first token to the last", _LONG),
    "request_inference_time_seconds": ("Prompt and decoding together", _LONG),
    "request_prompt_tokens": ("Prompt tokens per request", _TOKENS),
    "request_generation_tokens": ("Generated tokens per answer", _TOKENS),
    "request_params_n": ("Answers asked for", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("Output limit of requests", _TOKENS),
}
"""Name → (help, upper bounds), as vLLM has them."""

FINISHED: Mapping[str, str] = {
    FinishReason.STOP_TOKEN.value: "stop",
    FinishReason.STOP_STRING.value: "stop",
    FinishReason.OUTPUT_LIMIT.value: "length",
    FinishReason.CONTEXT_CAPACITY.value: "length",
    FinishReason.CANCELLED.value: "abort",
    "error": "error",
}
"""The engine's reasons → vLLM's."""


class Histogram:
    """Counts per bucket and the sum, written by one thread."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """``times`` observations of one value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), the last one +Inf."""
        running, out = 0, []
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), list(self.counts), strict=True):
            running += count
            out.append((bound, float(running)))
        return out


class Metrics:
    """All families of one server."""

    def __init__(self, service: "Service") -> None:
        self._service = service
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self._first = self.histograms["time_to_first_token_seconds"]
        self._next = self.histograms["inter_token_latency_seconds"]
        self.by_api: Counter[tuple[str, str]] = Counter()
        """(api, finish reason) → answers."""
        self.problems: Counter[tuple[str, str]] = Counter()
        """(status, code) → refused or failed requests."""
        self.n_left = 0
        """Requests whose client left before the end."""

    # ---- counting ----------------------------------------------------------------------------
    def first_token(self, seconds: float) -> None:
        """An answer's first token."""
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, n_tokens: int) -> None:
        """``n_tokens`` more tokens of an answer, ``seconds`` after the ones before."""
        self._next.observe(seconds / n_tokens, n_tokens)

    def started(self, answers: "Answers") -> None:
        """A request is with the engine."""
        self.histograms["request_prompt_tokens"].observe(answers.prepared.n_prompt)
        self.histograms["request_params_n"].observe(answers.prepared.question.n)
        self.histograms["request_params_max_tokens"].observe(answers.prepared.max_new)

    def answer_ended(self, answers: "Answers", choice: "Choice") -> None:
        """One answer has ended."""
        reason = choice.ending.reason.value if choice.ending is not None else "error"
        self.by_api[answers.prepared.question.api, reason] += 1
        if choice.ending is None:
            return
        finish, seen = choice.ending.finish, self.histograms
        seen["request_generation_tokens"].observe(finish.n_generated)
        seen["request_queue_time_seconds"].observe(finish.queue_seconds)
        seen["request_prefill_time_seconds"].observe(finish.prefill_seconds)
        seen["request_decode_time_seconds"].observe(finish.decode_seconds)
        seen["request_inference_time_seconds"].observe(finish.prefill_seconds + finish.decode_seconds)
        if finish.n_generated > 1:
            seen["request_time_per_output_token_seconds"].observe(finish.decode_seconds / (finish.n_generated - 1))

    def request_ended(self, answers: "Answers") -> None:
        """All answers of a request have ended."""
        last = max((choice.last_token_at for choice in answers.choices), default=0.0)
        if last:
            self.histograms["e2e_request_latency_seconds"].observe(last - answers.started_at)
        self.n_left += answers.client_is_gone

    def failed(self, problem: Problem) -> None:
        """A request was refused or broke."""
        self.problems[str(problem.status), problem.code] += 1

    # ---- showing -----------------------------------------------------------------------------
    def exposition(self) -> tuple[bytes, str]:
        """The text a scrape gets, and its media type."""
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Any]:
        """For the Prometheus client: all families as of now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        prefix, model = self._service.settings.metrics_prefix, self._service.facts.model_id
        stats = self._service.engine.stats()

        def counter(
            name: str, about: str, rows: Iterable[tuple[Sequence[str], float]], labels: Sequence[str] = ()
        ) -> Any:
            family = CounterMetricFamily(f"{prefix}:{name}", about, labels=["model_name", *labels])
            for values, value in rows:
                family.add_metric([model, *values], value)
            return family

        def gauge(name: str, about: str, value: float) -> Any:
            family = GaugeMetricFamily(f"{prefix}:{name}", about, labels=["model_name"])
            family.add_metric([model], value)
            return family

        in_use = stats.pages_used - stats.pages_cached
        yield gauge("num_requests_running", "Answers being computed", stats.running)
        yield gauge("num_requests_waiting", "Answers waiting for a place", stats.waiting)
        yield gauge("num_requests_prefilling", "Answers whose prompt is being computed", stats.prefilling)
        yield gauge("num_requests_decode_ready", "Answers that take part in rounds", stats.decode_ready)
        yield gauge(
            "kv_cache_usage_perc", "Share of the KV pages in use by running answers", in_use / stats.pages_total
        )
        yield gauge("kv_pages_used", "KV pages with an owner", stats.pages_used)
        yield gauge("kv_pages_cached", "KV pages kept only for prefix reuse", stats.pages_cached)
        yield gauge("kv_pages_total", "KV pages", stats.pages_total)
        yield gauge("snapshots_used", "Saved states for prefix reuse", stats.snapshots_used)
        yield gauge("snapshots_total", "Most saved states", stats.snapshots_total)
        yield gauge("healthy", "1 until the device fails", float(stats.is_healthy))
        yield counter("prompt_tokens", "Prompt tokens, reused ones included", [((), stats.prompt_tokens)])
        yield counter("prompt_tokens_computed", "Prompt tokens computed", [((), stats.computed_prefill_tokens)])
        yield counter("generation_tokens", "Tokens generated", [((), stats.generated_tokens)])
        yield counter("prefix_cache_queries", "Prompt tokens looked up", [((), stats.prompt_tokens)])
        yield counter("prefix_cache_hits", "Prompt tokens reused", [((), stats.reused_tokens)])
        yield counter("rounds", "Rounds launched", [((), stats.rounds)])
        yield counter("row_rounds", "Rows of all rounds; over rounds: the mean batch", [((), stats.row_rounds)])
        yield counter("spec_decode_num_draft_tokens", "Drafts evaluated", [((), stats.drafted)])
        yield counter("spec_decode_num_accepted_tokens", "Drafts accepted", [((), stats.accepted)])
        per_position = [((str(i),), float(n)) for i, n in enumerate(stats.accepted_at)]
        yield counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by position", per_position, ["position"]
        )
        finished: Counter[str] = Counter()
        for reason, n in stats.requests_finished.items():
            finished[FINISHED.get(reason, "error")] += n
        rows = [((word,), float(finished[word])) for word in ("stop", "length", "abort", "error")]
        yield counter("request_success", "Answers ended, by reason", rows, ["finished_reason"])
        answers = [((api, reason), float(n)) for (api, reason), n in self.by_api.items()]
        yield counter("answers", "Answers ended, by API and the engine's reason", answers, ["api", "reason"])
        problems = [((status, code), float(n)) for (status, code), n in self.problems.items()]
        yield counter("http_problems", "Requests refused or failed", problems, ["status", "code"])
        yield counter("clients_left", "Requests whose client left before the end", [((), float(self.n_left))])
        for name, (about, _) in HISTOGRAMS.items():
            histogram = self.histograms[name]
            family = HistogramMetricFamily(f"{prefix}:{name}", about, labels=["model_name"])
            family.add_metric([model], histogram.buckets(), histogram.total)
            yield family
