"""Hyperparameters that no shape shows: epsilons, rotary embedding, activations. Read with intent from the config.

Specification: ``specs/models.md``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ninfer_format.errors import UnsupportedError
from ninfer_format.model_geometry import Architecture, TextGeometry

L2_NORM_EPS = 1e-6
"""Under the root of the DeltaNet query and key norms; a constant of the architecture, not of a config."""
SOFTPLUS_IDENTITY_ABOVE = 20.0

# What the published configs leave out is what the architecture means by leaving it out.
_DEFAULT_PARTIAL_ROTARY = 0.25
_AXES = 3

_ONLY: Mapping[str, Any] = {
    "hidden_act": "silu",
    "mamba_ssm_dtype": "float32",
    "attn_output_gate": True,
    "attention_bias": False,
    "norm_topk_prob": True,
}
"""Members that may be absent; any other value is another model."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the decoder's mathematics needs beside the weights.

    rotary_dim   leading dims of each query and key head that are rotated; pair i joins dims i and i + rotary_dim / 2
    rope_axes    for each pair its position axis: 0 temporal, 1 height, 2 width
    n_addressable  ids below it may be sampled; the rows above are padding
    """

    architecture: Architecture
    text: TextGeometry
    norm_eps: float
    rope_theta: float
    rotary_dim: int
    rope_axes: tuple[int, ...]
    max_position: int | None
    n_addressable: int

    @property
    def conv_channels(self) -> int:
        """Channels of the DeltaNet convolution: query, key and value, in this order."""
        t = self.text
        return 2 * t.gdn_key_heads * t.gdn_key_dim + t.gdn_value_heads * t.gdn_value_dim

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep keys and values."""
        return tuple(i for i, kind in enumerate(self.text.layer_kinds) if kind == "attention")

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep recurrent state."""
        return tuple(i for i, kind in enumerate(self.text.layer_kinds) if kind == "gdn")


def model_spec(
    architecture: Architecture, text: TextGeometry, text_config: Mapping[str, Any], n_addressable: int
) -> ModelSpec:
    """Read ``text_config``; UnsupportedError lists every member that this runtime cannot honour."""
    problems: list[str] = []
    for key, expected in _ONLY.items():
        if text_config.get(key, expected) != expected:
            problems.append(f"{key} is {text_config[key]!r}, expected {expected!r}")
    eps = _positive("rms_norm_eps", text_config.get("rms_norm_eps", 1e-6), 1.0, problems)
    rope = text_config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        problems.append(f"rope_parameters is {rope!r}, expected an object")
        rope = {}
    if rope.get("rope_type", "default") != "default":
        problems.append(f"rope_parameters.rope_type is {rope['rope_type']!r}, expected 'default'")
    theta_found = rope.get("rope_theta", text_config.get("rope_theta"))
    theta = _positive("rope_parameters.rope_theta", theta_found, math.inf, problems)
    partial_found = rope.get("partial_rotary_factor", text_config.get("partial_rotary_factor", _DEFAULT_PARTIAL_ROTARY))
    partial = _positive("rope_parameters.partial_rotary_factor", partial_found, 1.0, problems)
    rotary_dim = int(text.head_dim * partial)
    if rotary_dim % 2 or rotary_dim == 0:
        problems.append(f"partial_rotary_factor {partial} rotates {rotary_dim} of {text.head_dim} dims, expected pairs")
        rotary_dim = 2
    axes = _rope_axes(rope, rotary_dim // 2, problems)
    position = text_config.get("max_position_embeddings")
    if position is not None and (type(position) is not int or position < 1):
        problems.append(f"max_position_embeddings is {position!r}, expected a positive integer")
    if problems:
        raise UnsupportedError("text_config describes a model this runtime does not have: " + "; ".join(problems))
    return ModelSpec(architecture, text, eps, theta, rotary_dim, axes, position, n_addressable)


def _positive(key: str, value: Any, limit: float, problems: list[str]) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= limit or not math.isfinite(value):
        bound = "" if math.isinf(limit) else f" and at most {limit:g}"
        problems.append(f"{key} is {value!r}, expected a number above 0{bound}")
        return 1.0
    return float(value)


def _rope_axes(rope: Mapping[str, Any], pairs: int, problems: list[str]) -> tuple[int, ...]:
    """Position axis per pair: interleaved sections, height at 1, 4, 7, …, width at 2, 5, 8, …, temporal elsewhere."""
    section = rope.get("mrope_section")
    if section is None:
        return (0,) * pairs
    if not isinstance(section, list) or len(section) != _AXES or not all(type(n) is int and n >= 0 for n in section):
        problems.append(f"rope_parameters.mrope_section is {section!r}, expected three counts of pairs")
        return (0,) * pairs
    if sum(section) != pairs:
        problems.append(f"rope_parameters.mrope_section {section} adds up to {sum(section)}, expected {pairs} pairs")
    if rope.get("mrope_interleaved", True) is not True:
        problems.append(f"rope_parameters.mrope_interleaved is {rope['mrope_interleaved']!r}, expected True")
    return tuple(axis if (axis := i % _AXES) and i < _AXES * section[axis] else 0 for i in range(pairs))
