"""The examples of specs/index.md, specs/migration.md and specs/verify.md print what they say; tables match the code."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from ninfer_format import digests, verifier
from tests.format.samples import ninfer_verify

ROOT = Path(__file__).resolve().parents[2]


def page(name: str) -> str:
    return (ROOT / "specs" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["index", "migration", "verify"])
def test_examples_print_what_they_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = ROOT / "specs" / f"{name}.md"
    result = doctest.testfile(str(path), module_relative=False, optionflags=doctest.ELLIPSIS, encoding="utf-8")
    assert result.failed == 0
    assert result.attempted > 1


def test_index_members_are_the_documented_ones() -> None:
    text = page("index")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(digests._MEMBERS)
    assert f"{digests.CHUNK_BYTES} (8 MiB)" in text
    assert digests.INDEX_SCHEMA in text


def test_every_option_and_level_is_documented() -> None:
    text = page("verify")
    for command in ("check", "index", "show", "sums", "inventory", "migrate"):
        assert f"## {command} " in text
        shown = ninfer_verify(command, "--help").out
        for option in set(re.findall(r"--[a-z][a-z-]+", shown)) - {"--help", "--json", "--objects"}:
            assert option in text, f"{command} {option}"
    for level in verifier.LEVELS:
        assert f"--level {level}" in text
