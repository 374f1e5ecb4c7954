from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.errors import PlanStateError
from farandole.plan.interleave import Interleave
from farandole.plan.lanes import EpochPlan
from farandole.plan.mixture import MixPlan, SamplePlan
from farandole.plan.state import PlanState


def source_of(*shard_rows: int, window_rows: int = 7) -> EpochPlan:
    return EpochPlan(shard_rows, 0, 0, batch_size=1, num_slots=1, window_rows=window_rows)


def rows_of(plan: MixPlan, start_step: int = 0) -> list[list[list[tuple[int, int]]]]:
    """Return (source, row) of every step and slot from a step on, read pass by pass."""
    found = {
        (step, slot): [[] for _ in plan.sources]
        for step in range(start_step, plan.num_steps)
        for slot in range(plan.num_slots)
    }
    for source in range(len(plan.sources)):
        for first, part in plan.passes(source, start_step):
            assert first >= start_step
            for step in range(first, part.num_steps):
                for slot in range(plan.num_slots):
                    if part.slot_rows(step, slot):
                        ids = part.slot_row_ids(step, slot).tolist()
                        found[step, slot][source] += [(source, row) for row in ids]
    steps = []
    for step in range(start_step, plan.num_steps):
        slots = []
        for slot in range(plan.num_slots):
            queues = [iter(rows) for rows in found[step, slot]]
            slots.append([next(queues[i]) for i in plan.step_sources(step, slot)])
            assert all(next(queue, None) is None for queue in queues)
        steps.append(slots)
    return steps


@st.composite
def mixes(draw: st.DrawFn) -> MixPlan:
    num_slots = draw(st.integers(1, 6))
    shards = st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any)
    sources = draw(st.lists(shards, min_size=1, max_size=4))
    shares = tuple(draw(st.integers(1, 5)) for _ in sources)
    batch_size = num_slots * draw(st.integers(2, 12))
    stop = draw(st.sampled_from(["first_exhausted", "all_exhausted"]) | st.integers(1, 300))
    sizes = [sum(rows) for rows in sources]
    rows = Interleave(shares, num_slots).epoch_rows(sizes, stop)
    return MixPlan(
        tuple(source_of(*rows) for rows in sources),
        shares,
        epoch_rows=max(min(rows, 600 // num_slots * num_slots), batch_size),
        seed=draw(st.integers(0, 2**63 - 1)),
        epoch=draw(st.integers(0, 5)),
        batch_size=batch_size,
        num_slots=num_slots,
        shuffle=draw(st.booleans()),
        tail=draw(st.sampled_from(["short", "drop", "pad"])),
    )


@settings(max_examples=40, deadline=None)
@given(mixes())
def test_each_row_comes_equally_often_in_an_epoch(plan):
    steps = rows_of(plan)
    used = Counter(row for step in steps for slot in step for row in slot)
    assert used.total() == plan.rows_before(plan.num_steps)
    for source, shape in enumerate(plan.sources):
        counts = [used[source, row] for row in range(shape.num_rows)]
        if plan.tail == "drop":
            assert max(counts) <= -(-plan.source_rows(source) // shape.num_rows)
        else:
            assert sum(counts) == plan.source_rows(source)
            assert max(counts) - min(counts) <= 1


@settings(max_examples=40, deadline=None)
@given(mixes())
def test_slots_are_even(plan):
    for step, slots in enumerate(rows_of(plan)):
        assert {len(rows) for rows in slots} == {plan.step_rows(step) // plan.num_slots}
        assert [len(rows) for rows in slots] == [
            plan.slot_rows(step, slot) for slot in range(plan.num_slots)
        ]


@settings(max_examples=40, deadline=None)
@given(mixes(), st.data())
def test_the_rest_of_an_epoch_is_the_same_after_stops(plan, data):
    whole = rows_of(plan)
    stop = data.draw(st.integers(0, plan.num_steps))
    assert rows_of(plan, stop) == whole[stop:]
    resumed = replace(plan, start_row=plan.rows_before(stop))
    assert rows_of(resumed) == whole[stop:]
    again = data.draw(st.integers(0, resumed.num_steps))
    twice = replace(resumed, start_row=resumed.rows_before(again))
    assert rows_of(twice) == whole[stop + again :]


@settings(max_examples=30, deadline=None)
@given(mixes(), st.data())
def test_the_batch_size_may_change_in_mid_epoch(plan, data):
    plan = replace(plan, tail="short")
    whole = Counter(row for step in rows_of(plan) for slot in step for row in slot)
    used: Counter[tuple[int, int]] = Counter()
    while plan.start_row < plan.num_rows:
        done = data.draw(st.integers(1, plan.num_steps))
        used.update(row for step in rows_of(plan)[:done] for slot in step for row in slot)
        batch_size = plan.num_slots * data.draw(st.integers(2, 12))
        plan = replace(plan, start_row=plan.rows_after(done - 1), batch_size=batch_size)
    assert used == whole


def test_epochs_take_other_rows_until_all_are_used():
    """Of 100 rows 30 are used in an epoch: three epochs share one pass, then a new one begins."""
    plan = MixPlan(
        (source_of(100, window_rows=100), source_of(60)), (1, 2), 90, 3, 0, 30, 2, tail="drop"
    )
    assert [plan.source_rows(source) for source in (0, 1)] == [30, 60]
    seen = []
    for epoch in range(6):
        steps = rows_of(replace(plan, epoch=epoch))
        seen.append([row for step in steps for slot in step for src, row in slot if src == 0])
        other = [row for step in steps for slot in step for src, row in slot if src == 1]
        assert sorted(other) == list(range(60))
    for cycle in (seen[:3], seen[3:]):
        assert len({row for epoch in cycle for row in epoch}) == 90
    assert seen[0] != seen[3]


def test_a_source_that_is_too_small_begins_anew_with_another_shuffle():
    plan = MixPlan((source_of(20), source_of(100)), (1, 1), 200, 0, 0, 40, 2)
    parts = [part for _, part in plan.passes(0)]
    orders = [[row for s in range(p.num_steps) for row in p.slot_row_ids(s, 0)] for p in parts]
    assert len(parts) == 5
    assert len({tuple(order) for order in orders}) == 5


def test_every_batch_has_the_shares_asked_for():
    plan = MixPlan((source_of(900), source_of(300)), (3, 1), 1200, 0, 0, 40, 4)
    for slots in rows_of(plan):
        sources = [source for rows in slots for source, _ in rows]
        assert sources.count(0) in (29, 30, 31)


def test_what_cannot_be_mixed_is_refused():
    plan = MixPlan((source_of(90), source_of(30)), (3, 1), 120, 0, 0, 40, 4)
    for wrong in ({"batch_size": 42}, {"start_row": 2}, {"epoch_rows": 121}, {"batch_size": 4}):
        with pytest.raises(ValueError, match=r"num_slots|below"):
            replace(plan, **wrong, tail="pad")


def test_a_state_of_another_mix_is_refused():
    plan = MixPlan((source_of(90), source_of(30)), (3, 1), 120, 0, 0, 40, 4)
    state = PlanState.after(plan, 2, "f" * 64)
    assert state.rows == 80
    assert len(state.to_bytes()) < 200
    state.check(replace(plan, batch_size=20), "f" * 64)
    for changed in ({"shares": (1, 1)}, {"epoch_rows": 100}, {"num_slots": 2}):
        with pytest.raises(PlanStateError, match="order"):
            state.check(replace(plan, **changed), "f" * 64)


# --- samples ------------------------------------------------------------------------------


@st.composite
def samples(draw: st.DrawFn) -> SamplePlan:
    num_slots = draw(st.integers(1, 6))
    shards = draw(st.lists(st.integers(0, 60), min_size=1, max_size=5))
    shards.append(max(num_slots - sum(shards), draw(st.integers(0, 30))))
    return SamplePlan(
        source_of(*shards),
        draw(st.integers(num_slots, sum(shards))),
        seed=draw(st.integers(0, 2**63 - 1)),
        epoch=draw(st.integers(0, 9)),
        batch_size=draw(st.integers(2 * num_slots, 60)),
        num_slots=num_slots,
        tail=draw(st.sampled_from(["short", "pad"])),
    )


def sampled(plan: SamplePlan) -> list[list[list[int]]]:
    return [
        [plan.slot_row_ids(step, slot).tolist() for slot in range(plan.num_slots)]
        for step in range(plan.num_steps)
    ]


@settings(max_examples=50, deadline=None)
@given(samples())
def test_an_epoch_samples_without_replacement_and_a_cycle_has_every_row(plan):
    size, rows = plan.source.num_rows, plan.sample_rows
    num_pieces = -(-size // rows)
    cycle = plan.epoch // num_pieces * num_pieces
    seen: Counter[int] = Counter()
    for epoch in range(cycle, cycle + num_pieces):
        used = [
            row for step in sampled(replace(plan, epoch=epoch)) for slot in step for row in slot
        ]
        assert len(used) == len(set(used)) == rows
        seen.update(used)
    assert set(seen) == set(range(size))
    assert max(seen.values()) <= 2
    assert sum(count - 1 for count in seen.values()) == num_pieces * rows - size


@settings(max_examples=40, deadline=None)
@given(samples(), st.data())
def test_a_sample_goes_on_after_a_stop_with_even_slots(plan, data):
    whole = sampled(plan)
    for step, slots in enumerate(whole):
        sizes = [len(rows) for rows in slots]
        assert sizes == [plan.slot_rows(step, slot) for slot in range(plan.num_slots)]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1
    stop = data.draw(st.integers(0, plan.num_steps))
    resumed = replace(plan, start_row=plan.rows_before(stop))
    assert sampled(resumed) == whole[stop:]


def test_a_sample_must_fit():
    with pytest.raises(ValueError, match="sample_rows 11"):
        SamplePlan(source_of(10), 11, 0, 0, 4, 1)


def test_passes_of_several_seeds_differ():
    plans = [SamplePlan(source_of(100), 50, seed, 0, 10, 2) for seed in (0, 1)]
    assert not np.array_equal(*(plan.slot_row_ids(0, 0) for plan in plans))
