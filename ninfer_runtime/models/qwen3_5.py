"""The dense architecture: attention and DeltaNet mixers, SwiGLU, and how their weights are named."""

from dataclasses import dataclass

from ninfer_format.model_geometry import LayerKind
from ninfer_runtime.models.views import Parts, View, take


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Gated softmax attention. Matrices [rows, hidden] except ``output`` [hidden, heads × head_dim]."""

    query: View
    key: View
    gate: View
    value: View
    query_norm: View
    key_norm: View
    output: View


@dataclass(frozen=True, slots=True)
class GdnWeights:
    """Gated DeltaNet. ``convolution`` is [taps, channels] over query | key | value; ``norm`` is not zero-centred."""

    query: View
    key: View
    value: View
    z: View
    a: View
    b: View
    a_log: View
    dt_bias: View
    convolution: View
    norm: View
    output: View


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """SwiGLU: gate and up [width, hidden], down [hidden, width]."""

    gate: View
    up: View
    down: View


Mixer = AttentionWeights | GdnWeights


def bind_mixer(kind: LayerKind, parts: Parts, prefix: str) -> Mixer:
    """The mixer whose parts (already stripped of ``prefix``) are given."""
    if kind == "attention":
        names = AttentionWeights.__slots__
        return AttentionWeights(*(take(parts, name, prefix) for name in names))
    return GdnWeights(*(take(parts, name, prefix) for name in GdnWeights.__slots__))


def bind_mlp(parts: Parts, prefix: str) -> MlpWeights:
    """The dense feed-forward network under ``prefix``."""
    return MlpWeights(*(take(parts, name, prefix) for name in MlpWeights.__slots__))
