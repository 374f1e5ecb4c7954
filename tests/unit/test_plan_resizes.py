"""One order of rows for any number of workers, through resizes and resumes, on skewed shards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.plan.lanes import EpochPlan
from farandole.plan.mixture import SamplePlan
from farandole.plan.slots import slots_of
from farandole.plan.state import PlanState
from farandole.plan.steps import Steps

NUM_SLOTS = 48
SKEWED = (1, 9000, 3, 1, 700, 2500, 12, 1, 4000, 1, 1, 60)


def skewed(**changes: object) -> EpochPlan:
    plan = EpochPlan(SKEWED, seed=5, epoch=2, batch_size=960, num_slots=NUM_SLOTS, window_rows=200)
    return replace(plan, **changes)


def step_rows(plan: Steps, step: int, world_size: int) -> list[int]:
    """Return the rows of a step, put together from what the workers take."""
    rows: list[int] = []
    for rank in range(world_size):
        for slot in slots_of(rank, world_size, plan.num_slots):
            rows += plan.slot_row_ids(step, slot).tolist()
    return rows


@pytest.fixture(scope="module")
def whole() -> list[list[int]]:
    plan = skewed()
    return [step_rows(plan, step, 1) for step in range(plan.num_steps)]


def test_every_row_once(whole):
    assert sorted(row for step in whole for row in step) == list(range(sum(SKEWED)))


@pytest.mark.parametrize("world_size", range(1, NUM_SLOTS + 1))
def test_the_same_order_for_every_number_of_workers(whole, world_size):
    plan = skewed()
    for step in (0, plan.num_steps // 2, plan.num_steps - 1):
        assert step_rows(plan, step, world_size) == whole[step]


def test_resizes_in_mid_epoch_do_not_show(whole):
    state = PlanState.after(skewed(), 0, "f" * 64)
    found = []
    for world_size, num_steps in ((4, 5), (3, 4), (8, 3), (1, None)):
        plan = skewed(start_row=PlanState.from_bytes(state.to_bytes()).rows)
        state.check(skewed(), "f" * 64)
        steps = plan.num_steps if num_steps is None else num_steps
        found += [step_rows(plan, step, world_size) for step in range(steps)]
        state = PlanState.after(plan, steps, "f" * 64)
    assert found == whole


@pytest.mark.parametrize("num_slots", [1, 4])
def test_an_epoch_stopped_at_row_120_is_resumed_twice(num_slots):
    plan = skewed(num_slots=num_slots, batch_size=40)
    rows = [row for step in range(12) for row in step_rows(plan, step, num_slots)]
    state = PlanState.after(plan, 3, "f" * 64)
    assert state.rows == 120
    for _ in range(2):
        resumed = replace(plan, start_row=state.rows)
        assert [r for step in range(9) for r in step_rows(resumed, step, 1)] == rows[120:]
    again = PlanState.after(resumed, 4, "f" * 64)
    assert again.rows == 280
    last = replace(resumed, start_row=again.rows)
    assert [r for step in range(5) for r in step_rows(last, step, 1)] == rows[280:]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, 50, 900]), min_size=1, max_size=8),
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.sampled_from(["short", "drop", "pad"]),
    st.booleans(),
    st.data(),
)
def test_any_stops_and_sizes_give_one_order(shards, world_sizes, tail, samples, data):
    plan: EpochPlan | SamplePlan = EpochPlan(
        (*shards, 60), 1, 3, batch_size=24, num_slots=12, tail=tail, window_rows=40
    )
    if samples:
        source = EpochPlan((*shards, 60), 0, 0, batch_size=1, num_slots=1, window_rows=40)
        size = data.draw(st.integers(24, source.num_rows))
        plan = SamplePlan(source, size, 1, 3, batch_size=24, num_slots=12, tail=tail)
    expected = [step_rows(plan, step, 1) for step in range(plan.num_steps)]
    found: list[list[int]] = []
    part = plan
    for world_size in (*world_sizes, 1):
        last = len(found) + part.num_steps == len(expected) and world_size == 1
        count = part.num_steps if last else data.draw(st.integers(0, part.num_steps))
        found += [step_rows(part, step, world_size) for step in range(count)]
        part = replace(part, start_row=part.rows_before(count))
    found += [step_rows(part, step, 1) for step in range(part.num_steps)]
    assert found == expected
    rows = np.concatenate([np.array(step) for step in found])
    assert len(np.unique(rows)) == len(rows) == plan.rows_before(plan.num_steps)
