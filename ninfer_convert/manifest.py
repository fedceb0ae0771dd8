"""``artifact-manifest.json``: what an artifact is and what it was made from, without a path or a time in it.

Schema ``ninfer.artifact-manifest``, version 1: specs/publishing.md. The same build gives the same bytes, whatever the
machine, the number of workers or the number of times it was resumed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ninfer_convert.summaries import Report, stored_tensors, total_bits_per_weight
from ninfer_format.directory import Identity

SCHEMA = "ninfer.artifact-manifest"
VERSION = 1
FILE_NAME = "artifact-manifest.json"
MINIMUM_RUNTIME = "0.1.0"
"""The first release whose runtime reads everything that this one writes."""

SOURCE_ROLES = ("source", "base", "dflash")
"""Members of a report that describe a checkpoint folder."""
PATH_ARGUMENTS = ("source", "frontend", "base", "dflash", "ranking", "activation_stats")
"""Arguments whose values are places on the machine that ran the build."""
_UNSAID_ARGUMENTS = (*PATH_ARGUMENTS, "device", "recipe")
"""They do not decide a byte, or what they decide stands elsewhere in the manifest."""
_SOURCE_MEMBERS = ("name", "repository", "revision", "licence", "config_sha256", "tensors", "dtypes", "kinds", "bytes")
_FILE_MEMBERS = ("file", "bytes", "tensors", "header_sha256", "sha256")


@dataclass(frozen=True, slots=True)
class ArtifactFacts:
    """The finished file: base name, bytes, SHA-256, bytes of its directory text, label of a published artifact."""

    file: str
    n_bytes: int
    sha256: str
    directory_bytes: int
    published_as: str | None


def artifact_manifest(report: Report, facts: ArtifactFacts) -> dict[str, Any]:
    """The manifest of an artifact from its conversion report."""
    identity, output = Identity.parse(report["identity"]), report["output"]
    tensors = stored_tensors(report)
    return {
        "schema": SCHEMA,
        "schema_version": VERSION,
        "artifact": {
            "file": facts.file,
            "bytes": facts.n_bytes,
            "sha256": facts.sha256,
            "model_id": identity.model_id,
            "weights_id": identity.weights_id,
            "published_contract": bool(report.get("published")),
            "published_artifact": facts.published_as,
            "container_version": 2,
            "payload_offset": output["payload_offset"],
            "directory_bytes": facts.directory_bytes,
            "directory_sha256": output["directory_sha256"],
        },
        "sources": [_source(role, report[role]) for role in SOURCE_ROLES if report.get(role)],
        "conversion": {
            "converter": {"package": "ninfer", "version": report["environment"].get("ninfer")},
            "recipe": report["recipe"],
            "options": {
                k: v for k, v in report["arguments"].items() if k not in _UNSAID_ARGUMENTS and not _is_path(k, v)
            },
            "activations": report.get("activations"),
            "draft_head": report.get("draft_head"),
            "notes": lasting_notes(report["notes"]),
        },
        "runtime": {"package": "ninfer", "minimum_version": MINIMUM_RUNTIME},
        "inventory": {
            **report["statistics"],
            "weights": sum(tensor.n_values for tensor in tensors if tensor.format != "I32"),
            "bits_per_weight": round(total_bits_per_weight(tensors), 4),
        },
        "frontend_sha256": {o["name"]: o["sha256"] for o in report["objects"] if o["name"].startswith("frontend/")},
    }


def _is_path(name: str, value: Any) -> bool:
    return name != "identity" and isinstance(value, str) and ("/" in value or "\\" in value)


def lasting_notes(notes: Sequence[str]) -> list[str]:
    """Notes about the artifact, without those about how often its build was interrupted."""
    return [note for note in notes if not note.startswith(("--resume", "resumed:"))]


def _source(role: str, source: Mapping[str, Any]) -> dict[str, Any]:
    facts = {name: source.get(name) for name in _SOURCE_MEMBERS}
    files = [{name: shard.get(name) for name in _FILE_MEMBERS} for shard in source.get("shards", ())]
    return {"role": role, **facts, "files": files}
