"""The house itself: public names, typed wheel, short files, linked specs; nothing committed names a machine."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ninfer_format", "ninfer_convert", "ninfer_runtime")
MAX_LINES = 500

PROMISED = (
    "Artifact", "ArtifactWriter", "plan_inventory", "encode_tensor", "pack_tensor", "unpack_tensor", "decode_tensor",
    "encoded_size", "verify", "migrate", "NinferError",
)  # fmt: skip

# Put together here so that this file does not hold what it looks for.
HOMES = ("work", "root", "home", "Users", "mnt", "workspace")
HOSTS = ("pypi" + r"\.org", "python" + r"hosted\.org", "download" + r"\.pytorch", "npm" + r"js\.org")
MACHINE_PATHS = re.compile(r"(?<![\w.>])/(" + "|".join(HOMES) + ")/")
REGISTRY_HOSTS = re.compile("|".join(HOSTS))
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".cfg", ".sh", ".yml", ".yaml", ".json", ".jinja", ".html", ""}

SPEC_PAGES = (
    "container", "formats", "layouts", "inventory", "migration", "conversion", "models", "program", "engine",
    "index", "cli", "verify", "convert-cli", "artifact-tools", "nvfp4-sources", "benchmarks", "kernels", "grammars",
    "serving", "api-openai", "text-stream", "prefix-reuse",
)  # fmt: skip


@cache
def committed() -> tuple[Path, ...]:
    """Files git knows, or every file outside ignored folders when this is not a clone."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return tuple(ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())
    skipped = {".venv", "build", "dist", "__pycache__"}
    return tuple(path for path in ROOT.rglob("*") if path.is_file() and not skipped & set(path.relative_to(ROOT).parts))


def texts() -> list[Path]:
    return [path for path in committed() if path.suffix in TEXT_SUFFIXES]


@pytest.mark.parametrize("name", PROMISED)
def test_promised_name_is_public_in_ninfer_format(name: str) -> None:
    package = importlib.import_module("ninfer_format")
    assert hasattr(package, name), f"ninfer_format.{name} is missing"
    assert name in package.__all__, f"{name} is not in ninfer_format.__all__"


@pytest.mark.parametrize("package_name", PACKAGES)
def test_all_lists_exactly_the_public_names_each_with_a_docstring(package_name: str) -> None:
    package = importlib.import_module(package_name)
    names = list(package.__all__)
    assert len(names) == len(set(names)), "a name stands twice in __all__"
    absent = [name for name in names if not hasattr(package, name)]
    assert not absent, f"__all__ names what the package lacks: {absent}"
    homes = {name: str(getattr(value, "__module__", "")) for name, value in vars(package).items()}
    bound = {name for name, home in homes.items() if not name.startswith("_") and home.startswith("ninfer_")}
    bound -= {name for name, home in homes.items() if home == "ninfer_format.lazy_names"}
    assert bound <= set(names), f"bound in {package_name} but not in __all__: {sorted(bound - set(names))}"
    for name in names:
        value = getattr(package, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert (value.__doc__ or "").strip(), f"{package_name}.{name} has no docstring"


def test_wheel_ships_three_typed_packages_three_commands_and_the_licence(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    run = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("ninfer-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
        shipped = {name for name in names if name.startswith(f"{package}/") and name.endswith(".py")}
        present = {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")}
        assert shipped == present
    page = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ninfer_runtime/serve/web").iterdir()}
    assert page
    assert page <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == set(PACKAGES)
    assert any(name.endswith("/LICENSE") for name in names)
    for command in ("ninfer-convert", "ninfer-verify", "ninfer-run"):
        assert f"{command} = " in entry_points


def test_extras_and_the_test_group_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    assert set(extras) == {"convert", "cpu", "cuda", "serve", "media", "plots", "gguf", "grammar", "all"}
    base = {re.split(r"[<>=\[ ]", requirement)[0] for requirement in project["project"]["dependencies"]}
    assert base == {"numpy", "typer", "rich", "msgpack", "zstandard"}
    assert "test" in project["dependency-groups"]
    assert all(group in extras["all"][0] for group in set(extras) - {"all"})


def test_licence_is_the_full_apache_text() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("pattern", [MACHINE_PATHS, REGISTRY_HOSTS], ids=["paths", "hosts"])
def test_no_committed_text_names_a_machine(pattern: re.Pattern[str]) -> None:
    found = []
    for path in texts():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if hit := pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line[max(0, hit.start() - 30) : hit.end() + 30]}")
    assert not found, "\n".join(found)


def test_no_source_file_is_longer_than_500_lines() -> None:
    oracle = ROOT / "tests" / "oracle"
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in committed()
        if path.suffix == ".py" and oracle not in path.parents
    }
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_LINES}


@pytest.mark.parametrize("page", SPEC_PAGES)
def test_spec_page_is_written_and_listed(page: str) -> None:
    text = (ROOT / "specs" / f"{page}.md").read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert len(text.split()) > 150, f"specs/{page}.md says almost nothing"
    assert f"({page}.md)" in (ROOT / "specs" / "README.md").read_text(encoding="utf-8")


def test_every_spec_page_is_in_the_table_of_contents() -> None:
    contents = (ROOT / "specs" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "specs").glob("*.md")} - {"README.md"}
    assert not {page for page in pages if f"({page})" not in contents}


def test_relative_links_of_every_page_resolve() -> None:
    dead = []
    for page in (path for path in committed() if path.suffix == ".md"):
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
        dead += [f"{page.name}: {name}" for name in targets if "://" not in name and not (page.parent / name).exists()]
    assert not dead


@pytest.mark.parametrize("page", ["README.md", *(f"specs/{page}.md" for page in SPEC_PAGES)])
def test_examples_of_a_page_print_what_they_say(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = doctest.testfile(str(ROOT / page), module_relative=False, optionflags=doctest.ELLIPSIS, encoding="utf-8")
    assert result.failed == 0
