"""The draft layer's weights: one attention block fed with the next token's embedding and the final hidden row."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ninfer_format import Artifact
from ninfer_format.errors import ArtifactError
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


def draft_ids(artifact: Artifact, head: DraftHead, n_addressable: int) -> NDArray[np.int32]:
    """int32 [draft head rows]: the id of every row. ArtifactError unless they are distinct and can be sampled."""
    ids: NDArray[np.int32] = np.ascontiguousarray(artifact.tensor(head.token_ids.name), np.int32)
    if ids.min() < 0 or ids.max() >= n_addressable or len(np.unique(ids)) != len(ids):
        raise ArtifactError(
            f"{artifact.path}: {head.token_ids.name} names ids twice or outside 0 to {n_addressable - 1}; "
            "check the artifact with ninfer-verify check --level numeric"
        )
    return ids
