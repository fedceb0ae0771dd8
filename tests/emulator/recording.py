"""Captured work of an emulated device: pieces, and which of them must have been done before which.

A capture begins on one stream; another joins it by waiting for an event that was recorded in it, and must be waited for
by the first one before the end, as on a card. ``order`` chooses among the orders that the edges allow, so that an edge
that was forgotten shows: "recorded" is that of the calls; "side_first" does work of the streams that joined as soon as
it may run, "side_last" as late as possible.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ninfer_runtime.backends.cuda.device import DeviceError

Work = Callable[[], None]
Order = Literal["recorded", "side_first", "side_last"]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Work behind the pieces ``after``; ``is_side``: it came from a stream that joined."""

    work: Work
    after: frozenset[int]
    is_side: bool


class Recording:
    """The pieces of one capture, while it runs and afterwards. Streams are only told apart."""

    def __init__(self, origin: Any) -> None:
        self._origin = origin
        self._pieces: list[_Piece] = []
        self._tails: dict[int, frozenset[int]] = {id(origin): frozenset()}
        self.joined: list[Any] = []
        self.is_open = True

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, stream: Any, work: Work) -> None:
        """Work on a stream that takes part."""
        self._pieces.append(_Piece(work, self._tails[id(stream)], stream is not self._origin))
        self._tails[id(stream)] = frozenset([len(self._pieces) - 1])

    def tail(self, stream: Any) -> frozenset[int]:
        """What an event that is recorded now on the stream stands behind."""
        return self._tails[id(stream)]

    def wait(self, stream: Any, after: frozenset[int]) -> None:
        """Later work of the stream runs behind ``after``; a stream that did not take part does from now on."""
        if id(stream) not in self._tails:
            self.joined.append(stream)
        self._tails[id(stream)] = self._tails.get(id(stream), frozenset()) | after

    def end(self) -> None:
        """DeviceError when the first stream did not wait for all of the others' work."""
        self.is_open = False
        reached, todo = set[int](), list(self._tails[id(self._origin)])
        while todo:
            if (index := todo.pop()) not in reached:
                reached.add(index)
                todo += self._pieces[index].after
        if lost := [i for i, piece in enumerate(self._pieces) if piece.is_side and i not in reached]:
            raise DeviceError(f"{len(lost)} pieces of captured work were not joined to the stream of the capture")

    def in_order(self, order: Order) -> list[Work]:
        """All work in one of the orders that the edges allow."""
        if order == "recorded":
            return [piece.work for piece in self._pieces]
        left, done, out = list(range(len(self._pieces))), set[int](), list[Work]()
        while left:
            ready = [i for i in left if self._pieces[i].after <= done]
            wanted = [i for i in ready if self._pieces[i].is_side == (order == "side_first")]
            index = (wanted or ready)[0]
            left.remove(index)
            done.add(index)
            out.append(self._pieces[index].work)
        return out
