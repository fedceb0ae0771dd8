"""ninfer-run with drafts and quantized keys and values: the same answer, and rows that say what was done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.runtime.conftest import ArtifactOf
from tests.runtime.run_command import GREEDY, SUM, Ninfer, in_this_process


@pytest.fixture(scope="module")
def model(artifact_of: ArtifactOf) -> Path:
    return artifact_of("dense", "bf16")


@pytest.fixture
def ninfer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ninfer:
    return in_this_process(capsys, monkeypatch)


def test_drafts_change_the_summary_and_not_the_answer(ninfer: Ninfer, model: Path) -> None:
    plain = ninfer("generate", model, "--prompt", SUM, *GREEDY)
    assert plain.code == 0, plain.err
    assert "drafts" not in plain.err
    assert "keys and values" not in plain.err
    for flags, said in (
        (("--draft-tokens", "3"), "3 by mtp"),
        (("--draft-tokens", "5", "--lm-head-draft", "--no-draft-backoff"), "5 by mtp, small head"),
    ):
        run = ninfer("generate", model, "--prompt", SUM, *GREEDY, "--spec", "mtp", *flags)
        assert (run.code, run.out) == (0, plain.out)
        rows = dict(re.findall(r"^(?:engine|tokens) +\| (drafts|generated) +\| (.*)$", run.err, re.MULTILINE))
        assert re.search(rf"^engine \| drafts +\| {said}$", run.err, re.MULTILINE)
        found = re.fullmatch(r"(\d+) of (\d+) accepted \(\d+%\), by position ([\d, ]+)", rows["drafts"])
        assert found is not None
        accepted, drafted, at = int(found[1]), int(found[2]), [int(n) for n in found[3].split(", ")]
        assert drafted >= accepted == sum(at) > 0
        assert len(at) == int(flags[1])


@pytest.mark.parametrize("rotation, said", [("on", "int8, rotated"), ("off", "int8")])
def test_quantized_keys_and_values_are_named(ninfer: Ninfer, model: Path, rotation: str, said: str) -> None:
    flags = ("--kv-dtype", "int8", "--kv-rotation", rotation, "--kv-capacity", "auto")
    run = ninfer("generate", model, "--prompt", SUM, *GREEDY, *flags)
    assert run.code == 0, run.err
    assert "12 + 7 = 19." in run.out
    assert re.search(rf"^engine \| keys and values \| {said}$", run.err, re.MULTILINE)


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--spec", "mtp", "--draft-tokens", "9"), "draft_tokens is 9, expected an integer from 1 to 5"),
        (("--draft-tokens", "2"), "draft_tokens and lm_head_draft need spec"),
        (("--kv-capacity", "nothing"), "nothing"),
    ],
)
def test_options_that_cannot_work_are_one_line(
    ninfer: Ninfer, model: Path, flags: tuple[str, ...], message: str
) -> None:
    run = ninfer("generate", model, "--prompt", SUM, *flags)
    assert (run.code, run.out) == (2, "")
    assert message in run.err
