"""Where the parts of a mixer's input projections lie, for every kernel that takes them."""

from ninfer_runtime.backends.cuda.memory import input_offsets
from ninfer_runtime.backends.cuda.ops.gdn_decode import GdnInputs, GdnLayerWeights
from ninfer_runtime.backends.cuda.weights import GdnTensors, InputMatrices

_BF16, _FLOAT = 2, 4


class InputAddresses:
    """Where the parts of a mixer's input projections lie for ``n_tokens`` tokens, and the strides of their rows."""

    def __init__(self, of: InputMatrices, base: int, n_tokens: int) -> None:
        self._of, self._base = of, base
        self._offsets = input_offsets(of, n_tokens)

    def at(self, part: str) -> int:
        """Address of a part's first element."""
        rows = self._of.at(part)
        size = _FLOAT if part in ("a", "b") else _BF16
        return self._base + self._offsets[rows.matrix] + size * rows.begin

    def stride(self, part: str) -> int:
        """Elements between a part's rows."""
        return self._of.matrices[self._of.at(part).matrix].n_outputs


def gdn_inputs(of: InputMatrices, base: int, n_tokens: int) -> GdnInputs:
    """Query and key, value and z side by side, a and b."""
    at = InputAddresses(of, base, n_tokens)
    return GdnInputs(
        qk=at.at("query"),
        vz=at.at("value"),
        a=at.at("a"),
        b=at.at("b"),
        qk_stride=at.stride("query"),
        vz_stride=at.stride("value"),
        gate_stride=at.stride("a"),
    )


def gdn_weights(tensors: GdnTensors) -> GdnLayerWeights:
    """Addresses of a layer's small tensors."""
    return GdnLayerWeights(
        tensors.convolution.pointer, tensors.a_log.pointer, tensors.dt_bias.pointer, tensors.norm.pointer
    )
