"""Frames, tables and streams of other libraries as Parquet, by what these offer themselves.

None of the libraries is imported: whoever has an object of one has imported it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from farandole.data.stored import GROUP_ROWS, write_stream
from farandole.errors import DataError

Writer = Callable[[Path], None]

_BATCH_ROWS = 8192


def writer_of(data: Any) -> Writer | None:
    """Return what writes an object's rows into a folder, or None for something unknown.

    Raises
    ------
    DataError
        If the object is of a known kind, but no table.
    """
    for library in (kind.__module__.split(".")[0] for kind in type(data).__mro__):
        if library in _BY_LIBRARY:
            return _BY_LIBRARY[library](data)
    if isinstance(data, pa.RecordBatchReader):
        return lambda folder: write_stream(data, folder)
    if isinstance(data, pa.Table | pa.RecordBatch) or hasattr(data, "__arrow_c_stream__"):
        return _stream(lambda: pa.RecordBatchReader.from_stream(data))
    return None


def _stream(open_stream: Callable[[], pa.RecordBatchReader]) -> Writer:
    return lambda folder: write_stream(open_stream(), folder)


def _pandas(frame: Any) -> Writer:
    return _stream(lambda: pa.RecordBatchReader.from_stream(_pandas_table(frame)))


def _pandas_table(frame: Any) -> pa.Table:
    """Return the columns, and the levels of the index that have a name."""
    if not hasattr(frame, "columns"):
        frame = frame.to_frame()
    named = any(name is not None for name in frame.index.names)
    try:
        table = pa.Table.from_pandas(frame, preserve_index=named)
    except (pa.ArrowException, TypeError, ValueError) as error:
        problem = f"cannot be made an Arrow table: {error}"
        remedy = "give each column values of one type"
        raise DataError(path="pandas frame", problem=problem, remedy=remedy) from error
    return table.replace_schema_metadata(None)


def _polars(frame: Any) -> Writer:
    if hasattr(frame, "collect"):
        return lambda folder: _sink(frame, folder)
    if not hasattr(frame, "columns"):
        frame = frame.to_frame()
    return _stream(lambda: pa.RecordBatchReader.from_stream(frame.to_arrow()))


def _sink(frame: Any, folder: Path) -> None:
    """Write a lazy frame, computed as a stream."""
    temporary = folder / ".part-00000.parquet.tmp"
    frame.sink_parquet(temporary, row_group_size=GROUP_ROWS, statistics="full")
    temporary.replace(folder / "part-00000.parquet")


def _hugging_face(dataset: Any) -> Writer:
    """Rows in the order of the data set, which selections and shuffles have as indices."""
    if isinstance(dataset, dict):
        names = ", ".join(map(str, dataset))
        raise DataError(
            path="Hugging Face data",
            problem=f"holds several splits: {names}",
            remedy="pass one, as data['train']",
        )
    return _stream(lambda: _reader(dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS)))


def _reader(tables: Iterable[Any]) -> pa.RecordBatchReader:
    """Return a reader of tables that are of the first one's schema."""
    remaining: Iterator[pa.Table] = iter(tables)
    first = next(remaining, None)
    if first is None:
        raise DataError(path="Hugging Face data", problem="holds no rows", remedy="pass some")
    schema = first.schema.remove_metadata()

    def batches() -> Iterator[pa.RecordBatch]:
        for table in chain([first], remaining):
            yield from table.cast(schema).to_batches()

    return pa.RecordBatchReader.from_batches(schema, batches())


def _dask(frame: Any) -> Writer:
    """Partitions in their order; and the index, if it has a name."""

    def write(folder: Path) -> None:
        frame.to_parquet(
            str(folder),
            write_index=frame.index.name is not None,
            name_function=lambda number: f"part-{number:05d}.parquet",
        )

    return write


def _spark(frame: Any) -> Writer:
    # Not as_uri: Spark would take a quoted space for the name itself.
    return lambda folder: frame.write.mode("append").parquet(f"file://{folder}")


def _ray(dataset: Any) -> Writer:
    return lambda folder: dataset.write_parquet(str(folder))


_BY_LIBRARY: dict[str, Callable[[Any], Writer]] = {
    "dask": _dask,
    "datasets": _hugging_face,
    "pandas": _pandas,
    "polars": _polars,
    "pyspark": _spark,
    "ray": _ray,
}
