"""What fits on a card, what would, and how it is said: ``ninfer-run plan`` and the plan of an engine."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_format.errors import UsageError
from ninfer_runtime import Engine, EngineConfig
from ninfer_runtime.backends import reference
from ninfer_runtime.backends.base import ProgramOptions
from ninfer_runtime.backends.cuda.card import CardBackend, card_named
from ninfer_runtime.backends.cuda.planned import DRIVER_BYTES
from ninfer_runtime.commands.options import PlanOptions
from ninfer_runtime.commands.plan import planned_from
from ninfer_runtime.config import PAGE_TOKENS
from ninfer_runtime.engine.memory_plan import (
    GRID_SEQUENCES,
    HEADROOM_BYTES,
    KV_FORMATS,
    largest,
    plan_within,
    program_limits,
    program_options,
    room_on,
    survey,
)
from tests.runtime.conftest import ArtifactOf
from tests.runtime.run_command import ROOT, Ninfer, in_this_process

DENSE = "qwen3.6-27b/groupwise-int"
SPARSE = "qwen3.6-35b-a3b/groupwise-int"
LONG = ("--max-context", "65536", "--max-concurrency", "4")


@pytest.fixture
def ninfer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ninfer:
    return in_this_process(capsys, monkeypatch)


# ---- searching ---------------------------------------------------------------------------------


@given(
    st.integers(-5, 60),
    st.lists(st.integers(0, 9), min_size=1, max_size=40),
    st.integers(0, 40),
)
@settings(max_examples=300)
def test_largest_is_that_of_trying_all(start: int, falls: list[int], n_planned: int) -> None:
    room, left = [], start
    for fall in falls:
        room.append(left)
        left -= fall

    def of(n: int) -> int | None:
        return room[n] if n < n_planned else None

    good = [n for n in range(len(room)) if n < n_planned and room[n] >= 0]
    assert largest(0, len(room) - 1, of) == (good[-1] if good else None)
    assert largest(3, 2, of) is None


@pytest.mark.parametrize("n", [1, 2, 3, 1000, 4095, 4096])
def test_straight_lines_are_found_with_few_tries(n: int) -> None:
    tried: list[int] = []

    def room(i: int) -> int:
        tried.append(i)
        return 7919 * (n - i) + 5

    assert largest(1, 4096, room) == n
    assert len(tried) <= 7


# ---- limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, gpu, kv_dtype, n",
    [pytest.param(DENSE, "rtx5090", "int8", 3, marks=pytest.mark.slow), (SPARSE, "24GiB", "auto", 2)],
)
def test_largest_context_and_concurrency_fit_and_one_more_does_not(name: str, gpu: str, kv_dtype: Any, n: int) -> None:
    backend = CardBackend(card_named(gpu))
    with planned_from(name) as model:
        config = PlanOptions(kv_dtype=kv_dtype, max_concurrency=n, max_context=20_000).config(model.spec.max_position)
        found, room = survey(backend, model, config), room_on(backend, model)
        assert found.fits
        assert found.left_bytes == room(config)
        assert sum(bytes_ for label, bytes_ in found.plan.rows() if "host" not in label) == found.plan.reserved_bytes
        assert found.context is not None
        assert found.concurrency is not None

        def fits(**changes: Any) -> bool:
            left = room(replace(config, **changes))
            return left is not None and left >= 0

        assert fits(max_context=found.context)
        assert not fits(max_context=found.context + PAGE_TOKENS)
        assert fits(max_concurrency=found.concurrency)
        assert found.concurrency == 8 or not fits(max_concurrency=found.concurrency + 1)
        for kv_format in KV_FORMATS:
            row = [context or 0 for context in found.grid[kv_format]]
            assert row == sorted(row, reverse=True)
            assert len(row) == len(GRID_SEQUENCES)
        assert list(found.grid["bf16"]) <= list(found.grid["int8"]) <= list(found.grid["fp6"])


def test_auto_takes_the_pages_that_leave_the_headroom() -> None:
    with planned_from(DENSE) as model:
        options = PlanOptions(kv_capacity="auto", max_concurrency=8, max_context=65_536)
        config = options.config(model.spec.max_position)
        for gpu in ("rtx5090", "24GiB", "h200"):
            backend = CardBackend(card_named(gpu))
            free = backend.free_memory(program_options(config))
            plan = plan_within(backend, model, config, free)
            n_pages = plan.limits.n_pages
            assert config.pages_per_sequence <= n_pages <= config.n_pages
            assert plan.reserved_bytes + HEADROOM_BYTES <= free
            if n_pages < config.n_pages:
                more = replace(plan.limits, n_pages=n_pages + 1)
                assert backend.plan_memory(model, more, plan.options).reserved_bytes + HEADROOM_BYTES > free
        small = CardBackend(card_named("17GiB"))
        free = small.free_memory(program_options(config))
        assert plan_within(small, model, config, free).limits.n_pages == config.pages_per_sequence


# ---- the flag that helps -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, expected",
    [
        pytest.param((DENSE, "--gpu", "rtx5090", *LONG), "--kv-dtype int8", marks=pytest.mark.slow),
        pytest.param(
            (DENSE, "--gpu", "rtx5090", *LONG, "--kv-dtype", "int8", "--snapshots", "100"),
            "--snapshots 0",
            marks=pytest.mark.slow,
        ),
        ((DENSE, "--gpu", "23GiB", *LONG, "--kv-dtype", "fp6"), "--kv-capacity auto"),
        pytest.param((DENSE, "--gpu", "17GiB", "--max-context", "32768"), "--weight-residency", marks=pytest.mark.slow),
        ((DENSE, "--gpu", "rtx5060ti", "--kv-dtype", "int8"), "--host-embedding"),
        pytest.param(
            (DENSE, "--gpu", "14GiB", "--kv-dtype", "fp6", "--weight-residency", "ffn", "--n-ffn-layers", "64"),
            "--n-ffn-layers auto",
            marks=pytest.mark.slow,
        ),
        pytest.param((DENSE, "--gpu", "16800MiB", *LONG), "--max-concurrency 1 --kv-dtype", marks=pytest.mark.slow),
        ((SPARSE, "--gpu", "21GiB", "--max-context", "262144"), "--max-context"),
    ],
)
def test_flag_that_is_named_makes_it_fit(ninfer: Ninfer, arguments: tuple[str, ...], expected: str) -> None:
    run = ninfer("plan", *arguments, "--json")
    assert run.code == 0, run.err
    (card,) = run.document["cards"]
    assert not card["fits"]
    assert card["free_bytes"] < 0
    assert card["remedy"].startswith(expected)
    flags = shlex.split(card["remedy"])
    kept = list(arguments)
    for name in flags[::2]:
        if name in kept:
            at = kept.index(name)
            del kept[at : at + 2]
    (again,) = ninfer("plan", *kept, *flags, "--json").document["cards"]
    assert again["fits"]
    assert again["remedy"] is None


@pytest.mark.parametrize("changes", [{"max_concurrency": 8}, {"max_concurrency": 2, "prefill_chunk": 4096}])
def test_engine_that_does_not_fit_starts_with_the_flags_it_names(
    artifact_of: ArtifactOf, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    path = artifact_of("dense", "bf16")
    config = EngineConfig(max_context=2048, dtype="bfloat16", weight_budget=0, **changes)
    with Engine.open(path, config) as engine:
        enough = engine.plan.reserved_bytes
    monkeypatch.setattr(reference, "free_memory", lambda device: enough - 1)
    with pytest.raises(
        UsageError, match=r"the plan needs \d+ MiB on cpu, \d+ MiB are free \(.*\); (--.*) would fit"
    ) as refusal:
        Engine.open(path, config)
    words = str(refusal.value).rpartition("; ")[2].removesuffix(" would fit").split()
    fields = {
        flag.removeprefix("--").replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)
    }
    read: dict[str, Callable[[str], Any]] = {"kv_dtype": str, "kv_capacity": str}
    with Engine.open(
        path, replace(config, **{name: read.get(name, int)(value) for name, value in fields.items()})
    ) as engine:
        assert engine.plan.reserved_bytes < enough


# ---- the command -------------------------------------------------------------------------------


def test_plan_shows_every_part_for_every_card(ninfer: Ninfer, artifact_of: ArtifactOf) -> None:
    path = artifact_of("dense", "bf16")
    run = ninfer("plan", path)
    assert (run.code, run.err) == (0, "")
    assert run.out.startswith("dense/bf16: context 4,096, sequences 1, keys and values bf16, prefill chunk 1,024\n")
    for label in ("RTX 5090", "RTX 5060 Ti", "H200", "weights", "KV pages", "recurrent state", "workspace", "graphs"):
        assert label in run.out
    document = ninfer("plan", path, "--json").document
    documented = (ROOT / "specs" / "cli.md").read_text(encoding="utf-8")
    for member in (*document, *document["cards"][0]):
        assert f"`{member}`" in documented or member == "schema", member
    assert document["schema"] == "ninfer.plan/1"
    for card in document["cards"]:
        parts = ("driver", "weight", "kv", "state", "workspace", "snapshot", "graph", "free")
        assert sum(card[f"{part}_bytes"] for part in parts) == card["memory_bytes"]
        assert card["kv_tokens"] == 4096
        assert card["largest_context"] == 4096
        assert card["context_by_kv_dtype"]["fp6"] == {str(n): 4096 for n in GRID_SEQUENCES}
        assert card["estimated"] is None


def test_card_may_be_any_amount_of_memory() -> None:
    assert {card_named(name).total_bytes for name in ("24GiB", "24576MiB", str(24 << 30))} == {24 << 30}
    free = CardBackend(card_named("24GiB")).free_memory(ProgramOptions())
    assert free == (24 << 30) - DRIVER_BYTES


def test_models_without_kernels_are_estimated_and_that_is_said(ninfer: Ninfer) -> None:
    run = ninfer("plan", SPARSE, "--gpu", "rtx5090", "--spec", "mtp", "--draft-tokens", "3")
    assert run.code == 0, run.err
    if "estimated" in run.out:
        assert f"estimated, since the backend refuses it today: {SPARSE}" in run.out
    assert "3 drafts by mtp" in run.out


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (("nothing-like-that",), 2, "no such file, and no published identity; those are qwen3.6-27b/groupwise-int"),
        ((DENSE, "--gpu", "12XB"), 2, "--gpu is '12XB', expected rtx5090, rtx5060ti, h200, or bytes"),
        ((DENSE, "--max-context", "999999"), 2, "the model was made for 262144; lower --max-context"),
        ((DENSE, "--max-concurrency", "9"), 2, "9"),
        ((DENSE, "--kv-capacity", "100"), 2, "kv_capacity is 100"),
        ((DENSE, "--draft-tokens", "3"), 2, "need"),
        ((DENSE, "--spec", "mtp", "--draft-tokens", "6"), 2, "6"),
        ((__file__,), 1, "not a .ninfer container"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    ninfer: Ninfer, arguments: tuple[str, ...], code: int, message: str
) -> None:
    run = ninfer("plan", *arguments)
    assert (run.code, run.out) == (code, "")
    assert message in run.err
    assert "Traceback" not in run.err


@pytest.mark.parametrize(
    "backend, identity, expected",
    [
        ("cuda", DENSE, 1024),
        ("cuda", SPARSE, 4096),
        ("reference", SPARSE, 1024),
    ],
)
def test_chunks_nobody_chose_suit_the_model_and_its_backend(backend: str, identity: str, expected: int) -> None:
    with planned_from(identity) as model:
        architecture = model.spec.architecture
    config = EngineConfig(backend=backend, max_context=8192)
    assert program_limits(config, architecture).prefill_chunk == expected
    assert program_limits(replace(config, prefill_chunk=256), architecture).prefill_chunk == 256
    assert program_limits(replace(config, max_context=200), architecture).prefill_chunk == 200
