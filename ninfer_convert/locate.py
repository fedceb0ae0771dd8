"""Find the checkpoint: a local folder or GGUF file, a repository on the Hub, or a snapshot of one in the Hub cache."""

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from ninfer_convert.hub import HubName, Need, cached_snapshot, fetch, hub_cache
from ninfer_convert.sources.gguf_header import SUFFIX, model_name
from ninfer_format import SourceError, UsageError

_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_FILE_ADVICE = {
    ".ninfer": "is already a .ninfer artifact; give the folder of the checkpoint it should be made from",
    ".safetensors": "is one file; give the folder that also holds config.json and the tokenizer",
}


@dataclass(frozen=True, slots=True)
class Location:
    """``folder`` to read; ``name`` is what a person would call the model (folder or repository name)."""

    folder: Path
    name: str
    note: str | None = None
    """What a report should say about how it was found."""
    gguf: Path | None = None
    """The GGUF file that is the source; ``folder`` is then where it lies."""


def locate(source: Path, need: Need = "values") -> Location:
    """Resolve ``source``: a folder, a GGUF file, ``hf://org/name[@revision]``, or a name that the local cache holds.

    From the Hub at least what is ``need``-ed is there; see ``hub.fetch`` for its errors. UsageError or SourceError says
    what was found instead of a checkpoint folder.
    """
    if (hub := HubName.parse(source)) is not None:
        fetched = fetch(hub, need)
        return Location(fetched.folder, hub.name, fetched.note)
    if source.is_dir():
        return Location(source, _model_name(source))
    if source.is_file() and source.suffix.lower() == SUFFIX:
        return Location(source.parent, model_name(source.name), gguf=source)
    if source.exists():
        advice = _FILE_ADVICE.get(source.suffix.lower(), "is a file; give the folder of a safetensors checkpoint")
        raise SourceError(f"{source}: {advice}")
    if match := _HUB_NAME.fullmatch(str(source)):
        return _cached(*match.groups())
    raise UsageError(
        f"{source}: no such folder; give a checkpoint folder, or a repository on the Hub like hf://Qwen/Qwen3.6-27B"
    )


def _cached(owner: str, repo: str, revision: str | None) -> Location:
    folder = cached_snapshot(owner, repo, revision)
    if folder is None:
        name = f"{owner}/{repo}" + (f" --revision {revision}" if revision else "")
        hub = f"hf://{owner}/{repo}" + (f"@{revision}" if revision else "")
        raise UsageError(
            f"{owner}/{repo}: neither a folder nor at revision {revision or 'main'} in the Hub cache {hub_cache()}; "
            f"give {hub} to download it, or run `hf download {name}` and try again"
        )
    return Location(folder, repo)


def _model_name(folder: Path) -> str:
    """The folder's own name, or the repository's for a snapshot inside a Hub cache (whose name is a commit)."""
    resolved = folder.resolve()
    root = resolved.parent.parent
    if resolved.parent.name == "snapshots" and root.name.startswith("models--"):
        return root.name.rpartition("--")[2]
    return resolved.name


def slug(name: str) -> str:
    """``name`` as a model id: lower-case ASCII letters, digits, ``.``, ``_`` and ``-``; ``model`` if none are left."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9._]+", "-", plain).strip("-._") or "model"
