"""One round of B rows × q columns as a sequence of launches, with fixed addresses: what a graph records.

Rows are resolved on the device (``round_begin``), so the same recording serves every round of its shape. The residual
stream is float32; norms are folded into the matrices: producers of x leave bf16(x · (1 + w)) and parts of Σ x², the
next matrix divides its sums by the rms.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from ninfer_format.errors import UnsupportedError
from ninfer_format.geometry import up
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.draft_pass import DraftPass
from ninfer_runtime.backends.cuda.input_addresses import InputAddresses, gdn_inputs, gdn_weights
from ninfer_runtime.backends.cuda.matrices import SmallMatrices, input_outputs
from ninfer_runtime.backends.cuda.memory import Regions
from ninfer_runtime.backends.cuda.ops import attention_decode, embed, gdn_decode, round_begin
from ninfer_runtime.backends.cuda.ops.attention_decode import AttentionDecode
from ninfer_runtime.backends.cuda.ops.embed import Embed
from ninfer_runtime.backends.cuda.ops.gdn_decode import GdnDecode
from ninfer_runtime.backends.cuda.ops.gdn_state import Carrying, GdnStateLayout
from ninfer_runtime.backends.cuda.ops.linear_small import Output, Residual, RmsScale
from ninfer_runtime.backends.cuda.ops.linear_small_tuning import FOLDER
from ninfer_runtime.backends.cuda.ops.round_begin import RoundBegin
from ninfer_runtime.backends.cuda.ops.sampling import Sampler
from ninfer_runtime.backends.cuda.packing import activation_stride
from ninfer_runtime.backends.cuda.weights import AttentionTensors, GdnTensors
from ninfer_runtime.models.spec import ModelSpec

if TYPE_CHECKING:
    from ninfer_runtime.backends.cuda.cpu_networks import CpuFfn


def specs(regions: Regions, spec: ModelSpec, max_columns: int) -> list[KernelSpec]:
    """Every variant beside the matrices'."""
    return [
        *round_begin.specs(),
        *embed.specs(regions.weights.embedding.format, spec.text.hidden),
        *gdn_decode.specs(regions.gdn),
        *attention_decode.specs(regions.attention, max_columns),
        *regions.sampler_shape.specs(),
        *(regions.sampler_shape.specs(ratio=True) if regions.draft and regions.draft.memory.proposals else ()),
    ]


@dataclass(frozen=True, slots=True)
class EarlyStart:
    """Which launches of a round may begin before those ahead have ended; a choice of ``tuning/``.

    mixer         the recurrence and the attention, whose state and pages do not depend on the launch ahead
    after_mixer   the output product behind them
    """

    mixer: bool = True
    after_mixer: bool = True


def early_start(device: Device) -> EarlyStart:
    """The card's row "round" in its tuning file; all early for cards without one. UnsupportedError for a wrong file."""
    file = FOLDER / f"{device.arch}-{device.n_sms}.json"
    if not file.exists():
        return EarlyStart()
    try:
        return EarlyStart(**json.loads(file.read_text(encoding="utf-8")).get("round", {}))
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"{file.name} is no tuning file of rounds: {error}") from None


class RoundPass:
    """Queues rounds. Made once; ``queue`` allocates nothing and may be captured."""

    def __init__(
        self,
        device: Device,
        regions: Regions,
        spec: ModelSpec,
        small: SmallMatrices,
        n_columns: int,
        drafts: DraftPass | None = None,
        on_cpu: Mapping[int, "CpuFfn"] = MappingProxyType({}),
    ) -> None:
        """``n_columns``: the most columns per row, q. ``drafts``: the layer that reads every round. ``on_cpu``: layers
        whose networks the host computes."""
        self._on_cpu = on_cpu
        self._regions, self._spec, self._small, self._drafts = regions, spec, small, drafts
        embedding = regions.weights.embedding
        held = 0 if regions.draft is None else regions.draft.memory.held
        self._states = GdnStateLayout(regions.gdn)
        self.carrying = Carrying.of(self._states, regions.records, device.n_sms, n_columns)
        self._begin = RoundBegin(device, regions.round_memory, regions.counts, held, self.carrying)
        self._embed = Embed(device, embedding.format, embedding.shape[0], embedding.shape[1], embedding.pointer)
        self._gdn = GdnDecode(device, regions.gdn)
        self._attention: Mapping[int, AttentionDecode] = {
            q: AttentionDecode(device, regions.attention, q) for q in range(1, n_columns + 1)
        }
        proposals = 0 if regions.draft is None else regions.draft.memory.proposals
        self._sampler = Sampler(
            device,
            regions.sampler_shape,
            regions.sampler,
            regions.round_memory,
            regions.counts,
            held=held,
            proposals=proposals,
        )
        self.early = early_start(device)

    def queue(self, stream: Stream, n_rows: int, n_columns: int) -> None:
        """Everything between the packed input and the packed result."""
        r, a, text = self._regions, self._regions.activations, self._spec.text
        t, layers = n_rows * n_columns, self._regions.weights.layers
        self._begin.launch(stream, n_rows, n_columns)
        first_norm = layers[0].input_norm.pointer
        # Later launches read rows and page table before those ahead of them have ended: here all of that is complete.
        self._embed.launch(
            stream, t, r.round_memory.tokens, a.x, norm_weight=first_norm, xn=a.normed, ss=a.ss, pdl=False
        )
        n_parts = 1
        n_attention = n_gdn = 0
        for i, layer in enumerate(layers):
            small = self._small.layers[i]
            outputs = input_outputs(layer.mixer.inputs, a.inputs, t)
            # What the host leaves is copied: only behind a kernel may a launch start early.
            small.inputs.launch(stream, t, a.normed, self._rms(n_parts), outputs, pdl=i - 1 not in self._on_cpu)
            if isinstance(layer.mixer, GdnTensors):
                self._recur(stream, layer.mixer, n_gdn, n_rows, n_columns)
                n_gdn += 1
            else:
                self._attend(stream, layer.mixer, n_attention, n_rows, n_columns)
                n_attention += 1
            following = layers[i + 1].input_norm if i + 1 < len(layers) else r.weights.final_norm
            post_norm = layer.post_attention_norm.pointer
            residual = Residual(a.x, a.ss, a.normed, post_norm)
            small.output.launch(stream, t, a.mixed, residual=residual, pdl=self.early.after_mixer)
            n_parts = small.output.ss_parts
            if (host := self._on_cpu.get(i)) is not None:
                host.launch(stream, t, a)
                n_parts = host.ss_parts
                continue
            residual = Residual(a.x, a.ss, a.normed, following.pointer)
            small.ffn.launch(stream, t, a, self._rms(n_parts), residual)
            n_parts = small.ffn.ss_parts
        logits = Output(a.logits, is_float=True, stride=up(text.vocab_rows, 4))
        pdl = len(layers) - 1 not in self._on_cpu
        self._small.head.launch(stream, t, a.normed, self._rms(n_parts), (logits,), pdl=pdl)
        self._sampler.launch(stream, n_rows, n_columns, a.logits)
        if self._drafts is not None:
            self._drafts.read(stream, n_rows, n_columns)

    def recurrences(self, n_rows: int, n_columns: int) -> list[Callable[[Stream], None]]:
        """The launches of all recurrent layers alone, for measurements: inputs are whatever lies there."""
        mixers = [layer.mixer for layer in self._regions.weights.layers if isinstance(layer.mixer, GdnTensors)]

        def launch(tensors: GdnTensors, index: int) -> Callable[[Stream], None]:
            return lambda stream: self._recur(stream, tensors, index, n_rows, n_columns)

        return [launch(tensors, index) for index, tensors in enumerate(mixers)]

    def _recur(self, stream: Stream, tensors: GdnTensors, layer: int, n_rows: int, n_columns: int) -> None:
        r, a = self._regions, self._regions.activations
        self._gdn.launch(
            stream,
            n_rows=n_rows,
            n_columns=n_columns,
            rows=r.round_memory.rows,
            inputs=gdn_inputs(tensors.inputs, a.inputs, n_rows * n_columns),
            weights=gdn_weights(tensors),
            state=self._states.layer(layer, r.states, r.records),
            out=a.mixed,
            out_stride=activation_stride(tensors.output.k),
            pdl=self.early.mixer,
        )

    def _rms(self, n_parts: int) -> RmsScale:
        return RmsScale(self._regions.activations.ss, n_parts, self._spec.text.hidden, self._spec.norm_eps)

    def _attend(self, stream: Stream, tensors: AttentionTensors, layer: int, n_rows: int, q: int) -> None:
        r, a = self._regions, self._regions.activations
        at = InputAddresses(tensors.inputs, a.inputs, n_rows * q)
        self._attention[q].launch(
            stream,
            n_rows=n_rows,
            rows=r.round_memory.rows,
            page_table=r.round_memory.pages,
            pages_per_row=r.round_memory.layout.pages_per_row,
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
            workspace=r.attention_workspace,
            pdl=self.early.mixer,
        )
