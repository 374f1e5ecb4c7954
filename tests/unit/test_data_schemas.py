"""Files whose schemas differ are read as one, or it is said why not."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.data import ParquetDataset
from farandole.data.schema import common_type, resolve
from farandole.errors import ColumnError, DataError


def write(folder: Path, *tables: pa.Table, **options: Any) -> Path:
    for place, table in enumerate(tables):
        pq.write_table(table, folder / f"{place}.parquet", **options)
    return folder


def read(dataset: ParquetDataset, name: str) -> list[Any]:
    """Return a column as Arrow has it, in the common type."""
    return [value for batch in dataset.scan([name]) for value in batch.column(name).to_pylist()]


WIDENED: list[tuple[pa.Array, pa.Array, pa.DataType, list[Any]]] = [
    (pa.array([1, 2]), pa.array([0.5]), pa.float64(), [1.0, 2.0, 0.5]),
    (pa.array([1], pa.int8()), pa.array([300], pa.int16()), pa.int16(), [1, 300]),
    (pa.array([-1], pa.int8()), pa.array([200], pa.uint8()), pa.int16(), [-1, 200]),
    (pa.array([1], pa.int32()), pa.array([0.5], pa.float32()), pa.float64(), [1.0, 0.5]),
    (pa.nulls(2), pa.array(["a"]), pa.string(), [None, None, "a"]),
    (pa.array([None, None], pa.int32()), pa.array([7]), pa.int64(), [None, None, 7]),
    (pa.nulls(1), pa.array([{"p": 1}]), pa.struct({"p": pa.int64()}), [None, {"p": 1}]),
    (pa.array(["a"]), pa.array(["b"], pa.large_string()), pa.large_string(), ["a", "b"]),
    (pa.array(["a", "b"]).dictionary_encode(), pa.array(["c"]), pa.string(), ["a", "b", "c"]),
    (
        pa.array([Decimal("1.25")], pa.decimal128(7, 5)),
        pa.array([Decimal("123.5")], pa.decimal128(8, 5)),
        pa.decimal128(8, 5),
        [Decimal("1.25000"), Decimal("123.50000")],
    ),
    (
        pa.array([dt.datetime(2020, 1, 1)], pa.timestamp("ms")),
        pa.array([dt.datetime(2020, 1, 1, microsecond=7)], pa.timestamp("us")),
        pa.timestamp("us"),
        [dt.datetime(2020, 1, 1), dt.datetime(2020, 1, 1, microsecond=7)],
    ),
    (
        pa.array([dt.datetime(2020, 1, 1, tzinfo=dt.UTC)], pa.timestamp("ms", "Europe/Berlin")),
        pa.array([dt.datetime(2020, 1, 1, tzinfo=dt.UTC)], pa.timestamp("ms", "Asia/Tokyo")),
        pa.timestamp("ms", "UTC"),
        [dt.datetime(2020, 1, 1, tzinfo=dt.UTC)] * 2,
    ),
    (
        pa.array([{"p": 1, "q": "x"}, None]),
        pa.array([{"r": True, "p": 0.5}]),
        pa.struct({"p": pa.float64(), "q": pa.string(), "r": pa.bool_()}),
        [
            {"p": 1.0, "q": "x", "r": None},
            None,
            {"p": 0.5, "q": None, "r": True},
        ],
    ),
    (
        pa.array([[{"p": 1}], None, []]),
        pa.array([[{"q": 2, "p": 3}]]),
        pa.list_(pa.struct({"p": pa.int64(), "q": pa.int64()})),
        [[{"p": 1, "q": None}], None, [], [{"p": 3, "q": 2}]],
    ),
    (
        pa.array([[1], [2, 3]]),
        pa.array([[0.5]]),
        pa.list_(pa.float64()),
        [[1.0], [2.0, 3.0], [0.5]],
    ),
]


@pytest.mark.parametrize(("one", "other", "kind", "values"), WIDENED, ids=lambda v: "")
def test_columns_are_widened(
    tmp_path: Path, one: pa.Array, other: pa.Array, kind: pa.DataType, values: list[Any]
) -> None:
    dataset = ParquetDataset(write(tmp_path, pa.table({"c": one}), pa.table({"c": other})))
    assert all(batch.schema.field("c").type == kind for batch in dataset.scan(["c"]))
    assert read(dataset, "c") == values


def test_added_missing_and_reordered_columns(tmp_path: Path) -> None:
    write(
        tmp_path,
        pa.table({"a": [1], "b": ["x"]}),
        pa.table({"b": ["y"], "a": [2]}),
        pa.table({"c": [0.5], "a": [3]}),
        pa.table({"a": [4], "b": ["z"]}),
    )
    dataset = ParquetDataset(tmp_path)
    assert dataset.schema.names == ["a", "b", "c"]
    assert read(dataset, "a") == [1, 2, 3, 4]
    assert read(dataset, "b") == ["x", "y", None, "z"]
    assert read(dataset, "c") == [None, None, 0.5, None]
    report = dataset.schema_report()
    assert report.num_files == 4
    assert report.schema == dataset.schema
    found = {(d.column, d.kind): [Path(path).stem for path in d.paths] for d in report.deviations}
    assert found == {
        ("b", "missing"): ["2"],
        ("c", "missing"): ["0", "3", "1"],
        ("", "order"): ["1", "2"],
    }


def test_the_report_says_what_a_cast_costs(tmp_path: Path) -> None:
    write(tmp_path, pa.table({"a": [1]}), pa.table({"a": [0.5]}), pa.table({"a": [2]}))
    report = ParquetDataset(tmp_path).schema_report()
    (deviation,) = report.deviations
    assert deviation.kind == "cast"
    assert [Path(path).stem for path in deviation.paths] == ["0", "2"]
    assert "'a' is int64, read as double (integers beyond 2**53 are an error)" in str(report)
    assert str(report).endswith("0.parquet and 1 more")


def test_a_report_of_files_alike(tmp_path: Path) -> None:
    write(tmp_path, pa.table({"a": [1]}), pa.table({"a": [2]}))
    assert str(ParquetDataset(tmp_path).schema_report()) == "2 files of one schema, 1 columns"


def test_conflicts_are_reported_and_matter_where_they_are_read(tmp_path: Path) -> None:
    write(tmp_path, pa.table({"a": [1], "b": [1]}), pa.table({"a": ["x"], "b": [2]}))
    report = ParquetDataset(tmp_path, columns=["b"]).schema_report()
    assert {(d.column, d.kind) for d in report.deviations} == {("a", "conflict")}
    assert report.schema.names == ["b"]
    with pytest.raises(DataError, match=r"1\.parquet: column 'a' is string, but int64 in .*0\.par"):
        ParquetDataset(tmp_path, columns=["a"]).validate()
    with pytest.raises(DataError, match="column 'a' is string"):
        ParquetDataset(tmp_path, columns=["b"], filters=[("a", ">", 0)]).validate()


@pytest.mark.parametrize(
    ("array", "other"),
    [
        (pa.array([2**53 + 1]), pa.array([0.5])),
        (pa.array([2**63], pa.uint64()), pa.array([-1])),
    ],
)
def test_a_value_that_does_not_fit_is_named(
    tmp_path: Path, array: pa.Array, other: pa.Array
) -> None:
    write(tmp_path, pa.table({"c": array}), pa.table({"c": other}))
    dataset = ParquetDataset(tmp_path, index_cache=None)
    with pytest.raises(DataError, match=r"0\.parquet: row group 0: column 'c' .* schema="):
        read(dataset, "c")


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], ["a", "a", "b"])
    write(tmp_path, table)
    assert read(ParquetDataset(tmp_path, columns=["b"]), "b") == [3]
    with pytest.raises(DataError, match="several columns 'a'"):
        ParquetDataset(tmp_path).validate()


def test_an_all_null_group_before_a_typed_one(tmp_path: Path) -> None:
    with pq.ParquetWriter(tmp_path / "0.parquet", pa.schema([("a", pa.int32())])) as writer:
        for values in ([None, None], [1, None], [3, 4]):
            writer.write_table(pa.table({"a": pa.array(values, pa.int32())}))
    assert read(ParquetDataset(tmp_path), "a") == [None, None, 1, None, 3, 4]


# --- partitions ---------------------------------------------------------------------------


def hive(folder: Path, *parts: str) -> Path:
    for place, part in enumerate(parts):
        (folder / part).mkdir(parents=True)
        pq.write_table(pa.table({"id": [place]}), folder / part / "x.parquet")
    return folder


@pytest.mark.parametrize(
    ("parts", "kind", "values"),
    [
        (["k=1", "k=02", "k=-3"], pa.int64(), [-3, 2, 1]),
        (["k=a", "k=1"], pa.string(), ["1", "a"]),
        (["k=2024-01-05", "k=2024-01-06"], pa.string(), ["2024-01-05", "2024-01-06"]),
        (["k=__HIVE_DEFAULT_PARTITION__", "k=7"], pa.int64(), [7, None]),
        (["k=a%20b", "k=%C3%BC"], pa.string(), ["ü", "a b"]),
        (["k=99999999999999999999"], pa.string(), ["99999999999999999999"]),
    ],
)
def test_partitions_are_integers_or_strings(
    tmp_path: Path, parts: list[str], kind: pa.DataType, values: list[Any]
) -> None:
    dataset = ParquetDataset(hive(tmp_path, *parts))
    assert dataset.schema.field("k").type == kind
    assert read(dataset, "k") == values


def test_a_schema_types_partitions(tmp_path: Path) -> None:
    hive(tmp_path, "zip=01234", "zip=98765")
    dataset = ParquetDataset(tmp_path, schema=pa.schema([("zip", pa.string())]))
    assert read(dataset, "zip") == ["01234", "98765"]
    assert ParquetDataset(tmp_path).schema.field("zip").type == pa.int64()


def test_dates_in_paths(tmp_path: Path) -> None:
    hive(tmp_path, "day=2024-01-05", "day=2024-01-06")
    schema = pa.schema([("day", pa.date32())])
    day = dt.date(2024, 1, 6)
    assert ParquetDataset(tmp_path, schema=schema, filters=[("day", "<", day)]).num_rows == 1
    with pytest.raises(DataError, match=r"day=2024-01-05 in the path is no int32; .* schema="):
        ParquetDataset(tmp_path, schema=pa.schema([("day", pa.int32())])).validate()
    with pytest.raises(ColumnError, match="'dy' of schema= does not exist; did you mean 'day'"):
        ParquetDataset(tmp_path, schema=pa.schema([("dy", pa.int32())])).validate()


# --- any schemas --------------------------------------------------------------------------

LEAVES = st.sampled_from(
    [
        *(pa.null(), pa.int8(), pa.int32(), pa.int64(), pa.uint8(), pa.float32(), pa.float64()),
        *(pa.string(), pa.large_string(), pa.bool_(), pa.timestamp("ms"), pa.timestamp("us")),
    ]
)
KINDS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        inner.map(pa.list_),
        st.dictionaries(st.sampled_from("pqr"), inner, min_size=1, max_size=3).map(pa.struct),
    ),
    max_leaves=4,
)
SCHEMAS = st.dictionaries(st.sampled_from("abc"), KINDS, min_size=1, max_size=3).map(pa.schema)


def example(kind: pa.DataType, place: int) -> Any:
    """Return a small value of a type."""
    if pa.types.is_null(kind):
        return None
    if pa.types.is_struct(kind):
        return {field.name: example(field.type, place) for field in kind}
    if pa.types.is_list(kind):
        return [example(kind.value_type, place)] * (place % 3)
    if pa.types.is_boolean(kind):
        return place % 2 == 0
    if pa.types.is_timestamp(kind):
        return dt.datetime(2020, 1, 1 + place)
    return str(place) if kind in (pa.string(), pa.large_string()) else place


def seen_as(value: Any, kind: pa.DataType) -> Any:
    """Return what a value of a narrower type is in a wider one: fields that lack are null."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: seen_as(value.get(field.name), field.type) for field in kind}
    if pa.types.is_list(kind):
        return [seen_as(each, kind.value_type) for each in value]
    return value


@settings(max_examples=40, deadline=None)
@given(schemas=st.lists(SCHEMAS, min_size=1, max_size=4), data=st.data())
def test_any_schemas_merge(
    tmp_path_factory: pytest.TempPathFactory, schemas: list[pa.Schema], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("data")
    expected: dict[str, list[Any]] = {}
    num_rows = data.draw(st.lists(st.integers(0, 3), min_size=len(schemas), max_size=len(schemas)))
    names = list(dict.fromkeys(name for schema in schemas for name in schema.names))
    for place, (schema, rows) in enumerate(zip(schemas, [*num_rows[:-1], 2], strict=True)):
        columns = {f.name: [example(f.type, row) for row in range(rows)] for f in schema}
        table = pa.table({f.name: pa.array(columns[f.name], f.type) for f in schema})
        pq.write_table(table, folder / f"{place}.parquet", row_group_size=2)
        for name in names:
            expected.setdefault(name, []).extend(columns.get(name, [None] * rows))
    found = resolve(schemas)
    known = {*found.types} | {*found.conflicts}
    assert {name for name in known if "." not in name} == set(names)
    for name in names:
        dataset = ParquetDataset(folder, columns=[name], index_cache=None)
        if name in found.types:
            values = read(dataset, name)
            assert values == [seen_as(value, found.types[name]) for value in expected[name]]
        else:
            conflict = found.conflicts[name]
            assert common_type(conflict.first_type, conflict.second_type) is None
            with pytest.raises(DataError, match=f"column '{name}"):
                dataset.validate()


@settings(max_examples=60, deadline=None)
@given(kinds=st.lists(KINDS, min_size=2, max_size=3))
def test_the_order_of_files_decides_no_type(kinds: list[pa.DataType]) -> None:
    def types(some: list[pa.DataType]) -> pa.DataType | None:
        return resolve([pa.schema([("a", kind)]) for kind in some]).types.get("a")

    one, other = types(kinds), types(kinds[::-1])
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert sorted(str(one)) == sorted(str(other))  # fields of structs come as first seen


def test_small_files_on_several_ranks(tmp_path: Path) -> None:
    sizes, start = [100, 0, 70, 130, 20, 0, 60], 0
    for place, rows in enumerate(sizes):
        table = pa.table({"id": pa.array(range(start, start + rows), pa.int64())})
        pq.write_table(table, tmp_path / f"{place}.parquet", row_group_size=rows or None)
        start += rows
    dataset = ParquetDataset(tmp_path, columns=["id"], index_cache=None)
    assert dataset.shard_rows == (100, 70, 130, 20, 60)
    plan = dataset.epoch_plan(seed=0, epoch=0, batch_size=32, num_slots=6)
    rows: list[int] = []
    for slots in (range(2), range(2, 4), range(4, 6)):
        blocks = list(dataset.read(plan, slots))
        assert len(blocks) == 2 * plan.num_steps
        rows += np.concatenate([block.columns["id"] for block in blocks]).tolist()
    assert sorted(rows) == list(range(380))


@pytest.mark.parametrize("groups", [1, 3])
def test_few_row_groups_on_two_ranks(tmp_path: Path, groups: int) -> None:
    table = pa.table({"id": range(90)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=90 // groups)
    dataset = ParquetDataset(tmp_path, columns=["id"], index_cache=None)
    plan = dataset.epoch_plan(seed=0, epoch=0, batch_size=16, num_slots=2)
    ranks = [
        np.concatenate([block.columns["id"] for block in dataset.read(plan, slots)])
        for slots in (range(1), range(1, 2))
    ]
    assert sorted(np.concatenate(ranks).tolist()) == list(range(90))
    assert len(ranks[0]) == len(ranks[1])
