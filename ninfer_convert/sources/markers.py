"""How to tell a quantized checkpoint: by the tensors that are stored, never by what a config list claims."""

from collections.abc import Mapping, Sequence

from ninfer_convert.checkpoint import Checkpoint
from ninfer_convert.problems import Problem

# Suffix of a stored tensor → the kind of checkpoint that has it; the first kind found names the source.
MARKERS: Mapping[str, str] = {
    ".weight_scale_inv": "block-scaled FP8",
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


def quantized_problem(checkpoint: Checkpoint, prefixes: Sequence[str]) -> Problem | None:
    """The one problem of a source whose tensors under ``prefixes`` are quantized; None if they are plain."""
    names = [name for name in (*checkpoint.tensors, *checkpoint.unavailable) if name.startswith(tuple(prefixes))]
    for suffix, kind in MARKERS.items():
        if marked := [name for name in names if name.endswith(suffix)]:
            message = (
                f"this is a quantized source, {kind}: {len(marked)} tensors end in {suffix}, the first is {marked[0]}; "
                "this release converts plain BF16, F16 or F32 weights"
            )
            advice = "use the original BF16 checkpoint that it was quantized from"
            return Problem("quantized-source", message, str(checkpoint.folder), advice)
    return None


def plain_despite_config(checkpoint: Checkpoint) -> str | None:
    """A note for a checkpoint whose config claims quantization that its tensors do not have."""
    claimed = (checkpoint.config or {}).get("quantization_config")
    if not isinstance(claimed, dict):
        return None
    method = claimed.get("quant_method", "unnamed")
    return f"config.json has a quantization_config ({method}), but every tensor that is used is stored plain; ignored"
