"""What is kept of a data set for later opens, and when it is not to be trusted."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from farandole.data import ParquetDataset
from farandole.data import footers as footers_module
from farandole.data.cache import TableCache
from farandole.data.groups import GroupReader
from farandole.data.index import IndexCache
from farandole.errors import DataError

ROWS = (100, 70, 130, 20, 60)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    start = 0
    for place, rows in enumerate(ROWS):
        write(folder / f"{place}.parquet", start, rows)
        start += rows
    return folder


def write(path: Path, start: int, rows: int, group_rows: int = 50) -> None:
    ids = np.arange(start, start + rows)
    table = pa.table({"id": ids, "x": ids * 0.5, "n": [None if i % 10 == 0 else i for i in ids]})
    pq.write_table(table, path, row_group_size=group_rows)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose footers are read, in the order in which that happens."""
    seen: list[str] = []
    original = footers_module.read_footer

    def spy(filesystem: Any, file: Any, pool: Any) -> Any:
        seen.append(Path(file.path).name)
        return original(filesystem, file, pool)

    monkeypatch.setattr("farandole.data.index.read_footer", spy)
    return seen


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    original = GroupReader.batches

    def spy(self: GroupReader, file: int, group: int, *args: Any) -> Any:
        seen.append((file, group))
        return original(self, file, group, *args)

    monkeypatch.setattr(GroupReader, "batches", spy)
    return seen


def ids(dataset: ParquetDataset) -> list[int]:
    (block,) = dataset.read_rows([range(dataset.num_rows)])
    return block.columns["id"].tolist()


# --- footers ------------------------------------------------------------------------------


def test_unchanged_files_are_not_read_again(data: Path, cache: Path, reads: list[str]) -> None:
    first = ParquetDataset(data, columns=["id"], index_cache=cache)
    assert first.num_rows == sum(ROWS)
    assert sorted(reads) == [f"{place}.parquet" for place in range(5)]
    reads.clear()
    again = ParquetDataset(data, columns=["id"], index_cache=cache)
    assert again.fingerprint == first.fingerprint
    assert again.shard_rows == first.shard_rows
    assert again.schema == first.schema
    assert reads == []
    assert ids(again) == list(range(sum(ROWS)))


def test_only_files_that_are_new_or_changed_are_read(
    data: Path, cache: Path, reads: list[str]
) -> None:
    ParquetDataset(data, columns=["id"], index_cache=cache).validate()
    reads.clear()
    write(data / "1.parquet", 100, 75)
    write(data / "9.parquet", 1000, 5)
    (data / "3.parquet").unlink()
    changed = ParquetDataset(data, columns=["id"], index_cache=cache)
    plain = ParquetDataset(data, columns=["id"], index_cache=None)
    assert changed.num_rows == sum(ROWS) + 5 - 20 + 5
    assert sorted(reads) == ["1.parquet", "9.parquet"]
    assert changed.fingerprint == plain.fingerprint
    assert ids(changed) == ids(plain)


def test_columns_whose_nulls_were_not_counted_are_counted_once(
    data: Path, cache: Path, reads: list[str]
) -> None:
    for columns, read in ((["id"], 5), (["n"], 5), (["id", "n"], 0), (["id"], 0), (None, 5)):
        dataset = ParquetDataset(data, columns=columns, index_cache=cache)
        plain = ParquetDataset(data, columns=columns, index_cache=None)
        dataset.validate()
        assert len(reads) == read
        (one,), (other,) = (d.read_rows([range(380)]) for d in (dataset, plain))
        for name in one.columns:
            np.testing.assert_array_equal(one.columns[name], other.columns[name])
        reads.clear()


def test_without_a_cache_nothing_is_kept(data: Path, reads: list[str]) -> None:
    before = {path for path in Path(os.environ["XDG_CACHE_HOME"]).rglob("*") if path.is_file()}
    for _ in range(2):
        ParquetDataset(data, index_cache=None).validate()
    assert len(reads) == 10
    assert before == {p for p in Path(os.environ["XDG_CACHE_HOME"]).rglob("*") if p.is_file()}


def test_the_default_place_is_the_users_cache(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for _ in range(2):
        ParquetDataset(data).validate()
    assert len(reads) == 5
    assert list((tmp_path / "home" / "farandole" / "index").iterdir())


@pytest.mark.parametrize("spoil", ["torn", "flipped", "another version", "empty", "a folder"])
def test_a_cache_that_is_spoiled_is_ignored_and_replaced(
    data: Path, cache: Path, reads: list[str], spoil: str
) -> None:
    expected = ParquetDataset(data, columns=["id"], index_cache=cache).fingerprint
    (entry,) = (path for path in cache.iterdir() if "footers" in path.name)
    content = entry.read_bytes()
    spoiled = {
        "torn": content[:-100],
        "flipped": content[:200] + bytes([content[200] ^ 1]) + content[201:],
        "another version": content.replace(b"farandole index 1", b"farandole index 0", 1),
        "empty": b"",
        "a folder": None,
    }[spoil]
    if spoiled is None:
        entry.unlink()
        entry.mkdir()
    else:
        entry.write_bytes(spoiled)
    reads.clear()
    for _ in range(2):
        dataset = ParquetDataset(data, columns=["id"], index_cache=cache)
        assert dataset.fingerprint == expected
    assert len(reads) == (10 if spoil == "a folder" else 5)
    assert not list(cache.glob(".new-*"))


def test_a_folder_that_cannot_be_written_is_no_error(
    data: Path, tmp_path: Path, reads: list[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    for _ in range(2):
        assert ParquetDataset(data, index_cache=tmp_path / "file" / "c").num_rows == sum(ROWS)
    assert len(reads) == 10


def test_a_full_disk_is_no_error(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("farandole.data.cache.os.fsync", full)
    assert ParquetDataset(data, index_cache=cache).num_rows == sum(ROWS)
    assert not [path for path in cache.iterdir() if not path.name.endswith(".lock")]


def test_a_read_only_cache_serves(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    ParquetDataset(data, index_cache=cache).validate()
    reads.clear()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("farandole.data.cache.os.utime", refuse)
    monkeypatch.setattr("farandole.data.cache.tempfile.mkstemp", refuse)
    ParquetDataset(data, index_cache=cache).validate()
    assert reads == []
    assert ParquetDataset(data / "*.parquet", index_cache=cache).num_rows == sum(ROWS)
    assert len(reads) == 5


def test_opens_at_once_read_the_footers_once(data: Path, cache: Path, reads: list[str]) -> None:
    start = threading.Barrier(6)
    found: list[str] = []

    def open_it() -> None:
        start.wait(timeout=30)
        found.append(ParquetDataset(data, columns=["id"], index_cache=cache).fingerprint)

    threads = [threading.Thread(target=open_it) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 6
    assert len(set(found)) == 1
    assert len(reads) == 5


def test_who_waits_too_long_goes_on(tmp_path: Path) -> None:
    cache = TableCache(tmp_path)
    with cache.making("ab-x", 60), cache.making("ab-x", 0.0):
        cache.store("ab-x", pa.table({"a": [1]}))
    assert cache.load("ab-x") == pa.table({"a": [1]})


def test_the_cache_keeps_within_its_limit(tmp_path: Path) -> None:
    table = pa.table({"a": np.random.default_rng(0).random(1000)})
    cache = TableCache(tmp_path, max_bytes=35_000)
    for place in range(8):
        cache.store(f"{place:02}-x", table)
        os.utime(tmp_path / f"{place:02}-x", (place, place))
        cache.load("00-x")  # in use, and so not the oldest
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["00-x", "05-x", "06-x", "07-x"]
    assert cache.load("01-x") is None


def test_paths_do_not_share_what_is_kept(tmp_path: Path) -> None:
    one, other = IndexCache(tmp_path, ["a", "b"]), IndexCache(tmp_path, ["ab"])
    assert one.name("footers") != other.name("footers")
    assert one.name("rows", "a", "b") != one.name("rows", "ab")


# --- files that change --------------------------------------------------------------------


def test_a_file_written_to_after_it_was_indexed_is_refused(data: Path, cache: Path) -> None:
    dataset = ParquetDataset(data, columns=["id"], index_cache=cache, buffer_bytes=1)
    dataset.validate()
    write(data / "2.parquet", 500, 130)  # as many rows, and likely as many bytes
    with pytest.raises(DataError, match=r"2\.parquet: has changed since .*; open the data set"):
        ids(dataset)
    again = ParquetDataset(data, columns=["id"], index_cache=cache)
    assert 505 in ids(again)


def test_a_file_whose_times_do_not_tell_is_known_by_its_footer(data: Path, cache: Path) -> None:
    target = data / "2.parquet"
    before = target.stat()
    ParquetDataset(data, columns=["id"], index_cache=cache).validate()
    content = pq.read_table(target)
    table = content.set_column(0, "id", pa.array(content["id"].to_numpy() + 7))
    pq.write_table(table, target, row_group_size=50)
    assert target.stat().st_size == before.st_size, "the case needs files of one size"
    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
    dataset = ParquetDataset(data, columns=["id"], index_cache=cache)
    with pytest.raises(DataError, match=r"2\.parquet: has changed .* another footer"):
        ids(dataset)
    assert 178 + 7 in ids(ParquetDataset(data, columns=["id"], index_cache=cache))


def test_a_file_that_grows_while_it_is_listed_is_refused(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = footers_module.read_footer

    def late(filesystem: Any, file: Any, pool: Any) -> Any:
        if file.path.endswith("0.parquet"):
            write(data / "0.parquet", 0, 400)
        return original(filesystem, file, pool)

    monkeypatch.setattr("farandole.data.index.read_footer", late)
    with pytest.raises(DataError, match=r"0\.parquet: has changed .* bytes, not"):
        ParquetDataset(data, index_cache=None).validate()


# --- filters ------------------------------------------------------------------------------


def test_a_filter_is_counted_once(
    data: Path, cache: Path, decoded: list[tuple[int, int]], reads: list[str]
) -> None:
    def open_it(**options: Any) -> ParquetDataset:
        filters = options.pop("filters", [("x", ">", 60.0), ("x", "<", 71.0)])
        return ParquetDataset(data, columns=["id"], filters=filters, index_cache=cache, **options)

    first = open_it()
    assert first.num_rows == 21
    assert decoded == [(1, 0)]
    decoded.clear()
    reads.clear()
    again = open_it()
    assert again.fingerprint == first.fingerprint
    assert decoded == reads == []
    assert ids(again) == list(range(121, 142))
    decoded.clear()
    assert open_it(filters=[("x", ">", 60.0), ("x", "<", 71.5)]).num_rows == 22
    assert decoded == [(1, 0)]
    decoded.clear()
    write(data / "4.parquet", 122, 60)
    assert open_it().num_rows == 41
    assert {file for file, _ in decoded} == {4}


def test_another_type_counts_anew(tmp_path: Path, cache: Path) -> None:
    pq.write_table(pa.table({"a": ["5", "10", "7"]}), tmp_path / "x.parquet")
    text = ParquetDataset(tmp_path / "x.parquet", filters=[("a", ">", "6")], index_cache=cache)
    assert text.num_rows == 1
    schema = pa.schema([("a", pa.int32())])
    numbers = ParquetDataset(
        tmp_path / "x.parquet", filters=[("a", ">", 6)], schema=schema, index_cache=cache
    )
    assert numbers.num_rows == 2


def test_long_lists_in_filters_are_told_apart(data: Path, cache: Path) -> None:
    one = pc.field("id").isin([*range(50), 60, *range(200, 250)])
    other = pc.field("id").isin([*range(50), 160, *range(200, 250)])
    assert str(one) == str(other)
    datasets = [
        ParquetDataset(data, columns=["id"], filters=f, index_cache=cache) for f in (one, other)
    ]
    assert [60 in ids(dataset) for dataset in datasets] == [True, False]
    assert datasets[0].fingerprint != datasets[1].fingerprint


@pytest.mark.parametrize("name", ["a.b", "with space", "straße", "x) y", "f1", "(", "and"])
def test_filters_name_any_column(tmp_path: Path, name: str) -> None:
    table = pa.table({"f": [9, 9, 9], "f10": [0, 0, 0], name: [1, 2, 3]})
    pq.write_table(table, tmp_path / "x.parquet")
    dataset = ParquetDataset(tmp_path, columns=[name], filters=[(name, ">", 1)], index_cache=None)
    assert dataset.num_rows == 2


def test_filters_on_fields_of_structs(tmp_path: Path) -> None:
    table = pa.table({"a": [{"b": 1}, None, {"b": 3}], "id": [0, 1, 2]})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=1)
    for filters in (pc.field("a.b") > 1, pc.field(("a", "b")) > 1, [("a.b", ">", 1)]):
        dataset = ParquetDataset(tmp_path, columns=["id"], filters=filters, index_cache=None)
        assert ids(dataset) == [2]


def test_a_column_that_no_filter_names_may_conflict(tmp_path: Path) -> None:
    pq.write_table(pa.table({"f1": [1], "f10": [1]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"f1": ["x"], "f10": [2]}), tmp_path / "1.parquet")
    dataset = ParquetDataset(tmp_path, columns=["f10"], filters=[("f10", ">", 1)])
    assert dataset.num_rows == 1


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (~(pc.field("x") < 5.0), 1),
        (pc.field("x") != 1.0, 1),
        (pc.is_nan(pc.field("x")), 1),
        (pc.field("x") == 1.0, 3),
    ],
    ids=str,
)
def test_statistics_do_not_hide_nan(tmp_path: Path, filters: Any, expected: int) -> None:
    pq.write_table(pa.table({"x": [1.0, 1.0, np.nan, 1.0]}), tmp_path / "x.parquet")
    assert ParquetDataset(tmp_path, filters=filters).num_rows == expected


# --- small index --------------------------------------------------------------------------


def test_five_thousand_columns(tmp_path: Path, cache: Path, reads: list[str]) -> None:
    table = pa.table({f"f{place}": np.arange(2) + place for place in range(5000)})
    pq.write_table(table, tmp_path / "x.parquet", use_dictionary=False, compression="none")
    for _ in range(2):
        dataset = ParquetDataset(
            tmp_path / "x.parquet", features=["f4999", "f0"], index_cache=cache
        )
        (block,) = dataset.read_rows([range(2)])
        assert block.features is not None
        assert block.features.tolist() == [[4999 + row, row] for row in range(2)]
        assert len(dataset.schema) == 5000
    assert reads == ["x.parquet"]


def test_metadata_of_opened_files_is_bounded(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.data.metadata.MAX_BYTES", 1)
    dataset = ParquetDataset(data, columns=["id"], index_cache=None, buffer_bytes=1)
    assert ids(dataset) == list(range(sum(ROWS)))
    assert len(dataset._index().reader._opened._kept) == 1
