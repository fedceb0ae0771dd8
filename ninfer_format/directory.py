"""The directory: identity and ordered objects, its strict reading and its canonical spelling (specs/container.md).

Reading checks the schema; ``check_objects`` adds the registries, the signatures, the sizes and the geometry.
"""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ninfer_format.errors import DirectoryError, GeometryError, RegistryError, SignatureError, UsageError
from ninfer_format.formats import RAW_BYTES, RESOURCE_ENCODINGS, alignment_of, encoded_size
from ninfer_format.geometry import MAX_EXTENT, Span, check_spans
from ninfer_format.strict_json import check_structure, parse_strict

_WHAT = "directory"
_MAX_DEPTH = 4  # root object, objects array, entry, shape array
_MIN_ENTRY_BYTES = 60  # a resource entry without white space and a one-letter name has 77


@dataclass(frozen=True, slots=True)
class Identity:
    """``model_id``/``weights_id``: the only thing that selects a model and its weight profile."""

    model_id: str
    weights_id: str

    def __str__(self) -> str:
        return f"{self.model_id}/{self.weights_id}"

    @classmethod
    def parse(cls, text: str) -> "Identity":
        """``"model/weights"`` → Identity; UsageError when it is not two nonempty parts."""
        model, slash, weights = text.partition("/")
        if not (model and slash and weights) or "/" in weights:
            raise UsageError(f"identity {text!r} is not MODEL/WEIGHTS, e.g. qwen3.6-27b/groupwise-int")
        return cls(model, weights)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor object; ``shape`` is the logical stored shape, ``offset`` is payload-relative, both sizes in bytes."""

    name: str
    shape: tuple[int, ...]
    format: str
    layout: str
    offset: int
    n_bytes: int

    @property
    def kind(self) -> Literal["tensor"]:
        """``"tensor"``."""
        return "tensor"

    @property
    def alignment(self) -> int:
        """Required alignment of ``offset`` in bytes."""
        return alignment_of(self.layout)


@dataclass(frozen=True, slots=True)
class ResourceEntry:
    """One resource object (raw file bytes); ``offset`` is payload-relative, both sizes in bytes."""

    name: str
    encoding: str
    offset: int
    n_bytes: int

    @property
    def kind(self) -> Literal["resource"]:
        """``"resource"``."""
        return "resource"

    @property
    def alignment(self) -> int:
        """Required alignment of ``offset`` in bytes."""
        return alignment_of(self.encoding)


Entry = TensorEntry | ResourceEntry


@dataclass(frozen=True, slots=True)
class Directory:
    """A version-2 directory: identity and objects in physical order."""

    identity: Identity
    objects: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class DirectoryV1:
    """A version-1 directory: only a model id; the same entries."""

    model_id: str
    objects: tuple[Entry, ...]


_TENSOR_MEMBERS = ("name", "kind", "shape", "format", "layout", "offset", "bytes")
_RESOURCE_MEMBERS = ("name", "kind", "encoding", "offset", "bytes")


def _members(value: Any, expected: Sequence[str], where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DirectoryError(f"{where} is {_kind(value)}, expected an object with {', '.join(expected)}")
    if missing := [m for m in expected if m not in value]:
        raise DirectoryError(f"{where} lacks {', '.join(map(repr, missing))}")
    if extra := [m for m in value if m not in expected]:
        raise DirectoryError(f"{where} has unknown member {extra[0]!r}; expected exactly {', '.join(expected)}")
    return value


_KIND_NAMES: Mapping[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    type(None): "null",
}


def _kind(value: Any) -> str:
    return _KIND_NAMES.get(type(value), type(value).__name__)


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise DirectoryError(f"{where} is {_kind(value)}, expected a string")
    if not value:
        raise DirectoryError(f"{where} is empty")
    return value


def _integer(value: Any, minimum: int, where: str) -> int:
    if type(value) is not int:
        raise DirectoryError(f"{where} is {_kind(value)}, expected an integer")
    if not minimum <= value <= MAX_EXTENT:
        raise DirectoryError(f"{where} is {value}, expected {minimum} to 2^63 - 1")
    return value


def check_name(name: str, where: str) -> None:
    """Object names: nonempty, no control character, no lone surrogate; DirectoryError otherwise."""
    _string(name, where)
    for character in name:
        category = unicodedata.category(character)
        if category in ("Cc", "Cs"):
            kind = "control character" if category == "Cc" else "lone surrogate"
            raise DirectoryError(f"{where} {name[:80]!r} contains the {kind} U+{ord(character):04X}")


def _entry(value: Any, index: int) -> Entry:
    where = f"objects[{index}]"
    if not isinstance(value, dict):
        raise DirectoryError(f"{where} is {_kind(value)}, expected an object")
    kind = value.get("kind")
    if kind not in ("tensor", "resource"):
        raise DirectoryError(f"{where} has kind {kind!r:.80}, expected 'tensor' or 'resource'")
    members = _members(value, _TENSOR_MEMBERS if kind == "tensor" else _RESOURCE_MEMBERS, where)
    name = members["name"]
    check_name(name, f"{where}.name")
    where = f"object {name!r}"
    offset = _integer(members["offset"], 0, f"{where}: offset")
    n_bytes = _integer(members["bytes"], 1, f"{where}: bytes")
    if kind == "resource":
        return ResourceEntry(name, _string(members["encoding"], f"{where}: encoding"), offset, n_bytes)
    shape = members["shape"]
    if not isinstance(shape, list):
        raise DirectoryError(f"{where}: shape is {_kind(shape)}, expected an array")
    dims = tuple(_integer(d, 1, f"{where}: shape[{i}]") for i, d in enumerate(shape))
    format_name = _string(members["format"], f"{where}: format")
    return TensorEntry(name, dims, format_name, _string(members["layout"], f"{where}: layout"), offset, n_bytes)


def _entries(value: Any) -> tuple[Entry, ...]:
    if not isinstance(value, list) or not value:
        found = "an empty array" if isinstance(value, list) else _kind(value)
        raise DirectoryError(f"'objects' is {found}, expected a nonempty array")
    entries = tuple(_entry(e, i) for i, e in enumerate(value))
    seen: dict[str, int] = {}
    for i, entry in enumerate(entries):
        if (first := seen.setdefault(entry.name, i)) != i:
            raise DirectoryError(f"object name {entry.name!r} is used by objects[{first}] and objects[{i}]")
    return entries


def _parse(text: bytes) -> Any:
    check_structure(text, max_depth=_MAX_DEPTH, min_object_bytes=_MIN_ENTRY_BYTES, what=_WHAT)
    return parse_strict(text, what=_WHAT)


def parse_directory(text: bytes) -> Directory:
    """Read a version-2 directory strictly; DirectoryError names the member and what was expected."""
    root = _members(_parse(text), ("identity", "objects"), "the directory")
    identity = _members(root["identity"], ("model_id", "weights_id"), "'identity'")
    ids = Identity(*(_string(identity[m], f"identity.{m}") for m in ("model_id", "weights_id")))
    for label, value in (("identity.model_id", ids.model_id), ("identity.weights_id", ids.weights_id)):
        check_name(value, label)
    return Directory(ids, _entries(root["objects"]))


def parse_directory_v1(text: bytes) -> DirectoryV1:
    """Read a version-1 directory strictly (root members ``model_id`` and ``objects``)."""
    root = _members(_parse(text), ("model_id", "objects"), "the version-1 directory")
    model_id = _string(root["model_id"], "model_id")
    check_name(model_id, "model_id")
    return DirectoryV1(model_id, _entries(root["objects"]))


def check_entry(entry: Entry) -> None:
    """Registries, signature and recorded size of one entry; RegistryError or SignatureError names the object."""
    if isinstance(entry, ResourceEntry):
        if entry.encoding not in RESOURCE_ENCODINGS:
            raise RegistryError(
                f"object {entry.name!r}: unknown resource encoding {entry.encoding!r}; this release knows {RAW_BYTES}"
            )
        return
    try:
        expected = encoded_size(entry.format, entry.layout, entry.shape)
    except (RegistryError, SignatureError, GeometryError) as error:
        raise type(error)(f"object {entry.name!r}: {error}") from None
    if entry.n_bytes != expected:
        raise SignatureError(
            f"object {entry.name!r}: records {entry.n_bytes} bytes, but {entry.format} {list(entry.shape)} in "
            f"{entry.layout} takes exactly {expected}"
        )


def check_objects(objects: Sequence[Entry], payload_bytes: int) -> None:
    """Everything a generic reader requires of the objects of a file with ``payload_bytes`` bytes of payload.

    Raises RegistryError, SignatureError, GeometryError or TruncatedError.
    """
    for entry in objects:
        check_entry(entry)
    check_spans([Span(e.name, e.offset, e.n_bytes, e.alignment) for e in objects], payload_bytes)


def entry_members(entry: Entry) -> dict[str, Any]:
    """The entry as the JSON members of the directory, in canonical order."""
    if isinstance(entry, ResourceEntry):
        head: dict[str, Any] = {"name": entry.name, "kind": "resource", "encoding": entry.encoding}
    else:
        head = {
            "name": entry.name,
            "kind": "tensor",
            "shape": list(entry.shape),
            "format": entry.format,
            "layout": entry.layout,
        }
    return head | {"offset": entry.offset, "bytes": entry.n_bytes}


def dump_canonical(value: Any) -> bytes:
    """Canonical JSON spelling: UTF-8, no white space, members in the given order, minimal escapes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8")


def canonical_json(directory: Directory) -> bytes:
    """The version-2 directory text that published artifacts have, byte for byte."""
    identity = {"model_id": directory.identity.model_id, "weights_id": directory.identity.weights_id}
    return dump_canonical({"identity": identity, "objects": [entry_members(e) for e in directory.objects]})


def canonical_json_v1(directory: DirectoryV1) -> bytes:
    """The version-1 directory text in canonical spelling."""
    return dump_canonical({"model_id": directory.model_id, "objects": [entry_members(e) for e in directory.objects]})
