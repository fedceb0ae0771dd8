"""What a reference program will hold, in bytes, from the model and the limits alone."""

import os
from pathlib import Path

import torch

from ninfer_format.directory import TensorEntry
from ninfer_format.errors import UsageError
from ninfer_runtime.backends.base import MAX_ROUNDS_IN_FLIGHT, MemoryPlan, ProgramLimits, ProgramOptions
from ninfer_runtime.backends.checks import check_proposer
from ninfer_runtime.config import ON_DEVICE
from ninfer_runtime.models.binder import BoundModel
from ninfer_runtime.models.moe import MoeWeights
from ninfer_runtime.models.qwen3_5 import MlpWeights
from ninfer_runtime.models.spec import ModelSpec
from ninfer_runtime.models.views import View

from .kv_formats import check_kv, page_bytes
from .numerics import ROW_TILE, TORCH_DTYPES
from .weights import BLOCK_BYTES, DECODERS

FLOAT32_BYTES, INT64_BYTES = 4, 8


def kv_layers(spec: ModelSpec, options: ProgramOptions) -> int:
    """Layers that keep keys and values in every page: those with attention, and the draft layer behind them."""
    return len(spec.attention_layers) + (options.proposer == "mtp")


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def matrices(model: BoundModel, options: ProgramOptions) -> dict[str, int]:
    """Elements of every stored matrix that a program multiplies with, by object name."""
    views: list[View] = [model.output_head]
    layers = list(model.layers)
    if options.proposer == "mtp" and model.mtp is not None:
        views.append(model.mtp.input_projection)
        layers.append(model.mtp.layer)
    if options.draft_head and model.draft_head is not None:
        views.append(model.draft_head.rows)
    for layer in layers:
        ffn = layer.ffn
        views += [getattr(layer.mixer, name) for name in type(layer.mixer).__slots__ if name != "convolution"]
        if isinstance(ffn, MoeWeights):
            views += [ffn.router, ffn.shared_gate, ffn.routed_gate_up, ffn.routed_down]
            ffn = ffn.shared
        views += [getattr(ffn, name) for name in MlpWeights.__slots__]
    sizes: dict[str, int] = {}
    for view in views:
        entry = model.artifact.objects[view.name]
        if isinstance(entry, TensorEntry) and len(entry.shape) == 2:
            sizes[view.name] = entry.shape[0] * entry.shape[1]
    return sizes


def plan_memory(model: BoundModel, limits: ProgramLimits, options: ProgramOptions) -> MemoryPlan:
    """The plan of ``MemoryPlan``; weights are what stays decoded, at most the budget."""
    spec, size = model.spec, TORCH_DTYPES[options.dtype].itemsize
    device = torch_device(options.device)
    decoded = sum(matrices(model, options).values()) * size
    budget = free_memory(device) // 2 if options.weight_budget is None else options.weight_budget
    check_proposer(model, limits, options)
    if options.residency != ON_DEVICE:
        raise UsageError(
            "--weight-residency, --host-embedding, --memory-limit and --host-link-limit are options of the cuda backend"
        )
    one_state = state_bytes(spec, size) + last_token_bytes(spec, size, options)
    check_kv(spec, options)
    counts = limits.n_slots * spec.text.vocab_rows * FLOAT32_BYTES
    return MemoryPlan(
        limits=limits,
        options=options,
        weight_bytes=min(decoded, budget),
        state_bytes=limits.n_slots * one_state + counts,
        kv_bytes=limits.n_pages * page_bytes(spec, kv_layers(spec, options), options),
        workspace_bytes=workspace_bytes(spec, limits, options, size),
        device_snapshot_bytes=limits.device_snapshots * one_state,
        host_snapshot_bytes=limits.host_snapshots * one_state,
    )


def torch_device(name: str) -> torch.device:
    """The device of that name; UsageError when torch does not have it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {name!r}, expected cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {name!r} does not exist: torch sees {torch.cuda.device_count()} CUDA devices")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"the reference backend does not run on {name!r}, expected cpu, cuda or cuda:N")
    return device


def state_bytes(spec: ModelSpec, size: int) -> int:
    """One slot: convolution columns in the program's dtype and float32 matrices, over all DeltaNet layers."""
    t = spec.text
    matrix = t.gdn_value_heads * t.gdn_key_dim * t.gdn_value_dim * FLOAT32_BYTES
    return len(spec.gdn_layers) * ((t.conv_taps - 1) * spec.conv_channels * size + matrix)


def last_token_bytes(spec: ModelSpec, size: int, options: ProgramOptions) -> int:
    """What a proposer needs of the last folded token: its final-normed row and three int64 positions."""
    return spec.text.hidden * size + 3 * INT64_BYTES if options.proposer != "none" else 0


def record_bytes(spec: ModelSpec, size: int, options: ProgramOptions) -> int:
    """What one column of a round leaves behind for its commit."""
    t = spec.text
    heads = t.gdn_value_heads * (t.gdn_key_dim + t.gdn_value_dim + 2) * FLOAT32_BYTES
    return len(spec.gdn_layers) * (spec.conv_channels * size + heads) + last_token_bytes(spec, size, options)


def workspace_bytes(spec: ModelSpec, limits: ProgramLimits, options: ProgramOptions, size: int) -> int:
    """Upper estimate of what a call holds beside the plan: activations, gathered keys, a decoded block, logits."""
    t = spec.text
    columns = max(limits.prefill_chunk, limits.max_rows * limits.max_columns, ROW_TILE)
    attention = 2 * t.n_heads * t.head_dim + 2 * t.n_kv_heads * t.head_dim
    value = t.gdn_value_heads * t.gdn_value_dim
    feed_forward = t.mlp_width or max(t.shared_width, t.experts_per_token * t.expert_width)
    widest = max(2 * attention, 3 * spec.conv_channels + 3 * value, 3 * feed_forward)
    activations = columns * (3 * t.hidden + widest) * FLOAT32_BYTES
    gathered = 2 * t.n_kv_heads * limits.max_context * t.head_dim * FLOAT32_BYTES
    columns_alive = MAX_ROUNDS_IN_FLIGHT * limits.max_rows * limits.max_columns
    records = columns_alive * record_bytes(spec, size, options)
    logits = max(ROW_TILE, limits.logits_rows, limits.max_rows * limits.max_columns) * t.vocab_rows * FLOAT32_BYTES
    # A draft that is accepted by ratio keeps what it was drawn from: int64 ids and float64 probabilities.
    distributions = limits.n_slots * limits.max_drafts * t.vocab_rows * 16 if options.acceptance == "ratio" else 0
    buffers = activations + gathered + records + logits + distributions
    return buffers + (DECODERS + 2) * BLOCK_BYTES + state_bytes(spec, size)
