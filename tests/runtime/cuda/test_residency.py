"""Which networks stay: plans that add up, arrangements that are the fastest that fit, refusals that leave nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_format import Artifact
from ninfer_format.errors import UnsupportedError, UsageError
from ninfer_runtime.backends.base import Backend, ProgramLimits, ProgramOptions
from ninfer_runtime.backends.cuda.backend import CudaBackend
from ninfer_runtime.backends.cuda.card import CardBackend, card_named
from ninfer_runtime.backends.cuda.device import DeviceMemoryError
from ninfer_runtime.backends.cuda.host_store import HostStore, free_host_bytes
from ninfer_runtime.backends.cuda.planned import DRIVER_BYTES, planned_model
from ninfer_runtime.backends.cuda.planning import plan_program
from ninfer_runtime.backends.cuda.residency import (
    LAUNCH_SECONDS,
    Choice,
    CpuSeconds,
    LayerBytes,
    Rates,
    RoundBytes,
    choose,
    following_users,
    round_time,
    spread,
)
from ninfer_runtime.backends.cuda.ring import paced
from ninfer_runtime.commands.options import PlanOptions
from ninfer_runtime.commands.parsing import ffn_cpu, ffn_layers, link_rate, memory_size
from ninfer_runtime.config import EngineConfig, Residency
from ninfer_runtime.engine import engine as engine_module
from ninfer_runtime.engine.engine import Engine
from ninfer_runtime.engine.memory_plan import plan_within, program_options
from ninfer_runtime.engine.sequence import Request
from ninfer_runtime.models.binder import bind
from tests.emulator.device import EmulatedDevice
from tests.runtime.conftest import ArtifactOf
from tests.runtime.cuda.offload_rig import N_LAYERS, PLAIN, RATES, offloaded
from tests.runtime.programs import GREEDY

MIB = 1 << 20
LAYER = LayerBytes(90 * MIB, 90 * MIB, 56 * MIB)
MODEL_27B = "qwen3.6-27b/groupwise-int"

# ---- arrangements ------------------------------------------------------------------------------


@given(st.integers(1, 80), st.data())
def test_streamed_layers_are_spread_evenly_and_slots_come_round(n_layers: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, n_layers))
    layers = spread(n_layers, n, data.draw(st.sampled_from([0.0, 0.5, 0.999])))
    assert layers == tuple(sorted(set(layers)))
    assert layers[0] >= 0
    assert layers[-1] < n_layers
    gaps = np.diff(layers)
    assert gaps.size == 0 or gaps.max() - gaps.min() <= 1
    n_slots = data.draw(st.integers(1, n))
    held = list(range(n_slots))
    for k, following in enumerate(following_users(n, n_slots)):
        assert held[k % n_slots] == k, "a slot holds what is multiplied next"
        held[k % n_slots] = following
    assert held == list(range(n_slots)), "and at the end what it held at the beginning"


@given(st.integers(2, 30), st.data())
def test_networks_on_the_cpu_are_passed_over(n: int, data: st.DataObject) -> None:
    n_slots = data.draw(st.integers(1, n - 1))
    skipped = data.draw(st.sets(st.integers(n_slots, n - 1)))
    following, held = following_users(n, n_slots, skipped), list(range(n_slots))
    for k in range(n):
        if k not in skipped:
            assert held[k % n_slots] == k, "a slot holds what is multiplied next"
            held[k % n_slots] = following[k]
    assert held == list(range(n_slots)), "and at the end what it held at the beginning"


@given(st.integers(2, 16), st.integers(1, 2), st.floats(0, 0.05), st.floats(0, 0.05), st.integers(1, 8))
def test_what_the_cpu_takes_is_part_of_the_round(n: int, n_slots: int, one: float, more: float, columns: int) -> None:
    cost, streamed = RoundBytes((LAYER,) * 16, 900 * MIB, n_columns=columns), spread(16, n, 0.5)
    n_slots = min(n_slots, n - 1)
    rates, on_cpu = replace(RATES, cpu=CpuSeconds(one, one + more)), streamed[n_slots:][::2]
    found, without = round_time(cost, streamed, n_slots, rates, on_cpu), round_time(cost, streamed, n_slots, rates)
    assert found.cpu == pytest.approx(len(on_cpu) * (one + (columns - 1) * more / 7))
    assert found.copy < without.copy
    products = round_time(cost, (), 0, rates).seconds - len(on_cpu) * (
        LAYER.ffn / (0.95 * rates.read) + 2 * LAUNCH_SECONDS
    )
    assert found.compute >= products + found.cpu - 1e-9
    assert max(found.copy, found.compute) <= found.seconds * (1 + 1e-9) <= (found.copy + found.compute) * (1 + 2e-9)


def test_the_cpu_takes_part_where_that_is_faster_and_only_there() -> None:
    cost = RoundBytes((LAYER,) * 16, 900 * MIB)

    def chosen(seconds: float, n: int | None, n_layers: int = 4, link: float = 27e9) -> Choice:
        rates = Rates(400e9, link, CpuSeconds(seconds, seconds))
        return choose(cost, rates, Residency("ffn", n_layers, n_cpu_layers=n), lambda streamed, n_slots: n_slots <= 2)

    without = chosen(1e-3, 0)
    assert without.on_cpu == ()
    helped = chosen(1e-3, None)
    assert helped.time.seconds < 0.7 * without.time.seconds
    assert set(helped.on_cpu) <= set(helped.streamed[helped.n_slots :])
    assert chosen(1.0, None) == without, "a slow one takes none"
    assert chosen(1e-3, None, link=1e12).on_cpu == (), "nor does any where products are the longer bound"
    assert len(chosen(1.0, 3).on_cpu) == 3, "unless it is told to"
    assert len(chosen(1e-3, 99).on_cpu) == 12 - chosen(1e-3, 99).n_slots
    nothing = choose(cost, RATES, Residency("ffn", 4, n_cpu_layers=None), lambda streamed, n_slots: True)
    assert nothing.on_cpu == (), "nobody knows what it would take"


@given(st.integers(0, 12), st.integers(1, 3), st.floats(1e9, 1e11), st.floats(0, 0.999))
def test_round_takes_at_least_either_bound_and_at_most_both(n: int, n_slots: int, link: float, phase: float) -> None:
    cost, rates = RoundBytes((LAYER,) * 16, 900 * MIB), Rates(400e9, link)
    streamed = spread(16, n, phase) if n else ()
    found = round_time(cost, streamed, min(n_slots, n), rates)
    moving = sum(following != k for k, following in enumerate(following_users(n, max(1, min(n_slots, n)))))
    assert found.copy == pytest.approx(moving * LAYER.ffn / link)
    assert max(found.copy, found.compute) <= found.seconds * (1 + 1e-9)
    assert found.seconds <= (found.copy + found.compute) * (1 + 1e-9)
    written = found.copy * link / (0.95 * rates.read)
    assert found.compute == pytest.approx(round_time(cost, (), 0, rates).seconds + written)


def test_copies_hide_behind_products_and_products_behind_copies() -> None:
    cost = RoundBytes((LAYER,) * 64, 900 * MIB)
    for n, n_slots in ((3, 1), (40, 1), (40, 2)):
        found = round_time(cost, spread(64, n, 0.0), n_slots, Rates(412e9, 27e9))
        assert found.seconds <= 1.03 * max(found.copy, found.compute)


@given(st.integers(0, 40), st.sampled_from([None, 0, 7, 16]))
@settings(max_examples=60)
def test_choice_fits_and_none_is_faster(n_free: int, n_layers: int | None) -> None:
    cost, rates = RoundBytes((LAYER,) * 16, 900 * MIB), Rates(400e9, 27e9)

    def fits(streamed: tuple[int, ...], n_slots: int) -> bool:
        return 16 - len(streamed) + n_slots <= n_free

    found = choose(cost, rates, Residency("ffn", n_layers), fits)
    if n_layers is not None:
        assert len(found.streamed) == 16 - n_layers
    possible = [(n, k) for n in range(17) for k in range(4) if fits(spread(16, n, 0.0) if n else (), k) and k <= n]
    possible = [(n, k) for n, k in possible if (k > 0) == (n > 0) and n_layers in (None, 16 - n)]
    if n_layers is not None:  # so many stay and no more
        possible = [(n, k) for n, k in possible if k <= max(1, n - 1)]
    if not possible:
        assert found.n_slots == min(1, len(found.streamed))
        return
    assert fits(found.streamed, found.n_slots)
    for n, k in possible:
        other = round_time(cost, spread(16, n, 0.0) if n else (), k, rates)
        assert found.time.seconds <= other.seconds * (1 + 1e-9)


def test_pace_repeats_the_beginning() -> None:
    assert paced(1000, 1.0) == paced(1000, 0.3) == [1000]
    assert paced(10_000, 2.5) == [10_000, 10_000, 4864]
    assert Residency("ffn", link_limit=27e9, rates=(1.0, 54e9)).slowdown == 2.0
    assert Residency("ffn", link_limit=60e9, rates=(1.0, 54e9)).slowdown == 1.0


# ---- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["rtx5060ti", "12GiB"])
def test_streamed_plan_adds_up_and_fits_the_card(gpu: str) -> None:
    model, backend = planned_model(MODEL_27B), CardBackend(card_named(gpu))
    options = PlanOptions(
        kv_dtype="int8", weight_residency="ffn", host_embedding=True, spec="mtp", draft_tokens=3, max_context=8192
    )
    config = options.config(model.spec.max_position)
    free = backend.free_memory(program_options(config))
    plan = plan_within(backend, model, config, free)
    chosen = plan.options.residency
    assert plan == plan_program(model, plan.limits, plan.options, backend.card.as_device())
    assert plan.reserved_bytes <= free
    assert chosen.streamed
    one_less = replace(config, n_ffn_layers=len(model.layers) - len(chosen.streamed) + 1)
    assert plan_within(backend, model, one_less, free).reserved_bytes > free
    if gpu == "rtx5060ti":
        found = backend.forecast(model, plan)
        assert found is not None
        assert found.drafting_rate is not None
        assert found.drafting_rate > 25
    else:
        assert backend.forecast(model, plan) is None, "rates of that card are not known"


def test_pool_grows_into_what_networks_leave() -> None:
    model, backend = planned_model(MODEL_27B), CardBackend(card_named("16GiB"))
    options = PlanOptions(kv_dtype="int8", kv_capacity="auto", weight_residency="ffn", max_concurrency=2)
    config = options.config(model.spec.max_position)
    free = backend.free_memory(program_options(config))
    plan = plan_within(backend, model, config, free)
    assert plan.reserved_bytes <= free
    assert config.pages_per_sequence <= plan.limits.n_pages <= config.n_pages


def test_what_cannot_be_streamed_is_refused(artifact_of: ArtifactOf) -> None:
    backend = CudaBackend(EmulatedDevice(n_sms=4), rates=RATES)

    def plan(kind: str, **residency: Any) -> None:
        options = ProgramOptions(device="cuda", dtype="bfloat16", residency=Residency("ffn", **residency))
        with Artifact.open(artifact_of(kind, "bf16")) as artifact:
            backend.plan_memory(bind(artifact), ProgramLimits(), options)

    with pytest.raises(UnsupportedError, match=r"a mixture of experts reads .* leave --weight-residency ffn out$"):
        plan("moe")
    with pytest.raises(UsageError, match="n_ffn_layers is 5, the model has 4 layers"):
        plan("dense", n_ffn_layers=5)
    with pytest.raises(UsageError, match="n_ffn_layers needs weight_residency 'ffn'"):
        EngineConfig(n_ffn_layers=2)
    with pytest.raises(UsageError, match="ffn_cpu needs weight_residency 'ffn'"):
        EngineConfig(ffn_cpu="auto")
    with pytest.raises(UsageError, match="ffn_cpu is -1"):
        EngineConfig(weight_residency="ffn", ffn_cpu=-1)
    with pytest.raises(UsageError, match="options of the cuda backend"):
        Engine.open(artifact_of("dense", "bf16"), EngineConfig(host_embedding=True))


@pytest.fixture
def limited(artifact_of: ArtifactOf, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, EngineConfig, int]]:
    """An artifact, a config that is limited to less than it takes, and what it takes."""

    def on_emulator(name: str) -> Backend:
        return CudaBackend(EmulatedDevice(n_sms=4), rates=RATES)

    monkeypatch.setattr(engine_module, "backend", on_emulator)
    path = artifact_of("dense", "groupwise-int")
    config = EngineConfig(backend="cuda", device="cuda", dtype="bfloat16", max_context=256, prefill_chunk=128)
    config = replace(config, kv_dtype="int8")
    with Engine.open(path, config) as engine:
        yield path, config, engine.plan.reserved_bytes


def test_engine_under_a_limit_names_what_would_fit_and_then_answers_alike(
    limited: tuple[Path, EngineConfig, int],
) -> None:
    path, config, taken = limited
    short = replace(config, memory_limit=DRIVER_BYTES + taken - 100_000)
    with pytest.raises(UsageError, match=r"; --weight-residency ffn would fit$"):
        Engine.open(path, short)
    request = Request(range(5, 25), GREEDY, max_new=8)
    said = []
    for chosen in (config, replace(short, weight_residency="ffn")):
        with Engine.open(path, chosen) as engine:
            said.append([event.token_id for event in engine.generate(request)])
            notes = dict(engine.program.notes)
    assert said[0] == said[1]
    assert "of 4 on the device" in notes["networks"]
    assert notes["predicted"].endswith(")")


def test_engine_gives_networks_to_the_cpu_and_says_so(limited: tuple[Path, EngineConfig, int]) -> None:
    path, config, _ = limited
    request, notes = Request(range(5, 25), GREEDY, max_new=8), {}
    for n in (2, "auto"):
        chosen = replace(config, weight_residency="ffn", n_ffn_layers=0, ffn_cpu=n)
        with Engine.open(path, chosen) as engine:
            assert 0 < len(list(engine.generate(request))) <= 8
            notes[n] = dict(engine.program.notes)["CPU"]
            assert ("CPU weights" in [label for label, n_bytes in engine.plan.rows() if n_bytes]) == (n == 2)
    assert re.match(r"2 networks in rounds \(layers [123], [123]\): \d+\.\d ms a network", notes[2])
    assert notes["auto"].startswith("no network, rounds would be no shorter")  # so small is the model


# ---- host memory -------------------------------------------------------------------------------


class Reluctant(EmulatedDevice):
    """Pins so many regions, then no more."""

    def __init__(self, n_regions: int) -> None:
        super().__init__(n_sms=4)
        self.left = n_regions

    def allocate_host(self, n_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        if self.left == 0:
            raise DeviceMemoryError("no")
        self.left -= 1
        return super().allocate_host(n_bytes)


def test_pinning_that_is_refused_is_one_line_with_the_amount_and_leaves_nothing(artifact_of: ArtifactOf) -> None:
    with Artifact.open(artifact_of("dense", "groupwise-int")) as artifact:
        model = bind(artifact)
        for n_regions in (0, 3):
            device = Reluctant(n_regions)
            free = device.free_bytes()
            line = r"^\d+ MiB of host memory are to be pinned for weights, \d+ MiB of them, for .*, were refused after"
            with pytest.raises(DeviceMemoryError, match=line):
                offloaded(model, device, 0, 1)
            assert device.free_bytes() == free
            assert not device._pinned
            device.left = 1000
            program = offloaded(model, device, N_LAYERS - 2, 1, PLAIN)
            program.close()
            assert device.free_bytes() == free


def test_memory_that_the_host_lacks_is_not_pinned_at_all(tmp_path: Path) -> None:
    device = EmulatedDevice()
    with pytest.raises(DeviceMemoryError, match=r"^3 MiB .* for weights, 2 MiB of it are free; free host memory"):
        HostStore(device, 3 * MIB, free=lambda: 2 * MIB)
    for free in (lambda: None, lambda: 3 * MIB):
        store = HostStore(device, 3 * MIB, free=free)
        store.take("a", 5)
        store.close()
    assert not device._pinned
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:    4096 kB\n")
    assert free_host_bytes(tmp_path / "meminfo", tmp_path) == 4 * MIB
    for name, text in (("max", "3145728\n"), ("current", "2097152\n"), ("stat", "anon 7\ninactive_file 1048576\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_host_bytes(tmp_path / "meminfo", tmp_path) == 2 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_bytes(tmp_path / "meminfo", tmp_path) == 4 * MIB
    assert free_host_bytes(tmp_path / "absent", tmp_path) is None


# ---- options -----------------------------------------------------------------------------------


def test_sizes_rates_and_counts_are_read_strictly() -> None:
    sizes = {"17179869184": 16 << 30, "16GiB": 16 << 30, "16GB": 16 * 10**9, "0.5KiB": 512}
    assert {text: memory_size(text) for text in sizes} == sizes
    assert link_rate("27GB/s") == link_rate("27000MB/s") == 27e9
    assert [ffn_layers(text) for text in (None, "auto", "0", "41")] == [None, None, 0, 41]
    for wrong in ("", "-1", "16 GiB", "16gib", "GiB", "1e9", "16GiB/s", "0"):
        with pytest.raises(typer.BadParameter, match="as in 16GiB"):
            memory_size(wrong)
    for wrong in ("", "27GB", "27", "-27GB/s", "0GB/s"):
        with pytest.raises(typer.BadParameter, match="as in 27GB/s"):
            link_rate(wrong)
    assert [ffn_cpu(text) for text in (None, "auto", "0", "7")] == [0, "auto", 0, 7]
    for read in (ffn_layers, ffn_cpu):
        with pytest.raises(typer.BadParameter, match="digits"):
            read("all")
