"""Data sets from what people hold, each through the adapter of the library that made it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from farandole.errors import MissingExtraError

if TYPE_CHECKING:
    from farandole.data.snapshot import SnapshotDataset


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
