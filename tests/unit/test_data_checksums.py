from __future__ import annotations

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.data.checksums import Checksums, hash_values

COLUMNS = {
    "int8": pa.array([1, -1, None, 7], pa.int8()),
    "int64": pa.array([1, -1, 2**62, None]),
    "float": pa.array([1.5, float("nan"), None, -0.0], pa.float32()),
    "bool": pa.array([True, None, False, False]),
    "string": pa.array(["", "ab", None, "ba"]),
    "large": pa.array(["", "ab", None, "ba"], pa.large_string()),
    "bytes": pa.array([b"", b"\0", b"\0\0", None]),
    "fixed": pa.array([b"abc", b"abd", None, b"cba"], pa.binary(3)),
    "decimal": pa.array([decimal.Decimal("1.5"), None, decimal.Decimal(2), None]),
    "time": pa.array([datetime.datetime(2020, 1, day) for day in (1, 2, 3)] + [None]),
    "list": pa.array([[], [1], [1, 2], None]),
    "nested": pa.array([[["a"], []], [[], ["a"]], None, [["b"]]]),
    "tensor": pa.array([[1, 2], [2, 1], None, [1, 1]], pa.list_(pa.int32(), 2)),
    "struct": pa.array([{"a": 1, "b": "x"}, {"a": None, "b": "x"}, None, {"a": 2, "b": None}]),
    "map": pa.array([[("a", 1)], [("a", 2)], [], None], pa.map_(pa.string(), pa.int64())),
    "null": pa.nulls(4),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_distinct_values_have_distinct_hashes_wherever_they_lie(name):
    values = COLUMNS[name]
    hashes = hash_values(values)
    assert len(set(hashes.tolist())) == len(set(map(str, values.to_pylist())))
    for start in range(5):
        assert (hash_values(values[start:]) == hashes[start:]).all()
    longer = pa.concat_arrays([values, values])
    assert (hash_values(longer[4:]) == hashes).all()


def test_lists_of_fixed_size_hash_like_lists():
    lists = pa.array([[1, 2], None, [3, 4]])
    fixed = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))
    assert (hash_values(lists) == hash_values(fixed)).all()


def sums(table: pa.Table, cut: int) -> Checksums:
    result = Checksums(table.schema.names)
    for batch in (*table.slice(0, cut).to_batches(), *table.slice(cut).to_batches()):
        result.add(batch)
    return result


@given(
    st.lists(st.tuples(st.integers(-9, 9), st.text(max_size=2)), min_size=1),
    st.integers(0, 5),
    st.integers(0, 2**32),
)
def test_the_order_of_rows_and_batches_does_not_matter(rows, cut, seed):
    table = pa.table({"a": [a for a, _ in rows], "b": [b for _, b in rows]})
    moved = table.take(np.random.default_rng(seed).permutation(len(rows)))
    assert sums(table, cut).differences(sums(moved, 0)) == []


TABLE = pa.table({"a": [1, 2, 3], "b": ["x", "y", "z"]})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (TABLE.slice(1), "2 rows instead of 3"),
        (TABLE.set_column(0, "a", [[1, 2, 4]]), "other values in 'a'"),
        (TABLE.set_column(0, "a", [[2, 1, 3]]), "values that are in other rows"),
    ],
)
def test_what_differs_is_named(other, said):
    assert sums(other, 1).differences(sums(TABLE, 1)) == [said]
