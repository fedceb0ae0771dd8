"""Every golden container, good and bad, through the reader, the verifier and the command."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from ninfer_format import Artifact, canonical_json, verify
from ninfer_format.errors import NinferError
from tests.format.samples import GOLDEN, golden_cases, ninfer_verify

UNSUPPORTED = {
    "magic-v1", "magic-v3", "format-unknown", "format-alias", "layout-unknown", "encoding-unknown",
}  # fmt: skip


def rows(group: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", golden_cases(group), ids=lambda case: case.get("id", case["file"]))


@rows("malformed")
def test_malformed_golden_is_refused_and_its_good_neighbour_accepted(case: dict[str, Any]) -> None:
    path = GOLDEN / case["file"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == case["sha256"]
    assert case["expected"] in ("accept", "reject")
    if case["expected"] == "accept":
        with Artifact.open(path) as artifact:
            assert len(artifact.objects) > 0
        assert verify(path).ok
        ran = ninfer_verify("check", path)
        assert (ran.code, ran.err) == (0, "")
        assert ran.out.startswith(f"{path}: OK\n")
        return
    code = 4 if case["id"] in UNSUPPORTED else 1
    with pytest.raises(NinferError) as caught:
        Artifact.open(path)
    assert caught.value.exit_code == code
    report = verify(path, "full", strict=True)
    assert (report.ok, report.exit_code) == (False, code)
    ran = ninfer_verify("check", path)
    assert (ran.code, ran.err) == (code, "")
    assert ran.out.startswith(f"{path}: FAILED\n  problem ")
    assert "Traceback" not in ran.out


@rows("ambiguous")
def test_ambiguous_golden_is_refused(case: dict[str, Any]) -> None:
    path = GOLDEN / case["file"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == case["sha256"]
    with pytest.raises(NinferError):
        Artifact.open(path)
    report = verify(path)
    assert (report.exit_code, [p.object for p in report.problems]) == (1, ["header"])
    assert ninfer_verify("check", path).code == 1


@rows("containers")
def test_golden_container_has_its_recorded_facts(case: dict[str, Any]) -> None:
    path = GOLDEN / case["file"]
    content = path.read_bytes()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (case["bytes"], case["sha256"])
    report = verify(path, "numeric", strict=True)
    if case["version"] == 1:
        assert report.exit_code == 4
        return
    assert report.ok, report.problems
    with Artifact.open(path) as artifact:
        assert artifact.payload_offset == case["payload_offset"]
        assert (artifact.identity.model_id, artifact.identity.weights_id) == tuple(case["identity"].values())
        text = canonical_json(artifact.directory)
        assert (len(text), hashlib.sha256(text).hexdigest()) == (case["json_bytes"], case["directory_sha256"])
        for name, digest in case.get("payload_sha256", {}).items():
            assert hashlib.sha256(artifact.payload(name)).hexdigest() == digest


def test_every_golden_file_is_listed() -> None:
    listed = {case["file"] for group in ("containers", "malformed", "ambiguous") for case in golden_cases(group)}
    present = {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*.ninfer")}
    assert present == listed
    assert sum(case["expected"] == "accept" for case in golden_cases("malformed")) == 9
