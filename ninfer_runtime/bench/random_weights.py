"""Random payloads of an artifact, written from a few megabytes of random words by several threads.

A pool holds a prime number of groups of one format: normal deviates of standard deviation 1 run through the canonical
encoder, so codes and scales go together as in a real artifact. A plane of a matrix is the pool's plane, read in a
circle from a drawn group on; the scale plane is first multiplied by the matrix's own standard deviation.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_format.codec import encode_tensor
from ninfer_format.directory import TensorEntry
from ninfer_format.formats import NUMERIC_FORMATS, ROW_SPLIT, blockscale_planes, row_split_planes
from ninfer_format.layouts.planes import plane_views
from ninfer_format.numeric.nvfp4 import E2M1, E4M3FN
from ninfer_format.writer import ArtifactWriter, storage_error

POOL_GROUPS = (16_381, 262_139)
"""Groups of a pool, two primes: the first that is above the rows of every matrix is taken, so rows of one differ."""
_EMBEDDING_STD = 0.5
_INPUT_DIVISOR = 256.0

_GAINS: Mapping[str, float] = {
    "output": 0.5,
    "down": 0.5,
    "routed_down": 0.5,
    "shared_down": 0.5,
    "fc2": 0.5,
    "output_head": 3.0,
    "draft_head": 3.0,
}
"""Last part of a name → standard deviation in units of 1 / sqrt(K), where it is not 1. Below 1 on the way back into
the residual stream, so that it grows slowly; above 1 in the heads, so that some tokens are likelier than others."""

Draw = Callable[[np.random.Generator, tuple[int, ...]], npt.NDArray[np.floating[Any]]]


def _normal(mean: float, std: float) -> Draw:
    return lambda rng, shape: mean + std * rng.standard_normal(shape, np.float32)


def _decay_rates(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating[Any]]:
    """log A with A from 1 to 16, as these layers are initialised."""
    return np.log(rng.uniform(1, 16, shape))


def _time_steps(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.floating[Any]]:
    """What softplus turns into steps between 0.001 and 0.1, spread evenly in the logarithm."""
    return np.log(np.expm1(np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))))


_AROUND_ZERO, _AROUND_ONE, _BIAS = _normal(0, 0.1), _normal(1, 0.1), _normal(0, 0.02)
_VECTORS: tuple[tuple[str, Draw], ...] = (
    ("/a_log", _decay_rates),
    ("/dt_bias", _time_steps),
    ("/convolution", _normal(0, 0.5)),
    ("/position_embedding", _BIAS),
    ("bias", _BIAS),
    ("/norm1/weight", _AROUND_ONE),
    ("/norm2/weight", _AROUND_ONE),
    ("/norm/weight", _AROUND_ONE),
    ("/gdn/norm", _AROUND_ONE),
    ("/input_scale_divisor", lambda rng, shape: np.full(shape, _INPUT_DIVISOR)),
)
"""End of a name → its values; every other vector is a norm weight."""


def weight_std(name: str, k: int) -> float:
    """Standard deviation of a matrix's weights: 1 / sqrt(K) times the gain of its role."""
    last = name.rpartition("/")[2]
    return _EMBEDDING_STD if last == "token_embedding" else float(_GAINS.get(last, 1.0) / np.sqrt(k))


def vector_values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Plausible values of a tensor that is not a matrix of weights."""
    default = _AROUND_ONE if name.startswith("dflash/") else _AROUND_ZERO
    draw = next((draw for end, draw in _VECTORS if name.endswith(end)), default)
    return np.asarray(draw(rng, shape), np.float32)


@dataclass(frozen=True, slots=True)
class Pool:
    """Planes of a pool as bytes: base, high (empty for some formats), and scales as float32."""

    base: npt.NDArray[np.uint8]
    high: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]


def grouped_pool(format: str, n_groups: int, seed: int) -> Pool:
    """The pool of a grouped format: standard deviation 1."""
    fmt = NUMERIC_FORMATS[format]
    rng = np.random.default_rng([seed, fmt.bits])
    # Two groups per row keep K a multiple of 128 for every group size; the odd group is cut off.
    n_rows, k = -(-n_groups * fmt.group // 128), 128
    payload = encode_tensor(rng.standard_normal((n_rows, k), np.float32), format, ROW_SPLIT)
    views = plane_views(np.frombuffer(payload, np.uint8), row_split_planes(format, (n_rows, k)))

    def flat(plane: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return plane.reshape(-1)[: n_groups * plane.shape[2]]

    scales = views.scales.reshape(-1)[:n_groups].view(np.float16).astype(np.float32)
    return Pool(flat(views.base), flat(views.high), scales)


@dataclass(frozen=True, slots=True)
class Piece:
    """``n_bytes`` of an object from ``offset`` on: ``pool`` read in a circle from byte ``start``."""

    name: str
    offset: int
    n_bytes: int
    pool: npt.NDArray[np.uint8]
    start: int


def _mapped(writer: ArtifactWriter) -> npt.NDArray[np.uint8]:
    """The temporary file as memory, its space reserved first: a full disk must not show while a page is touched.

    Threads that write one file wait for each other, threads that touch its pages do not.
    """
    try:
        os.posix_fallocate(writer.descriptor, 0, writer.file_bytes)
    except OSError as error:
        raise storage_error(error, writer.path, "reserving space") from None
    return np.frombuffer(mmap.mmap(writer.descriptor, writer.file_bytes), np.uint8)


class Filler:
    """Writes every tensor of an artifact. ``n_addressable`` bounds the ids of the draft head."""

    def __init__(self, writer: ArtifactWriter, n_addressable: int, seed: int) -> None:
        self._writer = writer
        self._n_addressable = n_addressable
        self._seed = seed
        self._n_groups = POOL_GROUPS[-1]
        self._made: dict[tuple[object, ...], Any] = {}
        self._lock = threading.Lock()
        self._locks: dict[tuple[object, ...], threading.Lock] = {}

    def fill(self, tensors: Sequence[TensorEntry], n_threads: int) -> None:
        """Write all of them."""
        most_rows = max((entry.shape[0] for entry in tensors if len(entry.shape) == 2), default=0)
        self._n_groups = next((n for n in POOL_GROUPS if n > most_rows), POOL_GROUPS[-1])
        formats = {entry.format for entry in tensors if NUMERIC_FORMATS[entry.format].kind == "grouped"}
        file = _mapped(self._writer)
        with ThreadPoolExecutor(n_threads) as threads:
            list(threads.map(self._pool, sorted(formats)))
            jobs = [(entry, i) for i, entry in enumerate(tensors)]
            jobs.sort(key=lambda job: -job[0].n_bytes)
            list(threads.map(lambda job: self._write(file, *job), jobs))

    def _write(self, file: npt.NDArray[np.uint8], entry: TensorEntry, index: int) -> None:
        rng = np.random.default_rng([self._seed, index])
        begin = self._writer.payload_offset + entry.offset
        payload = file[begin : begin + entry.n_bytes]
        for piece in self._pieces(entry, rng):
            offset, left, start = piece.offset, piece.n_bytes, piece.start
            while left:
                part = piece.pool[start : start + left]
                np.copyto(payload[offset : offset + part.size], part)
                offset, left, start = offset + part.size, left - part.size, 0
        self._writer.mark_written(entry.name)

    def _pieces(self, entry: TensorEntry, rng: np.random.Generator) -> Iterator[Piece]:
        if entry.name.endswith("draft_head_token_ids"):
            ids = np.arange(entry.shape[0], dtype=np.int64) * self._n_addressable // entry.shape[0]
            yield self._whole(entry, ids.astype("<i4").tobytes())
        elif NUMERIC_FORMATS[entry.format].kind == "grouped":
            yield from self._grouped(entry, rng)
        elif entry.format == "NVFP4":
            yield from self._nvfp4(entry, rng)
        elif len(entry.shape) == 2 and not entry.name.endswith(("/convolution", "/position_embedding")):
            words = self._bf16_words(weight_std(entry.name, entry.shape[1]))
            yield Piece(entry.name, 0, entry.n_bytes, words, 2 * int(rng.integers(words.size // 2)))
        else:
            values = vector_values(entry.name, entry.shape, rng)
            yield self._whole(entry, encode_tensor(values, entry.format, entry.layout))

    def _whole(self, entry: TensorEntry, payload: bytes) -> Piece:
        return Piece(entry.name, 0, entry.n_bytes, np.frombuffer(payload, np.uint8), 0)

    def _grouped(self, entry: TensorEntry, rng: np.random.Generator) -> Iterator[Piece]:
        std, planes = weight_std(entry.name, entry.shape[1]), row_split_planes(entry.format, entry.shape)
        if entry.shape[1] % 128:
            yield self._whole(entry, self._padded(entry.format, entry.shape, std))
            return
        pool, scales = self._pool(entry.format), self._scales(entry.format, std)
        first = int(rng.integers(self._n_groups))
        yield Piece(entry.name, planes.base_offset, planes.base_bytes, pool.base, first * planes.base_bytes_per_group)
        if planes.high_bytes:
            start = first * planes.high_bytes_per_group
            yield Piece(entry.name, planes.high_offset, planes.high_bytes, pool.high, start)
        yield Piece(entry.name, planes.scale_offset, planes.scale_bytes, scales, 2 * first)
        ends = (planes.base_offset + planes.base_bytes, planes.high_offset + planes.high_bytes)
        for end, following in zip(ends, (planes.high_offset, planes.scale_offset), strict=True):
            if following > end:
                yield Piece(entry.name, end, following - end, np.zeros(following - end, np.uint8), 0)

    def _nvfp4(self, entry: TensorEntry, rng: np.random.Generator) -> Iterator[Piece]:
        codes, scales, std = self._once(("nvfp4",), self._nvfp4_pool)
        planes = blockscale_planes(entry.shape)
        divisor = np.array([std / weight_std(entry.name, entry.shape[1])], "<f4")
        yield Piece(entry.name, 0, planes.code_bytes, codes, int(rng.integers(codes.size)))
        if planes.scale_offset > planes.code_bytes:
            gap = planes.scale_offset - planes.code_bytes
            yield Piece(entry.name, planes.code_bytes, gap, np.zeros(gap, np.uint8), 0)
        n_scales = planes.divisor_offset - planes.scale_offset
        yield Piece(entry.name, planes.scale_offset, n_scales, scales, int(rng.integers(scales.size)))
        yield Piece(entry.name, planes.divisor_offset, 4, divisor.view(np.uint8), 0)

    def _nvfp4_pool(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], float]:
        """Codes near a normal's, scales between 1/2 and 2, and the standard deviation of what they spell."""
        rng = np.random.default_rng([self._seed, 4, 16])
        magnitudes = np.abs(rng.standard_normal(2 * 8 * self._n_groups, np.float32)) * 2.5
        edges = (E2M1[1:8] + E2M1[:7]) / 2
        signs = rng.integers(0, 2, magnitudes.size, np.uint8) * np.uint8(8)
        nibbles = np.digitize(magnitudes, edges).astype(np.uint8) | signs
        scales = rng.integers(0x30, 0x41, 4 * self._n_groups, np.uint8)
        std = float(E2M1[nibbles].std() * np.sqrt(np.mean(E4M3FN[scales] ** 2)))
        codes = np.bitwise_or(nibbles[0::2], nibbles[1::2] << np.uint8(4), dtype=np.uint8)
        return codes, scales, std

    def _bf16_words(self, std: float) -> npt.NDArray[np.uint8]:
        """BF16 words of normal deviates, as bytes."""

        def made() -> npt.NDArray[np.uint8]:
            values = np.random.default_rng([self._seed, 16]).standard_normal(16 * self._n_groups, np.float32)
            payload = encode_tensor(values * np.float32(std), "BF16", "contiguous-le-v1")
            return np.frombuffer(payload, np.uint8)

        words: npt.NDArray[np.uint8] = self._once(("BF16", std), made)
        return words

    def _pool(self, format: str) -> Pool:
        pool: Pool = self._once((format,), lambda: grouped_pool(format, self._n_groups, self._seed))
        return pool

    def _scales(self, format: str, std: float) -> npt.NDArray[np.uint8]:
        """The scale plane of a pool, as bytes, for weights of this standard deviation."""
        pool = self._pool(format)
        made = self._once((format, std), lambda: (pool.scales * np.float32(std)).astype("<f2").view(np.uint8))
        scales: npt.NDArray[np.uint8] = made
        return scales

    def _padded(self, format: str, shape: tuple[int, ...], std: float) -> bytes:
        """A matrix whose rows end in padding, encoded as a whole; equal shapes share it."""

        def made() -> bytes:
            rng = np.random.default_rng([self._seed, *shape])
            return encode_tensor(rng.standard_normal(shape, np.float32) * np.float32(std), format, ROW_SPLIT)

        payload: bytes = self._once((format, shape, std), made)
        return payload

    def _once(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        """``make()`` of the first caller with this key; the others wait for it."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]
