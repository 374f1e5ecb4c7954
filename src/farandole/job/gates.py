"""Optimizers and schedulers that act once per step, though the loop calls them for every batch."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from farandole.errors import UsageError
from farandole.job.stepstate import StepState

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


class _GatedOptimizer:
    _step_state: StepState

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            raise UsageError(
                problem="optimizer.step(closure) evaluates the loss several times per step",
                remedy="use an optimizer that needs no closure",
            )
        if self._step_state.optimizer_step():
            super().step()  # type: ignore[misc]
            self._step_state.after_optimizer_step()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # Only torch.amp.GradScaler asks, before each step.
        raise UsageError(
            problem="the job's optimizer was given to a GradScaler, which steps for every batch",
            remedy="leave it out: job.autocast() computes in bf16, which needs no scaling",
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._step_state.zero_grad():
            super().zero_grad(set_to_none)  # type: ignore[misc]


class _GatedScheduler:
    _step_state: StepState

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self._step_state.scheduler_step():
            super().step(*args, **kwargs)  # type: ignore[misc]


def _gate(target: Any, mixin: type, state: StepState) -> None:
    # A subclass made on the spot: isinstance and state_dict (which takes all attributes of the
    # object itself) stay as they were.
    cls = type(target)
    attributes = {"__module__": cls.__module__, "_step_state": state}
    target.__class__ = type(cls.__name__, (mixin, cls), attributes)


def gate_optimizer(optimizer: OptimizerT, state: StepState) -> OptimizerT:
    """Make `step` and `zero_grad` of an optimizer follow `state`; return the same object."""
    _gate(optimizer, _GatedOptimizer, state)
    return optimizer


def gate_scheduler(scheduler: Any, state: StepState) -> Any:
    """Make `step` of a scheduler follow `state`; return the same object."""
    _gate(scheduler, _GatedScheduler, state)
    return scheduler
