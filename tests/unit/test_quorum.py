"""Who is a member, in which order, and why not."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.plan.quorum import Generation, Member, Waiting, first_generation, refusal


def member(worker_id: int) -> Member:
    return Member(worker_id, f"host-{worker_id % 2}", 100 + worker_id, f"at-{worker_id}")


def test_too_few_wait_and_the_reason_counts_them():
    state = first_generation([member(3), member(1)], 4)
    assert state == Waiting(joined=2, expected=4)
    assert isinstance(state, Waiting)
    assert state.reason == "2 of 4 workers have joined"


@given(st.sets(st.integers(0, 10_000), min_size=1, max_size=40), st.randoms())
def test_ranks_follow_worker_ids_in_whatever_order_they_join(ids, random):
    joined = [member(worker_id) for worker_id in ids]
    random.shuffle(joined)
    state = first_generation(joined, len(ids))
    assert isinstance(state, Generation)
    assert state.number == 1
    assert [m.worker_id for m in state.members] == sorted(ids)


@pytest.mark.parametrize(
    ("candidate", "expected", "reason"),
    [
        (member(2), 3, None),
        (member(1), 3, "worker id 1 is taken by pid 101 on host host-1"),
        (replace(member(1), pid=999), 3, "worker id 1 is taken by pid 101 on host host-1"),
        (member(2), 2, "all 2 expected workers have joined already"),
    ],
)
def test_a_refusal_says_why(candidate, expected, reason):
    assert refusal(candidate, [member(0), member(1)], expected) == reason
