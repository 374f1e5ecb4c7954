"""The job as the training function sees it: ordinary PyTorch, and nothing of ranks or failures."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import torch

from farandole.config import JobConfig
from farandole.errors import JobStoppedError, UsageError
from farandole.job.batch import Batch
from farandole.job.evaluation import (
    Evaluation,
    EvaluationFunction,
    evaluate,
    evaluating,
    write_rows,
)
from farandole.job.gates import gate_optimizer, gate_scheduler
from farandole.job.keeper import describe_missing
from farandole.job.likeness import check_alike, check_same
from farandole.job.loader import Loader
from farandole.job.metrics import StepMetrics, combine
from farandole.job.position import Position
from farandole.job.randomness import seed_all
from farandole.job.stepstate import StepState
from farandole.plan.random import slot_seed
from farandole.plan.slots import slots_of
from farandole.strategies.allreduce import AllReduce

if TYPE_CHECKING:
    from farandole.job.keeper import StateKeeper
    from farandole.job.recorder import Recorder
    from farandole.plan.steps import Tail
    from farandole.protocols import Comm, Dataset

OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]

# Below it, more of a step goes into calling operators than into their arithmetic.
FEW_ROWS_PER_SLOT = 32

_log = logging.getLogger(__name__)


class Job:
    """One run of a training function, on one worker.

    The function gets it as its first argument; nobody else makes one. All workers run the
    same function; what it calls here must be called by all of them in the same order, except
    where it says otherwise.
    """

    def __init__(
        self,
        config: JobConfig,
        comm: Comm,
        recorder: Recorder,
        *,
        device: torch.device,
        keeper: StateKeeper,
    ) -> None:
        self.config = config
        self.device = device
        self.step = keeper.step
        self.metrics: dict[str, float] = {}
        self._comm = comm
        self._recorder = recorder
        self._state = StepState()
        self._owned_slots = slots_of(comm.rank, comm.world_size, config.slots)
        # What is computed at once and added in the tree. With fast reduction, whose bits are
        # not promised, all slots of a worker are one.
        exact = config.reduction == "exact"
        self._num_leaves = config.slots if exact else comm.world_size
        self._microslots: Sequence[int] = self._owned_slots if exact else [comm.rank]
        self._strategy: AllReduce | None = None
        self._keeper = keeper
        self._position = keeper.position
        self._loader_index = 0
        self._in_epochs = False
        self._step_metrics = StepMetrics()
        self._pending: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._evaluated: set[str] = set()
        self._evaluated_in_step: dict[str, float] = {}
        self._stop_request: str | None = None
        self._stop_agreed: str | None = None
        self._planned = False
        self._warned: set[str] = set()
        self._seed_between_steps()

    # --- who and where ----------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank of this worker. The result must not depend on it."""
        return self._comm.rank

    @property
    def world_size(self) -> int:
        """How many workers there are. The result must not depend on it."""
        return self._comm.world_size

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._position.epoch

    @property
    def params(self) -> dict[str, Any]:
        """The parameters that the training function was started with."""
        return dict(self.config.params)

    @property
    def at_step_end(self) -> bool:
        """Whether a step has just been taken: true in one of its batches, on every worker."""
        return self._state.inside and self._state.step_reduced

    @property
    def slot_seed(self) -> int:
        """The seed of the slot at hand, 63 bits: for generators that the job does not seed.

        Between steps, and within `evaluate`, it is that of a slot after the last one, alike on
        every worker.
        """
        return self._slot_seed

    # --- setting up -------------------------------------------------------------------------

    @overload
    def prepare(
        self, model: torch.nn.Module, optimizer: OptimizerFactory, *, allow_unused: bool = False
    ) -> tuple[Any, torch.optim.Optimizer]: ...

    @overload
    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory,
        *,
        allow_unused: bool = False,
    ) -> tuple[Any, torch.optim.Optimizer, Any]: ...

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        *,
        allow_unused: bool = False,
    ) -> tuple[Any, ...]:
        """Take charge of a model and its optimizer. Blocks; every rank must call it, once.

        Parameters
        ----------
        model : torch.nn.Module
            Moved to the job's device; rank 0's values, or a checkpoint's, are put into it.
        optimizer : callable
            Gets the list of trainable parameters and returns their optimizer.
        scheduler : callable, optional
            Gets the optimizer and returns its learning-rate scheduler.
        allow_unused : bool, default=False
            Count a parameter that a slot's loss did not reach as having a gradient of zero,
            instead of raising.

        Returns
        -------
        model, optimizer[, scheduler]
            The same objects; optimizer and scheduler act once per step from now on.

        Raises
        ------
        UsageError
            It was called before, or something is of the wrong kind.
        MismatchError
            Models differ between workers.
        CheckpointError
            The checkpoint to resume from is of another model.
        """
        self._state.check_outside("job.prepare")
        self._check_arguments(model, optimizer)
        model.to(self.device)
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not trainable:
            raise UsageError(
                problem="the model has no trainable parameter",
                remedy="set requires_grad on what shall be trained",
            )
        made = optimizer(trainable)
        if not isinstance(made, torch.optim.Optimizer):
            raise UsageError(
                problem=f"the optimizer function returned a {type(made).__name__}",
                remedy="return a torch.optim.Optimizer",
            )
        check_alike(self._comm, model, made)
        self._strategy = AllReduce(
            self._comm,
            num_slots=self._num_leaves,
            slots=self._microslots,
            exact=self.config.reduction == "exact",
            bucket_bytes=self.config.bucket_bytes,
        )
        self._strategy.attach(model, allow_unused=allow_unused)
        if not self._keeper.resumed:
            tensors = [t.detach() for t in (*model.parameters(), *model.buffers())]
            self._comm.broadcast("initial weights", tensors)
        self._keeper.add("model", model)
        gate_optimizer(made, self._state)
        schedule = None if scheduler is None else scheduler(made)
        # After the scheduler is made: making it sets the learning rate to that of step 0.
        self._keeper.add("optimizer", made)
        if schedule is None:
            return model, made
        self._keeper.add("scheduler", schedule)
        gate_scheduler(schedule, self._state)
        return model, made, schedule

    def _check_arguments(self, model: Any, optimizer: Any) -> None:
        if self._strategy is not None:
            raise UsageError(
                problem="job.prepare was called twice",
                remedy="put several models into one torch.nn.ModuleDict",
            )
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                problem=f"job.prepare got a {type(model).__name__} as the model",
                remedy="pass a torch.nn.Module",
            )
        if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
            raise UsageError(
                problem=f"job.prepare got a {type(optimizer).__name__} as the optimizer",
                remedy="pass a function that makes it: lambda params: AdamW(params, lr=1e-3)",
            )

    def register(self, name: str, part: Any) -> Any:
        """Add state to the checkpoints (an average of weights, a curriculum); return `part`.

        Parameters
        ----------
        name : str
            Unique in the job.
        part : object with ``state_dict`` and ``load_state_dict``
            Its state must be alike on every worker, and made of tensors, numbers, strings,
            lists and dicts. A resumed job loads it here.
        """
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise UsageError(
                problem=f"job.register got a {type(part).__name__}",
                remedy="give it state_dict() and load_state_dict(state)",
            )
        self._keeper.add(f"extra.{name}", part)
        return part

    # --- the loops --------------------------------------------------------------------------

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs that are still to do. Every rank must loop over it."""
        self._state.check_outside("job.epochs")
        self._in_epochs = True
        for epoch in range(self._position.epoch, num_epochs):
            self._num_epochs = num_epochs
            self._loader_index = 0
            self._state.begin_epoch(self._position.num_scheduled)
            yield epoch
            self._state.end_epoch()
            self._position = Position(epoch=epoch + 1)
        self._in_epochs = False

    def loader(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        shuffle: bool = True,
        accumulate: int = 1,
        tail: Tail = "short",
        max_steps: int | None = None,
    ) -> Loader:
        """Return an iterable over this worker's batches of the current epoch.

        The loop's body runs once for every slot that this worker computes; gradients,
        optimizer, scheduler and clipping act once per step, in its last one.

        Parameters
        ----------
        dataset : Dataset
            `ParquetDataset`, `ArrayDataset` or another.
        batch_size : int
            Rows of a step over all workers: the global batch.
        shuffle : bool, default=True
        accumulate : int, default=1
            Cut a slot's rows into so many batches, to need less memory. Changes rounding.
        tail : {"short", "drop", "pad"}, default="short"
            Whether rows that fill no batch are a shorter one, left out, or filled up to a full
            one with copies that weigh nothing in the step: use `Batch.mask` or `Batch.weight`.
        max_steps : int, optional
            End the epoch after so many steps.
        """
        return Loader(
            self,
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            accumulate=accumulate,
            tail=tail,
            max_steps=max_steps,
        )

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for forward and loss: bf16 autocast if so configured, else nothing."""
        enabled = self.config.precision == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a batch's loss, in place of ``loss.backward()``.

        In the last batch of a step it also exchanges: afterwards every parameter's ``grad``
        is that of the mean loss over all rows of the step. Then it blocks, and every rank
        must call it.

        Parameters
        ----------
        loss : Tensor of one element
            The mean over the rows of the batch.

        Raises
        ------
        UsageError
            Called twice for a batch, outside of a loader, or a parameter got no gradient.
        PeerLostError
            Another worker ended.
        """
        last = self._state.backward()
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
        self._strategy.backward(
            loss,
            weight=self._weight,
            position=self._slot_position,
            slot_weight=self._slot_weight,
        )
        if last:
            self._exchange(self._strategy)
        self._state.after_backward()

    def _exchange(self, strategy: AllReduce) -> None:
        if self._comm.world_size == 1:
            strategy.exchange(b"")
            return
        summary = self._pending[1] if self._pending else None
        record = json.dumps({"metrics": summary, "stop": self._stop_request}).encode()
        records = [json.loads(data) for data in strategy.exchange(record)]
        stops = [other["stop"] for other in records if other["stop"]]
        self._stop_agreed = stops[0] if stops else None
        if self._pending:
            self._record_step([other["metrics"] for other in records])

    # --- what the loader calls --------------------------------------------------------------

    def _enter_loader(self, loader: Loader) -> int | None:
        """Return the row to start from, or None if this loader is used up."""
        self._state.check_outside("job.loader")
        if not self._in_epochs:
            raise UsageError(
                problem="job.loader was read outside of job.epochs",
                remedy="loop over `for epoch in job.epochs(n)` around it",
            )
        if self._strategy is None:
            raise UsageError(
                problem="job.loader was read before job.prepare",
                remedy="call job.prepare(model, optimizer) before the loop",
            )
        index = self._loader_index
        self._loader_index += 1
        if index < self._position.loader:
            return None
        check_same(self._comm, "the loader", repr(loader))
        loader.check_data(self._position.data)
        for text in loader.warnings():
            self._warn_once(text)
        self._position = replace(self._position, data=loader.fingerprint)
        if not self._planned:
            self._announce(loader)
        return self._position.row

    def _announce(self, loader: Loader) -> None:
        self._planned = True
        sizes = loader.describe()
        self._recorder.event(
            "plan", total_steps=sizes["steps_per_epoch"] * self._num_epochs, **sizes
        )
        few = loader.rows_per_slot < FEW_ROWS_PER_SLOT
        if few and self.config.slots > 1 and self.config.reduction == "exact":
            better = max(1, sizes["batch_size"] // FEW_ROWS_PER_SLOT)
            text = (
                f"a batch of {sizes['batch_size']} rows makes {loader.rows_per_slot} in each of "
                f"{self.config.slots} slots; it would train faster with --slots {better} or with "
                f"batches of {self.config.slots * FEW_ROWS_PER_SLOT} rows"
            )
            self._warn(text)

    def _begin_slot(self, position: int) -> None:
        assert self._strategy is not None
        self._strategy.begin_slot(position)

    def _hand_out(
        self, *, position: int, slot: int, weight: float, slot_weight: float | None, last: bool
    ) -> None:
        self._slot_position = position
        self._slot = slot
        self._weight = weight
        self._slot_weight = slot_weight
        self._step_metrics.begin_batch()
        self._state.hand_out(last=last)

    def _take_back(self) -> None:
        self._state.take_back()

    def _end_step(self, num_rows: int, rows_after: int) -> None:
        """Commit a step: count it, record it, write a checkpoint if one is due, stop if asked."""
        self.step += 1
        self._position = replace(self._position, row=rows_after)
        about = {"step": self.step, "epoch": self.epoch, "rows": num_rows}
        self._pending = about, self._step_metrics.summary()
        self._step_metrics = StepMetrics()
        if self._comm.world_size == 1:
            self._record_step([self._pending[1]])
            self._stop_agreed = self._stop_request
        evaluated, self._evaluated_in_step = self._evaluated_in_step, {}
        if not self._keeper.keep_best(self.step, self._place(), evaluated):
            self._keeper.save_if_due(self.step, self._place())
        if self._stop_agreed is not None:
            self._flush_metrics()
            self._keeper.save(self.step, self._place(), wait=True)
            raise JobStoppedError(step=self.step, reason=self._stop_agreed)

    def _place(self) -> Position:
        return replace(self._position, num_scheduled=self._state.num_scheduled)

    def _leave_loader(self, *, whole: bool) -> None:
        if not whole:
            self._state.leave_early()
            return
        self._state.leave()
        self._flush_metrics()
        self._position = Position(epoch=self.epoch, loader=self._position.loader + 1)
        self._seed_between_steps()

    def _seed(self, slot: int) -> None:
        """Seed the global generators for a slot of the step at hand."""
        self._slot_seed = slot_seed(self.config.seed, self.step, slot)
        seed_all(self._slot_seed)

    def _seed_between_steps(self) -> None:
        self._seed(self.config.slots)

    # --- logging ----------------------------------------------------------------------------

    def log(self, **values: Any) -> None:
        """Log means over the rows of the batch at hand; a step's value is the mean over all.

        Exact: the same bits for any number of workers. Does not block; tensors are read when
        the step is over.

        Raises
        ------
        UsageError
            No batch is at hand, a value is not one number, or a name was logged for the batch
            already.
        """
        if not self._state.inside:
            self._state.check_whole()
            raise UsageError(
                problem="job.log was called outside of a loader",
                remedy="log values of the whole job with job.log_step",
            )
        self._step_metrics.add(self._slot, self._weight, values)

    def log_step(self, **values: Any) -> None:
        """Log values that are alike on every worker: a learning rate, a norm, a final score.

        Within a loader they belong to the step; called in batches before the step's last one
        it does nothing. Outside they belong to the job, at its current step.
        """
        if not self._state.inside:
            self._state.check_whole()
            numbers = {name: float(value) for name, value in values.items()}
            self.metrics.update(numbers)
            self._recorder.metrics("summary", self.step, numbers, epoch=self.epoch)
        elif self._state.step_reduced:
            self._step_metrics.set_alike(values)

    def _flush_metrics(self) -> None:
        """Exchange the last step's metrics, which no later step carries."""
        if self._pending is not None:
            payload = json.dumps(self._pending[1]).encode()
            self._record_step(
                [json.loads(data) for data in self._comm.all_gather("metrics", payload)]
            )

    def _record_step(self, summaries: list[dict[str, Any]]) -> None:
        assert self._pending is not None
        about, _ = self._pending
        self._pending = None
        values = combine(summaries, self._num_leaves)
        self.metrics.update(values)
        self._recorder.metrics(
            "step", about["step"], values, epoch=about["epoch"], rows=about["rows"]
        )

    # --- evaluating and saving --------------------------------------------------------------

    def evaluate(
        self,
        function: EvaluationFunction,
        dataset: Dataset,
        *,
        batch_size: int = 4096,
        name: str = "evaluation",
    ) -> Evaluation:
        """Evaluate on a data set, every row once. Blocks; every rank must call it.

        The prepared model is in evaluation mode and without gradients meanwhile. The result is
        logged, and the values per row are written to ``evaluations/<name>.parquet`` of the run
        directory; columns ``score`` and ``label`` there get a calibration plot in the report.

        Parameters
        ----------
        function : callable
            Gets a `Batch` and returns a dict of numbers (means over its rows) and of 1-D
            tensors (a value per row).
        dataset : Dataset
        batch_size : int, default=4096
            Rows that `function` gets at once. Not split into slots.
        name : str, default="evaluation"
            What is evaluated on: the prefix of its metrics.

        Returns
        -------
        Evaluation
            Its ``metrics`` and ``rows`` are the same bits on every worker, and for any number
            of workers.
        """
        self._state.check_outside("job.evaluate")
        step = self.step + self._state.inside  # inside, the step at hand is taken already
        about = f"{name!r} of data {dataset.fingerprint[:12]} by {batch_size} rows"
        check_same(self._comm, "the data of job.evaluate", about)
        self._seed_between_steps()  # for `slot_seed`, else of this worker's last slot
        with evaluating(self._keeper.part("model")):
            evaluation = evaluate(
                function,
                dataset,
                name=name,
                unit_rows=batch_size,
                comm=self._comm,
                device=self.device,
                seed=self.config.seed,
                step=step,
            )
        self._seed_between_steps()
        self._recorder.metrics("evaluation", step, evaluation.metrics, name=name, epoch=self.epoch)
        metrics = {f"{name}/{key}": value for key, value in evaluation.metrics.items()}
        self.metrics.update(metrics)
        self._evaluated.update(metrics)
        if self._recorder.active and evaluation.rows:
            write_rows(evaluation, self._recorder.run.evaluations / f"{name}.parquet")
        if self._state.inside:
            self._evaluated_in_step.update(metrics)
        else:
            self._keeper.keep_best(self.step, self._place(), metrics)
        return evaluation

    def save(
        self,
        model: torch.nn.Module,
        example: Batch | Sequence[torch.Tensor],
        *,
        preprocessor: Any = None,
    ) -> None:
        """Save a model for prediction, into the run directory's ``model`` folder.

        Parameters
        ----------
        model : torch.nn.Module
            What predicts: the prepared model, or one that wraps it (with a sigmoid, say).
        example : Batch or sequence of Tensor
            The arguments of one call. Of a batch: its features, its categories, or both.
        preprocessor : Preprocessor, optional
            Saved with the model, which then predicts from raw columns.
        """
        from farandole.job.model import save_model

        self._state.check_outside("job.save")
        if self._recorder.active:
            if isinstance(example, Batch):
                example = [t for t in (example.features, example.categories) if t is not None]
            with evaluating(model):
                save_model(self._recorder.run.model, model, tuple(example), preprocessor)
            self._recorder.event("model", path=str(self._recorder.run.model))
        self._seed_between_steps()

    # --- the end ----------------------------------------------------------------------------

    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop after the same step. Safe in a signal handler."""
        self._stop_request = reason

    def finish(self) -> None:
        """Check that all loops were read to their end, and write the last checkpoint."""
        self._state.check_outside("the end of the training function")
        self._check_best()
        self._keeper.save(self.step, self._place(), wait=True)

    def _check_best(self) -> None:
        """Warn if no evaluation, of this start or an earlier one, gave `checkpoint.best`."""
        best = self.config.checkpoint.best
        if best is None or best in self._evaluated or not self._recorder.active:
            return
        names = self._evaluated.union(
            f"{record['name']}/{key}"
            for record in self._recorder.run.metrics()
            if record["kind"] == "evaluation"
            for key in record["values"]
        )
        if best not in names:
            self._warn(describe_missing(best, names))

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)

    def _warn(self, text: str) -> None:
        self._recorder.event("warning", message=text)
        if self._recorder.active:
            _log.warning(text)

    def close(self) -> None:
        """Free what the job holds, also after an error. Waits for a checkpoint being written."""
        if self._strategy is not None:
            self._strategy.close()
            self._strategy = None
        self._keeper.close()


__all__ = ["Batch", "Job"]
