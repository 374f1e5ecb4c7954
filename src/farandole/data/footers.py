"""Read what the ends of Parquet files say, and keep of it what is needed, in few bytes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from numpy.typing import NDArray

from farandole.data.files import DataFile
from farandole.data.nested import is_among, named_nodes
from farandole.errors import DamagedFileError, DataError

UNKNOWN = -1
"""For a number of nulls that a footer does not tell."""

TABLE = pa.schema(
    [
        ("path", pa.string()),
        ("size", pa.int64()),
        ("version", pa.string()),
        ("digest", pa.binary()),
        ("problem", pa.string()),
        ("schema", pa.int32()),
        ("group_rows", pa.list_(pa.int64())),
        ("group_bytes", pa.list_(pa.int64())),
        ("null_group", pa.list_(pa.int32())),
        ("null_column", pa.list_(pa.int32())),
        ("null_count", pa.list_(pa.int64())),
    ]
)
"""A row for each file. Numbers of nulls are listed where they are not 0."""

Leaves = list[tuple[int, int]]
"""Place of a column in the file, and its number in a `SchemaPool`."""

_MAGIC = b"PAR1"
_ENCRYPTED = b"PARE"
_TAIL_BYTES = 1 << 16
_END_BYTES = 8


@dataclass(frozen=True, slots=True)
class Footer:
    """What the end of one file says."""

    digest: bytes
    schema: int
    """Number of the schema in a `SchemaPool`."""
    group_rows: list[int]
    group_bytes: list[int]
    """Decoded, without what encodings save."""
    nulls: list[tuple[int, int, int]]
    """Row group, number of the column in the pool, number of nulls; without zeros."""


class SchemaPool:
    """Each schema once: files of a data set tend to share theirs. Safe from many threads.

    Parameters
    ----------
    wanted : collection of str, optional
        Columns whose nulls are counted; default: all.
    schemas : sequence of pyarrow.Schema
        Those that have a number already.
    columns : sequence of str
        The same of columns.

    Attributes
    ----------
    schemas : list of pyarrow.Schema
        By their numbers.
    columns : list of str
        By their numbers, as far as their nulls are counted.
    """

    def __init__(
        self,
        wanted: Collection[str] | None,
        schemas: Sequence[pa.Schema] = (),
        columns: Sequence[str] = (),
    ) -> None:
        self.schemas = list(schemas)
        self.columns = list(columns)
        self._wanted = wanted
        self._of_file: dict[tuple[int, bytes], list[tuple[pq.ParquetSchema, int, Leaves]]] = {}
        self._schema_numbers = {_key(schema): n for n, schema in enumerate(schemas)}
        self._column_numbers = {name: number for number, name in enumerate(columns)}
        self._lock = threading.Lock()

    def enter(self, metadata: pq.FileMetaData) -> tuple[int, Leaves]:
        """Return the number of a file's schema, and where the nulls of which column are told."""
        key = (metadata.num_columns, (metadata.metadata or {}).get(b"ARROW:schema", b""))
        with self._lock:
            known = self._of_file.setdefault(key, [])
            for stored, number, leaves in known:
                if stored.equals(metadata.schema):
                    return number, leaves
            schema = metadata.schema.to_arrow_schema().remove_metadata()
            number = self._schema_numbers.setdefault(_key(schema), len(self.schemas))
            if number == len(self.schemas):
                self.schemas.append(schema)
            leaves = self._leaves(schema)
            known.append((metadata.schema, number, leaves))
            return number, leaves

    def _leaves(self, schema: pa.Schema) -> Leaves:
        """Return leaf and column number of columns that are not divided into fields."""
        found: Leaves = []
        for name, node in named_nodes(schema).items():
            if node.is_divided or not (self._wanted is None or is_among(name, self._wanted)):
                continue
            number = self._column_numbers.setdefault(name, len(self.columns))
            if number == len(self.columns):
                self.columns.append(name)
            found.append((node.leaves[0], number))
        return found


@dataclass(frozen=True)
class Footers:
    """What the footers of all files say; `table` has a row for each, as `TABLE` has it.

    Parameters
    ----------
    table : pyarrow.Table
    schemas : sequence of pyarrow.Schema
        In the order in which the files first have them.
    columns : sequence of str
        By the numbers that the table gives them.
    counted : frozenset of str, optional
        Columns whose nulls are known; None: all.
    """

    table: pa.Table
    schemas: Sequence[pa.Schema]
    columns: Sequence[str]
    counted: frozenset[str] | None

    @cached_property
    def schema_of_file(self) -> NDArray[np.int32]:
        """The number of each file's schema."""
        return as_numpy(self.table["schema"])

    @cached_property
    def schema_of_group(self) -> NDArray[np.int32]:
        """The number of the schema of every row group of all files."""
        return np.repeat(self.schema_of_file, np.diff(self.group_starts))

    @cached_property
    def group_starts(self) -> NDArray[np.int64]:
        """The number of row groups before each file, and of all."""
        return _starts(self.table["group_rows"])

    @cached_property
    def group_rows(self) -> NDArray[np.int64]:
        """The number of rows of every row group of all files."""
        return _flat(self.table["group_rows"])

    @cached_property
    def group_bytes(self) -> NDArray[np.int64]:
        """The decoded size of every row group of all files."""
        return _flat(self.table["group_bytes"])

    def rows(self, file: int) -> NDArray[np.int64]:
        """Return the number of rows of each row group of a file."""
        return self.group_rows[self.group_starts[file] : self.group_starts[file + 1]]

    def digest(self, file: int) -> bytes:
        """Return the digest of a file's footer."""
        return self.table["digest"][file].as_py()

    def num_nulls(self, name: str) -> NDArray[np.int64]:
        """Return how many nulls a column has in every row group, or `UNKNOWN`.

        Empty lists count, as they do in Parquet. Meaningless for files that do not hold it.
        """
        counts = np.zeros(len(self.group_rows), np.int64)
        if self.counted is not None and not is_among(name, self.counted):
            counts[:] = UNKNOWN
        number = self._column_numbers.get(name)
        if number is not None:
            groups, columns, numbers = self._nulls
            first, last = np.searchsorted(columns, [number, number + 1])
            counts[groups[first:last]] = numbers[first:last]
        return counts

    @cached_property
    def _column_numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.columns)}

    @cached_property
    def _nulls(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Row group among all, column and number, ordered by the column."""
        per_file = np.diff(_starts(self.table["null_group"]))
        groups = _flat(self.table["null_group"]) + np.repeat(self.group_starts[:-1], per_file)
        columns = _flat(self.table["null_column"])
        order = np.argsort(columns, kind="stable")
        return groups[order], columns[order], _flat(self.table["null_count"])[order]


def make_table(files: Sequence[DataFile], footers: Sequence[Footer | DamagedFileError]) -> pa.Table:
    """Return the rows for some files, good and bad."""
    rows = [_row(file, footer) for file, footer in zip(files, footers, strict=True)]
    columns = zip(*rows, strict=True) if rows else [()] * len(TABLE)
    arrays = [pa.array(values, kind.type) for values, kind in zip(columns, TABLE, strict=True)]
    return pa.table(arrays, schema=TABLE)


def _row(file: DataFile, footer: Footer | DamagedFileError) -> tuple[object, ...]:
    about = (file.path, file.size_bytes, file.version)
    if isinstance(footer, DamagedFileError):
        return (*about, None, footer.problem, None, [], [], [], [], [])
    sizes = (footer.group_rows, footer.group_bytes)
    nulls = ([entry[place] for entry in footer.nulls] for place in range(3))
    return (*about, footer.digest, None, footer.schema, *sizes, *nulls)


def read_footer(
    filesystem: pafs.FileSystem, file: DataFile, pool: SchemaPool
) -> Footer | DamagedFileError:
    """Read the end of a file, in one request if it is not large.

    Returns
    -------
    Footer or DamagedFileError
        The latter if the bytes are there and are no Parquet: such a file may be left out.

    Raises
    ------
    DataError
        If the file cannot be read: nobody knows what is in it.
    """
    try:
        with filesystem.open_input_file(file.path) as stream:
            if stream.size() != file.size_bytes:
                raise changed(file.path, f"has {stream.size()} bytes, not {file.size_bytes}")
            tail = read_tail(stream, file.size_bytes)
            start = b"" if _footer_bytes(tail) else stream.read_at(len(_MAGIC), 0)
    except OSError as error:
        raise unreadable(file.path, error) from error
    try:
        return extract(parse_tail(tail), digest_of(tail), pool)
    except (pa.ArrowException, OSError) as error:
        return damaged_footer(file.path, _what_is_wrong(file, tail, start, error))


def read_tail(stream: pa.NativeFile, size_bytes: int) -> bytes:
    """Return the footer with its length and magic bytes, or what stands in its place."""
    start = max(0, size_bytes - _TAIL_BYTES)
    tail = stream.read_at(size_bytes - start, start)
    wanted = _footer_bytes(tail) + _END_BYTES
    if len(tail) < wanted <= size_bytes:
        tail = stream.read_at(wanted, size_bytes - wanted)
    return tail[-wanted:]


def parse_tail(tail: bytes) -> pq.FileMetaData:
    """Return what `read_tail` read as metadata; raises what pyarrow raises."""
    return pq.read_metadata(pa.BufferReader(tail))


def digest_of(tail: bytes) -> bytes:
    """Return what tells a footer from all others."""
    return hashlib.blake2b(tail, digest_size=16).digest()


def extract(metadata: pq.FileMetaData, digest: bytes, pool: SchemaPool) -> Footer:
    """Return what is kept of a file's metadata."""
    schema, leaves = pool.enter(metadata)
    rows: list[int] = []
    sizes: list[int] = []
    nulls: list[tuple[int, int, int]] = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        rows.append(group.num_rows)
        sizes.append(group.total_byte_size)
        for leaf, column in leaves:
            statistics = group.column(leaf).statistics
            count = UNKNOWN
            if statistics is not None and statistics.has_null_count:
                count = statistics.null_count
            if count:
                nulls.append((number, column, count))
    return Footer(digest, schema, rows, sizes, nulls)


def damaged_footer(path: str, problem: str) -> DamagedFileError:
    """Return the error for a file that is no Parquet."""
    remedy = "write it anew, leave it out, or pass on_bad='skip'"
    return DamagedFileError(path=path, problem=problem, remedy=remedy)


def changed(path: str, how: str) -> DataError:
    """Return the error for a file that is not what it was."""
    return DataError(
        path=path,
        problem=f"has changed since it was listed or indexed: it {how}",
        remedy="open the data set again, and do not change files while they are read",
    )


def unreadable(path: str, error: Exception) -> DataError:
    """Return the error for a file whose bytes cannot be had."""
    return DataError(
        path=path,
        problem=f"cannot be read: {first_line(error)}",
        remedy="check that it is there, and your rights",
    )


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0]


def _key(schema: pa.Schema) -> bytes:
    return schema.serialize().to_pybytes()


def _footer_bytes(tail: bytes) -> int:
    """Return the length of the footer that the end of a file tells, or 0 if it tells none."""
    whole = len(tail) >= _END_BYTES and tail[-len(_MAGIC) :] in (_MAGIC, _ENCRYPTED)
    return int.from_bytes(tail[-_END_BYTES : -len(_MAGIC)], "little") if whole else 0


def _what_is_wrong(file: DataFile, tail: bytes, start: bytes, error: Exception) -> str:
    if file.size_bytes == 0:
        return "is empty, not a Parquet file"
    if tail.endswith(_ENCRYPTED):
        return "is encrypted, which is not supported"
    if not _footer_bytes(tail) and start != _MAGIC:
        return "is not a Parquet file"
    return f"has no usable footer, as if cut short: {first_line(error)}"


def _starts(lists: pa.ChunkedArray) -> NDArray[np.int64]:
    lengths = as_numpy(pc.call_function("list_value_length", [lists]))
    return np.concatenate(([0], np.cumsum(lengths)))


def _flat(lists: pa.ChunkedArray) -> NDArray[np.int64]:
    return as_numpy(pc.call_function("list_flatten", [lists]))


def as_numpy(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return numbers, none of them null. Unlike to_numpy, it does not import pandas."""
    return np.from_dlpack(column.combine_chunks())
