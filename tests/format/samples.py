"""Small artifacts for the tests of the verifier and the migrator, and the command line run inside the process."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ninfer_format.directory import (
    Directory,
    DirectoryV1,
    Entry,
    Identity,
    ResourceEntry,
    TensorEntry,
    canonical_json_v1,
)
from ninfer_format.formats import encoded_size, layout_for
from ninfer_format.inventory import Inventory, plan_inventory
from ninfer_format.prefix import prefix_bytes
from ninfer_format.published import CONFIG_RESOURCE
from ninfer_format.reader import Artifact
from ninfer_format.writer import ArtifactWriter
from tests.format.geometries import tiny_config

GOLDEN = Path(__file__).parents[1] / "golden"
INDEX: dict[str, Any] = json.loads((GOLDEN / "index.json").read_text(encoding="utf-8"))


def golden_cases(group: str) -> list[dict[str, Any]]:
    """The rows of one group of tests/golden/index.json."""
    rows: list[dict[str, Any]] = INDEX[group]
    return rows


def random_payloads(directory: Directory, seed: int) -> Iterator[tuple[str, bytes]]:
    rng = np.random.default_rng(seed)
    for entry in directory.objects:
        yield entry.name, rng.bytes(entry.n_bytes)


def write_artifact(path: Path, directory: Directory, seed: int = 0) -> Path:
    """A valid file with random payload bytes (their values mean nothing)."""
    with ArtifactWriter(path, directory, overwrite=True) as writer:
        for name, payload in random_payloads(directory, seed):
            writer.write(name, payload)
        writer.commit()
    return path


def tensor(name: str, shape: Sequence[int], format: str, offset: int) -> TensorEntry:
    layout = layout_for(format)
    return TensorEntry(name, tuple(shape), format, layout, offset, encoded_size(format, layout, shape))


def packed(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """The same objects at the first permitted offsets."""
    cursor, placed = 0, []
    for entry in entries:
        cursor += -cursor % entry.alignment
        placed.append(replace(entry, offset=cursor))
        cursor += entry.n_bytes
    return tuple(placed)


CHUNKY = Directory(
    Identity("chunky", "test"),
    packed(
        [
            ResourceEntry("frontend/note", "raw-bytes-v1", 0, 301),
            tensor("text/first", (1_500_001,), "FP32", 0),
            tensor("text/norm", (33,), "BF16", 0),
            tensor("text/big", (2600, 4100), "BF16", 0),
            tensor("text/last", (77,), "FP32", 0),
        ]
    ),
)
"""Objects of 27.3 MB: four chunks, one object in three of them, gaps in two."""


def small_v1(model_id: str = "old-model", n_norms: int = 200) -> DirectoryV1:
    """A version-1 directory of several sectors (about 22 KiB of JSON)."""
    entries: list[Entry] = [ResourceEntry("frontend/note", "raw-bytes-v1", 0, 5)]
    entries += [tensor(f"text/layers/{i}/input_norm", (3,), "BF16", 0) for i in range(n_norms)]
    return DirectoryV1(model_id, packed(entries))


def write_v1(path: Path, directory: DirectoryV1, *, text: bytes | None = None, seed: int = 0) -> Path:
    """A version-1 file with random payloads and zero padding; ``text`` replaces the canonical directory."""
    text = canonical_json_v1(directory) if text is None else text
    header = prefix_bytes(1, len(text)) + text
    header += bytes(-len(header) % 4096)
    last = directory.objects[-1]
    payload = bytearray(last.offset + last.n_bytes)
    for name, content in random_payloads(Directory(Identity("x", "y"), directory.objects), seed):
        entry = next(e for e in directory.objects if e.name == name)
        payload[entry.offset : entry.offset + entry.n_bytes] = content
    path.write_bytes(header + payload)
    return path


def custom_inventory(name: str = "dense", recipe: str = "groupwise-int") -> tuple[Inventory, bytes]:
    """Plan of a trained example as a custom artifact, and its config resource."""
    config = tiny_config(name, recipe)
    text = config.to_json()
    sizes = {"frontend/tokenizer.json": 11, CONFIG_RESOURCE: len(text)}
    identity = Identity(f"tiny-{name}", recipe)
    return plan_inventory(config.geometry, config.recipe, identity=identity, resources=sizes), text


def write_custom(path: Path, directory: Directory, config_text: bytes) -> Path:
    """A custom artifact whose tensors are all zero bytes (valid values in every format but NVFP4)."""
    with ArtifactWriter(path, directory, overwrite=True) as writer:
        for entry in directory.objects:
            is_config = entry.name == CONFIG_RESOURCE
            writer.write(entry.name, config_text if is_config else bytes(entry.n_bytes))
        writer.commit()
    return path


def region_of(path: Path, position: int) -> str:
    """What the byte at a file position belongs to: an object's name, header, padding or trailing."""
    with Artifact.open(path) as artifact:
        if position < 16 + artifact.json_bytes:
            return "header"
        end = 0
        for entry in artifact.objects:
            begin, end = artifact.span(entry.name)
            if begin <= position < end:
                return entry.name
        return "padding" if position < end else "trailing"


def flipped(path: Path, out: Path, position: int, bit: int = 0) -> Path:
    """A copy of ``path`` with one bit inverted."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    out.write_bytes(content)
    return out


@dataclass(frozen=True, slots=True)
class Ran:
    """Outcome of one command: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.out)
        return document


class _Stdout(io.TextIOWrapper):
    """Captured text whose ``buffer`` takes bytes, as a real stdout does."""

    def __init__(self) -> None:
        self.raw_bytes = io.BytesIO()
        super().__init__(self.raw_bytes, encoding="utf-8", errors="backslashreplace", write_through=True)


def ninfer_verify(*arguments: str | Path) -> Ran:
    """Run ``ninfer-verify`` in this process, exactly through its entry point."""
    from ninfer_format.cli import main

    out, err, argv = _Stdout(), io.StringIO(), sys.argv
    sys.argv = ["ninfer-verify", *map(str, arguments)]
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as ended:
                code = int(ended.code or 0)
    finally:
        sys.argv = argv
    return Ran(code, out.raw_bytes.getvalue().decode("utf-8", "backslashreplace"), err.getvalue())
