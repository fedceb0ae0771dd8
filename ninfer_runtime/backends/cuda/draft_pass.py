"""The draft layer behind rounds and prompt chunks: it reads what may be folded, then drafts, one token after the other.

Reading belongs to the round: B × (q + 1) columns, of which each row reads what it may fold, and one more where drafts
follow. Drafting is a graph of its own per draft: the first takes its row from what was read, the others a column each.
"""

from collections.abc import Mapping

import numpy as np

from ninfer_format.geometry import up
from ninfer_runtime.backends.base import ProgramLimits
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.draft_memory import DraftRegions, rows_at_once
from ninfer_runtime.backends.cuda.input_addresses import InputAddresses
from ninfer_runtime.backends.cuda.matrices import PromptMatrices, SmallMatrices, input_outputs
from ninfer_runtime.backends.cuda.memory import Regions
from ninfer_runtime.backends.cuda.ops import attention_decode, attention_prefill, draft
from ninfer_runtime.backends.cuda.ops.attention_decode import AttentionDecode
from ninfer_runtime.backends.cuda.ops.attention_prefill import AttentionPrefill
from ninfer_runtime.backends.cuda.ops.draft import DRAFT_STATE, HELD_DRAFTS, DraftBegin, DraftInputs, DraftNorms
from ninfer_runtime.backends.cuda.ops.embed import Embed
from ninfer_runtime.backends.cuda.ops.linear_small import Output, Residual, RmsScale
from ninfer_runtime.backends.cuda.ops.rms_norm import RmsNorm
from ninfer_runtime.backends.cuda.ops.round_state import ROW_STATE, RoundMemory
from ninfer_runtime.backends.cuda.ops.sampling import Sampler
from ninfer_runtime.backends.cuda.packing import activation_stride
from ninfer_runtime.backends.cuda.weights import AttentionTensors, DraftTensors
from ninfer_runtime.models.spec import ModelSpec

FIRST_INDEX = 1
"""The lowest token index that has a column: the first token follows nothing."""
_BF16, _INT, _FLOAT = 2, 4, 4


def specs(regions: Regions, spec: ModelSpec, max_columns: int) -> list[KernelSpec]:
    """Every variant beside the matrices' and those of rounds and prompts; none for programs that do not draft."""
    if regions.draft is None:
        return []
    return [
        *draft.specs(spec.text.hidden, has_own_head=bool(regions.draft.row_of)),
        *attention_decode.specs(regions.attention, max_columns + 1),
        *attention_prefill.specs(regions.attention, lowest=FIRST_INDEX),
        *regions.sampler_shape.specs(drafts=True, ratio=bool(regions.draft.memory.proposals)),
    ]


class DraftPass:
    """Queues the layer. ``read``, ``first`` and ``next`` allocate nothing and may be captured."""

    def __init__(
        self,
        device: Device,
        regions: Regions,
        spec: ModelSpec,
        small: SmallMatrices,
        prompt: PromptMatrices,
        limits: ProgramLimits,
    ) -> None:
        """``prompt`` works on this layer's residual stream."""
        assert regions.draft is not None
        assert regions.weights.draft is not None
        assert small.draft is not None
        self._device, self._regions, self._spec = device, regions, spec
        self._rows_at_once = rows_at_once(limits)
        self._own: DraftRegions = regions.draft
        self._tensors: DraftTensors = regions.weights.draft
        self._block, self._matrices, self._prompt = small.layers[-1], small.draft, prompt
        memory, tensors, embedding = self._own.memory, self._tensors, regions.weights.embedding
        self._begin = DraftBegin(device, memory)
        norms = DraftNorms(
            decoder=regions.weights.final_norm.pointer,
            embedding=tensors.embedding_norm.pointer,
            hidden=tensors.hidden_norm.pointer,
            final=tensors.final_norm.pointer,
        )
        self._inputs = DraftInputs(device, memory, norms, spec.text.hidden, spec.norm_eps)
        self._embed = Embed(device, embedding.format, embedding.shape[0], embedding.shape[1], embedding.pointer)
        self._norm = RmsNorm(device, spec.text.hidden, spec.norm_eps)
        self._attention: Mapping[int, AttentionDecode] = {
            q: AttentionDecode(device, regions.attention, q) for q in range(1, limits.max_columns + 2)
        }
        self._prefill = AttentionPrefill(device, regions.attention, lowest=FIRST_INDEX)
        self._samplers = {
            memory_: Sampler(
                device,
                regions.sampler_shape,
                self._own.sampler,
                memory_,
                regions.counts,
                states=memory.states,
                held=memory.held,
                proposals=memory.proposals,
            )
            for memory_ in (regions.round_memory, regions.prompt_memory)
        }
        self._spread = None
        if self._own.row_of:
            self._spread = draft.DraftSpread(device, self._own.row_of, spec.n_addressable)
        assert isinstance(tensors.layer.mixer, AttentionTensors)
        self._mixer: AttentionTensors = tensors.layer.mixer
        self._planes = regions.kv.planes(regions.kv_pool, len(spec.attention_layers))

    # ---- rounds ------------------------------------------------------------------------------
    def read(self, stream: Stream, n_rows: int, n_columns: int) -> None:
        """Behind the draws of a round: the columns of what each row may fold, and of what it emitted last."""
        r, m, q = self._regions, self._own.memory, n_columns + 1
        self._begin.launch(stream, r.round_memory, n_rows, n_columns)
        # Later launches read rows before those ahead of them have ended: here they are complete.
        self._embed.launch(stream, n_rows * q, m.tokens, m.x, pdl=False)
        self._inputs.launch_round(stream, n_rows, n_columns, rows=r.round_memory.rows, residual=r.activations.x)
        for begin in range(0, n_rows, self._rows_at_once):
            self._columns(stream, begin, min(n_rows - begin, self._rows_at_once), q, r.round_memory)

    def first(self, stream: Stream, n_rows: int, memory: RoundMemory | None = None) -> None:
        """A draft of every row that makes one, from the columns read last. ``memory``: what the rows came with."""
        r, a, own = self._regions, self._regions.activations, self._own
        memory = r.round_memory if memory is None else memory
        self._inputs.launch_hidden(stream, n_rows)
        stride = up(self._spec.text.vocab_rows, 4)
        spread = self._spread
        out = a.logits if spread is None else own.head_logits
        head = Output(out, is_float=True, stride=stride if spread is None else own.head_stride)
        self._matrices.head.launch(stream, n_rows, own.memory.chained, None, (head,))
        if spread is not None:
            spread.launch(stream, n_rows, own.head_logits, own.head_stride, a.logits, stride)
        self._samplers[memory].launch(stream, n_rows, 1, a.logits)

    def next(self, stream: Stream, n_rows: int, memory: RoundMemory | None = None) -> None:
        """The column of every row's last draft, and one more draft."""
        m = self._own.memory
        memory = self._regions.round_memory if memory is None else memory
        self._begin.launch_next(stream, n_rows)
        self._embed.launch(stream, n_rows, m.tokens, m.x, pdl=False)
        self._inputs.launch_chain(stream, n_rows)
        self._columns(stream, 0, n_rows, 1, memory)
        self.first(stream, n_rows, memory)

    def _columns(self, stream: Stream, begin: int, n_rows: int, q: int, memory: RoundMemory) -> None:
        """``inputs`` of n_rows · q columns, those of rows ``begin`` and on, through the block."""
        r, a, m, t = self._regions, self._regions.activations, self._own.memory, n_rows * q
        hidden, pages_per_row = self._spec.text.hidden, r.round_memory.layout.pages_per_row
        x = m.x + begin * q * hidden * _FLOAT
        inputs = m.inputs + begin * q * draft.input_stride(hidden) * _BF16
        page_table = memory.pages + begin * pages_per_row * _INT if memory is r.round_memory else r.prompt.pages
        layer, block = self._tensors.layer, self._block
        projection = self._matrices.input_projection
        residual = Residual(x, a.ss, a.normed, layer.input_norm.pointer)
        projection.launch(stream, t, inputs, residual=residual)
        mixer = self._mixer
        block.inputs.launch(
            stream, t, a.normed, self._rms(projection.ss_parts), input_outputs(mixer.inputs, a.inputs, t)
        )
        at = InputAddresses(mixer.inputs, a.inputs, t)
        self._attention[q].launch(
            stream,
            n_rows=n_rows,
            rows=m.rows + begin * ROW_STATE.itemsize,
            page_table=page_table,
            pages_per_row=pages_per_row,
            qk=at.at("query"),
            qk_stride=at.stride("query"),
            gv=at.at("gate"),
            gv_stride=at.stride("gate"),
            q_norm=mixer.query_norm.pointer,
            k_norm=mixer.key_norm.pointer,
            rope=r.rope,
            planes=self._planes,
            out=a.mixed,
            out_stride=activation_stride(mixer.output.k),
            workspace=r.attention_workspace,
            lowest=FIRST_INDEX,
        )
        residual = Residual(x, a.ss, a.normed, layer.post_attention_norm.pointer)
        block.output.launch(stream, t, a.mixed, residual=residual)
        block.ffn.launch(stream, t, a, self._rms(block.output.ss_parts), Residual(x, a.ss))

    def _rms(self, n_parts: int) -> RmsScale:
        return RmsScale(self._regions.activations.ss, n_parts, self._spec.text.hidden, self._spec.norm_eps)

    # ---- prompts -----------------------------------------------------------------------------
    def keep_embeddings(self, stream: Stream, n_tokens: int) -> None:
        """Called between the embedding of a chunk and its first block."""
        n_bytes = n_tokens * self._spec.text.hidden * _FLOAT
        self._device.copy(self._own.memory.x, self._regions.activations.x, n_bytes, stream)

    def read_chunk(self, stream: Stream, slot: int, start: int, n_tokens: int, *, with_drawn: bool) -> None:
        """Behind a chunk: the columns of its tokens, and with ``with_drawn`` that of ``PromptInputs.tokens[n_tokens]``.

        ``PromptInputs.positions`` int32 [3][columns] holds those of the tokens before. The slot's hidden row becomes
        that of the chunk's last token.
        """
        r, a, m = self._regions, self._regions.activations, self._own.memory
        hidden, n_read = self._spec.text.hidden, n_tokens + with_drawn
        if with_drawn:
            x = m.x + n_tokens * hidden * _FLOAT
            self._embed.launch(stream, 1, r.prompt.tokens + 4 * n_tokens, x)
        self._inputs.launch_prompt(stream, slot, n_tokens, n_read, residual=a.x)
        self._device.copy(m.hidden + slot * self._own.hidden_bytes, m.last, self._own.hidden_bytes, stream)
        layer, tensors, mixer = len(r.weights.layers), self._tensors, self._mixer
        self._prompt.project(stream, n_read, m.inputs)
        self._norm.launch(stream, n_read, m.x, tensors.layer.input_norm.pointer, a.normed)
        self._prompt.inputs(stream, layer, n_read)
        at = InputAddresses(mixer.inputs, a.inputs, n_read)
        self._prefill.launch(
            stream,
            n_tokens=n_read,
            start=start,
            positions=r.prompt.positions,
            pages=r.prompt.pages,
            qk=at.at("query"),
            qk_stride=at.stride("query"),
            gv=at.at("gate"),
            gv_stride=at.stride("gate"),
            q_norm=mixer.query_norm.pointer,
            k_norm=mixer.key_norm.pointer,
            rope=r.rope,
            planes=self._planes,
            out=a.mixed,
            out_stride=activation_stride(mixer.output.k),
            workspace=r.attention_prefill_workspace,
        )
        self._prompt.output(stream, layer, n_read)
        self._norm.launch(stream, n_read, m.x, tensors.layer.post_attention_norm.pointer, a.normed)
        self._prompt.ffn(stream, layer, n_read)

    def prompt_states(
        self, slot: int, start: int, n_tokens: int, anchor: int, position: int, n_drafts: int
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.void]], ...]:
        """(DRAFT_STATE, ROW_STATE, HELD_DRAFTS) to send before drafts are made behind a chunk.

        The column of the drawn token ``anchor`` is the last of those read; ``position`` is the largest rotary one of
        the token before it.
        """
        index = start + n_tokens
        state, row, held = np.zeros(1, DRAFT_STATE), np.zeros(1, ROW_STATE), np.zeros(1, HELD_DRAFTS)
        state["slot"], state["n_wanted"], state["next_index"] = slot, n_drafts, index + 1
        state["is_active"], state["column"] = 1, n_tokens
        row["slot"], row["rope_delta"] = slot, position - index
        held["index"], held["anchor"] = index, anchor
        return state, row, held

    # ---- slots -------------------------------------------------------------------------------
    def fold(self, stream: Stream, entries: int, n_entries: int) -> None:
        """Hidden rows of pending records into their slots."""
        self._inputs.launch_fold(stream, entries, n_entries)
