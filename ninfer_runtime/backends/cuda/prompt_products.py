"""Products of prompt chunks: matrices of one input, each by rows as they are or, where it is NVFP4, by NVFP4 rows.

With FP4 rows the card's own product (``LinearFp4``), elsewhere bf16(code · scale) rows and the product of every format
(``LinearLarge``): the portable twin.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.matrix_paths import Fp4Prompts
from ninfer_runtime.backends.cuda.ops import linear_fp4, linear_large, quantize_rows, rms_norm
from ninfer_runtime.backends.cuda.ops.linear_fp4 import LinearFp4, bf16_twin
from ninfer_runtime.backends.cuda.ops.linear_large import Epilogue, LinearLarge, Output
from ninfer_runtime.backends.cuda.ops.quantize_rows import QuantizedForm, QuantizeRows, has_fp4_product, row_bytes
from ninfer_runtime.backends.cuda.ops.rms_norm import QuantizingRmsNorm
from ninfer_runtime.backends.cuda.packing import PackedMatrix, activation_stride
from ninfer_runtime.backends.cuda.weights import DeviceWeights, MlpTensors
from ninfer_runtime.config import Nvfp4Activations

FORMS: Mapping[Fp4Prompts, QuantizedForm | None] = MappingProxyType(
    {"a16": None, "a4": QuantizedForm.FP4, "twin": QuantizedForm.BF16}
)


def fp4_prompts(wanted: Nvfp4Activations, arch: str) -> Fp4Prompts:
    """What the option means on a card: "auto" quantizes where that is faster."""
    if has_fp4_product(arch):
        return "a16" if wanted == "a16" else "a4"
    return "twin" if wanted == "a4" else "a16"


def divisor_of(matrices: Sequence[PackedMatrix], prompts: Fp4Prompts) -> float | None:
    """Of the quantized rows that some of the matrices multiply; None: all multiply rows as they are."""
    divisors = {matrix.input_divisor for matrix in matrices} - {None}
    return None if prompts == "a16" or not divisors else min(d for d in divisors if d is not None)


def specs(
    matrices: Sequence[PackedMatrix], epilogue: Epilogue, prompts: Fp4Prompts, out_divisor: float | None = None
) -> list[KernelSpec]:
    """Variants of a ``PromptProduct``."""
    plain, quantized = _parts(matrices, prompts)
    out = [] if not plain else linear_large.specs([matrices[i] for i in plain], epilogue)
    if quantized:
        module = linear_fp4 if prompts == "a4" else linear_large
        out += module.specs([matrices[i] for i in quantized], epilogue, quantized=out_divisor is not None)
    return out


def _parts(matrices: Sequence[PackedMatrix], prompts: Fp4Prompts) -> tuple[list[int], list[int]]:
    """Indices of the matrices that multiply rows as they are, and of the others."""
    takes = [prompts != "a16" and matrix.input_divisor is not None for matrix in matrices]
    return [i for i, t in enumerate(takes) if not t], [i for i, t in enumerate(takes) if t]


def fuses_quantization(gate_up: PackedMatrix, down: PackedMatrix, prompts: Fp4Prompts) -> float | None:
    """The divisor under which gate and up write their outputs as the quantized rows of ``down``; None: as bf16."""
    both = divisor_of((gate_up,), prompts) is not None and divisor_of((down,), prompts) is not None
    return down.input_divisor if both else None


def _normed(weights: DeviceWeights, prompts: Fp4Prompts) -> bool:
    """Whether some matrix multiplies quantized rows of a norm."""
    firsts = [layer.mixer.inputs.matrices for layer in weights.blocks]
    firsts += [(layer.ffn.gate_up,) for layer in weights.blocks if isinstance(layer.ffn, MlpTensors)]
    return any(divisor_of(matrices, prompts) is not None for matrices in firsts)


def _alone(weights: DeviceWeights, prompts: Fp4Prompts) -> list[int]:
    """Columns of rows that are quantized by themselves: nothing that writes them quantizes them too."""
    found = [layer.mixer.output for layer in weights.blocks]
    for layer in weights.blocks:
        ffn = layer.ffn
        if isinstance(ffn, MlpTensors) and fuses_quantization(ffn.gate_up, ffn.down, prompts) is None:
            found.append(ffn.down)
    return sorted({matrix.k for matrix in found if divisor_of((matrix,), prompts) is not None})


def quantized_row_bytes(weights: DeviceWeights, prompts: Fp4Prompts) -> int:
    """Bytes of memory per token that quantized rows need beside the rows themselves."""
    form = FORMS[prompts]
    if form is None:
        return 0
    sizes = [row_bytes(weights.head.k, form)] if _normed(weights, prompts) else [0]
    if form is QuantizedForm.FP4:  # bf16 products take the place of their rows
        sizes += [row_bytes(k, form) for k in _alone(weights, prompts)]
    return max(sizes)


def quantizing_specs(weights: DeviceWeights, prompts: Fp4Prompts) -> list[KernelSpec]:
    """Variants of ``Quantizing``."""
    form = FORMS[prompts]
    if form is None:
        return []
    norm = [rms_norm.kernel_spec(weights.head.k, "bf16", form)] if _normed(weights, prompts) else []
    return norm + [quantize_rows.kernel_spec(k, form) for k in _alone(weights, prompts)]


class Quantizing:
    """What makes quantized rows: the norm in front of matrices, and a launch for rows that come as they are."""

    def __init__(self, device: Device, weights: DeviceWeights, eps: float, prompts: Fp4Prompts) -> None:
        form = FORMS[prompts]
        self._norm: QuantizingRmsNorm | None = None
        self._rows: dict[int, QuantizeRows] = {}
        if form is not None:
            self._rows = {k: QuantizeRows(device, k, form) for k in _alone(weights, prompts)}
            if _normed(weights, prompts):
                self._norm = QuantizingRmsNorm(device, weights.head.k, eps, form)

    def norm(
        self, stream: Stream, n_rows: int, x: int, weight: int, divisor: float, quantized: int, normed: int
    ) -> None:
        """Rows of the residual stream → normed and quantized; ``normed`` 0: not kept as bf16."""
        assert self._norm is not None
        self._norm.launch(stream, n_rows, x, weight, divisor, quantized, normed)

    def rows(self, stream: Stream, n_rows: int, x: int, k: int, divisor: float, quantized: int, *, pdl: bool) -> None:
        """bf16 rows of ``k`` columns → ``quantized``."""
        self._rows[k].launch(stream, n_rows, x, divisor, quantized, pdl=pdl)


class PromptProduct:
    """Matrices of equal K times up to ``max_tokens`` rows."""

    def __init__(
        self,
        device: Device,
        matrices: Sequence[PackedMatrix],
        epilogue: Epilogue,
        *,
        max_tokens: int,
        workspace: int,
        prompts: Fp4Prompts = "a16",
        out_divisor: float | None = None,
    ) -> None:
        """``out_divisor`` (SWIGLU, of quantized rows): outputs are quantized rows as well."""
        self.divisor = divisor_of(matrices, prompts)
        self.quantizes = out_divisor is not None
        self._form = FORMS[prompts]
        self._plain_of, self._quantized_of = _parts(matrices, prompts)
        self._stride = activation_stride(matrices[0].k)
        self._plain: LinearLarge | None = None
        self._fp4: LinearFp4 | None = None
        self._twin: LinearLarge | None = None
        if self._plain_of:
            own = [matrices[i] for i in self._plain_of]
            self._plain = LinearLarge(device, own, epilogue, max_tokens=max_tokens, workspace=workspace)
        if self.divisor is None:
            return
        own = [matrices[i] for i in self._quantized_of]
        if self._form is QuantizedForm.FP4:
            self._fp4 = LinearFp4(
                device,
                own,
                epilogue,
                max_tokens=max_tokens,
                workspace=workspace,
                divisor=self.divisor,
                out_divisor=out_divisor,
            )
        else:
            twins = [bf16_twin(matrix, self.divisor) for matrix in own]
            self._twin = LinearLarge(
                device, twins, epilogue, max_tokens=max_tokens, workspace=workspace, out_divisor=out_divisor
            )

    @property
    def takes_plain(self) -> bool:
        """Whether some matrices multiply rows as they are."""
        return self._plain is not None

    def out_stride(self, k: int) -> int:
        """Stride of outputs that are the rows of a matrix with ``k`` columns; 0: quantized rows' own."""
        return 0 if self.quantizes and self._form is QuantizedForm.FP4 else activation_stride(k)

    def launch(
        self, stream: Stream, n_tokens: int, x: int, quantized: int, outputs: Sequence[Output], *, pdl: bool = True
    ) -> None:
        """``x`` bf16 rows [T][activation_stride(k)], ``quantized`` rows of the same; one that is not taken may be 0.

        ``outputs``: one per matrix, as of ``LinearLarge``.
        """
        if self._plain is not None:
            own = [outputs[i] for i in self._plain_of]
            self._plain.launch(stream, n_tokens, x, self._stride, own, pdl=pdl)
        own = [outputs[i] for i in self._quantized_of]
        if self._fp4 is not None:
            self._fp4.launch(stream, n_tokens, quantized, own, pdl=pdl)
        if self._twin is not None:
            self._twin.launch(stream, n_tokens, quantized, self._stride, own, pdl=pdl)
