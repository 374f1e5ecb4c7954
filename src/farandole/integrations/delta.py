"""Delta Lake tables, through the deltalake package."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from farandole.data.snapshot import SnapshotDataset
from farandole.errors import DataError

_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


def from_delta(
    table: Any,
    version: int | str | datetime | None,
    storage_options: Mapping[str, str] | None,
    options: Mapping[str, Any],
) -> SnapshotDataset:
    """See `farandole.from_delta`."""
    name = table.table_uri if isinstance(table, DeltaTable) else str(table)
    try:
        if version is not None or not isinstance(table, DeltaTable):
            table = DeltaTable(name, storage_options=dict(storage_options or {}) or None)
        if version is not None:
            table.load_as_version(version)
    except (DeltaError, TableNotFoundError, OSError, ValueError) as error:
        problem = f"cannot be read as a Delta table: {error}"
        remedy = "check path, version and storage_options"
        raise DataError(path=name, problem=problem, remedy=remedy) from error
    _check_features(name, table)
    files = table.file_uris()
    if not files:
        raise DataError(path=name, problem="this version holds no rows", remedy="choose another")
    _check_partitions(table)
    snapshot = f"delta {table.metadata().id} version {table.version()} of {name}"
    types = pa.schema(table.schema().to_arrow())
    return SnapshotDataset(files, snapshot=snapshot, types=types, **options)


def _check_features(name: str, table: DeltaTable) -> None:
    """Refuse tables whose rows are not just those of their files."""
    features = set(table.protocol().reader_features or ())
    mode = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    if mode != "none":
        raise DataError(
            path=name,
            problem=f"columns are mapped by {mode}, so files may have other names for them",
            remedy="write the table anew without delta.columnMapping.mode",
        )
    if "deletionVectors" in features and pa.table(table.deletion_vectors()).num_rows:
        raise DataError(
            path=name,
            problem="rows that were deleted are still in the files (deletion vectors)",
            remedy="run REORG TABLE ... APPLY (PURGE) on it, or choose an older version",
        )


def _check_partitions(table: DeltaTable) -> None:
    """Refuse files whose folders do not tell the values that the log has for their rows."""
    if not table.metadata().partition_columns:
        return
    types = pa.schema(table.schema().to_arrow())
    actions = pa.table(table.get_add_actions(flatten=False))
    for path, logged in zip(actions["path"], actions["partition"], strict=True):
        folders = _folder_values(path.as_py())
        for name, value in logged.items():
            told = pa.scalar(folders.get(name)).cast(types.field(name).type)
            if name not in folders or told != value.cast(told.type):
                raise DataError(
                    path=path.as_py(),
                    problem=f"the log has {name} = {value} for it, its folder does not say so",
                    remedy="write the table anew with folders like column=value",
                )


def _folder_values(path: str) -> dict[str, str | None]:
    """Return the values in the folders of a path as the log has it, quoted twice."""
    folders = [part.split("=", 1) for part in unquote(path).split("/")[:-1] if "=" in part]
    return {
        unquote(name): None if value == _HIVE_NULL else unquote(value) for name, value in folders
    }
