"""The loop over batches: hands out this worker's slots of every step, and commits the steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from farandole.errors import DataError, UsageError
from farandole.job.batch import Batch

if TYPE_CHECKING:
    from farandole.job.session import Job
    from farandole.plan.lanes import EpochPlan
    from farandole.protocols import Blocks, Dataset

Tail = Literal["short", "drop"]


class Loader:
    """An iterable over this worker's batches of one epoch, one per microstep.

    Made by `Job.loader`. Every rank must read it to its end.
    """

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        *,
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
        self._job = job
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

    def _plan(self, epoch: int, start_row: int) -> EpochPlan:
        return self._dataset.epoch_plan(
            seed=self._job.config.seed,
            epoch=epoch,
            batch_size=self._batch_size,
            num_slots=self._job.config.slots,
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
        job = self._job
        start_row = job._enter_loader(self)
        if start_row is None:
            return
        plan = self._plan(job.epoch, start_row)
        num_steps = plan.num_steps
        if self._max_steps is not None:
            num_steps = min(num_steps, self._max_steps - -(-start_row // self._batch_size))
        blocks = self._dataset.read(plan, job._owned_slots)
        whole = False
        try:
            for step in range(num_steps):
                yield from self._step(plan, step, blocks)
                job._end_step(plan.step_rows(step), plan.rows_after(step))
            whole = True
        finally:
            blocks.close()
            job._leave_loader(whole=whole)

    def _step(self, plan: EpochPlan, step: int, blocks: Blocks) -> Iterator[Batch]:
        """Hand out the batches of one step."""
        job = self._job
        total = plan.step_rows(step)
        last_slot = len(job._microslots) - 1
        for position, slot in enumerate(job._microslots):
            batch = self._next_batch(blocks)
            job._begin_slot(position)
            job._seed(slot)
            bounds = self._pieces(batch.num_rows)
            for piece in range(len(bounds) - 1):
                last_piece = piece == len(bounds) - 2
                rows = batch.slice(*bounds[piece : piece + 2]) if len(bounds) > 2 else batch
                job._hand_out(
                    position=position,
                    slot=slot,
                    weight=rows.num_rows / total,
                    slot_weight=batch.num_rows / total if last_piece else None,
                    last=last_piece and position == last_slot,
                )
                yield rows
                job._take_back()

    def _next_batch(self, blocks: Blocks) -> Batch:
        """Read one microstep's rows: those of a slot or, with fast reduction, of all of ours."""
        num_blocks = len(self._job._owned_slots) // len(self._job._microslots)
        parts = [Batch.from_block(next(blocks), self._job.device) for _ in range(num_blocks)]
        return parts[0] if num_blocks == 1 else Batch.concatenate(parts)

    def _pieces(self, num_rows: int) -> list[int]:
        """Return the bounds of the pieces into which a slot's rows are cut."""
        num_pieces = min(self._accumulate, num_rows)
        return [num_rows * piece // num_pieces for piece in range(num_pieces + 1)]

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
        return self._batch_size // self._job.config.slots

    def describe(self) -> dict[str, int]:
        """Return the sizes, for the event log."""
        return {
            "batch_size": self._batch_size,
            "num_rows": self._dataset.num_rows,
            "steps_per_epoch": self.num_steps,
        }
