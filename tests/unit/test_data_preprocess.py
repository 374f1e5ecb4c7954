from __future__ import annotations

import datetime as dt
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole.data import ArrayDataset, ParquetDataset, Preprocessor, fit_vocabulary
from farandole.errors import ColumnError, DataError, UsageError

START = dt.datetime(2013, 1, 1)


def flights() -> pa.Table:
    return pa.table(
        {
            "delay": [1.0, 2.0, None, 5.0, float("nan"), 4.0],
            "distance": pa.array([100, 200, 300, 400, 500, 600], pa.int32()),
            "constant": [0.1] * 6,
            "time": pa.array([START + dt.timedelta(hours=i) for i in range(6)], pa.timestamp("us")),
            "carrier": ["UA", "AA", None, "UA", "B6", "UA"],
            "hour": pa.array([5, 5, 7, None, 9, 11], pa.int16()),
            "weekend": [True, False, True, None, False, False],
        }
    )


NUMERIC = ["delay", "distance", "constant", "time"]
CATEGORICAL = ["carrier", "hour", "weekend"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pq.write_table(flights().slice(0, 4), tmp_path / "0.parquet", row_group_size=3)
    pq.write_table(flights().slice(4), tmp_path / "1.parquet")
    return tmp_path


@pytest.fixture
def fitted(folder: Path) -> Preprocessor:
    return Preprocessor.fit(ParquetDataset(folder), numeric=NUMERIC, categorical=CATEGORICAL)


def test_fit_over_files_equals_plain_statistics(fitted: Preprocessor) -> None:
    delay = np.array([1.0, 2.0, 5.0, 4.0])
    seconds = START.replace(tzinfo=dt.UTC).timestamp() + 3600.0 * np.arange(6)
    np.testing.assert_allclose(fitted.means, [delay.mean(), 350, 0.1, seconds.mean()], rtol=1e-14)
    expected = [delay.std(), np.std(np.arange(100, 700, 100)), 1.0, seconds.std()]
    np.testing.assert_allclose(fitted.stds, expected, rtol=1e-12)
    assert fitted.vocabularies == (("AA", "B6", "UA"), (5, 7, 9, 11), (False, True))
    assert fitted.cardinalities == (4, 5, 3)
    assert fitted.columns == (*NUMERIC, *CATEGORICAL)


def test_apply(fitted: Preprocessor) -> None:
    features, categories = fitted.apply(flights())
    assert (features.dtype, categories.dtype) == (np.float32, np.int64)
    assert features[2, 0] == features[4, 0] == 0.0
    np.testing.assert_allclose(features[:, 1].std(), 1.0, rtol=1e-6)
    np.testing.assert_allclose(features[:, 2], 0.0, atol=1e-15)
    assert categories[:, 0].tolist() == [3, 1, 0, 3, 2, 3]
    assert categories[:, 1].tolist() == [1, 1, 2, 0, 3, 4]
    assert categories[:, 2].tolist() == [2, 1, 2, 0, 1, 1]


def test_apply_takes_what_people_hold(fitted: Preprocessor) -> None:
    pytest.importorskip("pandas")
    table = flights()
    expected = fitted.apply(table)
    arrays = {name: table[name].to_numpy() for name in table.schema.names}
    lists = {name: table[name].to_pylist() for name in table.schema.names}
    coded = table.set_column(4, "carrier", table["carrier"].combine_chunks().dictionary_encode())
    large = table.set_column(4, "carrier", table["carrier"].cast(pa.large_string()))
    others: list[Any] = [table.to_batches()[0], table.to_pandas(), arrays, lists, coded, large]
    for other in others:
        for one, two in zip(expected, fitted.apply(other), strict=True):
            np.testing.assert_array_equal(one, two)


def test_unseen_categories_have_code_0(fitted: Preprocessor) -> None:
    table = flights().slice(0, 1)
    changed = table.set_column(4, "carrier", pa.array(["ZZ"]))
    changed = changed.set_column(5, "hour", pa.array([6]))
    assert fitted.apply(changed)[1].tolist() == [[0, 0, 2]]
    nulls = table.set_column(4, "carrier", pa.nulls(1))
    assert fitted.apply(nulls)[1][0, 0] == 0


def test_the_most_frequent_categories_are_kept(folder: Path) -> None:
    fitted = Preprocessor.fit(ParquetDataset(folder), categorical=CATEGORICAL, max_categories=2)
    assert fitted.vocabularies == (("AA", "UA"), (5, 7), (False, True))


def test_json_keeps_every_bit(fitted: Preprocessor) -> None:
    assert Preprocessor.from_json(fitted.to_json()) == fitted
    fitted.apply(flights())
    assert pickle.loads(pickle.dumps(fitted)) == fitted


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', '{"version": 1}'])
def test_foreign_json_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="not a saved Preprocessor"):
        Preprocessor.from_json(text)


def test_bits_do_not_depend_on_the_files(tmp_path: Path) -> None:
    table = pa.table({"x": np.random.default_rng(0).normal(3, 100, 20_000)})
    pq.write_table(table, tmp_path / "x.parquet")
    one, two = (
        Preprocessor.fit(ParquetDataset(tmp_path, buffer_bytes=buffer_bytes), numeric=["x"])
        for buffer_bytes in (1, 1 << 30)
    )
    assert one == two
    np.testing.assert_allclose(one.stds[0], table["x"].to_numpy().std(), rtol=1e-13)


def test_fit_on_arrays_equals_fit_on_files(fitted: Preprocessor) -> None:
    table = flights()
    arrays = {name: table[name].to_numpy() for name in table.schema.names}
    dataset = ArrayDataset(None, None, rows_per_shard=4, **arrays)
    other = Preprocessor.fit(dataset, numeric=NUMERIC[:3], categorical=["carrier"])
    assert other.vocabularies == fitted.vocabularies[:1]
    np.testing.assert_allclose(other.means, fitted.means[:3], rtol=1e-14)


def test_a_column_without_values(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"n": pa.nulls(3, pa.int32()), "c": pa.nulls(3)}), tmp_path / "x.parquet"
    )
    fitted = Preprocessor.fit(ParquetDataset(tmp_path), numeric=["n"], categorical=["c"])
    features, categories = fitted.apply({"n": [1, None], "c": ["x", "y"]})
    assert features.tolist() == [[1.0], [0.0]]
    assert categories.tolist() == [[0], [0]]


def test_blocks_are_filled(folder: Path, fitted: Preprocessor) -> None:
    dataset = ParquetDataset(folder, preprocess=fitted, columns=["distance"])
    (block,) = dataset.read_rows([range(6)])
    expected = fitted.apply(flights())
    assert block.features is not None
    assert block.categories is not None
    np.testing.assert_array_equal(block.features, expected[0])
    np.testing.assert_array_equal(block.categories, expected[1])
    assert block.columns["distance"].tolist() == [100, 200, 300, 400, 500, 600]
    assert dataset.num_features == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"numeric": ["dely"]}, "'dely' does not exist; did you mean 'delay'"),
        ({"numeric": ["carrier"]}, "'carrier' is string, which is neither a number nor a time"),
        ({"categorical": ["delay"]}, "'delay' is double, and categories are strings"),
    ],
)
def test_fit_refuses(folder: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        Preprocessor.fit(ParquetDataset(folder), **arguments)


def test_fit_refuses_infinite_values() -> None:
    with pytest.raises(ColumnError, match="'x' holds infinite values"):
        Preprocessor.fit(ArrayDataset(x=[1.0, np.inf]), numeric=["x"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"carrier": None}, "'carrier' is missing"),
        ({"carrier": [1] * 6}, "'carrier' is int64, and was string in fitting"),
        ({"carrier": ["x", 1] * 3}, "'carrier' has mixed types"),
        ({"distance": ["far"] * 6}, "'distance' is string, which is neither"),
    ],
)
def test_apply_refuses(fitted: Preprocessor, change: dict[str, Any], message: str) -> None:
    rows = {name: flights()[name].to_pylist() for name in flights().schema.names} | change
    with pytest.raises(ColumnError, match=message):
        fitted.apply({name: values for name, values in rows.items() if values is not None})


def test_buckets_are_about_equally_full_or_as_given(folder: Path) -> None:
    dataset = ParquetDataset(folder)
    fitted = Preprocessor.fit(
        dataset, categorical=["carrier"], bucketed={"distance": 3, "delay": [0, 2.0, 4.5]}
    )
    assert fitted.boundaries == ((200.0, 400.0), (0.0, 2.0, 4.5))
    assert fitted.cardinalities == (4, 4, 5)
    features, categories = fitted.apply(flights())
    assert features.shape == (6, 0)
    assert categories[:, 1].tolist() == [1, 2, 2, 3, 3, 3]
    assert categories[:, 2].tolist() == [2, 3, 0, 4, 0, 3]
    assert Preprocessor.from_json(fitted.to_json()) == fitted
    (block,) = ParquetDataset(folder, preprocess=fitted).read_rows([range(6)])
    assert block.categories is not None
    assert block.categories.tolist() == categories.tolist()


def test_the_sample_for_quantiles_does_not_hang_on_the_batches() -> None:
    values = np.random.default_rng(0).normal(size=200_000)
    one, other = (
        Preprocessor.fit(ArrayDataset(rows_per_shard=rows, x=values), bucketed={"x": 10})
        for rows in (200_000, 7_001)
    )
    assert one == other
    exact = np.quantile(values, np.arange(1, 10) / 10)
    np.testing.assert_allclose(one.boundaries[0], exact, atol=0.02)


def test_null_is_read_as_its_fill(folder: Path) -> None:
    dataset = ParquetDataset(folder)
    numeric = ["delay", "distance"]
    fitted = Preprocessor.fit(dataset, numeric=numeric, fill={"delay": 9.0})
    assert fitted.fills == (9.0, 350.0)
    features, _ = fitted.apply({"delay": [None, 9.0], "distance": [None, 350]})
    assert features[0].tolist() == features[1].tolist()
    assert features[0, 1] == 0
    assert Preprocessor.fit(dataset, numeric=numeric, fill=0).fills == (0.0, 0.0)
    assert Preprocessor.from_json(fitted.to_json()) == fitted


def test_what_an_earlier_version_saved_is_read() -> None:
    text = """{"version": 1, "numeric": [{"column": "x", "mean": 2.0, "std": 3.0}],
    "categorical": [{"column": "c", "vocabulary": ["a"]}]}"""
    fitted = Preprocessor.from_json(text)
    assert (fitted.fills, fitted.bucketed) == ((2.0,), ())
    assert fitted.apply({"x": [None, 5.0], "c": ["a", "b"]})[0].tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize(
    "arguments",
    [
        {"bucketed": {"delay": 1}},
        {"bucketed": {"delay": [2.0, 1.0]}},
        {"bucketed": {"delay": []}},
        {"numeric": ["delay"], "fill": {"distance": 1.0}},
        {"numeric": ["delay"], "fill": float("nan")},
    ],
)
def test_buckets_and_fills_are_checked(folder: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="give a"):
        Preprocessor.fit(ParquetDataset(folder), **arguments)


def test_vocabularies_of_columns_and_lists(tmp_path: Path) -> None:
    table = pa.table({"tags": [["b", "a"], None, ["b", None]], "s": [{"n": 3}, {"n": 1}, None]})
    pq.write_table(table, tmp_path / "x.parquet")
    dataset = ParquetDataset(tmp_path)
    assert fit_vocabulary(dataset, "tags") == ("a", "b")
    assert fit_vocabulary(dataset, "tags", max_categories=1) == ("b",)
    assert fit_vocabulary(dataset, "s.n") == (1, 3)
    fitted = Preprocessor.fit(dataset, numeric=["s.n"])
    assert fitted.means == (2.0,)
    assert fitted.apply(table)[0].tolist() == [[1.0], [-1.0], [0.0]]
