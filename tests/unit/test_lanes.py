from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.plan.lanes import EpochPlan, Piece, evaluation_units, units_of


@st.composite
def plans(draw: st.DrawFn) -> EpochPlan:
    num_slots = draw(st.integers(1, 9))
    shards = draw(st.lists(st.integers(0, 150), min_size=1, max_size=7))
    shards.append(max(num_slots - sum(shards), draw(st.integers(0, 40))))
    return EpochPlan(
        shard_rows=tuple(shards),
        seed=draw(st.integers(0, 2**63 - 1)),
        epoch=draw(st.integers(0, 5)),
        batch_size=draw(st.integers(num_slots, 150)),
        num_slots=num_slots,
        shuffle=draw(st.booleans()),
        window_rows=draw(st.integers(3, 60)),
        max_sections=draw(st.none() | st.integers(1, 60)),
    )


def steps_of(plan: EpochPlan) -> list[list[np.ndarray]]:
    return [
        [plan.slot_row_ids(step, slot) for slot in range(plan.num_slots)]
        for step in range(plan.num_steps)
    ]


def changed(plan: EpochPlan, **changes: object) -> EpochPlan:
    fields = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    return EpochPlan(**{**fields, **changes})


@settings(max_examples=30, deadline=None)
@given(plans())
def test_every_row_is_given_exactly_once(plan: EpochPlan) -> None:
    rows = np.concatenate([ids for step in steps_of(plan) for ids in step])
    assert np.array_equal(np.sort(rows), np.arange(plan.num_rows))


@settings(max_examples=30, deadline=None)
@given(plans())
def test_steps_are_full_and_slots_even(plan: EpochPlan) -> None:
    smallest_tail = min(2 * plan.num_slots, plan.batch_size)
    for step, slots in enumerate(steps_of(plan)):
        sizes = [len(ids) for ids in slots]
        assert sizes == [plan.slot_rows(step, slot) for slot in range(plan.num_slots)]
        assert sum(sizes) == plan.step_rows(step)
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1
        if step < plan.num_steps - 1:
            assert sum(sizes) == plan.batch_size
        elif plan.num_rows >= plan.batch_size:
            assert smallest_tail <= sum(sizes) < plan.batch_size + smallest_tail


@settings(max_examples=30, deadline=None)
@given(plans(), st.data())
def test_the_rest_of_an_epoch_is_the_same_after_a_stop(
    plan: EpochPlan, data: st.DataObject
) -> None:
    whole = steps_of(plan)
    stop = data.draw(st.integers(0, plan.num_steps))
    rest = steps_of(changed(plan, start_row=plan.rows_before(stop)))
    assert len(rest) == len(whole) - stop
    for one, other in zip(whole[stop:], rest, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@settings(max_examples=30, deadline=None)
@given(plans(), st.data())
def test_batch_size_may_change_in_mid_epoch(plan: EpochPlan, data: st.DataObject) -> None:
    rows: list[np.ndarray] = []
    while plan.start_row < plan.num_rows:
        done = data.draw(st.integers(1, plan.num_steps))
        rows += [ids for step in steps_of(plan)[:done] for ids in step]
        plan = changed(
            plan,
            start_row=plan.rows_after(done - 1),
            batch_size=data.draw(st.integers(plan.num_slots, 150)),
        )
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(plan.num_rows))


@settings(max_examples=40, deadline=None)
@given(plans())
def test_lanes_and_windows_cover_the_stream(plan: EpochPlan) -> None:
    assert sum(plan.lane_rows(lane) for lane in range(plan.num_lanes)) == plan.num_rows
    for lane in range(plan.num_lanes):
        place, windows = 0, 0
        assert plan.lane_rows(lane) >= 1
        while place < plan.lane_rows(lane):
            window, start, stop = plan.window_at(lane, place)
            assert (window, start) == (windows, place)
            assert plan.window_at(lane, stop - 1) == (window, start, stop)
            assert 1 <= stop - start <= plan.window_rows
            pieces = plan.window_pieces(lane, window)
            assert sum(end - begin for _, begin, end in pieces) == stop - start
            assert all(0 <= b < e <= plan.shard_rows[shard] for shard, b, e in pieces)
            place, windows = stop, windows + 1


def test_order_depends_on_seed_and_epoch_and_nothing_else() -> None:
    plan = EpochPlan((500, 20, 300), seed=3, epoch=1, batch_size=100, num_slots=4, window_rows=50)
    first = plan.slot_row_ids(0, 0)
    assert np.array_equal(first, changed(plan).slot_row_ids(0, 0))
    assert not np.array_equal(first, changed(plan, seed=4).slot_row_ids(0, 0))
    assert not np.array_equal(first, changed(plan, epoch=2).slot_row_ids(0, 0))


def test_order_is_the_same_in_every_version() -> None:
    plan = EpochPlan((60, 40), seed=7, epoch=2, batch_size=8, num_slots=2, window_rows=4)
    assert plan.slot_row_ids(0, 0).tolist() == [78, 75, 69, 64]
    assert plan.slot_row_ids(3, 1).tolist() == [25, 20, 17, 13]


@pytest.mark.parametrize("num_slots", [1, 3])
def test_without_shuffle_each_slot_keeps_the_order(num_slots: int) -> None:
    plan = EpochPlan(
        (60, 0, 40), seed=0, epoch=0, batch_size=10, num_slots=num_slots, shuffle=False
    )
    assert plan.num_lanes == num_slots
    seen = [
        np.concatenate([plan.slot_row_ids(step, slot) for step in range(plan.num_steps)])
        for slot in range(num_slots)
    ]
    assert all((np.diff(ids) > 0).all() for ids in seen)
    assert num_slots > 1 or seen[0].tolist() == list(range(100))


@settings(max_examples=40, deadline=None)
@given(plans())
def test_a_section_is_read_from_its_start_to_its_end(plan: EpochPlan) -> None:
    assert plan.num_lanes % plan.num_sections == 0
    assert plan.max_sections is None or plan.num_sections <= plan.max_sections
    for section in range(plan.num_sections):
        lanes = range(section * plan.lanes_per_section, (section + 1) * plan.lanes_per_section)
        pieces = plan.section_pieces(section)
        assert sum(stop - first for _, first, stop in pieces) == sum(map(plan.lane_rows, lanes))
        loads: list[tuple[int, int, int, int]] = []
        for step in range(plan.num_steps):
            starts, stops = plan.lane_spans(step, lanes)
            loads_of_step = []
            for lane, start, stop in zip(lanes, starts.tolist(), stops.tolist(), strict=True):
                place = start
                while place < stop:
                    window, begin, end = plan.window_at(lane, place)
                    if begin == place:
                        loads_of_step.append((plan.window_place(lane, window), step, lane, window))
                    place = end
            loads += sorted(loads_of_step)
        assert loads == sorted(loads)
        dealt = [piece for load in loads for piece in plan.window_pieces(*load[2:])]
        assert _rows(dealt) == _rows(pieces)


def _rows(pieces: list[Piece]) -> list[tuple[int, int]]:
    return [(shard, row) for shard, first, stop in pieces for row in range(first, stop)]


@pytest.mark.parametrize(
    ("shards", "num_slots", "max_sections", "expected"),
    [
        ((2_000_000,), 8, None, 1),
        ((1_000_000,) * 4, 8, None, 1),
        ((100_000,) * 42, 8, None, 8),
        ((100_000,) * 42, 1, None, 8),  # divisors of 48
        ((65_536,) * 64, 8, None, 16),
        ((65_536,) * 64, 8, 12, 8),
        ((65_536,) * 64, 8, 3, 2),
        ((65_536,) * 64, 5, 12, 10),
        ((10_000,) * 1000, 8, None, 48),
        ((1_000_000,) + (1,) * 1000, 8, None, 1),
    ],
)
def test_there_are_so_many_sections_as_row_groups_allow(
    shards: tuple[int, ...], num_slots: int, max_sections: int | None, expected: int
) -> None:
    plan = EpochPlan(
        shards,
        seed=0,
        epoch=0,
        batch_size=1024,
        num_slots=num_slots,
        max_sections=max_sections,
    )
    assert plan.num_sections == expected


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "expected"),
    [
        (100, 25, [25, 25, 25, 25]),
        (103, 25, [25, 25, 25, 28]),  # 3 < 2 V joins
        (108, 25, [25, 25, 25, 25, 8]),
        (107, 25, [25, 25, 25, 32]),
        (9, 25, [9]),
        (4, 25, [4]),
        (11, 5, [5, 6]),  # a tail is never smaller than min(2 V, B) = B
        (8, 4, [4, 4]),
    ],
)
def test_tail(num_rows: int, batch_size: int, expected: list[int]) -> None:
    plan = EpochPlan((num_rows,), seed=0, epoch=0, batch_size=batch_size, num_slots=4)
    assert [plan.step_rows(step) for step in range(plan.num_steps)] == expected


def test_tail_can_be_dropped() -> None:
    plan = EpochPlan((107,), seed=0, epoch=0, batch_size=25, num_slots=4, tail="drop")
    assert [plan.step_rows(step) for step in range(plan.num_steps)] == [25] * 4
    assert changed(plan, start_row=100).num_steps == 0


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "expected"),
    [
        (100, 25, [25, 25, 25, 25]),
        (105, 25, [25, 25, 25, 25, 5]),
        (103, 25, [25, 25, 25, 24, 4]),  # every slot has a row that counts
        (101, 25, [25, 25, 25, 22, 4]),
        (17, 8, [8, 5, 4]),
        (9, 8, [5, 4]),
        (5, 25, [5]),
    ],
)
def test_tail_can_be_padded(num_rows: int, batch_size: int, expected: list[int]) -> None:
    plan = EpochPlan((num_rows,), seed=0, epoch=0, batch_size=batch_size, num_slots=4, tail="pad")
    assert [plan.step_rows(step) for step in range(plan.num_steps)] == expected
    rows = np.concatenate([ids for step in steps_of(plan) for ids in step])
    assert np.array_equal(np.sort(rows), np.arange(num_rows))
    for step in range(plan.num_steps):
        sizes = [plan.padded_slot_rows(step, slot) for slot in range(4)]
        assert sum(sizes) == batch_size
        assert max(sizes) - min(sizes) <= 1
        assert all(1 <= plan.slot_rows(step, slot) <= size for slot, size in enumerate(sizes))


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 6))
def test_a_padded_epoch_may_stop_and_change_its_batch_size(
    data: st.DataObject, num_slots: int
) -> None:
    num_rows = data.draw(st.integers(num_slots, 200))
    sizes = st.integers(2 * num_slots, 50)
    plan = EpochPlan((num_rows,), 0, 0, data.draw(sizes), num_slots, tail="pad")
    rows: list[np.ndarray] = []
    while plan.start_row < num_rows:
        done = data.draw(st.integers(1, plan.num_steps))
        rows += [ids for step in steps_of(plan)[:done] for ids in step]
        assert all(plan.slot_rows(done - 1, slot) for slot in range(num_slots))
        plan = changed(plan, start_row=plan.rows_after(done - 1), batch_size=data.draw(sizes))
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(num_rows))


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 3},
        {"shard_rows": (3,)},
        {"shard_rows": ()},
        {"shard_rows": (50, -1)},
        {"start_row": -1},
        {"start_row": 51},
        {"start_row": 47},
        {"num_slots": 0},
        {"window_rows": 0},
        {"max_sections": 0},
        {"tail": "fill"},
        {"tail": "pad", "batch_size": 7},
        {"tail": "pad", "start_row": 48},
        {"tail": "drop", "batch_size": 51},
    ],
)
def test_what_cannot_be_planned_is_refused(wrong: dict[str, object]) -> None:
    plan = EpochPlan((50,), seed=0, epoch=0, batch_size=10, num_slots=4)
    with pytest.raises(ValueError, match=r"\w"):
        changed(plan, **wrong)


def test_a_slot_asked_for_a_step_beyond_the_end_is_an_error() -> None:
    plan = EpochPlan((50,), seed=0, epoch=0, batch_size=10, num_slots=4)
    with pytest.raises(ValueError, match="step 6"):
        plan.slot_rows(5, 0)


def test_a_large_epoch_costs_nothing_until_read() -> None:
    plan = EpochPlan((10**6,) * 10_000, seed=0, epoch=0, batch_size=4096, num_slots=8)
    last = plan.num_steps - 1
    ids = plan.slot_row_ids(last, 7)
    assert len(ids) == plan.slot_rows(last, 7)
    assert sum(ids.nbytes for _, _, ids in plan._last_windows.values()) < 10_000_000


def test_batches_of_sorted_data_are_nearly_as_mixed_as_by_a_full_shuffle() -> None:
    plan = EpochPlan((1000,) * 100, seed=0, epoch=0, batch_size=960, num_slots=8, window_rows=500)
    means = [np.mean(np.concatenate(step)) / plan.num_rows for step in steps_of(plan)[:-1]]
    full_shuffle = 1 / math.sqrt(12 * 960)
    assert plan.num_sections == 24
    assert np.std(means) < 2 * math.sqrt(960 / plan.num_sections) * full_shuffle


def test_refills_are_spread_over_the_lanes_of_a_slot() -> None:
    plan = EpochPlan((100_000,) * 48, seed=0, epoch=0, batch_size=480, num_slots=8)
    for slot in range(8):
        firsts = sorted(plan.window_at(lane, 0)[2] for lane in plan.lanes_of(range(slot, slot + 1)))
        gaps = np.diff(firsts)
        assert len(firsts) == 6
        assert gaps.min() > 8192 // 6 - 2


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 500), st.integers(1, 60), st.integers(1, 9))
def test_evaluation_counts_every_row_once(num_rows: int, unit_rows: int, world_size: int) -> None:
    units = evaluation_units(num_rows, unit_rows)
    runs = [units_of(rank, world_size, len(units)) for rank in range(world_size)]
    taken = [row for run in runs for unit in run for row in units[unit]]
    assert taken == list(range(num_rows))
    assert all(len(unit) == unit_rows for unit in units[:-1])


def test_evaluation_units_must_have_rows() -> None:
    with pytest.raises(ValueError, match="unit_rows"):
        evaluation_units(10, 0)
