"""Data sets of Arrow tables and streams, arrays and tensors, and folders that are kept."""

from __future__ import annotations

import gc
import json
import multiprocessing
import pickle
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import farandole as fa
from farandole.data import ArrayDataset, ParquetDataset
from farandole.data.stored import GROUP_ROWS, StoredDataset
from farandole.errors import DataError, UsageError


def table(num_rows: int = 10) -> pa.Table:
    return pa.table({"x": np.arange(num_rows, dtype=np.float32), "s": ["a", "b"] * (num_rows // 2)})


def values(dataset: Any, name: str = "x") -> list[Any]:
    (block,) = dataset.read_rows([range(dataset.num_rows)])
    column = block.columns[name]
    return [value.as_py() if isinstance(value, pa.Scalar) else value for value in column]


class Exporter:
    """Anything that has an Arrow stream to give."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return table().__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize(
    "data",
    [
        table(),
        table().to_batches()[0],
        table().to_reader(max_chunksize=3),
        Exporter(),
    ],
    ids=["table", "batch", "reader", "exporter"],
)
def test_tables_and_streams(data: Any) -> None:
    dataset = fa.dataset(data)
    assert values(dataset) == list(range(10))
    assert values(dataset, "s") == ["a", "b"] * 5


def test_options_are_those_of_parquet() -> None:
    dataset = fa.dataset(table(), features=["x"], filters=[("s", "==", "b")])
    (block,) = dataset.read_rows([range(5)])
    assert block.features[:, 0].tolist() == [1, 3, 5, 7, 9]


def test_types_are_those_of_parquet(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "f": pa.array([1.5, None], pa.float64()),
            "i": pa.array([1, None], pa.int16()),
            "u": pa.array([1, 2], pa.uint8()),
            "d": pa.array([Decimal("1.25"), None], pa.decimal128(5, 2)),
            "t": pa.array([1, None], pa.timestamp("us", "UTC")),
            "c": pa.array(["a", None]).dictionary_encode(),
            "l": pa.array([[1, 2], None], pa.list_(pa.int64())),
            "n": pa.nulls(2),
        }
    )
    pq.write_table(rows, tmp_path / "rows.parquet")
    stored, plain = fa.dataset(rows), ParquetDataset(tmp_path)
    assert stored.schema == plain.schema
    (left,), (right,) = (dataset.read_rows([range(2)]) for dataset in (stored, plain))
    assert left.columns.keys() == right.columns.keys()
    shown = [re.sub("0x[0-9a-f]+", "", repr(block.columns)) for block in (left, right)]
    assert shown[0] == shown[1]


def test_large_streams_come_in_row_groups() -> None:
    num_rows = 2 * GROUP_ROWS + 10
    stream = table(num_rows).to_reader(max_chunksize=50_000)
    dataset = fa.dataset(stream)
    assert dataset.shard_rows == (GROUP_ROWS, GROUP_ROWS, 10)
    assert values(dataset)[-1] == num_rows - 1


def test_arrays_and_tensors_stay_in_memory() -> None:
    matrix = np.arange(6.0).reshape(3, 2)
    for data in (matrix, torch.from_numpy(matrix)):
        dataset = fa.dataset(data, label=[0, 1, 0])
        assert isinstance(dataset, ArrayDataset)
        (block,) = dataset.read_rows([range(3)])
        assert np.array_equal(block.features, matrix)
    dataset = fa.dataset({"features": matrix, "label": [0, 1, 0], "t": torch.zeros(3, 4)})
    (block,) = dataset.read_rows([range(3)])
    assert block.columns["t"].shape == (3, 4)


def test_paths_are_parquet(tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "rows.parquet")
    for paths in (tmp_path, str(tmp_path), [tmp_path / "rows.parquet"]):
        dataset = fa.dataset(paths)
        assert type(dataset) is ParquetDataset
        assert values(dataset) == list(range(10))


def test_the_fingerprint_follows_every_value() -> None:
    def fingerprint(*middle: int) -> str:
        return fa.dataset(pa.table({"x": [0, *middle, 9]})).fingerprint

    assert fingerprint(1, 2) == fingerprint(1, 2) != fingerprint(2, 1)


def read_pickled(data: bytes) -> list[Any]:
    return values(pickle.loads(data))


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_temporary_folders_go_with_the_data_set() -> None:
    dataset = fa.dataset(table())
    assert isinstance(dataset, StoredDataset)
    folder = dataset._folder.path
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(read_pickled, (pickle.dumps(dataset),)) == list(range(10))
    assert folder.exists()
    del dataset
    gc.collect()
    assert not folder.exists()


def test_nothing_is_left_of_what_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(DataError, match="cannot be written as Parquet"):
        fa.dataset(pa.table({"x": pa.array([(1, 2, 3)], pa.month_day_nano_interval())}))
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_folders_are_reused_only_when_asked(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    first = fa.dataset(table(), folder=folder, reuse=True)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["_SUCCESS", "_farandole.json", "part-00000.parquet"]
    with pytest.raises(DataError, match="is not empty; pass reuse=True"):
        fa.dataset(table(), folder=folder)
    again = fa.dataset(table(4), folder=folder, reuse=True)
    assert values(again) == list(range(10))
    assert again.fingerprint == first.fingerprint


def test_folders_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    fa.dataset(table(), folder=folder)
    (folder / "part-00000.parquet").rename(folder / "part-00001.parquet")
    with pytest.raises(DataError, match="was changed"):
        fa.dataset(table(), folder=folder, reuse=True)
    (folder / "_farandole.json").write_text(json.dumps({}))
    with pytest.raises(DataError, match="damaged"):
        fa.dataset(table(), folder=folder, reuse=True)
    (folder / "_farandole.json").unlink()
    with pytest.raises(DataError, match="not to its end"):
        fa.dataset(table(), folder=folder, reuse=True)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="int: is nothing that a data set"):
        fa.dataset(3)
    with pytest.raises(DataError, match="no folder of this file system"):
        fa.dataset(table(), folder="s3://bucket/rows")
    with pytest.raises(UsageError, match="for data to be written, not ndarray"):
        fa.dataset(np.zeros((2, 2)), folder=tmp_path)
