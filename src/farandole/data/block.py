"""Rows as numpy arrays: what data sets give, and what transforms take and return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farandole.data import columns
from farandole.data.columns import Chunks, Column, Masked, runs, take
from farandole.errors import UsageError
from farandole.plan.lanes import EpochPlan
from farandole.plan.random import Stream, generator, row_uniforms

Array = NDArray[Any]


@dataclass(frozen=True)
class RowBlock:
    """Some rows of a data set.

    Attributes
    ----------
    row_ids : ndarray of int64, shape (n,)
        Place of each row in the data set, among the rows selected.
    features : ndarray of float32, shape (n, F), or None
        Row-major.
    categories : ndarray of int64, shape (n, C), or None
        Codes from a `Preprocessor`.
    label : ndarray of int64 or float32, shape (n,), or None
    columns : dict of str to column
        Columns asked for by name: an ndarray of shape (n, ...), `Masked`, `Ragged`, or a
        pyarrow.Array of what is no number.
    seed : int
        The job's; 0 outside training.
    epoch : int or None
        None outside training.
    source : ndarray of int64, shape (n,), or None
        Of a mix: from which data set each row is, by its place in the mix.
    mask : ndarray of bool, shape (n,), or None
        Of a padded block: False for copies that must not count.
    """

    row_ids: NDArray[np.int64]
    features: NDArray[np.float32] | None = None
    categories: NDArray[np.int64] | None = None
    label: Array | None = None
    columns: Mapping[str, Column] = field(default_factory=dict[str, Column])
    seed: int = 0
    epoch: int | None = None
    source: NDArray[np.int64] | None = None
    mask: NDArray[np.bool_] | None = None

    @property
    def num_rows(self) -> int:
        """Rows in this block."""
        return len(self.row_ids)

    def rng(self) -> np.random.Generator:
        """Return a generator for a transform, seeded by the seed, the epoch and the first row.

        Each call returns one that begins anew. No two blocks of an epoch have the same, and a
        block has the same whichever worker reads it; blocks of another batch size or number
        of slots begin with other rows, and so have others. See `uniform`.
        """
        first = int(self.row_ids[0]) if self.num_rows else 0
        epoch = 0 if self.epoch is None else self.epoch + 1
        return generator(self.seed, Stream.TRANSFORM, epoch, first)

    def uniform(self, num_values: int = 1) -> NDArray[np.float64]:
        """Return random numbers from 0 up to 1 that hang on the seed, the epoch and the row.

        They are the same for a row whatever the batch size, the number of slots and workers.

        Parameters
        ----------
        num_values : int, default=1
            For each row.

        Returns
        -------
        ndarray of float64, shape (n, num_values)
        """
        epoch = 0 if self.epoch is None else self.epoch + 1
        return row_uniforms(self.seed, epoch, self.row_ids, num_values)

    def arrays(self) -> list[Array]:
        """Return all numpy arrays of one entry (or more) for each row, in a fixed order."""
        named = [self.row_ids, self.features, self.categories, self.label]
        for column in self.columns.values():
            if isinstance(column, Masked):
                named += [column.values, column.valid]
            elif isinstance(column, np.ndarray):
                named.append(column)
        named += [self.source, self.mask]
        return [array for array in named if array is not None]

    def chunks(self) -> list[Chunks]:
        """Return the columns of a buffer whose values have no fixed size, in a fixed order."""
        return [column for column in self.columns.values() if isinstance(column, Chunks)]

    def take(self, rows: NDArray[np.intp]) -> RowBlock:
        """Return a copy of the rows at these places of the block."""
        return self.map(lambda column: take(column, rows))

    def slice(self, start: int, stop: int) -> RowBlock:
        """Return a view of a run of rows."""
        return self.map(lambda column: column[start:stop])

    def map(self, function: Callable[[Column], Column]) -> RowBlock:
        """Return a block of what `function` makes of each column, `row_ids` and features too."""
        return replace(
            self,
            row_ids=function(self.row_ids),
            features=None if self.features is None else function(self.features),
            categories=None if self.categories is None else function(self.categories),
            label=None if self.label is None else function(self.label),
            columns={name: function(column) for name, column in self.columns.items()},
            source=None if self.source is None else function(self.source),
            mask=None if self.mask is None else function(self.mask),
        )

    def padded(self, num_rows: int) -> RowBlock:
        """Return a block of `num_rows`, some of them copies, with a mask.

        Copies stand behind their originals, spread over the block.
        """
        rows = np.arange(num_rows) * self.num_rows // num_rows
        return replace(self.take(rows), mask=np.diff(rows, prepend=-1) > 0)


def copy_rows(source: RowBlock, start: int, stop: int, out: RowBlock, at: int) -> None:
    """Copy a run of rows of one buffer into rows `at` and following of another."""
    for array, target in zip(source.arrays(), out.arrays(), strict=True):
        target[at : at + stop - start] = array[start:stop]
    for chunks, target in zip(source.chunks(), out.chunks(), strict=True):
        target.put(at, chunks[start:stop])


def copy_runs(
    source: RowBlock,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    out: RowBlock,
    targets: NDArray[np.int64],
) -> None:
    """Copy several runs of rows of one buffer, each into rows ``targets[i]`` and following."""
    rows, places = runs(starts, sizes), runs(targets, sizes)
    for array, target in zip(source.arrays(), out.arrays(), strict=True):
        target[places] = array.take(rows, axis=0)
    put_chunks(source, starts, sizes, out, targets)


def take_rows(source: RowBlock, rows: NDArray[np.int64], out: RowBlock) -> None:
    """Copy rows of one buffer's arrays into another's; places beyond the end give the last row."""
    for array, target in zip(source.arrays(), out.arrays(), strict=True):
        # Without a mode, take would go through a buffer of its own.
        array.take(rows, axis=0, out=target, mode="clip")


def put_chunks(
    source: RowBlock,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    out: RowBlock,
    targets: NDArray[np.int64],
) -> None:
    """Copy runs of rows of one buffer's chunks into another's, as `copy_runs` does."""
    starts, sizes, targets = starts.ravel(), sizes.ravel(), targets.ravel()
    for chunks, target in zip(source.chunks(), out.chunks(), strict=True):
        for start, size, at in zip(starts.tolist(), sizes.tolist(), targets.tolist(), strict=True):
            target.put(at, chunks[start : start + size])


def concatenate(blocks: Sequence[RowBlock]) -> RowBlock:
    """Return the rows of several blocks of one layout as one; copies, unless there is only one."""
    if len(blocks) == 1:
        return blocks[0]
    first = blocks[0]

    def join(parts: list[Any]) -> Any:
        return None if parts[0] is None else columns.concatenate(parts)

    return replace(
        first,
        row_ids=join([block.row_ids for block in blocks]),
        features=join([block.features for block in blocks]),
        categories=join([block.categories for block in blocks]),
        label=join([block.label for block in blocks]),
        columns={name: join([block.columns[name] for block in blocks]) for name in first.columns},
        source=join([block.source for block in blocks]),
        mask=join([block.mask for block in blocks]),
    )


Transform = Callable[[RowBlock], RowBlock]


def transformed(
    block: RowBlock, transform: Transform | None, plan: EpochPlan | None = None
) -> RowBlock:
    """Return what a user's transform makes of a block.

    `plan` says of which epoch it is.

    Raises
    ------
    UsageError
        If it returns something else than a `RowBlock` of as many rows.
    """
    if plan is not None:
        block = replace(block, seed=plan.seed, epoch=plan.epoch)
    if transform is None or block.num_rows == 0:
        return block
    result: object = transform(block)
    if not isinstance(result, RowBlock):
        problem = f"transform returned {type(result).__name__}"
        raise UsageError(problem=problem, remedy="return a RowBlock; see dataclasses.replace")
    lengths = {len(array) for array in result.arrays()}
    lengths |= {len(column) for column in result.columns.values()}
    if lengths != {block.num_rows}:
        problem = f"transform returned {sorted(lengths)} rows for {block.num_rows}"
        raise UsageError(problem=problem, remedy="keep one row for each; select with filters=")
    return result
