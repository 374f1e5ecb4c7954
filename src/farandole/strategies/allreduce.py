"""Synchronous data parallelism: all slots' gradients are added in the tree's order.

While the slots of a worker come one by one, their gradients fold as a binary counter does
(`farandole.plan.tree`); the sums are taken in the backward pass's own hooks, while a gradient is
still in cache. The last fold of a step writes into the communicator's memory, bucket by bucket,
and announces each bucket as soon as it is complete, so that the exchange overlaps the rest of
the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from farandole.errors import UsageError
from farandole.plan.tree import FoldStep, fold_steps, subtrees
from farandole.protocols import Comm, Reducer
from farandole.strategies.buckets import lay_out

_SHOWN_NAMES = 5
# Elements that are added at a time: what is added twice stays in a core's cache.
_CHUNK = 1 << 16


class AllReduce:
    """Gives every worker the total of all slots' gradients, once per step.

    Parameters
    ----------
    comm : Comm
        Every rank must make the same calls in the same order.
    num_slots : int
        Slots of the job, V.
    slots : sequence of int
        This worker's, contiguous and ascending.
    exact : bool
        False lets the backend choose the order of the sum; then a worker holds one slot.
    bucket_bytes : int
        Gradients that are exchanged as one message.
    """

    def __init__(
        self, comm: Comm, *, num_slots: int, slots: Sequence[int], exact: bool, bucket_bytes: int
    ) -> None:
        self._comm = comm
        self._num_slots = num_slots
        self._exact = exact
        self._bucket_bytes = bucket_bytes
        self._steps = fold_steps(slots, num_slots)
        self._num_subtrees = len(subtrees(slots, num_slots))
        self._holds_last_slot = slots[-1] == num_slots - 1
        self._reducer: Reducer | None = None
        self._hooks: list[Any] = []
        # One microstep's fold, set before its backward pass and read by the hooks.
        self._take: Callable[[int, torch.Tensor], None] | None = None
        self._partial: dict[int, torch.Tensor] = {}
        self._chain: list[list[torch.Tensor]] = []
        self._held: list[list[torch.Tensor]] = []
        self._announce = False

    def attach(self, model: torch.nn.Module, *, allow_unused: bool) -> None:
        """Take charge of a model's gradients and buffers. Blocks; every rank must call it."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._allow_unused = allow_unused
        # With one slot, what the slot leaves in the buffers is the result already.
        buffers = list(model.buffers()) if self._num_slots > 1 else []
        # Those that can be added come first; the others only start each slot alike.
        self._all_buffers = sorted(buffers, key=lambda buffer: not _can_be_added(buffer))
        self._all_base = [torch.empty_like(buffer) for buffer in self._all_buffers]
        num_added = sum(map(_can_be_added, buffers))
        self._buffers = self._all_buffers[:num_added]
        self._base = self._all_base[:num_added]
        self._num_tensors = len(self._parameters) + len(self._buffers)
        self._folded: list[torch.Tensor | None] = [None] * self._num_tensors
        self._targets: list[list[torch.Tensor]] = []
        if self._comm.world_size > 1:
            self._attach_reducer()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(self._parameters)
        ]

    def _attach_reducer(self) -> None:
        tensors = [*self._parameters, *self._buffers]
        layout = lay_out(self._parameters, self._buffers, self._bucket_bytes)
        reducer = self._comm.reducer(layout.buckets, self._num_slots, exact=self._exact)
        self._reducer = reducer
        self._places = layout.places
        self._bucket_sizes = [len(members) for members in layout.members()]
        for subtree in range(self._num_subtrees):
            region = self._region(reducer, subtree)
            self._targets.append(layout.views(tensors, region))

    @staticmethod
    def _region(reducer: Reducer, subtree: int) -> Callable[[int], torch.Tensor]:
        return lambda bucket: reducer.region(bucket, subtree)

    # --- one microstep ----------------------------------------------------------------------

    def begin_slot(self, position: int) -> None:
        """Prepare for the forward pass of this worker's slot at `position`."""
        if position == 0:
            for parameter in self._parameters:
                parameter.grad = None
            # The last step's gradients make room for this one's activations.
            self._held, self._folded, self._chain = [], [], []
            self._partial = {}
            if self._all_buffers:
                _copy_all(self._all_base, self._all_buffers)
        elif self._all_buffers:
            _copy_all(self._all_buffers, self._all_base)

    def backward(
        self, loss: torch.Tensor, *, weight: float, position: int, slot_weight: float | None
    ) -> None:
        """Run the backward pass of a loss, and fold its slot's gradients if the slot is complete.

        Parameters
        ----------
        loss : Tensor
            A scalar: the mean over the rows of this microstep.
        weight : float
            Rows of this microstep over rows of the step.
        position : int
            Which of this worker's slots.
        slot_weight : float or None
            Rows of the slot over rows of the step; None if more of the slot's rows will follow.
        """
        if slot_weight is None:
            self._run_backward(loss, weight, self._collect)
            return
        step = self._steps[position]
        last = position == len(self._steps) - 1
        self._begin_fold(step, last=last)
        self._run_backward(loss, weight, self._fold_whole)
        self._fold_rest(slot_weight, last_of_all=last and self._holds_last_slot)
        self._partial = {}
        del self._held[len(self._held) - step.num_merges :]
        if self._target is None:
            self._held.append(self._folded)  # type: ignore[arg-type]

    def _begin_fold(self, step: FoldStep, *, last: bool) -> None:
        self._folded = [None] * self._num_tensors
        self._chain = self._held[len(self._held) - step.num_merges :][::-1]
        exchanged = step.subtree is not None and self._reducer is not None
        self._target = self._targets[step.subtree] if exchanged else None  # type: ignore[index]
        self._subtree = step.subtree
        self._fired = bytearray(self._num_tensors)
        self._num_fired = 0
        self._announce = last and self._reducer is not None
        if self._announce:
            self._pending = list(self._bucket_sizes)
            self._next_bucket = 0

    def _run_backward(
        self, loss: torch.Tensor, weight: float, take: Callable[[int, torch.Tensor], None]
    ) -> None:
        self._take = take
        try:
            if weight == 1.0:
                loss.backward()
            else:
                loss.backward(gradient=torch.full_like(loss, weight))
        finally:
            self._take = None

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def take_away(parameter: torch.Tensor) -> None:
            if self._take is not None:
                gradient = parameter.grad
                # Nothing is left for clipping or zero_grad to change before the step is whole.
                parameter.grad = None
                self._take(index, gradient)  # type: ignore[arg-type]

        return take_away

    def _collect(self, index: int, gradient: torch.Tensor) -> None:
        """Keep the gradient of a piece of a slot, as autograd would accumulate it."""
        before = self._partial.get(index)
        self._partial[index] = gradient if before is None else before.add_(gradient)

    def _fold_whole(self, index: int, gradient: torch.Tensor) -> None:
        """Fold the gradient of a slot, whose earlier pieces may have been kept."""
        before = self._partial.pop(index, None) if self._partial else None
        self._fold(index, gradient if before is None else before.add_(gradient))

    def _fold(self, index: int, value: torch.Tensor) -> None:
        """Add the held values to one tensor's new value, and put the sum where it belongs."""
        if value.layout is not torch.strided:
            raise UsageError(
                problem=f"parameter {self._names[index]!r} has a sparse gradient",
                remedy="build its module with sparse=False",
            )
        if self._fired[index]:
            raise UsageError(
                problem=f"parameter {self._names[index]!r} got its gradient in several parts",
                remedy="use torch.utils.checkpoint with use_reentrant=False",
            )
        self._fired[index] = 1
        self._num_fired += 1
        chain = self._chain
        if self._target is None:
            self._folded[index] = add_up([left[index] for left in chain], value) if chain else value
            return
        target = self._target[index]
        if chain:
            add_up([left[index] for left in chain], value, out=target)
        else:
            self._put(index, value, target)
        if self._announce:
            self._count_down(self._places[index].bucket)

    def _put(self, index: int, value: torch.Tensor, target: torch.Tensor) -> None:
        """Give the exchange a tensor as it is, if it is laid out as its target."""
        if value.stride() != target.stride():
            target.copy_(value)
            return
        place = self._places[index]
        flat = value.as_strided((value.numel(),), (1,))
        self._reducer.put(place.bucket, self._subtree, place.offset, flat)  # type: ignore[union-attr]

    def _count_down(self, bucket: int) -> None:
        pending = self._pending
        pending[bucket] -= 1
        while self._next_bucket < len(pending) and pending[self._next_bucket] == 0:
            self._next_bucket += 1
            self._reducer.ready(self._next_bucket - 1)  # type: ignore[union-attr]

    def _fold_rest(self, slot_weight: float, *, last_of_all: bool) -> None:
        """Fold what the hooks did not see: parameters without a gradient, and buffers."""
        num_parameters = len(self._parameters)
        if self._num_fired == self._num_tensors:
            return
        with torch.no_grad():
            for index, gradient in self._partial.items():
                self._fold(index, gradient)
            missing = [i for i in range(num_parameters) if not self._fired[i]]
            if missing and not self._allow_unused:
                raise self._no_gradient(missing)
            for index in missing:
                self._fold(index, torch.zeros_like(self._parameters[index]))
            for offset, (buffer, base) in enumerate(zip(self._buffers, self._base, strict=True)):
                change = buffer - base
                # Whole numbers cannot be averaged: they are what the job's last slot makes them.
                change.mul_(slot_weight if change.is_floating_point() else int(last_of_all))
                self._fold(num_parameters + offset, change)

    def _no_gradient(self, missing: list[int]) -> UsageError:
        names = ", ".join(self._names[i] for i in missing[:_SHOWN_NAMES])
        more = f" and {len(missing) - _SHOWN_NAMES} more" if len(missing) > _SHOWN_NAMES else ""
        return UsageError(
            problem=f"no gradient reached {names}{more}",
            remedy="use them in the loss, set requires_grad=False, or pass "
            "job.prepare(..., allow_unused=True) to count them as zero",
        )

    # --- one step ---------------------------------------------------------------------------

    def exchange(self, record: bytes) -> list[bytes]:
        """Put the totals in place, after the last slot; return every rank's record.

        Each parameter's ``grad`` is then the total over all slots, and floating buffers are
        their weighted mean. Blocks; every rank must call it.
        """
        if self._reducer is None:
            totals, records = self._held.pop(), [record]
        else:
            records = self._reducer.wait(record)
            totals = self._targets[0]
        for parameter, total in zip(self._parameters, totals, strict=False):
            parameter.grad = total
        with torch.no_grad():
            changes = totals[len(self._parameters) :]
            for buffer, base, change in zip(self._buffers, self._base, changes, strict=True):
                torch.add(base, change, out=buffer)
        return records

    def close(self) -> None:
        """Remove the hooks and free the communicator's memory."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters if self._hooks else ():
            parameter.grad = None
        self._hooks, self._targets, self._held = [], [], []
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None


def add_up(
    lefts: list[torch.Tensor], value: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``lefts[-1] + (... + (lefts[0] + value))``, in `out` or in ``lefts[-1]``.

    Large tensors are added in chunks, so that what one addition gives is in cache for the next.
    """
    out = lefts[-1] if out is None else out
    if len(lefts) == 1 or value.numel() <= _CHUNK or not value.is_contiguous():
        for left in lefts[:-1]:
            value = left.add_(value)
        return torch.add(lefts[-1], value, out=out)
    flat = [left.view(-1) for left in lefts]
    flat_value, flat_out = value.view(-1), out.view(-1)
    scratch = torch.empty(_CHUNK, dtype=value.dtype, device=value.device)
    for start in range(0, value.numel(), _CHUNK):
        part = flat_value[start : start + _CHUNK]
        room = scratch[: len(part)]
        for left in flat[:-1]:
            part = torch.add(left[start : start + _CHUNK], part, out=room)
        torch.add(flat[-1][start : start + _CHUNK], part, out=flat_out[start : start + _CHUNK])
    return out


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def _can_be_added(buffer: torch.Tensor) -> bool:
    return buffer.dtype is not torch.bool
