from __future__ import annotations

from dataclasses import replace

import pytest

from farandole.errors import PlanStateError
from farandole.plan.lanes import EpochPlan
from farandole.plan.state import PlanState

FINGERPRINT = "0123456789abcdef" * 4
PLAN = EpochPlan((60, 40), seed=7, epoch=2, batch_size=8, num_slots=2)


def test_a_state_comes_back_from_bytes_and_dicts():
    state = PlanState.after(PLAN, 3, FINGERPRINT)
    assert state.rows == 24
    assert PlanState.from_bytes(state.to_bytes()) == state
    assert PlanState.from_dict(state.to_dict()) == state
    state.check(PLAN, FINGERPRINT)


def test_the_largest_state_is_below_200_bytes():
    plan = EpochPlan((2**62,), seed=2**64 - 1, epoch=10**6, batch_size=2**40, num_slots=4096)
    state = PlanState.after(plan, plan.num_steps, FINGERPRINT)
    assert len(state.to_bytes()) < 200


def test_another_batch_size_may_go_on():
    state = PlanState.after(PLAN, 3, FINGERPRINT)
    other = replace(PLAN, batch_size=30)
    state.check(other, FINGERPRINT)
    assert replace(other, start_row=state.rows).rows_after(0) == 54


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 8}, "seed: 7 in the state, 8 here"),
        ({"epoch": 3}, "epoch"),
        ({"num_slots": 4}, "order (slots, shuffle, windows)"),
        ({"shuffle": False}, "order"),
        ({"window_rows": 5}, "order"),
    ],
)
def test_what_would_break_the_order_is_named(changes, named):
    state = PlanState.after(PLAN, 3, FINGERPRINT)
    with pytest.raises(PlanStateError) as caught:
        state.check(replace(PLAN, **changes), FINGERPRINT)
    assert len(caught.value.differences) == 1
    assert named in str(caught.value)


def test_all_differences_are_named():
    state = PlanState.after(PLAN, 3, FINGERPRINT)
    with pytest.raises(PlanStateError) as caught:
        state.check(replace(PLAN, seed=1, shuffle=False), "other" * 20)
    assert [d.split(":")[0].split()[0] for d in caught.value.differences] == [
        "data",
        "order",
        "seed",
    ]


def test_more_rows_than_there_are_is_refused():
    state = replace(PlanState.after(PLAN, 3, FINGERPRINT), rows=101)
    with pytest.raises(PlanStateError, match="101 in the state, 100 in the epoch"):
        state.check(PLAN, FINGERPRINT)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"3", b"\xff", b'{"rows":1}'])
def test_what_is_no_state_is_refused(data):
    with pytest.raises(PlanStateError, match="fields"):
        PlanState.from_bytes(data)


def test_a_field_of_another_type_is_refused():
    values = {**PlanState.after(PLAN, 3, FINGERPRINT).to_dict(), "rows": "24"}
    with pytest.raises(PlanStateError, match="rows: '24'"):
        PlanState.from_dict(values)
