"""Rewrite a data set for training: shuffled, in row groups of a good size, cheap to decode."""

from __future__ import annotations

import errno
import fcntl
import glob
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.types as pt

from farandole.data.checksums import Checksums
from farandole.data.files import PathLike
from farandole.data.names import check_names
from farandole.data.parquet import ParquetDataset
from farandole.data.progress import Progress, no_progress
from farandole.data.schema import partition_type
from farandole.data.shuffle import RowShuffle
from farandole.data.tensors import as_tensor
from farandole.data.writer import Compression, Storage, TableWriter, dictionary_columns
from farandole.errors import ColumnError, DataError, RewriteError

MIN_MEMORY_BYTES = 16 << 20
_ROW_GROUP_ROWS = (8192, 65536)
_ROW_GROUP_BYTES = 64 << 20
_ROW_GROUPS = 256
"""Row groups that a data set should have, so that lanes seldom start inside of one."""
_MAX_FOLDERS = 1000
_ROWS, _NEW, _OLD, _LOCK = "rows", "new", "old", "lock"
"""What is in the folder beside the target while it is written."""

_logger = logging.getLogger("farandole.data")


@dataclass(frozen=True)
class RewriteReport:
    """What a rewrite has written."""

    path: str
    num_rows: int
    num_files: int
    num_row_groups: int
    row_group_rows: int
    size_bytes: int
    tensors: tuple[str, ...]
    """Columns that are now stored as tensors."""
    elapsed_s: float

    def __str__(self) -> str:
        size = (
            f"{self.num_row_groups:,} row group(s) of up to {self.row_group_rows:,} rows, "
            f"{self.size_bytes / 1e6:,.1f} MB"
        )
        lines = [
            f"{self.path}: {self.num_rows:,} rows in {self.num_files:,} file(s), {size}",
            f"written in {self.elapsed_s:.1f} s, and the same rows by count and checksums",
        ]
        if self.tensors:
            lines.append(f"stored as tensors: {', '.join(self.tensors)}")
        return "\n".join(lines)


def rewrite(
    paths: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    shuffle: bool = True,
    seed: int = 0,
    columns: Sequence[str] | None = None,
    filters: Any = None,
    partitioning: Literal["hive"] | None = "hive",
    partition_by: Sequence[str] = (),
    row_group_rows: int | None = None,
    row_group_bytes: int | None = None,
    compression: Compression = "snappy",
    memory_bytes: int = 1 << 30,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> RewriteReport:
    """Rewrite a data set for training, and check that the same rows came out. Blocks.

    Rows are shuffled over the whole data set, by way of the disk where memory does not suffice:
    beside `out` there must be room for the data as it is in memory, and for the result.
    Floats get no dictionary pages. Lists of numbers that all have one length, and tensors, are
    stored as bytes of a fixed size, which `ParquetDataset` reads as tensors.
    `out` appears when all is written and checked, never before.

    Parameters
    ----------
    paths, columns, filters, partitioning
        As of `ParquetDataset`: what is read.
    out : str or Path
        Local folder to write. Must not exist, unless `overwrite` is true.
    shuffle : bool, default=True
        False keeps the order of rows.
    seed : int, default=0
        Decides the order, with the rows; nothing else does.
    partition_by : sequence of str, optional
        Integer or string columns that become folders ``month=3``.
    row_group_rows : int, optional
        Default: a 256th of the rows, within 8,192 to 65,536 and to `row_group_bytes`.
    row_group_bytes : int, optional
        Of a row group in memory; default 64 MiB. Not together with `row_group_rows`.
    compression : {"snappy", "none", "lz4", "zstd"}
        zstd makes the smallest files, none and snappy are the fastest to decode.
    memory_bytes : int, default=1 GiB
        About what rows may take in memory.
    overwrite : bool, default=False
        Replace `out` in the end, where it is there already.
    progress : callable, optional
        Called with (what, rows done, rows in all) several times a second.

    Returns
    -------
    RewriteReport

    Raises
    ------
    DataError, ColumnError, UsageError
        If the input, or a parameter, cannot be used. Nothing has been written then.
    RewriteError
        If writing fails, or other rows came out. What was at `out` is still there.
    """
    start = time.monotonic()
    check_names(columns=columns, partition_by=partition_by)
    target = _target(out, paths, overwrite=overwrite)
    _check_sizes(str(target), row_group_rows, row_group_bytes, memory_bytes)
    report = progress or no_progress
    dataset = ParquetDataset(paths, columns=columns, filters=filters, partitioning=partitioning)
    schema = dataset.schema
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in dataset.forms])  # fields of structs
    _check_folders(dataset, schema, partition_by)
    stored, tensors = _stored_schema(dataset, schema, partition_by)
    num_rows = dataset.num_rows
    given, found = Checksums(schema.names), Checksums(schema.names)
    with _workspace(target) as folder:
        batches = _summed(dataset.scan(schema.names), given, "reading", num_rows, report)
        tables = (pa.Table.from_batches([batch]) for batch in batches)
        if shuffle:
            tables = _shuffled(batches, folder, schema, num_rows, seed, memory_bytes)
        writer = _write(
            tables,
            folder / _NEW,
            lambda table: Storage(
                stored,
                compression,
                _rows_of_group(table, num_rows, row_group_rows, row_group_bytes),
                dictionary_columns(table.select(stored.names)),
            ),
            partition_by=partition_by,
            memory_bytes=memory_bytes // 4,
        )
        folders = pa.schema([schema.field(name) for name in partition_by])
        again = ParquetDataset(folder / _NEW, schema=folders, index_cache=None)
        for _ in _summed(again.scan(schema.names), found, "checking", num_rows, report):
            pass
        if problems := found.differences(given):
            raise RewriteError(
                path=str(target),
                problem=f"what was written has {problems[0]}",
                remedy="check that nothing changes the input meanwhile, and the disk",
            )
        _commit(folder, target, overwrite=overwrite)
    parts = list(writer.parts.values())
    return RewriteReport(
        path=str(target),
        num_rows=num_rows,
        num_files=sum(part.num_files for part in parts),
        num_row_groups=sum(part.num_row_groups for part in parts),
        row_group_rows=parts[0].storage.row_group_rows,
        size_bytes=sum(part.size_bytes for part in parts),
        tensors=tensors,
        elapsed_s=time.monotonic() - start,
    )


# --- before ------------------------------------------------------------------------------


def _target(out: PathLike, paths: PathLike | Sequence[PathLike], *, overwrite: bool) -> Path:
    """Return the folder to write, if it may be written."""
    if "://" in str(out):
        remedy = "write to a local folder, and copy that"
        raise DataError(path=str(out), problem="is not a local folder", remedy=remedy)
    target = Path(out).expanduser().absolute()
    if target.exists() and not overwrite:
        remedy = "choose another name, or overwrite it (overwrite=True, --overwrite)"
        raise DataError(path=str(out), problem="exists already", remedy=remedy)
    given = [paths] if isinstance(paths, str | Path) else paths
    folders = {Path(path).expanduser().absolute() for path in given if "://" not in str(path)}
    if folders & set(target.parents):
        problem = "lies in the data set that is read"
        raise DataError(path=str(out), problem=problem, remedy="choose a folder beside it")
    return target


def _check_sizes(
    out: str, row_group_rows: int | None, row_group_bytes: int | None, memory_bytes: int
) -> None:
    problem = ""
    if row_group_rows is not None and row_group_bytes is not None:
        problem = "row_group_rows and row_group_bytes both say how large row groups are"
    elif any(size is not None and size < 1 for size in (row_group_rows, row_group_bytes)):
        problem = "a row group cannot have less than one row"
    elif memory_bytes < MIN_MEMORY_BYTES:
        problem = f"memory_bytes={memory_bytes} is below {MIN_MEMORY_BYTES}"
    if problem:
        raise DataError(path=out, problem=problem, remedy="pass one of them, large enough")


def _check_folders(dataset: ParquetDataset, schema: pa.Schema, partition_by: Sequence[str]) -> None:
    """Refuse columns whose values would not come back from the names of folders."""
    for name in partition_by:
        problem = ""
        if name not in schema.names:
            problem = "does not exist, and cannot name folders"
        elif not (pt.is_integer(schema.field(name).type) or pt.is_string(schema.field(name).type)):
            problem = f"is {schema.field(name).type}: only integers and strings can name folders"
        elif len(partition_by) == len(schema) or len(set(partition_by)) < len(partition_by):
            problem = "cannot name folders: a column must be left, and each be named once"
        if problem:
            known = tuple(schema.names)
            raise ColumnError(path=str(dataset), column=name, problem=problem, known=known)
    if not partition_by:
        return
    found: set[tuple[Any, ...]] = set()
    for batch in dataset.scan(partition_by):
        rows = pa.Table.from_batches([batch]).group_by(list(partition_by)).aggregate([])
        found.update(zip(*(column.to_pylist() for column in rows.columns), strict=True))
        if len(found) > _MAX_FOLDERS:
            problem = f"more than {_MAX_FOLDERS} folders would be made"
            remedy = "partition by columns of fewer values"
            raise DataError(path=str(dataset), problem=problem, remedy=remedy)
    for name, values in zip(partition_by, zip(*found, strict=True), strict=True):
        texts = [value for value in values if isinstance(value, str)]
        if texts and pt.is_integer(partition_type(texts)):
            problem = "holds numbers as strings, which would come back from folders as integers"
            raise ColumnError(path=str(dataset), column=name, problem=problem)


def _stored_schema(
    dataset: ParquetDataset, schema: pa.Schema, partition_by: Sequence[str]
) -> tuple[pa.Schema, tuple[str, ...]]:
    """Return what is stored in the files, and which columns are so as tensors."""
    fields = [field for field in schema if field.name not in partition_by]
    tensors = [
        as_tensor(field, (batch.column(0) for batch in dataset.scan([field.name])))
        for field in fields
    ]
    names = tuple(tensor.name for tensor in tensors if tensor is not None)
    stored = [tensor or field for tensor, field in zip(tensors, fields, strict=True)]
    return pa.schema(stored), names


# --- rows --------------------------------------------------------------------------------


def _summed(
    batches: Iterator[pa.RecordBatch],
    checksums: Checksums,
    what: str,
    num_rows: int,
    progress: Progress,
) -> Iterator[pa.RecordBatch]:
    """Pass batches on, adding them up and saying how far they are."""
    for batch in batches:
        checksums.add(batch)
        progress(what, checksums.num_rows, num_rows)
        yield batch


def _shuffled(
    batches: Iterator[pa.RecordBatch],
    folder: Path,
    schema: pa.Schema,
    num_rows: int,
    seed: int,
    memory_bytes: int,
) -> Iterator[pa.Table]:
    rows = RowShuffle(
        folder / _ROWS, schema, num_rows=num_rows, seed=seed, memory_bytes=memory_bytes
    )
    for batch in batches:
        rows.add(batch)
    yield from rows.tables()


def _write(
    tables: Iterator[pa.Table],
    folder: Path,
    make_storage: Callable[[pa.Table], Storage],
    *,
    partition_by: Sequence[str],
    memory_bytes: int,
) -> TableWriter:
    """Write all tables; how is decided by the first one."""
    with ExitStack() as stack:
        writer = None
        for table in tables:
            if writer is None:
                storage = make_storage(table)
                writer = TableWriter(
                    folder, storage, partition_by=partition_by, memory_bytes=memory_bytes
                )
                stack.callback(writer.abort)
            writer.add(table)
        assert writer is not None  # a data set without rows has been refused
        writer.close()
    return writer


def _rows_of_group(
    table: pa.Table, num_rows: int, row_group_rows: int | None, row_group_bytes: int | None
) -> int:
    """Return how many rows row groups get."""
    if row_group_rows is not None:
        return row_group_rows
    row_bytes = max(table.nbytes / max(table.num_rows, 1), 1)
    if row_group_bytes is not None:
        return max(int(row_group_bytes / row_bytes), 1)
    least, most = _ROW_GROUP_ROWS
    wanted = min(max(num_rows // _ROW_GROUPS, least), most)
    return max(min(wanted, int(_ROW_GROUP_BYTES / row_bytes)), 1)


# --- the folder --------------------------------------------------------------------------


@contextmanager
def _workspace(target: Path) -> Iterator[Path]:
    """Give a hidden folder beside the target, removed in the end whatever happens."""
    prefix = f".{target.name}.rewriting-"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target, prefix)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    except OSError as error:
        raise _failed(target, error) from error
    try:
        with (folder / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / _ROWS).mkdir()
            (folder / _NEW).mkdir()
            yield folder
    except OSError as error:
        raise _failed(target, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            _logger.warning("%s could not be removed: remove it by hand", folder)


def _failed(target: Path, error: OSError) -> RewriteError:
    remedy = "check the disk and your rights"
    if error.errno == errno.ENOSPC or "No space left" in str(error):
        remedy = "free space beside it, for the rows as they are in memory and for the result"
    return RewriteError(path=str(target), problem=str(error), remedy=remedy)


def _remove_abandoned(target: Path, prefix: str) -> None:
    """Remove what killed rewrites to the same place have left; give back what one had moved."""
    for folder in target.parent.glob(f"{glob.escape(prefix)}*"):
        try:
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # it is still at work, or has not begun
            continue
        if (folder / _OLD).exists() and not target.exists():
            (folder / _OLD).rename(target)
        shutil.rmtree(folder)
        _logger.warning("removed %s, which a rewrite that was killed had left", folder)


def _commit(folder: Path, target: Path, *, overwrite: bool) -> None:
    """Put what was written into its place."""
    if target.exists() and not overwrite:
        remedy = "choose another name, or overwrite it"
        raise RewriteError(path=str(target), problem="it was made meanwhile", remedy=remedy)
    new, old = folder / _NEW, folder / _OLD
    for path in [new, *(path for path in new.rglob("*") if path.is_dir())]:
        _sync(path)
    if target.exists():
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    _sync(target.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
