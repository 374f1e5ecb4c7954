"""Rows as numpy arrays: what data sets give, and what transforms take and return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farandole.errors import UsageError

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
    columns : dict of str to ndarray, shape (n, ...)
        Columns asked for by name.
    """

    row_ids: NDArray[np.int64]
    features: NDArray[np.float32] | None = None
    categories: NDArray[np.int64] | None = None
    label: Array | None = None
    columns: Mapping[str, Array] = field(default_factory=dict[str, Array])

    @property
    def num_rows(self) -> int:
        """Rows in this block."""
        return len(self.row_ids)

    def arrays(self) -> list[Array]:
        """Return all arrays that are there, in a fixed order."""
        named = (self.row_ids, self.features, self.categories, self.label)
        return [array for array in named if array is not None] + list(self.columns.values())

    def map(self, function: Callable[[Array], Array]) -> RowBlock:
        """Return a block of what `function` makes of each array."""
        return RowBlock(
            row_ids=function(self.row_ids),
            features=None if self.features is None else function(self.features),
            categories=None if self.categories is None else function(self.categories),
            label=None if self.label is None else function(self.label),
            columns={name: function(array) for name, array in self.columns.items()},
        )

    def take(self, rows: NDArray[np.intp]) -> RowBlock:
        """Return a copy of the rows at these places of the block."""
        return self.map(lambda array: array.take(rows, axis=0))

    def slice(self, start: int, stop: int) -> RowBlock:
        """Return a view of a run of rows."""
        return self.map(lambda array: array[start:stop])

    def padded(self, num_rows: int) -> tuple[RowBlock, NDArray[np.bool_]]:
        """Return a block of `num_rows`, some of them copies, and which ones are none.

        Copies stand behind their originals, spread over the block.
        """
        rows = np.arange(num_rows) * self.num_rows // num_rows
        return self.take(rows), np.diff(rows, prepend=-1) > 0


def concatenate(blocks: Sequence[RowBlock]) -> RowBlock:
    """Return the rows of several blocks of one layout as one."""
    if len(blocks) == 1:
        return blocks[0]
    rest = zip(*(block.arrays() for block in blocks), strict=True)
    joined = iter([np.concatenate(arrays) for arrays in rest])
    return blocks[0].map(lambda _: next(joined))


Transform = Callable[[RowBlock], RowBlock]


def transformed(block: RowBlock, transform: Transform | None) -> RowBlock:
    """Return what a user's transform makes of a block.

    Raises
    ------
    UsageError
        If it returns something else than a `RowBlock` of as many rows.
    """
    if transform is None:
        return block
    result: object = transform(block)
    if not isinstance(result, RowBlock):
        problem = f"transform returned {type(result).__name__}"
        raise UsageError(problem=problem, remedy="return a RowBlock; see dataclasses.replace")
    lengths = {len(array) for array in result.arrays()}
    if lengths != {block.num_rows}:
        problem = f"transform returned {sorted(lengths)} rows for {block.num_rows}"
        raise UsageError(problem=problem, remedy="keep one row for each; select with filters=")
    return result
