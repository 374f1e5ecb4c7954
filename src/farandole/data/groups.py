"""Parquet files as row groups of one common schema."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from numpy.typing import NDArray

from farandole.data.budget import MAX_BATCH_ROWS
from farandole.data.files import DataFile
from farandole.data.footers import (
    UNKNOWN,
    changed,
    digest_of,
    first_line,
    parse_tail,
    read_tail,
    unreadable,
)
from farandole.data.index import IndexCache, load_footers
from farandole.data.metadata import KeptMetadata
from farandole.data.nested import Node, named_nodes, pick, plain
from farandole.data.remote import column_ranges, remote_handler
from farandole.data.schema import (
    SchemaReport,
    deviations,
    partition_type,
    resolve,
    with_given,
)
from farandole.data.tensors import is_packed, unpack
from farandole.errors import ColumnError, DamagedFileError, DataError

_READ_BUFFER_BYTES = 1 << 17
_NULL_IN_FIXED_SIZE = "Expected all lists to be of size="
"""What pyarrow before 26 says of a null where lists have one size."""


class GroupReader:
    """Row groups of many files, each batch cast to one schema.

    Parameters
    ----------
    filesystem : pyarrow.fs.FileSystem
    files : list of DataFile
    schema : pyarrow.Schema, optional
        Types of some or all columns, to be used instead of those found.
    wanted : collection of str, optional
        Columns whose nulls are counted; default: all.
    cache : IndexCache, optional
        Where footers are kept.
    on_bad : {"error", "skip"}
        Whether files that are no Parquet are left out.

    Raises
    ------
    DataError
        If a file is not Parquet, or its end is missing.
    """

    def __init__(
        self,
        filesystem: pafs.FileSystem,
        files: list[DataFile],
        schema: pa.Schema | None,
        *,
        wanted: Collection[str] | None = None,
        cache: IndexCache | None = None,
        on_bad: Literal["error", "skip"] = "error",
    ) -> None:
        self.filesystem = filesystem
        self.cache = cache or IndexCache(None, ())
        self.files, self.footers, self.skipped = load_footers(
            filesystem, files, wanted=wanted, cache=self.cache, on_bad=on_bad
        )
        self._is_local = isinstance(filesystem, pafs.LocalFileSystem)
        self._remote = remote_handler(filesystem)
        self._opened = KeptMetadata()
        self.partition_names = self._partition_names()
        found = resolve(self.footers.schemas)
        found.types.update(self._partition_types())
        resolution = with_given(found, schema, self.name)
        self._resolution = resolution
        self.types = resolution.types
        self._stored: dict[int, dict[str, pa.DataType]] = {}
        self._scalars: dict[tuple[str, str], pa.Scalar] = {}
        self._check_partitions()

    @property
    def name(self) -> str:
        """Path to name in errors that concern all files."""
        return self.files[0].path

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise ColumnError or DataError if a column does not exist or has no common type."""
        for name in names:
            if name in self._resolution.conflicts:
                paths = [files[0] for files in self._paths_by_schema()]
                raise self._resolution.conflicts[name].error(paths)
            if name not in self.types:
                known = tuple(self.types)
                raise ColumnError(
                    path=self.name, column=name, problem="does not exist", known=known
                )

    def all_columns(self) -> list[str]:
        """Return the names of all columns, also of those without a common type.

        Those that are divided into fields are not named, but their fields.
        """
        found = self._resolution
        types = [name for name in found.types if name not in found.fields]
        return types + [
            name
            for name, conflict in found.conflicts.items()
            if name not in found.fields or not conflict.is_of_fields
        ]

    def fields_of(self, name: str) -> list[str]:
        """Return the names of what a column is divided into, down to what is not divided."""
        below = self._resolution.fields.get(name, ())
        return [leaf for field in below for leaf in self.fields_of(field) or [field]]

    @property
    def hidden_fields(self) -> dict[str, str]:
        """Fields that a column of their name hides, each with the column in which it is."""
        return self._resolution.hidden

    @property
    def schema(self) -> pa.Schema:
        """The common schema of all columns that have a type."""
        return self.schema_of([name for name in self.all_columns() if name in self.types])

    def schema_of(self, names: Sequence[str]) -> pa.Schema:
        """Return the common schema of some columns."""
        return pa.schema([(name, self.types[name]) for name in names])

    def schema_report(self) -> SchemaReport:
        """Return which files differ from the common schema, and how."""
        elsewhere = {name: self.types[name] for name in self.partition_names}
        found = deviations(
            self.footers.schemas, self._paths_by_schema(), self._resolution, elsewhere
        )
        return SchemaReport(self.schema, len(self.files), found)

    def num_rows(self, file: int, group: int) -> int:
        """Return how many rows a row group has."""
        return int(self.footers.rows(file)[group])

    def group_bytes(self) -> NDArray[np.float64]:
        """Return the size of each row group of all files, with all columns, once decoded."""
        fixed = sum(_width(kind) or 0.0 for kind in self.types.values())
        # Some encodings are smaller than what they encode, and some columns are in paths.
        return np.maximum(self.footers.group_bytes, self.footers.group_rows * fixed)

    def row_bytes(self, file: int, group: int, names: Sequence[str]) -> float:
        """Return the mean size of some columns of a row, once decoded; at least 1."""
        widths = [_width(self.types[name]) for name in names]
        known = sum(width for width in widths if width is not None)
        if None in widths:
            number = self.group_number(file, group)
            rows = self.footers.group_rows[number]
            known += float(self.footers.group_bytes[number] / max(rows, 1))
        return max(known, 1.0)

    # --- reading --------------------------------------------------------------------------

    def batches(
        self, file: int, group: int, names: Sequence[str], batch_rows: int = MAX_BATCH_ROWS
    ) -> Generator[pa.RecordBatch]:
        """Yield one row group's columns in batches, in order, in the common types.

        Raises
        ------
        DamagedFileError
            If it cannot be decoded.
        DataError
            If the file cannot be read, has changed, or has a value that its column's common
            type cannot hold.
        """
        nodes = self._nodes_of(file)
        present = [name for name in names if name in nodes]
        schema = self.schema_of(names)
        wanted = [nodes[name] for name in present]
        with self.opened(file, group, wanted) as source, self.reading(file, group, present):
            leaves = [leaf for name in present for leaf in leaf_paths(source, nodes[name])]
            for batch in source.iter_batches(
                batch_size=batch_rows, row_groups=[group], columns=leaves, use_threads=False
            ):
                stored = dict(zip(batch.schema.names, batch.columns, strict=True))
                columns = [
                    self._cast(file, group, field, _picked(stored, nodes[field.name]))
                    if field.name in nodes
                    else self._constant(file, field, batch.num_rows)
                    for field in schema
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def expect(self, file: int, group: int, names: Sequence[str]) -> None:
        """Begin to read what `batches` will be called for, if it is remote. Does not block."""
        metadata = None if self._remote is None else self._opened.get(file)
        if self._remote is not None and metadata is not None:
            nodes = self._nodes_of(file)
            leaves = [leaf for name in names if name in nodes for leaf in nodes[name].leaves]
            ranges = column_ranges(metadata, group, leaves)
            self._remote.prepare(self.files[file].path, ranges)

    @contextmanager
    def opened(
        self, file: int, group: int = 0, wanted: Sequence[Node] = ()
    ) -> Iterator[pq.ParquetFile]:
        """Open a file, and check that it is the one that was indexed.

        What is `wanted` of a row group is read ahead where the file is remote.

        Raises
        ------
        DataError
            If it cannot be read or has changed.
        """
        path = self.files[file].path
        try:
            stream = self.filesystem.open_input_file(path)
        except OSError as error:
            raise unreadable(path, error) from error
        with stream:
            metadata = self._metadata(file, stream)
            leaves = [leaf for node in wanted for leaf in node.leaves]
            ahead = stream
            if self._remote is not None and leaves:
                ahead = self._remote.open_ranges(path, column_ranges(metadata, group, leaves))
            with ahead:
                source = pq.ParquetFile(
                    ahead,
                    metadata=metadata,
                    pre_buffer=False,
                    buffer_size=_READ_BUFFER_BYTES,
                    page_checksum_verification=True,
                )
                with source:
                    yield source

    @contextmanager
    def reading(
        self, file: int, group: int | None, names: Sequence[str] | None = None
    ) -> Iterator[None]:
        """Turn what Arrow and the system raise into a DataError with the file and row group.

        With `names`, the error tells which of these stored columns is damaged.
        """
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(file, group, names or (), error) from error

    def _metadata(self, file: int, stream: pa.NativeFile) -> pq.FileMetaData:
        """Return a file's metadata; raise if it is no longer the indexed file."""
        entry = self.files[file]
        try:
            self._check_unchanged(entry, stream)
            metadata = self._opened.get(file)
            if metadata is None:
                tail = read_tail(stream, entry.size_bytes)
                if digest_of(tail) != self.footers.digest(file):
                    self.cache.forget()  # its times did not tell
                    raise changed(entry.path, "has another footer")
                metadata = parse_tail(tail)
                self._opened.put(file, metadata)
        except OSError as error:
            raise unreadable(entry.path, error) from error
        return metadata

    def _check_unchanged(self, entry: DataFile, stream: pa.NativeFile) -> None:
        if stream.size() != entry.size_bytes:
            raise changed(entry.path, f"has {stream.size()} bytes, not {entry.size_bytes}")
        if not self._is_local:
            return  # it would be one request more
        if str(self.filesystem.get_file_info(entry.path).mtime_ns) != entry.version:
            raise changed(entry.path, "was written to")

    def _damaged(
        self, file: int, group: int | None, names: Sequence[str], error: Exception
    ) -> DataError:
        """Return the error for a row group, with the first column that cannot be decoded."""
        path = self.files[file].path
        if _NULL_IN_FIXED_SIZE in str(error):
            return DataError(
                path=path,
                problem=f"row group {group} has a null where lists have one size, which pyarrow "
                f"{pa.__version__} cannot read",
                remedy="install pyarrow 26 or later, or write the column as a list or binary",
            )
        found = [] if group is None else self.damaged_columns(file, group, names)
        column, reason = found[0] if found else (names[0] if names else None, first_line(error))
        return DamagedFileError(
            path=path,
            row_group=group,
            column=column,
            problem=f"cannot be read: {reason}",
            remedy="write the file anew, or run verify() once and pass on_bad='skip'",
        )

    def damaged_columns(self, file: int, group: int, names: Sequence[str]) -> list[tuple[str, str]]:
        """Return which of some stored columns cannot be decoded, each with the reason.

        Raises
        ------
        DataError
            If the file cannot be read or has changed.
        """
        self._check_bytes(file, group)
        found: list[tuple[str, str]] = []
        for name in names:
            with self.opened(file) as source:
                leaves = leaf_paths(source, self._nodes_of(file)[name])
                try:
                    for _ in source.iter_batches(row_groups=[group], columns=leaves):
                        pass
                except (pa.ArrowException, OSError) as error:
                    found.append((name, first_line(error)))
        return found

    def _check_bytes(self, file: int, group: int) -> None:
        """Raise if the bytes of a row group cannot be had: then nothing is known of damage."""
        path = self.files[file].path
        try:
            with self.filesystem.open_input_file(path) as stream:
                stored = self._metadata(file, stream).row_group(group)
                for column in map(stored.column, range(stored.num_columns)):
                    start = column.data_page_offset
                    if column.has_dictionary_page:
                        start = min(start, column.dictionary_page_offset or start)
                    stream.read_at(column.total_compressed_size, start)
        except OSError as error:
            raise unreadable(path, error) from error

    def _cast(self, file: int, group: int, field: pa.Field, column: pa.Array) -> pa.Array:
        if column.type == field.type:
            return column
        if is_packed(column.type, field.type):
            return unpack(column, field.type)
        try:
            return column.cast(field.type)
        except pa.ArrowException as error:
            raise DataError(
                path=self.files[file].path,
                problem=f"row group {group}: column {field.name!r} is {column.type}, and cannot "
                f"be read as {field.type}: {first_line(error)}",
                remedy="name a type that holds all values in schema=",
            ) from error

    def _constant(self, file: int, field: pa.Field, num_rows: int) -> pa.Array:
        """Return a column that the file does not hold: from its path, or null."""
        raw = self.files[file].partition.get(field.name)
        if raw is None:
            return pa.nulls(num_rows, field.type)
        return pa.repeat(self._scalar(file, field.name, raw), num_rows)

    # --- what files hold ------------------------------------------------------------------

    def columns_of(self, file: int) -> Collection[str]:
        """Return the names of the columns that a file holds, and of their fields."""
        return self._nodes_of(file).keys()

    def _nodes_of(self, file: int) -> dict[str, Node]:
        return self._nodes[self.footers.schema_of_file[file]]

    def stored_types(self, file: int) -> dict[str, pa.DataType]:
        """Return the types of the columns that a file holds, without dictionaries."""
        number = int(self.footers.schema_of_file[file])
        if number not in self._stored:
            schema = self.footers.schemas[number]
            self._stored[number] = {column.name: plain(column.type) for column in schema}
        return self._stored[number]

    def partition_of(self, file: int) -> dict[str, pa.Scalar | None]:
        """Return the values that a file's path gives to columns that no file holds."""
        raw = self.files[file].partition
        return {
            name: None if (value := raw[name]) is None else self._scalar(file, name, value)
            for name in self.partition_names
        }

    def group_number(self, file: int, group: int) -> int:
        """Return the place of a row group among those of all files."""
        return int(self.footers.group_starts[file]) + group

    def null_counts(self, name: str) -> NDArray[np.int64]:
        """Return a column's nulls in every row group of all files; -1 where that is unknown.

        In lists, null elements count, and so do empty lists.
        """
        footers = self.footers
        counts = footers.num_nulls(name)
        for number in range(len(footers.schemas)):
            node = self._nodes[number].get(name)
            if node is None:
                counts[footers.schema_of_group == number] = UNKNOWN
                for file in np.flatnonzero(footers.schema_of_file == number).tolist():
                    is_null = self.files[file].partition.get(name) is None
                    groups = slice(*footers.group_starts[file : file + 2])
                    counts[groups] = footers.group_rows[groups] if is_null else 0
            elif node.is_divided or not node.is_nullable:
                counts[footers.schema_of_group == number] = UNKNOWN if node.is_divided else 0
        return counts

    def mean_bytes(self, name: str) -> int:
        """Return the size of a column's values in the first file with some, decoded, rounded up.

        Blocks to open that file.
        """
        for file in range(len(self.files)):
            if name in self.columns_of(file) and len(rows := self.footers.rows(file)):
                leaves = self._nodes_of(file)[name].leaves
                with self.opened(file) as source:
                    groups = map(source.metadata.row_group, range(len(rows)))
                    size = sum(g.column(i).total_uncompressed_size for g in groups for i in leaves)
                return -(-size // max(int(rows.sum()), 1))
        return 0

    def _paths_by_schema(self) -> list[tuple[str, ...]]:
        paths: list[list[str]] = [[] for _ in self.footers.schemas]
        for file, number in zip(self.files, self.footers.schema_of_file.tolist(), strict=True):
            paths[number].append(file.path)
        return [tuple(some) for some in paths]

    def _partition_names(self) -> list[str]:
        """Return the columns that are in paths only: what a file holds comes from the file."""
        self._nodes = [named_nodes(schema) for schema in self.footers.schemas]
        stored = frozenset().union(*self._nodes)
        return [name for name in self.files[0].partition if name not in stored]

    def _partition_types(self) -> dict[str, pa.DataType]:
        return {
            name: partition_type([file.partition[name] for file in self.files])
            for name in self.partition_names
        }

    def _check_partitions(self) -> None:
        for file in range(len(self.files)):
            self.partition_of(file)

    def _scalar(self, file: int, name: str, raw: str) -> pa.Scalar:
        """Return a value of a path in its column's type."""
        if (name, raw) not in self._scalars:
            try:
                self._scalars[name, raw] = pa.scalar(raw).cast(self.types[name])
            except pa.ArrowException as error:
                raise DataError(
                    path=self.files[file].path,
                    problem=f"{name}={raw} in the path is no {self.types[name]}",
                    remedy="name a type that holds all values in schema=",
                ) from error
        return self._scalars[name, raw]


def leaf_paths(source: pq.ParquetFile, node: Node) -> list[str]:
    """Return what Parquet calls the stored columns of a column or field."""
    stored = source.metadata.schema
    return [stored.column(leaf).path for leaf in node.leaves]


def _picked(columns: Mapping[str, pa.Array], node: Node) -> pa.Array:
    return pick(columns[node.path[0]], node.path[1:])


def _width(kind: pa.DataType) -> float | None:
    """Return the bytes of a value, or None if they vary."""
    try:
        return kind.bit_width / 8
    except ValueError:
        return None
