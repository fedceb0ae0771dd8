"""Feed-forward networks that pass through the device: the tokens of a resident program, in whatever order work is done.

The emulator does captured copies as early and as late as the recorded edges allow, and postpones what nothing has
waited for, so a forgotten edge changes tokens; the last tests take edges away and see that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ninfer_format import Artifact
from ninfer_runtime.backends.cuda.device import DeviceError
from ninfer_runtime.backends.cuda.ring import DOWN, Ring
from ninfer_runtime.models.binder import BoundModel, bind
from tests.emulator.device import EmulatedDevice
from tests.emulator.recording import Order
from tests.runtime.conftest import ArtifactOf
from tests.runtime.cuda.offload_rig import DRAFTS, N_LAYERS, drafting_story, offloaded, program_of, story


@pytest.fixture(scope="module")
def model(artifact_of: ArtifactOf) -> Iterator[BoundModel]:
    with Artifact.open(artifact_of("dense", "groupwise-int")) as artifact:
        yield bind(artifact)


@pytest.fixture(scope="module")
def expected(model: BoundModel) -> list[Any]:
    return story(program_of(model, EmulatedDevice(n_sms=4)), model)


@pytest.mark.parametrize("order", ["side_first", "side_last"])
@pytest.mark.parametrize(("n_resident", "n_slots"), [(0, 1), (0, 3), (1, 2), (2, 1), (3, 1), (4, 0)])
def test_streamed_and_resident_networks_give_the_same_bits(
    model: BoundModel, expected: list[Any], n_resident: int, n_slots: int, order: Order
) -> None:
    device = EmulatedDevice(n_sms=4, lazy=order == "side_last", order=order)
    program = offloaded(model, device, n_resident, n_slots, host_embedding=n_resident == 2, link_limit=10e9)
    if order == "side_first":  # everything but the copies is postponed
        device.lazy, program.stream.lazy = True, True  # type: ignore[attr-defined]
    assert story(program, model) == expected


@pytest.mark.parametrize("order", ["side_first", "side_last"])
def test_rounds_with_drafts_in_one_graph_and_in_two_give_the_same_bits(model: BoundModel, order: Order) -> None:
    said = []
    for n_resident, n_slots in ((N_LAYERS, 0), (1, 1), (0, 2)):
        device = EmulatedDevice(n_sms=4, order=order)
        program = offloaded(model, device, n_resident, n_slots, DRAFTS)
        said.append(drafting_story(program, model))
    assert said[0] == said[1] == said[2]


Key = tuple[int, int]


@pytest.mark.parametrize(
    ("edge", "order"),
    [
        ("_wait_for_arrival", "side_last"),
        ("_wait_for_use", "side_first"),
        ("settle", "side_last"),
    ],
)
def test_an_edge_that_is_forgotten_changes_what_is_said(
    model: BoundModel, expected: list[Any], monkeypatch: pytest.MonkeyPatch, edge: str, order: Order
) -> None:
    kept: Any = getattr(Ring, edge)

    def forgets(ring: Ring, stream: Any, key: Key = (0, DOWN)) -> None:
        if key[1] != DOWN:
            kept(ring, stream, key)

    monkeypatch.setattr(Ring, edge, forgets)
    device = EmulatedDevice(n_sms=4, lazy=True, order=order)
    assert story(offloaded(model, device, 1, 2), model) != expected


@contextmanager
def without_join(ring: Ring, stream: Any) -> Iterator[None]:
    ring._events, ring._copied = ring._as_captured, set()
    yield


def test_copies_that_do_not_join_their_graph_are_refused(model: BoundModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ring, "captured", without_join)
    with pytest.raises(DeviceError, match="not joined"):
        offloaded(model, EmulatedDevice(n_sms=4), 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["nvfp4", "w8", "bf16"])
def test_networks_of_every_recipe_pass_through(artifact_of: ArtifactOf, recipe: str) -> None:
    with Artifact.open(artifact_of("dense", recipe)) as artifact:
        model = bind(artifact)
        said = [
            story(offloaded(model, EmulatedDevice(n_sms=4, order="side_last"), n_resident, n_slots), model)
            for n_resident, n_slots in ((N_LAYERS, 0), (0, 1))
        ]
    assert said[0] == said[1]
