"""Iceberg tables, with the pyiceberg package and a catalog in SQLite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import farandole
from farandole.errors import DataError

pytest.importorskip("pyiceberg", reason="pyiceberg is not installed: group data-peers")

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import FileScanTask
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType

from farandole.integrations.iceberg import check_file

TYPES = pa.schema([("x", pa.int32()), ("p", pa.string())])
from_iceberg = farandole.from_iceberg


def some(start: int, stop: int, p: str = "007") -> pa.Table:
    return pa.Table.from_pylist([{"x": x, "p": p} for x in range(start, stop)], TYPES)


def values(dataset: Any, name: str = "x") -> list[Any]:
    (block,) = dataset.read_rows([range(dataset.num_rows)])
    column = block.columns[name]
    return [value.as_py() if isinstance(value, pa.Scalar) else value for value in column]


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Any]:
    place = {"uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}"}
    catalog = SqlCatalog("here", **place)
    catalog.create_namespace("n")
    yield catalog
    catalog.close()


@pytest.fixture
def table(catalog: Any) -> Any:
    table = catalog.create_table("n.t", TYPES)
    table.append(some(0, 3))
    table.append(some(3, 5, p="b"))
    return table


def test_snapshots_stay_what_they_were(table: Any) -> None:
    latest = from_iceberg(table)
    assert sorted(values(latest)) == [0, 1, 2, 3, 4]
    first = table.history()[0].snapshot_id
    assert values(from_iceberg(table, snapshot=first)) == [0, 1, 2]
    table.manage_snapshots().create_tag(first, "start").commit()
    assert values(from_iceberg(table, snapshot="start")) == [0, 1, 2]
    table.overwrite(some(10, 12))
    assert sorted(values(from_iceberg(table))) == [10, 11]
    assert sorted(values(latest)) == [0, 1, 2, 3, 4]


def test_the_fingerprint_follows_the_snapshot(table: Any) -> None:
    first = table.history()[0].snapshot_id
    same = from_iceberg(table, snapshot=first)
    assert from_iceberg(table, snapshot=first).fingerprint == same.fingerprint
    assert from_iceberg(table).fingerprint != same.fingerprint


def test_partition_columns_come_from_the_files(catalog: Any) -> None:
    table = catalog.create_table("n.p", TYPES)
    with table.update_spec() as update:
        update.add_field("p", IdentityTransform())
    table.append(some(0, 3))
    table.append(some(3, 5, p="b c"))
    dataset = from_iceberg(table)
    assert dataset.schema.names == ["x", "p"]
    found = dict(zip(values(dataset), values(dataset, "p"), strict=True))
    assert found == {0: "007", 1: "007", 2: "007", 3: "b c", 4: "b c"}


def test_columns_may_be_added_and_widened(table: Any) -> None:
    with table.update_schema() as update:
        update.add_column("y", LongType())
        update.update_column("x", LongType())
    table.append(pa.table({"x": [5], "p": ["c"], "y": [7]}))
    dataset = from_iceberg(table)
    assert dataset.schema.field("x").type == pa.int64()
    assert sorted(values(dataset)) == [0, 1, 2, 3, 4, 5]
    assert dataset.schema.names == ["x", "p", "y"]


def test_renamed_columns_are_refused(table: Any) -> None:
    with table.update_schema() as update:
        update.rename_column("x", "z")
    table.append(pa.table({"z": pa.array([5], pa.int32()), "p": ["c"]}))
    with pytest.raises(DataError, match="'z' was once called 'x'"):
        from_iceberg(table)


def test_columns_made_again_are_refused(table: Any) -> None:
    with table.update_schema() as update:
        update.delete_column("x")
    with table.update_schema() as update:
        update.add_column("x", LongType())
    table.append(pa.table({"p": ["c"], "x": [1]}))
    with pytest.raises(DataError, match="there was another column 'x'"):
        from_iceberg(table)


def test_rows_deleted_by_writing_files_anew_are_gone(table: Any) -> None:
    table.delete("x = 1")
    assert sorted(values(from_iceberg(table))) == [0, 2, 3, 4]


def test_delete_files_are_refused(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Spark and others write delete files; here one is added to what pyiceberg plans."""
    deletes = DataFile.from_args(
        content=DataFileContent.POSITION_DELETES,
        file_path="file:///deletes.parquet",
        file_format=FileFormat.PARQUET,
        partition={},
        record_count=1,
        file_size_in_bytes=1,
    )
    scan = type(table.scan())
    plan_files = scan.plan_files

    def with_deletes(self: Any) -> list[FileScanTask]:
        return [FileScanTask(task.file, {deletes}) for task in plan_files(self)]

    monkeypatch.setattr(scan, "plan_files", with_deletes)
    with pytest.raises(DataError, match="delete files"):
        from_iceberg(table)


def test_files_without_their_partition_column_are_refused(catalog: Any) -> None:
    table = catalog.create_table("n.p", TYPES)
    with table.update_spec() as update:
        update.add_field("p", IdentityTransform())
    (numbers,) = {field.field_id for field in table.schema().fields if field.name == "x"}
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path="file:///p=b/added.parquet",
        file_format=FileFormat.PARQUET,
        partition={},
        record_count=1,
        file_size_in_bytes=1,
        value_counts={numbers: 1},
    )
    file.spec_id = table.spec().spec_id
    with pytest.raises(DataError, match="lacks the partition column 'p'"):
        check_file(table, table.schema(), FileScanTask(file))


def test_mistakes_are_named(catalog: Any, table: Any) -> None:
    with pytest.raises(DataError, match="has no snapshot 'nope'; use one of: main"):
        from_iceberg(table, snapshot="nope")
    with pytest.raises(DataError, match="has no snapshot 7"):
        from_iceberg(table, snapshot=7)
    with pytest.raises(DataError, match="has no snapshot"):
        from_iceberg(catalog.create_table("n.empty", TYPES))
    table.delete("x >= 0")
    with pytest.raises(DataError, match="no rows"):
        from_iceberg(table)
