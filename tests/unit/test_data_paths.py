"""Ways to point at data, and what each of them finds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from farandole.data import ParquetDataset
from farandole.data.files import find_files
from farandole.errors import DataError


def write(path: Path, *values: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": pa.array(values, pa.int64())}), path)


def ids(paths: Any, **options: Any) -> list[int]:
    dataset = ParquetDataset(paths, **options)
    return [value for batch in dataset.scan(["id"]) for value in batch["id"].to_pylist()]


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder whose name has all that may be misread."""
    folder = tmp_path / "a b" / "ü=%41 + #1"
    for place in range(3):
        write(folder / f"part {place}.parquet", place)
    return folder


def test_names_may_hold_anything(odd: Path) -> None:
    assert ids(odd, partitioning=None) == [0, 1, 2]
    assert ids(odd / "part 1.parquet", partitioning=None) == [1]
    assert ids(f"{odd}/part [12].parquet", partitioning=None) == [1, 2]
    assert ids(f"file://{odd.parent}".replace(" ", "%20"), partitioning=None) == [0, 1, 2]
    assert ids(f"file://{odd.parent}", partitioning=None) == [0, 1, 2]


def test_patterns_in_urls(tmp_path: Path) -> None:
    for place in range(3):
        write(tmp_path / f"m={place}" / "x.parquet", place)
    assert ids(f"file://{tmp_path}/m=[12]/*.parquet") == [1, 2]
    assert ids(f"file://{tmp_path}/m=?/x.parquet") == [0, 1, 2]
    assert ids(f"file://{tmp_path}/**/x.parquet") == [0, 1, 2]


def test_a_pattern_does_not_look_below_its_folder(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", 1)
    write(tmp_path / "below" / "x.parquet", 2)
    assert ids(f"{tmp_path}/*.parquet") == [1]
    assert ids(f"{tmp_path}/*/*.parquet") == [2]


def test_a_name_with_pattern_characters_that_exists_is_no_pattern(tmp_path: Path) -> None:
    write(tmp_path / "x[1].parquet", 1)
    write(tmp_path / "x1.parquet", 2)
    assert ids(f"{tmp_path}/x[1].parquet") == [1]


def test_a_file_is_used_once_however_often_it_is_named(tmp_path: Path) -> None:
    for place in range(3):
        write(tmp_path / f"{place}.parquet", place)
    once = ParquetDataset(tmp_path)
    often = ParquetDataset([tmp_path / "2.parquet", tmp_path, f"{tmp_path}/*.parquet", tmp_path])
    assert often.num_rows == 3
    assert often.fingerprint == once.fingerprint


def test_what_other_systems_leave_beside_the_data_is_no_data(tmp_path: Path) -> None:
    write(tmp_path / "k=1" / "x.parquet", 1)
    pq.write_metadata(pa.schema([("id", pa.int64())]), tmp_path / "_metadata")
    pq.write_metadata(pa.schema([("id", pa.int64())]), tmp_path / "_common_metadata")
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "k=1" / ".x.parquet.crc").write_bytes(b"crc")
    (tmp_path / "_delta_log").mkdir()
    (tmp_path / "_delta_log" / "0.json").write_text("{}")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    write(tmp_path / ".ipynb_checkpoints" / "x.parquet", 9)
    assert ids(tmp_path) == [1]


def test_versions_tell_files_apart(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", 1)
    (local,) = find_files(tmp_path, hive=True)[1]
    assert local.version == str((tmp_path / "x.parquet").stat().st_mtime_ns)


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = pytest.importorskip("fsspec").filesystem("memory")
    yield filesystem
    with contextlib.suppress(FileNotFoundError):
        filesystem.rm("/index-test", recursive=True)


def put(memory: Any, path: str, *values: int) -> None:
    with memory.open(path, "wb") as stream:
        pq.write_table(pa.table({"id": values}), stream)


def test_stores_without_times_are_known_by_their_tags(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(memory, "/index-test/x.parquet", 1, 2)
    tags = {"ETag": "one"}
    original = type(memory).info

    def info(self: Any, path: str, **kwargs: Any) -> dict[str, Any]:
        told = {**original(self, path, **kwargs), **tags}
        return {key: value for key, value in told.items() if key != "created"}

    monkeypatch.setattr(type(memory), "info", info)
    opened: list[str] = []
    original_open = pafs.PyFileSystem.open_input_file

    class Spy(pafs.PyFileSystem):
        def open_input_file(self, path: str) -> Any:
            opened.append(path)
            return original_open(self, path)

    monkeypatch.setattr(pafs, "PyFileSystem", Spy)
    for reads in (1, 0):
        ParquetDataset("memory://index-test", index_cache=tmp_path).validate()
        assert len(opened) == reads
        opened.clear()
    tags["ETag"] = "two"
    ParquetDataset("memory://index-test", index_cache=tmp_path).validate()
    assert len(opened) == 1
    opened.clear()
    tags.clear()  # nothing tells whether it has changed, so it is read each time
    for _ in range(2):
        ParquetDataset("memory://index-test", index_cache=tmp_path).validate()
    assert len(opened) == 2


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ("nosuch://bucket/x", "nosuch"),
        ("file:///no/such/file.parquet", r"file:///no/such/file\.parquet: does not exist"),
        ("memory://no-such-folder/x", r"memory://no-such-folder/x: does not exist"),
        ([], "no path is given"),
    ],
)
def test_what_cannot_be_found_is_named(paths: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ParquetDataset(paths).validate()


def test_paths_on_two_file_systems(tmp_path: Path, memory: Any) -> None:
    write(tmp_path / "x.parquet", 1)
    put(memory, "/index-test/x.parquet", 2)
    with pytest.raises(DataError, match="not on the same file system"):
        ParquetDataset([tmp_path, "memory://index-test"]).validate()


def test_a_folder_that_may_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("farandole.data.files._walk", refuse)
    with pytest.raises(DataError, match=r"cannot be listed: .*Permission denied; .* your rights"):
        ParquetDataset(tmp_path).validate()
