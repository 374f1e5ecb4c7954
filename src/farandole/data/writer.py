"""Write Parquet files that are cheap to train from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from farandole.data.files import HIVE_NULL
from farandole.data.tensors import pack

Compression = Literal["none", "snappy", "lz4", "zstd"]

_FILE_BYTES = 512 << 20
_MAX_SAMPLE_ROWS = 65536
_MAX_DISTINCT = 0.1
"""Share of distinct values up to which a dictionary is used."""


@dataclass(frozen=True)
class Storage:
    """How a table is stored.

    Attributes
    ----------
    schema : pyarrow.Schema
        As written: columns of tensors are there as the bytes that they become.
    compression : {"none", "snappy", "lz4", "zstd"}
    row_group_rows : int
    dictionary : tuple of str
        Columns with dictionary pages.
    """

    schema: pa.Schema
    compression: Compression
    row_group_rows: int
    dictionary: tuple[str, ...] = ()

    def packed(self, table: pa.Table) -> pa.Table:
        """Return a table as the types that are stored."""
        columns = [
            table.column(name)
            if table.schema.field(name).type == kind
            else pa.chunked_array([pack(c, kind) for c in table.column(name).chunks], kind)
            for name, kind in zip(self.schema.names, self.schema.types, strict=True)
        ]
        return pa.Table.from_arrays(columns, schema=self.schema)

    def open(self, sink: Any) -> pq.ParquetWriter:
        """Return a writer onto an open file."""
        dictionary: Any = list(self.dictionary)
        return pq.ParquetWriter(
            sink, self.schema, compression=self.compression, use_dictionary=dictionary
        )


def dictionary_columns(table: pa.Table) -> tuple[str, ...]:
    """Return the columns that a dictionary makes smaller and no slower to read.

    These are strings, bytes, integers and times of few distinct values, by a sample. Never
    floats: looking up a float costs more than copying it.
    """
    sample = table.slice(0, _MAX_SAMPLE_ROWS)
    names: list[str] = []
    for name, column in zip(sample.schema.names, sample.columns, strict=True):
        kind = column.type
        is_text = pt.is_string(kind) or pt.is_large_string(kind) or pt.is_binary(kind)
        suits = is_text or pt.is_integer(kind) or pt.is_temporal(kind)
        if suits and len(column.unique()) <= _MAX_DISTINCT * len(column):
            names.append(name)
    return tuple(names)


@dataclass
class PartWriter:
    """Writes rows into the files of one folder, in row groups of one size."""

    folder: Path
    storage: Storage
    num_files: int = 0
    num_row_groups: int = 0
    size_bytes: int = 0
    pending_bytes: int = 0
    _pending: list[pa.Table] = field(default_factory=list[pa.Table])
    _pending_rows: int = 0
    _sink: Any = None
    _writer: pq.ParquetWriter | None = None

    def add(self, table: pa.Table) -> None:
        """Take rows; write all row groups that are full."""
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self.pending_bytes += table.nbytes
        if self._pending_rows >= self.storage.row_group_rows:
            self.flush(only_full=True)

    def flush(self, *, only_full: bool = False) -> None:
        """Write what is held, the last row group smaller."""
        size = self.storage.row_group_rows
        table = pa.concat_tables(self._pending) if self._pending else None
        self._pending = []
        start = 0
        while table is not None and start < table.num_rows:
            if only_full and table.num_rows - start < size:
                self._pending = [table.slice(start)]
                break
            self._write(table.slice(start, size))
            start += size
        self._pending_rows = sum(rest.num_rows for rest in self._pending)
        self.pending_bytes = sum(rest.nbytes for rest in self._pending)

    def close(self) -> None:
        """Write the rest."""
        self.flush()
        self._close_file()

    def abort(self) -> None:
        """Close the file as it is."""
        if self._sink is not None:
            self._sink.close()

    def _write(self, rows: pa.Table) -> None:
        if self._writer is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"part-{self.num_files:05d}.parquet"
            self._sink = path.open("wb")
            self._writer = self.storage.open(self._sink)
            self.num_files += 1
        # In one piece, since a page ends with each chunk of a column.
        self._writer.write_table(self.storage.packed(rows.combine_chunks()), rows.num_rows)
        self.num_row_groups += 1
        if self._sink.tell() >= _FILE_BYTES:
            self._close_file()

    def _close_file(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self.size_bytes += self._sink.tell()
        self._sink.flush()
        os.fsync(self._sink.fileno())
        self._sink.close()
        self._writer = self._sink = None


class TableWriter:
    """Writes tables into a folder, or into folders ``month=3`` by their values.

    Parameters
    ----------
    folder : Path
    storage : Storage
        Without the columns of `partition_by`.
    partition_by : sequence of str
    memory_bytes : int
        Row groups of many folders are cut short where they would take more.
    """

    def __init__(
        self, folder: Path, storage: Storage, *, partition_by: Sequence[str], memory_bytes: int
    ) -> None:
        self._folder = folder
        self._storage = storage
        self._partition_by = list(partition_by)
        self._memory_bytes = memory_bytes
        self.parts: dict[tuple[Any, ...], PartWriter] = {}

    def add(self, table: pa.Table) -> None:
        """Take rows."""
        for key, rows in self._split(table):
            if key not in self.parts:
                values = dict(zip(self._partition_by, key, strict=True))
                folder = self._folder.joinpath(*_folders(values))
                self.parts[key] = PartWriter(folder, self._storage)
            self.parts[key].add(rows)
        while sum(part.pending_bytes for part in self.parts.values()) > self._memory_bytes:
            max(self.parts.values(), key=lambda part: part.pending_bytes).flush()

    def close(self) -> None:
        """Write the rest of all files."""
        for part in self.parts.values():
            part.close()

    def abort(self) -> None:
        """Close all files as they are."""
        for part in self.parts.values():
            part.abort()

    def _split(self, table: pa.Table) -> Iterator[tuple[tuple[Any, ...], pa.Table]]:
        """Yield the rows of each folder, in the order in which they came."""
        if not self._partition_by:
            yield (), table
            return
        codes = np.zeros(table.num_rows, np.int64)
        for name in self._partition_by:
            coded = table.column(name).combine_chunks().dictionary_encode(null_encoding="encode")
            places = coded.indices.to_numpy(zero_copy_only=False)
            codes = np.unique(codes * len(coded.dictionary) + places, return_inverse=True)[1]
        order = np.argsort(codes, kind="stable")
        ends = np.flatnonzero(np.diff(codes[order], append=-1)) + 1
        table, start = table.take(pa.array(order)), 0
        for end in ends.tolist():
            rows = table.slice(start, end - start)
            key = tuple(rows.column(name)[0].as_py() for name in self._partition_by)
            yield key, rows.drop_columns(self._partition_by)
            start = end


def _folders(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of nested folders that give values to columns."""
    for name, value in values.items():
        text = HIVE_NULL if value is None else quote(str(value), safe="")
        yield f"{quote(name, safe='')}={text}"
