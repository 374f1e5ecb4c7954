"""Frames and data sets of other libraries, with the libraries themselves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import farandole as fa
from farandole.errors import DataError

NUM_ROWS = 1000
COLUMNS = {
    "x": np.arange(NUM_ROWS, dtype=np.int32),
    "y": np.arange(NUM_ROWS, dtype=np.float32) / 2,
    "s": [f"s{number % 7}" for number in range(NUM_ROWS)],
}


def column(dataset: Any, name: str) -> list[Any]:
    (block,) = dataset.read_rows([range(dataset.num_rows)])
    values = block.columns[name]
    return [value.as_py() if isinstance(value, pa.Scalar) else value for value in values]


def check(dataset: Any, *, ordered: bool = True) -> None:
    """Every row is there once, whole and in its types, also in training order."""
    x = column(dataset, "x")
    assert sorted(x) == list(range(NUM_ROWS))
    if ordered:
        assert x == list(range(NUM_ROWS))
    assert column(dataset, "y") == [number / 2 for number in x]
    assert column(dataset, "s") == [f"s{number % 7}" for number in x]
    assert dataset.schema.field("x").type == pa.int32()
    assert dataset.schema.field("y").type == pa.float32()
    loader = dataset.loader(batch_size=96, as_="numpy")
    assert sorted(itertools.chain(*(block.row_ids.tolist() for block in loader))) == list(
        range(NUM_ROWS)
    )


def test_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(COLUMNS)
    check(fa.dataset(frame))
    assert column(fa.dataset(frame[frame.x > 990]), "x") == list(range(991, 1000))
    assert fa.dataset(frame[frame.x > 990]).schema.names == ["x", "y", "s"]
    by_name = fa.dataset(frame.set_index("s"))
    assert column(by_name, "s") == COLUMNS["s"]
    assert column(fa.dataset(frame.x), "x") == list(range(NUM_ROWS))
    mixed = pandas.DataFrame({"x": [1, "a", None]}, dtype=object)
    with pytest.raises(DataError, match="values of one type"):
        fa.dataset(mixed)


def test_pandas_nulls_and_categories() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "n": pandas.array([1, None, 3], "Int64"),
            "c": pandas.Categorical(["u", None, "v"]),
            "t": pandas.to_datetime(["2024-01-01", None, "2024-01-03"]),
        }
    )
    dataset = fa.dataset(frame)
    assert dataset.schema.field("n").type == pa.int64()
    assert pa.types.is_timestamp(dataset.schema.field("t").type)
    (batch,) = dataset.scan(["n", "c", "t"])
    assert batch.column("n").to_pylist() == [1, None, 3]
    assert batch.column("c").to_pylist() == ["u", None, "v"]
    assert batch.column("t").null_count == 1


def test_polars() -> None:
    polars = pytest.importorskip("polars", reason="polars is not installed")
    frame = polars.DataFrame(COLUMNS)
    check(fa.dataset(frame))
    check(fa.dataset(frame.lazy()))
    assert column(fa.dataset(frame.lazy().filter(polars.col("x") < 3)), "x") == [0, 1, 2]
    assert column(fa.dataset(frame["x"]), "x") == list(range(NUM_ROWS))
    categories = fa.dataset(frame.with_columns(polars.col("s").cast(polars.Categorical)))
    assert column(categories, "s") == COLUMNS["s"]


def test_hugging_face() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: data-peers")
    dataset = datasets.Dataset.from_dict(
        COLUMNS,
        features=datasets.Features(
            x=datasets.Value("int32"), y=datasets.Value("float32"), s=datasets.Value("string")
        ),
    )
    check(fa.dataset(dataset))
    chosen = dataset.shuffle(seed=1).select(range(10))
    assert column(fa.dataset(chosen), "x") == chosen["x"][:]
    filtered = dataset.filter(lambda row: row["x"] % 100 == 0)
    assert column(fa.dataset(filtered), "x") == list(range(0, 1000, 100))
    check(fa.dataset(dataset.to_iterable_dataset(num_shards=3)))
    with pytest.raises(DataError, match="several splits: train, test"):
        fa.dataset(datasets.DatasetDict(train=dataset, test=dataset))
    with pytest.raises(DataError, match="no rows"):
        fa.dataset(dataset.select([]))


def test_dask(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frames = pytest.importorskip("dask.dataframe", reason="dask is not installed: data-peers")
    frame = frames.from_pandas(pandas.DataFrame(COLUMNS), npartitions=12)
    check(fa.dataset(frame))
    folder = tmp_path / "rows"
    first = fa.dataset(frame, folder=folder)
    check(first)
    assert fa.dataset(frame, folder=folder, reuse=True).fingerprint == first.fingerprint


@pytest.fixture
def spark() -> Iterator[Any]:
    sql = pytest.importorskip("pyspark.sql", reason="pyspark is not installed: data-peers")
    session = (
        sql.SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    gateway = session.sparkContext._gateway
    yield session
    session.stop()
    # Spark leaves its Java process to the end of Python.
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=30)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_spark(spark: Any, tmp_path: Path) -> None:
    columns = "cast(id as int) x", "cast(id / 2 as float) y", "concat('s', id % 7) s"
    frame = spark.range(NUM_ROWS).selectExpr(*columns).repartition(3)
    check(fa.dataset(frame), ordered=False)
    folder = tmp_path / "with a space"
    first = fa.dataset(frame, folder=folder)
    check(fa.dataset(frame, folder=folder, reuse=True), ordered=False)
    assert first.num_rows == NUM_ROWS


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="ray is not installed: data-peers")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_ray(ray: Any) -> None:
    data = pytest.importorskip("ray.data")
    dataset = data.from_arrow(pa.table({**COLUMNS, "s": pa.array(COLUMNS["s"])}))
    check(fa.dataset(dataset.repartition(3)), ordered=False)
