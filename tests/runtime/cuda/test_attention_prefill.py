"""Attention of prompt chunks under the emulator, against the float32 reference over the pool; page copies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ninfer_runtime.backends.cuda.ops.attention import AttentionGeometry
from ninfer_runtime.backends.cuda.ops.copy_pages import CopyPages
from ninfer_runtime.backends.cuda.ops.kv_cache import KvLayout
from tests.emulator.device import EmulatedDevice
from tests.runtime.cuda.attention_rig import (
    PLAIN,
    ROTATED,
    Rig,
    Row,
    Storage,
    check_written,
    largest_error,
    model,
    run_decode,
    run_prefill,
)

TOLERANCE = 0.01


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice() as emulated:
        yield emulated


def check(
    device: EmulatedDevice, heads: tuple[int, int], storage: Storage, start: int, n_tokens: int, seed: int
) -> None:
    positions = torch.arange(start, start + n_tokens).expand(3, -1)
    rig = Rig(device, model(*heads), storage.format, (start + n_tokens) // 64 + 2, seed, rotation=storage.rotation)
    outcome = run_prefill(rig, start, n_tokens, positions)
    check_written(outcome)
    assert largest_error(outcome) < TOLERANCE


@pytest.mark.parametrize("storage", [*PLAIN, *ROTATED], ids=str)
@pytest.mark.parametrize(("start", "n_tokens"), [(0, 1), (0, 65), (63, 2), (64, 64), (130, 31), (300, 49)])
def test_chunks_at_boundary_contexts(
    device: EmulatedDevice, storage: Storage, start: int, n_tokens: int, fresh_seed: int
) -> None:
    check(device, (6, 1), storage, start, n_tokens, fresh_seed)


@pytest.mark.parametrize(
    ("storage", "heads"),
    [(s, h) for s in PLAIN for h in ((2, 2), (4, 2), (8, 1), (3, 1)) if s.format != "fp6" or h == (3, 1)],
    ids=str,
)
def test_ratios(device: EmulatedDevice, storage: Storage, heads: tuple[int, int], fresh_seed: int) -> None:
    check(device, heads, storage, 40, 33, fresh_seed)


@pytest.mark.parametrize("storage", PLAIN, ids=str)
def test_three_position_axes(device: EmulatedDevice, storage: Storage, fresh_seed: int) -> None:
    rig = Rig(device, model(6, 1), storage.format, 4, fresh_seed, rotation=storage.rotation)
    positions = torch.from_numpy(rig.random.integers(0, 4096, (3, 40)))
    outcome = run_prefill(rig, 70, 40, positions)
    check_written(outcome)
    assert largest_error(outcome) < TOLERANCE


@pytest.mark.parametrize("storage", [*PLAIN, *ROTATED], ids=str)
def test_a_round_stores_what_a_chunk_stores(device: EmulatedDevice, storage: Storage, fresh_seed: int) -> None:
    """The same projections at the same indices leave the same bytes, bit for bit."""
    start, n_tokens = 62, 4
    positions = torch.arange(start, start + n_tokens).expand(3, -1)
    rigs = [Rig(device, model(4, 2), storage.format, 3, fresh_seed, rotation=storage.rotation) for _ in range(2)]
    chunk = run_prefill(rigs[0], start, n_tokens, positions)
    round_ = run_decode(rigs[1], [Row(start, n_tokens)], n_tokens)
    for (first, _), (second, _) in zip(chunk.written, round_.written, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("storage", PLAIN, ids=str)
def test_pages_are_copied_whole_in_all_layers(device: EmulatedDevice, storage: Storage, fresh_seed: int) -> None:
    layout = KvLayout(3, 2, 5, storage.format)
    content = np.random.default_rng(fresh_seed).integers(0, 256, layout.n_bytes, np.uint8)
    pool, stream = device.put(content), device.stream()
    pairs = np.array([[1, 4], [0, 2]], np.int32)
    CopyPages(device, layout).launch(stream, pool=pool, pairs=device.put(pairs), n_pairs=len(pairs))
    device.synchronize()
    for layer in range(layout.n_layers):
        for offset, size in zip(layout.plane_offsets, layout.plane_page_bytes, strict=True):
            base = layer * layout.layer_bytes + offset
            plane = content[base : base + layout.n_pages * size].reshape(layout.n_pages, size)
            plane[pairs[:, 1]] = plane[pairs[:, 0]]
    np.testing.assert_array_equal(device.get(pool, np.uint8, content.shape), content)


def test_geometry_that_the_kernels_lack_is_refused() -> None:
    with pytest.raises(Exception, match="query heads"):
        AttentionGeometry(9, 1, 64, 1e-6, "int8")
    with pytest.raises(Exception, match="query heads"):
        AttentionGeometry(6, 4, 64, 1e-6, "int8")
