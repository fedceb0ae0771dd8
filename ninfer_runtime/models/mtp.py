"""The draft layer's weights: one attention block fed with the next token's embedding and the final hidden row."""

from dataclasses import dataclass

from ninfer_runtime.models.registry import LayerWeights
from ninfer_runtime.models.views import View


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """input_projection [hidden, 2 × hidden] takes the normed embedding first, the normed hidden second."""

    input_projection: View
    embedding_norm: View
    hidden_norm: View
    layer: LayerWeights
    final_norm: View


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A head over frequent ids: row i [hidden] of ``rows`` belongs to id ``token_ids[i]`` (I32)."""

    rows: View
    token_ids: View
