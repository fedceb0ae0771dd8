"""Which feed-forward networks stay on the device and which are streamed from host memory, and what a round then takes.

Pure arithmetic over bytes and seconds. A streamed layer has a slot on the device; the copy of each half of its network
(gate and up; down) waits until the half that lay there has been multiplied, and is waited for by its own product. So
the link works while layers in between compute: the networks that are streamed are spread evenly over the depth.

The CPU may compute some of them in rounds, while the link brings the others: then those are not copied.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ninfer_runtime.config import Residency

MAX_SLOTS = 3
_PHASES = (0.0, 0.25, 0.5, 0.75, 0.999)
_MIDDLE = 0.5
_PASSES = 3  # until a simulated round repeats the one before

Fits = Callable[[tuple[int, ...], int], bool]
"""Whether memory holds everything with these layers streamed through so many slots."""

ACCEPTANCE = 0.52
"""Share of three drafts that is accepted, as published for such cards; predictions are made for it."""
LAUNCH_SECONDS = 5e-6
"""What a matrix launch takes beside its bytes, and ``READ_SHARE`` of the read bandwidth while it streams: as fitted on
an H200 (``bench/predict.py``)."""
READ_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """Of one layer's network on the CPU, in a round of one column and in one of eight; what lies between is a line."""

    of_one: float
    of_eight: float

    def at(self, n_columns: int) -> float:
        """In a round of ``n_columns``."""
        return self.of_one + (n_columns - 1) * (self.of_eight - self.of_one) / 7


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of the card's memory, read, and of its link to pinned host memory; what the CPU takes, where
    that was measured."""

    read: float
    link: float
    cpu: CpuSeconds | None = None

    def limited(self, residency: Residency) -> "Rates":
        """With the link that the options allow."""
        return self if residency.link_limit is None else replace(self, link=min(self.link, residency.link_limit))


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes that a decoder layer reads in a round: the mixer with its state; both halves of its network."""

    mixer: int
    gate_up: int
    down: int

    @property
    def ffn(self) -> int:
        """Of the network."""
        return self.gate_up + self.down


@dataclass(frozen=True, slots=True)
class RoundBytes:
    """What a round of ``n_columns`` reads: layers, and everything behind them with the number of its launches."""

    layers: tuple[LayerBytes, ...]
    tail: int
    tail_launches: int = 2
    n_columns: int = 1

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(layer.mixer + layer.ffn for layer in self.layers) + self.tail


@dataclass(frozen=True, slots=True)
class RoundTime:
    """Seconds of a predicted round: all of it, its copies alone, its products alone, those of the CPU among them."""

    seconds: float
    copy: float
    compute: float
    cpu: float = 0.0


def spread(n_layers: int, n_streamed: int, phase: float) -> tuple[int, ...]:
    """``n_streamed`` of the layers, evenly; ``phase`` 0: the first one is layer 0; near 1: the last one is the last."""
    return tuple(int((k + phase) * n_layers / n_streamed) for k in range(n_streamed))


def following_users(n_streamed: int, n_slots: int, skipped: Collection[int] = ()) -> tuple[int, ...]:
    """For each streamed layer, by its number among them, the one whose network follows in its slot.

    Slots go round; behind the last one of a slot comes its first, for the next pass. So a pass ends with slot i holding
    streamed layer i, whatever ran. ``skipped``, never among the first of their slots, are passed over.
    """
    following = []
    for k in range(n_streamed):
        behind = (j for j in range(k + n_slots, n_streamed, n_slots) if j not in skipped)
        following.append(next(behind, k % n_slots))
    return tuple(following)


def moving_layers(n_streamed: int, n_slots: int, skipped: Collection[int] = ()) -> tuple[int, ...]:
    """Numbers of the streamed layers that a pass copies: not ``skipped``, and not alone in their slot."""
    following = following_users(n_streamed, n_slots, skipped)
    return tuple(k for k in range(n_streamed) if following[k] != k and k not in skipped)


def round_time(
    cost: RoundBytes, streamed: Sequence[int], n_slots: int, rates: Rates, on_cpu: Collection[int] = ()
) -> RoundTime:
    """What a round takes, one behind the other, when the next begins where both the copies and the products of this
    one have ended. The CPU computes the networks of the streamed layers ``on_cpu``."""

    def products(n_bytes: int, launches: int) -> float:
        return launches * LAUNCH_SECONDS + n_bytes / (READ_SHARE * rates.read)

    tail = products(cost.tail, cost.tail_launches)
    skipped = {k for k, layer in enumerate(streamed) if layer in on_cpu}
    following = following_users(len(streamed), n_slots, skipped)
    moving = {streamed[k]: k for k in moving_layers(len(streamed), n_slots, skipped)}
    assert rates.cpu is not None or not skipped
    by_cpu = rates.cpu.at(cost.n_columns) if rates.cpu is not None else 0.0
    copied: dict[tuple[int, int], float] = {}
    compute = copy = start = now = link = 0.0
    for _ in range(_PASSES):
        start, compute, copy = now, 0.0, 0.0
        for index, layer in enumerate(cost.layers):
            mixer = products(layer.mixer, 3)
            now, compute = now + mixer, compute + mixer
            if index in on_cpu:
                now, compute = now + by_cpu, compute + by_cpu
                continue
            for half, n_bytes in enumerate((layer.gate_up, layer.down)):
                k = moving.get(index)
                seconds = products(n_bytes if k is None else 2 * n_bytes, 1)  # what is copied is written, too
                if k is not None:
                    now = max(now, copied.get((k, half), 0.0))
                now, compute = now + seconds, compute + seconds
                if k is not None:
                    behind = cost.layers[streamed[following[k]]]
                    moved = (behind.gate_up, behind.down)[half] / rates.link
                    link, copy = max(link, now) + moved, copy + moved
                    copied[following[k], half] = link
        now, compute = max(now + tail, link), compute + tail
    return RoundTime(now - start, copy, compute, len(skipped) * by_cpu)


@dataclass(frozen=True, slots=True)
class Choice:
    """Streamed layers and slots, those that the CPU computes, and what a round takes with them."""

    streamed: tuple[int, ...]
    n_slots: int
    time: RoundTime
    on_cpu: tuple[int, ...] = ()


def choose(cost: RoundBytes, rates: Rates, residency: Residency, fits: Fits) -> Choice:
    """The fastest arrangement that fits; with a given number of resident layers the fastest of that number.

    Where nothing fits: everything streamed through one slot, or the given number. A given number of layers is the CPU's
    as far as slots leave so many.
    """
    n_layers = len(cost.layers)
    if residency.n_ffn_layers is None:
        fewest = [_fewest(n_layers, n_slots, fits) for n_slots in range(1, MAX_SLOTS + 1)]
        counts = [(n, n_slots) for n_slots, n in enumerate(fewest, 1) if n is not None] or [(n_layers, 1)]
    else:
        n = n_layers - residency.n_ffn_layers
        fitting = [(n, k) for k in range(1, MAX_SLOTS + 1) if k <= max(1, n - 1) and fits(spread(n_layers, n, 0.0), k)]
        counts = fitting or [(n, min(1, n))]
    choices: list[Choice] = []
    for (n_streamed, n_slots), phase in product(counts, _PHASES):
        if n_streamed == 0:
            return Choice((), 0, round_time(cost, (), 0, rates))
        streamed = spread(n_layers, n_streamed, phase)
        for on_cpu in _shares_of_cpu(streamed[n_slots:], rates, residency.n_cpu_layers):
            choices.append(Choice(streamed, n_slots, round_time(cost, streamed, n_slots, rates, on_cpu), on_cpu))
    wanted = residency.n_cpu_layers or 0
    return min(choices, key=lambda choice: (max(0, wanted - len(choice.on_cpu)), choice.time.seconds))


def _shares_of_cpu(candidates: Sequence[int], rates: Rates, n: int | None) -> Iterator[tuple[int, ...]]:
    """``n`` of the candidates, or none, one, two, …, spread evenly; none where the CPU's time is not known.

    The first layer of every slot is no candidate: rounds find it there.
    """
    most = 0 if rates.cpu is None else len(candidates)
    for count in range(most + 1) if n is None else (min(n, most),):
        yield tuple(candidates[i] for i in spread(len(candidates), count, _MIDDLE)) if count else ()


def _fewest(n_layers: int, n_slots: int, fits: Fits) -> int | None:
    """The least number of streamed layers that fits with so many slots; a layer per slot at least."""
    if fits((), 0):
        return 0
    return next((n for n in range(n_slots, n_layers + 1) if fits(spread(n_layers, n, 0.0), n_slots)), None)
