"""ninfer-run calibrate: the statistics are those of the real inputs, by transformers' own account of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ninfer_convert.pipeline import build
from ninfer_convert.plan import BuildOptions, make_plan
from ninfer_format import Artifact
from ninfer_format.activation_stats import HEAD_SITE, ActivationStats, read_activation_stats, site_of
from ninfer_runtime import Engine, EngineConfig
from ninfer_runtime.backends.reference.program import ReferenceProgram
from ninfer_runtime.text.frontend import Frontend
from ninfer_runtime.text.messages import Conversation
from tests.runtime.artifacts import TRAINED
from tests.runtime.conftest import ArtifactOf
from tests.runtime.run_command import Ninfer, in_this_process

TEXT = "The capital of France is Paris. What is 12 + 7? It is 19.\nA fox met an owl; they became friends.\n"
SITES_PER_MODULE: Mapping[str, str] = {
    "linear_attn.in_proj_qkv": "gdn/input_projection",
    "linear_attn.out_proj": "gdn/output_projection",
    "self_attn.q_proj": "attention/input_projection",
    "self_attn.o_proj": "attention/output_projection",
    "mlp.gate_proj": "mlp/gate_up_projection",
    "mlp.down_proj": "mlp/down_projection",
    "mlp.gate": "moe/routed_gate_up_projection",
    "mlp.shared_expert.gate_proj": "moe/shared_gate_up_projection",
    "mlp.shared_expert.down_proj": "moe/shared_down_projection",
}


@pytest.fixture
def ninfer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ninfer:
    return in_this_process(capsys, monkeypatch)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def measured(ninfer: Ninfer, model: Path, out: Path, *arguments: object) -> ActivationStats:
    run = ninfer("calibrate", model, "--out", out, "--dtype", "float32", *arguments)
    assert run.code == 0, run.err
    return read_activation_stats(out)


def transformers_inputs(kind: str, token_ids: list[int]) -> dict[str, torch.Tensor]:
    """Site → rows [T, K] that transformers multiplies there, for the sites that are inputs of a module of its own."""
    import transformers

    model = transformers.AutoModelForImageTextToText.from_pretrained(TRAINED / kind, dtype=torch.float32)
    seen: dict[str, torch.Tensor] = {}

    def keep(site: str) -> Any:
        def hook(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            seen[site] = arguments[0].reshape(-1, arguments[0].shape[-1])

        return hook

    for layer, block in enumerate(model.model.language_model.layers):
        for path, site in SITES_PER_MODULE.items():
            try:
                module = block.get_submodule(path)
            except AttributeError:
                continue
            module.register_forward_pre_hook(keep(f"text/layers/{layer}/{site}/input_scale_divisor"))
    model.lm_head.register_forward_pre_hook(keep(HEAD_SITE))
    with torch.inference_mode():
        model(input_ids=torch.tensor([token_ids]))
    return seen


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_statistics_are_those_of_the_inputs_in_transformers(
    kind: str, ninfer: Ninfer, artifact_of: ArtifactOf, text: Path, tmp_path: Path
) -> None:
    model = artifact_of(kind, "bf16")
    stats = measured(ninfer, model, tmp_path / "stats.json", "--text", text)
    with Artifact.open(model) as artifact:
        token_ids = list(Frontend.open(artifact).tokenizer.encode_text(TEXT))
        met = (site_of(entry.name) for entry in artifact.objects)
        sites = list(dict.fromkeys(site for site in met if site is not None))
    assert list(stats.sites) == sites
    seen = transformers_inputs(kind, token_ids)
    hidden_from_modules = {site for site in stats.sites if "routed_down" in site}
    assert set(seen) == set(stats.sites) - hidden_from_modules
    for site, rows in seen.items():
        found = stats.sites[site]
        per_token = 2 if "routed" in site else 1
        assert found.n_rows == len(token_ids) * per_token
        assert found.amax == pytest.approx(float(rows.abs().max()), rel=1e-3), site
        assert found.mean_square is not None
        expected = rows.double().square().mean(0).numpy()
        np.testing.assert_allclose(found.mean_square, expected, rtol=5e-3, atol=1e-6 * expected.max(), err_msg=site)


def test_document_names_model_texts_and_settings(
    ninfer: Ninfer, artifact_of: ArtifactOf, text: Path, tmp_path: Path
) -> None:
    stats = measured(ninfer, artifact_of("dense", "bf16"), tmp_path / "s.json", "--text", text, "--text", text)
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    (one, n_one), (two, n_two) = stats.texts
    assert (one, two, n_one + n_two) == (digest, digest, stats.n_tokens)
    assert (stats.model, stats.dtype, stats.context) == ("dense/bf16", "float32", 2048)
    assert all(site.n_rows == stats.n_tokens for site in stats.sites.values())


def test_windows_and_chunks_cover_every_token_and_runs_repeat(
    ninfer: Ninfer, artifact_of: ArtifactOf, tmp_path: Path
) -> None:
    model, long = artifact_of("moe", "groupwise-int"), tmp_path / "long.txt"
    long.write_text(TEXT * 6)
    arguments = ("--text", long, "--max-context", 256, "--prefill-chunk", 128)
    stats = measured(ninfer, model, tmp_path / "a.json", *arguments)
    assert stats.n_tokens > 256
    assert stats.sites[HEAD_SITE].n_rows == stats.n_tokens
    assert stats.sites["text/layers/1/moe/routed_down_projection/input_scale_divisor"].n_rows == 2 * stats.n_tokens
    measured(ninfer, model, tmp_path / "b.json", *arguments)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_conversations_are_rendered_and_limits_cut(
    ninfer: Ninfer, artifact_of: ArtifactOf, text: Path, tmp_path: Path
) -> None:
    model, talk = artifact_of("dense", "groupwise-int"), tmp_path / "talk.json"
    talk.write_text('[{"role": "user", "content": "What is 12 + 7?"}]')
    both = measured(ninfer, model, tmp_path / "s.json", "--text", text, "--messages", talk, "--amax-only")
    with Artifact.open(model) as artifact:
        prompt = Frontend.open(artifact).prompt(Conversation.of_prompt("What is 12 + 7?"))
    assert [tokens for _, tokens in both.texts][1] == len(prompt.token_ids)
    assert all(site.mean_square is None and site.amax > 0 for site in both.sites.values())
    cut = measured(ninfer, model, tmp_path / "c.json", "--text", text, "--messages", talk, "--max-tokens", 9)
    assert (cut.n_tokens, [tokens for _, tokens in cut.texts]) == (9, [9])


def test_a_build_takes_the_statistics_of_any_recipe(
    ninfer: Ninfer, artifact_of: ArtifactOf, text: Path, tmp_path: Path
) -> None:
    stats = measured(ninfer, artifact_of("dense", "groupwise-int"), tmp_path / "stats.json", "--text", text)
    options = BuildOptions(
        TRAINED / "dense", tmp_path / "x.ninfer", recipe="nvfp4", activation_stats=tmp_path / "stats.json"
    )
    build(make_plan(options))
    with Artifact.open(tmp_path / "x.ninfer") as artifact:
        divisors = [entry.name for entry in artifact.objects if entry.name.endswith("/input_scale_divisor")]
        assert set(divisors) == stats.sites.keys() - {HEAD_SITE}
        for name in divisors:
            # The largest input becomes the largest code, 6, times the largest scale, 448.
            assert float(artifact.tensor(name)) == pytest.approx(6 * 448 / stats.sites[name].amax, rel=1e-6)


def test_observing_changes_no_result_and_ends_with_its_block(artifact_of: ArtifactOf) -> None:
    with Engine.open(artifact_of("dense", "groupwise-int"), EngineConfig(max_context=128)) as engine:
        assert isinstance(engine.program, ReferenceProgram)
        token_ids = list(range(40, 70))
        before = engine.teacher_forced_logits(token_ids)
        seen: list[tuple[str, int]] = []
        with engine.program.observing(lambda matrix, x: seen.append((matrix, x.shape[1]))):
            during = engine.teacher_forced_logits(token_ids)
        n_seen = len(seen)
        hidden = np.concatenate(list(engine.hidden_chunks(token_ids)))
        assert np.array_equal(before, during)
        assert np.array_equal(before, engine.teacher_forced_logits(token_ids))
        assert len(seen) == n_seen
        assert ("text/output_head", hidden.shape[1]) in seen
        head = engine.artifact.tensor("text/output_head")
        np.testing.assert_allclose(hidden @ head.T, before, atol=0.05 * float(np.ptp(before)))


@pytest.mark.gpu
def test_statistics_of_a_cuda_device_agree_with_the_cpu(
    ninfer: Ninfer, artifact_of: ArtifactOf, text: Path, tmp_path: Path
) -> None:
    model = artifact_of("moe", "groupwise-int")
    cpu = measured(ninfer, model, tmp_path / "cpu.json", "--text", text)
    cuda = measured(ninfer, model, tmp_path / "cuda.json", "--text", text, "--device", "cuda")
    assert list(cuda.sites) == list(cpu.sites)
    for site, expected in cpu.sites.items():
        found = cuda.sites[site]
        assert found.n_rows == expected.n_rows
        assert found.amax == pytest.approx(expected.amax, rel=1e-3)
        assert found.mean_square is not None
        assert expected.mean_square is not None
        np.testing.assert_allclose(found.mean_square, expected.mean_square, rtol=5e-3, atol=1e-6)


def test_what_cannot_be_fed_is_refused_and_leaves_no_file(
    ninfer: Ninfer, artifact_of: ArtifactOf, text: Path, tmp_path: Path
) -> None:
    model, out = artifact_of("dense", "groupwise-int"), tmp_path / "out" / "stats.json"
    out.parent.mkdir()
    empty, latin = tmp_path / "empty.txt", tmp_path / "latin.txt"
    empty.write_bytes(b"")
    latin.write_bytes(b"caf\xe9")
    for arguments, word in (
        ((), "--text"),
        (("--text", empty), "is empty"),
        (("--text", latin), "UTF-8"),
        (("--text", tmp_path / "absent.txt"), "no such file"),
        (("--text", text, "--messages", text), "JSON"),
        (("--text", text, "--max-tokens", "0"), "at least 1"),
        (("--text", text, "--backend", "other"), "--backend"),
    ):
        run = ninfer("calibrate", model, "--out", out, *arguments)
        assert run.code == 2, run.err
        assert word in run.err
    assert ninfer("calibrate", model, "--out", tmp_path / "no" / "s.json", "--text", text).code == 2
    assert list(out.parent.iterdir()) == []
