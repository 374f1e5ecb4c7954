"""Make an epoch's plan for a data set, with errors that a user can act upon."""

from __future__ import annotations

from typing import Literal

from farandole.errors import ConfigError, ConfigProblem, DataError
from farandole.plan.lanes import DEFAULT_WINDOW_ROWS, EpochPlan


def make_epoch_plan(
    name: str,
    shard_rows: tuple[int, ...],
    *,
    seed: int,
    epoch: int,
    batch_size: int,
    num_slots: int,
    start_row: int = 0,
    shuffle: bool = True,
    tail: Literal["short", "drop"] = "short",
    window_rows: int = DEFAULT_WINDOW_ROWS,
) -> EpochPlan:
    """Return the plan of an epoch of the data set called `name`.

    Raises
    ------
    ConfigError
        If the batch is smaller than the number of slots.
    DataError
        If the data set has too few rows for a step.
    """
    if batch_size < num_slots:
        expected = f"at least {num_slots}, one row for each slot"
        problem = ConfigProblem(key="batch_size", value=batch_size, expected=expected)
        raise ConfigError(problems=(problem,))
    num_rows = sum(shard_rows)
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
    return EpochPlan(
        shard_rows=shard_rows,
        seed=seed,
        epoch=epoch,
        batch_size=batch_size,
        num_slots=num_slots,
        start_row=start_row,
        shuffle=shuffle,
        tail=tail,
        window_rows=window_rows,
    )
