"""ninfer-run logits and score: the numbers behind the text."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ninfer_format import Artifact
from ninfer_runtime.text.frontend import Frontend
from ninfer_runtime.text.messages import Conversation
from tests.runtime.conftest import ArtifactOf
from tests.runtime.run_command import GREEDY, SUM, Ninfer, in_this_process


@pytest.fixture(scope="module")
def model(artifact_of: ArtifactOf) -> Path:
    """The trained tiny dense checkpoint as groupwise-int."""
    return artifact_of("dense", "groupwise-int")


@pytest.fixture
def ninfer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ninfer:
    return in_this_process(capsys, monkeypatch)


def test_logits_of_every_row_are_written_and_lead_to_the_greedy_token(
    ninfer: Ninfer, model: Path, tmp_path: Path
) -> None:
    document = ninfer("generate", model, "--prompt", SUM, *GREEDY, "--json").document
    with Artifact.open(model) as artifact:
        prompt = Frontend.open(artifact).prompt(Conversation.of_prompt(SUM)).token_ids
    ids = [*prompt, *document["token_ids"][:8]]
    out = tmp_path / "x.npz"
    run = ninfer("logits", model, "--ids", ",".join(map(str, ids)), "--out", out, "--dtype", "float32")
    assert (run.code, run.out) == (0, "")
    with np.load(out) as arrays:
        logits, stored_ids = arrays["logits"], arrays["ids"]
    assert (logits.shape, logits.dtype, stored_ids.tolist()) == ((len(ids), 640), np.float32, ids)
    assert logits[len(prompt) - 1 : -1, :623].argmax(axis=1).tolist() == document["token_ids"][:8]
    assert list(tmp_path.iterdir()) == [out]


def test_logits_take_padding_rows_and_ids_from_stdin(ninfer: Ninfer, model: Path, tmp_path: Path) -> None:
    run = ninfer("logits", model, "--ids", "-", "--out", tmp_path / "x.npz", stdin=b"1, 2,639\n")
    assert run.code == 0
    with np.load(tmp_path / "x.npz") as arrays:
        assert arrays["ids"].tolist() == [1, 2, 639]


def test_logits_refuse_what_they_cannot_do_and_leave_no_file(ninfer: Ninfer, model: Path, tmp_path: Path) -> None:
    assert ninfer("logits", model, "--ids", "1,640", "--out", tmp_path / "x.npz").code == 2
    assert ninfer("logits", model, "--ids", "1", "--out", tmp_path / "no" / "x.npz").code == 2
    assert ninfer("logits", model, "--ids", "1", "--out", tmp_path).code == 2
    assert list(tmp_path.iterdir()) == []


def test_score_is_the_mean_over_the_logits(ninfer: Ninfer, model: Path, tmp_path: Path) -> None:
    text = "The capital of France is Paris.\n<|im_end|>"
    file = tmp_path / "text.txt"
    file.write_text(text)
    document = ninfer("score", model, "--text", file, "--json", "--dtype", "float32").document
    with Artifact.open(model) as artifact:
        ids = Frontend.open(artifact).tokenizer.encode_text(text)
    assert max(ids) < 590, "a text file holds no control tokens"
    ninfer("logits", model, "--ids", ",".join(map(str, ids)), "--out", tmp_path / "x.npz", "--dtype", "float32")
    with np.load(tmp_path / "x.npz") as arrays:
        logits = arrays["logits"][:-1, :623].astype(np.float64)
    log_z = np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)) + logits.max(axis=1)
    nats = float((log_z - logits[np.arange(len(ids) - 1), ids[1:]]).mean())
    assert document["nats_per_token"] == pytest.approx(nats, abs=1e-6)
    assert document["perplexity"] == pytest.approx(math.exp(nats), rel=1e-6)
    assert (document["tokens"], document["scored_tokens"]) == (len(ids), len(ids) - 1)
    text_run = ninfer("score", model, "--text", "-", "--dtype", "float32", stdin=text.encode())
    assert text_run.out.startswith(f"perplexity {document['perplexity']:.4f}, ")


def test_score_needs_two_tokens(ninfer: Ninfer, model: Path) -> None:
    assert ninfer("score", model, "--text", "-", stdin=b"a").code == 2
    assert ninfer("score", model, "--text", "absent.txt").code == 2
