"""The states of a step: what may follow what. The messages are tested with whole jobs."""

from __future__ import annotations

import pytest

from farandole.errors import UsageError
from farandole.job.stepstate import State, StepState

CALLS = ("backward", "optimizer_step", "zero_grad", "scheduler_step", "take_back")
REFUSED = "refused"

# What each call answers in each state.
ANSWERS = {
    State.OUTSIDE: (REFUSED, REFUSED, True, True, None),
    State.HANDED_OUT: (True, REFUSED, False, REFUSED, REFUSED),
    State.ACCUMULATED: (REFUSED, False, False, False, None),
    State.REDUCED: (REFUSED, True, REFUSED, REFUSED, REFUSED),
    State.COMMITTED: (REFUSED, REFUSED, True, True, None),
}


def in_state(state: State) -> StepState:
    """Bring a new one into a state by the ordinary way."""
    steps = StepState()
    if state is State.OUTSIDE:
        return steps
    steps.hand_out(last=state is not State.ACCUMULATED)
    if state is State.HANDED_OUT:
        return steps
    steps.backward()
    steps.after_backward()
    if state is State.COMMITTED:
        assert steps.optimizer_step()
        steps.after_optimizer_step()
    return steps


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("state", list(State))
def test_every_call_in_every_state(state: State, call: str) -> None:
    steps = in_state(state)
    assert steps.state is state
    expected = ANSWERS[state][CALLS.index(call)]
    if expected is REFUSED:
        with pytest.raises(UsageError):
            getattr(steps, call)()
    else:
        assert getattr(steps, call)() is expected


@pytest.mark.parametrize("state", list(State))
def test_what_is_asked_between_steps(state: State) -> None:
    steps = in_state(state)
    assert steps.inside is (state is not State.OUTSIDE)
    assert steps.step_reduced is (state in (State.REDUCED, State.COMMITTED))
    if state in (State.OUTSIDE, State.COMMITTED):
        steps.check_outside("job.evaluate")
    else:
        with pytest.raises(UsageError, match=r"job\.evaluate was called in the middle of a step"):
            steps.check_outside("job.evaluate")


def test_backward_tells_the_last_batch_of_a_step() -> None:
    steps = StepState()
    for last in (False, False, True):
        steps.hand_out(last=last)
        assert steps.backward() is last
        steps.after_backward()
        assert steps.optimizer_step() is last


def test_a_failed_backward_can_not_be_followed_by_a_step() -> None:
    steps = in_state(State.HANDED_OUT)
    steps.backward()
    with pytest.raises(UsageError, match=r"before job\.backward"):
        steps.optimizer_step()


def test_a_scheduler_acts_once_in_a_step_and_freely_outside() -> None:
    steps = in_state(State.COMMITTED)
    assert [steps.scheduler_step(), steps.scheduler_step()] == [True, False]
    steps.hand_out(last=True)
    steps.backward()
    steps.after_backward()
    steps.optimizer_step()
    steps.after_optimizer_step()
    assert steps.scheduler_step()
    steps.leave()
    assert [steps.scheduler_step(), steps.scheduler_step()] == [True, True]


@pytest.mark.parametrize("call", ["check_whole", "backward", "optimizer_step"])
def test_leaving_early_is_remembered(call: str) -> None:
    steps = in_state(State.COMMITTED)
    steps.leave_early()
    with pytest.raises(UsageError, match="half-read"):
        getattr(steps, call)()
    with pytest.raises(UsageError, match="half-read"):
        steps.check_outside("job.evaluate")
