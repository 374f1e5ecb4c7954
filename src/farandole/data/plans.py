"""Make an epoch's plan for a data set, with errors that a user can act upon."""

from __future__ import annotations

from collections.abc import Iterable

from farandole.errors import ConfigError, ConfigProblem, DataError
from farandole.plan.lanes import EpochPlan
from farandole.plan.steps import EpochSettings, smallest_batch
from farandole.protocols import Dataset, Warns


def make_epoch_plan(name: str, shard_rows: tuple[int, ...], settings: EpochSettings) -> EpochPlan:
    """Return the plan of an epoch of the data set called `name`.

    Raises
    ------
    ConfigError
        If the batch is too small for the number of slots.
    DataError
        If the data set has too few rows for a step.
    """
    check_sizes(name, sum(shard_rows), settings)
    return EpochPlan(shard_rows, **settings)


def shape_of(dataset: Dataset, settings: EpochSettings) -> EpochPlan:
    """Return a plan of a data set's that tells its shards and windows, for plans upon it.

    Raises
    ------
    DataError
        If it has no plan of its own: it is a mix or a sample itself.
    """
    shape: EpochSettings = {**settings, "seed": 0, "epoch": 0, "batch_size": 1, "num_slots": 1}
    plan = dataset.epoch_plan(**{**shape, "start_row": 0, "tail": "short"})
    if not isinstance(plan, EpochPlan):
        raise DataError(
            path=repr(dataset),
            problem="is a mix or a sample, upon which no other can be built",
            remedy="mix or sample the data sets themselves",
        )
    return plan


def warnings_of(datasets: Iterable[Dataset]) -> list[str]:
    """Return what data sets have to tell, each thing once."""
    told = (dataset.warnings() for dataset in datasets if isinstance(dataset, Warns))
    return list(dict.fromkeys(text for texts in told for text in texts))


def check_sizes(name: str, num_rows: int, settings: EpochSettings) -> None:
    """Raise ConfigError or DataError if rows and a batch are too few for the slots."""
    batch_size, num_slots = settings["batch_size"], settings["num_slots"]
    tail = settings.get("tail", "short")
    smallest = smallest_batch(num_slots, tail)
    if batch_size < smallest:
        each = "two rows for each slot, to pad" if tail == "pad" else "one row for each slot"
        expected = f"at least {smallest}, {each}"
        problem = ConfigProblem(key="batch_size", value=batch_size, expected=expected)
        raise ConfigError(problems=(problem,))
    if num_rows < num_slots:
        raise DataError(
            path=name,
            problem=f"{num_rows} rows are fewer than the {num_slots} slots of a batch",
            remedy=f"use at most {num_rows} slots",
        )
    if tail == "drop" and num_rows < batch_size:
        raise DataError(
            path=name,
            problem=f"{num_rows} rows fill no batch of {batch_size}, and the tail is dropped",
            remedy="use a smaller batch, or tail='short'",
        )
