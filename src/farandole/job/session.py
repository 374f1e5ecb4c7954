"""The job as the training function sees it: ordinary PyTorch, and nothing of ranks or failures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch

from farandole.config import JobConfig
from farandole.errors import UsageError
from farandole.job.batch import Batch
from farandole.job.evaluation import Evaluation, EvaluationFunction, Evaluations, evaluating
from farandole.job.gates import gate_optimizer, gate_scheduler
from farandole.job.likeness import check_alike
from farandole.job.loader import Loader
from farandole.job.metrics import to_scalar
from farandole.job.steps import JobSteps

if TYPE_CHECKING:
    from farandole.job.keeper import StateKeeper
    from farandole.job.recorder import Recorder
    from farandole.plan.steps import Tail
    from farandole.protocols import Comm, Dataset

OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]


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
        self._comm = comm
        self._recorder = recorder
        self._keeper = keeper
        self._steps = JobSteps(config, comm, recorder, keeper)
        self._state = self._steps.state
        self._records = self._steps.records
        self._evaluations = Evaluations(config, comm, recorder, device)

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
        return self._steps.position.epoch

    @property
    def step(self) -> int:
        """How many steps are committed; the same on every worker."""
        return self._steps.step

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of everything logged; those of evaluations as ``name/metric``."""
        return self._records.latest

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
        return self._steps.slot_seed

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
        if {id(p) for p in trainable}.isdisjoint(
            id(p) for group in made.param_groups for p in group["params"]
        ):
            raise UsageError(
                problem="the optimizer has none of the model's parameters",
                remedy="make it of those that the function gets: lambda params: AdamW(params)",
            )
        check_alike(self._comm, model, made)
        self._steps.attach(model, made, allow_unused=allow_unused)
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
        if self._steps.prepared:
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
        return self._steps.epochs(num_epochs)

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
            self._steps,
            dataset,
            device=self.device,
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
        self._steps.backward(loss)

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
        at = self._steps.microstep
        self._records.current.add(at.slot, at.weight, values)

    def log_step(self, **values: Any) -> None:
        """Log values that are alike on every worker: a learning rate, a norm, a final score.

        Within a loader they belong to the step; called in batches before the step's last one
        it does nothing. Outside they belong to the job, at its current step.
        """
        if not self._state.inside:
            self._state.check_whole()
            numbers = {name: float(to_scalar(name, value)) for name, value in values.items()}
            self._records.record_alike("summary", self.step, numbers, epoch=self.epoch)
        elif self._state.step_reduced:
            self._records.current.set_alike(values)

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
        self._steps.seed_between_steps()  # for `slot_seed`, else of this worker's last slot
        evaluation = self._evaluations.evaluate(
            function,
            dataset,
            name=name,
            batch_size=batch_size,
            step=step,
            model=self._keeper.part("model"),
        )
        self._steps.seed_between_steps()
        metrics = evaluation.metrics
        self._records.record_alike("evaluation", step, metrics, name=name, epoch=self.epoch)
        self._steps.evaluated({f"{name}/{key}": value for key, value in metrics.items()})
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
        self._steps.seed_between_steps()

    # --- the end ----------------------------------------------------------------------------

    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop after the same step. Safe in a signal handler."""
        self._steps.request_stop(reason)

    def finish(self) -> None:
        """Check that all loops were read to their end, and write the last checkpoint."""
        self._state.check_ended()
        self._steps.check_epochs()
        self._evaluations.check_best()
        self._keeper.save(self.step, self._steps.place(), wait=True)

    def close(self) -> None:
        """Free what the job holds, also after an error. Waits for a checkpoint being written."""
        self._steps.close()
        self._keeper.close()


__all__ = ["Batch", "Job"]
