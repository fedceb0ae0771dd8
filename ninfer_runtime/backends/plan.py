"""What a program is planned for, how its arithmetic runs, and what it takes: fixed before it exists (``base.py``)."""

from dataclasses import dataclass

from ninfer_format.errors import UsageError
from ninfer_runtime.config import (
    ON_DEVICE,
    PAGE_TOKENS,
    Acceptance,
    Dtype,
    KvDtype,
    Nvfp4Activations,
    PrefillActivations,
    Proposer,
    Residency,
)

_COUNTS = ("max_rows", "max_columns", "max_context", "n_pages", "n_slots", "prefill_chunk", "logits_rows")


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """What memory is planned for; nothing larger can be asked of the program later.

    n_slots           sequences whose state can be held at once (at least ``max_rows``)
    max_rows          B, most rows of one round
    max_columns       q, most columns of one row
    max_context       most tokens of one row
    n_pages           pages of the shared KV pool
    prefill_chunk     T, most tokens of one prefill call
    logits_rows       most rows of logits that one prefill call returns
    device_snapshots, host_snapshots   state snapshots that can be alive at once, by place
    max_drafts        most drafts of one row, below ``max_columns``; 0 without a proposer
    """

    max_rows: int = 1
    max_columns: int = 1
    max_context: int = 2048
    n_pages: int = 32
    n_slots: int = 1
    prefill_chunk: int = 1024
    logits_rows: int = 256
    device_snapshots: int = 0
    host_snapshots: int = 0
    page_tokens: int = PAGE_TOKENS
    max_drafts: int = 0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.n_slots < self.max_rows:
            raise UsageError(f"n_slots is {self.n_slots}, expected at least max_rows, which is {self.max_rows}")
        if self.page_tokens != PAGE_TOKENS:
            raise UsageError(f"page_tokens is {self.page_tokens}, expected {PAGE_TOKENS}")
        if min(self.device_snapshots, self.host_snapshots, self.max_drafts) < 0:
            raise UsageError("device_snapshots, host_snapshots and max_drafts must not be negative")
        if self.max_drafts >= self.max_columns:
            raise UsageError(f"max_drafts is {self.max_drafts}, expected less than max_columns, {self.max_columns}")

    @property
    def pages_per_row(self) -> int:
        """Entries of one row's page table that can be needed."""
        return -(-self.max_context // self.page_tokens)


@dataclass(frozen=True, slots=True)
class ProgramOptions:
    """How the arithmetic runs.

    nvfp4_activations  "a4": prompt chunks of more columns than a round has multiply NVFP4 matrices by rows quantized to
                   NVFP4 (specs/formats.md §10); "auto": where the card has a product for it
    prefill_activations  "int8": such chunks multiply matrices of grouped integer codes by signed bytes (§11)
    weight_budget  bytes of decoded weights to keep resident, None = what fits
    kv_rotation    quantized keys and values are stored after a Walsh-Hadamard rotation of each head
    proposer       what drafts tokens; "none" takes no memory
    draft_head     the proposer uses the artifact's head over frequent ids instead of the full one
    acceptance     how drafts of sampled rows are accepted (``Round``)
    residency      where weights lie; in a plan, with what the backend chose
    """

    device: str = "cpu"
    dtype: Dtype = "float32"
    kv_dtype: KvDtype = "auto"
    weight_budget: int | None = None
    nvfp4_activations: Nvfp4Activations = "auto"
    prefill_activations: PrefillActivations = "bf16"
    kv_rotation: bool = True
    proposer: Proposer = "none"
    draft_head: bool = False
    acceptance: Acceptance = "equal"
    residency: Residency = ON_DEVICE


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes a program will allocate, known before it allocates any of them.

    ``graph_bytes`` is what the driver takes for recorded rounds, beside the program's own memory: an allowance.
    ``host_weight_bytes`` are pinned; ``cpu_weight_bytes`` are host memory too, weights in the form the CPU multiplies.
    """

    limits: ProgramLimits
    options: ProgramOptions
    weight_bytes: int
    state_bytes: int
    kv_bytes: int
    workspace_bytes: int
    device_snapshot_bytes: int
    host_snapshot_bytes: int
    graph_bytes: int = 0
    host_weight_bytes: int = 0
    cpu_weight_bytes: int = 0

    @property
    def reserved_bytes(self) -> int:
        """What the device must have free at the start."""
        return self.device_bytes + self.graph_bytes

    @property
    def device_bytes(self) -> int:
        """Everything that the program itself allocates on the device."""
        parts = (self.weight_bytes, self.state_bytes, self.kv_bytes, self.workspace_bytes, self.device_snapshot_bytes)
        return sum(parts)

    def rows(self) -> tuple[tuple[str, int], ...]:
        """(label, bytes) of each part, for reports."""
        return (
            ("weights", self.weight_bytes),
            ("recurrent state", self.state_bytes),
            ("KV pages", self.kv_bytes),
            ("workspace", self.workspace_bytes),
            ("device snapshots", self.device_snapshot_bytes),
            ("graphs", self.graph_bytes),
            ("host snapshots", self.host_snapshot_bytes),
            ("host weights", self.host_weight_bytes),
            ("CPU weights", self.cpu_weight_bytes),
        )
