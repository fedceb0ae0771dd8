"""What a user may set, validated once: ``SamplingParams`` per request, ``EngineConfig`` per process. Both frozen."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ninfer_format.errors import RequestError, UsageError

Dtype = Literal["float32", "bfloat16"]
KvDtype = Literal["auto", "bf16", "int8", "fp6"]
KvStorage = Literal["float32", "bf16", "int8", "fp6"]
Proposer = Literal["none", "mtp"]
Acceptance = Literal["equal", "ratio"]
Nvfp4Activations = Literal["auto", "a4", "a16"]
PrefillActivations = Literal["bf16", "int8"]
KvCapacity = int | Literal["auto"] | None
WeightResidency = Literal["device", "ffn"]
FfnCpu = int | Literal["auto"]
Architecture = Literal["qwen3_5", "qwen3_5_moe"]

MAX_SEED = 2**64 - 1
MAX_TOP_K = 2**31 - 1
MAX_CONCURRENCY = 8
PREFILL_CHUNK_MULTIPLE = 128
PREFILL_CHUNK = 1024
EXPERTS_PREFILL_CHUNK = 4096
"""On a card: an expert sees few tokens of a chunk, and reads all its weights for them."""
MAX_DRAFTS = 5
PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float


_RANGES: Mapping[str, _Range] = {
    "temperature": _Range(0.0, 2.0),
    "top_p": _Range(0.0, 1.0),
    "min_p": _Range(0.0, 1.0),
    "presence_penalty": _Range(-2.0, 2.0),
    "frequency_penalty": _Range(-2.0, 2.0),
}
_LOGIT_BIAS = _Range(-100.0, 100.0)


def _check_number(name: str, value: Any, allowed: _Range) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not allowed.low <= value <= allowed.high:
        raise RequestError(f"{name} is {value!r}, expected a number from {allowed.low:g} to {allowed.high:g}")


def _check_integer(
    name: str, value: Any, low: int, high: int, error: type[RequestError] | type[UsageError] = RequestError
) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise error(f"{name} is {value!r}, expected an integer from {low} to {high}")


def _check_option(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}, expected one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence chooses its tokens; the order of the steps is that of ``specs/program.md``.

    temperature        0 = argmax of the penalised logits, lowest id on ties
    top_k              0 or -1 = off; more than the vocabulary means all of it
    top_p, min_p       1 and 0 switch them off; at least one token always survives
    presence_penalty, frequency_penalty   on generated tokens only, never on the prompt
    seed               None = drawn freshly per request; otherwise the request is reproducible, whatever else runs
    logit_bias         (token id, value) pairs added to the logits before everything else

    Raises RequestError naming the field, the value and what is allowed.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 20
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            _check_number(name, getattr(self, name), allowed)
        _check_integer("top_k", self.top_k, -1, MAX_TOP_K)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, MAX_SEED)
        seen: set[int] = set()
        for token_id, value in self.logit_bias:
            _check_integer("logit_bias token id", token_id, 0, MAX_TOP_K)
            _check_number(f"logit_bias[{token_id}]", value, _LOGIT_BIAS)
            if token_id in seen:
                raise RequestError(f"logit_bias names token {token_id} twice; give each token one value")
            seen.add(token_id)

    @classmethod
    def greedy(cls) -> "SamplingParams":
        """Argmax without penalties."""
        return cls(temperature=0.0, top_p=1.0, top_k=0)

    @classmethod
    def defaults(cls, architecture: Architecture, *, thinking: bool) -> "SamplingParams":
        """The model authors' values for a prompt rendered in that mode (``specs/models.md``)."""
        return DEFAULT_SAMPLING[architecture, thinking]

    def merged(self, **overrides: Any) -> "SamplingParams":
        """A copy with every override that is not None; names are those of the fields."""
        unknown = overrides.keys() - {field.name for field in fields(self)}
        if unknown:
            raise RequestError(f"unknown sampling field {sorted(unknown)[0]!r}")
        return replace(self, **{name: value for name, value in overrides.items() if value is not None})

    @property
    def is_greedy(self) -> bool:
        """True when no random number is drawn."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True when occurrence counts matter."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


DEFAULT_SAMPLING: Mapping[tuple[Architecture, bool], SamplingParams] = {
    ("qwen3_5", True): SamplingParams(temperature=1.0, top_p=0.95, top_k=20, presence_penalty=0.0),
    ("qwen3_5", False): SamplingParams(temperature=0.7, top_p=0.80, top_k=20, presence_penalty=1.5),
    ("qwen3_5_moe", True): SamplingParams(temperature=1.0, top_p=0.95, top_k=20, presence_penalty=1.5),
    ("qwen3_5_moe", False): SamplingParams(temperature=0.7, top_p=0.80, top_k=20, presence_penalty=1.5),
}
"""(architecture, thinking) → the official defaults; other sizes of an architecture inherit its row."""


@dataclass(frozen=True, slots=True)
class Residency:
    """Where weights lie, and what of a machine may be used (``specs/offload.md``).

    weights        "device", or "ffn": feed-forward networks in pinned host memory, copied ahead of each use
    n_ffn_layers   with "ffn": layers whose networks stay on the device; None = as many as fit
    streamed       indices of the other layers; None = a backend's choice, which it keeps in its plan
    n_slots        networks that the device holds on the way; chosen with ``streamed``
    n_cpu_layers   of the streamed layers, how many the CPU computes in rounds; None = as many as make rounds shortest
    on_cpu         their indices; chosen with ``streamed``
    host_embedding the token embedding in pinned host memory, of which rows are read
    memory_limit   bytes of a card that is emulated: no more than such a card leaves a program is used
    link_limit     bytes per second of its link: copies of networks take at least that long
    rates          bytes per second of memory and link that ``streamed`` was chosen for, without the limit
    cpu_seconds    of one layer's network on the CPU in rounds of one column and of eight, where that was measured
    """

    weights: WeightResidency = "device"
    n_ffn_layers: int | None = None
    streamed: tuple[int, ...] | None = None
    n_slots: int = 0
    n_cpu_layers: int | None = 0
    on_cpu: tuple[int, ...] = ()
    host_embedding: bool = False
    memory_limit: int | None = None
    link_limit: float | None = None
    rates: tuple[float, float] | None = None
    cpu_seconds: tuple[float, float] | None = None

    @property
    def slowdown(self) -> float:
        """How many times as long as they need copies take."""
        if self.link_limit is None or self.rates is None:
            return 1.0
        return max(1.0, self.rates[1] / self.link_limit)


ON_DEVICE = Residency()


def default_prefill_chunk(backend: str, architecture: Architecture) -> int:
    """Prompt tokens per prefill call where nobody asked for a number."""
    return EXPERTS_PREFILL_CHUNK if backend == "cuda" and architecture == "qwen3_5_moe" else PREFILL_CHUNK


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything fixed when an engine starts.

    backend        name in ``ninfer_runtime.backends``: "reference" or "cuda"
    device         torch-style device of the backend: "cpu", "cuda", "cuda:1"
    dtype          rounding profile of the arithmetic (``specs/models.md``)
    kv_dtype       storage of keys and values; "auto" keeps them in ``dtype``
    max_context    most tokens of one sequence, prompt and output together
    kv_rotation    quantized KV only: rotate each head before it is stored
    kv_capacity    tokens in the shared KV pool, rounded up to pages; None = max_context × max_concurrency; "auto" =
                   what the device's free memory holds, at most that
    prefill_chunk  most prompt tokens per prefill call, a multiple of 128; None = ``default_prefill_chunk``
    max_concurrency  sequences that can be alive at once, 1..8
    nvfp4_activations  what prompts multiply NVFP4 matrices by: "a4" NVFP4 rows, "a16" rows as they are; "auto" = a4 on
                   cards with a product for it
    prefill_activations  what prompts multiply matrices of grouped integer codes by: rows as they are, or bytes
    weight_budget  bytes of decoded weights kept resident; None = half of the free memory; 0 = decode on every use
    spec           what drafts tokens; "none" or "mtp", with ``draft_tokens`` 1..5 per round
    lm_head_draft  draft with the artifact's head over frequent ids
    acceptance     how drafts of sampled rows are accepted: "equal" (the text is that without speculation) or "ratio"
    draft_backoff  draft less where acceptance does not pay
    prefix_reuse   keep finished prompts and answers for requests that begin the same
    snapshots      saved states for that, on the device; ``host_snapshots`` in host memory
    max_pending    requests that may wait; ``pending_seconds``: how long one may (None: for ever)
    weight_residency, n_ffn_layers, host_embedding, memory_limit, host_link_limit   as ``Residency`` has them
    ffn_cpu        streamed layers whose networks the CPU computes in rounds; "auto" = as many as make rounds shortest

    Raises UsageError naming the field, the value and what is allowed.
    """

    backend: str = "reference"
    device: str = "cpu"
    dtype: Dtype = "float32"
    kv_dtype: KvDtype = "auto"
    kv_rotation: bool = True
    max_context: int = 2048
    kv_capacity: KvCapacity = None
    prefill_chunk: int | None = None
    max_concurrency: int = 1
    nvfp4_activations: Nvfp4Activations = "auto"
    prefill_activations: PrefillActivations = "bf16"
    weight_budget: int | None = None
    spec: Proposer = "none"
    draft_tokens: int = 0
    lm_head_draft: bool = False
    acceptance: Acceptance = "equal"
    draft_backoff: bool = True
    prefix_reuse: bool = False
    snapshots: int = 0
    host_snapshots: int = 0
    max_pending: int = 16
    pending_seconds: float | None = None
    weight_residency: WeightResidency = "device"
    n_ffn_layers: int | None = None
    ffn_cpu: FfnCpu = 0
    host_embedding: bool = False
    memory_limit: int | None = None
    host_link_limit: float | None = None

    def __post_init__(self) -> None:
        _check_option("dtype", self.dtype, ("float32", "bfloat16"))
        _check_option("kv_dtype", self.kv_dtype, ("auto", "bf16", "int8", "fp6"))
        _check_integer("max_context", self.max_context, 1, 2**31 - 1, UsageError)
        _check_integer("max_concurrency", self.max_concurrency, 1, MAX_CONCURRENCY, UsageError)
        if self.prefill_chunk is not None:
            _check_integer("prefill_chunk", self.prefill_chunk, 1, 2**31 - 1, UsageError)
            if self.prefill_chunk % PREFILL_CHUNK_MULTIPLE:
                raise UsageError(
                    f"prefill_chunk is {self.prefill_chunk}, expected a positive multiple of {PREFILL_CHUNK_MULTIPLE}"
                )
        if isinstance(self.kv_capacity, int):
            _check_integer("kv_capacity", self.kv_capacity, self.max_context, 2**40, UsageError)
        if self.weight_budget is not None:
            _check_integer("weight_budget", self.weight_budget, 0, 2**63 - 1, UsageError)
        _check_option("spec", self.spec, ("none", "mtp"))
        _check_option("acceptance", self.acceptance, ("equal", "ratio"))
        _check_option("nvfp4_activations", self.nvfp4_activations, ("auto", "a4", "a16"))
        _check_option("prefill_activations", self.prefill_activations, ("bf16", "int8"))
        if self.spec == "none" and (self.draft_tokens or self.lm_head_draft):
            raise UsageError("draft_tokens and lm_head_draft need spec, which is 'none'")
        if self.spec != "none":
            _check_integer("draft_tokens", self.draft_tokens, 1, MAX_DRAFTS, UsageError)
        _check_integer("snapshots", self.snapshots, 0, 2**20, UsageError)
        _check_integer("host_snapshots", self.host_snapshots, 0, 2**20, UsageError)
        _check_integer("max_pending", self.max_pending, 1, 2**20, UsageError)
        if self.pending_seconds is not None and not 0 < self.pending_seconds < math.inf:
            raise UsageError(f"pending_seconds is {self.pending_seconds}, expected a positive number")
        _check_option("weight_residency", self.weight_residency, ("device", "ffn"))
        if self.n_ffn_layers is not None:
            if self.weight_residency == "device":
                raise UsageError("n_ffn_layers needs weight_residency 'ffn', which is 'device'")
            _check_integer("n_ffn_layers", self.n_ffn_layers, 0, 2**20, UsageError)
        if self.ffn_cpu != "auto":
            _check_integer("ffn_cpu", self.ffn_cpu, 0, 2**20, UsageError)
        if self.ffn_cpu and self.weight_residency == "device":
            raise UsageError("ffn_cpu needs weight_residency 'ffn', which is 'device'")
        if self.memory_limit is not None:
            _check_integer("memory_limit", self.memory_limit, 1, 2**63 - 1, UsageError)
        if self.host_link_limit is not None and not 0 < self.host_link_limit < math.inf:
            raise UsageError(f"host_link_limit is {self.host_link_limit}, expected bytes per second")

    @property
    def residency(self) -> Residency:
        """Where weights lie; which layers stream is the backend's choice."""
        return Residency(
            weights=self.weight_residency,
            n_ffn_layers=self.n_ffn_layers,
            n_cpu_layers=None if self.ffn_cpu == "auto" else self.ffn_cpu,
            host_embedding=self.host_embedding,
            memory_limit=self.memory_limit,
            link_limit=self.host_link_limit,
        )

    @property
    def n_pages(self) -> int:
        """KV pages of the shared pool; with "auto" the most it can be."""
        if isinstance(self.kv_capacity, int):
            return -(-self.kv_capacity // PAGE_TOKENS)
        return self.pages_per_sequence * self.max_concurrency

    @property
    def pages_per_sequence(self) -> int:
        """KV pages of the longest sequence."""
        return -(-self.max_context // PAGE_TOKENS)
