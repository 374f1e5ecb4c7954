"""Count, exactly, the rows of each row group that a filter selects; once, and kept for later."""

from __future__ import annotations

import pickle
import re
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from farandole.data.groups import GroupReader
from farandole.errors import ColumnError, DataError

Selected = tuple[int, NDArray[np.uint8] | None]
"""Rows of a row group, and one bit for each (`numpy.packbits`) unless all or none are selected."""

_THREADS = 4
_MAKING_TIMEOUT_S = 1800.0
_NOT_COUNTED = -1
_MISSING = "No match for FieldRef"
_NAME = "FieldRef.Name("
_TABLE = pa.schema(
    [
        ("path", pa.string()),
        ("digest", pa.binary()),
        ("rows", pa.list_(pa.int64())),
        ("kept", pa.list_(pa.binary())),
    ]
)


def count_rows(
    reader: GroupReader,
    expression: pc.Expression,
    label: str | None,
    left_out: Collection[tuple[int, int]],
) -> list[list[Selected]]:
    """Return what is selected of each row group of each file; -1 rows of those left out.

    Raises
    ------
    ColumnError
        If the filter names a column that does not exist.
    DataError
        If a file cannot be read, or a selected row has no label.
    """
    names = filter_columns(reader, expression)
    counter = _Counter(reader, expression, names, label, left_out)
    cache = reader.cache
    name = cache.name("rows", *_identity(reader, expression, names, label))
    found = _kept(cache.tables.load(name), counter)
    if len(found) < len(reader.files):
        with cache.tables.making(name, _MAKING_TIMEOUT_S):
            found = _kept(cache.tables.load(name), counter)
            missing = [file for file in range(len(reader.files)) if file not in found]
            if missing:
                found |= counter.count(missing)
                cache.tables.store(name, _pack(reader, found))
    return [found[file] for file in range(len(reader.files))]


def expression_text(expression: pc.Expression) -> str:
    """Return an expression as a text that no other one has: long lists are shortened in its own."""
    text = str(expression)
    return f"{text} {pickle.dumps(expression).hex()}" if "..." in text else text


def label_nulls(reader: GroupReader, file: int, label: str, num_nulls: int) -> DataError:
    """Return the error for a label without a value."""
    return DataError(
        path=reader.files[file].path,
        problem=f"label column {label!r} has {num_nulls} null(s)",
        remedy=f"select labelled rows: filters=pc.field({label!r}).is_valid()",
    )


def _identity(
    reader: GroupReader, expression: pc.Expression, names: Sequence[str], label: str | None
) -> list[str]:
    """Return all but the files that decides what is selected."""
    types = [f"{name} {reader.types[name]}" for name in names]
    return [expression_text(expression), str(label), *types]


def _kept(table: pa.Table | None, counter: _Counter) -> dict[int, list[Selected]]:
    """Return what a cached table tells of files that are as they were."""
    if table is None or table.schema != _TABLE:
        return {}
    reader = counter.reader
    digests = reader.footers.table["digest"].to_pylist()
    numbers = {
        (entry.path, digest): file
        for file, (entry, digest) in enumerate(zip(reader.files, digests, strict=True))
    }
    found: dict[int, list[Selected]] = {}
    columns = (table[name].to_pylist() for name in table.column_names)
    for path, digest, rows, kept in zip(*columns, strict=True):
        file = numbers.get((path, digest))
        if file is None or any(
            rows_of_group == _NOT_COUNTED and (file, group) not in counter.left_out
            for group, rows_of_group in enumerate(rows)
        ):
            continue
        masks = [None if bits is None else np.frombuffer(bits, np.uint8) for bits in kept]
        found[file] = list(zip(rows, masks, strict=True))
    return found


def _pack(reader: GroupReader, found: dict[int, list[Selected]]) -> pa.Table:
    files = sorted(found)
    columns = [
        [reader.files[file].path for file in files],
        [reader.footers.digest(file) for file in files],
        [[count for count, _ in found[file]] for file in files],
        [[None if bits is None else bits.tobytes() for _, bits in found[file]] for file in files],
    ]
    arrays = [pa.array(values, kind.type) for values, kind in zip(columns, _TABLE, strict=True)]
    return pa.table(arrays, schema=_TABLE)


class _Counter:
    """Counts the selected rows of files, several at once."""

    def __init__(
        self,
        reader: GroupReader,
        expression: pc.Expression,
        names: Sequence[str],
        label: str | None,
        left_out: Collection[tuple[int, int]],
    ) -> None:
        self.reader = reader
        self.left_out = left_out
        self._expression = expression
        self._names = list(names)
        self._label = label
        self._label_nulls = None if label is None else reader.null_counts(label)
        # Statistics leave out NaN, which a negation or a function may select.
        self._may_select_nan = re.search(r"!=|\w\(", str(expression)) is not None

    def count(self, files: Sequence[int]) -> dict[int, list[Selected]]:
        """Return what is selected of some files."""
        import pyarrow.dataset as pads  # imports pandas where it can: only filters pay for it

        schema = self.reader.schema_of(self._names)
        parquet = pads.ParquetFileFormat()
        fragments: dict[str, Any] = {}
        for file in files:
            path = self.reader.files[file].path
            fragments[path] = parquet.make_fragment(
                path, self.reader.filesystem, self._folder(file)
            )
        every = pads.FileSystemDataset(fragments.values(), schema, parquet, self.reader.filesystem)
        possible = {fragment.path for fragment in every.get_fragments(self._expression)}

        def count(file: int) -> list[Selected]:
            path = self.reader.files[file].path
            if path not in possible:
                return [(0, None)] * len(self.reader.footers.rows(file))
            return list(self._count_file(file, fragments[path], schema))

        with ThreadPoolExecutor(_THREADS) as pool:
            return dict(zip(files, pool.map(count, files), strict=True))

    def _folder(self, file: int) -> pc.Expression:
        """Return what a file's folders say of all its rows."""
        said = pc.scalar(True)
        for name, value in self.reader.partition_of(file).items():
            column = pc.field(name)
            said &= column.is_null() if value is None else column == value
        return said

    def _count_file(self, file: int, fragment: Any, schema: pa.Schema) -> Iterator[Selected]:
        groups = set(range(len(self.reader.footers.rows(file))))
        if self._can_prune(file):
            with self.reader.reading(file, None):
                pieces = fragment.split_by_row_group(self._expression, schema=schema)
            groups = {group.id for piece in pieces for group in piece.row_groups}
        for group in range(len(self.reader.footers.rows(file))):
            if (file, group) in self.left_out:
                yield _NOT_COUNTED, None
            else:
                yield self._count_group(file, group) if group in groups else (0, None)

    def _can_prune(self, file: int) -> bool:
        """Return whether statistics bound what is read: casts may change the order of values."""
        stored = self.reader.stored_types(file)
        for name in self._names:
            if name in self.reader.partition_names:
                continue
            kind = self.reader.types[name]
            if name not in stored or not _same_order(stored[name], kind):
                return False
            if self._may_select_nan and pt.is_floating(stored[name]):
                return False
        return True

    def _count_group(self, file: int, group: int) -> Selected:
        """Count the selected rows of a row group, exactly."""
        label, names = self._label, self._names
        place = self.reader.group_number(file, group)
        checks_label = self._label_nulls is not None and self._label_nulls[place] != 0
        wanted = [*names, label] if checks_label and label not in names else names
        num_rows = self.reader.num_rows(file, group)
        keep = np.zeros(num_rows, np.bool_)
        start = nulls = 0
        for batch in self.reader.batches(file, group, wanted):
            table = pa.Table.from_batches([batch])
            places = pa.array(np.arange(start, start + batch.num_rows))
            free = max(table.column_names, key=len, default="") + "_"
            chosen = table.append_column(free, places).filter(self._expression)
            keep[chosen.column(table.num_columns).to_numpy()] = True
            if checks_label:
                nulls += chosen.column(label).null_count
            start += batch.num_rows
        if nulls and label is not None:
            raise label_nulls(self.reader, file, label, nulls)
        count = int(np.count_nonzero(keep))
        return count, np.packbits(keep) if 0 < count < num_rows else None


def _same_order(stored: pa.DataType, kind: pa.DataType) -> bool:
    """Return whether values keep their order when they are cast."""
    return stored == kind or any(
        test(stored) and test(kind) for test in (_is_number, pt.is_timestamp, _is_text)
    )


def _is_number(kind: pa.DataType) -> bool:
    return pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pt.is_string(kind) or pt.is_large_string(kind)


def filter_columns(reader: GroupReader, expression: pc.Expression) -> list[str]:
    """Return the columns that an expression names, and check that it fits their types.

    Arrow has no list of them, but names the first that is missing.
    """
    names: list[str] = []
    while True:
        try:
            reader.schema_of(names).empty_table().filter(expression)
        except (pa.ArrowException, ValueError, TypeError) as error:
            known = [*reader.types, *reader.all_columns()]
            name = _missing_name(str(error), known)
            if name is None or name in names:
                raise DataError(
                    path=reader.name,
                    problem=f"the filter {expression} does not fit the columns: {error}",
                    remedy="compare with values of the column's type",
                ) from error
            if name not in known:
                raise ColumnError(
                    path=reader.name,
                    column=name,
                    problem="of filters= does not exist",
                    known=tuple(reader.types),
                ) from error
            reader.check_columns([name])
            names.append(name)
        else:
            return names


def _missing_name(message: str, known: Sequence[str]) -> str | None:
    """Return the column that Arrow says it missed."""
    if not message.startswith(_MISSING):
        return None
    text = message.partition(_NAME)[2]
    fitting = [name for name in known if text.startswith(f"{name})")]
    return max(fitting, key=len) if fitting else text.partition(") in ")[0]
