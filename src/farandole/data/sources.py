"""Data sets from what people hold, each through the adapter of the library that made it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farandole.data.arrays import ArrayDataset
from farandole.data.frames import writer_of
from farandole.data.parquet import ParquetDataset
from farandole.data.stored import store
from farandole.errors import DataError, MissingExtraError, UsageError

if TYPE_CHECKING:
    from farandole.data.snapshot import SnapshotDataset


def dataset(
    data: Any, *, folder: str | Path | None = None, reuse: bool = False, **options: Any
) -> ParquetDataset | ArrayDataset:
    """Return a data set of whatever holds rows. Blocks while rows are written.

    Paths, numpy arrays, torch tensors, and Delta and Iceberg tables are read where they are.
    All else is written once as Parquet, and read from there like any other files, since that
    gives every option and every type the same meaning: pandas and polars frames (also lazy),
    Arrow tables and streams, whatever exports an Arrow stream, Hugging Face data sets, Dask and
    Spark frames, Ray data sets. Of an index, levels with a name become columns.

    Parameters
    ----------
    data : object
        Arrays and tensors are the matrix of features; a dict of them are columns by name, of
        which ``features``, ``categories`` and ``label`` are what `ArrayDataset` calls so.
    folder : str or Path, optional
        Where Parquet files go, empty or not there yet; they stay. For Spark, Dask and Ray on
        several machines it must be one that all of them share. Default: a temporary folder,
        removed with the data set.
    reuse : bool, default=False
        Read what an earlier call has written into `folder`, without looking at `data`. It is
        an error if it is not whole or was changed since.
    **options
        As for `ParquetDataset`: ``columns``, ``features``, ``label``, ``filters``, ...; for
        arrays as for `ArrayDataset`.

    Raises
    ------
    DataError
        If `data` is nothing of these, cannot be written, or the folder is not empty.
    UsageError
        If `folder` or `reuse` is given for data that are not written.
    """
    write = writer_of(data)
    if write is not None:
        return store(write, folder, reuse=reuse, options=options)
    if folder is not None or reuse:
        problem = f"folder= and reuse= are for data to be written, not {type(data).__name__}"
        raise UsageError(problem=problem, remedy="leave them out")
    return _in_place(data, options)


def _in_place(data: Any, options: dict[str, Any]) -> ParquetDataset | ArrayDataset:
    """Return a data set of what is read where it is."""
    library = type(data).__module__.split(".")[0]
    if library == "deltalake":
        return from_delta(data, **options)
    if library == "pyiceberg":
        return from_iceberg(data, **options)
    if library in ("numpy", "torch"):
        return ArrayDataset(data, **options)
    if isinstance(data, Mapping):
        return ArrayDataset(**data, **options)
    names = [data] if isinstance(data, str | Path) else data
    if isinstance(names, list | tuple) and all(isinstance(name, str | Path) for name in names):
        return ParquetDataset(data, **options)
    raise DataError(
        path=type(data).__name__,
        problem="is nothing that a data set can be made of",
        remedy="pass paths, arrays, a frame, or something that exports an Arrow stream",
    )


def from_delta(
    table: Any,
    *,
    version: int | str | datetime | None = None,
    storage_options: Mapping[str, str] | None = None,
    **options: Any,
) -> SnapshotDataset:
    """Return one version of a Delta table as a data set. Blocks: reads the table's log.

    Parameters
    ----------
    table : str, Path or deltalake.DeltaTable
    version : int, str or datetime, optional
        A version, or a time (ISO 8601): the last version before it. Default: that of the table
        object, or the latest one, which is then kept to.
    storage_options : dict of str to str, optional
        For deltalake, where `table` is a path.
    **options
        As for `ParquetDataset`: ``columns``, ``features``, ``label``, ``filters``, ...

    Raises
    ------
    DataError
        If there is no such table or version, or if its files alone do not tell its rows: some
        were deleted and are still in files, or columns renamed.
    MissingExtraError
        If deltalake is not installed.
    """
    adapter = _adapter("delta", "deltalake", "from_delta")
    return adapter.from_delta(table, version, storage_options, options)


def from_iceberg(
    table: Any, *, snapshot: int | str | None = None, **options: Any
) -> SnapshotDataset:
    """Return one snapshot of an Iceberg table as a data set. Blocks: reads its manifests.

    Parameters
    ----------
    table : pyiceberg.table.Table
        As a catalog's ``load_table`` gives it.
    snapshot : int or str, optional
        A snapshot's id, or the name of a branch or tag. Default: the table's current snapshot,
        which is then kept to.
    **options
        As for `ParquetDataset`: ``columns``, ``features``, ``label``, ``filters``, ...

    Raises
    ------
    DataError
        If there is no such snapshot, or if its files alone do not tell its rows: some were
        deleted and are still in files, or columns were renamed or have default values.
    MissingExtraError
        If pyiceberg is not installed.
    """
    return _adapter("iceberg", "pyiceberg", "from_iceberg").from_iceberg(table, snapshot, options)


def _adapter(extra: str, package: str, purpose: str) -> Any:
    """Import the adapter of a library, or name the extra that brings it."""
    try:
        return importlib.import_module(f"farandole.integrations.{extra}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != package:
            raise
        raise MissingExtraError(extra=extra, package=package, purpose=purpose) from error
