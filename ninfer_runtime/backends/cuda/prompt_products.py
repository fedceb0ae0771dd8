"""Products of prompt chunks: matrices of one input, each by rows as they are or by quantized ones.

NVFP4 matrices by NVFP4 rows: FP4 rows and the card's own product (``LinearFp4``), elsewhere bf16(code · scale) rows and
the product of every format (``LinearLarge``), the portable twin. Grouped integer codes by bytes (``LinearInt8``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ninfer_format.activation_stats import HEAD_SITE, site_of
from ninfer_runtime.backends.cuda.compiler import KernelSpec
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.matrix_paths import Fp4Prompts, matrix_paths
from ninfer_runtime.backends.cuda.ops import linear_fp4, linear_int8, linear_large, quantize_rows, rms_norm
from ninfer_runtime.backends.cuda.ops.linear_fp4 import LinearFp4, bf16_twin
from ninfer_runtime.backends.cuda.ops.linear_int8 import LinearInt8, takes_int8
from ninfer_runtime.backends.cuda.ops.linear_large import Epilogue, LinearLarge, Output
from ninfer_runtime.backends.cuda.ops.linear_ring import RingLinear
from ninfer_runtime.backends.cuda.ops.quantize_rows import QuantizedForm, QuantizeRows, has_fp4_product, row_bytes
from ninfer_runtime.backends.cuda.ops.rms_norm import QuantizingRmsNorm
from ninfer_runtime.backends.cuda.packing import PackedMatrix, activation_stride
from ninfer_runtime.backends.cuda.weights import DeviceWeights, MlpTensors
from ninfer_runtime.backends.plan import ProgramOptions

_FP4_FORMS: Mapping[Fp4Prompts, QuantizedForm | None] = MappingProxyType(
    {"a16": None, "a4": QuantizedForm.FP4, "twin": QuantizedForm.BF16}
)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """What prompt chunks multiply the decoder's matrices by: NVFP4 ones, and with ``int8`` those of integer codes."""

    fp4: Fp4Prompts = "a16"
    int8: bool = False


def prompt_rows(options: ProgramOptions, arch: str) -> PromptRows:
    """What the options mean on a card: NVFP4 "auto" quantizes where that is faster."""
    wanted, int8 = options.nvfp4_activations, options.prefill_activations == "int8"
    if has_fp4_product(arch):
        return PromptRows("a16" if wanted == "a16" else "a4", int8)
    return PromptRows("twin" if wanted == "a4" else "a16", int8)


def paths(matrices: Sequence[PackedMatrix], rows: PromptRows) -> str:
    """Which path every group of matrices takes, in words."""
    return matrix_paths(matrices, rows.fp4, int8=rows.int8)


def form_of(matrices: Sequence[PackedMatrix], rows: PromptRows) -> QuantizedForm | None:
    """Of the quantized rows that some of the matrices multiply; None: all multiply rows as they are."""
    if _FP4_FORMS[rows.fp4] is not None and any(matrix.input_divisor is not None for matrix in matrices):
        return _FP4_FORMS[rows.fp4]
    return QuantizedForm.INT8 if rows.int8 and any(_takes(matrix, QuantizedForm.INT8) for matrix in matrices) else None


def _takes(matrix: PackedMatrix, form: QuantizedForm | None) -> bool:
    """Whether it multiplies quantized rows where its launch has some of ``form``."""
    if form is QuantizedForm.INT8:
        return takes_int8(matrix) and site_of(matrix.name) not in (None, HEAD_SITE)
    return form is not None and matrix.input_divisor is not None


def _parts(matrices: Sequence[PackedMatrix], form: QuantizedForm | None) -> tuple[list[int], list[int]]:
    """Indices of the matrices that multiply rows as they are, and of the others."""
    takes = [_takes(matrix, form) for matrix in matrices]
    return [i for i, t in enumerate(takes) if not t], [i for i, t in enumerate(takes) if t]


def specs(
    matrices: Sequence[PackedMatrix], epilogue: Epilogue, rows: PromptRows, out_divisor: float | None = None
) -> list[KernelSpec]:
    """Variants of a ``PromptProduct``."""
    form = form_of(matrices, rows)
    plain, quantized = ([matrices[i] for i in part] for part in _parts(matrices, form))
    out = linear_large.specs(plain, epilogue) if plain else []
    if not quantized:
        return out
    if form is QuantizedForm.INT8:
        return out + linear_int8.specs(quantized, epilogue)
    specs_of = linear_fp4.specs if form is QuantizedForm.FP4 else linear_large.specs
    return out + specs_of(quantized, epilogue, quantized=out_divisor is not None)


def fuses_quantization(gate_up: PackedMatrix, down: PackedMatrix, rows: PromptRows) -> float | None:
    """The divisor under which gate and up write their outputs as the quantized rows of ``down``; None: as bf16."""
    forms = {form_of((matrix,), rows) for matrix in (gate_up, down)}
    return None if forms & {None, QuantizedForm.INT8} else down.input_divisor


def _of_norms(weights: DeviceWeights, rows: PromptRows) -> set[QuantizedForm]:
    """Forms of quantized rows that norms write."""
    firsts = [layer.mixer.inputs.matrices for layer in weights.blocks]
    firsts += [(layer.ffn.gate_up,) for layer in weights.blocks if isinstance(layer.ffn, MlpTensors)]
    return {form for matrices in firsts if (form := form_of(matrices, rows)) is not None}


def _alone(weights: DeviceWeights, rows: PromptRows) -> set[tuple[int, QuantizedForm]]:
    """Columns and form of rows that are quantized by themselves: nothing that writes them quantizes them too."""
    found = [layer.mixer.output for layer in weights.blocks]
    for layer in weights.blocks:
        ffn = layer.ffn
        if isinstance(ffn, MlpTensors) and fuses_quantization(ffn.gate_up, ffn.down, rows) is None:
            found.append(ffn.down)
    return {(matrix.k, form) for matrix in found if (form := form_of((matrix,), rows)) is not None}


def quantized_row_bytes(weights: DeviceWeights, rows: PromptRows) -> int:
    """Bytes of memory per token that quantized rows need beside the rows themselves."""
    sizes = [row_bytes(weights.head.k, form) for form in _of_norms(weights, rows)]
    # bf16 products take the place of their rows.
    sizes += [row_bytes(k, form) for k, form in _alone(weights, rows) if form is not QuantizedForm.BF16]
    return max(sizes, default=0)


def quantizing_specs(weights: DeviceWeights, rows: PromptRows) -> list[KernelSpec]:
    """Variants of ``Quantizing``."""
    norms = [rms_norm.kernel_spec(weights.head.k, "bf16", form) for form in sorted(_of_norms(weights, rows))]
    return norms + [quantize_rows.kernel_spec(k, form) for k, form in sorted(_alone(weights, rows))]


class Quantizing:
    """What makes quantized rows: the norm in front of matrices, and a launch for rows that come as they are."""

    def __init__(self, device: Device, weights: DeviceWeights, eps: float, rows: PromptRows) -> None:
        self._rows = {(k, form): QuantizeRows(device, k, form) for k, form in _alone(weights, rows)}
        hidden = weights.head.k
        self._norms = {form: QuantizingRmsNorm(device, hidden, eps, form) for form in _of_norms(weights, rows)}

    def norm(
        self, stream: Stream, n_rows: int, x: int, weight: int, product: "PromptProduct", quantized: int, normed: int
    ) -> None:
        """Rows of the residual stream → what ``product`` multiplies: quantized rows, and bf16 ones if it takes any."""
        assert product.form is not None
        kept = normed if product.takes_plain else 0
        self._norms[product.form].launch(stream, n_rows, x, weight, product.divisor, quantized, kept)

    def rows(
        self, stream: Stream, n_rows: int, x: int, k: int, product: "PromptProduct", quantized: int, *, pdl: bool
    ) -> int:
        """bf16 rows of ``k`` columns → the rows that ``product`` multiplies: at ``quantized``, or in their place."""
        assert product.form is not None
        out = x if product.form is QuantizedForm.BF16 else quantized
        self._rows[k, product.form].launch(stream, n_rows, x, product.divisor, out, pdl=pdl)
        return out


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
        rows: PromptRows,
        out_divisor: float | None = None,
    ) -> None:
        """``out_divisor`` (SWIGLU, of NVFP4 rows): outputs are quantized rows as well."""
        self.form, self.quantizes = form_of(matrices, rows), out_divisor is not None
        self.divisor = min((d for matrix in matrices if (d := matrix.input_divisor) is not None), default=1.0)
        self._plain_of, self._quantized_of = _parts(matrices, self.form)
        self._stride = activation_stride(matrices[0].k)
        self._plain: LinearLarge | None = None
        self._ring: RingLinear | None = None
        self._twin: LinearLarge | None = None
        if self._plain_of:
            own = [matrices[i] for i in self._plain_of]
            self._plain = LinearLarge(device, own, epilogue, max_tokens=max_tokens, workspace=workspace)
        own = [matrices[i] for i in self._quantized_of]
        if self.form is QuantizedForm.FP4:
            self._ring = LinearFp4(
                device,
                own,
                epilogue,
                max_tokens=max_tokens,
                workspace=workspace,
                divisor=self.divisor,
                out_divisor=out_divisor,
            )
        elif self.form is QuantizedForm.INT8:
            self._ring = LinearInt8(device, own, epilogue, max_tokens=max_tokens, workspace=workspace)
        elif self.form is QuantizedForm.BF16:
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
        return 0 if self.quantizes and self.form is QuantizedForm.FP4 else activation_stride(k)

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
        if self._ring is not None:
            self._ring.launch(stream, n_tokens, quantized, own, pdl=pdl)
        if self._twin is not None:
            self._twin.launch(stream, n_tokens, quantized, self._stride, own, pdl=pdl)
