"""The published NVFP4 model's two folders at full geometry, made of holes: real names, shapes, dtypes, headers.

Written from the published allocation, without the code under test. Change ``tensors``, ``config`` or ``manifest``, then
``save()``.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import make_sparse_checkpoint
import numpy as np

from tests.convert.nvfp4 import LAYERS, LINEARS, QUANTIZATION
from tests.convert.tiny import INDEX, shapes_of

Stored = tuple[str, tuple[int, ...]]
MANIFEST: dict[str, Any] = {
    "format_histogram": {
        "head_passthrough/BF16": 3, "linear/BF16": 117, "linear/NVFP4": 379, "layer_passthrough/BF16": 352,
        "mtp_linear/NVFP4": 7, "mtp_passthrough/BF16": 8,
    },
    "n_assignment_entries": 614,
    "ignore": ["lm_head"],
    "prune": None,
    "corrected_norm_passthrough_tensors": 216,
    "passthrough_dtype_policy": "source_dtype_preserved; corrected from silent norm fp32 upcast",
}  # fmt: skip
KEPT = frozenset(
    [f"{layer}.self_attn.{name}_proj" for layer in range(3, 24, 4) for name in "qkv"]
    + ["3.self_attn.o_proj", "7.self_attn.o_proj", "4.linear_attn.out_proj"]
)


def packed(stem: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Stored]]:
    """The four tensors of an NVFP4 linear."""
    rows, width = shape
    yield f"{stem}.weight_packed", ("U8", (rows, width // 2))
    yield f"{stem}.weight_scale", ("F8_E4M3", (rows, width // 16))
    yield f"{stem}.weight_global_scale", ("F32", (1,))
    yield f"{stem}.input_global_scale", ("F32", (1,))


def allocated(config: dict[str, Any]) -> Iterator[tuple[str, Stored]]:
    """Every tensor of the NVFP4 folder."""
    for name, shape in shapes_of(config).items():
        stem = name.removesuffix(".weight")
        decoder, mtp = name.startswith(LAYERS), name.startswith("mtp.layers.")
        linear = stem.rpartition(".")[2] in LINEARS
        if linear and (mtp or (decoder and stem.removeprefix(LAYERS) not in KEPT)):
            yield from packed(stem, shape)
        else:
            yield name, ("BF16", shape)


@dataclass
class FullNvfp4:
    """The NVFP4 folder: what ``save`` writes; scalars are 1 unless ``scalars`` has them."""

    folder: Path
    base: Path
    config: dict[str, Any]
    tensors: dict[str, Stored]
    manifest: dict[str, Any] | None
    scalars: dict[str, float] = field(default_factory=dict)
    words: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Tensor → (byte offset in it, bytes) that are no hole."""

    def save(self) -> FullNvfp4:
        """Write one shard, its index, the config and the manifest."""
        self.folder.mkdir(exist_ok=True)
        header: dict[str, Any] = {}
        file, end = "model-00001-of-00001.safetensors", 0
        for name, (dtype, shape) in self.tensors.items():
            begin, end = end, end + math.prod(shape) * {"U8": 1, "F8_E4M3": 1, "F32": 4, "BF16": 2}[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with open(self.folder / file, "wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + end)
            for name, (dtype, _) in self.tensors.items():
                if dtype == "F32":
                    stream.seek(8 + len(text) + header[name]["data_offsets"][0])
                    stream.write(np.array(self.scalars.get(name, 1), "<f4").tobytes())
            for name, (offset, content) in self.words.items():
                stream.seek(8 + len(text) + header[name]["data_offsets"][0] + offset)
                stream.write(content)
        index = {"metadata": {}, "weight_map": dict.fromkeys(self.tensors, file)}
        (self.folder / INDEX).write_text(json.dumps(index))
        (self.folder / "config.json").write_text(json.dumps(self.config))
        if self.manifest is not None:
            (self.folder / "mixed_native_manifest.json").write_text(json.dumps(self.manifest))
        return self

    def pack(self, stem: str) -> None:
        """Store a plain linear as NVFP4."""
        self.tensors |= dict(packed(stem, self.tensors.pop(f"{stem}.weight")[1]))

    def unpack(self, stem: str) -> None:
        """Store an NVFP4 linear in BF16."""
        rows, width = self.tensors.pop(f"{stem}.weight_packed")[1]
        for part in ("weight_scale", "weight_global_scale", "input_global_scale"):
            del self.tensors[f"{stem}.{part}"]
        self.tensors[f"{stem}.weight"] = ("BF16", (rows, width * 2))


def full_base(folder: Path, sizes: dict[str, int]) -> Path:
    """The base folder, frontend files of the published ``sizes``."""
    make_sparse_checkpoint.main(folder)
    for name, n_bytes in sizes.items():
        path = folder / name.removeprefix("frontend/")
        content = path.read_bytes().rstrip()
        path.write_bytes(content[:n_bytes] + b" " * (n_bytes - len(content)))
    return folder


def full_nvfp4(folder: Path, base: Path) -> FullNvfp4:
    """The NVFP4 folder that goes with ``base``, not saved."""
    config = json.loads((base / "config.json").read_text())
    quantized = config | {"quantization_config": json.loads(json.dumps(QUANTIZATION))}
    return FullNvfp4(folder, base, quantized, dict(allocated(config)), json.loads(json.dumps(MANIFEST)))
