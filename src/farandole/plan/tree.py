"""The one binary tree over slots in which every sum of a job is taken.

Floating-point addition is not associative, so a sum has the same bits for every number of
workers only if its order is fixed. The order here: node ``(level, index)`` covers slots
``[index * 2**level, (index + 1) * 2**level)`` and is the sum of its two children, left plus
right; a node whose right child lies beyond the last slot is its left child.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Node:
    """A subtree of slots."""

    level: int
    index: int

    def __str__(self) -> str:
        return f"{self.level}.{self.index}"


def _normal(node: Node, num_slots: int) -> Node:
    """Climb from a node without a right sibling to the highest node that equals it."""
    while True:
        num_nodes = -(-num_slots >> node.level)
        if num_nodes > 1 and node.index == num_nodes - 1 and node.index % 2 == 0:
            node = Node(node.level + 1, node.index // 2)
        else:
            return node


def root(num_slots: int) -> Node:
    """Return the node that covers all slots."""
    return Node((num_slots - 1).bit_length(), 0)


class Fold(Generic[T]):
    """Add slots' values in tree order as they come, as a binary counter does.

    Parameters
    ----------
    num_slots : int
        Slots of the job, V.
    add : callable
        ``add(left, right)`` returns the sum; it may reuse the memory of either.

    Notes
    -----
    Values must be put in ascending order of slots. At most ``log2(V) + 1`` are held at once.
    """

    def __init__(self, num_slots: int, add: Callable[[T, T], T]) -> None:
        self._num_slots = num_slots
        self._add = add
        self._held: list[tuple[Node, T]] = []

    def put(self, node: Node, value: T) -> Node:
        """Take in the value of a node, merge all pairs that are complete, return the result's."""
        node = _normal(node, self._num_slots)
        while self._held and node.index % 2 == 1:
            left, left_value = self._held[-1]
            if left != Node(node.level, node.index - 1):
                break
            self._held.pop()
            value = self._add(left_value, value)
            node = _normal(Node(node.level + 1, node.index // 2), self._num_slots)
        self._held.append((node, value))
        return node

    def take(self) -> list[tuple[Node, T]]:
        """Return the subtrees held, in order of slots, and forget them."""
        held, self._held = self._held, []
        return held


def subtrees(slots: Iterable[int], num_slots: int) -> tuple[Node, ...]:
    """Return the subtrees into which a run of slots folds."""
    fold: Fold[None] = Fold(num_slots, lambda left, right: None)
    for slot in slots:
        fold.put(Node(0, slot), None)
    return tuple(node for node, _ in fold.take())


def tree_sum(values: Sequence[tuple[Node, T]], num_slots: int, add: Callable[[T, T], T]) -> T:
    """Add values of subtrees that together cover all slots.

    Raises
    ------
    ValueError
        If the subtrees do not cover all slots exactly once.
    """
    fold: Fold[T] = Fold(num_slots, add)
    for node, value in sorted(values, key=lambda pair: pair[0].index << pair[0].level):
        fold.put(node, value)
    total = fold.take()
    if len(total) != 1 or total[0][0] != root(num_slots):
        raise ValueError(f"subtrees do not cover {num_slots} slots: {[str(n) for n, _ in total]}")
    return total[0][1]


def additions(nodes: Sequence[Node], num_slots: int) -> tuple[tuple[int, int], ...]:
    """Return the order of additions over subtrees, as pairs of positions in `nodes`.

    The pair ``(i, j)`` means: add the value at `j` to the value at `i`, into place `i`.
    The total ends at the position of the first subtree.
    """
    steps: list[tuple[int, int]] = []

    def add(left: int, right: int) -> int:
        steps.append((left, right))
        return left

    tree_sum(list(zip(nodes, range(len(nodes)), strict=True)), num_slots, add)
    return tuple(steps)


@dataclass(frozen=True)
class FoldStep:
    """What to do with one slot's value when slots come one by one.

    Attributes
    ----------
    num_merges : int
        How many held values to add to it, the newest first, each on the left.
    subtree : int or None
        Position of the subtree that is then complete; None if more slots will be added to it.
    """

    num_merges: int
    subtree: int | None


def fold_steps(slots: Sequence[int], num_slots: int) -> tuple[FoldStep, ...]:
    """Return the steps that fold a run of slots into its `subtrees`, one for each slot."""
    final = subtrees(slots, num_slots)
    merges = 0

    def count(left: None, right: None) -> None:
        nonlocal merges
        merges += 1

    fold: Fold[None] = Fold(num_slots, count)
    steps: list[FoldStep] = []
    for slot in slots:
        merges = 0
        node = fold.put(Node(0, slot), None)
        steps.append(FoldStep(merges, final.index(node) if node in final else None))
    return tuple(steps)
