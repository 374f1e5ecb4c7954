"""Iceberg tables, through the pyiceberg package."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import IdentityTransform

from farandole.data.snapshot import SnapshotDataset
from farandole.errors import DataError


def from_iceberg(
    table: Table, snapshot: int | str | None, options: Mapping[str, Any]
) -> SnapshotDataset:
    """See `farandole.from_iceberg`."""
    name = ".".join(table.name())
    found = _find(name, table, snapshot)
    schema = table.schemas()[found.schema_id] if found.schema_id is not None else table.schema()
    _check_names(name, schema, table.schemas().values())
    tasks = list(table.scan(snapshot_id=found.snapshot_id).plan_files())
    if not tasks:
        raise DataError(path=name, problem="this snapshot holds no rows", remedy="choose another")
    for task in tasks:
        check_file(table, schema, task)
    return SnapshotDataset(
        sorted(_path(task.file.file_path) for task in tasks),
        snapshot=f"iceberg {table.metadata.table_uuid} snapshot {found.snapshot_id} of {name}",
        types=_plain(schema),
        # Folders have names like column=value here too, also for buckets and months.
        **{"partitioning": None, **options},
    )


def _find(name: str, table: Table, snapshot: int | str | None) -> Snapshot:
    if isinstance(snapshot, str):
        found = table.snapshot_by_name(snapshot)
    else:
        found = table.current_snapshot() if snapshot is None else table.snapshot_by_id(snapshot)
    if found is None:
        ids = (str(each.snapshot_id) for each in table.snapshots())
        known = ", ".join([*table.refs(), *ids]) or "none: append rows first"
        problem = "has no snapshot" if snapshot is None else f"has no snapshot {snapshot!r}"
        raise DataError(path=name, problem=problem, remedy=f"use one of: {known}")
    return found


def _check_names(name: str, schema: Schema, schemas: Iterable[Schema]) -> None:
    """Refuse columns that some file may have under another name, or another under theirs."""
    remedy = "write the table anew"
    ids = {column: schema.find_field(column).field_id for column in schema.column_names}
    names = {number: column for column, number in ids.items()}
    for other in schemas:
        for column in other.column_names:
            number = other.find_field(column).field_id
            if names.get(number, column) != column:
                problem = f"column {names[number]!r} was once called {column!r}, in files as well"
                raise DataError(path=name, problem=problem, remedy=remedy)
            if ids.get(column, number) != number:
                problem = f"there was another column {column!r}, which files may still have"
                raise DataError(path=name, problem=problem, remedy=remedy)
    for column in schema.column_names:
        if getattr(schema.find_field(column), "initial_default", None) is not None:
            problem = f"column {column!r} has a default value, which files written before lack"
            raise DataError(path=name, problem=problem, remedy=remedy)


def check_file(table: Table, schema: Schema, task: FileScanTask) -> None:
    """Refuse a file whose rows are not just those of the table."""
    file = task.file
    if task.delete_files:
        raise DataError(
            path=file.file_path,
            problem="rows that were deleted are still in it (delete files)",
            remedy="compact the table (rewrite_data_files), or choose an older snapshot",
        )
    if str(getattr(file.file_format, "value", file.file_format)).upper() != "PARQUET":
        problem = f"is {file.file_format}"
        raise DataError(path=file.file_path, problem=problem, remedy="write the table as Parquet")
    stored = set(file.value_counts or ())
    for field in table.specs()[file.spec_id].fields:
        source = field.source_id
        if not isinstance(field.transform, IdentityTransform) or not stored or source in stored:
            continue
        if source in schema.field_ids:
            raise DataError(
                path=file.file_path,
                problem=f"lacks the partition column {schema.find_column_name(source)!r}",
                remedy="write the table anew: these files were added from elsewhere",
            )


def _plain(schema: Schema) -> pa.Schema:
    """Return the columns in Arrow's usual types: not those for more than 2 GB of text."""
    usual = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    fields = schema_to_pyarrow(schema, include_field_ids=False)
    return pa.schema([(field.name, usual.get(field.type, field.type)) for field in fields])


def _path(uri: str) -> str:
    """Return a local file's plain path, and other addresses as they are."""
    parts = urlsplit(uri)
    return unquote(parts.path) if parts.scheme == "file" else uri
