"""Batches outside a job: the plan of a data set for any loop, in any framework."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, Literal

from farandole.data.block import RowBlock, concatenate
from farandole.errors import (
    ConfigError,
    ConfigProblem,
    FarandoleError,
    MissingExtraError,
    UsageError,
)
from farandole.plan.slots import default_slots, slots_of
from farandole.plan.state import PlanState
from farandole.plan.steps import Steps, Tail
from farandole.protocols import Blocks, Dataset

_ADAPTERS = {
    "torch": ("farandole.loaders.torch", "TorchLoader"),
    "jax": ("farandole.integrations.jax", "JaxLoader"),
    "numpy": (__name__, "BatchLoader"),
}


class BatchLoader:
    """An iterable over one rank's batches of an epoch. Made by ``dataset.loader(...)``.

    The global batch of a step is the same rows for any number of ranks; each rank gets the
    rows of its slots, and all ranks make the same number of steps. Iterating starts the epoch
    at its beginning, except once after `load_state_dict`: then it goes on from there. An epoch
    that was read to its end is followed by the next one.

    Iterating blocks while rows are read, and raises DataError or ColumnError for what is wrong
    with them. Ranks do not communicate.

    Parameters
    ----------
    dataset : Dataset
    batch_size : int
        Rows of a step over all ranks: the global batch.
    shuffle : bool, default=True
    seed : int, default=0
    epoch : int, default=0
        The first epoch.
    num_slots : int, optional
        Equal shares into which a batch is cut, and the most ranks that may share it. It decides
        the order of rows along with the seed. By default a divisor of `batch_size`, up to 48,
        that many numbers of ranks divide, so that these get equally many rows.
    tail : {"short", "drop", "pad"}, default="short"
        Whether rows that fill no batch are a shorter one, left out, or filled up to a full one
        with copies, for which ``batch.mask`` is False.
    rank, world_size : int, optional
        By default those of torch.distributed where it is initialised when iterating starts,
        else 0 and 1.

    Attributes
    ----------
    epoch : int
        The epoch that iterating reads next, or is reading.
    step_rows : int
        Rows of the step at hand over all ranks. A mean over a rank's rows, weighted with
        ``len(batch) / loader.step_rows`` and summed over ranks, is the mean over the batch.

    Raises
    ------
    ConfigError
        If a number is out of range.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        epoch: int = 0,
        num_slots: int | None = None,
        tail: Tail = "short",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        _check(batch_size=batch_size, num_slots=num_slots, seed=seed, epoch=epoch)
        if (rank is None) != (world_size is None):
            raise UsageError(
                problem=f"rank={rank} and world_size={world_size}", remedy="give both or neither"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        if num_slots is None:
            num_slots = default_slots(batch_size // 2 if tail == "pad" else batch_size)
        self._num_slots = num_slots
        self._tail: Tail = tail
        self._place = None if rank is None or world_size is None else (rank, world_size)
        self._position = (epoch, 0)
        self._resumes = False
        self.step_rows = 0

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._dataset!r}, batch_size={self._batch_size}, "
            f"shuffle={self._shuffle}, seed={self._seed}, num_slots={self._num_slots})"
        )

    # --- epochs ---------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that iterating reads next, or is reading."""
        return self._position[0]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that iterating reads next.

        A place within this epoch that `load_state_dict` has set is kept.
        """
        _check(epoch=epoch)
        if epoch != self.epoch:
            self._position, self._resumes = (epoch, 0), False

    def epochs(self, num_epochs: int) -> Generator[int]:
        """Yield the epochs from the one at hand up to `num_epochs`, and choose each in turn."""
        for epoch in range(self.epoch, num_epochs):
            self.set_epoch(epoch)
            yield epoch

    def __len__(self) -> int:
        """Return the steps of a whole epoch: the same on all ranks. May read footers."""
        return self._plan(self.epoch, 0).num_steps

    # --- state ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the batches handed out: the same on all ranks, under 200 bytes.

        With it, an epoch can go on with another number of ranks or another batch size.
        """
        epoch, row = self._position
        state = PlanState.after(self._plan(epoch, row), 0, self._dataset.fingerprint)
        return {**state.to_dict(), "slots": self._num_slots, "shuffle": self._shuffle}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a place; seed, slots and shuffling become those of the state.

        Raises
        ------
        PlanStateError
            If this is no state of a loader, or one of other data, or of another order than this
            version and these options give.
        ConfigError
            If the batch size is below the number of slots of the state.
        """
        values = dict(state_dict)
        slots, shuffle = values.pop("slots", None), values.pop("shuffle", self._shuffle)
        state = PlanState.from_dict(values)
        _check(batch_size=self._batch_size, num_slots=slots)
        before = self._seed, self._num_slots, self._shuffle
        self._seed, self._num_slots, self._shuffle = state.seed, slots, shuffle
        try:
            state.check(self._plan(state.epoch, 0), self._dataset.fingerprint)
        except FarandoleError:
            self._seed, self._num_slots, self._shuffle = before
            raise
        self._position, self._resumes = (state.epoch, state.rows), True

    # --- batches --------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over this rank's batches, from the beginning or where it stood."""
        if not self._resumes:
            self._position = (self._next_epoch(), 0)
        self._resumes = False
        return self._batches(*self._position)

    def to_tf(self) -> Any:
        """Return a ``tf.data.Dataset`` of this rank's batches; iterating it is iterating this.

        Its elements are dicts of tensors: ``row_ids``, and what there is of ``features``,
        ``categories``, ``label``, ``mask`` and ``columns``, a dict by name. Masked columns are
        dicts of ``values`` and ``valid``, ragged ones of ``values`` and ``offsets``; texts are
        strings, null an empty one. Blocks for a batch, from which the types are known. TensorFlow
        reads ahead, so `state_dict` counts batches that were read, not those that were used.

        Raises
        ------
        MissingExtraError
            If TensorFlow is not installed.
        ColumnError
            If TensorFlow has no type for a column.
        """
        try:
            adapter = importlib.import_module("farandole.integrations.tensorflow")
        except ModuleNotFoundError as error:
            if error.name != "tensorflow":
                raise
            raise MissingExtraError(
                extra="tensorflow", package="tensorflow", purpose="loader.to_tf"
            ) from error
        return adapter.to_tf(self)

    def _next_epoch(self) -> int:
        return self.epoch

    def _batches(self, epoch: int, start_row: int) -> Iterator[Any]:
        plan = self._plan(epoch, start_row)
        for step, block in enumerate(self._blocks(plan)):
            self._position, self.step_rows = (epoch, plan.rows_after(step)), plan.step_rows(step)
            yield self._convert(block)
        self._position = (epoch + 1, 0)

    def _blocks(self, plan: Steps) -> Iterator[RowBlock]:
        """Yield this rank's rows of each step."""
        slots = self._slots()
        if slots:
            whole = getattr(self._dataset, "read_steps", None)
            if whole is None or plan.tail == "pad":  # each slot is padded by itself
                yield from step_blocks(self._dataset.read(plan, slots), plan, slots)
            else:
                with closing(whole(plan, slots)) as blocks:
                    yield from blocks

    def _convert(self, block: RowBlock) -> Any:
        """Return a block as what the loop gets."""
        return block

    def _slots(self) -> range:
        rank, world_size = self._place or self._current_place()
        if not 0 <= rank < world_size <= self._num_slots:
            expected = f"rank < world_size <= {self._num_slots}, the slots; or pass more num_slots"
            key = "rank, world_size"
            problem = ConfigProblem(key=key, value=(rank, world_size), expected=expected)
            raise ConfigError(problems=(problem,))
        return slots_of(rank, world_size, self._num_slots)

    def _current_place(self) -> tuple[int, int]:
        """Return rank and world size of the process group, if there is one."""
        # Where torch.distributed was never imported there is none.
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return 0, 1
        if not distributed.is_initialized():
            return 0, 1
        return distributed.get_rank(), distributed.get_world_size()

    def _plan(self, epoch: int, start_row: int) -> Steps:
        return self._dataset.epoch_plan(
            seed=self._seed,
            epoch=epoch,
            batch_size=self._batch_size,
            num_slots=self._num_slots,
            start_row=start_row,
            shuffle=self._shuffle,
            tail=self._tail,
        )


class Loadable:
    """What every data set can do outside a job. A mix-in."""

    def loader(
        self: Any,
        *,
        batch_size: int,
        as_: Literal["torch", "numpy", "jax"] = "torch",
        **options: Any,
    ) -> BatchLoader:
        """Return an iterable over this rank's batches, for a loop outside a job.

        Parameters
        ----------
        batch_size : int
            Rows of a step over all ranks: the global batch.
        as_ : {"torch", "numpy", "jax"}, default="torch"
            What the loop gets: `Batch` of tensors, `RowBlock` of numpy arrays, or `RowBlock` of
            JAX arrays.
        **options
            See `BatchLoader`, and for torch `TorchLoader`: ``shuffle=True``, ``seed=0``,
            ``epoch=0``, ``num_slots``, ``tail="short"``, ``rank`` and ``world_size``.

        Raises
        ------
        MissingExtraError
            If the framework is not installed.
        ConfigError
            If a number is out of range.
        """
        if as_ not in _ADAPTERS:
            expected = f"one of {', '.join(_ADAPTERS)}"
            problem = ConfigProblem(key="as_", value=as_, expected=expected)
            raise ConfigError(problems=(problem,))
        module, name = _ADAPTERS[as_]
        try:
            make: Callable[..., BatchLoader] = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "jax"):
                raise
            purpose = f"loader(as_={as_!r})"
            raise MissingExtraError(extra=as_, package=error.name, purpose=purpose) from error
        return make(self, batch_size=batch_size, **options)


def step_blocks(blocks: Blocks, plan: Steps, slots: range) -> Iterator[RowBlock]:
    """Yield one block for each step, of the blocks of its slots, padded if the plan says so."""
    try:
        for step in range(plan.num_steps):
            parts = [next(blocks) for _ in slots]
            if plan.tail == "pad":
                sizes = [plan.padded_slot_rows(step, slot) for slot in slots]
                parts = [part.padded(size) for part, size in zip(parts, sizes, strict=True)]
            yield concatenate(parts)
    finally:
        blocks.close()


def _check(**numbers: Any) -> None:
    """Raise ConfigError for numbers that are out of range; None is left out."""
    problems: list[ConfigProblem] = []
    for key, value in numbers.items():
        least = 1 if key in ("batch_size", "num_slots") else 0
        if value is not None and (not isinstance(value, int) or value < least):
            expected = f"a whole number from {least} up"
            problems.append(ConfigProblem(key=key, value=value, expected=expected))
    batch_size, num_slots = numbers.get("batch_size"), numbers.get("num_slots")
    if not problems and batch_size and num_slots and batch_size < num_slots:
        expected = f"at least {num_slots}, one row for each slot"
        problems.append(ConfigProblem(key="batch_size", value=batch_size, expected=expected))
    if problems:
        raise ConfigError(problems=tuple(problems))
