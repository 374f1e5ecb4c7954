"""Where a training function stands within a step, and what it may call there.

=============  ===========================================  ===================================
state          meaning                                      goes on by
=============  ===========================================  ===================================
OUTSIDE        no batch is at hand                          the loader: HANDED_OUT
HANDED_OUT     a batch is at hand, its backward is due      backward: ACCUMULATED or REDUCED
ACCUMULATED    folded in; more batches of the step follow   the loader: HANDED_OUT
REDUCED        gradients are the totals of the whole step   optimizer.step: COMMITTED
COMMITTED      the step is taken                            the loader: HANDED_OUT or OUTSIDE
=============  ===========================================  ===================================

Every call that does not fit raises `UsageError` with the mistake and the remedy. The states are
the same on all workers that run the same function, so the error is too.
"""

from __future__ import annotations

import enum

from farandole.errors import UsageError


class State(enum.Enum):
    """See the module."""

    OUTSIDE = "outside"
    HANDED_OUT = "handed out"
    ACCUMULATED = "accumulated"
    REDUCED = "reduced"
    COMMITTED = "committed"


class StepState:
    """Follows a training function through its steps. Pure: it only decides and complains."""

    def __init__(self) -> None:
        self.state = State.OUTSIDE
        self._last = False
        self._scheduled = False
        self._left_early = False
        self._in_epoch = False
        self._num_scheduled = 0
        self._num_replayed = 0

    @property
    def inside(self) -> bool:
        """Whether a batch is at hand."""
        return self.state is not State.OUTSIDE

    @property
    def step_reduced(self) -> bool:
        """Whether the gradients of the whole step are in (and the step perhaps taken)."""
        return self.state in (State.REDUCED, State.COMMITTED)

    # --- epochs -----------------------------------------------------------------------------

    @property
    def num_scheduled(self) -> int:
        """Scheduler steps of this epoch outside of loaders that the job's state holds."""
        return max(self._num_scheduled, self._num_replayed)

    def begin_epoch(self, num_replayed: int) -> None:
        """Begin an epoch, or enter it again with so many `num_scheduled` in the state already."""
        self._in_epoch = True
        self._num_scheduled = 0
        self._num_replayed = num_replayed

    def end_epoch(self) -> None:
        """Check that an epoch was read whole, and end it."""
        self.check_ended()
        self._in_epoch = False
        self._num_scheduled = self._num_replayed = 0

    # --- the loader -------------------------------------------------------------------------

    def hand_out(self, *, last: bool) -> None:
        """Give out a batch; `last` says that it is this worker's last of the step."""
        self.state = State.HANDED_OUT
        self._last = last
        self._scheduled = False

    def take_back(self) -> None:
        """Check, when the loop's body has ended, that it did what the batch was for."""
        if self.state is State.HANDED_OUT:
            raise UsageError(
                problem="a batch was not used: job.backward(loss) was not called for it",
                remedy="call it once for every batch of the loader (job.evaluate is for batches "
                "that are not trained on)",
            )
        if self.state is State.REDUCED:
            raise UsageError(
                problem="a step was not taken: optimizer.step() was not called after "
                "job.backward(loss)",
                remedy="call it in the loop's body for every batch; it acts once per step",
            )

    def leave(self) -> None:
        """Note that the loader has given out all its batches."""
        self.state = State.OUTSIDE
        self._scheduled = False

    def leave_early(self) -> None:
        """Note that the loop was left before the loader's end; `check_whole` complains."""
        self.state = State.OUTSIDE
        self._left_early = True

    def check_whole(self) -> None:
        """Raise if a loader was left half-read."""
        if self._left_early:
            raise UsageError(
                problem="a loader was left half-read: the loop over job.loader ended early",
                remedy="let it run to its end; job.loader(..., max_steps=N) makes it shorter",
            )

    def check_ended(self) -> None:
        """Raise unless every loader was read to its end; one may be kept, and go on later."""
        self._left_early |= self.inside
        self.check_whole()

    def check_outside(self, call: str) -> None:
        """Raise if a batch is at hand, unless its step has been taken."""
        self.check_whole()
        if self.state not in (State.OUTSIDE, State.COMMITTED):
            raise UsageError(
                problem=f"{call} was called in the middle of a step",
                remedy="call it between steps: after the loop, or under "
                "`if job.at_step_end` after optimizer.step()",
            )

    # --- the loop's body --------------------------------------------------------------------

    def backward(self) -> bool:
        """Return whether this backward completes the worker's part of the step."""
        if self.state is State.OUTSIDE:
            self.check_whole()
            raise UsageError(
                problem="job.backward(loss) was called outside of a loader",
                remedy="call it in the body of `for batch in job.loader(...)`",
            )
        if self.state is not State.HANDED_OUT:
            raise UsageError(
                problem="job.backward(loss) was called twice for one batch",
                remedy="add the losses up and call it once; to split a slot's rows into smaller "
                "batches, use job.loader(..., accumulate=N)",
            )
        return self._last

    def after_backward(self) -> None:
        """Note that backward has ended without an error."""
        self.state = State.REDUCED if self._last else State.ACCUMULATED

    def optimizer_step(self) -> bool:
        """Return whether the optimizer shall act."""
        if self.state is State.OUTSIDE:
            self.check_whole()
            raise UsageError(
                problem="optimizer.step() was called outside of a loader",
                remedy="call it in the body of `for batch in job.loader(...)`",
            )
        if self.state is State.HANDED_OUT:
            raise UsageError(
                problem="optimizer.step() was called before job.backward(loss)",
                remedy="call job.backward(loss), in place of loss.backward(), before it",
            )
        if self.state is State.COMMITTED:
            raise UsageError(
                problem="optimizer.step() was called twice in one step",
                remedy="call it once for every batch",
            )
        return self.state is State.REDUCED

    def after_optimizer_step(self) -> None:
        """Note that the optimizer has acted."""
        self.state = State.COMMITTED

    def zero_grad(self) -> bool:
        """Return whether gradients shall be cleared; each step clears them itself."""
        if self.state is State.REDUCED:
            raise UsageError(
                problem="optimizer.zero_grad() between job.backward(loss) and optimizer.step() "
                "would drop the gradients",
                remedy="call it before job.backward(loss) or after optimizer.step()",
            )
        return self.state in (State.OUTSIDE, State.COMMITTED)

    def scheduler_step(self) -> bool:
        """Return whether a scheduler shall act: once per taken step, or outside of a loader.

        A resumed job comes by calls again that its checkpoint was written after; those are past.
        """
        if self.state in (State.HANDED_OUT, State.REDUCED):
            raise UsageError(
                problem="scheduler.step() was called before optimizer.step()",
                remedy="call optimizer.step() first",
            )
        if self.state is State.ACCUMULATED or self._scheduled:
            return False
        if self.state is State.COMMITTED:
            self._scheduled = True
        elif self._in_epoch:
            self._num_scheduled += 1
            return self._num_scheduled > self._num_replayed
        return True
