"""Networks that the CPU computes in rounds: near the kernels' results, the same in any order and any company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ninfer_format import NUMERIC_FORMATS, Artifact
from ninfer_format.numeric.grouped import dequantize, quantize_groups
from ninfer_runtime.backends.base import PrefillChunk, ProgramOptions
from ninfer_runtime.backends.cuda import cpu_networks
from ninfer_runtime.backends.cuda import program as program_module
from ninfer_runtime.backends.cuda.backend import CudaBackend
from ninfer_runtime.backends.cuda.cpu_matrices import Bfloat16Matrix, FourBitPlanes
from ninfer_runtime.backends.cuda.cpu_networks import CpuNetwork, CpuRounds, measured_seconds, network_bytes
from ninfer_runtime.backends.cuda.device import DeviceError, DeviceMemoryError
from ninfer_runtime.backends.cuda.program import CudaProgram
from ninfer_runtime.backends.cuda.residency import CpuSeconds
from ninfer_runtime.config import Residency
from ninfer_runtime.models.binder import BoundModel, bind
from tests.emulator.device import EmulatedDevice
from tests.emulator.recording import Order
from tests.runtime.conftest import ArtifactOf
from tests.runtime.cuda.offload_rig import (
    DRAFTS,
    N_LAYERS,
    PLAIN,
    RATES,
    SEED,
    drafting_story,
    hidden_rows,
    offloaded,
    program_of,
    story,
)
from tests.runtime.programs import Row, pages_of, random_ids, round_of

GROUPED = ("Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S")


@pytest.fixture(scope="module")
def model(artifact_of: ArtifactOf) -> Iterator[BoundModel]:
    with Artifact.open(artifact_of("dense", "groupwise-int")) as artifact:
        yield bind(artifact)


def cpu_program(model: BoundModel, *on_cpu: int, device: EmulatedDevice | None = None, **more: Any) -> CudaProgram:
    """All layers streamed through one slot but those on the CPU."""
    return offloaded(model, device or EmulatedDevice(n_sms=4), 0, 1, n_cpu_layers=len(on_cpu), on_cpu=on_cpu, **more)


# ---- matrices ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("k", [128, 1000])
def test_codes_are_multiplied_exactly_but_for_their_scales(name: str, k: int, fresh_seed: int) -> None:
    fmt, random, n = NUMERIC_FORMATS[name], np.random.default_rng(fresh_seed), 96
    words = quantize_groups(random.standard_normal((n, k), np.float32), fmt)
    # Scales that bfloat16 holds, so that nothing but the last rounding is left.
    scales = (words.scales.view(np.float16).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    scales = np.maximum(scales, np.float32(2.0**-12))
    scale_words: NDArray[np.uint16] = scales.astype(np.float16).view(np.uint16)
    matrix = FourBitPlanes(fmt, n, k)
    for begin, end in ((0, 32), (32, n)):
        matrix.fill(words.codes[begin:end], scale_words[begin:end])
    x = torch.zeros(5, -(-k // 128) * 128, dtype=torch.bfloat16)
    x[:, :k] = torch.from_numpy(random.standard_normal((5, k), np.float32))
    found, exact_x = matrix(x), x[:, :k].double().numpy()
    weights = dequantize(words.codes, scale_words, fmt).astype(np.float64)
    magnitudes = np.abs(exact_x) @ np.abs(weights).T
    # bfloat16 results of up to two planes, the upper one's no larger than all magnitudes; float32 sums of k products.
    bound = (2 * 2.0**-8 + k * 2.0**-22) * magnitudes
    assert (np.abs(found.numpy() - exact_x @ weights.T) <= bound).all()
    assert np.linalg.norm(found.numpy() - exact_x @ weights.T) < 0.01 * np.linalg.norm(exact_x @ weights.T)
    assert all(torch.equal(matrix(x[i : i + 1]), found[i : i + 1]) for i in range(5)), "rows are alone"


def test_other_formats_are_multiplied_as_bfloat16(fresh_seed: int) -> None:
    random = np.random.default_rng(fresh_seed)
    values = random.standard_normal((48, 200), np.float32)
    matrix = Bfloat16Matrix(48, 200)
    matrix.fill(values[:40])
    matrix.fill(values[40:])
    x = torch.nn.functional.pad(torch.from_numpy(random.standard_normal((3, 200), np.float32)).bfloat16(), (0, 56))
    exact = x[:, :200].double() @ torch.from_numpy(values).bfloat16().double().T
    assert float((matrix(x) - exact).norm() / exact.norm()) < 2.0**-7
    assert all(torch.equal(matrix(x[i : i + 1]), matrix(x)[i : i + 1]) for i in range(3))


# ---- programs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["groupwise-int", "w8", "bf16", "nvfp4"])
def test_rounds_are_near_those_of_the_card_and_the_same_in_any_order(artifact_of: ArtifactOf, recipe: str) -> None:
    with Artifact.open(artifact_of("dense", recipe)) as artifact:
        model = bind(artifact)
        expected, said = story(program_of(model, EmulatedDevice(n_sms=4)), model), []
        orders: list[Order] = ["side_first", "side_last"]
        for order in orders:
            device = EmulatedDevice(n_sms=4, lazy=True, order=order)
            said.append(story(cpu_program(model, 1, N_LAYERS - 1, device=device, host_embedding=True), model))
    assert said[0] == said[1]
    assert said[0] != expected, "sums of the CPU are in another order"
    assert said[0][:4] == expected[:4], "prompts are the card's"


@pytest.mark.parametrize("on_cpu", [(1,), (2, 3), (1, 2, 3)])
def test_a_round_differs_by_no_more_than_roundings(model: BoundModel, on_cpu: tuple[int, ...], fresh_seed: int) -> None:
    expected = hidden_rows(program_of(model, EmulatedDevice(n_sms=4)), model, fresh_seed)
    found = hidden_rows(cpu_program(model, *on_cpu), model, fresh_seed)
    # Three networks: 0.66 % in the mean of 25 prompts, a deviation of 0.12 %; a wrong one would be off by tens.
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)


def test_drafts_are_verified_as_without_them(model: BoundModel) -> None:
    said = []
    orders: list[Order] = ["side_first", "side_last"]
    for order in orders:
        program = cpu_program(model, 2, device=EmulatedDevice(n_sms=4, order=order), limits=DRAFTS)
        said.append(drafting_story(program, model))
    assert said[0] == said[1]
    assert len({tuple(tokens) for tokens, _ in said[0]}) == 1, "with one draft, two, and none: one text"


def test_a_row_says_the_same_beside_another(model: BoundModel) -> None:
    alone, beside = (rounds_of(model, n_rows) for n_rows in (1, 2))
    assert np.array_equal(alone, beside)


def rounds_of(model: BoundModel, n_rows: int) -> NDArray[np.float32]:
    """Logits of slot 0 in a round of so many rows."""
    program = cpu_program(model, 1, 3)
    for slot in range(n_rows):
        program.reset(slot)
        program.prefill(PrefillChunk(slot, random_ids(model, SEED + slot, 20), 0, pages_of(slot)))
    rows = [Row(slot, [7 + slot]) for slot in range(n_rows)]
    evaluated = program.read(program.launch(round_of(program, *rows, want_logits=True)))
    program.close()
    assert evaluated.logits is not None
    logits: NDArray[np.float32] = evaluated.logits[0]
    return logits


# ---- failures and measurements -----------------------------------------------------------------


def test_an_error_on_the_cpu_is_one_line_of_the_round_that_needed_it(
    model: BoundModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = cpu_program(model, 1)
    program.reset(0)
    program.prefill(PrefillChunk(0, random_ids(model, SEED, 20), 0, pages_of(0)))

    def broken(network: CpuNetwork, x: torch.Tensor) -> None:
        raise MemoryError("no page left")

    monkeypatch.setattr(CpuNetwork, "__call__", broken)
    ticket = program.launch(round_of(program, Row(0, [3])))
    with pytest.raises(DeviceError, match=r"CPU's part of a round failed: MemoryError\('no page left'\); start again"):
        program.read(ticket)
    program.close()


def test_a_start_that_fails_gives_everything_back(model: BoundModel, monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice(n_sms=4)
    cpu_program(model, 1, device=device).close()
    pinned, used = len(device._pinned), device.memory.used_bytes

    def broken(*arguments: object) -> None:
        raise DeviceError("no room for graphs")

    monkeypatch.setattr(program_module, "Staging", broken)
    with pytest.raises(DeviceError, match="no room"):
        cpu_program(model, 1, device=device)
    assert device.memory.used_bytes == used
    buffers = len(device._pinned) - pinned
    monkeypatch.setattr(CpuRounds, "close", lambda _: None)
    with pytest.raises(DeviceError, match="no room"):
        cpu_program(model, 1, device=device)
    assert len(device._pinned) - pinned == 2 * buffers + 1, "the buffer that was not given back this time"


def test_full_rounds_decide_what_the_cpu_takes(model: BoundModel) -> None:
    rates = replace(RATES, link=1e6, cpu=CpuSeconds(1e-5, 1.0))
    taken = []
    for n_rows in (1, 2):
        backend = CudaBackend(EmulatedDevice(n_sms=4), rates=rates)
        wanted = Residency("ffn", 0, n_cpu_layers=None)
        options = ProgramOptions(device="cuda", dtype="bfloat16", residency=wanted)
        limits = replace(PLAIN, max_columns=1, max_rows=n_rows)
        taken.append(len(backend.plan_memory(model, limits, options).options.residency.on_cpu))
    assert taken[0] > taken[1] == 0


def test_host_memory_that_is_not_there_is_refused_with_the_amount(
    model: BoundModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 2 * network_bytes(model, 0)
    monkeypatch.setattr(cpu_networks, "free_host_bytes", lambda: needed)
    device = EmulatedDevice(n_sms=4)
    CpuRounds(device, model, (0, 1), 8).close()
    monkeypatch.setattr(cpu_networks, "free_host_bytes", lambda: needed - 1)
    with pytest.raises(DeviceMemoryError, match="lower --ffn-cpu"):
        CpuRounds(device, model, (0, 1), 8)


def test_the_cpu_is_timed_on_networks_of_the_models_size(artifact_of: ArtifactOf, model: BoundModel) -> None:
    device = EmulatedDevice(n_sms=4)
    seconds = measured_seconds(model, device)
    assert seconds is not None
    assert 0 < seconds.of_one < 1
    assert device.memory.used_bytes == 0, "nothing is kept"
    with Artifact.open(artifact_of("moe", "groupwise-int")) as artifact:
        assert measured_seconds(bind(artifact), device) is None
