"""Case A33: where checkpoints lie and where outputs go. Names of any script, Hub caches of links, untouched sources."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ninfer_convert.pipeline import build
from ninfer_convert.plan import ConversionPlan
from ninfer_format import Artifact, SourceError, UsageError
from tests.convert.tiny import TinyCheckpoint, tiny_checkpoint

PlanOf = Callable[..., ConversionPlan]


def codes(plan: ConversionPlan) -> list[str]:
    return [problem.code for problem in plan.problems]


@pytest.mark.parametrize("name", ["模型 7b", "with spaces ü", "Ünïcødé-Model"])
def test_names_of_any_script_work(tmp_path: Path, plan_of: PlanOf, name: str) -> None:
    source = tiny_checkpoint(tmp_path / name)
    assert plan_of(source, out=tmp_path / f"{name}.ninfer").problems == ()


def test_trailing_slash_and_relative_paths_give_the_folders_name(
    dense: TinyCheckpoint, plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(dense.folder)
    for path in (Path(f"{dense.folder}/"), Path("."), Path("../tiny-dense/")):
        assert plan_of(path).require().identity.model_id == "tiny-dense"


@pytest.fixture
def hub_cache(dense: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``dense`` as a Hub cache stores it: a snapshot of relative links into blobs. Its repository's folder."""
    root = tmp_path / "cache" / "models--someone--Tiny-2B"
    snapshot = root / "snapshots" / "0123456789abcdef"
    (root / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(dense.folder.iterdir())):
        path.rename(root / "blobs" / f"{i:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{i:040x}")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123456789abcdef\n")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return root


def test_hub_snapshot_of_links_is_read_and_named_by_its_repository(hub_cache: Path, plan_of: PlanOf) -> None:
    for source in (hub_cache / "snapshots" / "0123456789abcdef", Path("someone/Tiny-2B"),
                   Path("someone/Tiny-2B@0123456789abcdef")):  # fmt: skip
        plan = plan_of(source)
        assert plan.problems == ()
        assert plan.require().identity.model_id == "tiny-2b"
        with plan.checkpoint as checkpoint:
            checkpoint.read_words("lm_head.weight")


@pytest.mark.parametrize("name", ["someone/other", "someone/Tiny-2B@v2"])
def test_hub_name_that_is_not_cached_says_how_to_get_it(hub_cache: Path, plan_of: PlanOf, name: str) -> None:
    with pytest.raises(UsageError, match="hf download someone/"):
        plan_of(Path(name))


def test_source_that_is_no_folder_is_refused_with_what_it_is(dense: TinyCheckpoint, plan_of: PlanOf) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        plan_of(dense.folder / "none")
    for name, expected in (("x.ninfer", "already a .ninfer artifact"), ("x.bin", "is a file")):
        (dense.folder / name).write_bytes(b"x")
        with pytest.raises(SourceError, match=expected):
            plan_of(dense.folder / name)


def test_output_in_the_source_or_its_cache_is_refused(hub_cache: Path, plan_of: PlanOf, tmp_path: Path) -> None:
    source = hub_cache / "snapshots" / "0123456789abcdef"
    (tmp_path / "way-in").symlink_to(hub_cache)
    for out in (source / "o.ninfer", hub_cache / "blobs" / "o.ninfer", tmp_path / "way-in" / "blobs" / "o.ninfer"):
        assert codes(plan_of(source, out=out)) == ["output-in-source"]
    shard = source / "model-00001-of-00003.safetensors"
    assert codes(plan_of(source, out=shard, force=True)) == ["output-is-link", "output-in-source"]


def test_output_that_cannot_be_a_new_file_is_refused(dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path) -> None:
    (tmp_path / "there.ninfer").write_bytes(b"x")
    (tmp_path / "link.ninfer").symlink_to("there.ninfer")
    os.mkfifo(tmp_path / "fifo.ninfer")
    expected = {"there.ninfer": "output-exists", "link.ninfer": "output-is-link", "fifo.ninfer": "output-not-a-file",
                "none/o.ninfer": "no-output-folder", "": "output-is-folder"}  # fmt: skip
    for name, code in expected.items():
        assert codes(plan_of(dense, out=tmp_path / name)) == [code]
    assert codes(plan_of(dense, out=dense.folder)) == ["output-is-folder"]
    assert plan_of(dense, out=tmp_path / "there.ninfer", force=True).problems == ()


@pytest.mark.parametrize("name", ["plain", "模型 7b ü"])
def test_read_only_source_of_any_name_is_built_and_stays_as_it_was(tmp_path: Path, plan_of: PlanOf, name: str) -> None:
    source = tiny_checkpoint(tmp_path / name)
    files = [*source.folder.iterdir(), source.folder]
    for path in files:
        path.chmod(path.stat().st_mode & ~0o222)
    before = [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in files]
    try:
        out = build(plan_of(source, out=tmp_path / f"{name}.ninfer")).path
        assert [(path, path.stat().st_mtime_ns, path.stat().st_size) for path in files] == before
    finally:
        source.folder.chmod(0o755)
    with Artifact.open(out) as artifact:
        assert artifact.identity.weights_id == "groupwise-int"


def test_build_from_a_hub_cache_writes_nothing_into_it(hub_cache: Path, plan_of: PlanOf, tmp_path: Path) -> None:
    def contents() -> dict[str, bytes | str]:
        return {
            str(path.relative_to(hub_cache)): os.readlink(path) if path.is_symlink() else path.read_bytes()
            for path in sorted(hub_cache.rglob("*"))
            if not path.is_dir()
        }

    before = contents()
    build(plan_of(hub_cache / "snapshots" / "0123456789abcdef", out=tmp_path / "o.ninfer"))
    assert contents() == before
