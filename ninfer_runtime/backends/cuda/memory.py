"""Everything a program holds on the device, laid out once: to know its size, and again to get the addresses.

``lay_out`` takes the same regions in the same order from an ``ArenaPlan`` and from an ``Arena``. Nothing is allocated
after that.
"""

from dataclasses import dataclass

from ninfer_format.geometry import up
from ninfer_runtime.backends.base import MemoryPlan, ProgramLimits, ProgramOptions
from ninfer_runtime.backends.checks import check_proposer, require
from ninfer_runtime.backends.cuda.arena import ArenaPlan, Taker
from ninfer_runtime.backends.cuda.device import Device
from ninfer_runtime.backends.cuda.draft_memory import DraftRegions, lay_out_drafts, rows_at_once
from ninfer_runtime.backends.cuda.ops import (
    attention_decode,
    attention_prefill,
    gdn_prefill,
    linear_large,
    linear_small,
)
from ninfer_runtime.backends.cuda.ops.attention import AttentionGeometry, attention_geometry
from ninfer_runtime.backends.cuda.ops.gdn_state import GdnGeometry, GdnStateLayout, gdn_geometry
from ninfer_runtime.backends.cuda.ops.kv_cache import KvLayout, kv_format
from ninfer_runtime.backends.cuda.ops.moe_prefill import PromptExperts
from ninfer_runtime.backends.cuda.ops.moe_round import RoundExperts
from ninfer_runtime.backends.cuda.ops.round_begin import CountsMemory
from ninfer_runtime.backends.cuda.ops.round_state import MAX_COLUMNS, MAX_ROWS, RoundLayout, RoundMemory
from ninfer_runtime.backends.cuda.ops.sampling import SamplerMemory, SamplerShape
from ninfer_runtime.backends.cuda.packing import TILE_ROWS, activation_stride
from ninfer_runtime.backends.cuda.prompt_products import PromptRows, prompt_rows, quantized_row_bytes
from ninfer_runtime.backends.cuda.weights import DeviceWeights, InputMatrices, MoeTensors, plan_weights
from ninfer_runtime.models.binder import BoundModel

HEAD_ROWS = 64
"""Rows of logits that a prompt call evaluates at a time, when it returns more than a round has columns."""
_TOKEN_TILE = 8
_GRAPH_BYTES, _DRAFT_GRAPH_BYTES = 12 << 20, 82 << 20
_DRAFT_GRAPH_CONTEXT = 4096
_BF16, _FLOAT = 2, 4


@dataclass(frozen=True, slots=True)
class Activations:
    """Working memory of one call over T tokens; calls follow each other on one stream and share it.

    x        float32 [T][hidden], the residual stream
    normed   bf16 [T][stride], x scaled for the next matrix: divided by its rms in prompts, not yet in rounds
    ss       float32 [parts][T], parts of the sums of x²
    inputs   what the mixer's input matrices give: bf16 (a, b: float32) [T][rows], one after the other
    mixed    bf16 [T][stride], what the mixer's output matrix takes
    ffn      bf16 [T][stride of the ffn width], or quantized rows
    logits   float32 [rows][stride]
    """

    x: int
    normed: int
    ss: int
    inputs: int
    mixed: int
    ffn: int
    logits: int


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """What the host sends with a chunk: ids, rotary positions int32 [3][T], pages, rows that replace embeddings."""

    tokens: int
    positions: int
    pages: int
    own_index: int
    own_rows: int


@dataclass(frozen=True, slots=True)
class Regions:
    """Addresses and layouts of one program."""

    weights: DeviceWeights
    host_embedding: bool
    gdn: GdnGeometry
    attention: AttentionGeometry
    kv: KvLayout
    kv_pool: int
    states: int
    records: int
    snapshots: int
    counts: CountsMemory
    rope: int
    activations: Activations
    experts: RoundExperts | None
    prompt_experts: PromptExperts | None
    prompt: PromptInputs
    round_memory: RoundMemory
    prompt_memory: RoundMemory
    sampler_shape: SamplerShape
    sampler: SamplerMemory
    prompt_sampler: SamplerMemory
    fold_entries: int
    page_pairs: int
    attention_workspace: int
    attention_prefill_workspace: int
    gdn_prefill_workspace: int
    draft: DraftRegions | None
    prompt_rows: PromptRows
    quantized: int
    linear_large_workspace: int
    linear_small_workspace: linear_small.Workspace
    work_begin: int
    work_end: int


def round_columns(limits: ProgramLimits) -> int:
    """Most columns at once in a round, in whole tiles of eight: what its matrices are compiled for. A draft layer reads
    one more of every row."""
    n_read = rows_at_once(limits) * (limits.max_columns + 1) if limits.max_drafts else 0
    return up(max(limits.max_rows * limits.max_columns, n_read), _TOKEN_TILE)


def prompt_tokens(limits: ProgramLimits) -> int:
    """Most columns of a chunk; a draft layer reads the drawn token too."""
    return limits.prefill_chunk + bool(limits.max_drafts)


def head_rows(limits: ProgramLimits) -> int:
    """Rows of logits that exist at once."""
    return max(round_columns(limits), HEAD_ROWS if limits.logits_rows > round_columns(limits) else 1)


def output_widths(inputs: InputMatrices) -> tuple[tuple[int, bool], ...]:
    """(columns, whether float32) of what each input matrix gives; the gates' projections stay unrounded."""
    floats = {inputs.at(part).matrix for part in ("a", "b") if part in inputs.parts}
    return tuple((matrix.n_outputs, i in floats) for i, matrix in enumerate(inputs.matrices))


def input_offsets(inputs: InputMatrices, n_tokens: int) -> tuple[int, ...]:
    """Byte offset of each input matrix's result in ``Activations.inputs``, and their end."""
    offsets = [0]
    for width, is_float in output_widths(inputs):
        offsets.append(up(offsets[-1] + n_tokens * width * (_FLOAT if is_float else _BF16), 256))
    return tuple(offsets)


def lay_out(
    model: BoundModel,
    limits: ProgramLimits,
    options: ProgramOptions,
    device: Device,
    taker: Taker,
    host: Taker | None = None,
) -> Regions:
    """Take every region, those in host memory from ``host``. UnsupportedError for models and options that have no
    kernels."""
    require(limits.max_rows <= MAX_ROWS, f"max_rows is {limits.max_rows}, the cuda backend has {MAX_ROWS}")
    require(
        limits.max_columns <= MAX_COLUMNS, f"max_columns is {limits.max_columns}, the cuda backend has {MAX_COLUMNS}"
    )
    spec, text = model.spec, model.spec.text
    kv_storage = kv_format("bf16" if options.kv_dtype == "auto" else options.kv_dtype)
    gdn = gdn_geometry(text, spec.norm_eps)
    attention = attention_geometry(spec, kv_storage, rotation=options.kv_rotation)
    check_proposer(model, limits, options)
    drafts = options.proposer != "none"
    weights = plan_weights(
        model, taker, drafts=drafts, draft_head=options.draft_head, residency=options.residency, host=host
    )
    states, prompts = GdnStateLayout(gdn), prompt_rows(options, device.arch)
    kv = KvLayout(len(spec.attention_layers) + drafts, text.n_kv_heads, limits.n_pages, kv_storage)
    chunk = prompt_tokens(limits)
    n_tokens = max(chunk, round_columns(limits))
    hidden_tiles = -(-text.hidden // TILE_ROWS)
    inputs_bytes = max(input_offsets(layer.mixer.inputs, n_tokens)[-1] for layer in weights.blocks)
    mixed_width = max(activation_stride(layer.mixer.output.k) for layer in weights.blocks)
    experts = next((layer.ffn for layer in weights.blocks if isinstance(layer.ffn, MoeTensors)), None)
    ffn_width = max(activation_stride(layer.ffn.matrices[-1].k) for layer in weights.blocks)
    logits_stride = up(text.vocab_rows, 4)
    layout = RoundLayout(limits.pages_per_row, text.vocab_rows, spec.n_addressable, limits.max_rows, limits.max_columns)
    prompt_layout = RoundLayout(limits.pages_per_row, text.vocab_rows, spec.n_addressable, 1, 1)
    shape = SamplerShape(spec.n_addressable, logits_stride)
    take, ratio = taker.take, options.acceptance == "ratio"
    work_begin = take("workspace", 0)
    activations = Activations(
        x=take("workspace/x", n_tokens * text.hidden * _FLOAT),
        normed=take("workspace/normed", n_tokens * activation_stride(text.hidden) * _BF16),
        ss=take("workspace/ss", hidden_tiles * round_columns(limits) * _FLOAT),
        inputs=take("workspace/inputs", inputs_bytes),
        mixed=take("workspace/mixed", n_tokens * mixed_width * _BF16),
        ffn=take("workspace/ffn", n_tokens * ffn_width * _BF16),
        logits=take("workspace/logits", head_rows(limits) * logits_stride * _FLOAT),
    )
    prompt = PromptInputs(
        tokens=take("workspace/tokens", 4 * chunk),
        positions=take("workspace/positions", 12 * chunk),
        pages=take("workspace/pages", 4 * limits.pages_per_row),
        own_index=take("workspace/own_index", 4 * chunk),
        own_rows=take("workspace/own_rows", n_tokens * text.hidden * _FLOAT),
    )
    attention_bytes = attention_decode.workspace_bytes(
        attention, device.n_sms, limits.max_rows, limits.max_columns + drafts
    )
    return Regions(
        weights=weights,
        host_embedding=options.residency.host_embedding,
        gdn=gdn,
        attention=attention,
        kv=kv,
        states=take("state/gdn", limits.n_slots * states.state_bytes_per_slot),
        records=take("state/records", limits.n_slots * states.record_bytes_per_slot),
        counts=CountsMemory.take(taker, limits.n_slots, text.vocab_rows),
        kv_pool=take("kv/pool", kv.n_bytes),
        snapshots=take("snapshots/device", limits.device_snapshots * states.state_bytes_per_slot),
        rope=take("workspace/rope", 4 * spec.rotary_dim),
        activations=activations,
        experts=None
        if experts is None
        else RoundExperts.take(taker, experts, round_columns(limits), len(weights.blocks)),
        prompt_experts=None if experts is None else PromptExperts.take(taker, experts, n_tokens),
        prompt=prompt,
        round_memory=RoundMemory.take(taker, "workspace/round", layout),
        prompt_memory=RoundMemory.take(taker, "workspace/prompt", prompt_layout),
        sampler_shape=shape,
        sampler=SamplerMemory.take(taker, "workspace/round", shape, limits.max_rows * limits.max_columns),
        prompt_sampler=SamplerMemory.take(taker, "workspace/prompt", shape, 1),
        fold_entries=take("workspace/fold_entries", 16 * limits.n_slots),
        page_pairs=take("workspace/page_pairs", 8 * limits.n_pages),
        attention_workspace=take("workspace/attention", attention_bytes),
        attention_prefill_workspace=take(
            "workspace/attention_prefill",
            attention_prefill.workspace_bytes(attention, device.n_sms, chunk),
        ),
        gdn_prefill_workspace=take("workspace/gdn_prefill", gdn_prefill.workspace_bytes(gdn, limits.prefill_chunk)),
        draft=None
        if weights.draft is None
        else lay_out_drafts(taker, limits, text.hidden, n_tokens, shape, weights.draft.head, ratio=ratio),
        prompt_rows=prompts,
        quantized=take("workspace/quantized", n_tokens * quantized_row_bytes(weights, prompts)),
        linear_large_workspace=take("workspace/linear_large", linear_large.workspace_bytes(device)),
        linear_small_workspace=linear_small.Workspace(
            taker, linear_small.workspace_bytes(device, round_columns(limits))
        ),
        work_begin=work_begin,
        work_end=take("workspace", 0),
    )


def graph_allowance(limits: ProgramLimits) -> int:
    """Bytes reserved for the driver's copies of the recorded rounds: so much for every number of rows.

    The allowances are those published for the engine whose rounds these are; ``GraphBook.n_bytes`` is what ours took.
    """
    drafts = limits.max_columns > 1 and limits.max_context > _DRAFT_GRAPH_CONTEXT
    return limits.max_rows * (_DRAFT_GRAPH_BYTES if drafts else _GRAPH_BYTES)


def snapshot_bytes(regions: Regions) -> int:
    """One saved state."""
    state = GdnStateLayout(regions.gdn).state_bytes_per_slot
    return state + (regions.draft.hidden_bytes if regions.draft is not None else 0)


def memory_plan(
    limits: ProgramLimits, options: ProgramOptions, arena: ArenaPlan, state_bytes: int, host_bytes: int = 0
) -> MemoryPlan:
    """The sums of a layout; ``state_bytes`` of one snapshot in host memory, ``host_bytes`` of weights there."""
    groups = dict(arena.rows())
    known = ("weights", "state", "kv", "snapshots")
    rest = arena.n_bytes - sum(groups.get(name, 0) for name in known)
    return MemoryPlan(
        limits=limits,
        options=options,
        weight_bytes=groups.get("weights", 0),
        state_bytes=groups.get("state", 0),
        kv_bytes=groups.get("kv", 0),
        workspace_bytes=rest,
        device_snapshot_bytes=groups.get("snapshots", 0),
        host_snapshot_bytes=limits.host_snapshots * state_bytes,
        graph_bytes=graph_allowance(limits),
        host_weight_bytes=host_bytes,
    )
