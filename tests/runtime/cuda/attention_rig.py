"""A pool, a layer's vectors and random projections for the attention operators, on the emulator or on a card.

The oracle: norm, rotation and softmax in float32 as in ``backends/reference``, codecs of ``backends/kv_numeric.py``.
FP6 codes are numbers here, in the order of their values: -27 .. 27. Keys and values that attention should see are read
back from the pool, so that a code that fell on the other side of a tie counts once, in the comparison of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ninfer_format.model_geometry import TextGeometry
from ninfer_runtime.backends import kv_numeric
from ninfer_runtime.backends.cuda.device import Device, Stream
from ninfer_runtime.backends.cuda.ops import attention_decode, attention_prefill
from ninfer_runtime.backends.cuda.ops.attention import AttentionGeometry, attention_geometry, rope_table
from ninfer_runtime.backends.cuda.ops.kv_cache import (
    HEAD_DIM,
    SCALE_GROUP,
    Bytes,
    KvFormat,
    KvLayout,
    fp6_key_bytes,
    fp6_value_bytes,
)
from ninfer_runtime.backends.cuda.ops.round_state import ROW_STATE
from ninfer_runtime.backends.reference.attention import attend
from ninfer_runtime.backends.reference.norm import rms_norm
from ninfer_runtime.backends.reference.rope import rotate
from ninfer_runtime.config import PAGE_TOKENS
from ninfer_runtime.models.spec import ModelSpec

N_LAYERS, LAYER = 2, 1
POISON = 0xFF

Codes = NDArray[np.int8]
Halves = NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Storage:
    """A format of keys and values, and whether they are rotated."""

    format: KvFormat
    rotation: bool = False

    def __str__(self) -> str:
        return f"{self.format}-rotated" if self.rotation else self.format


PLAIN = tuple(Storage(format) for format in get_args(KvFormat))
ROTATED = (Storage("int8", True), Storage("fp6", True))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a round: tokens in the cache, new columns (0: frozen), and its rope delta."""

    start: int
    n_columns: int
    rope_delta: int = 0


def model(n_heads: int, n_kv_heads: int, rotary_dim: int = 64) -> ModelSpec:
    """A model of which only the attention matters; axes as in the published configs."""
    text = TextGeometry(128, ("attention",), 640, n_heads, n_kv_heads, HEAD_DIM, 1, 1, 128, 128, 4, 256, 0, 0, 0, 0, 0)
    axes = tuple(axis if i < rotary_dim // 2 - 2 else 0 for i in range(rotary_dim // 2) for axis in [i % 3])
    return ModelSpec("qwen3_5", text, 1e-6, 1e7, rotary_dim, axes, None, 640)


def fp6_numbers(codes: Bytes) -> Codes:
    """Codes in the order of their values."""
    magnitude = (codes & 0x1F).astype(np.int8)
    return np.where(codes & 0x20, -magnitude, magnitude)


def fp6_codes(numbers: Codes) -> Bytes:
    """The inverse of ``fp6_numbers``."""
    return (np.abs(numbers) | np.where(numbers < 0, 0x20, 0)).astype(np.uint8)


@cache
def _fp6_places(pack: Callable[[Bytes], Bytes]) -> NDArray[np.int64]:
    """Where in the packed bits of a head each bit of each code lies, [256, 6]."""
    single = np.zeros((HEAD_DIM, 6, HEAD_DIM), np.uint8)
    dims, bits = np.indices((HEAD_DIM, 6))
    single[dims, bits, dims] = 1 << bits
    packed = np.unpackbits(pack(single), axis=-1, bitorder="little")
    assert (packed.sum(-1) == 1).all(), "every bit has one place"
    assert (packed.sum((0, 1)) == 1).all(), "every place has one bit"
    return np.asarray(packed.argmax(-1), np.int64)


def unpack_fp6(stored: Bytes, pack: Callable[[Bytes], Bytes]) -> Bytes:
    """Codes [..., 256] from bytes [..., 192] that ``pack`` made; whole rows of bytes at a time, caches are large."""
    columns = np.ascontiguousarray(stored.reshape(-1, stored.shape[-1]).T)
    codes = np.zeros((HEAD_DIM, columns.shape[1]), np.uint8)
    for code, places in zip(codes, _fp6_places(pack), strict=True):
        masks: dict[tuple[int, int], int] = {}  # (byte, shift) → bits of the byte
        for bit, place in enumerate(places.tolist()):
            byte, at = divmod(place, 8)
            masks[byte, at - bit] = masks.get((byte, at - bit), 0) | 1 << at
        for (byte, shift), mask in masks.items():
            piece = columns[byte] & np.uint8(mask)
            code |= piece >> shift if shift >= 0 else piece << -shift
    return np.ascontiguousarray(codes.T).reshape(*stored.shape[:-1], HEAD_DIM)


PACKS = (fp6_key_bytes, fp6_value_bytes)


def bf16_words(x: Tensor) -> NDArray[np.uint16]:
    """The words of a tensor rounded to bfloat16."""
    return x.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)


def from_bf16(words: NDArray[np.uint16]) -> Tensor:
    """float32 values of bfloat16 words."""
    return torch.from_numpy(words.view(np.int16).copy()).view(torch.bfloat16).float()


@dataclass(slots=True)
class Rig:
    """One layer on a device. ``pages`` are handed out in a random order."""

    device: Device
    spec: ModelSpec
    format: KvFormat
    n_pages: int
    seed: int
    norm_scale: float = 0.3
    rotation: bool = False
    layout: KvLayout = field(init=False)
    geometry: AttentionGeometry = field(init=False)
    stream: Stream = field(init=False)
    random: np.random.Generator = field(init=False)
    generator: torch.Generator = field(init=False)
    pool: int = field(init=False)
    free_pages: list[int] = field(init=False)
    q_norm: Tensor = field(init=False)
    k_norm: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.stream = self.device.stream()
        self.geometry = attention_geometry(self.spec, self.format, rotation=self.rotation)
        self.layout = KvLayout(N_LAYERS, self.spec.text.n_kv_heads, self.n_pages, self.format)
        self.pool = self.device.allocate(self.layout.n_bytes)
        self.device.fill(self.pool, POISON, self.layout.n_bytes, self.stream)
        self.free_pages = self.random.permutation(self.n_pages).tolist()
        self.q_norm, self.k_norm = (from_bf16(bf16_words(self.normal(HEAD_DIM) * self.norm_scale)) for _ in range(2))

    def normal(self, *shape: int) -> Tensor:
        """Standard normal float32."""
        return torch.randn(shape, generator=self.generator)

    def put(self, array: NDArray[np.generic]) -> int:
        """A copy of an array on the device."""
        contiguous = np.ascontiguousarray(array)
        pointer = self.device.allocate(max(contiguous.nbytes, 16))
        self.device.upload(pointer, contiguous.reshape(-1).view(np.uint8))
        return pointer

    def get(self, pointer: int, dtype: type[np.generic], shape: Sequence[int]) -> NDArray[np.generic]:
        """An array from the device."""
        self.device.synchronize()
        array = np.empty(shape, dtype)
        self.device.download(pointer, array.reshape(-1).view(np.uint8))
        return array

    def take_pages(self, n_tokens: int) -> list[int]:
        """Pages for a row of ``n_tokens`` tokens."""
        n = -(-n_tokens // PAGE_TOKENS)
        taken, self.free_pages = self.free_pages[:n], self.free_pages[n:]
        return taken

    # ---- the pool on the host -------------------------------------------------------------------
    def read_pool(self) -> tuple[NDArray[np.generic], ...]:
        """The layer's planes: codes (int8 or bf16 words) of K and V, then their float16 scales if there are any.

        [page, kv head, 64, 256 or 4]: with V's signs as they are and the groups of a scale last.
        """
        base, heads = self.pool + LAYER * self.layout.layer_bytes, (self.n_pages, self.layout.n_kv_heads)
        offsets = self.layout.plane_offsets
        if self.format == "bf16":
            return tuple(self.get(base + offset, np.uint16, (*heads, PAGE_TOKENS, HEAD_DIM)) for offset in offsets[:2])
        n_bytes = self.layout.code_page_bytes // (self.layout.n_kv_heads * PAGE_TOKENS)
        codes = [self.get(base + offset, np.uint8, (*heads, PAGE_TOKENS, n_bytes)) for offset in offsets[:2]]
        scales = [self.get(base + offset, np.float16, (*heads, 4, PAGE_TOKENS)) for offset in offsets[2:]]
        if self.format == "fp6":
            numbers = [fp6_numbers(unpack_fp6(b.view(np.uint8), pack)) for b, pack in zip(codes, PACKS, strict=True)]
            return (*numbers, *(plane.swapaxes(2, 3) for plane in scales))
        flipped = codes[1].view(np.uint8) ^ np.uint8(0x80)
        return (codes[0].view(np.int8), flipped.view(np.int8), *(plane.swapaxes(2, 3) for plane in scales))

    def _write(self, index: int, array: NDArray[np.generic]) -> None:
        pointer = self.pool + LAYER * self.layout.layer_bytes + self.layout.plane_offsets[index]
        if self.format == "int8" and index == 1:
            array = array.view(np.uint8) ^ np.uint8(0x80)
        if self.format == "fp6" and index < 2:
            array = PACKS[index](fp6_codes(array.view(np.int8)))
        if index >= 2:
            array = array.swapaxes(2, 3)
        self.device.upload(pointer, np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def encoded(self, x: Tensor) -> list[NDArray[np.generic]]:
        """float32 heads as they are stored: codes, and scales for INT8 and FP6."""
        if self.format == "bf16":
            return [bf16_words(x)]
        heads = self.rotated(x.numpy())
        if self.format == "fp6":
            codes, scales = kv_numeric.encode_fp6(heads)
            return [fp6_numbers(codes), scales]
        return list(kv_numeric.encode_int8(heads))

    def rotated(self, heads: NDArray[np.float32]) -> NDArray[np.float32]:
        """Times the Walsh-Hadamard matrix, where that is on."""
        return kv_numeric.rotate(heads) if self.rotation else heads

    def fill_cache(self, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Random normalised keys and values for the first tokens of rows, given as (tokens, pages)."""
        planes = [plane.copy() for plane in self.read_pool()]
        for n_tokens, pages in rows:
            if n_tokens == 0:
                continue
            shape = (n_tokens, self.layout.n_kv_heads, HEAD_DIM)
            keys = rms_norm(self.normal(*shape), self.k_norm, self.spec.norm_eps)
            values = self.normal(*shape) * torch.exp(self.normal(n_tokens, self.layout.n_kv_heads, 1))
            for which, x in enumerate((keys, values)):
                for part, array in enumerate(self.encoded(x)):
                    for begin in range(0, n_tokens, PAGE_TOKENS):
                        tokens = array[begin : begin + PAGE_TOKENS]
                        planes[which + 2 * part][pages[begin // PAGE_TOKENS], :, : len(tokens)] = tokens.swapaxes(0, 1)
        for index, plane in enumerate(planes):
            self._write(index, plane)

    def gather(self, planes: tuple[NDArray[np.generic], ...], pages: Sequence[int], n_tokens: int) -> list[Tensor]:
        """float32 keys and values [kv heads, n_tokens, 256] of a row."""
        out = []
        for which in (0, 1):
            codes = np.moveaxis(planes[which][list(pages)], 1, 0).reshape(self.layout.n_kv_heads, -1, HEAD_DIM)
            codes = codes[:, :n_tokens]
            if self.format == "bf16":
                out.append(from_bf16(codes.view(np.uint16)))
                continue
            scales = np.moveaxis(planes[2 + which][list(pages)], 1, 0).reshape(self.layout.n_kv_heads, -1, 4)
            wide = np.repeat(scales[:, :n_tokens].astype(np.float32), SCALE_GROUP, axis=-1)
            values = codes.astype(np.float32)
            if self.format == "fp6":
                values = kv_numeric.fp6_values()[fp6_codes(codes.view(np.int8))]
            out.append(torch.from_numpy(self.rotated(values * wide)))
        return out

    # ---- the oracle -----------------------------------------------------------------------------
    def turned(self, projected: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
        """float32 [T, heads, 256]: normalised and rotated heads; positions int64 [3, T].

        The frequencies are the operator's: one ulp of them is 0.01 of a turn at the largest positions.
        """
        pairs = self.spec.rotary_dim // 2
        frequencies = torch.from_numpy(rope_table(self.spec)[: 4 * pairs].view(np.float32).copy())
        angles = positions.float()[torch.tensor(self.spec.rope_axes)].T * frequencies
        return rotate(rms_norm(projected, weight, self.spec.norm_eps), angles.cos(), angles.sin())

    def expected(self, query: Tensor, gate: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        """float32 [T, heads · 256]: what the operator should write for turned queries of tokens from ``start`` on."""
        rows = []
        for t in range(query.shape[0]):
            mixed = attend(query[t], keys[:, : start + t + 1], values[:, : start + t + 1]).reshape(-1)
            rows.append(mixed.to(torch.bfloat16).float() * torch.sigmoid(gate[t]))
        return torch.stack(rows)


@dataclass(slots=True)
class Projections:
    """bf16-rounded float32 [T, heads, 256] and their device copies, rows padded to ``stride`` with poison."""

    query: Tensor
    key: Tensor
    gate: Tensor
    value: Tensor
    qk: int
    gv: int
    stride: int


def random_projections(rig: Rig, n_tokens: int, pad: int = 8) -> Projections:
    """Projections of ``n_tokens`` tokens; scales differ per token, as real ones do."""
    text = rig.spec.text
    parts = []
    for heads in (text.n_heads, text.n_kv_heads, text.n_heads, text.n_kv_heads):
        scale = torch.exp(rig.normal(n_tokens, heads, 1))
        parts.append(from_bf16(bf16_words(rig.normal(n_tokens, heads, HEAD_DIM) * scale)))
    stride = (text.n_heads + text.n_kv_heads) * HEAD_DIM + pad
    pointers = []
    for first, second in (parts[:2], parts[2:]):
        words = np.full((n_tokens, stride), 0xFFFF, np.uint16)
        words[:, : stride - pad] = bf16_words(torch.cat([first, second], 1).reshape(n_tokens, -1))
        pointers.append(rig.put(words))
    return Projections(parts[0], parts[1], parts[2], parts[3], pointers[0], pointers[1], stride)


@dataclass(slots=True)
class Outcome:
    """What an operator wrote, and what it should have: out float32 [T, n]; fresh: (stored, oracle) codes and scales."""

    out: Tensor
    expected: Tensor
    written: list[tuple[NDArray[np.generic], NDArray[np.generic]]]


def _written(
    rig: Rig, planes: tuple[NDArray[np.generic], ...], pages: Sequence[int], start: int, key: Tensor, value: Tensor
) -> list[tuple[NDArray[np.generic], NDArray[np.generic]]]:
    index = np.arange(start, start + key.shape[0])
    page, token = np.asarray(pages)[index // PAGE_TOKENS], index % PAGE_TOKENS
    pairs = []
    for which, x in enumerate((key, value)):
        for part, oracle in enumerate(rig.encoded(x)):
            pairs.append((planes[which + 2 * part][page, :, token], oracle))
    return pairs


def run_decode(rig: Rig, rows: Sequence[Row], q: int, lowest: int = 0) -> Outcome:
    """One round over fresh random caches."""
    spec, n_rows = rig.spec, len(rows)
    tables = [rig.take_pages(row.start + max(row.n_columns, 1)) for row in rows]
    width = max(map(len, tables)) + 1
    rig.fill_cache([(row.start, table) for row, table in zip(rows, tables, strict=True)])
    projections = random_projections(rig, n_rows * q)
    states = np.zeros(n_rows, ROW_STATE)
    for state, row in zip(states, rows, strict=True):
        state["start"], state["n_columns"], state["rope_delta"] = row.start, row.n_columns, row.rope_delta
    table = np.full((n_rows, width), -1, np.int32)
    for b, pages in enumerate(tables):
        table[b, : len(pages)] = pages
    n_out = spec.text.n_heads * HEAD_DIM
    out = rig.put(np.full((n_rows * q, n_out + 8), 0xFFFF, np.uint16))
    size = attention_decode.workspace_bytes(rig.geometry, rig.device.n_sms, n_rows, q)
    workspace = rig.put(np.full(size, POISON, np.uint8))
    attention_decode.AttentionDecode(rig.device, rig.geometry, q).launch(
        rig.stream,
        n_rows=n_rows,
        rows=rig.put(states),
        page_table=rig.put(table),
        pages_per_row=width,
        qk=projections.qk,
        qk_stride=projections.stride,
        gv=projections.gv,
        gv_stride=projections.stride,
        q_norm=rig.put(bf16_words(rig.q_norm)),
        k_norm=rig.put(bf16_words(rig.k_norm)),
        rope=rig.put(rope_table(spec)),
        planes=rig.layout.planes(rig.pool, LAYER),
        out=out,
        out_stride=n_out + 8,
        workspace=workspace,
        lowest=lowest,
    )
    result = from_bf16(rig.get(out, np.uint16, (n_rows * q, n_out + 8)).view(np.uint16))
    assert result[:, n_out:].isnan().all(), "the padding of the output rows was written"
    planes = rig.read_pool()
    expected = torch.zeros(n_rows * q, n_out)
    written = []
    for b, (row, pages) in enumerate(zip(rows, tables, strict=True)):
        if row.n_columns == 0:
            continue
        columns = slice(b * q, b * q + row.n_columns)
        first = row.start + row.rope_delta
        positions = torch.arange(first, first + row.n_columns).expand(3, -1)
        query = rig.turned(projections.query[columns], rig.q_norm, positions)
        key = rig.turned(projections.key[columns], rig.k_norm, positions)
        written += _written(rig, planes, pages, row.start, key, projections.value[columns])
        keys, values = rig.gather(planes, pages, row.start + row.n_columns)
        expected[columns] = rig.expected(
            query, projections.gate[columns].flatten(1), keys[:, lowest:], values[:, lowest:], row.start - lowest
        )
    return Outcome(result[:, :n_out], expected, written)


def run_prefill(rig: Rig, start: int, n_tokens: int, positions: Tensor, check: Sequence[int] | None = None) -> Outcome:
    """One chunk over a fresh random cache; positions int64 [3, T]. ``check``: tokens to compare, None for all."""
    spec = rig.spec
    pages = rig.take_pages(start + n_tokens)
    rig.fill_cache([(start, pages)])
    projections = random_projections(rig, n_tokens)
    n_out = spec.text.n_heads * HEAD_DIM
    out = rig.put(np.full((n_tokens, n_out + 8), 0xFFFF, np.uint16))
    size = attention_prefill.workspace_bytes(rig.geometry, rig.device.n_sms, n_tokens)
    attention_prefill.AttentionPrefill(rig.device, rig.geometry).launch(
        rig.stream,
        n_tokens=n_tokens,
        start=start,
        positions=rig.put(positions.numpy().astype(np.int32)),
        pages=rig.put(np.asarray(pages, np.int32)),
        qk=projections.qk,
        qk_stride=projections.stride,
        gv=projections.gv,
        gv_stride=projections.stride,
        q_norm=rig.put(bf16_words(rig.q_norm)),
        k_norm=rig.put(bf16_words(rig.k_norm)),
        rope=rig.put(rope_table(spec)),
        planes=rig.layout.planes(rig.pool, LAYER),
        out=out,
        out_stride=n_out + 8,
        workspace=rig.put(np.full(size, POISON, np.uint8)),
    )
    result = from_bf16(rig.get(out, np.uint16, (n_tokens, n_out + 8)).view(np.uint16))
    assert result[:, n_out:].isnan().all(), "the padding of the output rows was written"
    planes = rig.read_pool()
    query = rig.turned(projections.query, rig.q_norm, positions)
    key = rig.turned(projections.key, rig.k_norm, positions)
    keys, values = rig.gather(planes, pages, start + n_tokens)
    tokens = list(range(n_tokens) if check is None else check)
    rows = [
        rig.expected(query[t : t + 1], projections.gate[t : t + 1].flatten(1), keys, values, start + t) for t in tokens
    ]
    written = _written(rig, planes, pages, start, key, projections.value)
    return Outcome(result[tokens, :n_out], torch.cat(rows), written)


def largest_error(outcome: Outcome) -> float:
    """Largest relative error of a head's 256 outputs, in the Euclidean norm; NaN counts as infinite."""
    out, expected = (x.reshape(x.shape[0], -1, HEAD_DIM) for x in (outcome.out, outcome.expected))
    size = torch.linalg.vector_norm(expected, dim=-1).clamp_min(1e-3)
    return float((torch.linalg.vector_norm(out - expected, dim=-1) / size).nan_to_num(nan=torch.inf).max())


def check_written(outcome: Outcome) -> None:
    """What went into the pool: at most one step off the oracle's, and rarely; near zero an absolute 1e-5 will do."""
    for stored, oracle in outcome.written:
        if stored.dtype == np.int8:
            steps = np.abs(stored.astype(np.int32) - oracle.astype(np.int32))
        else:
            steps = np.abs(stored.view(np.int16).astype(np.int32) - oracle.view(np.int16).astype(np.int32))
        if stored.dtype == np.uint16:
            steps[(from_bf16(stored.view(np.uint16)) - from_bf16(oracle.view(np.uint16))).abs().numpy() < 1e-5] = 0
        assert steps.max() <= 1, f"{stored.dtype}: {steps.max()} steps off"
        assert (steps != 0).sum() <= max(3, 0.01 * steps.size)  # three: of few scales one is soon more than 1 %
