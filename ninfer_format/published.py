"""The four published artifacts: sizes, digests, frontend resources, version-1 ancestors and model configs.

One row per identity; everything else about them (objects, offsets, directory) is computed. A custom artifact has
none of this: it carries its config as the resource ``model/config.json``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ninfer_format.directory import Identity
from ninfer_format.errors import InventoryError

FRONTEND_RESOURCES = (
    "frontend/tokenizer.json",
    "frontend/tokenizer_config.json",
    "frontend/chat_template.jinja",
    "frontend/generation_config.json",
    "frontend/preprocessor_config.json",
    "frontend/video_preprocessor_config.json",
)
CONFIG_RESOURCE = "model/config.json"
RESOURCE_ORDER = (*FRONTEND_RESOURCES, CONFIG_RESOURCE)
TOKENIZER_IDS = 248_077
"""Addressable ids of the published tokenizers; the matrix rows above them are padding."""


@dataclass(frozen=True, slots=True)
class PublishedResource:
    """Size in bytes and SHA-256 of one frontend file."""

    n_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PublishedV1:
    """The version-1 file a published artifact descends from; its length is that of the version-2 file."""

    file_sha256: str
    directory_sha256: str
    json_bytes: int


@dataclass(frozen=True, slots=True)
class PublishedArtifact:
    """One published artifact; sizes in bytes, digests in lower-case hex."""

    identity: Identity
    file_name: str
    file_bytes: int
    file_sha256: str
    json_bytes: int
    directory_sha256: str
    target_key: str
    recipe_id: str
    resources: Mapping[str, PublishedResource]
    v1: PublishedV1 | None = None


_SHARED_FILES = (
    (202, "e70c136c1b78ddc1fb0905bac8e733a4dc448d4f852a5dd75143fffc70be550e"),
    (390, "27225450ac9c6529872ee1924fcb0962ff5634834f817040f444118116f4e516"),
    (385, "7768af27c1fafa9cc9011c1dc20067e03f8915e03b63504550e11d5066986d13"),
)
_FILES_3_6 = (
    (12_807_982, "5f9e4d4901a92b997e463c1f46055088b6cca5ca61a6522d1b9f64c4bb81cb42"),
    (16_718, "5186f0defcd7f232382c7f0aebcd2252d073bb921ab240e407b7ae8745d2b29b"),
    (7_764, "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259"),
    *_SHARED_FILES,
)
_FILES_3_8 = (
    (12_809_320, "0997f410c57a1f4e53b09e4be8f4a172d90edd9564368fb0847030937229b9f3"),
    (17_928, "b11349aafa7cdc6a320767cf7ceb29ed82f7eda5d65e8e0819e76f0ce947bf27"),
    (8_952, "c3cf9e34abf4f9e36c2d72165aa9c132d3e2a725b6c2586aaa3a8af9d7a81041"),
    *_SHARED_FILES,
)


def _resources(files: tuple[tuple[int, str], ...]) -> Mapping[str, PublishedResource]:
    return MappingProxyType({n: PublishedResource(*f) for n, f in zip(FRONTEND_RESOURCES, files, strict=True)})


PUBLISHED: Mapping[Identity, PublishedArtifact] = MappingProxyType(
    {
        row.identity: row
        for row in (
            PublishedArtifact(
                Identity("qwen3.6-27b", "groupwise-int"),
                "qwen3_6_27b.ninfer",
                17_495_365_888,
                "7b51600ffd10632b9660f56085efdd9b751d79733ad32036a652234b64bebe7b",
                174_218,
                "0abb85fde318b5980c126f9c44a5bae09e852034de79ea269bd09693aa34e7f7",
                "qwen3_6_27b",
                "qwen3_6_27b-v2",
                _resources(_FILES_3_6),
                PublishedV1(
                    "74fac75f3a6b7ab7b52e08c36969c7a33a8ba23465910eccd72d195adb497127",
                    "df352a3e3b8555f15fd00d143be213b9e5ff6fb910a1c2390f0785f9a1e2d386",
                    174_176,
                ),
            ),
            PublishedArtifact(
                Identity("qwen3.6-27b", "nvfp4"),
                "qwen3_6_27b_nvfp4.ninfer",
                18_324_064_000,
                "bce5f00d066c0f20f1317bf1fdcb458264cf95837c3b1f3fbec163694627893a",
                206_636,
                "50677ebddbeb17566a1c7837a122872fada8244f54d4d7b78ee95d7b567033ff",
                "qwen3_6_27b",
                "qwen3_6_27b_nvfp4-v1",
                _resources(_FILES_3_6),
            ),
            PublishedArtifact(
                Identity("qwen3.8-27b", "groupwise-int"),
                "qwen3_8_27b.ninfer",
                18_210_531_328,
                "eec39564993d6e9c7d5e383382a760f093465c9d163ec9a1bd6b80199514bf3e",
                174_230,
                "45912dd83c71a1b3b3b644c15ce3ef83b0b60d77cd7c82a39b21d9ba6267d742",
                "qwen3_8_27b",
                "qwen3_8_27b-v1",
                _resources(_FILES_3_8),
            ),
            PublishedArtifact(
                Identity("qwen3.6-35b-a3b", "groupwise-int"),
                "qwen3_6_35b_a3b.ninfer",
                22_783_246_080,
                "1fb9ea0b5b8561e49d9604115ec89e5d9f2b6f6434e32c37c57fffd480a325d2",
                147_676,
                "4c65958b2a56b372481be2f333fa3837ac996ed4f067430de499657da0a083be",
                "qwen3_6_35b_a3b",
                "qwen3_6_35b_a3b-v2",
                _resources(_FILES_3_6),
                PublishedV1(
                    "5194407dd6d3092b8c2f81ce41e014b50ca0d6f1ba4e5d8c1492b8652bfa267f",
                    "0155278f7e050a4a5c39a697557ea9e2532d44dfc054fd41b496f8b37966732e",
                    147_634,
                ),
            ),
        )
    }
)


def published(identity: Identity | str) -> PublishedArtifact:
    """The row of a published identity; InventoryError lists the four otherwise."""
    wanted = Identity.parse(identity) if isinstance(identity, str) else identity
    try:
        return PUBLISHED[wanted]
    except KeyError:
        known = ", ".join(map(str, PUBLISHED))
        raise InventoryError(f"{wanted} is not a published identity; the published ones are {known}") from None


def known_digest(sha256: str) -> str | None:
    """Label of the published file with this SHA-256 (hex, any case), or None."""
    digest = sha256.lower()
    for row in PUBLISHED.values():
        if digest == row.file_sha256:
            return f"{row.identity} (published artifact {row.file_name})"
        if row.v1 is not None and digest == row.v1.file_sha256:
            return f"{row.identity.model_id} (published version-1 artifact, becomes {row.identity})"
    return None


def published_sections(identity: Identity | str) -> dict[str, Any]:
    """Config sections of a published model: text_config, vision_config, token_ids, dflash (fresh, mutable copies)."""
    row = published(identity)
    moe = row.identity.model_id == "qwen3.6-35b-a3b"
    hidden, n_layers = (2048, 40) if moe else (5120, 64)
    return {
        "text_config": _text_config(hidden, n_layers, _EXPERT_MODEL if moe else _DENSE_MODEL),
        "vision_config": {**_VISION, "model_type": "qwen3_5_moe" if moe else "qwen3_5", "out_hidden_size": hidden},
        "token_ids": {"image": 248_056, "video": 248_057, "vision_start": 248_053, "vision_end": 248_054},
        "dflash": _dflash_config() if moe else None,
    }


_DENSE_MODEL: Mapping[str, Any] = {
    "model_type": "qwen3_5_text",
    "intermediate_size": 17_408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 48,
}
_EXPERT_MODEL: Mapping[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_VISION: Mapping[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}


def _text_config(hidden: int, n_layers: int, model: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **model,
        "hidden_size": hidden,
        "num_hidden_layers": n_layers,
        "full_attention_interval": 4,
        "layer_types": ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(n_layers)],
        "vocab_size": 248_320,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "tie_word_embeddings": False,
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    }


def _dflash_config() -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "sliding_window": 4096,
        "use_sliding_window": True,
        "max_position_embeddings": 262_144,
        "num_target_layers": 40,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "vocab_size": 248_320,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000},
        "dflash_config": {
            "block_size": 16,
            "mask_token_id": 248_077,
            "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
        },
    }
