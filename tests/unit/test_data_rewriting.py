from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import farandole as fa
from farandole.data import rewriting, shuffle
from farandole.data.rewriting import MIN_MEMORY_BYTES
from farandole.errors import ColumnError, DataError, RewriteError, UsageError

NUM_ROWS = 3000


def table() -> pa.Table:
    rng = np.random.default_rng(0)
    places = np.arange(NUM_ROWS)
    return pa.table(
        {
            "id": places,
            "f": rng.standard_normal(NUM_ROWS).astype(np.float32),
            "name": [None if i % 5 == 0 else f"n{i % 7}" for i in places],
            "month": (places % 3 - 1).astype(np.int32),
            "list": pa.array([[i, i + 1] for i in places], pa.list_(pa.int16())),
            "ragged": pa.array([[i] * (i % 3) for i in places], pa.list_(pa.int64())),
        }
    )


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for part in range(3):
        rows = table().slice(part * 1000, 1000)
        pq.write_table(rows, folder / f"{part}.parquet", row_group_size=300)
    return folder


def read(folder: Path, **options) -> pa.Table:
    dataset = fa.ParquetDataset(folder, **options)
    return pa.Table.from_batches(list(dataset.scan(dataset.schema.names)))


def ids(folder: Path) -> list[int]:
    return read(folder).column("id").to_pylist()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_rows_come_out_once_each_in_another_order(source, tmp_path):
    report = fa.rewrite(source, tmp_path / "out")
    found = read(tmp_path / "out")
    assert found.column("id").to_pylist() != list(range(NUM_ROWS))
    again = found.sort_by("id")
    assert again.drop_columns("list").equals(table().drop_columns("list"))
    assert again.column("list").to_pylist() == table().column("list").to_pylist()
    assert found.schema.field("list").type == pa.list_(pa.int16(), 2)
    assert (report.num_rows, report.num_files, report.tensors) == (NUM_ROWS, 1, ("list",))
    assert names_in(tmp_path) == ["in", "out"]


def test_the_order_hangs_on_the_seed_alone(source, tmp_path, monkeypatch):
    fa.rewrite(source, tmp_path / "a", seed=3)
    fa.rewrite(source, tmp_path / "b", seed=4)
    fa.rewrite(source, tmp_path / "c", seed=3, compression="zstd", row_group_rows=7)
    assert ids(tmp_path / "a") == ids(tmp_path / "c") != ids(tmp_path / "b")


@pytest.mark.parametrize("chunk_bytes", [100_000, 20_000, 3_000])
def test_the_order_is_the_same_by_way_of_the_disk(source, tmp_path, monkeypatch, chunk_bytes):
    fa.rewrite(source, tmp_path / "a")
    made = []

    class SmallShuffle(shuffle.RowShuffle):
        def __init__(self, folder, schema, **options):
            super().__init__(folder, schema, **{**options, "memory_bytes": 4 * chunk_bytes})
            made.append(folder)

        def tables(self):
            assert any(made[0].iterdir())  # it went by way of the disk
            yield from super().tables()

    monkeypatch.setattr(rewriting, "RowShuffle", SmallShuffle)
    fa.rewrite(source, tmp_path / "b")
    assert made
    assert ids(tmp_path / "a") == ids(tmp_path / "b")


def test_a_bucket_that_grew_too_large_is_scattered_again(tmp_path):
    schema = pa.schema([("x", pa.string())])
    # The first rows are short, so the number of buckets is chosen too low.
    texts = ["a" * 10] * 2000 + ["b" * 1000 + str(i) for i in range(500)]
    rows = shuffle.RowShuffle(tmp_path, schema, num_rows=2500, seed=0, memory_bytes=80_000)
    for start in range(0, 2500, 100):
        rows.add(pa.record_batch([pa.array(texts[start : start + 100])], schema=schema))
    tables = list(rows.tables())
    found = pa.concat_tables(tables).column("x").to_pylist()
    assert sorted(found) == sorted(texts)
    assert found != texts
    assert max(table.nbytes for table in tables) < 60_000
    whole = shuffle.RowShuffle(tmp_path, schema, num_rows=2500, seed=0, memory_bytes=1 << 30)
    whole.add(pa.record_batch([pa.array(texts)], schema=schema))
    assert pa.concat_tables(whole.tables()).column("x").to_pylist() == found


def test_every_place_is_as_likely():
    """Chi-squared over where each of 6 rows ends up, in 3000 shuffles."""
    schema = pa.schema([("x", pa.int64())])
    counts = np.zeros((6, 6))
    for seed in range(3000):
        rows = shuffle.RowShuffle(Path(), schema, num_rows=6, seed=seed, memory_bytes=1 << 20)
        rows.add(pa.record_batch([pa.array(range(6))], schema=schema))
        (table,) = rows.tables()
        counts[table.column("x").to_numpy(), np.arange(6)] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 60  # 25 degrees of freedom: 1 in 10,000


def test_the_order_can_stay(source, tmp_path):
    fa.rewrite(source, tmp_path / "out", shuffle=False, row_group_rows=512)
    assert ids(tmp_path / "out") == list(range(NUM_ROWS))
    metadata = pq.ParquetFile(tmp_path / "out/part-00000.parquet").metadata
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert sizes == [512] * 5 + [440]


def test_row_groups_by_bytes(source, tmp_path):
    report = fa.rewrite(source, tmp_path / "out", row_group_bytes=10_000, columns=["id"])
    assert report.row_group_rows == 10_000 // 8
    assert read(tmp_path / "out").schema.names == ["id"]


def test_dictionaries_only_where_they_pay(source, tmp_path):
    fa.rewrite(source, tmp_path / "out")
    group = pq.ParquetFile(tmp_path / "out/part-00000.parquet").metadata.row_group(0)
    chunks = [group.column(place) for place in range(group.num_columns)]
    coded = {c.path_in_schema for c in chunks if "RLE_DICTIONARY" in c.encodings}
    assert coded == {"name", "month"}
    assert {chunk.compression for chunk in chunks} == {"SNAPPY"}


def test_filters(source, tmp_path):
    fa.rewrite(source, tmp_path / "out", filters=[("id", "<", 500)])
    assert sorted(ids(tmp_path / "out")) == list(range(500))


def test_folders_by_value(source, tmp_path):
    fa.rewrite(source, tmp_path / "out", partition_by=["month", "name"], columns=None)
    found = read(tmp_path / "out", schema=pa.schema([("month", pa.int32())])).sort_by("id")
    assert found.select(["id", "month", "name"]).equals(table().select(["id", "month", "name"]))
    assert names_in(tmp_path / "out") == ["month=-1", "month=0", "month=1"]
    assert "name=__HIVE_DEFAULT_PARTITION__" in names_in(tmp_path / "out/month=0")


def test_row_groups_of_many_folders_are_cut_short_to_keep_to_memory(source, tmp_path, monkeypatch):
    tables = [table().slice(start, 100) for start in range(0, NUM_ROWS, 100)]
    storage = rewriting.Storage(table().drop_columns("month").schema, "none", 1000)
    writer = rewriting.TableWriter(
        tmp_path / "out", storage, partition_by=["month"], memory_bytes=10_000
    )
    for rows in tables:
        writer.add(rows)
        assert sum(part.pending_bytes for part in writer.parts.values()) <= 10_000
    writer.close()
    assert sorted(ids(tmp_path / "out")) == list(range(NUM_ROWS))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"out": "in"}, "exists already"),
        ({"out": "in/sub"}, "lies in the data set that is read"),
        ({"out": "s3://bucket/x"}, "not a local folder"),
        ({"columns": ["idd"]}, "did you mean 'id'"),
        ({"row_group_rows": 0}, "less than one row"),
        ({"row_group_rows": 9, "row_group_bytes": 9}, "both"),
        ({"memory_bytes": 5}, "below"),
        ({"partition_by": ["nam"]}, "did you mean 'name'"),
        ({"partition_by": ["f"]}, "only integers and strings"),
        ({"partition_by": ["id"]}, "more than 1000 folders"),
        ({"columns": ["id"], "partition_by": ["id"]}, "a column must be left"),
        ({"filters": [("id", "<", 0)]}, "no row that the filters select"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(source, tmp_path, options, said):
    out = options.pop("out", "out")
    target = out if "://" in out else tmp_path / out
    with pytest.raises((DataError, ColumnError), match=said):
        fa.rewrite(source, target, **options)
    assert names_in(tmp_path) == ["in"]


def test_numbers_as_strings_cannot_name_folders(tmp_path):
    pq.write_table(pa.table({"x": ["1", "02"], "y": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(ColumnError, match="come back from folders as integers"):
        fa.rewrite(tmp_path / "a.parquet", tmp_path / "out", partition_by=["x"])


def test_overwriting_waits_for_the_end(source, tmp_path):
    fa.rewrite(source, tmp_path / "out", columns=["id"])
    before = ids(tmp_path / "out")
    fa.rewrite(source, tmp_path / "out", columns=["id"], seed=1, overwrite=True)
    assert ids(tmp_path / "out") != before
    fa.rewrite(tmp_path / "out", tmp_path / "out", overwrite=True)
    assert sorted(ids(tmp_path / "out")) == sorted(before)
    assert names_in(tmp_path) == ["in", "out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_what_was_there(source, tmp_path, monkeypatch, overwrite):
    if overwrite:
        fa.rewrite(source, tmp_path / "out")

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rewriting.TableWriter, "close", full)
    with pytest.raises(RewriteError, match="free space") as caught:
        fa.rewrite(source, tmp_path / "out", overwrite=overwrite, seed=1)
    assert caught.value.exit_code == 1
    assert names_in(tmp_path) == ["in", "out"][: 1 + overwrite]


def test_a_failing_rename_gives_back_what_was_there(source, tmp_path, monkeypatch):
    fa.rewrite(source, tmp_path / "out")
    before = ids(tmp_path / "out")
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError("not today")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(RewriteError, match="not today"):
        fa.rewrite(source, tmp_path / "out", seed=1, overwrite=True)
    assert ids(tmp_path / "out") == before
    assert names_in(tmp_path) == ["in", "out"]


def test_ctrl_c_leaves_nothing(source, tmp_path):
    def interrupt(what: str, done: int, total: int) -> None:
        if what == "checking":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fa.rewrite(source, tmp_path / "out", progress=interrupt)
    assert names_in(tmp_path) == ["in"]


def test_rows_that_got_lost_are_noticed(source, tmp_path, monkeypatch):
    add = rewriting.TableWriter.add
    monkeypatch.setattr(rewriting.TableWriter, "add", lambda self, rows: add(self, rows.slice(1)))
    with pytest.raises(RewriteError, match="2,999 rows instead of 3,000"):
        fa.rewrite(source, tmp_path / "out")
    assert names_in(tmp_path) == ["in"]


def test_what_a_killed_rewrite_left_is_cleared_away(source, tmp_path, caplog):
    left = tmp_path / ".out.rewriting-abc"
    (left / "old").mkdir(parents=True)
    (left / "old/data").touch()
    (left / "lock").touch()
    rewriting._remove_abandoned(tmp_path / "out", ".out.rewriting-")
    assert (tmp_path / "out/data").exists()  # it was killed between two renames
    assert not left.exists()
    assert "had left" in caplog.text


def test_a_rewrite_at_work_is_left_alone(source, tmp_path):
    found = []

    def look(what: str, done: int, total: int) -> None:
        if not found:
            fa.rewrite(source, tmp_path / "out", columns=["id"], seed=1)
            found.extend(ids(tmp_path / "out"))

    with pytest.raises(RewriteError):
        fa.rewrite(source, tmp_path / "out", progress=look)
    assert ids(tmp_path / "out") == found
    assert names_in(tmp_path) == ["in", "out"]


def test_smallest_memory_suffices(source, tmp_path):
    fa.rewrite(source, tmp_path / "out", memory_bytes=MIN_MEMORY_BYTES)
    assert sorted(ids(tmp_path / "out")) == list(range(NUM_ROWS))


def test_a_name_in_the_place_of_a_list_is_refused(source, tmp_path):
    for options in ({"partition_by": "id"}, {"columns": "id"}):
        with pytest.raises(UsageError, match=r"pass a list: \['id'\]"):
            fa.rewrite(source, tmp_path / "out", **options)
    for options in ({"features": "id"}, {"columns": "id"}):
        with pytest.raises(UsageError, match=r"pass a list: \['id'\]"):
            fa.ParquetDataset(source, **options)
    with pytest.raises(UsageError, match=r"pass a list: \['id'\]"):
        fa.Preprocessor.fit(fa.ParquetDataset(source), categorical="id")


def test_a_column_that_exists_is_not_guessed_at(source, tmp_path):
    table = pa.table({"a": [[1], [2]], "b": [1, 2]})
    pq.write_table(table, tmp_path / "lists.parquet")
    with pytest.raises(ColumnError) as caught:
        fa.rewrite(tmp_path / "lists.parquet", tmp_path / "out", partition_by=["a"])
    assert "did you mean" not in str(caught.value)


def test_structs_may_be_named_whole(tmp_path):
    table = pa.table({"a": [{"x": 1, "y": 2.0}, {"x": 3, "y": 4.0}], "b": [1, 2]})
    pq.write_table(table, tmp_path / "in.parquet")
    fa.rewrite(tmp_path / "in.parquet", tmp_path / "out", columns=["a"], shuffle=False)
    assert read(tmp_path / "out").to_pydict() == {"a.x": [1, 3], "a.y": [2.0, 4.0]}
