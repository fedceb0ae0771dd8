"""``hf://``: a repository of a loopback Hub, in the cache or not, online and off; nothing leaves the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ninfer_convert.checkpoint import HEADERS_ONLY, Checkpoint
from ninfer_convert.hub import HubName, hub_cache, spelled
from ninfer_convert.locate import locate
from ninfer_format import SourceError, UsageError
from tests.convert.hub_server import COMMIT, Hub, Repository, running
from tests.convert.tiny import TinyCheckpoint, tiny_checkpoint, tiny_dflash

ROOT = Path(__file__).resolve().parents[2]
NAME = "someone/Tiny-2B"
MAIN = "import sys; from ninfer_convert.cli import main; sys.argv[0] = 'ninfer-convert'; main()"
# Resumes are counted in chunks of the client, which are far larger than these shards.
LOCATE = """
import sys
from pathlib import Path
import huggingface_hub.constants
from ninfer_convert.locate import locate
from ninfer_format.command import run_cli
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 1 << 12
run_cli(lambda **_: print(locate(Path(sys.argv[1]), sys.argv[2]).folder))
"""
WITHOUT_CLIENT = "import sys; sys.modules['huggingface_hub'] = None; " + MAIN


@pytest.fixture
def source(tmp_path: Path) -> TinyCheckpoint:
    """What the repository holds, and two files that nobody needs."""
    checkpoint = tiny_checkpoint(tmp_path / "upstream")
    (checkpoint.folder / "consolidated.safetensors").write_bytes(b"x" * 5_000_000)
    (checkpoint.folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    return checkpoint


@pytest.fixture
def hub(source: TinyCheckpoint) -> Iterator[Hub]:
    """A Hub with that repository under ``NAME``."""
    with running({NAME: Repository(source.folder)}) as server:
        yield server


class Machine:
    """A user's machine: its own cache, and a Hub at ``url``."""

    def __init__(self, home: Path, url: str) -> None:
        self.home, self.url = home, url

    def run(self, *arguments: object, program: str = MAIN, **environment: str) -> subprocess.CompletedProcess[str]:
        """``ninfer-convert`` with this machine's environment."""
        known = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-c", program, *map(str, arguments)]
        result = subprocess.run(
            command, cwd=ROOT, env=known | own | environment, capture_output=True, text=True, check=False
        )
        assert "Traceback" not in result.stderr, result.stderr
        assert "\x1b" not in result.stderr
        return result

    def document(self, *arguments: object, **environment: str) -> dict[str, Any]:
        result = self.run(*arguments, "--json", **environment)
        assert result.returncode == 0, result.stderr
        text = result.stdout.splitlines()[-1] if arguments[0] == "build" else result.stdout
        parsed: dict[str, Any] = json.loads(text)
        return parsed

    def located(self, name: str, need: str, **environment: str) -> Path:
        """The folder that ``name`` resolves to."""
        result = self.run(name, need, program=LOCATE, **environment)
        assert result.returncode == 0, result.stderr
        return Path(result.stdout.strip())

    @property
    def cached(self) -> set[str]:
        """Files of the snapshot in the cache."""
        folder = self.home / "hub" / f"models--{NAME.replace('/', '--')}" / "snapshots" / COMMIT
        return {path.name for path in folder.iterdir()} if folder.exists() else set()


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    return Machine(tmp_path / "home", hub.url)


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("hf://a/b", ("a", "b", None)), ("hf:/a/b", ("a", "b", None)), ("hf://A-1/B.2_c@v1.0", ("A-1", "B.2_c", "v1.0")),
     ("hf://a/b@refs/pr/1", ("a", "b", "refs/pr/1")), (f"hf://a/b@{COMMIT}", ("a", "b", COMMIT))],
)  # fmt: skip
def test_names_with_the_prefix_are_the_hubs(text: str, expected: tuple[str, str, str | None]) -> None:
    for source in (text, Path(text)):
        name = HubName.parse(source)
        assert name is not None
        assert (name.owner, name.name, name.revision) == expected
        assert spelled(Path(text)) == str(name)


@pytest.mark.parametrize("text", ["a/b", "/data/a", "./hf:/a/b", "hf/a", "C:/a", ""])
def test_other_sources_are_not(text: str) -> None:
    assert HubName.parse(text) is None
    assert spelled(text) == text


@pytest.mark.parametrize(
    "text", ["hf://", "hf://a", "hf://a/b/c", "hf://a/b@", "hf://a/../b", "hf://a/b@../x", "hf:///etc/x"]
)
def test_malformed_names_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected hf://org/name"):
        HubName.parse(text)


# --- planning from headers alone ------------------------------------------------------------------------------------


def test_plan_downloads_headers_and_no_weights(
    hub: Hub, machine: Machine, source: TinyCheckpoint, tmp_path: Path
) -> None:
    (tmp_path / "scratch").mkdir()
    remote = machine.document("plan", f"hf://{NAME}", TMPDIR=str(tmp_path / "scratch"))
    assert list((tmp_path / "scratch").iterdir()) == []
    local = machine.document("plan", source.folder, "--model-id", "tiny-2b")
    for key in ("identity", "output_bytes", "disk_bytes", "memory_bytes", "directory_sha256", "objects"):
        assert remote[key] == local[key], key
    assert remote["source"]["repository"] == NAME
    assert remote["source"]["revision"] == COMMIT
    assert remote["source"]["bytes"] == local["source"]["bytes"]
    assert remote["source"]["tensors"] == local["source"]["tensors"]
    assert any("only headers were read" in note and COMMIT in note for note in remote["notes"])
    assert not any(file.endswith(".safetensors") for file in machine.cached)
    assert "tokenizer.json" in machine.cached
    spans = [span for method, path, span, _ in hub.requests if method == "GET" and path.endswith(".safetensors")]
    assert len(spans) == 3
    assert all(span is not None and span.startswith("bytes=0-") for span in spans)


def test_long_headers_are_fetched_whole(hub: Hub, machine: Machine, source: TinyCheckpoint) -> None:
    """More than one block of the client: the padding of a header counts as header."""
    shard = source.folder / source.shards()[0]
    content = shard.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    text = content[8:end] + b" " * 300_000
    shard.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    remote, local = machine.document("plan", f"hf://{NAME}"), machine.document("plan", source.folder)
    assert remote["source"]["files"] == local["source"]["files"]


DAMAGE = {"cut": "truncated-file", "pointer": "lfs-pointer", "empty": "empty-file"}


@pytest.mark.parametrize(("damage", "code"), DAMAGE.items())
def test_what_is_wrong_with_remote_shards_is_found_before_any_download(
    machine: Machine, source: TinyCheckpoint, damage: str, code: str
) -> None:
    shard = source.folder / source.shards()[1]
    pointer = b"version https://git-lfs.github.com/spec/v1\n"
    shard.write_bytes({"cut": shard.read_bytes()[:-100], "pointer": pointer, "empty": b""}[damage])
    result = machine.run("plan", f"hf://{NAME}", "--json")
    assert result.returncode == 1
    assert [problem["code"] for problem in json.loads(result.stdout)["problems"]] == [code]


def test_shard_that_the_repository_lacks_is_a_missing_file(machine: Machine, source: TinyCheckpoint) -> None:
    (source.folder / source.shards()[1]).unlink()
    result = machine.run("plan", f"hf://{NAME}", "--json")
    assert [problem["code"] for problem in json.loads(result.stdout)["problems"]] == ["missing-shard"]


def test_stored_head_beside_tied_embeddings_is_left_to_the_build(machine: Machine, source: TinyCheckpoint) -> None:
    source.config["tie_word_embeddings"] = True
    source.save()
    planned = machine.document("plan", f"hf://{NAME}")
    assert any("build compares it" in note for note in planned["notes"])
    built = machine.run("build", f"hf://{NAME}", machine.home.parent / "x.ninfer")
    assert built.returncode == 1
    assert "a separate head is stored" in built.stderr


def test_plan_with_values_downloads_them(machine: Machine) -> None:
    machine.document("plan", f"hf://{NAME}", "--values")
    assert "model-00001-of-00003.safetensors" in machine.cached


def test_values_of_a_folder_of_headers_cannot_be_read(dense: TinyCheckpoint) -> None:
    (dense.folder / HEADERS_ONLY).write_text("x")
    with Checkpoint.open(dense.folder) as checkpoint:
        assert checkpoint.problems == ()
        with pytest.raises(SourceError, match="its values were not downloaded"):
            checkpoint.read_words("lm_head.weight", 0, 1)


# --- building -------------------------------------------------------------------------------------------------------


def test_build_downloads_what_the_index_names_once_and_records_the_revision(
    hub: Hub, machine: Machine, source: TinyCheckpoint, tmp_path: Path
) -> None:
    local, out = tmp_path / "local.ninfer", tmp_path / "x.ninfer"
    machine.document("build", source.folder, local, "--model-id", "tiny-2b")
    machine.document("build", f"hf://{NAME}", out)
    assert out.read_bytes() == local.read_bytes()
    assert "consolidated.safetensors" not in machine.cached
    assert hub.sent("consolidated.safetensors") == 0
    report = json.loads(Path(f"{out}.conversion.json").read_text())
    assert report["source"]["repository"] == NAME
    assert report["source"]["revision"] == COMMIT
    assert report["source"]["licence"]["id"] == "apache-2.0"
    assert report["arguments"]["source"] == f"hf://{NAME}"
    weights = sum((source.folder / shard).stat().st_size for shard in source.shards())
    assert hub.sent(".safetensors") == weights
    machine.document("build", f"hf://{NAME}@{COMMIT}", tmp_path / "y.ninfer")
    assert hub.sent(".safetensors") == weights
    assert (tmp_path / "y.ninfer").read_bytes() == out.read_bytes()


def test_companion_may_lie_on_the_hub_too(hub: Hub, machine: Machine, tmp_path: Path) -> None:
    hub.repositories["someone/companion"] = Repository(tiny_dflash(tmp_path / "companion"))
    planned = machine.document("plan", f"hf://{NAME}", "--dflash", "hf://someone/companion")
    assert any(entry["name"].startswith("dflash/") for entry in planned["objects"])
    assert sum("only headers were read" in note for note in planned["notes"]) == 2


def holds(folder: Path, source: TinyCheckpoint) -> bool:
    """Whether ``folder`` has every file of the checkpoint, byte for byte."""
    files = (*source.frontend, "config.json", "model.safetensors.index.json", *source.shards())
    return all((folder / file).read_bytes() == (source.folder / file).read_bytes() for file in files)


def test_broken_download_is_resumed(hub: Hub, machine: Machine, source: TinyCheckpoint) -> None:
    """The connection breaks in the middle of a shard; only the rest is asked for, by the client or by the next run.

    Clients before release 2 end with an error, whatever was received being kept.
    """
    shard = source.shards()[0]
    size = (source.folder / shard).stat().st_size
    hub.repositories[NAME].cut[shard] = size // 2
    first = machine.run(f"hf://{NAME}", "values", program=LOCATE)
    assert first.returncode == 0 or (first.returncode == 3 and "what was received is kept" in first.stderr)
    assert holds(machine.located(f"hf://{NAME}", "values"), source)
    spans = [span for method, path, span, _ in hub.requests if method == "GET" and path.endswith(shard)]
    assert spans[0] is None
    assert len(spans) == 2
    assert spans[1] is not None
    assert size // 4 < int(spans[1].removeprefix("bytes=").split("-")[0]) <= size // 2


def test_tokenizer_for_a_ranking_may_come_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["someone/trained"] = Repository(ROOT / "examples" / "tiny" / "dense")
    (tmp_path / "t.txt").write_text("hello there\n" * 50)
    machine = Machine(tmp_path / "home", hub.url)
    result = machine.run("rank", tmp_path / "t.txt", "--tokenizer", "hf://someone/trained", "--out", tmp_path / "c.i64")
    assert result.returncode == 0, result.stderr
    assert hub.sent(".safetensors") == 0


# --- offline and refusals -------------------------------------------------------------------------------------------


def test_offline_mode_uses_the_cache_and_asks_nobody(hub: Hub, machine: Machine, source: TinyCheckpoint) -> None:
    folder = machine.located(f"hf://{NAME}", "values")
    hub.requests.clear()
    for name in (NAME, f"{NAME}@main", f"{NAME}@{COMMIT}"):
        assert machine.located(f"hf://{name}", "values", HF_HUB_OFFLINE="1") == folder
    planned = machine.document("plan", f"hf://{NAME}", HF_HUB_OFFLINE="1")
    assert any("offline mode is on" in note for note in planned["notes"])
    assert planned["source"]["revision"] == COMMIT
    assert holds(folder, source)
    assert hub.requests == []


def test_cache_filled_by_other_means_serves_offline(source: TinyCheckpoint, tmp_path: Path) -> None:
    """Files and links as every Hub client lays them out, and nothing else."""
    root = tmp_path / "home" / "hub" / "models--someone--Tiny-2B"
    (root / "snapshots" / COMMIT).mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    (root / "blobs").mkdir()
    for number, path in enumerate(sorted(source.folder.iterdir())):
        path.rename(root / "blobs" / f"{number:040x}")
        (root / "snapshots" / COMMIT / path.name).symlink_to(f"../../blobs/{number:040x}")
    machine = Machine(tmp_path / "home", "http://127.0.0.1:9")
    machine.document("build", f"hf://{NAME}", tmp_path / "x.ninfer", HF_HUB_OFFLINE="1")
    missing = source.shards()[1]
    (root / "snapshots" / COMMIT / missing).unlink()
    result = machine.run("plan", f"hf://{NAME}", HF_HUB_OFFLINE="1")
    assert result.returncode == 1
    assert missing in result.stdout


def test_offline_without_a_cached_copy_is_refused(machine: Machine) -> None:
    result = machine.run("plan", f"hf://{NAME}", HF_HUB_OFFLINE="1")
    assert result.returncode == 2
    assert "offline mode is on" in result.stderr


def test_hub_that_cannot_be_reached_is_a_storage_error_unless_the_cache_has_it(machine: Machine) -> None:
    nobody = Machine(machine.home, "http://127.0.0.1:9")
    result = nobody.run(f"hf://{NAME}", "headers", program=LOCATE)
    assert result.returncode == 3
    assert "cannot be reached" in result.stderr
    folder = machine.located(f"hf://{NAME}", "values")
    assert nobody.located(f"hf://{NAME}", "headers") == nobody.located(f"hf://{NAME}", "values") == folder


@pytest.mark.parametrize(
    ("name", "expected"),
    [("hf://someone/none", "no such repository"), (f"hf://{NAME}@v9", "no such branch, tag or commit"),
     ("hf://someone/gated", "is gated"), ("hf://someone/private", "a private one"), ("hf://a--b/c", "a--b/c")],
)  # fmt: skip
def test_what_the_hub_refuses_is_told_in_one_line(hub: Hub, machine: Machine, name: str, expected: str) -> None:
    folder = hub.repositories[NAME].folder
    hub.repositories["someone/gated"] = Repository(folder, gated=True)
    hub.repositories["someone/private"] = Repository(folder, token="secret")
    result = machine.run(name, "headers", program=LOCATE)
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert expected in result.stderr


def test_token_opens_a_private_repository_and_is_never_shown(hub: Hub, machine: Machine) -> None:
    hub.repositories[NAME].token = "hf_secretsecretsecret"
    result = machine.run("plan", f"hf://{NAME}", "--json", HF_TOKEN="hf_secretsecretsecret")
    assert result.returncode == 0, result.stderr
    assert "hf_secret" not in result.stdout + result.stderr


def test_without_the_client_the_extra_is_named(machine: Machine) -> None:
    result = machine.run("plan", f"hf://{NAME}", program=WITHOUT_CLIENT)
    assert result.returncode == 2
    assert "ninfer[convert]" in result.stderr


def test_output_in_the_cache_of_the_source_is_refused(machine: Machine) -> None:
    machine.located(f"hf://{NAME}", "values")
    out = machine.home / "hub" / f"models--{NAME.replace('/', '--')}" / "x.ninfer"
    result = machine.run("build", f"hf://{NAME}", out)
    assert result.returncode != 0
    assert "inside the source" in result.stderr
    assert not out.exists()


def test_cache_folder_follows_the_clients_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert hub_cache() == Path("~/.cache/huggingface/hub").expanduser()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub_cache() == tmp_path / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert hub_cache() == tmp_path / "home" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert hub_cache() == tmp_path / "cache"


def test_plain_name_that_is_not_cached_points_to_the_prefix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="give hf://a/b@v1 to download it"):
        locate(Path("a/b@v1"))
