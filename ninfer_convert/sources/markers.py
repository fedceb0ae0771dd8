"""What the markers of a quantized checkpoint are called: by the tensors that are stored, never by a config list."""

from collections.abc import Iterable, Mapping

from ninfer_convert.sources.groups import StoredGroup
from ninfer_convert.sources.logical import PLAIN, LogicalCheckpoint

# Part name → the kind of checkpoint that has it; the first that a group has names the source.
MARKERS: Mapping[str, str] = {
    ".weight_scale_inv": "block-scaled FP8",
    "_scale_inv": "block-scaled FP8",
    ".weight_packed": "compressed-tensors (packed weights)",
    ".weight_global_scale": "compressed-tensors NVFP4",
    ".weight_scale_2": "ModelOpt NVFP4",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".SCB": "bitsandbytes 8-bit",
    ".weight.quant_map": "bitsandbytes 4-bit",
    ".weight.absmax": "bitsandbytes 4-bit",
    "_blocks": "MXFP4",
    ".weight_scale": "FP8 or integer with scales",
    ".input_scale": "FP8 or integer with scales",
}


def marker_kind(group: StoredGroup) -> str:
    """What ``group`` looks like, for people."""
    known = next((kind for part, kind in MARKERS.items() if part in group.parts), None)
    return known or f"a kind with {', '.join(sorted(group.parts))}"


def plain_despite_config(checkpoint: LogicalCheckpoint, names: Iterable[str]) -> str | None:
    """A note for a checkpoint whose config claims quantization that the tensors ``names`` do not have."""
    claimed = (checkpoint.config or {}).get("quantization_config")
    if not isinstance(claimed, dict):
        return None
    if any(t.kind != PLAIN for name in names if (t := checkpoint.tensors.get(name)) is not None):
        return None
    method = claimed.get("quant_method", "unnamed")
    return f"config.json has a quantization_config ({method}), but every tensor that is used is stored plain; ignored"
