from __future__ import annotations

import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.data import ArrayDataset, ParquetDataset, RowBlock, masked, reader
from farandole.data.columns import concatenate
from farandole.errors import ColumnError, ConfigError, DataError, FarandoleError, UsageError
from farandole.plan.slots import slots_of


def table_of(num_rows: int, start: int = 0) -> pa.Table:
    ids = np.arange(start, start + num_rows)
    return pa.table(
        {
            "id": ids,
            "a": (ids * 0.5).astype(np.float32),
            "b": pa.array([None if i % 7 == 0 else int(i) for i in ids], pa.int32()),
            "s": pa.array([f"row {i}" for i in ids], pa.string()),
            "y": ids % 2 == 0,
        }
    )


def write(folder: Path, sizes: list[int], group_rows: int = 1000) -> pa.Table:
    """Write files of so many rows; return all rows."""
    folder.mkdir(parents=True, exist_ok=True)
    tables, start = [], 0
    for place, rows in enumerate(sizes):
        tables.append(table_of(rows, start))
        pq.write_table(tables[-1], folder / f"{place:04}.parquet", row_group_size=group_rows)
        start += rows
    return pa.concat_tables(tables)


def read_all(dataset: Any, **plan: Any) -> list[RowBlock]:
    made = dataset.epoch_plan(**{"seed": 1, "epoch": 0, "batch_size": 50, "num_slots": 4, **plan})
    return list(dataset.read(made, range(made.num_slots)))


def joined(blocks: list[RowBlock], name: str) -> Any:
    parts = [
        block.columns[name] if name in block.columns else getattr(block, name) for block in blocks
    ]
    return concatenate(parts)


# --- order --------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    group_rows=st.integers(3, 40),
    num_slots=st.integers(1, 6),
    world_size=st.integers(1, 6),
    window_rows=st.integers(2, 30),
    cached=st.booleans(),
    data=st.data(),
)
def test_each_worker_reads_what_the_plan_says(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    group_rows: int,
    num_slots: int,
    world_size: int,
    window_rows: int,
    cached: bool,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("data")
    table = write(folder, [*sizes, 20], group_rows)
    dataset = ParquetDataset(
        folder, columns=["id", "s"], label="y", buffer_bytes=1 << 20 if cached else 1
    )
    plan = dataset.epoch_plan(
        seed=3,
        epoch=1,
        batch_size=data.draw(st.integers(num_slots, 50)),
        num_slots=num_slots,
        window_rows=window_rows,
        start_row=0,
    )
    start = data.draw(st.integers(0, plan.num_steps - 1))
    world_size = min(world_size, num_slots)
    rows: list[np.ndarray] = []
    for rank in range(world_size):
        slots = slots_of(rank, world_size, num_slots)
        blocks = iter(dataset.read(plan, slots, start))
        for step in range(start, plan.num_steps):
            for slot in slots:
                block = next(blocks)
                assert np.array_equal(block.row_ids, plan.slot_row_ids(step, slot))
                assert np.array_equal(block.columns["id"], block.row_ids)
                assert block.columns["s"].tolist() == table["s"].take(block.row_ids).to_pylist()
                assert block.label is not None
                assert block.label.tolist() == [int(i % 2 == 0) for i in block.row_ids]
                rows.append(block.row_ids)
        assert next(blocks, None) is None
    if start == 0:
        assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(table.num_rows))


@pytest.mark.parametrize("num_slots", [1, 3])
def test_batches_that_are_kept_stay_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_slots: int
) -> None:
    # Each step's rows in a buffer of their own, which is used again when nobody has them.
    monkeypatch.setattr(reader, "_GATHERED_BYTES", 1)
    size = 600
    table = pa.table({"x": np.arange(4 * size, dtype=np.float32), "m": list(range(4 * size))})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=size)
    dataset = ParquetDataset(tmp_path, columns={"m": masked()}, features=["x"], index_cache=None)
    plan = dataset.epoch_plan(seed=1, epoch=0, batch_size=9, num_slots=num_slots)
    addresses: set[int] = set()
    kept: dict[int, Any] = {}
    for step, block in enumerate(dataset.read_steps(plan, range(num_slots))):
        assert block.features is not None
        addresses.add(block.row_ids.ctypes.data)
        if step % 3 == 0:  # one column, or another, is enough
            kept[step] = block.features[:, 0] if step % 2 else block.columns["m"].values
        del block
    assert len(addresses) < plan.num_steps
    for step, found in kept.items():
        slots = [plan.slot_row_ids(step, slot) for slot in range(num_slots)]
        assert np.array_equal(found, np.concatenate(slots))


@pytest.mark.parametrize("transform", [None, lambda block: block])
def test_steps_are_the_blocks_of_their_slots(tmp_path: Path, transform: Any) -> None:
    write(tmp_path, [900, 700])
    dataset = ParquetDataset(tmp_path, features=["a"], transform=transform, index_cache=None)
    plan = dataset.epoch_plan(seed=1, epoch=2, batch_size=50, num_slots=4)
    blocks = list(dataset.read_steps(plan, range(1, 3)))
    assert len(blocks) == plan.num_steps
    for step, block in enumerate(blocks):
        slots = [plan.slot_row_ids(step, slot) for slot in (1, 2)]
        assert np.array_equal(block.row_ids, np.concatenate(slots))
        assert (block.seed, block.epoch) == (1, 2)


def test_arrays_and_files_give_the_same_rows(tmp_path: Path) -> None:
    table = write(tmp_path, [300], group_rows=100)
    dataset = ParquetDataset(tmp_path, features=["a", "id"], label="y")
    arrays = ArrayDataset(
        np.column_stack([table["a"], table["id"]]), table["y"], rows_per_shard=100
    )
    for one, other in zip(read_all(dataset), read_all(arrays), strict=True):
        for left, right in zip(one.arrays(), other.arrays(), strict=True):
            assert left.dtype == right.dtype
            assert np.array_equal(left, right)


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20])
def test_read_rows_follows_the_order_of_the_data_set(tmp_path: Path, buffer_bytes: int) -> None:
    write(tmp_path, [100, 70, 130, 20, 60], group_rows=33)
    dataset = ParquetDataset(tmp_path, columns=["id"], buffer_bytes=buffer_bytes)
    ranges = [range(150), range(150, 151), range(200, 380), range(5, 5), range(10, 90)]
    blocks = list(dataset.read_rows(ranges))
    for wanted, block in zip(ranges, blocks, strict=True):
        assert block.columns["id"].tolist() == block.row_ids.tolist() == list(wanted)
    with pytest.raises(IndexError, match="381"):
        dataset.read_rows([range(381)])


def test_files_are_ordered_by_the_parts_of_their_paths(tmp_path: Path) -> None:
    for place, name in enumerate(["a/x", "a-b/x", "a/b/x", "c"]):
        path = tmp_path / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": [place]}), path)
    blocks = list(ParquetDataset(tmp_path).read_rows([range(4)]))
    assert joined(blocks, "id").tolist() == [2, 0, 1, 3]


def test_hidden_files_patterns_and_lists(tmp_path: Path) -> None:
    write(tmp_path / "d", [10, 20, 30])
    (tmp_path / "d" / "_SUCCESS").touch()
    (tmp_path / "d" / ".part.crc").touch()
    (tmp_path / "d" / "_temporary").mkdir()
    (tmp_path / "d" / "_temporary" / "0.parquet").write_text("half-written")
    assert ParquetDataset(tmp_path / "d").num_rows == 60
    assert ParquetDataset(f"{tmp_path}/d/000[12].parquet").num_rows == 50
    assert ParquetDataset(f"{tmp_path}/**/*.parquet").num_rows == 60
    assert ParquetDataset([tmp_path / "d/0000.parquet", tmp_path / "d/0001.parquet"]).num_rows == 30
    assert ParquetDataset([tmp_path / "d", tmp_path / "d/0001.parquet"]).num_rows == 60
    assert ParquetDataset(f"file://{tmp_path}/d").num_rows == 60


def test_fsspec_urls() -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    with memory.open("/set/part.parquet", "wb") as stream:
        pq.write_table(table_of(40), stream)
    try:
        dataset = ParquetDataset("memory://set", columns=["id"])
        assert sorted(joined(read_all(dataset), "id")) == list(range(40))
    finally:
        memory.rm("/set", recursive=True)


# --- values -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([1, None], pa.int8()), [1, np.nan]),
        (pa.array([True, None]), [1, np.nan]),
        (pa.array([0.1, None]), [np.float32(0.1), np.nan]),
        (pa.array([Decimal("0.5"), None]), [0.5, np.nan]),
        (pa.nulls(2), [np.nan, np.nan]),
        (pa.array([1, 2]).dictionary_encode(), [1, 2]),
    ],
)
def test_features(tmp_path: Path, array: pa.Array, expected: list[float]) -> None:
    pq.write_table(pa.table({"k": [7, 8], "c": array}), tmp_path / "x.parquet")
    dataset = ParquetDataset(tmp_path, features=["c", "k"])
    (block,) = dataset.read_rows([range(2)])
    assert dataset.num_features == 2
    assert block.columns == {}
    assert block.label is None
    assert block.features is not None
    assert block.features.dtype == np.float32
    assert block.features.flags.c_contiguous
    np.testing.assert_array_equal(block.features, np.column_stack([expected, [7, 8]]))


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (pa.array([0, 1], pa.int8()), np.int64),
        (pa.array([True, False]), np.int64),
        (pa.array([0.5, 1]), np.float32),
        (pa.array([2**60 + 1, 1]), np.int64),
    ],
)
def test_labels(tmp_path: Path, array: pa.Array, dtype: type) -> None:
    pq.write_table(pa.table({"y": array}), tmp_path / "x.parquet")
    (block,) = ParquetDataset(tmp_path, label="y").read_rows([range(2)])
    assert block.label is not None
    assert block.label.dtype == dtype
    assert block.label.tolist() == array.to_pylist()


# --- partitions and schemas ---------------------------------------------------------------


def partitioned(folder: Path) -> Path:
    table = table_of(60)
    table = table.append_column("month", pa.array([i % 12 + 1 for i in range(60)]))
    table = table.append_column("where", pa.array(["a/b" if i % 2 else "ü" for i in range(60)]))
    pq.write_to_dataset(table, folder, partition_cols=["month", "where"])
    return folder


def test_hive_partitions_are_typed_columns(tmp_path: Path) -> None:
    dataset = ParquetDataset(partitioned(tmp_path), columns=["id", "month", "where"])
    blocks = read_all(dataset)
    ids = joined(blocks, "id")
    assert joined(blocks, "month").dtype == np.int64
    assert joined(blocks, "month").tolist() == (ids % 12 + 1).tolist()
    assert joined(blocks, "where").tolist() == ["a/b" if i % 2 else "ü" for i in ids]
    only_folders = ParquetDataset(tmp_path, features=["month"])
    assert joined(read_all(only_folders), "features").sum() == 5 * sum(range(1, 13))
    assert "month" not in ParquetDataset(tmp_path, partitioning=None).schema.names


def test_partition_kept_in_the_files_comes_from_them(tmp_path: Path) -> None:
    (tmp_path / "k=1").mkdir()
    pq.write_table(pa.table({"k": ["one"]}), tmp_path / "k=1" / "x.parquet")
    (block,) = ParquetDataset(tmp_path).read_rows([range(1)])
    assert block.columns["k"].tolist() == ["one"]


def test_null_partition(tmp_path: Path) -> None:
    table = pa.table({"id": [0, 1, 2], "k": [1, None, 3]})
    pq.write_to_dataset(table, tmp_path, partition_cols=["k"])
    (block,) = ParquetDataset(tmp_path).read_rows([range(3)])
    keys = block.columns["k"]
    order = np.argsort(block.columns["id"])
    assert keys.values[order].tolist() == [1, 0, 3]
    assert keys.valid[order].tolist() == [True, False, True]
    assert ParquetDataset(tmp_path, filters=[("k", ">", 1)]).num_rows == 1


def test_schemas_are_unified(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2], "b": ["x", "y"]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"c": [True], "a": [0.5]}), tmp_path / "1.parquet")
    pq.write_table(
        pa.table({"b": pa.nulls(1), "a": pa.array([7], pa.int8())}), tmp_path / "2.parquet"
    )
    dataset = ParquetDataset(tmp_path)
    (block,) = dataset.read_rows([range(4)])
    assert block.columns["a"].tolist() == [1.0, 2.0, 0.5, 7.0]
    assert block.columns["b"].tolist() == ["x", "y", None, None]
    assert block.columns["c"].values.tolist() == [False, False, True, False]
    assert block.columns["c"].valid.tolist() == [False, False, True, False]
    assert dataset.schema.field("a").type == pa.float64()


def test_schema_argument_decides_types(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "b": ["5"]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"a": ["2"], "b": ["6"]}), tmp_path / "1.parquet")
    schema = pa.schema([("a", pa.int32()), ("b", pa.float32())])
    (block,) = ParquetDataset(tmp_path, schema=schema).read_rows([range(2)])
    assert block.columns["a"].tolist() == [1, 2]
    assert block.columns["b"].dtype == np.float32


def test_files_that_disagree_matter_only_where_they_are_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "b": [1]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"a": ["x"], "b": [2]}), tmp_path / "1.parquet")
    assert ParquetDataset(tmp_path, columns=["b"]).num_rows == 2
    with pytest.raises(DataError, match=r"1\.parquet: column 'a' is string, but int64 in .*0\.par"):
        ParquetDataset(tmp_path).validate()


# --- filters ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "filters",
    [
        [("id", ">", 31)],
        [("id", ">=", 10), ("id", "<", 11)],
        [[("id", "<", 5)], [("s", "==", "row 40")]],
        [("b", "in", [3, 8, 50])],
        pc.field("b").is_null(),
        (pc.field("a") * 2 > 40) & pc.field("y"),
        [("month", "<=", 3)],
        [("month", "=", 2), ("id", ">", 20)],
        [("where", "=", "ü")],
    ],
    ids=str,
)
@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20])
def test_filters_select_exactly(tmp_path: Path, filters: Any, buffer_bytes: int) -> None:
    folder = partitioned(tmp_path)
    expected = pq.read_table(folder, filters=filters)["id"].to_pylist()
    dataset = ParquetDataset(
        folder, columns=["id", "month"], filters=filters, buffer_bytes=buffer_bytes
    )
    blocks = read_all(dataset, num_slots=1, batch_size=7)
    assert dataset.num_rows == len(expected)
    assert sorted(joined(blocks, "id").tolist()) == sorted(expected)
    assert sorted(joined(blocks, "row_ids").tolist()) == list(range(len(expected)))


def test_row_groups_ruled_out_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from farandole.data.groups import GroupReader

    write(tmp_path, [1000], group_rows=100)
    read: list[int] = []
    original = GroupReader.batches

    def spy(self: GroupReader, file: int, group: int, names: Any) -> Any:
        read.append(group)
        return original(self, file, group, names)

    monkeypatch.setattr(GroupReader, "batches", spy)
    assert ParquetDataset(tmp_path, columns=["a"], filters=[("id", ">=", 850)]).num_rows == 150
    assert sorted(read) == [8, 9]


def test_filter_over_files_that_differ(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2, 3]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"a": [1.5, 2.5], "b": ["x", None]}), tmp_path / "1.parquet")
    assert ParquetDataset(tmp_path, filters=[("a", ">", 1.5)]).num_rows == 3
    assert ParquetDataset(tmp_path, filters=[("b", "=", "x")]).num_rows == 1
    assert ParquetDataset(tmp_path, filters=pc.field("b").is_null()).num_rows == 4


# --- errors -------------------------------------------------------------------------------


def _empty(folder: Path) -> dict[str, Any]:
    (folder / "sub").mkdir()
    return {}


def _foreign(folder: Path) -> dict[str, Any]:
    write(folder, [5])
    (folder / "notes.txt").write_text("these are notes, not rows")
    return {}


def _short(folder: Path) -> dict[str, Any]:
    write(folder, [5, 5])
    content = (folder / "0001.parquet").read_bytes()
    (folder / "0001.parquet").write_bytes(content[:-20])
    return {}


def _zero(folder: Path) -> dict[str, Any]:
    (folder / "x.parquet").touch()
    return {}


def _with(**arguments: Any) -> Any:
    def make(folder: Path) -> dict[str, Any]:
        write(folder, [20])
        return arguments

    return make


def _null_label(folder: Path) -> dict[str, Any]:
    write(folder, [20])
    return {"label": "b"}


def _null_label_unknown(folder: Path) -> dict[str, Any]:
    pq.write_table(table_of(20), folder / "x.parquet", write_statistics=False)
    return {"label": "b", "filters": [("id", "<", 10)]}


def _mixed_layouts(folder: Path) -> dict[str, Any]:
    write(folder / "m=1", [5])
    write(folder, [5])
    return {}


ERRORS: list[tuple[Any, type[FarandoleError], str]] = [
    (_empty, DataError, r"holds no data file"),
    (_foreign, DataError, r"notes\.txt: is not a Parquet file"),
    (_short, DataError, r"0001\.parquet: has no usable footer, as if cut short"),
    (_zero, DataError, r"x\.parquet: is empty, not a Parquet file"),
    (_with(columns=["idd"]), ColumnError, r"'idd' does not exist; did you mean 'id'"),
    (_with(features=["aa"]), ColumnError, r"'aa' does not exist; did you mean 'a'"),
    (_with(features=["s"]), ColumnError, r"'s' is string, and features are numbers"),
    (_with(label="lable"), ColumnError, r"'lable' does not exist"),
    (_with(label="s"), ColumnError, r"'s' is string, and a label is a number or bool"),
    (_with(features=["id"], label="id"), ColumnError, r"'id' is the label"),
    (_with(filters=[("idd", ">", 3)]), ColumnError, r"'idd' of filters= does not exist; .* 'id'"),
    (_with(filters=[("id", ">", "x")]), DataError, r"does not fit the columns"),
    (_with(filters=[("id", ">")]), DataError, r"is no filter"),
    (_with(filters=[("id", ">", 99)]), DataError, r"holds no row that the filters select"),
    (_with(schema=pa.schema([("x", pa.int8())])), ColumnError, r"'x' of schema= does not exist"),
    (_null_label, DataError, r"label column 'b' has 3 null\(s\)"),
    (_null_label_unknown, DataError, r"label column 'b' has 2 null\(s\)"),
    (_mixed_layouts, DataError, r"is partitioned by \['m'\]"),
]


@pytest.mark.parametrize(("make", "kind", "message"), ERRORS, ids=[e[2] for e in ERRORS])
def test_errors_before_training(
    tmp_path: Path, make: Any, kind: type[FarandoleError], message: str
) -> None:
    dataset = ParquetDataset(tmp_path, **make(tmp_path))
    with pytest.raises(kind, match=message) as caught:
        dataset.validate()
    assert "\n" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_paths_that_match_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: does not exist"):
        ParquetDataset(tmp_path / "nowhere").validate()
    with pytest.raises(DataError, match="matches no file"):
        ParquetDataset(f"{tmp_path}/*.parquet").validate()
    with pytest.raises(DataError, match="no path is given"):
        ParquetDataset([]).validate()
    with pytest.raises(DataError, match="nosuch"):
        ParquetDataset("nosuch://bucket/x").validate()


def test_labels_selected_by_a_filter_need_not_be_complete(tmp_path: Path) -> None:
    write(tmp_path, [20])
    dataset = ParquetDataset(tmp_path, label="b", filters=pc.field("b").is_valid())
    assert dataset.num_rows == 17
    assert joined(read_all(dataset), "label").dtype == np.int64


def test_null_label_without_statistics_is_found_when_read(tmp_path: Path) -> None:
    pq.write_table(table_of(20), tmp_path / "x.parquet", write_statistics=False)
    dataset = ParquetDataset(tmp_path, label="b")
    dataset.validate()
    with pytest.raises(DataError, match=r"label column 'b' has 3 null"):
        read_all(dataset)


def test_batch_and_slots_are_checked(tmp_path: Path) -> None:
    write(tmp_path, [5])
    dataset = ParquetDataset(tmp_path)
    with pytest.raises(ConfigError, match="batch_size = 3: at least 4"):
        read_all(dataset, batch_size=3)
    with pytest.raises(DataError, match="5 rows are fewer than the 8 slots"):
        read_all(dataset, num_slots=8)
    with pytest.raises(DataError, match="fill no batch"):
        read_all(dataset, tail="drop")


def test_features_and_preprocess_exclude_each_other() -> None:
    with pytest.raises(DataError, match="pass one of them"):
        ParquetDataset("x", features=["a"], preprocess=object())  # pyright: ignore


# --- the data set as an object ------------------------------------------------------------


def test_nothing_is_read_before_it_is_needed(tmp_path: Path) -> None:
    dataset = ParquetDataset(tmp_path / "later", columns=["id"])
    assert "later" in repr(dataset)
    write(tmp_path / "later", [20])
    assert dataset.num_rows == 20


def test_fingerprint_follows_the_rows_and_not_the_place(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, [20, 30])
    one, two = ParquetDataset(tmp_path / "one"), ParquetDataset(tmp_path / "two")
    assert one.fingerprint == two.fingerprint
    assert ParquetDataset(tmp_path / "one", filters=[("id", ">", 3)]).fingerprint != one.fingerprint
    write(tmp_path / "two", [20, 31])
    assert ParquetDataset(tmp_path / "two").fingerprint != one.fingerprint


def test_a_copy_reads_the_same(tmp_path: Path) -> None:
    write(tmp_path, [100])
    dataset = ParquetDataset(tmp_path, columns=["id"])
    dataset.validate()
    assert dataset.fingerprint
    copy = pickle.loads(pickle.dumps(dataset))
    assert np.array_equal(joined(read_all(copy), "id"), joined(read_all(dataset), "id"))


def test_wide_rows_have_smaller_windows_whatever_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({f"c{i}": [0.5] * 20 for i in range(2000)}), tmp_path / "x.parquet")
    for columns in (["c0"], None):
        dataset = ParquetDataset(tmp_path, columns=columns)
        plan = dataset.epoch_plan(seed=0, epoch=0, batch_size=8, num_slots=8)
        assert 96 << 20 > 48 * plan.window_rows * 8 * 2000 > 90 << 20


# --- transforms ---------------------------------------------------------------------------


def _double(block: RowBlock) -> RowBlock:
    return RowBlock(row_ids=block.row_ids, columns={"twice": block.columns["id"] * 2})


@pytest.mark.parametrize("kind", ["files", "arrays"])
def test_transform(tmp_path: Path, kind: str) -> None:
    write(tmp_path, [40])

    def make(transform: Any) -> Any:
        if kind == "files":
            return ParquetDataset(tmp_path, columns=["id"], transform=transform)
        return ArrayDataset(id=np.arange(40), transform=transform)

    blocks = read_all(make(_double))
    assert np.array_equal(joined(blocks, "twice"), joined(blocks, "row_ids") * 2)
    (block,) = make(_double).read_rows([range(3, 6)])
    assert block.columns["twice"].tolist() == [6, 8, 10]
    with pytest.raises(UsageError, match="transform returned NoneType"):
        read_all(make(lambda block: None))
    with pytest.raises(UsageError, match=r"transform returned \[1\] rows"):
        read_all(make(lambda block: block.slice(0, 1)))
    with pytest.raises(ZeroDivisionError):
        read_all(make(lambda block: 1 // 0))


def test_columns_of_one_name_are_refused_where_they_are_read(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], ["a", "a", "b"])
    pq.write_table(table, tmp_path / "x.parquet")
    assert ParquetDataset(tmp_path, columns=["b"]).num_rows == 1
    with pytest.raises(DataError, match="several columns 'a'"):
        ParquetDataset(tmp_path, columns=["a"]).validate()


def test_a_store_that_cannot_be_listed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import farandole.data.files as files

    def fail(*arguments: Any) -> None:
        raise PermissionError("access denied")

    monkeypatch.setattr(files, "_expand", fail)
    with pytest.raises(DataError, match="somewhere: cannot be listed: access denied"):
        ParquetDataset("somewhere").validate()


def test_decoded_row_groups_stay_within_their_budget(tmp_path: Path) -> None:
    write(tmp_path, [400], group_rows=20)
    dataset = ParquetDataset(tmp_path, columns=["id"], buffer_bytes=2 * 250 * 16)
    for epoch in range(4):
        plan = dataset.epoch_plan(seed=0, epoch=epoch, batch_size=40, num_slots=4)
        for slot in range(4):
            for block in dataset.read(plan, range(slot, slot + 1)):
                assert np.array_equal(block.columns["id"], block.row_ids)
            cache = dataset._index().cache
            assert 100 <= sum(kept.num_rows for kept in cache._blocks.values()) <= 250


@pytest.mark.parametrize("name", ["", "_", "ä ö", "a.b", "features"])
def test_filters_on_columns_of_any_name(tmp_path: Path, name: str) -> None:
    pq.write_table(pa.table({name: range(9), "id": range(9)}), tmp_path / "a.parquet")
    dataset = ParquetDataset(
        tmp_path, columns=["id"], filters=[(name, ">", 3), ("id", "<", 8)], index_cache=None
    )
    assert dataset.num_rows == 4
