"""``check``: is this artifact what its checkpoint gives? Everything is planned, encoded and compared again.

By default a few rows of every object are made again, with ``everything`` all of them; small objects, resources and id
tables are compared whole in any case. Specification: ``specs/conversion.md``, Check.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from ninfer_convert.build_options import BuildOptions
from ninfer_convert.memory import Device
from ninfer_convert.plan import ConversionPlan, make_plan
from ninfer_convert.problems import PlanError
from ninfer_convert.recompare import Comparing, Mismatch
from ninfer_convert.source_values import check_values
from ninfer_format import Artifact, compare_inventory, config_of
from ninfer_format.command import require_extra
from ninfer_format.published import PUBLISHED


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The artifact, its sources, and how thorough to be. Sources as in ``BuildOptions``."""

    artifact: Path
    source: Path
    base: Path | None = None
    dflash: Path | None = None
    ranking: Path | None = None
    method: str | None = None
    """None: whichever gives the first quantized matrices."""
    activation_stats: Path | None = None
    frontend: Path | None = None
    everything: bool = False
    device: Device = "cpu"
    jobs: int = 0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What was compared and what differs."""

    identity: str
    published: bool
    everything: bool
    method: str
    """Of the encoders that were compared with."""
    n_objects: int
    compared_bytes: int
    total_bytes: int
    """Of all payloads."""
    mismatches: tuple[Mismatch, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.mismatches


def check(options: CheckOptions, *, progress: Callable[[int], None] = lambda n_bytes: None) -> CheckResult:
    """Compare an artifact with what its sources give; ``progress`` is called with payload bytes that are done.

    PlanError if the sources cannot give this artifact at all, SourceError for values that cannot be stored,
    ArtifactError or InventoryError for a file that is no model, MissingExtraError without torch.
    """
    require_extra("torch", "convert")
    with Artifact.open(options.artifact) as artifact:
        plan = make_plan(_plan_options(artifact, options))
        target = plan.require()
        differences = compare_inventory(target.inventory, artifact.directory, packed=True)
        found = [Mismatch("directory", text) for text in differences]
        with plan.checkpoint, plan.prepacked or nullcontext(), plan.dflash or nullcontext():
            problems, notes = check_values(plan)
            if problems:
                raise PlanError(problems)
            with Comparing(artifact, options.device, options.jobs, plan) as comparing:
                if options.method is None and not target.published:
                    plan = _with_method(plan, comparing.guess_method(plan))
                for entry, source in zip(target.inventory.objects, target.sources, strict=True):
                    found += comparing.compare(plan, entry, source, whole=options.everything)
                    progress(entry.n_bytes)
        return CheckResult(
            str(artifact.identity),
            target.published,
            options.everything,
            plan.require().coding.method,
            len(target.inventory.objects),
            comparing.compared_bytes,
            sum(entry.n_bytes for entry in target.inventory.objects),
            tuple(found),
            (*plan.notes, *notes),
        )


def _plan_options(artifact: Artifact, options: CheckOptions) -> BuildOptions:
    """Options that plan the artifact again; its own id table ranks the draft head unless another ranking is given."""
    config = config_of(artifact)
    return BuildOptions(
        options.source,
        identity=artifact.identity,
        recipe=None if artifact.identity in PUBLISHED else config.recipe,
        frontend=options.frontend,
        base=options.base,
        dflash=options.dflash,
        ranking=options.ranking or options.artifact,
        method=options.method or "max",
        activation_stats=options.activation_stats,
        device=options.device,
        no_mtp=not config.geometry.text.mtp_layers,
        no_vision=config.geometry.vision is None,
        jobs=options.jobs,
    )


def _with_method(plan: ConversionPlan, method: str) -> ConversionPlan:
    target = plan.require()
    return replace(plan, target=replace(target, coding=target.coding.with_method(method)))
