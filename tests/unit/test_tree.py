"""One order of additions, whoever holds which slots: sums are compared as expressions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.plan.slots import slots_of
from farandole.plan.tree import Fold, Node, additions, fold_steps, root, subtrees, tree_sum


def add(left: str, right: str) -> str:
    return f"({left}+{right})"


def by_levels(values: Sequence[str]) -> str:
    """Add by the definition: neighbours, level by level; one without a neighbour waits."""
    while len(values) > 1:
        pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
        values = [add(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return values[0]


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[range]]:
    """Return a number of slots, and runs that share them out."""
    num_slots = draw(st.integers(1, 70))
    cuts = draw(st.sets(st.integers(1, num_slots - 1), max_size=8)) if num_slots > 1 else set()
    bounds = [0, *sorted(cuts), num_slots]
    return num_slots, [range(a, b) for a, b in pairwise(bounds)]


def fold_run(run: range, num_slots: int) -> list[tuple[Node, str]]:
    fold: Fold[str] = Fold(num_slots, add)
    for slot in run:
        fold.put(Node(0, slot), str(slot))
    return fold.take()


@given(splits())
def test_any_split_gives_the_same_expression(split: tuple[int, list[range]]) -> None:
    num_slots, runs = split
    held = [pair for run in runs for pair in fold_run(run, num_slots)]
    expected = by_levels([str(slot) for slot in range(num_slots)])
    assert tree_sum(held, num_slots, add) == expected
    assert tree_sum(held[::-1], num_slots, add) == expected


@given(splits())
def test_subtrees_are_few_and_cover_their_run(split: tuple[int, list[range]]) -> None:
    num_slots, runs = split
    for run in runs:
        nodes = subtrees(run, num_slots)
        assert nodes == tuple(node for node, _ in fold_run(run, num_slots))
        covered = [
            slot
            for node in nodes
            for slot in range(node.index << node.level, (node.index + 1) << node.level)
            if slot < num_slots
        ]
        assert covered == list(run)
        assert len(nodes) <= 2 * max(1, num_slots.bit_length())


@given(splits())
def test_additions_in_place_give_the_same_expression(split: tuple[int, list[range]]) -> None:
    num_slots, runs = split
    held = [pair for run in runs for pair in fold_run(run, num_slots)]
    values = [value for _, value in held]
    for left, right in additions([node for node, _ in held], num_slots):
        values[left] = add(values[left], values[right])
        values[right] = "used"
    assert values[0] == by_levels([str(slot) for slot in range(num_slots)])
    assert set(values[1:]) <= {"used"}


@given(splits())
def test_fold_steps_do_what_a_fold_does(split: tuple[int, list[range]]) -> None:
    num_slots, runs = split
    for run in runs:
        stack: list[str] = []
        complete: dict[int, str] = {}
        for slot, step in zip(run, fold_steps(run, num_slots), strict=True):
            value = str(slot)
            for _ in range(step.num_merges):
                value = add(stack.pop(), value)
            if step.subtree is None:
                stack.append(value)
            else:
                complete[step.subtree] = value
        assert stack == []
        assert [complete[i] for i in range(len(complete))] == [
            value for _, value in fold_run(run, num_slots)
        ]


@given(st.integers(1, 300), st.data())
def test_one_worker_holds_one_subtree(num_slots: int, data: st.DataObject) -> None:
    assert subtrees(range(num_slots), num_slots) == (root(num_slots),)
    assert fold_steps(range(num_slots), num_slots)[-1].subtree == 0
    world_size = data.draw(st.integers(1, num_slots))
    nodes = [
        node
        for rank in range(world_size)
        for node in subtrees(slots_of(rank, world_size, num_slots), num_slots)
    ]
    assert tree_sum([(node, 1) for node in nodes], num_slots, lambda a, b: a + b) == len(nodes)


def test_the_order_is_part_of_every_jobs_bits() -> None:
    assert by_levels(list("abcdefg")) == "(((a+b)+(c+d))+((e+f)+g))"
    held = [pair for run in (range(3), range(3, 7)) for pair in fold_run(run, 7)]
    assert tree_sum(held, 7, add) == "(((0+1)+(2+3))+((4+5)+6))"
    assert [str(node) for node, _ in held] == ["1.0", "0.2", "0.3", "2.1"]


@pytest.mark.parametrize(
    "slots", [[0, 1, 2], [1, 2, 3], [0, 1, 3], []], ids=["end", "start", "middle", "all"]
)
def test_a_sum_without_all_slots_is_refused(slots: list[int]) -> None:
    with pytest.raises(ValueError, match=r"do not cover 4 slots|max\(\)|\[\]"):
        tree_sum([(Node(0, slot), slot) for slot in slots], 4, lambda a, b: a + b)


def test_a_fold_forgets_what_was_taken() -> None:
    fold: Fold[int] = Fold(2, lambda a, b: a + b)
    for _ in range(2):
        fold.put(Node(0, 0), 1)
        fold.put(Node(0, 1), 2)
        assert fold.take() == [(Node(1, 0), 3)]
    assert fold.take() == []
