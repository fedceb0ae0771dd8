"""Architectures by name: which feed-forward network a layer of each has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ninfer_format.errors import UnsupportedError
from ninfer_format.model_geometry import LayerKind
from ninfer_runtime.models.moe import MoeWeights, bind_moe
from ninfer_runtime.models.qwen3_5 import Mixer, MlpWeights, bind_mixer, bind_mlp
from ninfer_runtime.models.views import Parts, View, take

FeedForward = MlpWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder block: norm, mixer, norm, feed-forward network."""

    input_norm: View
    mixer: Mixer
    post_attention_norm: View
    ffn: FeedForward


_FFN: Mapping[str, tuple[str, Callable[[Parts, str], FeedForward]]] = {
    "qwen3_5": ("mlp/", bind_mlp),
    "qwen3_5_moe": ("moe/", bind_moe),
}


def bind_layer(architecture: str, kind: LayerKind, prefix: str, parts_of: Callable[[str], Parts]) -> LayerWeights:
    """The block under ``prefix`` (``text/layers/7/``, ``mtp/layer/``); ``parts_of`` lists what a prefix holds."""
    if architecture not in _FFN:
        raise UnsupportedError(f"unknown architecture {architecture!r}, this runtime has {', '.join(_FFN)}")
    folder, bind_ffn = _FFN[architecture]
    mixer = "attention/" if kind == "attention" else "gdn/"
    own = parts_of(prefix)
    return LayerWeights(
        input_norm=take(own, "input_norm", prefix),
        mixer=bind_mixer(kind, parts_of(prefix + mixer), prefix + mixer),
        post_attention_norm=take(own, "post_attention_norm", prefix),
        ffn=bind_ffn(parts_of(prefix + folder), prefix + folder),
    )
