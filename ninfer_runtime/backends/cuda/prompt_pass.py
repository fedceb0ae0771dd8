"""A chunk of prompt tokens of one slot through the layers, its state and pages updated in place."""

from collections.abc import Sequence

import numpy as np

from ninfer_format.geometry import up
from ninfer_runtime.backends.base import Int32s, PrefillChunk
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.draft_pass import DraftPass
from ninfer_runtime.backends.cuda.input_addresses import InputAddresses, gdn_inputs, gdn_weights
from ninfer_runtime.backends.cuda.matrices import PromptMatrices
from ninfer_runtime.backends.cuda.memory import Regions
from ninfer_runtime.backends.cuda.ops import attention_prefill, copy_pages, gdn_prefill, rms_norm
from ninfer_runtime.backends.cuda.ops.attention_prefill import AttentionPrefill
from ninfer_runtime.backends.cuda.ops.embed import Embed
from ninfer_runtime.backends.cuda.ops.gdn_prefill import GdnPrefill
from ninfer_runtime.backends.cuda.ops.gdn_state import GdnStateLayout
from ninfer_runtime.backends.cuda.ops.rms_norm import RmsNorm
from ninfer_runtime.backends.cuda.packing import activation_stride
from ninfer_runtime.backends.cuda.weights import AttentionTensors, DeviceWeights, GdnTensors
from ninfer_runtime.models.spec import ModelSpec

_FLOAT = 4


def specs(regions: Regions, spec: ModelSpec) -> list[KernelSpec]:
    """Every variant beside the matrices'."""
    return [
        *attention_prefill.specs(regions.attention),
        *gdn_prefill.specs(regions.gdn),
        *rms_norm.specs(spec.text.hidden),
        *copy_pages.specs(),
    ]


def ordinals(weights: DeviceWeights) -> tuple[int, ...]:
    """For each layer how many of its kind come before it: its place among recurrent states, or among KV planes."""
    kinds = [type(layer.mixer) for layer in weights.layers]
    return tuple(kinds[:i].count(kind) for i, kind in enumerate(kinds))


def positions_of(chunk: PrefillChunk) -> Int32s:
    """int32 [3, T] rotary positions of a chunk's tokens."""
    if chunk.positions is not None:
        return chunk.positions
    index = np.arange(chunk.start, chunk.start + len(chunk.token_ids), dtype=np.int32)
    return np.tile(index, (3, 1))


class PromptPass:
    """Queues prompt chunks whose ids, positions and pages lie in ``Regions.prompt``."""

    def __init__(
        self,
        device: Device,
        regions: Regions,
        spec: ModelSpec,
        matrices: PromptMatrices,
        drafts: DraftPass | None = None,
    ) -> None:
        self._regions, self._spec, self._matrices, self._drafts = regions, spec, matrices, drafts
        embedding = regions.weights.embedding
        self._embed = Embed(device, embedding.format, embedding.shape[0], embedding.shape[1], embedding.pointer)
        self._norm = RmsNorm(device, spec.text.hidden, spec.norm_eps)
        self._hidden = RmsNorm(device, spec.text.hidden, spec.norm_eps, "rounded")
        self._attention = AttentionPrefill(device, regions.attention)
        self._gdn = GdnPrefill(device, regions.gdn)
        self._states = GdnStateLayout(regions.gdn)
        self._ordinals = ordinals(regions.weights)

    def queue(self, stream: Stream, slot: int, start: int, n_tokens: int, *, has_own_rows: bool) -> None:
        """All layers; afterwards ``x`` holds the residual stream of every token."""
        r, a = self._regions, self._regions.activations
        own_index, own_rows = (r.prompt.own_index, r.prompt.own_rows) if has_own_rows else (0, 0)
        self._embed.launch(stream, n_tokens, r.prompt.tokens, a.x, own_index=own_index, own_rows=own_rows)
        if self._drafts is not None:
            self._drafts.keep_embeddings(stream, n_tokens)
        for layer in range(len(r.weights.layers)):
            self.layer(stream, layer, slot, start, n_tokens)

    def layer(self, stream: Stream, layer: int, slot: int, start: int, n_tokens: int) -> None:
        """One decoder block: ``x`` in place."""
        r, a = self._regions, self._regions.activations
        tensors = r.weights.layers[layer]
        self._matrices.norm(stream, layer, "mixer", n_tokens, self._norm, tensors.input_norm.pointer)
        self._matrices.inputs(stream, layer, n_tokens)
        if isinstance(tensors.mixer, GdnTensors):
            self._gdn.launch(
                stream,
                n_tokens=n_tokens,
                slot=slot,
                inputs=gdn_inputs(tensors.mixer.inputs, a.inputs, n_tokens),
                weights=gdn_weights(tensors.mixer),
                state=self._states.layer(self._ordinals[layer], r.states, r.records),
                out=a.mixed,
                out_stride=activation_stride(tensors.mixer.output.k),
                workspace=r.gdn_prefill_workspace,
            )
        else:
            self._attend(stream, tensors.mixer, self._ordinals[layer], start, n_tokens)
        self._matrices.output(stream, layer, n_tokens)
        self._matrices.norm(stream, layer, "ffn", n_tokens, self._norm, tensors.post_attention_norm.pointer)
        self._matrices.ffn(stream, layer, n_tokens)

    def logits(self, stream: Stream, tokens: Sequence[int]) -> None:
        """Logits of consecutive tokens of the last chunk: rows 0.. of ``logits``."""
        r, a, text = self._regions, self._regions.activations, self._spec.text
        x = a.x + _FLOAT * text.hidden * tokens[0]
        self._norm.launch(stream, len(tokens), x, r.weights.final_norm.pointer, a.normed)
        self._matrices.head(stream, len(tokens), a.normed, up(text.vocab_rows, 4))

    def hidden(self, stream: Stream, n_tokens: int, out: int) -> None:
        """float32 [n_tokens][hidden] at ``out``: hidden rows after the final norm, with values of bfloat16."""
        self._hidden.launch(
            stream, n_tokens, self._regions.activations.x, self._regions.weights.final_norm.pointer, out
        )

    def _attend(self, stream: Stream, tensors: AttentionTensors, layer: int, start: int, n_tokens: int) -> None:
        r, a = self._regions, self._regions.activations
        at = InputAddresses(tensors.inputs, a.inputs, n_tokens)
        self._attention.launch(
            stream,
            n_tokens=n_tokens,
            start=start,
            positions=r.prompt.positions,
            pages=r.prompt.pages,
            qk=at.at("query"),
            qk_stride=at.stride("query"),
            gv=at.at("gate"),
            gv_stride=at.stride("gate"),
            q_norm=tensors.query_norm.pointer,
            k_norm=tensors.key_norm.pointer,
            rope=r.rope,
            planes=r.kv.planes(r.kv_pool, layer),
            out=a.mixed,
            out_stride=activation_stride(tensors.output.k),
            workspace=r.attention_prefill_workspace,
        )
