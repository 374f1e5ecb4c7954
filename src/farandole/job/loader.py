"""The loop over batches: hands out this worker's slots of every step, and commits the steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from farandole.errors import DataError, UsageError
from farandole.job.batch import Batch
from farandole.job.steps import JobSteps, Microstep
from farandole.plan.steps import TAILS
from farandole.protocols import Warns

if TYPE_CHECKING:
    import torch

    from farandole.plan.steps import Steps, Tail
    from farandole.protocols import Blocks, Dataset


class Loader:
    """An iterable over this worker's batches of one epoch, one per microstep.

    Made by `Job.loader`. Every rank must read it to its end.
    """

    def __init__(
        self,
        steps: JobSteps,
        dataset: Dataset,
        *,
        device: torch.device,
        batch_size: int,
        shuffle: bool,
        accumulate: int,
        tail: Tail,
        max_steps: int | None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("accumulate", accumulate)):
            if not isinstance(value, int) or value < 1:
                raise UsageError(
                    problem=f"job.loader({name}={value!r})", remedy="give a whole number from 1 up"
                )
        if max_steps is not None and (not isinstance(max_steps, int) or max_steps < 1):
            raise UsageError(
                problem=f"job.loader(max_steps={max_steps!r})",
                remedy="give a whole number from 1 up, or leave it out for the whole epoch",
            )
        if tail not in TAILS:
            raise UsageError(
                problem=f"job.loader(tail={tail!r})", remedy=f"give one of {', '.join(TAILS)}"
            )
        self._steps = steps
        self._device = device
        self._dataset = dataset
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._accumulate = accumulate
        self._tail: Tail = tail
        self._max_steps = max_steps

    def __repr__(self) -> str:
        options = ("batch_size", "shuffle", "accumulate", "tail", "max_steps")
        shown = ", ".join(f"{name}={getattr(self, f'_{name}')!r}" for name in options)
        return f"job.loader(data {self.fingerprint[:12]}, {shown})"

    def _plan(self, epoch: int, start_row: int) -> Steps:
        return self._dataset.epoch_plan(
            seed=self._steps.config.seed,
            epoch=epoch,
            batch_size=self._batch_size,
            num_slots=self._steps.config.slots,
            start_row=start_row,
            shuffle=self._shuffle,
            tail=self._tail,
        )

    @property
    def num_steps(self) -> int:
        """Steps of a whole epoch; the same on every worker."""
        steps = self._plan(0, 0).num_steps
        return steps if self._max_steps is None else min(steps, self._max_steps)

    def __iter__(self) -> Iterator[Batch]:
        """Hand out the batches; see `Job.loader`."""
        steps = self._steps
        start_row = steps.enter(self)
        if start_row is None:
            return
        plan = self._plan(steps.position.epoch, start_row)
        num_steps = plan.num_steps
        if self._max_steps is not None:
            num_steps = min(num_steps, self._max_steps - -(-start_row // self._batch_size))
        blocks = self._dataset.read(plan, steps.owned_slots)
        whole = False
        try:
            for step in range(num_steps):
                yield from self._step(plan, step, blocks)
                steps.end_step(plan.step_rows(step), plan.rows_after(step))
            whole = True
        finally:
            blocks.close()
            steps.leave(whole=whole)

    def _step(self, plan: Steps, step: int, blocks: Blocks) -> Iterator[Batch]:
        """Hand out the batches of one step."""
        steps = self._steps
        total = plan.step_rows(step)
        last_slot = len(steps.microslots) - 1
        for position, slot in enumerate(steps.microslots):
            batch, real = self._next_batch(plan, step, slot, blocks)
            steps.begin_slot(position)
            bounds = self._pieces(real, batch.num_rows)
            for piece in range(len(bounds) - 1):
                start, stop = bounds[piece : piece + 2]
                last_piece = piece == len(bounds) - 2
                rows = batch.slice(start, stop) if len(bounds) > 2 else batch
                weight = (bisect_left(real, stop) - bisect_left(real, start)) / total
                slot_weight = len(real) / total if last_piece else None
                last = last_piece and position == last_slot
                steps.hand_out(Microstep(position, slot, weight, slot_weight, last))
                yield rows
                steps.state.take_back()

    def _next_batch(
        self, plan: Steps, step: int, slot: int, blocks: Blocks
    ) -> tuple[Batch, Sequence[int]]:
        """Read one microstep's rows: those of a slot or, with fast reduction, of all of ours.

        Returns them, and the places of those that are no padding.
        """
        steps = self._steps
        slots = [slot] if len(steps.microslots) > 1 else steps.owned_slots
        parts: list[Batch] = []
        masks: list[np.ndarray] = []
        for each in slots:
            block = next(blocks)
            if self._tail == "pad":
                block = block.padded(plan.padded_slot_rows(step, each))
            if block.mask is not None:
                masks.append(block.mask)
            parts.append(Batch.from_block(block, self._device))
        batch = parts[0] if len(parts) == 1 else Batch.concatenate(parts)
        if not masks:
            return batch, range(batch.num_rows)
        return batch, np.flatnonzero(np.concatenate(masks)).tolist()

    def _pieces(self, real: Sequence[int], num_rows: int) -> list[int]:
        """Return the bounds of the pieces into which a slot's rows are cut.

        Each piece has a row that is no padding: one of the places `real`.
        """
        num_pieces = min(self._accumulate, len(real))
        inner = [real[len(real) * piece // num_pieces] for piece in range(1, num_pieces)]
        return [0, *inner, num_rows]

    def check_data(self, fingerprint: str | None) -> None:
        """Raise if an epoch was begun on other data than these."""
        if fingerprint is not None and fingerprint != self._dataset.fingerprint:
            raise DataError(
                path=repr(self._dataset),
                problem="the data have changed since the checkpoint was written in the middle of "
                "an epoch, so its rows cannot be used exactly once",
                remedy="put the old data back, or start a new job",
            )

    @property
    def fingerprint(self) -> str:
        """The data set's."""
        return self._dataset.fingerprint

    @property
    def rows_per_slot(self) -> int:
        """Rows of a slot in a full step, rounded down."""
        return self._batch_size // self._steps.config.slots

    def warnings(self) -> Sequence[str]:
        """Return what the data set has to tell."""
        return self._dataset.warnings() if isinstance(self._dataset, Warns) else ()

    def describe(self) -> dict[str, int]:
        """Return the sizes, for the event log."""
        return {
            "batch_size": self._batch_size,
            "num_rows": self._dataset.num_rows,
            "steps_per_epoch": self.num_steps,
        }
