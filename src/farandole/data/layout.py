"""Which columns are read, and into which arrays of a `RowBlock` they go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from farandole.data.block import RowBlock
from farandole.data.convert import is_numeric, numpy_dtype, to_float, to_numpy
from farandole.data.groups import GroupReader
from farandole.data.preprocess import Preprocessor
from farandole.errors import ColumnError

_OBJECT_BYTES = 64
"""A guess at the size of a string with its reference."""


@dataclass(frozen=True)
class Layout:
    """Writes Arrow batches into the arrays of row blocks."""

    features: tuple[str, ...] = ()
    preprocess: Preprocessor | None = None
    label: str | None = None
    label_dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.int64))
    columns: dict[str, np.dtype[Any]] = field(default_factory=dict[str, np.dtype[Any]])

    @property
    def names(self) -> list[str]:
        """Columns to read, each once."""
        prepared = self.preprocess.columns if self.preprocess else ()
        label = () if self.label is None else (self.label,)
        return list(dict.fromkeys((*self.features, *prepared, *label, *self.columns)))

    @property
    def num_features(self) -> int:
        """Width of the feature matrix."""
        return len(self.preprocess.numeric if self.preprocess else self.features)

    @property
    def num_categories(self) -> int:
        """Width of the matrix of codes."""
        return len(self.preprocess.categorical) if self.preprocess else 0

    @property
    def row_bytes(self) -> int:
        """Memory of a row, with its id."""
        columns = sum(
            _OBJECT_BYTES if dtype.hasobject else dtype.itemsize for dtype in self.columns.values()
        )
        label = 0 if self.label is None else self.label_dtype.itemsize
        return 8 + 4 * self.num_features + 8 * self.num_categories + label + columns

    def empty(self, num_rows: int) -> RowBlock:
        """Return a block of unset values."""
        features, categories = self.num_features, self.num_categories
        return RowBlock(
            row_ids=np.empty(num_rows, np.int64),
            features=np.empty((num_rows, features), np.float32) if features else None,
            categories=np.empty((num_rows, categories), np.int64) if categories else None,
            label=None if self.label is None else np.empty(num_rows, self.label_dtype),
            columns={name: np.empty(num_rows, dtype) for name, dtype in self.columns.items()},
        )

    def write(self, batch: pa.RecordBatch, out: RowBlock, at: int) -> None:
        """Write a batch's values into rows `at` and following of a block."""
        rows = slice(at, at + batch.num_rows)
        if self.preprocess is not None:
            numbers, codes = self.preprocess.apply(batch)
            if out.features is not None:
                out.features[rows] = numbers
            if out.categories is not None:
                out.categories[rows] = codes
        elif out.features is not None:
            for place, name in enumerate(self.features):
                out.features[rows, place] = to_float(batch.column(name))
        if out.label is not None and self.label is not None:
            out.label[rows] = to_float(batch.column(self.label))
        for name, dtype in self.columns.items():
            out.columns[name][rows] = to_numpy(batch.column(name), dtype)


def make_layout(
    reader: GroupReader,
    *,
    columns: Sequence[str] | None,
    features: Sequence[str] | None,
    label: str | None,
    preprocess: Preprocessor | None,
    has_nulls: Callable[[str], bool],
) -> Layout:
    """Return the layout for what a user asked for.

    Without `columns`, `features` and `preprocess`, all columns are given by name.

    Raises
    ------
    ColumnError
        If a column does not exist, or its type does not suit its use.
    DataError
        If files disagree on a column's type.
    """
    if columns is None:
        everything = features is None and preprocess is None
        columns = [name for name in reader.all_columns() if name != label] if everything else []
    prepared = preprocess.columns if preprocess else ()
    named = [] if label is None else [label]
    reader.check_columns([*columns, *(features or ()), *named, *prepared])
    for name in features or ():
        kind = reader.types[name]
        if not is_numeric(kind):
            problem = f"is {kind}, and features are numbers: give it to a Preprocessor"
            raise ColumnError(path=reader.name, column=name, problem=problem)
    if label is not None and label in (*(features or ()), *prepared):
        problem = "is the label, and cannot be a feature as well"
        raise ColumnError(path=reader.name, column=label, problem=problem)
    dtypes = {
        name: numpy_dtype(
            reader.types[name], has_nulls=_is_integral(reader, name) and has_nulls(name)
        )
        for name in dict.fromkeys(columns)
    }
    return Layout(
        features=tuple(features or ()),
        preprocess=preprocess,
        label=label,
        label_dtype=_label_dtype(reader, label),
        columns=dtypes,
    )


def _is_integral(reader: GroupReader, name: str) -> bool:
    """Return whether a column is of integers or bools, which have no place for a null."""
    kind = reader.types[name]
    return pt.is_integer(kind) or pt.is_boolean(kind)


def _label_dtype(reader: GroupReader, label: str | None) -> np.dtype[Any]:
    if label is None or _is_integral(reader, label):
        return np.dtype(np.int64)
    kind = reader.types[label]
    if pt.is_floating(kind) or pt.is_decimal(kind):
        return np.dtype(np.float32)
    problem = f"is {kind}, and a label is a number or bool"
    raise ColumnError(path=reader.name, column=label, problem=problem)
