from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole.data import ParquetDataset
from farandole.data.inspect import label_of
from farandole.data.inspection import Column, Inspection, Sizes, advise
from farandole.data.progress import no_progress
from farandole.plan.lanes import EpochPlan

NUM_ROWS = 4000


@pytest.fixture
def folder(tmp_path):
    places = np.arange(NUM_ROWS)
    table = pa.table(
        {
            "f": (places % 100).astype(np.float32),
            "g": places.astype(np.float64),
            "n": pa.array([None if i % 4 == 0 else i for i in places], pa.int32()),
            "s": [f"s{i % 3}" for i in places],
            "x": pa.array([[i, i] for i in places], pa.list_(pa.float32())),
            "label": places // 2000,
        }
    )
    for month in (1, 2):
        path = tmp_path / f"month={month}"
        path.mkdir()
        rows = table.slice((month - 1) * 2000, 2000)
        pq.write_table(rows, path / "a.parquet", row_group_size=1500, compression="zstd")
    return tmp_path


def test_figures(folder):
    found = ParquetDataset(
        folder, features=["f", "g"], columns=["s", "month", "x"], label="label"
    ).inspect(batch_size=64)
    assert (found.num_rows, found.num_files, found.num_row_groups) == (NUM_ROWS, 2, 4)
    assert found.group_rows == Sizes(500, 1000, 1500, NUM_ROWS)
    assert found.group_bytes.total <= found.file_bytes.total
    columns = {column.name: column for column in found.columns}
    assert list(columns) == ["f", "g", "n", "s", "x", "label", "month"]
    assert columns["f"].becomes == columns["g"].becomes == "features: float32"
    assert columns["label"].becomes == "label: int64"
    assert columns["month"].becomes == "columns: int64 (n)"
    assert columns["n"].becomes == ""
    assert (columns["n"].num_nulls, columns["f"].num_nulls) == (1000, 0)
    assert columns["x"].num_nulls is None
    assert columns["f"].encoding == "dictionary"
    assert columns["f"].compression == "zstd"
    assert columns["month"].encoding == "folder"
    assert columns["month"].decode_ns is None
    assert columns["f"].decode_ns > 0
    assert [name for name, column in columns.items() if column.becomes_tensor] == ["x"]
    assert found.label.order == "ascending"
    assert found.label.neighbours > 0.99


def test_the_report_names_what_there_is_and_fits_json(folder):
    found = ParquetDataset(folder, label="label").inspect(batch_size=64)
    text = str(found)
    for part in ("4,000 rows in 2 file(s)", "dictionary zstd", "label label: order ascending"):
        assert part in text
    again = json.loads(json.dumps(found.to_dict()))
    assert again["label"]["ratio"] == found.label.ratio
    assert again["columns"][0]["name"] == "f"


def test_progress_is_told(folder):
    told = {}
    ParquetDataset(folder, label="label").inspect(
        progress=lambda what, done, total: told.__setitem__(what, (done, total))
    )
    assert told["reading footers"] == (2, 2)
    assert told["reading the label"] == (NUM_ROWS, NUM_ROWS)
    assert told["decoding a sample"] == (6, 6)


def plan(group_rows: int, num_rows: int = 96_000, **options) -> EpochPlan:
    groups = (group_rows,) * (num_rows // group_rows)
    return EpochPlan(groups, seed=0, epoch=0, num_slots=8, **{"batch_size": 480} | options)


@pytest.mark.parametrize(
    ("values", "order"),
    [
        (np.arange(96_000), "ascending"),
        (-np.arange(96_000), "descending"),
        (np.zeros(96_000), "constant"),
        (np.random.default_rng(0).permutation(96_000), "none"),
    ],
)
def test_order(values, order):
    assert label_of("y", values.astype(np.float32), plan(2000), no_progress).order == order


def test_shuffled_rows_mix_as_a_full_shuffle_does():
    values = np.random.default_rng(0).standard_normal(96_000).astype(np.float32)
    found = label_of("y", values, plan(2000), no_progress)
    assert found.ratio == pytest.approx(1, abs=0.2)
    assert found.neighbours == pytest.approx(0, abs=0.02)
    assert found.num_batches == 200


def test_sorted_rows_in_many_row_groups_spread_by_about_the_root_of_rows_of_a_lane():
    # A lane goes through 10 row groups of its own; B / L is 10. Windows lie across two row groups,
    # as they are staggered, so two of them may be mixed: between sqrt(5) and sqrt(10), less a bit.
    values = np.repeat(np.arange(480), 200).astype(np.float32)
    found = label_of("y", values, plan(200, window_rows=200), no_progress)
    assert np.sqrt(480 / 48 / 2) * 0.85 < found.ratio < np.sqrt(480 / 48)


def test_sorted_rows_in_one_row_group_are_strata():
    values = np.arange(96_000).astype(np.float32)
    assert label_of("y", values, plan(96_000), no_progress).ratio < 1


def inspection(**changes) -> Inspection:
    column = Column("x", "float", "features: float32", 0, 4, "plain", "snappy", 10.0, 10.0)
    whole = {
        "path": "here",
        "num_rows": 10**6,
        "num_files": 1,
        "file_bytes": Sizes.of([10**9]),
        "num_row_groups": 50,
        "group_rows": Sizes.of([20_000] * 50),
        "group_bytes": Sizes.of([10**6] * 50),
        "columns": (column,),
        "label": None,
    }
    return advise(Inspection(**whole | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"group_rows": Sizes.of([2_000_000])}, "2,000,000 rows"),
        ({"group_rows": Sizes.of([100] * 9)}, "cost more to open"),
        ({"group_rows": Sizes.of([20_000] * 9 + [200_000])}, "10 times the median"),
        ({"num_files": 500, "file_bytes": Sizes.of([9_000] * 500)}, "500 files of about 9 kB"),
        (
            {"columns": (Column("x", "float", "", 0, 4, "dictionary", "snappy", 18.0, 10.0),)},
            "dictionary pages for floats cost 1.8x (x)",
        ),
        (
            {"columns": (Column("x", "list<f>", "", 0, 4, "plain", "", 99.0, 9.0, True),)},
            "lists of one length decode 11.0x faster as tensors (x)",
        ),
        ({"columns": (Column("s", "string", "", 0, 4, "plain", "", 20.0, 10.0),)}, "2.0x faster"),
    ],
)
def test_advice(changes, said):
    assert any(said in line for line in inspection(**changes).advice)


def test_columns_of_any_shape_and_name_are_timed(tmp_path):
    point = {"x": 1, "y": "one"}
    table = pa.table(
        {
            "a.x": [1.0, 2.0],
            "a": [point, None],
            "": [1, 2],
            "points": [[point, point], []],
            "map": pa.array([[("k", 1.0)], None], pa.map_(pa.string(), pa.float32())),
            "lists": [[[1], []], None],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    names = ["a.x", "a.y", "", "points", "map", "lists"]
    dataset = ParquetDataset(tmp_path, columns=names, index_cache=None)
    columns = dataset.inspect(batch_size=1).columns
    assert {"points.x", "points.y", "map.key", "map.value"} <= {column.name for column in columns}
    assert all(column.decode_ns and column.rewritten_ns for column in columns)


def test_good_shape_needs_no_advice_but_a_label():
    assert inspection().advice == (
        "name a label (label=, --label) to learn how well batches mix it",
    )
