"""Rows of frames, tables and streams, written once as Parquet and read from there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from farandole.data.parquet import ParquetDataset
from farandole.errors import DataError

GROUP_ROWS = 65536
_MARKER = "_farandole.json"
_SUCCESS = "_SUCCESS"


class StoredDataset(ParquetDataset):
    """Rows that `farandole.dataset` wrote as Parquet; in all else a `ParquetDataset`.

    Without a folder of the user's they are in a temporary one, which goes with this object: a
    copy that was sent to another process is of use as long as this one lives.
    """

    def __init__(self, folder: _Folder, **options: Any) -> None:
        # Folders above the files may be called anything: they are no columns.
        super().__init__(folder.path, **{"partitioning": None, **options})
        self._folder = folder

    def __repr__(self) -> str:
        return f"StoredDataset({str(self._folder.path)!r})"


def store(
    write: Callable[[Path], None],
    folder: str | Path | None,
    *,
    reuse: bool,
    options: dict[str, Any],
) -> StoredDataset:
    """Have rows written into a folder, and return the data set of it. Blocks.

    Parameters
    ----------
    write : callable
        Writes Parquet files into an empty folder that exists.
    folder : str, Path or None
        Kept; None for a temporary one.
    reuse : bool
        Whether to take what is in the folder, if it is whole and was not changed since.
    options : dict
        Of `ParquetDataset`.

    Raises
    ------
    DataError
        If the folder holds something that must not be used, or nothing is written.
    """
    if folder is None:
        place = _Folder(Path(tempfile.mkdtemp(prefix="farandole-")), is_temporary=True)
        write(place.path)
        return StoredDataset(place, **{"index_cache": None, **options})
    if "://" in str(folder):
        raise DataError(
            path=str(folder),
            problem="is no folder of this file system",
            remedy="write Parquet files there yourself, and pass their address to ParquetDataset",
        )
    place = _Folder(Path(folder).absolute())
    if reuse and place.path.exists() and any(place.path.iterdir()):
        _check_whole(place.path)
    else:
        _make_empty(place.path)
        write(place.path)
        _mark(place.path)
    return StoredDataset(place, **options)


class _Folder:
    """A folder with Parquet files; a temporary one is removed with the object that made it."""

    def __init__(self, path: Path, *, is_temporary: bool = False) -> None:
        self.path = path
        if is_temporary:
            weakref.finalize(self, _remove, path, os.getpid())

    def __reduce__(self) -> tuple[Any, ...]:
        return _Folder, (self.path,)


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a child that was forked
        shutil.rmtree(path, ignore_errors=True)


def _make_empty(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise DataError(
            path=str(path),
            problem="is not empty",
            remedy="pass reuse=True to read what was written there before, or another folder",
        )


def _fingerprint(path: Path) -> str:
    return ParquetDataset(path, partitioning=None, index_cache=None).fingerprint


def _mark(path: Path) -> None:
    """Say that a folder is whole, and what it holds."""
    content = json.dumps({"fingerprint": _fingerprint(path)})
    for name, text in ((_MARKER, content), (_SUCCESS, "")):
        temporary = path / f".{name}.tmp"
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path / name)


def _check_whole(path: Path) -> None:
    remedy = "delete it, or pass another folder"
    try:
        marked = json.loads((path / _MARKER).read_text())["fingerprint"]
    except FileNotFoundError:
        problem = "was not written by farandole.dataset, or not to its end"
        raise DataError(path=str(path), problem=problem, remedy=remedy) from None
    except (ValueError, KeyError, TypeError) as error:
        problem = f"has a damaged {_MARKER}: {error}"
        raise DataError(path=str(path), problem=problem, remedy=remedy) from error
    if marked != _fingerprint(path):
        problem = "was changed after it had been written"
        raise DataError(path=str(path), problem=problem, remedy=remedy)


def write_stream(stream: pa.RecordBatchReader, folder: Path) -> None:
    """Write the batches of a stream as one file, in row groups of `GROUP_ROWS`. Blocks.

    Holds one row group in memory. A digest of all values goes into the footer, and so into the
    fingerprint.

    Raises
    ------
    DataError
        If Parquet has no place for a type.
    """
    path = folder / "part-00000.parquet"
    temporary = folder / f".{path.name}.tmp"
    coded: Any = [field.name for field in stream.schema if not pt.is_floating(field.type)]
    try:
        with pq.ParquetWriter(
            temporary, stream.schema, compression="zstd", use_dictionary=coded
        ) as writer:
            waiting: list[pa.RecordBatch] = []
            num_rows = 0
            digest = hashlib.sha256()
            for batch in stream:
                digest.update(batch.serialize())
                waiting.append(batch)
                num_rows += batch.num_rows
                if num_rows >= GROUP_ROWS:
                    table = pa.Table.from_batches(waiting, stream.schema)
                    whole = num_rows - num_rows % GROUP_ROWS
                    writer.write_table(table.slice(0, whole), row_group_size=GROUP_ROWS)
                    waiting, num_rows = table.slice(whole).to_batches(), num_rows - whole
            if num_rows:
                writer.write_table(pa.Table.from_batches(waiting, stream.schema))
            writer.add_key_value_metadata({"farandole.digest": digest.hexdigest()})
    except pa.ArrowException as error:
        problem = f"cannot be written as Parquet: {error}"
        remedy = "convert the column to a type that Parquet has"
        raise DataError(path="rows in memory", problem=problem, remedy=remedy) from error
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
