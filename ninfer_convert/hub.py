"""Checkpoints on the Hub, ``hf://org/name[@revision]``: into the Hub client's cache, or only as far as a plan needs.

Cache, resumed downloads, offline mode and tokens are the client's (huggingface_hub). A plan needs no weights: it gets
a folder of links to the small files, with shards that are holes behind their real headers.
"""

import atexit
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self

from ninfer_convert.checkpoint import CONFIG, HEADERS_ONLY, INDEX, SINGLE, read_json_object
from ninfer_convert.problems import Problem
from ninfer_convert.resources import TEXT_FILES, VISION_FILES
from ninfer_convert.safetensors_header import MAX_HEADER_BYTES
from ninfer_format import StorageError, UsageError
from ninfer_format.command import require_extra
from ninfer_format.writer import storage_error

Need = Literal["files", "headers", "values"]
"""Config, frontend and index files alone; also what the headers of the shards say; everything."""

# A path swallows one slash of hf://, so one is enough.
_NAME = re.compile(r"hf:/{1,2}([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)(?:@([\w.][\w./-]*))?", re.ASCII)
_SMALL_FILES = (
    CONFIG, INDEX, *TEXT_FILES, *VISION_FILES, "mixed_native_manifest.json", "hf_quant_config.json", "README.md",
    "LICENSE*", "NOTICE*",
)  # fmt: skip
_BLOCK_BYTES = 1 << 17
_START_BYTES = 64
_CONNECTIONS = 8
_CLIENT = "ninfer"


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository on the Hub, and a branch, tag or commit in it (None: its main branch)."""

    owner: str
    name: str
    revision: str | None

    @classmethod
    def parse(cls, source: str | Path) -> Self | None:
        """``hf://org/name[@revision]``; None for anything that does not begin with ``hf:/``. UsageError otherwise."""
        text = str(source)
        if not text.startswith("hf:/"):
            return None
        match = _NAME.fullmatch(text)
        if match is None or ".." in text:
            raise UsageError(f"{spelled(source)}: expected hf://org/name or hf://org/name@revision")
        return cls(*match.groups())

    @property
    def repository(self) -> str:
        """``org/name``."""
        return f"{self.owner}/{self.name}"

    def __str__(self) -> str:
        return f"hf://{self.repository}" + (f"@{self.revision}" if self.revision else "")


def spelled(source: str | Path) -> str:
    """``source`` as a user wrote it: a path has lost one of the slashes of hf://."""
    return re.sub(r"^hf:/+", "hf://", str(source))


@dataclass(frozen=True, slots=True)
class Fetched:
    """A folder with what was needed. ``commit`` is what the revision stood for."""

    folder: Path
    commit: str
    note: str


def fetch(name: HubName, need: Need) -> Fetched:
    """Get what is ``need``-ed of a repository, downloading only what the cache lacks.

    MissingExtraError without huggingface_hub; UsageError for names, revisions and permissions; StorageError when the
    Hub cannot be reached and the cache does not have it either; DiskFullError.
    """
    client = require_extra("huggingface_hub", "convert")
    if _is_offline():
        return _cached(name)
    if not sys.stderr.isatty():
        import_module("huggingface_hub.utils").disable_progress_bars()
    with _told(name):
        folder = _snapshot(client, name, name.revision, _SMALL_FILES)
    note = f"{name} is commit {folder.name}"
    if need == "files":
        return Fetched(folder, folder.name, note)
    shards = _shards(folder)
    if all((folder / shard).is_file() for shard in shards):
        return Fetched(folder, folder.name, f"{note}, which the cache holds")
    with _told(name):
        if need == "headers":
            return _headers(client, name, folder, shards, note)
        _snapshot(client, name, folder.name, shards)
    return Fetched(folder, folder.name, note)


def _is_offline() -> bool:
    return bool(import_module("huggingface_hub.constants").HF_HUB_OFFLINE)


def _cached(name: HubName) -> Fetched:
    """The snapshot in the cache as it is; what it lacks is for the plan to say."""
    folder = cached_snapshot(name.owner, name.name, name.revision)
    if folder is None:
        raise UsageError(
            f"{name}: not in the cache {hub_cache()}, and offline mode is on (HF_HUB_OFFLINE); turn it off, or "
            "download the repository first"
        )
    return Fetched(folder, folder.name, f"{name} is commit {folder.name}, from the cache (offline mode is on)")


def _snapshot(client: Any, name: HubName, revision: str | None, files: Sequence[str]) -> Path:
    return Path(
        client.snapshot_download(name.repository, revision=revision, allow_patterns=list(files), library_name=_CLIENT)
    )


def _shards(folder: Path) -> list[str]:
    """Files of the checkpoint, those the index names or the single one; names that leave the folder are left out."""
    if not (folder / INDEX).is_file():
        return [SINGLE]
    unread: list[Problem] = []
    index = read_json_object(folder / INDEX, unread) or {}
    weight_map = index.get("weight_map")
    files = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    return sorted(f for f in files if isinstance(f, str) and re.fullmatch(r"[\w.-]+", f) and f.endswith(".safetensors"))


# --- headers alone --------------------------------------------------------------------------------------------------


def _headers(client: Any, name: HubName, folder: Path, shards: Sequence[str], note: str) -> Fetched:
    """A folder named like the snapshot, with links to its files and, of every shard, the header and the size."""
    root = Path(tempfile.mkdtemp(prefix="ninfer-headers-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    mirror = root / f"models--{name.owner}--{name.name}" / "snapshots" / folder.name
    mirror.mkdir(parents=True)
    for path in folder.iterdir():
        if path.is_file():
            (mirror / path.name).symlink_to(path.resolve())
    (mirror / HEADERS_ONLY).write_text(f"{name}\n")
    system = client.HfFileSystem()

    def copy(shard: str) -> int:
        return _copy_header(system, f"{name.repository}@{folder.name}/{shard}", mirror / shard)

    with ThreadPoolExecutor(min(_CONNECTIONS, max(1, len(shards)))) as pool:
        sizes = list(pool.map(copy, [shard for shard in shards if not (mirror / shard).exists()]))
    told = f"{note}; only headers were read, {sum(sizes):,} bytes of weights were not downloaded"
    return Fetched(mirror, folder.name, told)


def _copy_header(system: Any, remote: str, target: Path) -> int:
    """Write the header of a remote shard and a hole of the rest to ``target``; the size. 0 if there is no such file."""
    try:
        with system.open(remote, "rb", block_size=_BLOCK_BYTES) as stream:
            size = int(stream.details["size"])
            head = stream.read(min(size, _START_BYTES))
            announced = 8 + int.from_bytes(head[:8], "little")
            if len(head) >= 8 and announced <= min(size, 8 + MAX_HEADER_BYTES):
                head += stream.read(max(0, announced - len(head)))
    except FileNotFoundError:
        return 0  # the plan reports the file that the index names
    with open(target, "wb") as local:
        local.write(head)
        local.truncate(size)
    return size


# --- what can go wrong ----------------------------------------------------------------------------------------------


@contextmanager
def _told(name: HubName) -> Iterator[None]:
    """Errors of the Hub client as ours, with what to do about them."""
    errors = import_module("huggingface_hub.errors")
    try:
        yield
    except errors.GatedRepoError:
        raise UsageError(
            f"{name}: the repository is gated; accept its terms on its page, then log in with `hf auth login` or set "
            "HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"{name}: no such repository, or a private one; check the name, and for a private one log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise UsageError(f"{name}: the repository has no such branch, tag or commit") from None
    except errors.HFValidationError as error:
        raise UsageError(f"{name}: {error}") from None
    except OSError as error:
        if error.errno is not None and error.filename is not None:
            raise storage_error(error, error.filename, "downloading") from None
        raise _unreachable(name, error) from None
    except Exception as error:  # of the HTTP library, whose classes differ between releases of the client
        raise _unreachable(name, error) from None


def _unreachable(name: HubName, error: Exception) -> StorageError:
    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return StorageError(f"{name}: the Hub cannot be reached ({reason}); try again, what was received is kept")


def cached_snapshot(owner: str, name: str, revision: str | None) -> Path | None:
    """The snapshot folder of a repository in the local cache, without the Hub client; None if it is not there."""
    root, wanted = hub_cache() / f"models--{owner}--{name}", revision or "main"
    reference = root / "refs" / wanted
    commit = reference.read_text().strip() if reference.is_file() else wanted
    folder = root / "snapshots" / commit
    return folder if folder.is_dir() else None


def hub_cache() -> Path:
    """Folder of the local Hub cache, by the same environment variables that the Hub client honours."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(home).expanduser() / "hub"
