"""Where a checkpoint folder comes from and under which licence, as far as its own files say so.

Nothing here is guessed: a repository and a revision are known only for a snapshot in the Hub cache, a shard's digest
only where the cache is addressed by it, a licence only where a README or a licence file names one.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

MAX_TEXT_BYTES = 1 << 20
_LICENCE_FILES = re.compile(r"(?:licen[cs]e|copying|notice)(?:[-._].{0,40})?", re.IGNORECASE)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MEMBER = re.compile(r"(license|license_name|license_link):[ \t]*(.*)")
_ITEM = re.compile(r"[ \t]*-[ \t]+(.+)")


def source_facts(folder: Path) -> dict[str, Any]:
    """``name``, ``repository``, ``revision``, ``config_sha256`` and ``licence``; None for what is unknown."""
    repository, revision = hub_origin(folder)
    config = folder / "config.json"
    return {
        "name": repository.rpartition("/")[2] if repository else folder.resolve().name,
        "repository": repository,
        "revision": revision,
        "config_sha256": hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None,
        "licence": licence_of(folder),
    }


def hub_origin(folder: Path) -> tuple[str | None, str | None]:
    """(``org/name``, commit) of a snapshot folder in a Hub cache, else (None, None)."""
    real = folder.resolve()
    parts = real.parent.parent.name.split("--")
    if real.parent.name != "snapshots" or parts[0] != "models" or len(parts) not in (2, 3):
        return None, None
    return "/".join(parts[1:]), real.name


def content_sha256(file: Path) -> str | None:
    """The digest of a file that the Hub cache stores under its digest; None for any other file."""
    real = file.resolve()
    return real.name if real.parent.name == "blobs" and _SHA256.fullmatch(real.name) else None


def licence_of(folder: Path) -> dict[str, Any] | None:
    """``id``, ``name``, ``link`` as the README's front matter has them, and the licence ``files``; None without any."""
    declared = {"license": None, "license_name": None, "license_link": None} | _front_matter(folder / "README.md")
    files = [_licence_file(path) for path in _licence_files(folder)]
    if not files and not any(declared.values()):
        return None
    return {
        "id": declared["license"],
        "name": declared["license_name"],
        "link": declared["license_link"],
        "files": files,
    }


def _licence_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    named = (path for path in folder.iterdir() if _LICENCE_FILES.fullmatch(path.name))
    return sorted(path for path in named if path.is_file() and path.stat().st_size <= MAX_TEXT_BYTES)


def _licence_file(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    lines = (line.strip() for line in content.decode("utf-8", "replace").splitlines())
    title = next((line for line in lines if line), "")
    return {"file": path.name, "sha256": hashlib.sha256(content).hexdigest(), "title": title[:120]}


def _front_matter(readme: Path) -> dict[str, str | None]:
    """Licence members of the block between two ``---`` lines at the top; a list gives its items with commas."""
    if not readme.is_file():
        return {}
    with open(readme, "rb") as stream:
        lines = stream.read(MAX_TEXT_BYTES).decode("utf-8", "replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    found: dict[str, str | None] = {}
    open_list: str | None = None
    for line in lines[1:]:
        if line.strip() == "---":
            return found
        if member := _MEMBER.fullmatch(line.rstrip()):
            name, value = member[1], _plain(member[2])
            found[name], open_list = value, name if value is None else None
        elif open_list is not None and (item := _ITEM.fullmatch(line)):
            found[open_list] = ", ".join(filter(None, (found[open_list], _plain(item[1]))))
        else:
            open_list = None
    return {}


def _plain(value: str) -> str | None:
    """A YAML scalar without quotes and comment, at most 200 characters."""
    value = value.strip()
    if value[:1] in ("'", '"'):
        value = value[1:].partition(value[0])[0]
    else:
        value = re.split(r"\s#", value)[0].strip().strip("[]")
    return value[:200] or None
