"""From stored tensors to logical ones: one explicit adapter per way of storing a matrix, chosen by its markers.

Every part of a group is accounted for by the adapter that takes it, or the matrix is a fault: codes are never used
without their scales and no scale is dropped. To add a source: an adapter module and a row in ``ADAPTERS``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ninfer_convert.checkpoint import Checkpoint
from ninfer_convert.problems import some_names
from ninfer_convert.sources.fp8 import Fp8Adapter
from ninfer_convert.sources.groups import KV_SCALES, StoredGroup, stored_groups
from ninfer_convert.sources.logical import Fault, LogicalCheckpoint, LogicalTensor, plain_tensor
from ninfer_convert.sources.markers import marker_kind
from ninfer_convert.sources.nvfp4 import COMPRESSED_TENSORS, MODELOPT, Nvfp4Adapter
from ninfer_convert.sources.refusal import BadGroup


class Adapter(Protocol):
    """One way of storing a matrix. ``takes`` looks at part names and dtypes only, never at values or config lists."""

    def takes(self, group: StoredGroup) -> bool:
        """Whether the markers of this way are there, complete or not."""

    def present(self, group: StoredGroup, files: Checkpoint) -> LogicalTensor:
        """The logical tensor, with every part it accounts for in ``stored``; BadGroup if parts are missing or wrong.

        Reads no tensor data.
        """


class Plain:
    """BF16, F16 and F32, and dtypes that nothing can read, which the plan reports when the tensor is needed."""

    def takes(self, group: StoredGroup) -> bool:
        """See ``Adapter``."""
        return group.weight is not None and len(group.parts) == 1 and not group.unavailable

    def present(self, group: StoredGroup, files: Checkpoint) -> LogicalTensor:
        """See ``Adapter``."""
        assert group.weight is not None
        return plain_tensor(files, group.weight)


ADAPTERS: tuple[Adapter, ...] = (Nvfp4Adapter(COMPRESSED_TENSORS), Nvfp4Adapter(MODELOPT), Fp8Adapter(), Plain())
"""The first that takes a group presents it."""


def _untaken(group: StoredGroup) -> BadGroup:
    message = f"this is a quantized source, {marker_kind(group)}, which this release does not read"
    return BadGroup("quantized-source", message, "use the original BF16 checkpoint that it was quantized from")


def _unconsumed(left: Sequence[str], tensor: LogicalTensor) -> BadGroup:
    endings = sorted({name.rpartition(".")[2] for name in left})
    message = f"stored beside it, but no part of {tensor.kind}: {some_names(endings)}"
    advice = "a scale that is not applied changes the weights; use a checkpoint whose scales are complete and known"
    return BadGroup("unconsumed-scale", message, advice)


def logical_checkpoint(files: Checkpoint) -> LogicalCheckpoint:
    """The logical tensors of ``files``; groups that none of ``ADAPTERS`` can present become faults."""
    tensors: dict[str, LogicalTensor] = {}
    faults: list[Fault] = []
    unavailable = set(files.unavailable)
    kv_scales = {name for name in files.tensors if name.endswith(KV_SCALES)}
    stored = {name: ref for name, ref in files.tensors.items() if name not in kv_scales}
    for group in stored_groups(stored, files.unavailable):
        if group.unavailable:
            unavailable.add(group.name)
            continue
        adapter = next((a for a in ADAPTERS if a.takes(group)), None)
        try:
            if adapter is None:
                raise _untaken(group)
            tensor = adapter.present(group, files)
            if left := [name for name in group.names() if name not in tensor.stored]:
                raise _unconsumed(left, tensor)
            tensors[tensor.name] = tensor
        except BadGroup as bad:
            faults.append(Fault(group.name, bad.code, bad.message, bad.advice))
            unavailable.add(group.name)
    notes = [f"{len(kv_scales)} scales of caches and activations are not part of any weight"] if kv_scales else []
    return LogicalCheckpoint(
        files, tensors, faults=faults, unavailable=frozenset(unavailable), problems=files.problems, notes=notes
    )


def open_checkpoint(folder: Path) -> LogicalCheckpoint:
    """Open a checkpoint folder and present its tensors; never raises for what the files contain."""
    return logical_checkpoint(Checkpoint.open(folder))
