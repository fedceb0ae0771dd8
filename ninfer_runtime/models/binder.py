"""From an artifact to a bound model: compare its inventory with the expected one, then name every weight.

One binder for every model: the expected inventory follows from the artifact's own config (or from the built-in table
of the published identities), so nothing here knows sizes or formats.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ninfer_format.directory import TensorEntry
from ninfer_format.errors import InventoryError
from ninfer_format.inventory import compare_inventory, expected_inventory
from ninfer_format.model_config import ModelConfig, config_of
from ninfer_format.reader import Artifact
from ninfer_runtime.models.mtp import DraftHead, MtpWeights
from ninfer_runtime.models.registry import LayerWeights, bind_layer
from ninfer_runtime.models.spec import ModelSpec, model_spec
from ninfer_runtime.models.views import Parts, View, parts_under, take
from ninfer_runtime.models.vocabulary import addressable_ids

PartsOf = Callable[[str], Parts]
MAX_PROBLEMS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class BoundModel:
    """A model whose every weight is a view on the open artifact.

    The artifact must stay open as long as the model is used; the model holds no copy of it.
    """

    artifact: Artifact
    config: ModelConfig
    spec: ModelSpec
    token_embedding: View
    layers: tuple[LayerWeights, ...]
    final_norm: View
    output_head: View
    mtp: MtpWeights | None
    draft_head: DraftHead | None


def bind(artifact: Artifact) -> BoundModel:
    """Check the whole directory and name the text model's weights.

    Raises InventoryError listing what differs, UnsupportedError for hyperparameters this runtime does not have,
    ArtifactError when the stored tokenizer cannot be read.
    """
    config = config_of(artifact)
    geometry = config.geometry
    _check_inventory(artifact, config)
    text = geometry.text
    n_addressable = addressable_ids(artifact, text.vocab_rows)
    spec = model_spec(geometry.architecture, text, config.text_config, n_addressable)
    entries = tuple(entry for entry in artifact.objects if isinstance(entry, TensorEntry))
    by_prefix: dict[str, tuple[TensorEntry, ...]] = {}
    for entry in entries:
        folder = entry.name.rpartition("/")[0] + "/"
        by_prefix[folder] = (*by_prefix.get(folder, ()), entry)

    def parts_of(prefix: str) -> Parts:
        return parts_under(prefix, by_prefix.get(prefix, ()), geometry)

    top = parts_of("text/")
    layers = tuple(
        bind_layer(geometry.architecture, kind, f"text/layers/{i}/", parts_of)
        for i, kind in enumerate(text.layer_kinds)
    )
    return BoundModel(
        artifact=artifact,
        config=config,
        spec=spec,
        token_embedding=take(top, "token_embedding", "text/"),
        layers=layers,
        final_norm=take(top, "final_norm", "text/"),
        output_head=take(top, "output_head", "text/"),
        mtp=_bind_mtp(geometry.architecture, parts_of) if text.mtp_layers else None,
        draft_head=_bind_draft_head(top),
    )


def _check_inventory(artifact: Artifact, config: ModelConfig) -> None:
    expected = expected_inventory(artifact.directory, config)
    problems = compare_inventory(expected, artifact.directory, packed=False, limit=MAX_PROBLEMS_SHOWN)
    if problems:
        raise InventoryError(f"{artifact.path}: not the objects of {artifact.identity}: {'; '.join(problems)}")


def _bind_mtp(architecture: str, parts_of: PartsOf) -> MtpWeights:
    own = parts_of("mtp/")
    return MtpWeights(
        input_projection=take(own, "input_projection", "mtp/"),
        embedding_norm=take(own, "embedding_norm", "mtp/"),
        hidden_norm=take(own, "hidden_norm", "mtp/"),
        layer=bind_layer(architecture, "attention", "mtp/layer/", parts_of),
        final_norm=take(own, "final_norm", "mtp/"),
    )


def _bind_draft_head(top: Parts) -> DraftHead | None:
    if "draft_head" not in top or "draft_head_token_ids" not in top:
        return None
    return DraftHead(rows=top["draft_head"], token_ids=top["draft_head_token_ids"])
