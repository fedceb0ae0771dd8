"""Find the checkpoint: a local folder, or a Hub name that resolves to a snapshot in the local Hub cache."""

import os
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from ninfer_format import SourceError, UsageError

_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_FILE_ADVICE = {
    ".ninfer": "is already a .ninfer artifact; give the folder of the checkpoint it should be made from",
    ".gguf": "is a GGUF file; this release converts safetensors checkpoints in BF16, F16 or F32",
    ".safetensors": "is one file; give the folder that also holds config.json and the tokenizer",
}


@dataclass(frozen=True, slots=True)
class Location:
    """``folder`` to read; ``name`` is what a person would call the model (folder or repository name)."""

    folder: Path
    name: str


def hub_cache() -> Path:
    """Folder of the local Hub cache, by the same environment variables that the Hub client honours."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(home).expanduser() / "hub"


def locate(source: Path) -> Location:
    """Resolve ``source``; UsageError or SourceError says what was found instead of a checkpoint folder."""
    if source.is_dir():
        return Location(source, _model_name(source))
    if source.exists():
        advice = _FILE_ADVICE.get(source.suffix.lower(), "is a file; give the folder of a safetensors checkpoint")
        raise SourceError(f"{source}: {advice}")
    if match := _HUB_NAME.fullmatch(str(source)):
        return _cached(*match.groups())
    raise UsageError(f"{source}: no such folder; give a checkpoint folder or a Hub name like Qwen/Qwen3.6-27B")


def _cached(owner: str, repo: str, revision: str | None) -> Location:
    cache, wanted = hub_cache(), revision or "main"
    root = cache / f"models--{owner}--{repo}"
    reference = root / "refs" / wanted
    commit = reference.read_text().strip() if reference.is_file() else wanted
    folder = root / "snapshots" / commit
    if not folder.is_dir():
        name = f"{owner}/{repo}" + (f" --revision {revision}" if revision else "")
        raise UsageError(
            f"{owner}/{repo}: neither a folder nor at revision {wanted} in the Hub cache {cache}; "
            f"download it with `hf download {name}` and try again"
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
