"""``diff``: every kind of difference is told apart, and errors are those of a plain calculation."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ninfer_convert.checkpoint_view import view_checkpoint
from ninfer_convert.diff import Comparison, Difference, diff
from ninfer_convert.edit import apply as apply_edit
from ninfer_convert.edit import plan_identity, plan_template
from ninfer_convert.stored_rows import StoredRows
from ninfer_format import Artifact, ArtifactWriter, Directory, Identity, ResourceEntry, TensorEntry, pack_tensor
from ninfer_format.directory import Entry
from ninfer_format.geometry import up
from tests.convert.exported import artifact_of, with_payloads
from tests.convert.tiny import TinyCheckpoint, random_words, tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
MAIN = "import sys; from ninfer_convert.cli import main; sys.argv[0] = 'ninfer-convert'; main()"


def compared(first: Path, second: Path, jobs: int = 1) -> Difference:
    with Artifact.open(first) as a, Artifact.open(second) as b:
        return diff(a, b, jobs=jobs)


def other_than_equal(found: Difference) -> dict[str, Comparison]:
    return {c.name: c for c in found.objects if c.status != "equal"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A dense checkpoint, the same for every test here; nobody changes it."""
    return tiny_checkpoint(tmp_path_factory.mktemp("source") / "tiny-dense")


@pytest.fixture(scope="module")
def artifact(source: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(source.folder, tmp_path_factory.mktemp("artifact") / "x.ninfer")


def test_file_equals_itself_and_its_copy(artifact: Path, tmp_path: Path) -> None:
    copy = with_payloads(artifact, tmp_path / "y.ninfer", {})
    for other in (artifact, copy):
        found = compared(artifact, other, jobs=2)
        assert found.equal
        assert found.count("equal") == len(found.objects)
        assert found.tensors == ()


def test_name_alone_makes_two_files_different(artifact: Path, tmp_path: Path) -> None:
    with Artifact.open(artifact) as opened:
        apply_edit(plan_identity(opened, Identity("other", "mix")), tmp_path / "y.ninfer")
    found = compared(artifact, tmp_path / "y.ninfer")
    assert not found.equal
    assert other_than_equal(found) == {}


def test_another_template_is_other_content(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    with Artifact.open(artifact) as opened:
        apply_edit(plan_template(opened, tmp_path / "t.jinja"), tmp_path / "y.ninfer")
    different = other_than_equal(compared(artifact, tmp_path / "y.ninfer"))
    assert different.keys() == {"frontend/chat_template.jinja", "frontend/tokenizer_config.json"}
    assert {c.status for c in different.values()} == {"content"}
    assert different["frontend/chat_template.jinja"].second == "14 bytes"


@pytest.mark.parametrize("recipe", ["bf16", "w8"])
def test_errors_of_another_recipe_are_those_of_a_plain_calculation(
    source: TinyCheckpoint, artifact: Path, tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ninfer_convert.diff.PIECE_ELEMENTS", 1000)
    other = artifact_of(source.folder, tmp_path / "y.ninfer", recipe=recipe)
    found = compared(other, artifact, jobs=2)
    assert not found.equal
    assert found.tensors == ()
    assert found.count("values") > 30
    with Artifact.open(other) as a, Artifact.open(artifact) as b:
        for comparison in found.objects:
            if comparison.status != "values":
                continue
            x, y = (opened.tensor(comparison.name).astype(np.float64) for opened in (a, b))
            errors = comparison.errors
            assert errors is not None
            assert errors.max == np.abs(x - y).max()
            assert errors.rms == pytest.approx(math.sqrt(np.square(x - y).mean()), rel=1e-12)
            assert errors.relative == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-12)
            assert (errors.n_different, errors.n_values) == (int((x != y).sum()), x.size)
            assert comparison.first is not None
            assert comparison.first != comparison.second


Item = tuple[str, str, tuple[int, ...], bytes]


def container(path: Path, *items: Item) -> Path:
    """A container of tensors (name, format, shape, payload) and resources (format empty)."""
    entries: list[Entry] = []
    end = 0
    for name, format, shape, payload in items:
        layout = {"BF16": "contiguous-le-v1", "FP32": "contiguous-le-v1", "I32": "contiguous-le-v1"}.get(
            format, "row-split-k128-v1"
        )
        offset = up(end, 256)
        if format:
            entries.append(TensorEntry(name, shape, format, layout, offset, len(payload)))
        else:
            entries.append(ResourceEntry(name, "raw-bytes-v1", offset, len(payload)))
        end = offset + len(payload)
    with ArtifactWriter(path, Directory(Identity("m", "w"), tuple(entries))) as writer:
        for name, _, _, payload in items:
            writer.write(name, payload)
        writer.commit()
    return path


def bf16(*values: float) -> bytes:
    return (np.array(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()


def fp32(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def test_every_kind_of_difference_has_its_status(tmp_path: Path) -> None:
    codes, scales = np.ones((1, 4), np.int8), np.full((1, 1), 0x3C00, np.uint16)
    packed = bytearray(pack_tensor(codes, scales, None, "W8G32_F16S", "row-split-k128-v1"))
    padded = bytearray(packed)
    padded[100] = 7  # a padding lane
    first = container(
        tmp_path / "a.ninfer",
        ("same", "BF16", (2,), bf16(1, 2)), ("zero", "BF16", (2,), bf16(0.0, 1)),
        ("padding", "W8G32_F16S", (1, 4), bytes(packed)), ("format", "BF16", (2,), bf16(1, 2)),
        ("values", "BF16", (3,), bf16(1, 2, -4)), ("ids", "I32", (2,), np.array([1, 2], "<i4").tobytes()),
        ("shape", "BF16", (2,), bf16(1, 2)), ("kind", "BF16", (1,), bf16(1)), ("text", "", (), b"abc"),
        ("only here", "BF16", (1,), bf16(1)), ("truth is zero", "FP32", (2,), fp32(0, 0)),
    )  # fmt: skip
    second = container(
        tmp_path / "b.ninfer",
        ("same", "BF16", (2,), bf16(1, 2)), ("zero", "BF16", (2,), bf16(-0.0, 1)),
        ("padding", "W8G32_F16S", (1, 4), bytes(padded)), ("format", "FP32", (2,), fp32(1, 2)),
        ("values", "FP32", (3,), fp32(1, 5, -4)), ("ids", "I32", (2,), np.array([1, 4], "<i4").tobytes()),
        ("shape", "BF16", (1, 2), bf16(1, 2)), ("kind", "", (), b"x"), ("text", "", (), b"abd"),
        ("only there", "", (), b"x"), ("truth is zero", "FP32", (2,), fp32(0, 1)),
    )  # fmt: skip
    found = {c.name: c for c in compared(first, second).objects}
    assert {name: c.status for name, c in found.items()} == {
        "same": "equal", "zero": "bytes", "padding": "bytes", "format": "format", "values": "values", "ids": "values",
        "shape": "shape", "kind": "kind", "text": "content", "only here": "only-first", "truth is zero": "values",
        "only there": "only-second",
    }  # fmt: skip
    errors = found["values"].errors
    assert errors is not None
    assert (errors.max, errors.n_different, errors.n_values) == (3.0, 1, 3)
    assert errors.relative == pytest.approx(math.sqrt(9 / 21))
    zero = found["truth is zero"].errors
    assert zero is not None
    assert zero.relative == math.inf


def test_nan_on_one_side_is_an_infinite_error_and_on_both_none(tmp_path: Path) -> None:
    first = container(tmp_path / "a.ninfer", ("x", "FP32", (2,), fp32(math.nan, 1)))
    second = container(tmp_path / "b.ninfer", ("x", "FP32", (2,), fp32(2, 1)))
    for a, b in ((first, second), (second, first)):
        (comparison,) = compared(a, b).objects
        assert comparison.errors is not None
        assert comparison.errors.max == comparison.errors.rms == math.inf
        assert comparison.errors.n_different == 1
    bits = np.array([0x7FC00001, 0x3F800000], "<u4").tobytes()
    third = container(tmp_path / "c.ninfer", ("x", "FP32", (2,), bits))
    assert compared(first, third).objects[0].status == "bytes"


def test_parts_that_one_side_lacks_are_listed_and_the_rest_compared(
    source: TinyCheckpoint, artifact: Path, tmp_path: Path
) -> None:
    """Without vision the official text prefix is another one; the tensors are matched all the same."""
    bare = artifact_of(source.folder, tmp_path / "y.ninfer", no_vision=True, no_mtp=True)
    found = compared(artifact, bare)
    gone = [c.name for c in found.objects if c.status == "only-first"]
    assert gone
    assert all(name.startswith(("mtp/", "vision/", "frontend/")) for name in gone)
    assert found.tensors == ()
    assert {c.status for c in found.objects} == {"equal", "content", "only-first"}


def test_split_and_fused_matrices_are_compared_as_checkpoint_tensors(
    source: TinyCheckpoint, artifact: Path, tmp_path: Path
) -> None:
    """The dense NVFP4 recipe fuses what the others split; these shapes are too small for NVFP4 words, so all is W8."""
    fused = artifact_of(source.folder, tmp_path / "y.ninfer", recipe="nvfp4")
    found = compared(fused, artifact)
    alone = {c.name for c in found.objects if c.status == "only-first"}
    assert "text/layers/3/attention/query_key_gate_value" in alone
    assert {c.name.rpartition("layers.")[2] for c in found.tensors} == {
        *(f"{layer}.linear_attn.in_proj_{part}.weight" for layer in range(3) for part in ("qkv", "z")),
        *(f"3.self_attn.{part}_proj.weight" for part in "qkv"),
    }
    with Artifact.open(fused) as a, Artifact.open(artifact) as b:
        ours, theirs = (view_checkpoint(opened) for opened in (a, b))
        with StoredRows(a) as left, StoredRows(b) as right:
            for name in ("layers.3.self_attn.q_proj.weight", "layers.0.linear_attn.in_proj_qkv.weight"):
                x, y = (
                    next(t for t in view.tensors if t.name.endswith(name) and not t.name.startswith("mtp"))
                    for view in (ours, theirs)
                )
                values, others = x.values(left, 0, x.n_rows), y.values(right, 0, y.n_rows)
                comparison = next(c for c in found.tensors if c.name == x.name)
                assert comparison.errors is not None
                assert comparison.errors.max == np.abs(values.astype(np.float64) - others).max()
                assert comparison.first == "W8G32_F16S"
                assert comparison.second == "Q4G64_F16S + Q5G64_F16S"


def test_one_changed_weight_is_found(source: TinyCheckpoint, artifact: Path, tmp_path: Path) -> None:
    changed = tiny_checkpoint(tmp_path / source.folder.name)
    name = "model.language_model.layers.3.self_attn.k_proj.weight"
    changed.tensors[name] = random_words(changed.tensors[name].shape, np.random.default_rng(9))
    changed.save()
    other = artifact_of(changed.folder, tmp_path / "y.ninfer")
    assert other_than_equal(compared(artifact, other)).keys() == {"text/layers/3/attention/query_key"}


# --- the command ----------------------------------------------------------------------------------------------------


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, "diff", *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr
    return result


def test_command_prints_a_table_json_or_nothing(source: TinyCheckpoint, artifact: Path, tmp_path: Path) -> None:
    other = artifact_of(source.folder, tmp_path / "y.ninfer", recipe="w8")
    equal = run(artifact, artifact)
    assert equal.returncode == 0
    assert "byte for byte" in equal.stdout
    table = run(artifact, other)
    assert table.returncode == 1
    for part in ("identity: tiny-dense/groupwise-int and tiny-dense/w8", "other values", "→ W8G32_F16S",
                 "text/layers/0/mlp/down"):  # fmt: skip
        assert part in table.stdout
    document = json.loads(run(artifact, other, "--json").stdout)
    assert document["schema"] == "ninfer.diff/1"
    assert document["equal"] is False
    assert document["counts"]["values"] == sum(row["status"] == "values" for row in document["objects"])
    assert document["objects"][0]["errors"] is None or document["objects"][0]["errors"]["relative"] >= 0
    quiet = run(artifact, other, "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (1, "", "")


def test_infinite_errors_are_null_in_json(tmp_path: Path) -> None:
    first = container(tmp_path / "a.ninfer", ("x", "FP32", (2,), fp32(0, 0)))
    second = container(tmp_path / "b.ninfer", ("x", "FP32", (2,), fp32(0, 1)))
    document = json.loads(run(first, second, "--json").stdout)
    assert document["objects"][0]["errors"]["relative"] is None


def test_exit_codes(artifact: Path, tmp_path: Path) -> None:
    old, other = GOLDEN / "tiny_v1.ninfer", GOLDEN / "tiny_v2.ninfer"
    none, text = tmp_path / "none", ROOT / "README.md"
    cases = {(artifact, none): 2, (old, artifact): 4, (artifact, text): 1, (artifact, other): 1}
    for arguments, code in cases.items():
        assert run(*arguments).returncode == code, arguments
