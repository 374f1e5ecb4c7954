"""The steps of a job: where it stands, what its loaders hand out, and what becomes a step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from farandole.config import JobConfig
from farandole.errors import JobStoppedError, UsageError
from farandole.job.likeness import check_options, check_same
from farandole.job.position import Position
from farandole.job.randomness import seed_all
from farandole.job.steprecords import StepRecords
from farandole.job.stepstate import StepState
from farandole.plan.random import slot_seed
from farandole.plan.slots import slots_of
from farandole.strategies.allreduce import AllReduce

if TYPE_CHECKING:
    from farandole.job.keeper import StateKeeper
    from farandole.job.loader import Loader
    from farandole.job.recorder import Recorder
    from farandole.protocols import Comm

# Below it, more of a step goes into calling operators than into their arithmetic.
FEW_ROWS_PER_SLOT = 32
SHOWN_NAMES = 5


class Microstep(NamedTuple):
    """One batch that the training function gets: a slot's rows of a step, or a piece of them.

    Attributes
    ----------
    position, slot : int
        Which of this worker's slots, and which of all.
    weight : float
        Rows of the batch over rows of the step.
    slot_weight : float or None
        Rows of the slot over rows of the step; None if more of the slot's rows will follow.
    last : bool
        Whether it is this worker's last of the step.
    """

    position: int
    slot: int
    weight: float
    slot_weight: float | None
    last: bool


class JobSteps:
    """Takes a job from step to step, on one worker.

    Attributes
    ----------
    step : int
        Committed steps.
    position : Position
        Where in which epoch.
    owned_slots : sequence of int
        The slots whose rows this worker reads.
    microslots : sequence of int
        What this worker computes at once and the tree adds: its slots or, with fast reduction,
        whose bits are not promised, all of them as one.
    slot_seed : int
        See `Job.slot_seed`.
    """

    def __init__(
        self, config: JobConfig, comm: Comm, recorder: Recorder, keeper: StateKeeper
    ) -> None:
        self.config = config
        self.step = keeper.step
        self.position = keeper.position
        self.state = StepState()
        self.owned_slots = slots_of(comm.rank, comm.world_size, config.slots)
        exact = config.reduction == "exact"
        self.microslots: Sequence[int] = self.owned_slots if exact else [comm.rank]
        self._num_leaves = config.slots if exact else comm.world_size
        self.records = StepRecords(recorder, self._num_leaves)
        self._comm = comm
        self._recorder = recorder
        self._keeper = keeper
        self._strategy: AllReduce | None = None
        self._loader_index = 0
        self._in_epochs = False
        self._num_asked = 0
        self._planned = False
        self._warned: set[str] = set()
        self._evaluated: dict[str, float] = {}
        self._stop_request: str | None = None
        self._stop_agreed: str | None = None
        self._save_agreed = False
        self.seed_between_steps()

    @property
    def prepared(self) -> bool:
        """Whether there is a model to train."""
        return self._strategy is not None

    def attach(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, allow_unused: bool
    ) -> None:
        """Take a model whose gradients become steps. Blocks; every rank must call it."""
        self._strategy = AllReduce(
            self._comm,
            num_slots=self._num_leaves,
            slots=self.microslots,
            exact=self.config.reduction == "exact",
            bucket_bytes=self.config.bucket_bytes,
        )
        self._strategy.attach(model, allow_unused=allow_unused)
        self._model, self._optimizer = model, optimizer
        self._trained = {p for p in model.parameters() if p.requires_grad}

    def close(self) -> None:
        """Let go of the model."""
        if self._strategy is not None:
            self._strategy.close()
            self._strategy = None

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs that are still to do."""
        self.state.check_outside("job.epochs")
        if self._in_epochs:
            raise UsageError(
                problem="job.epochs was called within the loop over job.epochs",
                remedy="loop over it once, and over job.loader within",
            )
        if not isinstance(num_epochs, int) or num_epochs < 0:
            raise UsageError(
                problem=f"job.epochs({num_epochs!r})", remedy="give a whole number from 0 up"
            )
        self._in_epochs = True
        self._num_asked = max(self._num_asked, num_epochs)
        try:
            for epoch in range(self.position.epoch, num_epochs):
                self._num_epochs = num_epochs
                self._loader_index = 0
                self.state.begin_epoch(self.position.num_scheduled)
                yield epoch
                self.state.end_epoch()
                self.position = Position(epoch=epoch + 1)
        finally:
            self._in_epochs = False

    def check_epochs(self) -> None:
        """Warn if a resumed job has found nothing left to do, and say why."""
        done = self.position.epoch
        if not self._keeper.resumed or self.step > self._keeper.step or self._num_asked > done:
            return
        part = " and a part of another" if self.position.row or self.position.loader else ""
        than = "no more" if self._num_asked == done and not part else "fewer"
        self._recorder.warn(
            f"nothing was trained: {done} epochs{part} were done at the checkpoint of step "
            f"{self.step}, and the training function asks for {than} (job.epochs"
            f"({self._num_asked}))"
        )

    # --- a loader ---------------------------------------------------------------------------

    def enter(self, loader: Loader) -> int | None:
        """Return the row to start from, or None if this loader is used up.

        Blocks; every rank must call it.
        """
        if self.state.inside:
            raise UsageError(
                problem="job.loader was begun before another one had ended",
                remedy="read one to its end before the next; farandole.mix makes one data set "
                "of several",
            )
        self.state.check_whole()
        if not self._in_epochs:
            raise UsageError(
                problem="job.loader was read outside of job.epochs",
                remedy="loop over `for epoch in job.epochs(n)` around it",
            )
        if not self.prepared:
            raise UsageError(
                problem="job.loader was read before job.prepare",
                remedy="call job.prepare(model, optimizer) before the loop",
            )
        index = self._loader_index
        self._loader_index += 1
        if index < self.position.loader:
            return None
        self._check_trained()
        where = f"in epoch {self.position.epoch + 1}, number {index + 1} there"
        check_same(self._comm, "the loader", f"{loader!r} {where}")
        check_options(self._comm, self._optimizer)
        loader.check_data(self.position.data)
        for text in loader.warnings():
            if text not in self._warned:
                self._warned.add(text)
                self._recorder.warn(text)
        self.position = replace(self.position, data=loader.fingerprint)
        if not self._planned:
            self._planned = True
            self._announce(loader)
        return self.position.row

    def _check_trained(self) -> None:
        """Raise if there is a parameter whose gradient would not be exchanged."""
        named = self._model.named_parameters()
        new = [name for name, p in named if p.requires_grad and p not in self._trained]
        if new:
            raise UsageError(
                problem=f"{', '.join(new[:SHOWN_NAMES])} became trainable after job.prepare",
                remedy="build the whole model before it; a part that is to be trained later can "
                "be given a learning rate of 0 until then",
            )

    def _announce(self, loader: Loader) -> None:
        sizes = loader.describe()
        self._recorder.event(
            "plan", total_steps=sizes["steps_per_epoch"] * self._num_epochs, **sizes
        )
        few = loader.rows_per_slot < FEW_ROWS_PER_SLOT
        if few and self.config.slots > 1 and self.config.reduction == "exact":
            better = max(1, sizes["batch_size"] // FEW_ROWS_PER_SLOT)
            self._recorder.warn(
                f"a batch of {sizes['batch_size']} rows makes {loader.rows_per_slot} in each of "
                f"{self.config.slots} slots; it would train faster with --slots {better} or with "
                f"batches of {self.config.slots * FEW_ROWS_PER_SLOT} rows"
            )

    def begin_slot(self, position: int) -> None:
        """Prepare for the forward pass of this worker's slot at `position`."""
        assert self._strategy is not None
        self._strategy.begin_slot(position)
        self._seed(self.microslots[position])

    def hand_out(self, microstep: Microstep) -> None:
        """Note what batch the training function has at hand."""
        self.microstep = microstep
        self.records.current.begin_batch()
        self.state.hand_out(last=microstep.last)

    def leave(self, *, whole: bool) -> None:
        """End a loader that was read to its end, or was not."""
        if not whole:
            self.state.leave_early()
            return
        self.state.leave()
        self._flush_records()
        self.position = Position(epoch=self.position.epoch, loader=self.position.loader + 1)
        self.seed_between_steps()

    def _seed(self, slot: int) -> None:
        """Seed the global generators for a slot of the step at hand."""
        self.slot_seed = slot_seed(self.config.seed, self.step, slot)
        seed_all(self.slot_seed)

    def seed_between_steps(self) -> None:
        """Seed the global generators alike on every worker."""
        self._seed(self.config.slots)

    # --- a step -----------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Fold a batch's gradients in, and exchange after the last; see `Job.backward`."""
        last = self.state.backward()
        if self._strategy is None:
            raise UsageError(
                problem="job.backward(loss) was called before job.prepare",
                remedy="call job.prepare(model, optimizer) before the loop",
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(
                problem="job.backward got no loss that can be differentiated",
                remedy="pass a tensor of one element that the model's parameters led to",
            )
        position, _, weight, slot_weight, _ = self.microstep
        self._strategy.backward(loss, weight=weight, position=position, slot_weight=slot_weight)
        if last:
            self._exchange(self._strategy)
        self.state.after_backward()

    def _exchange(self, strategy: AllReduce) -> None:
        if self._comm.world_size == 1:
            strategy.exchange(b"")
            return
        pending = self.records.pending
        save = self._keeper.due(self.step + 1)
        record = {"metrics": pending, "stop": self._stop_request, "save": save}
        told = [json.loads(data) for data in strategy.exchange(json.dumps(record).encode())]
        self._stop_agreed = next((other["stop"] for other in told if other["stop"]), None)
        self._save_agreed = any(other["save"] for other in told)
        if pending is not None:
            self.records.record([other["metrics"] for other in told])

    def end_step(self, num_rows: int, rows_after: int) -> None:
        """Commit a step: count it, record it, write a checkpoint if one is due, stop if asked."""
        self.step += 1
        self.position = replace(self.position, row=rows_after)
        self.records.end_step(self.step, epoch=self.position.epoch, rows=num_rows)
        if self._comm.world_size == 1:
            self._flush_records()
            self._stop_agreed = self._stop_request
            self._save_agreed = self._keeper.due(self.step)
        evaluated, self._evaluated = self._evaluated, {}
        if evaluated or self._save_agreed or self._stop_agreed is not None:
            # A job that goes on from a checkpoint does not log its steps again.
            self._flush_records()
        if not self._keeper.keep_best(self.step, self.place(), evaluated) and self._save_agreed:
            self._keeper.save(self.step, self.place())
        if self._stop_agreed is not None:
            self._keeper.save(self.step, self.place(), wait=True)
            raise JobStoppedError(step=self.step, reason=self._stop_agreed)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Keep the state if these values are the best; within a loader when the step ends."""
        if self.state.inside:
            self._evaluated.update(metrics)
        else:
            self._keeper.keep_best(self.step, self.place(), metrics)

    def place(self) -> Position:
        """Return where the job stands, for a checkpoint."""
        return replace(self.position, num_scheduled=self.state.num_scheduled)

    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop after the same step. Safe in a signal handler."""
        self._stop_request = reason

    def _flush_records(self) -> None:
        """Exchange and write the last step's metrics now, not with the next step."""
        pending = self.records.pending
        if pending is None:
            return
        if self._comm.world_size == 1:
            self.records.record([pending])
            return
        told = self._comm.all_gather("metrics", json.dumps(pending).encode())
        self.records.record([json.loads(data) for data in told])
