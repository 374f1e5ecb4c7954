"""Delta tables, with the deltalake package."""

from __future__ import annotations

import datetime
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import farandole
from farandole.errors import ColumnError, DataError

from_delta = farandole.from_delta
deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed")


TYPES = pa.schema([("x", pa.int32()), ("p", pa.string()), ("day", pa.date32())])


def write(path: Path, start: int, stop: int, p: str | None = "007", **options: Any) -> None:
    day = datetime.date(2024, 1, 2)
    rows = [{"x": x, "p": p, "day": day} for x in range(start, stop)]
    table = pa.Table.from_pylist(rows, TYPES)
    deltalake.write_deltalake(str(path), table, partition_by=["p", "day"], **options)


def values(dataset: Any, name: str = "x") -> list[Any]:
    (block,) = dataset.read_rows([range(dataset.num_rows)])
    column = block.columns[name]
    return [value.as_py() if isinstance(value, pa.Scalar) else value for value in column]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "t"
    write(path, 0, 3)
    write(path, 3, 5, p="a b/c%", mode="append")
    write(path, 5, 6, p=None, mode="append")
    return path


def test_versions_stay_what_they_were(table: Path) -> None:
    latest = from_delta(table)
    assert sorted(values(latest)) == [0, 1, 2, 3, 4, 5]
    first = from_delta(str(table), version=0)
    assert values(first) == [0, 1, 2]
    write(table, 10, 12, mode="overwrite")
    assert sorted(values(from_delta(table))) == [10, 11]
    assert sorted(values(latest)) == [0, 1, 2, 3, 4, 5]
    assert sorted(values(pickle.loads(pickle.dumps(latest)))) == [0, 1, 2, 3, 4, 5]
    opened = deltalake.DeltaTable(str(table))
    assert sorted(values(from_delta(opened))) == [10, 11]
    assert values(from_delta(opened, version=0)) == [0, 1, 2]
    assert opened.version() == 3


def test_the_fingerprint_follows_the_version(table: Path) -> None:
    before = from_delta(table)
    assert before.fingerprint == from_delta(table, version=2).fingerprint
    deltalake.DeltaTable(str(table)).alter.set_table_properties({"delta.appendOnly": "false"})
    after = from_delta(table)
    assert values(before) == values(after)
    assert before.fingerprint != after.fingerprint


def test_partitions_are_columns_of_the_tables_types(table: Path) -> None:
    dataset = from_delta(table)
    assert dataset.schema.field("day").type == pa.date32()
    x, p = values(dataset), values(dataset, "p")
    expected = {0: "007", 1: "007", 2: "007", 3: "a b/c%", 4: "a b/c%", 5: None}
    assert dict(zip(x, p, strict=True)) == expected


def test_options_go_to_the_files(table: Path) -> None:
    dataset = from_delta(table, label="x", filters=[("x", ">", 3)])
    (block,) = dataset.read_rows([range(2)])
    assert sorted(block.label.tolist()) == [4, 5]
    assert sorted(block.columns) == ["day", "p"]
    with pytest.raises(ColumnError, match="'y' does not exist"):
        from_delta(table, columns=["y"]).validate()


def test_rows_deleted_by_writing_files_anew_are_gone(table: Path) -> None:
    deltalake.DeltaTable(str(table)).delete("x = 1")
    assert sorted(values(from_delta(table))) == [0, 2, 3, 4, 5]


def commit(table: Path, *actions: dict[str, Any]) -> None:
    log = table / "_delta_log"
    version = len(list(log.glob("*.json")))
    (log / f"{version:020d}.json").write_text("\n".join(json.dumps(action) for action in actions))


def last_add(table: Path) -> dict[str, Any]:
    lines = (table / "_delta_log" / f"{0:020d}.json").read_text().splitlines()
    return next(action["add"] for line in lines if "add" in (action := json.loads(line)))


def upgrade(table: Path, feature: str) -> dict[str, Any]:
    features = {"readerFeatures": [feature], "writerFeatures": [feature]}
    return {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}}


def test_deletion_vectors_are_refused(table: Path) -> None:
    """Row 1 of the first file is deleted by a vector inside the log, as Spark writes it."""
    add = last_add(table)
    vector = {
        "storageType": "i",
        "pathOrInlineDv": "^Bg9^0rr910000000000iXQKl0rr91000005c8Xg0rr91",
        "sizeInBytes": 34,
        "cardinality": 1,
    }
    remove = {"path": add["path"], "deletionTimestamp": 1, "dataChange": True}
    commit(
        table,
        upgrade(table, "deletionVectors"),
        {"remove": remove},
        {"add": {**add, "deletionVector": vector}},
    )
    with pytest.raises(DataError, match="deletion vectors"):
        from_delta(table)
    assert values(from_delta(table, version=0)) == [0, 1, 2]


def test_files_outside_of_their_folders_are_refused(table: Path) -> None:
    add = last_add(table)
    (table / "moved.parquet").write_bytes(next((table / "p=007").rglob("*.parquet")).read_bytes())
    commit(table, {"add": {**add, "path": "moved.parquet"}})
    with pytest.raises(DataError, match="has p = 007 for it"):
        from_delta(table)


def test_mistakes_are_named(table: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Delta table"):
        from_delta(tmp_path / "nowhere")
    with pytest.raises(DataError, match="Delta table"):
        from_delta(table, version=77)
    deltalake.DeltaTable(str(table)).delete()
    with pytest.raises(DataError, match="no rows"):
        from_delta(table)
