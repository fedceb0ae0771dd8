"""Models without a file and cards without a machine: what kernels are compiled for, and checked on, anywhere."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from ninfer_format.directory import Directory, Identity
from ninfer_format.inventory import Inventory, plan_inventory
from ninfer_format.model_config import ModelConfig
from ninfer_format.model_geometry import draft_head_rows, geometry_from_config
from ninfer_format.published import CONFIG_RESOURCE, PUBLISHED, TOKENIZER_IDS, published_sections
from ninfer_format.reader import Artifact, Objects
from ninfer_format.recipes import recipe_for
from ninfer_runtime.backends.cuda.device import Device
from ninfer_runtime.backends.cuda.residency import Rates
from ninfer_runtime.models.binder import BoundModel, bind
from ninfer_runtime.models.vocabulary import TOKENIZER, TOKENIZER_CONFIG

_KIB, _MIB = 1 << 10, 1 << 20
_ONE = struct.pack("<f", 1.0)
DRIVER_BYTES = 512 << 20
"""Of a card's memory for the driver's context and the kernels' code: an allowance."""

# The smallest models of both architectures; the tests' trained ones have these sizes.
_TINY_IDS = 604
_TINY = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "head_dim": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "vocab_size": 640,
    "attn_output_gate": True,
    "rms_norm_eps": 1e-6,
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "rope_parameters": {"mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10_000_000},
}
_TINY_MOE = {
    **{key: value for key, value in _TINY.items() if key != "intermediate_size"},
    "model_type": "qwen3_5_moe_text",
    "linear_num_value_heads": 2,
    "num_attention_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
_LARGE = (
    "qwen3.6-27b/groupwise-int",
    "qwen3.8-27b/groupwise-int",
    "qwen3.6-27b/nvfp4",
    "qwen3.6-27b/w8",
    "qwen3.6-35b-a3b/groupwise-int",
)
_TINY_RECIPES = ("groupwise-int", "w8", "bf16", "nvfp4")
_TINY_CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType({"tiny/": _TINY, "tiny-moe/": _TINY_MOE})
_TWIN_RECIPE = "groupwise-int"
MODELS = (*_LARGE, *(prefix + recipe for prefix in _TINY_CONFIGS for recipe in _TINY_RECIPES))
"""Names of the models whose kernels are compiled ahead: the identities, one of them in W8, and the tiny models in every
recipe."""


@dataclass(frozen=True, slots=True)
class Card:
    """The numbers of a ``Device`` that launches are planned from."""

    name: str
    arch: str
    n_sms: int
    shared_per_sm: int
    l2_bytes: int
    total_bytes: int
    rates: Rates | None = None
    """As others measured them; None: not known."""

    def free_bytes(self) -> int:
        """What it has for a program when nothing else runs on it."""
        return max(0, self.total_bytes - DRIVER_BYTES)

    def as_device(self) -> Device:
        """For functions that only read those numbers."""
        return cast(Device, self)


CARDS = (
    Card("RTX 5090", "sm_120a", 170, 100 * _KIB, 96 * _MIB, 32_607 * _MIB, Rates(1674.5e9, 55e9)),
    Card("RTX 5060 Ti", "sm_120a", 36, 100 * _KIB, 32 * _MIB, 16_311 * _MIB, Rates(412e9, 27e9)),
    Card("H200", "sm_90a", 132, 228 * _KIB, 60 * _MIB, 143_771 * _MIB, Rates(4411e9, 55.4e9)),
)
USUAL_RATES = Rates(412e9, 27e9)
"""Of a card of which only the memory is known: what is streamed is chosen for these."""
UNKNOWN_CARD = replace(CARDS[0], name="card", rates=None)
"""What a card is planned as of which only the memory is known."""
TARGETS = tuple(dict.fromkeys(card.arch for card in CARDS))


class PlannedArtifact:
    """Stands in for an ``Artifact`` that was never written: the directory, and the resources that binding reads."""

    def __init__(self, name: str, inventory: Inventory, resources: Mapping[str, bytes]) -> None:
        self.path = Path(name)
        self.identity = inventory.identity
        self.directory: Directory = inventory.directory
        self.objects = Objects(inventory.objects)
        self.payload_offset = inventory.payload_offset
        self.file_bytes = inventory.file_bytes
        self._resources = resources

    def payload(self, name: str) -> memoryview:
        """Content of a resource. Of a tensor only its last word, 1.0: the divisor of an NVFP4 matrix."""
        return memoryview(self._resources.get(name, _ONE))


def _resources(n_ids: int, config: bytes | None) -> Mapping[str, bytes]:
    tokenizer = json.dumps({"model": {"vocab": {"last": n_ids - 1}}}).encode()
    found = {TOKENIZER: tokenizer, TOKENIZER_CONFIG: b"{}"}
    return MappingProxyType(found if config is None else found | {CONFIG_RESOURCE: config})


def planned_model(name: str) -> BoundModel:
    """A published identity, one of ``MODELS``, or a published model in another recipe (text only), bound to an artifact
    that does not exist: shapes and formats, no values."""
    for prefix, config in _TINY_CONFIGS.items():
        if name.startswith(prefix):
            return _custom(name, config, name.removeprefix(prefix), _TINY_IDS)
    identity = Identity.parse(name)
    if identity in PUBLISHED:
        return _bound(name, plan_inventory(name), _resources(TOKENIZER_IDS, None))
    alike = next(known for known in PUBLISHED if known.model_id == identity.model_id)
    return _custom(name, published_sections(alike)["text_config"], identity.weights_id, TOKENIZER_IDS)


def dense_twin(model: BoundModel) -> BoundModel:
    """The dense groupwise model nearest to ``model``: equal but for its formats, experts as one wide network.

    What a call needs beside weights is alike, so it stands in for models that the backend cannot run.
    """
    text = model.spec.text
    width = text.mlp_width or text.experts_per_token * text.expert_width + text.shared_width
    experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    config = {key: value for key, value in model.config.text_config.items() if key not in experts}
    config |= {"model_type": "qwen3_5_text", "intermediate_size": width}
    return _custom(f"{model.artifact.path}: its dense twin", config, _TWIN_RECIPE, model.spec.n_addressable)


def _custom(name: str, text_config: Mapping[str, Any], recipe_name: str, n_ids: int) -> BoundModel:
    """A model of its own config, text only."""
    rows = draft_head_rows(n_ids)
    recipe = recipe_for(geometry_from_config(text_config, None, None, rows), recipe_name)
    config = ModelConfig(text_config, None, None, None, recipe, rows)
    resources = _resources(n_ids, config.to_json())
    sizes = {resource: len(content) for resource, content in resources.items()}
    identity = Identity("planned", recipe_name)
    return _bound(name, plan_inventory(config.geometry, recipe, identity=identity, resources=sizes), resources)


def _bound(name: str, inventory: Inventory, resources: Mapping[str, bytes]) -> BoundModel:
    artifact: Any = PlannedArtifact(name, inventory, resources)
    return bind(cast(Artifact, artifact))
