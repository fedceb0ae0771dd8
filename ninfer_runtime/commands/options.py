"""Options that several subcommands share, as values."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ninfer_format.errors import UsageError
from ninfer_runtime.config import (
    Acceptance,
    Dtype,
    EngineConfig,
    FfnCpu,
    KvCapacity,
    KvDtype,
    Nvfp4Activations,
    PrefillActivations,
    Proposer,
    WeightResidency,
)

if TYPE_CHECKING:
    from ninfer_runtime.text.grammar import GrammarSpec

SERVED_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Which model runs where, as ``EngineConfig`` means it.

    ``max_context`` None: as much as the command needs or 2048; ``device`` None: the backend's own.
    """

    path: Path
    backend: str = "reference"
    device: str | None = None
    dtype: Dtype = "bfloat16"
    kv_dtype: KvDtype = "auto"
    max_context: int | None = None
    prefill_chunk: int | None = None
    kv_rotation: bool = True
    nvfp4_activations: Nvfp4Activations = "auto"
    prefill_activations: PrefillActivations = "bf16"
    kv_capacity: KvCapacity = None
    max_concurrency: int = 1
    spec: Proposer = "none"
    draft_tokens: int = 0
    lm_head_draft: bool = False
    draft_acceptance: Acceptance = "equal"
    draft_backoff: bool = True
    weight_residency: WeightResidency = "device"
    n_ffn_layers: int | None = None
    ffn_cpu: FfnCpu = 0
    host_embedding: bool = False
    memory_limit: int | None = None
    host_link_limit: float | None = None


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What to plan a card for. ``max_context`` None: what a server takes, or less if the model was made for less."""

    max_context: int | None = None
    kv_dtype: KvDtype = "auto"
    kv_capacity: KvCapacity = None
    max_concurrency: int = 1
    prefill_chunk: int | None = None
    snapshots: int = 0
    spec: Proposer = "none"
    draft_tokens: int = 0
    lm_head_draft: bool = False
    weight_residency: WeightResidency = "device"
    n_ffn_layers: int | None = None
    host_embedding: bool = False

    def config(self, longest: int | None) -> EngineConfig:
        """For a model that was made for ``longest`` tokens."""
        return EngineConfig(
            backend="cuda",
            device="cuda",
            dtype="bfloat16",
            kv_dtype=self.kv_dtype,
            max_context=self.max_context or min(SERVED_CONTEXT, longest or SERVED_CONTEXT),
            kv_capacity=self.kv_capacity,
            max_concurrency=self.max_concurrency,
            prefill_chunk=self.prefill_chunk,
            snapshots=self.snapshots,
            spec=self.spec,
            draft_tokens=self.draft_tokens,
            lm_head_draft=self.lm_head_draft,
            weight_residency=self.weight_residency,
            n_ffn_layers=self.n_ffn_layers,
            host_embedding=self.host_embedding,
        )


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling flags; None was not given."""

    greedy: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None

    def overrides(self) -> dict[str, Any]:
        """SamplingParams fields that were given."""
        names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How an answer is asked for and read. UsageError for options that exclude each other."""

    max_new: int = 128
    stops: tuple[str, ...] = ()
    reasoning_stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    thinking: bool = True
    reasoning_effort: str | None = None
    raw_output: bool = False
    print_token_ids: bool = False
    ignore_eos: bool = False
    max_thinking: int | None = None
    form: "GrammarSpec | None" = None

    def __post_init__(self) -> None:
        if self.raw_output and self.max_thinking is not None:
            raise UsageError("--raw-output does not tell thinking apart; leave out --max-thinking")
        if self.raw_output and self.reasoning_stops:
            raise UsageError("--raw-output does not tell thinking apart; leave out --reasoning-stop")
