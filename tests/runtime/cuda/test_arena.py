"""One allocation, the same layout in the plan and on the device, every region aligned and apart from the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer_runtime.backends.cuda.arena import ALIGNMENT, Arena, ArenaPlan
from ninfer_runtime.backends.cuda.device import DeviceError, DeviceMemoryError
from tests.emulator.device import EmulatedDevice

TAKES = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([1, 2, 16, 128, 256])), max_size=30)


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice(total_bytes=1 << 20) as opened:
        yield opened


@given(TAKES)
def test_plan_and_arena_lay_out_alike_and_no_region_overlaps_another(takes: list[tuple[int, int]]) -> None:
    with EmulatedDevice(total_bytes=1 << 20) as device:
        plan = ArenaPlan()
        offsets = [plan.take(str(i), n_bytes, alignment) for i, (n_bytes, alignment) in enumerate(takes)]
        arena = Arena(device, plan.n_bytes)
        addresses = [arena.take(str(i), n_bytes, alignment) for i, (n_bytes, alignment) in enumerate(takes)]
        base = addresses[0] - offsets[0] if takes else 0
        assert [address - base for address in addresses] == offsets
        assert arena.regions == plan.regions
        end = 0
        for region, (n_bytes, alignment) in zip(plan.regions, takes, strict=True):
            assert (region.n_bytes, region.offset % alignment) == (n_bytes, 0)
            assert region.offset >= end
            end = region.offset + n_bytes
        assert end <= plan.n_bytes <= end + ALIGNMENT


def test_rows_add_up_by_the_first_part_of_the_name_largest_first() -> None:
    plan = ArenaPlan()
    for name, n_bytes in (("weights/0/up", 10), ("state/0", 30), ("weights/1/up", 25), ("logits", 5)):
        plan.take(name, n_bytes)
    assert plan.rows() == [("weights", 35), ("state", 30), ("logits", 5)]


def test_region_beyond_the_arena_is_refused_and_the_rest_stays_usable(device: EmulatedDevice) -> None:
    arena = Arena(device, 1024)
    arena.take("first", 512)
    with pytest.raises(DeviceMemoryError, match=r"region 'second' of 600 bytes ends 88 bytes behind the arena of 1024"):
        arena.take("second", 600)
    assert arena.take("third", 512) == arena.take("fourth", 0) - 512


def test_arena_larger_than_the_device_is_refused(device: EmulatedDevice) -> None:
    with pytest.raises(DeviceMemoryError):
        Arena(device, 2 << 20)


def test_closed_arena_has_given_its_memory_back_once(device: EmulatedDevice) -> None:
    arena = Arena(device, 4096)
    pointer = arena.take("only", 4096)
    arena.close()
    arena.close()
    assert device.free_bytes() == device.total_bytes
    with pytest.raises(DeviceError):
        device.free(pointer)


@pytest.mark.parametrize("n_bytes, alignment", [(-1, 256), (1, 0), (1, 3)])
def test_senseless_region_is_our_own_mistake(n_bytes: int, alignment: int) -> None:
    with pytest.raises(ValueError, match="region 'odd'"):
        ArenaPlan().take("odd", n_bytes, alignment)


def test_alignment_that_the_arena_itself_lacks_is_our_own_mistake(device: EmulatedDevice) -> None:
    with pytest.raises(ValueError, match="exceeds 256"):
        Arena(device, 4096).take("wide", 1, 512)
