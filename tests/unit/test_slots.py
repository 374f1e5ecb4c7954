from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.plan.slots import owner_of, slots_of


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int]:
    num_slots = draw(st.integers(1, 200))
    return draw(st.integers(1, num_slots)), num_slots


@given(worlds())
def test_every_slot_has_one_owner_and_shares_are_even(world: tuple[int, int]) -> None:
    world_size, num_slots = world
    runs = [slots_of(rank, world_size, num_slots) for rank in range(world_size)]
    assert [slot for run in runs for slot in run] == list(range(num_slots))
    sizes = [len(run) for run in runs]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    for rank, run in enumerate(runs):
        assert {owner_of(slot, world_size, num_slots) for slot in run} == {rank}


def test_more_ranks_than_slots_leave_some_without() -> None:
    assert [len(slots_of(rank, 5, 3)) for rank in range(5)] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_outside_of_the_world(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not in a world of 3"):
        slots_of(rank, 3, 8)
