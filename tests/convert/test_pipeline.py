"""Building: objects equal the numpy encoder, bytes do not depend on how, bad values are named, nothing is left over."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ninfer_convert.assembly import Assembly
from ninfer_convert.checkpoint import Checkpoint
from ninfer_convert.direct_file import DirectFile
from ninfer_convert.families import ObjectSource
from ninfer_convert.journal import Journal, journal_of
from ninfer_convert.payload_ring import PayloadRing, RingClosed, ring_bytes
from ninfer_convert.pipeline import build
from ninfer_convert.plan import ConversionPlan
from ninfer_convert.problems import PlanError
from ninfer_format import Artifact, ArtifactWriter, SourceError, StorageError, TensorEntry, UsageError, encode_tensor
from ninfer_format.numeric.direct import widen_bf16
from tests.convert.tiny import TinyCheckpoint, Words, tiny_checkpoint, tiny_dflash, unfuse_experts

PlanOf = Callable[..., ConversionPlan]


def build_bytes(plan: ConversionPlan, **options: Any) -> bytes:
    """Build, and return the artifact's bytes; the output is removed again."""
    out = build(plan, **options).path
    content = out.read_bytes()
    out.unlink()
    return content


def leftovers(folder: Path) -> list[str]:
    """Names in ``folder`` that a build may have left."""
    return sorted(p.name for p in folder.iterdir() if ".ninfer" in p.name)


def fused_words(source: ObjectSource, tensors: dict[str, Words], ids: NDArray[np.int32] | None) -> Words:
    """The object's source matrix, gathered in memory."""
    rows = [tensors[r.tensor].reshape(-1, source.row_width)[r.begin : r.begin + r.count] for r in source.runs]
    matrix: Words = np.concatenate(rows)
    if source.transform == "draft_rows":
        assert ids is not None
        return matrix[ids]
    return matrix.T if source.transform == "conv_transpose" else matrix


@pytest.mark.parametrize("recipe", ["groupwise-int", "bf16", "w8"])
def test_every_object_equals_the_numpy_encoder_on_the_source(
    tiny: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, recipe: str
) -> None:
    plan = plan_of(tiny, out=tmp_path / "x.ninfer", recipe=recipe)
    target, result = plan.require(), build(plan, step_lanes=1024)
    with Artifact.open(result.path) as artifact:
        assert artifact.directory == target.inventory.directory
        for entry, source in zip(target.inventory.objects, target.sources, strict=True):
            payload = bytes(artifact.payload(entry.name))
            if not isinstance(entry, TensorEntry):
                assert payload == target.resources[entry.name]
            elif source.transform == "draft_ids":
                assert target.draft_ids is not None
                assert payload == target.draft_ids.astype("<i4").tobytes()
            else:
                words = fused_words(source, tiny.tensors, target.draft_ids)
                values = widen_bf16(np.ascontiguousarray(words)).reshape(entry.shape)
                assert payload == encode_tensor(values, entry.format, entry.layout), entry.name


def test_dflash_companion_is_converted_beside_its_model(moe: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path) -> None:
    plan = plan_of(moe, out=tmp_path / "x.ninfer", dflash=tiny_dflash(tmp_path / "companion"))
    with Artifact.open(build(plan).path) as artifact:
        assert plan.dflash is not None
        words = plan.dflash.read_words("layers.1.mlp.down_proj.weight")
        expected = encode_tensor(widen_bf16(words), "W8G32_F16S", "row-split-k128-v1")
        assert bytes(artifact.payload("dflash/layers/1/mlp/down")) == expected


def test_bytes_do_not_depend_on_workers_pieces_or_run(tiny: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path) -> None:
    built = {
        build_bytes(plan_of(tiny, out=tmp_path / "x.ninfer", jobs=jobs), step_lanes=lanes)
        for jobs, lanes in ((1, None), (1, 512), (2, 512), (5, 256), (5, 256), (3, None))
    }
    assert len(built) == 1


def test_error_figures_do_not_depend_on_the_number_of_workers(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path
) -> None:
    figures = []
    for jobs in (1, 4, 4):
        result = build(plan_of(dense, out=tmp_path / "x.ninfer", jobs=jobs, force=True), step_lanes=512)
        figures.append({name: record.error for name, record in result.finished.items()})
    assert figures[0] == figures[1] == figures[2]


def test_fused_and_unfused_experts_give_the_same_bytes(moe: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path) -> None:
    fused = build_bytes(plan_of(moe, out=tmp_path / "x.ninfer"), step_lanes=512)
    unfuse_experts(moe.tensors)
    moe.save()
    assert build_bytes(plan_of(moe, out=tmp_path / "x.ninfer"), step_lanes=512) == fused


def test_draft_rows_follow_a_ranking_in_any_order(dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path) -> None:
    counts = np.random.default_rng(3).permutation(384).astype("<i8")
    (tmp_path / "counts.i64").write_bytes(counts.tobytes())
    plan = plan_of(dense, out=tmp_path / "x.ninfer", ranking=tmp_path / "counts.i64")
    ids = plan.require().draft_ids
    assert ids is not None
    assert (np.diff(ids) < 0).any()
    with Artifact.open(build(plan, step_lanes=1024).path) as artifact:
        assert np.array_equal(artifact.tensor("text/draft_head_token_ids"), ids)
        head = widen_bf16(dense.tensors["lm_head.weight"][ids])
        expected = encode_tensor(head, "Q4G64_F16S", "row-split-k128-v1")
        assert bytes(artifact.payload("text/draft_head")) == expected


@pytest.mark.parametrize(
    "tensor, index",
    [
        ("model.language_model.layers.3.self_attn.q_proj.weight", (37, 5)),  # one half is read for another object
        ("model.language_model.layers.0.input_layernorm.weight", (71,)),
        ("model.language_model.layers.1.linear_attn.A_log", (2,)),
        ("model.language_model.layers.2.linear_attn.conv1d.weight", (40, 0, 3)),
        ("model.visual.patch_embed.proj.weight", (47, 2, 1, 3, 3)),
        ("lm_head.weight", (383, 0)),
        ("mtp.fc.weight", (3, 143)),
    ],
)
@pytest.mark.parametrize("bad", [0x7FC0, 0xFF80])
def test_nan_and_infinity_are_refused_by_tensor_and_index(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, tensor: str, index: tuple[int, ...], bad: int
) -> None:
    dense.tensors[tensor][index] = bad
    dense.save()
    with pytest.raises(SourceError) as caught:
        build(plan_of(dense, out=tmp_path / "x.ninfer"), step_lanes=256)
    assert repr(tensor) in str(caught.value)
    assert str(list(index)) in str(caught.value)
    assert leftovers(tmp_path) == []


def test_bad_value_in_an_expert_is_named_by_its_place_in_the_bank(
    moe: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path
) -> None:
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    moe.tensors[name][3, 79, 11] = 0x7F80
    moe.save()
    with pytest.raises(SourceError) as caught:
        build(plan_of(moe, out=tmp_path / "x.ninfer"))
    assert name in str(caught.value)
    assert "[3, 79, 11]" in str(caught.value)
    unfuse_experts(moe.tensors)
    moe.save()
    with pytest.raises(SourceError, match=r"experts\.3\.up_proj\.weight.*\[39, 11\]"):
        build(plan_of(moe, out=tmp_path / "x.ninfer"))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_in_wider_sources_are_refused_too(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, dtype: type, bad: float
) -> None:
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    values: NDArray[Any] = widen_bf16(dense.tensors[name]).astype(dtype)
    values[17, 100] = bad
    dense.tensors[name] = values
    dense.save()
    with pytest.raises(SourceError, match=r"layers\.0\.mlp\.down_proj.*\[17, 100\]"):
        build(plan_of(dense, out=tmp_path / "x.ninfer"))


def test_first_bad_value_is_the_one_reported_whatever_the_workers(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path
) -> None:
    name = "model.language_model.embed_tokens.weight"
    dense.tensors[name][5, 6] = dense.tensors[name][300, 1] = 0x7F80
    dense.save()
    for _ in range(5):
        with pytest.raises(SourceError, match=r"\[5, 6\]"):
            build(plan_of(dense, out=tmp_path / "x.ninfer", jobs=4), step_lanes=128)


def test_large_finite_values_pass_where_no_binary16_step_exists(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path
) -> None:
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    dense.tensors[name][3, 4] = 0x7F7F
    dense.save()
    with pytest.raises(SourceError, match=r"\[3, 4\].*Q5G64_F16S.*--recipe bf16"):
        build(plan_of(dense, out=tmp_path / "x.ninfer"))
    with Artifact.open(build(plan_of(dense, out=tmp_path / "x.ninfer", recipe="bf16")).path) as artifact:
        assert artifact.words("text/layers/0/mlp/down").codes[3, 4] == 0x7F7F


def test_plan_with_problems_is_not_built(dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path) -> None:
    del dense.tensors["lm_head.weight"]
    dense.save()
    with pytest.raises(PlanError):
        build(plan_of(dense, out=tmp_path / "x.ninfer"))
    assert leftovers(tmp_path) == []


def test_source_that_changes_after_the_plan_is_refused(dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path) -> None:
    plan = plan_of(dense, out=tmp_path / "x.ninfer")
    os.utime(dense.folder / dense.shards()[0], ns=(1, 1))
    with pytest.raises(SourceError, match=r"changed"):
        build(plan)
    assert leftovers(tmp_path) == []


def test_shards_are_read_in_file_order(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_reads: dict[str, tuple[str, int]] = {}
    plain = Checkpoint.read_into

    def recording(self: Checkpoint, name: str, byte_begin: int, out: memoryview) -> None:
        ref = self.tensors[name]
        first_reads.setdefault(name, (ref.file, ref.file_offset))
        plain(self, name, byte_begin, out)

    monkeypatch.setattr(Checkpoint, "read_into", recording)
    build(plan_of(dense, out=tmp_path / "x.ninfer", jobs=1))
    places = list(first_reads.values())
    # A fusion reads its parts together; only parts after the first may lie out of order.
    backward = sum(a > b for a, b in pairwise(places))
    assert len(places) == len(dense.tensors)
    assert backward <= 10
    files = [file for file, _ in places]
    assert files == sorted(files) or sum(a > b for a, b in pairwise(files)) <= 2


def test_caller_keeps_its_torch_threads(dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path) -> None:
    before, running = torch.get_num_threads(), set(threading.enumerate())
    torch.set_num_threads(2)
    try:
        build(plan_of(dense, out=tmp_path / "x.ninfer"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert not [t for t in threading.enumerate() if t.name.startswith("ninfer-") and t not in running]


def test_progress_adds_up_to_every_payload_byte(dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path) -> None:
    plan, seen = plan_of(dense, out=tmp_path / "x.ninfer"), list[int]()
    build(plan, progress=seen.append)
    assert sum(seen) == sum(entry.n_bytes for entry in plan.require().inventory.objects)


def test_second_build_of_the_same_output_is_refused_while_one_runs(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path
) -> None:
    plan = plan_of(dense, out=tmp_path / "x.ninfer", force=True)
    running = Journal.open(journal_of(tmp_path / "x.ninfer"))
    try:
        with pytest.raises(UsageError, match="another build"):
            build(plan)
    finally:
        running.remove()
    build(plan)


def test_read_error_keeps_what_is_done_for_a_resume(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls = tmp_path / "x.ninfer", iter(range(1000))
    expected = build_bytes(plan_of(dense, out=out))
    plain = Checkpoint.read_into

    def failing(self: Checkpoint, name: str, byte_begin: int, buffer: memoryview) -> None:
        if next(calls) > 60:
            raise StorageError(f"{name}: input/output error")
        plain(self, name, byte_begin, buffer)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "read_into", failing)
        with pytest.raises(StorageError):
            build(plan_of(dense, out=out), sync_seconds=0.0)
    assert not out.exists()
    result = build(plan_of(dense, out=out, resume=True))
    assert result.n_resumed > 0
    assert out.read_bytes() == expected


def test_crash_of_a_thread_ends_the_build_instead_of_hanging_it(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for victim in ("_write", "_make_durable", "_work"):

        def broken(self: Assembly) -> None:
            raise RuntimeError("injected")

        with monkeypatch.context() as patched:
            patched.setattr(Assembly, victim, broken)
            with pytest.raises(RuntimeError, match="injected"):
                build(plan_of(dense, out=tmp_path / "x.ninfer", force=True))


@pytest.fixture
def ring() -> Iterator[PayloadRing]:
    ring = PayloadRing(ring_bytes([3 * 4096, 2 * 4096, 100]))
    yield ring
    ring.close()


def test_ring_blocks_never_overlap_and_wrap_around(ring: PayloadRing, fresh_seed: int) -> None:
    rng, held = np.random.default_rng(fresh_seed), list[NDArray[np.uint8]]()
    for number in range(120):
        size = int(rng.integers(1, 3 * 4096))
        taken: list[NDArray[np.uint8]] = []

        def take(n_bytes: int = size, blocks: list[NDArray[np.uint8]] = taken) -> None:
            blocks.append(ring.take(n_bytes))

        taker = threading.Thread(target=take)
        taker.start()
        taker.join(0.005)
        while held and taker.is_alive():
            ring.give_back(held.pop(int(rng.integers(len(held)))))
            taker.join(0.05)
        taker.join(60)  # an empty ring must not make a block wait, however late its thread is scheduled
        assert not taker.is_alive()
        taken[0][:] = number % 251
        held.append(taken[0])
        assert all((block == block[0]).all() for block in held)


def test_ring_that_closes_wakes_whoever_waits(ring: PayloadRing) -> None:
    ring.take(7 * 4096)
    outcome: list[str] = []

    def wait() -> None:
        try:
            ring.take(4096)
        except RingClosed:
            outcome.append("closed")

    waiter = threading.Thread(target=wait)
    waiter.start()
    ring.close()
    waiter.join(5)
    assert outcome == ["closed"]


def test_largest_payload_and_the_next_fit_the_ring_together() -> None:
    ring = PayloadRing(ring_bytes([7000, 100, 9000]))
    assert ring.take(9000).size == 9000
    assert ring.take(7000).size == 7000


def test_ring_blocks_begin_at_the_asked_place_in_a_page() -> None:
    ring = PayloadRing(ring_bytes([9000, 9000]))
    for phase in (0, 256, 4095):
        block = ring.take(5000, phase)
        assert block.ctypes.data % 4096 == phase
        ring.give_back(block)


@pytest.mark.parametrize("refused_at", [0, 1, 3])
def test_file_system_without_direct_writes_gets_the_same_bytes(
    dense: TinyCheckpoint, plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_at: int
) -> None:
    expected = build_bytes(plan_of(dense, out=tmp_path / "x.ninfer"))
    direct_writes, plain, descriptors = [0], os.pwrite, set[int]()
    opened = os.open

    def opening(path: Any, flags: int, *mode: int) -> int:
        descriptor = opened(path, flags, *mode)
        (descriptors.add if flags & os.O_DIRECT else descriptors.discard)(descriptor)
        return descriptor

    def refusing(descriptor: int, content: Any, offset: int) -> int:
        if descriptor in descriptors:
            direct_writes[0] += 1
            if direct_writes[0] > refused_at:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(descriptor, content, offset)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "pwrite", refusing)
    assert build_bytes(plan_of(dense, out=tmp_path / "x.ninfer")) == expected
    assert direct_writes[0] > refused_at


@pytest.mark.parametrize("file_offset", [0, 1, 256, 4096, 5000])
@pytest.mark.parametrize("size", [1, 100, 4096, 8192, 20000])
def test_direct_file_writes_every_byte_of_any_span_and_no_other(tmp_path: Path, file_offset: int, size: int) -> None:
    class Writer:
        temporary = tmp_path / "file"

        def write_at(self, name: str, offset: int, content: memoryview) -> None:
            with open(self.temporary, "r+b") as stream:
                stream.seek(file_offset + offset)
                stream.write(content)

    writer, n_bytes = Writer(), 32 << 10
    writer.temporary.write_bytes(b"\xee" * n_bytes)
    ring, rng = PayloadRing(ring_bytes([size, size])), np.random.default_rng(size)
    block = ring.take(size, file_offset)
    block[:] = rng.integers(0, 256, size)
    direct = DirectFile(cast(ArtifactWriter, writer))
    direct.write("object", 0, file_offset, block.data)
    direct.close()
    written = writer.temporary.read_bytes()
    assert written == b"\xee" * file_offset + block.tobytes() + b"\xee" * (n_bytes - file_offset - size)


def test_output_beside_a_checkpoint_of_this_seed_is_stable(plan_of: PlanOf, tmp_path: Path, fresh_seed: int) -> None:
    first, second = (tiny_checkpoint(tmp_path / name, seed=fresh_seed) for name in ("one", "two"))
    outputs = [
        build_bytes(plan_of(checkpoint, out=tmp_path / "x.ninfer", model_id="same")) for checkpoint in (first, second)
    ]
    assert outputs[0] == outputs[1]
