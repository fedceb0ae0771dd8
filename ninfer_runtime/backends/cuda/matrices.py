"""The matrix launches of a model, each in two forms over the same packed weights: rounds, and prompt chunks.

Small forms take up to the columns of a round and can divide by the rms on the way; large forms take a whole chunk of
rows that are normed already. Prompt chunks no longer than a round use the small forms too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from ninfer_runtime.backends.cuda.arena import Taker
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.memory import Activations, Regions, input_offsets, output_widths
from ninfer_runtime.backends.cuda.ops import linear_large, linear_small, moe_prefill
from ninfer_runtime.backends.cuda.ops.linear_large import Epilogue
from ninfer_runtime.backends.cuda.ops.linear_small import LinearSmall, Residual, RmsScale
from ninfer_runtime.backends.cuda.ops.moe_prefill import MoePrefill
from ninfer_runtime.backends.cuda.ops.moe_round import MoeSmall
from ninfer_runtime.backends.cuda.ops.rms_norm import RmsNorm
from ninfer_runtime.backends.cuda.packing import PackedMatrix, activation_stride
from ninfer_runtime.backends.cuda.prompt_products import (
    PromptProduct,
    Quantizing,
    fuses_quantization,
    quantizing_specs,
    specs,
)
from ninfer_runtime.backends.cuda.ring import DOWN, GATE_UP, RESIDENT, NetworkUse
from ninfer_runtime.backends.cuda.weights import InputMatrices, LayerTensors, MlpTensors, MoeTensors

Half = Literal["mixer", "ffn"]
"""Of a decoder block."""


@dataclass(frozen=True, slots=True)
class MlpSmall:
    """A dense feed-forward network in rounds: two launches."""

    gate_up: LinearSmall
    down: LinearSmall
    use: NetworkUse = RESIDENT

    @property
    def specs(self) -> list[KernelSpec]:
        """Its kernel variants."""
        return [*self.gate_up.specs, *self.down.specs]

    @property
    def ss_parts(self) -> int:
        """Parts of Σ x² that it leaves per column."""
        return self.down.ss_parts

    def prepare(self) -> None:
        """Before the first launch."""
        self.gate_up.prepare()
        self.down.prepare()

    def launch(self, stream: Stream, n_columns: int, a: Activations, rstd: RmsScale | None, residual: Residual) -> None:
        """``a.normed`` → ``residual``; its inner columns go through ``a.ffn``."""
        ffn = linear_small.Output(a.ffn, stride=activation_stride(self.down.matrices[0].k))
        with self.use.half(stream, GATE_UP) as pdl:
            self.gate_up.launch(stream, n_columns, a.normed, rstd, (ffn,), pdl=pdl)
        with self.use.half(stream, DOWN) as pdl:
            self.down.launch(stream, n_columns, a.ffn, residual=residual, pdl=pdl)


@dataclass(frozen=True, slots=True)
class MoeRound:
    """A mixture of experts in rounds: three launches."""

    experts: MoeSmall

    @property
    def specs(self) -> list[KernelSpec]:
        """Its kernel variants."""
        return self.experts.specs

    @property
    def ss_parts(self) -> int:
        """Parts of Σ x² that it leaves per column."""
        return self.experts.ss_parts

    def prepare(self) -> None:
        """Before the first launch."""
        self.experts.prepare()

    def launch(self, stream: Stream, n_columns: int, a: Activations, rstd: RmsScale | None, residual: Residual) -> None:
        """``a.normed`` → ``residual``."""
        self.experts.launch(stream, n_columns, a.normed, rstd, residual)


@dataclass(frozen=True, slots=True)
class LayerSmall:
    """A layer's launches in rounds."""

    inputs: LinearSmall
    output: LinearSmall
    ffn: MlpSmall | MoeRound

    @property
    def parts(self) -> tuple[LinearSmall | MlpSmall | MoeRound, ...]:
        """In launch order."""
        return (self.inputs, self.output, self.ffn)


@dataclass(frozen=True, slots=True)
class DraftSmall:
    """The draft layer's launches beside its block's."""

    input_projection: LinearSmall
    head: LinearSmall


class SmallMatrices:
    """Small forms of every launch; ``layers`` are the decoder's, then the draft layer's block.

    Only tables are taken from ``taker``; ``prepare`` uploads them and loads kernels.
    """

    def __init__(
        self,
        device: Device,
        taker: Taker,
        regions: Regions,
        max_columns: int,
        uses: Mapping[int, NetworkUse] = MappingProxyType({}),
    ) -> None:
        """``uses``: of layers whose networks are not resident."""

        def small(matrices: tuple[PackedMatrix, ...], epilogue: linear_small.Epilogue) -> LinearSmall:
            return LinearSmall(device, taker, matrices, epilogue, max_columns, regions.linear_small_workspace)

        def ffn(layer: int, of: MlpTensors | MoeTensors, use: NetworkUse) -> MlpSmall | MoeRound:
            if isinstance(of, MoeTensors):
                assert regions.experts is not None
                return MoeRound(MoeSmall(device, of, regions.experts.of_layer(layer), max_columns))
            return MlpSmall(small((of.gate_up,), "swiglu"), small((of.down,), "residual"), use)

        self.layers = [
            LayerSmall(
                inputs=small(layer.mixer.inputs.matrices, "store"),
                output=small((layer.mixer.output,), "residual"),
                ffn=ffn(i, layer.ffn, uses.get(i, RESIDENT)),
            )
            for i, layer in enumerate(regions.weights.blocks)
        ]
        self.head = small((regions.weights.head,), "store")
        self.draft = None
        if (draft := regions.weights.draft) is not None:
            projection = small((draft.input_projection,), "residual")
            self.draft = DraftSmall(projection, self.head if draft.head is None else small((draft.head,), "store"))

    @property
    def launches(self) -> list[LinearSmall | MlpSmall | MoeRound]:
        """All of them."""
        each = [launch for layer in self.layers for launch in layer.parts]
        own = [] if self.draft is None else [self.draft.input_projection, self.draft.head]
        return list(dict.fromkeys([*each, self.head, *own]))

    @property
    def specs(self) -> list[KernelSpec]:
        """Every kernel variant, once."""
        return list(dict.fromkeys(spec for launch in self.launches for spec in launch.specs))

    def prepare(self) -> None:
        """Before the first launch."""
        for launch in self.launches:
            launch.prepare()


@dataclass(frozen=True, slots=True)
class MlpLarge:
    """A dense feed-forward network in prompt chunks."""

    gate_up: PromptProduct
    down: PromptProduct


@dataclass(frozen=True, slots=True)
class LayerLarge:
    """A layer's launches in prompt chunks."""

    inputs: PromptProduct
    output: PromptProduct
    ffn: MlpLarge | MoePrefill


class LargeMatrices:
    """Large forms of every launch, and what quantizes their rows."""

    def __init__(self, device: Device, regions: Regions, eps: float, max_tokens: int, head_rows: int) -> None:
        workspace, rows = regions.linear_large_workspace, regions.prompt_rows

        def large(
            matrices: tuple[PackedMatrix, ...],
            epilogue: Epilogue,
            n: int = max_tokens,
            out_divisor: float | None = None,
        ) -> PromptProduct:
            return PromptProduct(
                device,
                matrices,
                epilogue,
                max_tokens=n,
                workspace=workspace,
                rows=rows,
                out_divisor=out_divisor,
            )

        def ffn(of: MlpTensors | MoeTensors) -> MlpLarge | MoePrefill:
            if isinstance(of, MoeTensors):
                assert regions.prompt_experts is not None
                return MoePrefill(device, of, regions.prompt_experts, max_tokens=max_tokens)
            out_divisor = fuses_quantization(of.gate_up, of.down, rows)
            gate_up = large((of.gate_up,), Epilogue.SWIGLU, out_divisor=out_divisor)
            return MlpLarge(gate_up, large((of.down,), Epilogue.RESIDUAL))

        self.layers = [
            LayerLarge(
                inputs=large(layer.mixer.inputs.matrices, Epilogue.STORE),
                output=large((layer.mixer.output,), Epilogue.RESIDUAL),
                ffn=ffn(layer.ffn),
            )
            for layer in regions.weights.blocks
        ]
        self.quantizing = Quantizing(device, regions.weights, eps, rows)
        draft = regions.weights.draft
        self.input_projection = None if draft is None else large((draft.input_projection,), Epilogue.RESIDUAL)
        self.head = large((regions.weights.head,), Epilogue.STORE, head_rows)


def large_specs(regions: Regions) -> list[KernelSpec]:
    """Every variant that ``LargeMatrices`` may launch, once."""
    out: dict[KernelSpec, None] = {}
    rows = regions.prompt_rows
    for layer in regions.weights.blocks:
        launches = [(layer.mixer.inputs.matrices, Epilogue.STORE), ((layer.mixer.output,), Epilogue.RESIDUAL)]
        if isinstance(layer.ffn, MlpTensors):
            out_divisor = fuses_quantization(layer.ffn.gate_up, layer.ffn.down, rows)
            out.update(dict.fromkeys(specs((layer.ffn.gate_up,), Epilogue.SWIGLU, rows, out_divisor)))
            launches.append(((layer.ffn.down,), Epilogue.RESIDUAL))
        else:
            out.update(dict.fromkeys(moe_prefill.specs(layer.ffn)))
        for matrices, epilogue in launches:
            out.update(dict.fromkeys(specs(matrices, epilogue, rows)))
    out.update(dict.fromkeys(specs((regions.weights.head,), Epilogue.STORE, rows)))
    if (draft := regions.weights.draft) is not None:
        out.update(dict.fromkeys(specs((draft.input_projection,), Epilogue.RESIDUAL, rows)))
    out.update(dict.fromkeys(quantizing_specs(regions.weights, rows)))
    return list(out)


class PromptMatrices:
    """A chunk of ``n_tokens`` normed rows through a layer's launches; ``n_tokens`` chooses the form."""

    def __init__(
        self,
        regions: Regions,
        small: SmallMatrices,
        large: LargeMatrices,
        max_columns: int,
        x: int | None = None,
    ) -> None:
        """``x``: another residual stream than the decoder's."""
        self._small, self._large, self._max_columns = small, large, max_columns
        self._activations: Activations = replace(regions.activations, x=regions.activations.x if x is None else x)
        self._layers: tuple[LayerTensors, ...] = regions.weights.blocks
        self._quantized = regions.quantized

    def norm(self, stream: Stream, layer: int, half: Half, n_tokens: int, plain: RmsNorm, weight: int) -> None:
        """``x`` → ``normed`` in front of a half of a layer, and to quantized rows where its matrices take those."""
        a, of = self._activations, self._large.layers[layer]
        first = of.inputs if half == "mixer" else of.ffn.gate_up if isinstance(of.ffn, MlpLarge) else None
        if n_tokens <= self._max_columns or first is None or first.form is None:
            plain.launch(stream, n_tokens, a.x, weight, a.normed)
            return
        self._large.quantizing.norm(stream, n_tokens, a.x, weight, first, self._quantized, a.normed)

    def inputs(self, stream: Stream, layer: int, n_tokens: int) -> None:
        """``normed`` → ``inputs``."""
        a, of = self._activations, self._layers[layer].mixer.inputs
        if n_tokens <= self._max_columns:
            outputs = input_outputs(of, a.inputs, n_tokens)
            self._small.layers[layer].inputs.launch(stream, n_tokens, a.normed, None, outputs)
            return
        offsets, widths = input_offsets(of, n_tokens), output_widths(of)
        wide = [
            linear_large.Output(a.inputs + offset, "fp32" if is_float else "bf16")
            for offset, (_, is_float) in zip(offsets[:-1], widths, strict=True)
        ]
        self._large.layers[layer].inputs.launch(stream, n_tokens, a.normed, self._quantized, wide)

    def output(self, stream: Stream, layer: int, n_tokens: int) -> None:
        """``x`` += output · ``mixed``."""
        of = self._small.layers[layer].output, self._large.layers[layer].output
        self._add(stream, *of, self._activations.mixed, n_tokens)

    def ffn(self, stream: Stream, layer: int, n_tokens: int) -> None:
        """``x`` += the feed-forward network of ``normed``."""
        a, small, large = self._activations, self._small.layers[layer].ffn, self._large.layers[layer].ffn
        if n_tokens <= self._max_columns:
            small.launch(stream, n_tokens, a, None, Residual(a.x, a.ss))
            return
        if isinstance(large, MoePrefill):
            large.launch(stream, n_tokens, a.normed, a.x)
            return
        assert isinstance(small, MlpSmall)
        wide = (linear_large.Output(a.ffn, stride=large.gate_up.out_stride(small.down.matrices[0].k)),)
        with small.use.half(stream, GATE_UP) as pdl:
            large.gate_up.launch(stream, n_tokens, a.normed, self._quantized, wide, pdl=pdl)
        with small.use.half(stream, DOWN) as pdl:
            is_quantized = large.gate_up.quantizes
            self._add(stream, small.down, large.down, a.ffn, n_tokens, is_quantized=is_quantized, pdl=pdl)

    def project(self, stream: Stream, n_tokens: int, columns: int) -> None:
        """``x`` += input projection · ``columns``, of the draft layer."""
        assert self._small.draft is not None
        assert self._large.input_projection is not None
        self._add(stream, self._small.draft.input_projection, self._large.input_projection, columns, n_tokens)

    def head(self, stream: Stream, n_rows: int, normed: int, logits_stride: int) -> None:
        """``n_rows`` rows at ``normed`` → ``logits``."""
        a = self._activations
        if n_rows <= self._max_columns:
            outputs = (linear_small.Output(a.logits, is_float=True, stride=logits_stride),)
            self._small.head.launch(stream, n_rows, normed, None, outputs)
            return
        wide = (linear_large.Output(a.logits, "fp32", logits_stride),)
        self._large.head.launch(stream, n_rows, normed, 0, wide)

    def _add(
        self,
        stream: Stream,
        small: LinearSmall,
        large: PromptProduct,
        of: int,
        n_tokens: int,
        *,
        is_quantized: bool = False,
        pdl: bool = True,
    ) -> None:
        a, matrix = self._activations, small.matrices[0]
        if n_tokens <= self._max_columns:
            small.launch(stream, n_tokens, of, residual=Residual(a.x, a.ss))
            return
        wide = (linear_large.Output(a.x, "fp32", matrix.n_outputs),)
        quantized = of
        if large.form is not None and not is_quantized:
            rows, free = self._large.quantizing, self._quantized
            quantized = rows.rows(stream, n_tokens, of, matrix.k, large, free, pdl=pdl)
        large.launch(stream, n_tokens, of, quantized, wide, pdl=pdl)


def input_outputs(of: InputMatrices, base: int, n_tokens: int) -> tuple[linear_small.Output, ...]:
    """Where a small launch of input matrices writes: one block of ``n_tokens`` rows after the other."""
    offsets, widths = input_offsets(of, n_tokens), output_widths(of)
    return tuple(
        linear_small.Output(base + offset, is_float) for offset, (_, is_float) in zip(offsets[:-1], widths, strict=True)
    )
