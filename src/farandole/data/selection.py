"""Which rows a filter selects: by folders and statistics first, then row by row."""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from farandole.data.groups import GroupReader, partition_values
from farandole.errors import ColumnError, DataError

_THREADS = 4
_MISSING = re.compile(r"No match for FieldRef\.\w+\((.*?)\)")


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
    reader: GroupReader, expression: pc.Expression | None, label: str | None
) -> list[Shard]:
    """Return the row groups with at least one selected row, in the order of the data set.

    With a filter, reads the columns that it names, and the label's where it may have nulls.

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
            for file, footer in enumerate(reader.footers)
            for group in range(footer.metadata.num_row_groups)
            if (rows := footer.metadata.row_group(group).num_rows)
        ]
        for shard in shards:
            if label is not None and (nulls := reader.num_nulls(shard.file, shard.group, label)):
                raise label_nulls(reader, shard.file, label, nulls)
    else:
        names = _filter_columns(reader, expression)
        with ThreadPoolExecutor(_THREADS) as pool:
            selected = pool.map(
                lambda place: _select(reader, place[0], place[1], expression, names, label),
                _unpruned(reader, expression, names),
            )
            shards = [shard for shard in selected if shard.num_rows]
    if not shards:
        problem = "holds no rows" if expression is None else "holds no row that the filters select"
        raise DataError(path=reader.name, problem=problem, remedy="check paths and filters")
    return shards


def label_nulls(reader: GroupReader, file: int, label: str, num_nulls: int) -> DataError:
    """Return the error for a label without a value."""
    return DataError(
        path=reader.files[file].path,
        problem=f"label column {label!r} has {num_nulls} null(s)",
        remedy=f"select labelled rows: filters=pc.field({label!r}).is_valid()",
    )


def _filter_columns(reader: GroupReader, expression: pc.Expression) -> list[str]:
    """Return the columns that an expression may name, and check that it fits their types."""
    text = str(expression)
    names = [name for name in reader.all_columns() if name in text]
    reader.check_columns(names)
    try:
        reader.schema_of(names).empty_table().filter(expression)
    except (pa.ArrowException, ValueError, TypeError) as error:
        missing = _MISSING.search(str(error))
        if missing:
            raise ColumnError(
                path=reader.name,
                column=missing[1],
                problem="of filters= does not exist",
                known=tuple(reader.types),
            ) from error
        raise DataError(
            path=reader.name,
            problem=f"the filter {text} does not fit the columns: {error}",
            remedy="compare with values of the column's type",
        ) from error
    return names


def _unpruned(
    reader: GroupReader, expression: pc.Expression, names: list[str]
) -> Iterable[tuple[int, int]]:
    """Yield (file, group) of row groups that folders and statistics do not rule out."""
    import pyarrow.dataset as pads  # imports pandas where it can: only filters pay for it

    schema = reader.schema_of(names)
    parquet = pads.ParquetFileFormat()
    for file, entry in enumerate(reader.files):
        folder = pc.scalar(True)
        for name, value in partition_values(reader, file).items():
            column = pc.field(name)
            folder &= column.is_null() if value is None else column == value
        fragment = parquet.make_fragment(entry.path, reader.filesystem, folder)
        with reader.reading(file, 0):
            pieces = fragment.split_by_row_group(expression, schema=schema)
        yield from ((file, group.id) for piece in pieces for group in piece.row_groups)


def _select(
    reader: GroupReader,
    file: int,
    group: int,
    expression: pc.Expression,
    names: list[str],
    label: str | None,
) -> Shard:
    """Count the selected rows of a row group, exactly."""
    checks_label = label is not None and reader.num_nulls(file, group, label) != 0
    wanted = [*names, label] if checks_label and label not in names else names
    num_rows = reader.footers[file].metadata.row_group(group).num_rows
    keep = np.zeros(num_rows, np.bool_)
    start = nulls = 0
    for batch in reader.batches(file, group, wanted):
        table = pa.Table.from_batches([batch])
        places = pa.array(np.arange(start, start + batch.num_rows))
        chosen = table.append_column("", places).filter(expression)
        keep[chosen.column(table.num_columns).to_numpy()] = True
        if checks_label:
            nulls += chosen.column(label).null_count
        start += batch.num_rows
    if nulls and label is not None:
        raise label_nulls(reader, file, label, nulls)
    count = int(np.count_nonzero(keep))
    return Shard(file, group, count, None if count == num_rows else np.packbits(keep))
