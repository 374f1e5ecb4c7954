from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from farandole.errors import UsageError
from farandole.job.gates import gate_optimizer, gate_scheduler
from farandole.job.stepstate import StepState


@pytest.fixture
def state() -> StepState:
    return StepState()


@pytest.fixture
def parameter() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return parameter


def reduced(state: StepState) -> None:
    state.hand_out(last=True)
    state.backward()
    state.after_backward()


def test_an_optimizer_stays_what_it_was(state: StepState, parameter: nn.Parameter) -> None:
    plain = torch.optim.AdamW([parameter], lr=0.5)
    before = copy.deepcopy(plain.state_dict())
    gated = gate_optimizer(plain, state)
    assert gated is plain
    assert isinstance(gated, torch.optim.AdamW)
    assert type(gated).__name__ == "AdamW"
    assert gated.state_dict() == before


def test_an_optimizer_acts_only_when_the_step_is_in(
    state: StepState, parameter: nn.Parameter
) -> None:
    optimizer = gate_optimizer(torch.optim.SGD([parameter], lr=0.5), state)
    state.hand_out(last=False)
    optimizer.zero_grad()
    assert parameter.grad is not None
    state.backward()
    state.after_backward()
    optimizer.step()
    assert torch.equal(parameter, torch.ones(3))
    reduced(state)
    optimizer.step()
    assert torch.equal(parameter, torch.full((3,), 0.5))
    optimizer.zero_grad()
    assert parameter.grad is None
    with pytest.raises(UsageError, match="twice"):
        optimizer.step()
    assert torch.equal(parameter, torch.full((3,), 0.5))


def test_an_optimizer_takes_no_closure(state: StepState, parameter: nn.Parameter) -> None:
    optimizer = gate_optimizer(torch.optim.LBFGS([parameter]), state)
    reduced(state)
    with pytest.raises(UsageError, match="needs no closure"):
        optimizer.step(lambda: 0.0)


def test_hooks_of_an_optimizer_run_once_per_step(state: StepState, parameter: nn.Parameter) -> None:
    optimizer = gate_optimizer(torch.optim.SGD([parameter], lr=0.5), state)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    state.hand_out(last=False)
    state.backward()
    state.after_backward()
    optimizer.step()
    assert seen == []
    reduced(state)
    optimizer.step()
    assert seen == ["before", "after"]


def test_a_scheduler_acts_once_per_step(state: StepState, parameter: nn.Parameter) -> None:
    optimizer = gate_optimizer(torch.optim.SGD([parameter], lr=1.0), state)
    plain = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = set(plain.state_dict())
    scheduler = gate_scheduler(plain, state)
    assert set(scheduler.state_dict()) == before
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    for expected in (0.5, 0.25):
        state.hand_out(last=False)
        state.backward()
        state.after_backward()
        optimizer.step()
        scheduler.step()
        reduced(state)
        optimizer.step()
        scheduler.step()
        scheduler.step()
        assert scheduler.get_last_lr() == [expected]


def test_a_scheduler_that_takes_a_metric(state: StepState, parameter: nn.Parameter) -> None:
    optimizer = gate_optimizer(torch.optim.SGD([parameter], lr=1.0), state)
    scheduler = gate_scheduler(
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5), state
    )
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_state_can_be_copied(state: StepState, parameter: nn.Parameter) -> None:
    optimizer = gate_optimizer(torch.optim.SGD([parameter], lr=0.5, momentum=0.9), state)
    reduced(state)
    optimizer.step()
    again = pickle.loads(pickle.dumps(optimizer.state_dict()))
    assert torch.equal(
        again["state"][0]["momentum_buffer"], optimizer.state[parameter]["momentum_buffer"]
    )
