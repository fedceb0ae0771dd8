"""Token embeddings, with rows replaced where a caller brings its own (image and video features)."""

import torch
from torch import Tensor

from ninfer_runtime.backends.base import EmbeddingRows
from ninfer_runtime.models.views import View

from .weights import Weights


def embed(token_ids: Tensor, weights: Weights, view: View, override: EmbeddingRows | None = None) -> Tensor:
    """int64 [T] → [T, hidden] in the program's dtype. There is no embedding scale."""
    x = weights.embed(view, token_ids)
    if override is not None:
        index = torch.from_numpy(override.indices).long().to(x.device)
        x[index] = torch.from_numpy(override.rows).to(x.device).to(x.dtype)
    return x
