from __future__ import annotations

import datetime as dt
import pickle
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import farandole as fa
from farandole.data import ArrayDataset, ParquetDataset
from farandole.data.splits import key_hashes
from farandole.errors import ColumnError, DataError

THIRDS = {"train": 0.6, "valid": 0.2, "test": 0.2}


def frame(num_rows: int = 1000) -> pa.Table:
    rows = np.arange(num_rows)
    return pa.table(
        {
            "row": rows,
            "user": pa.array([f"user {row % 97}" for row in rows]),
            "kind": pa.array(rows % 10 == 0).cast(pa.int32()),
        }
    )


def dataset(folder: Path, table: pa.Table, group_rows: int = 64, **options) -> ParquetDataset:
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / "a.parquet", row_group_size=group_rows)
    return ParquetDataset(folder, columns=["row"], index_cache=None, **options)


def rows_of(data) -> list[int]:
    blocks = data.read_rows([range(data.num_rows)])
    try:
        (block,) = list(blocks)
        return block.columns["row"].tolist()
    finally:
        blocks.close()


def epoch_of(data, epoch: int = 0, **settings) -> list[int]:
    plan = data.epoch_plan(
        **{"seed": 1, "epoch": epoch, "batch_size": 40, "num_slots": 4, **settings}
    )
    blocks = data.read(plan, range(4))
    try:
        return [row for block in blocks for row in block.columns["row"].tolist()]
    finally:
        blocks.close()


def test_a_key_is_on_one_side_whatever_the_files(tmp_path):
    table = frame()
    users = table["user"].to_pylist()
    parts = dataset(tmp_path / "a", table).split(THIRDS, by="user")
    rows = {name: rows_of(part) for name, part in parts.items()}
    assert sorted(chain(*rows.values())) == list(range(1000))
    sides = {name: {users[row] for row in found} for name, found in rows.items()}
    assert not sides["train"] & sides["valid"]
    assert not (sides["train"] | sides["valid"]) & sides["test"]
    assert 0.4 < len(rows["train"]) / 1000 < 0.8
    mixed = table.take(np.random.default_rng(0).permutation(1000))
    other = dataset(tmp_path / "b", mixed, 111).split(THIRDS, by="user")
    for name, found in rows.items():
        assert sorted(rows_of(other[name])) == sorted(found)
        assert sorted(epoch_of(parts[name])) == sorted(found)


def test_a_split_of_filtered_rows_and_of_splits(tmp_path):
    data = dataset(tmp_path, frame(), filters=[("row", ">=", 500)])
    halves = data.split({"one": 0.5, "two": 0.5})
    again = halves["one"].split({"a": 0.5, "b": 0.5}, seed=1)
    rows = [rows_of(again["a"]), rows_of(again["b"]), rows_of(halves["two"])]
    assert sorted(chain(*rows)) == list(range(500, 1000))
    assert all(rows)
    fingerprints = {part.fingerprint for part in (data, *halves.values(), *again.values())}
    assert len(fingerprints) == 5
    assert pickle.loads(pickle.dumps(again["a"])).fingerprint == again["a"].fingerprint


def test_arrays_are_split_as_files_are(tmp_path):
    table = frame()
    arrays = ArrayDataset(**{name: table[name].to_numpy() for name in ("row", "user")})
    one, two = arrays.split(THIRDS, by="user"), dataset(tmp_path, table).split(THIRDS, by="user")
    for name in THIRDS:
        assert rows_of(one[name]) == rows_of(two[name])
        assert one[name].fingerprint != arrays.fingerprint


def test_hashes_do_not_hang_on_widths_and_never_change():
    def same(*arrays: pa.Array) -> bool:
        return len({key_hashes(array).tobytes() for array in arrays}) == 1

    numbers = [3, None, 0, 7]
    assert same(*(pa.array(numbers, kind) for kind in (pa.int8(), pa.int64(), pa.uint32())))
    assert same(*(pa.array([1.5, None, -0.0], kind) for kind in (pa.float32(), pa.float64())))
    assert same(pa.array(["a", None]), pa.array(["a", None]).dictionary_encode())
    assert same(pa.array(["a"]), pa.array(["a"], pa.large_string()))
    day = dt.datetime(2020, 1, 1)
    times = [pa.array([day], pa.timestamp(unit)) for unit in ("s", "ms", "us", "ns")]
    assert same(*times, pa.array([day.date()]))
    assert same(pa.array([-1]), pa.array([-1], pa.int8()))
    assert key_hashes(pa.array([1])) != key_hashes(pa.array([1.0]))
    known = [key_hashes(pa.array(values))[0] for values in ([1], ["user"], [None, 1])]
    assert known == [8663368426862862319, 15135653958355423941, 5976259557272476276]


def test_what_cannot_be_split_is_refused(tmp_path):
    data = dataset(tmp_path, frame())
    for fractions in ({"a": 0.5}, {"a": 1.5, "b": -0.5}, {}):
        with pytest.raises(DataError, match="do not add up to 1"):
            data.split(fractions)
    with pytest.raises(ColumnError, match="nobody"):
        data.split({"a": 1.0}, by="nobody")["a"].validate()
    with pytest.raises(DataError, match="no row belongs"):
        data.split({"a": 1 - 1e-6, "b": 1e-6})["b"].validate()
    with pytest.raises(ColumnError, match="cannot be a key"):
        key_hashes(pa.array([[1]]), "here", "lists")


# --- samples ------------------------------------------------------------------------------


def test_samples_have_every_row_in_turn(tmp_path):
    sampled = dataset(tmp_path, frame()).sample(fraction=0.25)
    epochs = [epoch_of(sampled, epoch) for epoch in range(8)]
    assert all(len(rows) == len(set(rows)) == 250 for rows in epochs)
    for cycle in (epochs[:4], epochs[4:]):
        assert sorted(chain(*cycle)) == list(range(1000))
    assert set(epochs[0]) != set(epochs[4])
    assert epoch_of(sampled, 5, start_row=120) == epochs[5][120:]


def test_the_size_of_a_sample_is_checked():
    data = ArrayDataset(np.zeros((10, 1)))
    for wrong in (
        {},
        {"fraction": 0},
        {"fraction": 1.5},
        {"rows": 0},
        {"fraction": 0.5, "rows": 5},
    ):
        with pytest.raises(DataError, match="pass a fraction"):
            data.sample(**wrong)
    with pytest.raises(DataError, match="has 10 rows"):
        data.sample(rows=11).validate()
    assert data.sample(rows=5).fingerprint == data.sample(fraction=0.5).fingerprint


# --- classes ------------------------------------------------------------------------------


def test_the_smaller_class_decides_when_rows_are_left_out(tmp_path):
    balanced = fa.balance(dataset(tmp_path, frame(), label="kind"))
    assert balanced.names == ("0", "1")
    epochs = [epoch_of(balanced, epoch) for epoch in range(9)]
    for rows in epochs:
        assert len(rows) == len(set(rows)) == 200
        assert sorted(row for row in rows if row % 10 == 0) == list(range(0, 1000, 10))
    others = [row for rows in epochs for row in rows if row % 10]
    assert len(set(others)) == 900


def test_the_smaller_class_comes_again_until_all_rows_were_used(tmp_path):
    data = dataset(tmp_path, frame())
    balanced = fa.balance(data, by="kind", stop="all_exhausted")
    used = Counter(epoch_of(balanced))
    assert used.total() == 1800
    assert {count for row, count in used.items() if row % 10} == {1}
    assert {count for row, count in used.items() if row % 10 == 0} == {9}


def test_classes_may_have_weights_and_be_left_out():
    labels = np.array([0, 1, 2] * 100)
    data = ArrayDataset(label=labels, row=np.arange(300))
    balanced = fa.balance(data, weights={2: 1, 0: 3})
    assert balanced.shares == {"2": 0.25, "0": 0.75}
    rows = epoch_of(balanced)
    assert Counter(row % 3 for row in rows) == {0: 99, 2: 33}
    with pytest.raises(DataError, match="no label"):
        fa.balance(ArrayDataset(np.zeros((3, 1))))
    with pytest.raises(DataError, match="classes"):
        fa.balance(ArrayDataset(x=np.arange(2000)), by="x")


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.struct([("a", pa.int64())])])
@pytest.mark.parametrize("weights", [None, {1: 0.5, 2: 0.5}])
def test_classes_that_cannot_be_compared_are_refused(tmp_path, kind, weights):
    value = [1] if pa.types.is_list(kind) else {"a": 1}
    table = pa.table({"row": [0, 1], "kind": pa.array([value, None], kind)})
    with pytest.raises(ColumnError, match=r"'kind' is .* which cannot be a class"):
        fa.balance(dataset(tmp_path, table), by="kind", weights=weights).validate()


def test_rows_whose_class_is_nan_have_none(tmp_path):
    kinds = pa.array([0.0, 1.0, float("nan"), None] * 5)
    table = pa.table({"row": np.arange(20), "kind": kinds})
    even = fa.balance(dataset(tmp_path, table), by="kind")
    assert even.names == ("0.0", "1.0")
    assert even.num_rows == 10


@pytest.mark.parametrize("fraction", ["half", None])
def test_fractions_that_are_no_numbers_are_refused(tmp_path, fraction):
    data = dataset(tmp_path, frame(10))
    with pytest.raises(DataError, match="do not add up to 1"):
        data.split({"a": 0.5, "b": fraction})
    with pytest.raises(DataError, match="pass a fraction"):
        data.sample(fraction=fraction)
