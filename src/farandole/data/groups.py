"""Parquet files as row groups of one common schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pyarrow.types as pt

from farandole.data.files import DataFile
from farandole.errors import ColumnError, DataError

BATCH_ROWS = 8192
"""Rows decoded at once: their columns fit into the cache while they become rows."""

_READ_BUFFER_BYTES = 1 << 17
_FOOTER_THREADS = 8
_MAGIC = b"PAR1"


@dataclass(frozen=True)
class Footer:
    """What the end of a file says about it."""

    metadata: pq.FileMetaData
    schema: pa.Schema

    @cached_property
    def names(self) -> frozenset[str]:
        """Columns that the file holds."""
        return frozenset(self.schema.names)

    @cached_property
    def leaves(self) -> dict[str, int]:
        """Place of each column that is not nested, among the stored ones."""
        stored = self.metadata.schema
        return {stored.column(leaf).path: leaf for leaf in range(self.metadata.num_columns)}


class GroupReader:
    """Row groups of many files, each batch cast to one schema.

    Parameters
    ----------
    filesystem : pyarrow.fs.FileSystem
    files : list of DataFile
    schema : pyarrow.Schema, optional
        Types of some or all columns, to be used instead of those found.

    Raises
    ------
    DataError
        If a file is not Parquet, or its end is missing.
    """

    def __init__(
        self, filesystem: pafs.FileSystem, files: list[DataFile], schema: pa.Schema | None
    ) -> None:
        self.files = files
        self.filesystem = filesystem
        self._is_local = isinstance(filesystem, pafs.LocalFileSystem)
        with ThreadPoolExecutor(min(_FOOTER_THREADS, len(files))) as pool:
            self.footers = list(pool.map(_read_footer, repeat(filesystem), files))
        self._conflicts: dict[str, DataError] = {}
        self.partition_names = self._partition_names()
        self.types = self._unify(schema)

    @property
    def name(self) -> str:
        """Path to name in errors that concern all files."""
        return self.files[0].path

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise ColumnError or DataError if a column does not exist or has no common type."""
        for name in names:
            if name in self._conflicts:
                raise self._conflicts[name]
            if name not in self.types:
                known = tuple(self.types)
                raise ColumnError(
                    path=self.name, column=name, problem="does not exist", known=known
                )

    def all_columns(self) -> list[str]:
        """Return the names of all columns, also of those without a common type."""
        return [*self.types, *self._conflicts]

    def schema_of(self, names: Sequence[str]) -> pa.Schema:
        """Return the common schema of some columns."""
        return pa.schema([(name, self.types[name]) for name in names])

    def batches(self, file: int, group: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield one row group's columns in batches, in order, in the common types.

        Raises
        ------
        DataError
            If the file cannot be read or decoded.
        """
        path, footer = self.files[file].path, self.footers[file]
        present = [name for name in names if name in footer.names]
        schema = self.schema_of(names)
        with self.reading(file, group):
            source = pq.ParquetFile(
                path,
                filesystem=self.filesystem,
                metadata=footer.metadata,
                pre_buffer=not self._is_local,
                buffer_size=_READ_BUFFER_BYTES,
                page_checksum_verification=True,
            )
            with source:
                for batch in source.iter_batches(
                    batch_size=BATCH_ROWS, row_groups=[group], columns=present, use_threads=False
                ):
                    stored = dict(zip(batch.schema.names, batch.columns, strict=True))
                    columns = [
                        _cast(stored[field.name], field.type)
                        if field.name in stored
                        else self._constant(file, field, batch.num_rows)
                        for field in schema
                    ]
                    yield pa.RecordBatch.from_arrays(columns, schema=schema)

    @contextmanager
    def reading(self, file: int, group: int) -> Iterator[None]:
        """Turn what Arrow and the system raise into a DataError with the file and row group."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                path=self.files[file].path,
                problem=f"row group {group} cannot be read: {_first_line(error)}",
                remedy="write the file anew",
            ) from error

    def num_nulls(self, file: int, group: int, name: str) -> int | None:
        """Return how many nulls a column has in a row group, or None if the footer does not say."""
        footer = self.footers[file]
        stored = footer.metadata.row_group(group)
        if name not in footer.names:
            value = self.files[file].partition.get(name)
            return stored.num_rows if value is None else 0
        if name not in footer.leaves:
            return None
        statistics = stored.column(footer.leaves[name]).statistics
        if statistics is None or not statistics.has_null_count:
            return None
        return statistics.null_count

    def _constant(self, file: int, field: pa.Field, num_rows: int) -> pa.Array:
        """Return a column that the file does not hold: from its path, or null."""
        value = self.files[file].partition.get(field.name)
        if value is None:
            return pa.nulls(num_rows, field.type)
        return pa.repeat(pa.scalar(value).cast(field.type), num_rows)

    def _partition_names(self) -> list[str]:
        """Return the columns that are in paths only: what a file holds comes from the file."""
        stored = {name for footer in self.footers for name in footer.schema.names}
        return [name for name in self.files[0].partition if name not in stored]

    def _unify(self, given: pa.Schema | None) -> dict[str, pa.DataType]:
        """Return the type of each column over all files; note those that have none."""
        first_with: dict[str, int] = {}
        types: dict[str, pa.DataType] = {}
        seen: set[pa.Schema] = set()
        for file, footer in enumerate(self.footers):
            if footer.schema in seen:
                continue
            seen.add(footer.schema)
            for field in footer.schema:
                name, kind = field.name, _plain(field.type)
                if first_with.setdefault(name, file) == file and name in types:
                    self._conflicts[name] = DataError(
                        path=self.files[file].path,
                        problem=f"there are several columns {name!r}",
                        remedy="write the file with distinct names",
                    )
                    continue
                try:
                    types[name] = _common(types.get(name, kind), kind)
                except (pa.ArrowTypeError, pa.ArrowInvalid):
                    first = self.files[first_with[name]].path
                    self._conflicts[name] = DataError(
                        path=self.files[file].path,
                        problem=f"column {name!r} is {kind}, but {types[name]} in {first}",
                        remedy="write both files with one type, or name it in schema=",
                    )
        for name in self.partition_names:
            values = [file.partition[name] for file in self.files]
            integers = any(isinstance(value, int) for value in values)
            types[name] = pa.int64() if integers else pa.string()
        for field in given or ():
            if field.name not in types:
                raise ColumnError(
                    path=self.name,
                    column=field.name,
                    problem="of schema= does not exist",
                    known=tuple(types),
                )
            types[field.name] = _plain(field.type)
            self._conflicts.pop(field.name, None)
        return {name: kind for name, kind in types.items() if name not in self._conflicts}


def partition_values(reader: GroupReader, file: int) -> Mapping[str, int | str | None]:
    """Return the values that a file's path gives to columns."""
    partition = reader.files[file].partition
    return {name: partition[name] for name in reader.partition_names}


def _read_footer(filesystem: pafs.FileSystem, file: DataFile) -> Footer:
    try:
        with pq.ParquetFile(file.path, filesystem=filesystem) as source:
            return Footer(source.metadata, source.schema_arrow)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            path=file.path,
            problem=_what_is_wrong(filesystem, file, error),
            remedy="write it anew, or leave it out",
        ) from error


def _what_is_wrong(filesystem: pafs.FileSystem, file: DataFile, error: Exception) -> str:
    if file.size_bytes == 0:
        return "is empty, not a Parquet file"
    try:
        with filesystem.open_input_file(file.path) as stream:
            start = stream.read(len(_MAGIC))
    except OSError:
        return f"cannot be read: {_first_line(error)}"
    if start != _MAGIC:
        return "is not a Parquet file"
    return f"has no usable footer, as if cut short: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column if column.type == kind else column.cast(kind)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type of a dictionary's values: dictionaries differ from group to group."""
    return kind.value_type if pt.is_dictionary(kind) else kind


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    if one == other:
        return one
    schemas = [pa.schema([("x", kind)]) for kind in (one, other)]
    return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
