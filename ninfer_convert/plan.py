"""The conversion plan: everything that is known and checked before a byte of output is written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.checkpoint import Checkpoint
from ninfer_convert.families import ObjectSource
from ninfer_convert.problems import PlanError, Problem
from ninfer_format import Identity, Inventory, ModelConfig

CHUNK_BYTES = 32 << 20
"""Default size of a quantization chunk, in bytes of BF16 source words."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What the user asked for; ``plan`` and ``build`` take the same options."""

    source: Path
    """Checkpoint folder, or a Hub name (``org/name`` or ``org/name@revision``) that is in the local cache."""
    out: Path | None = None
    identity: Identity | None = None
    recipe: str | None = None
    model_id: str | None = None
    dflash: Path | None = None
    ranking: Path | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    no_mtp: bool = False
    no_vision: bool = False
    resume: bool = False
    force: bool = False
    jobs: int = 0
    """Worker threads; 0 = one per usable CPU."""
    chunk_bytes: int = CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Target:
    """What will be written: identity, config, inventory and where each of its objects comes from."""

    identity: Identity
    published: bool
    """The identity is one of the published contracts (named or inferred)."""
    config: ModelConfig
    inventory: Inventory
    sources: tuple[ObjectSource, ...]
    """In inventory order, one per object."""
    resources: Mapping[str, bytes]
    """Payloads by object name, ``model/config.json`` included."""
    draft_ids: NDArray[np.int32] | None


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The complete plan. With a nonempty ``problems`` it can be shown but not built."""

    options: BuildOptions
    checkpoint: Checkpoint
    dflash: Checkpoint | None
    target: Target | None
    """None when the config is so wrong that nothing could be planned; ``problems`` says why."""
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    """Decisions a user should know: ignored files, tied head, ranking used, rounded dtypes, inferred identity."""
    memory_bytes: int = 0
    """Peak resident memory that ``build`` stays below (``peak_memory``)."""
    output_bytes: int = 0
    """Exact size of the finished file."""
    disk_bytes: int = 0
    """Free space needed in the output folder: the temporary file and the journal."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of every frontend resource, by object name."""

    def require(self) -> Target:
        """The target of a plan without problems; PlanError lists the problems otherwise."""
        if self.problems or self.target is None:
            raise PlanError(self.problems)
        return self.target

    def checkpoint_of(self, source: ObjectSource) -> Checkpoint:
        """The checkpoint that holds the tensors of ``source``."""
        if source.origin == "base":
            return self.checkpoint
        if self.dflash is None:
            raise ValueError(f"object {source.name!r} needs the DFlash companion, which the plan lacks")
        return self.dflash
