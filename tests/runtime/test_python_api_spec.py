"""The examples of specs/python-api.md are executed, and its tables name what exists."""

from __future__ import annotations

import doctest
import re
from dataclasses import fields
from pathlib import Path

from ninfer_runtime import LLM, CompletionOutput, EngineConfig, GenerationParams, StreamedOutput
from tests.runtime.conftest import ArtifactOf

PAGE = Path(__file__).resolve().parents[2] / "specs" / "python-api.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_examples_print_what_they_say(artifact_of: ArtifactOf) -> None:
    result = doctest.testfile(
        str(PAGE),
        module_relative=False,
        globs={"MODEL": artifact_of("dense", "bf16")},
        optionflags=doctest.ELLIPSIS,
        encoding="utf-8",
    )
    assert result.attempted > 20
    assert result.failed == 0


def names_in(heading: str) -> set[str]:
    """Code words in the section under a heading."""
    section = TEXT.partition(f"## {heading}")[2].partition("\n## ")[0]
    return set(re.findall(r"`(\w+)", section))


def test_every_parameter_and_every_part_of_a_result_is_explained() -> None:
    assert {field.name for field in fields(GenerationParams)} <= names_in("3.")
    assert {field.name for field in fields(CompletionOutput)} | {"message"} <= names_in("4.")
    assert {field.name for field in fields(StreamedOutput)} <= names_in("4.")
    assert {"generate", "chat", "generate_stream", "chat_stream"} <= names_in("2.")
    public = {name for name in vars(LLM) if not name.startswith("_")}
    assert public <= set(re.findall(r"\w+", TEXT)), "a public method is not on the page"


def test_the_settings_on_the_page_exist() -> None:
    rows = TEXT.partition("| setting |")[2].partition("\n\n")[0].splitlines()[2:]
    settings = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert len(settings) > 10
    assert settings <= {field.name for field in fields(EngineConfig)}
