"""Which rows a filter selects: by folders and statistics first, then row by row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from farandole.data.counting import count_rows, label_nulls
from farandole.data.groups import GroupReader
from farandole.errors import DataError


@dataclass(frozen=True)
class Shard:
    """A row group, or what a filter leaves of it."""

    file: int
    group: int
    num_rows: int
    """Rows selected."""
    kept: NDArray[np.uint8] | None = None
    """One bit for each row of the group (`numpy.packbits`); None if all are selected."""


def as_expression(filters: Any) -> pc.Expression | None:
    """Return filters (an expression, or lists of (column, operator, value)) as an expression."""
    if filters is None or isinstance(filters, pc.Expression):
        return filters
    try:
        return pq.filters_to_expression(filters)
    except (ValueError, TypeError) as error:
        raise DataError(
            path="filters",
            problem=f"{filters!r} is no filter: {error}",
            remedy="pass [(column, operator, value), ...] or an expression of pyarrow.compute",
        ) from error


def select_shards(
    reader: GroupReader,
    expression: pc.Expression | None,
    label: str | None,
    left_out: Collection[tuple[int, int]] = (),
) -> list[Shard]:
    """Return the row groups with at least one selected row, in the order of the data set.

    With a filter, reads the columns that it names, and the label's where it may have nulls;
    what was found is kept in the reader's cache.

    Parameters
    ----------
    left_out : collection of (file, row group)
        Not to be read.

    Raises
    ------
    ColumnError
        If the filter names a column that does not exist.
    DataError
        If no row is selected, or a selected row has no label.
    """
    if expression is None:
        shards = [
            Shard(file, group, rows)
            for file in range(len(reader.files))
            for group, rows in enumerate(reader.footers.rows(file).tolist())
            if rows and (file, group) not in left_out
        ]
        if label is not None:
            _check_label(reader, shards, label)
    else:
        shards = [
            Shard(file, group, count, kept)
            for file, found in enumerate(count_rows(reader, expression, label, left_out))
            for group, (count, kept) in enumerate(found)
            if count > 0 and (file, group) not in left_out
        ]
    if not shards:
        problem = "holds no rows" if expression is None else "holds no row that the filters select"
        raise DataError(path=reader.name, problem=problem, remedy="check paths and filters")
    return shards


def _check_label(reader: GroupReader, shards: Sequence[Shard], label: str) -> None:
    nulls = reader.null_counts(label)
    for shard in shards:
        number = int(nulls[reader.group_number(shard.file, shard.group)])
        if number > 0:
            raise label_nulls(reader, shard.file, label, number)
