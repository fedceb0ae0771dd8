"""Texts by their token ids: a radix tree in which every comparison looks at every token.

One tree per key. An edge holds the token ids between two nodes; a node is there because a value is kept at exactly its
depth, or because two texts part there. There are no hashes of token ids, so two texts are never taken for each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from ninfer_runtime.backends.base import ContractError, Int32s

Value = TypeVar("Value")
_NO_TOKENS = np.zeros(0, np.int32)


class Node(Generic[Value]):
    """The text of ``depth`` tokens that the edges from the root spell; the same object as long as it has a value."""

    __slots__ = ("children", "depth", "edge", "parent", "value")

    def __init__(self, parent: "Node[Value] | None", edge: Int32s) -> None:
        self.parent = parent
        self.edge = edge
        self.depth: int = len(edge) + (parent.depth if parent is not None else 0)
        self.children: dict[int, Node[Value]] = {}
        self.value: Value | None = None

    def ancestors(self) -> "Iterator[Node[Value]]":
        """The nodes above, nearest first, the root last."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Match(Generic[Value]):
    """How far a text is known.

    values    of the nodes on its path, shortest text first
    n_tokens  tokens that agree with a text of the tree
    differs   the tree goes on behind them, and with another token
    """

    values: tuple[Value, ...]
    n_tokens: int
    differs: bool


class TokenTree(Generic[Value]):
    """Values at texts. ``n_tokens``: token ids on all edges, 4 bytes each."""

    def __init__(self) -> None:
        self._roots: dict[bytes, Node[Value]] = {}
        self.n_tokens = 0

    def match(self, key: bytes, token_ids: Int32s) -> Match[Value]:
        """Follow ``token_ids`` int32 [n] as far as the texts under ``key`` agree."""
        node, n_agreed = self._follow(key, token_ids)
        if node is None:
            return Match((), 0, False)
        values = [above.value for above in (node, *node.ancestors()) if above.value is not None]
        child = node.children.get(int(token_ids[n_agreed])) if n_agreed < len(token_ids) else None
        if child is None:
            differs = n_agreed < len(token_ids) and bool(node.children)
        else:
            n_more = _agreement(child.edge, token_ids[n_agreed:])
            n_agreed += n_more
            differs = n_agreed < len(token_ids)
        return Match(tuple(reversed(values)), n_agreed, differs)

    def place(self, key: bytes, token_ids: Int32s, value: Value) -> Node[Value]:
        """Put a value at the text ``token_ids``, at least one token; one that is there gives way."""
        node, depth = self._follow(key, token_ids)
        if node is None:
            node = self._roots[key] = Node(None, _NO_TOKENS)
        if depth < len(token_ids):
            node = self._grow(node, token_ids)
        node.value = value
        return node

    def remove(self, node: Node[Value]) -> None:
        """Take a value away, with all text that leads to no other."""
        node.value = None
        while (parent := node.parent) is not None and not node.children and node.value is None:
            del parent.children[int(node.edge[0])]
            self.n_tokens -= len(node.edge)
            node = parent
        if node.parent is None:
            if not node.children:
                self._roots = {key: root for key, root in self._roots.items() if root is not node}
        elif node.value is None and len(node.children) == 1:
            (child,) = node.children.values()
            child.edge = np.concatenate((node.edge, child.edge))
            child.parent = node.parent
            node.parent.children[int(child.edge[0])] = child

    def nodes(self) -> Iterator[Node[Value]]:
        """Every node, roots included."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def _follow(self, key: bytes, token_ids: Int32s) -> tuple[Node[Value] | None, int]:
        """The deepest node whose whole text begins ``token_ids``, and its depth."""
        node = self._roots.get(key)
        depth = 0
        while node is not None and depth < len(token_ids):
            child = node.children.get(int(token_ids[depth]))
            if child is None or _agreement(child.edge, token_ids[depth:]) < len(child.edge):
                break
            node, depth = child, child.depth
        return node, depth

    def _grow(self, node: Node[Value], token_ids: Int32s) -> Node[Value]:
        """A new node for ``token_ids`` below ``node``, which is the deepest one on their path."""
        rest = token_ids[node.depth :]
        child = node.children.get(int(rest[0]))
        if child is not None:
            node = self._split(child, _agreement(child.edge, rest))
            rest = token_ids[node.depth :]
            if not len(rest):
                return node
        leaf = Node(node, np.array(rest, np.int32))
        node.children[int(rest[0])] = leaf
        self.n_tokens += len(rest)
        return leaf

    def _split(self, child: Node[Value], n_tokens: int) -> Node[Value]:
        """A node in the edge above ``child``, behind the first ``n_tokens`` of it."""
        if child.parent is None or not 0 < n_tokens < len(child.edge):
            raise ContractError(f"an edge of {len(child.edge)} tokens cannot be split behind {n_tokens}")
        middle = Node(child.parent, child.edge[:n_tokens])
        child.parent.children[int(child.edge[0])] = middle
        child.edge = child.edge[n_tokens:]
        child.parent = middle
        middle.children[int(child.edge[0])] = child
        return middle


def _agreement(first: Int32s, second: Int32s) -> int:
    """Tokens in which two texts agree from their beginning on."""
    n_tokens = min(len(first), len(second))
    different = first[:n_tokens] != second[:n_tokens]
    at = int(different.argmax()) if n_tokens else 0
    return at if n_tokens and different[at] else n_tokens
