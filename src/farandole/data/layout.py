"""Which columns are read, and into which arrays of a `RowBlock` they go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from farandole.data.block import RowBlock
from farandole.data.choices import Arrow, Choice
from farandole.data.columns import Column
from farandole.data.convert import is_numeric, to_float
from farandole.data.forms import Form, make_form
from farandole.data.groups import GroupReader
from farandole.data.preprocess import Preprocessor
from farandole.errors import ColumnError

Columns = Sequence[str] | Mapping[str, Choice | None]
"""Names of columns, perhaps each with what is declared of it."""

_LEAST_BYTES = 32
"""Of a value without a fixed size: dictionaries make the stored size too small a guess."""


_ROWS_AT_ONCE = 4096
"""Of a matrix, so that it stays in the processor's cache while its columns are written."""


@dataclass(frozen=True)
class Layout:
    """Writes Arrow batches into the arrays of row blocks."""

    features: tuple[str, ...] = ()
    preprocess: Preprocessor | None = None
    label: str | None = None
    label_dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.int64))
    columns: dict[str, Form] = field(default_factory=dict[str, Form])
    loose_bytes: int = 0
    """Memory of a row's values that have no fixed size, on the average."""

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
        return len(self.preprocess.cardinalities) if self.preprocess else 0

    @property
    def row_bytes(self) -> int:
        """Memory of a row, with its id."""
        columns = sum(form.row_bytes or 0 for form in self.columns.values()) + self.loose_bytes
        label = 0 if self.label is None else self.label_dtype.itemsize
        return 8 + 4 * self.num_features + 8 * self.num_categories + label + columns

    def empty(self, num_rows: int) -> RowBlock:
        """Return a block of unset values: a buffer to `write` into."""
        features, categories = self.num_features, self.num_categories
        return RowBlock(
            row_ids=np.empty(num_rows, np.int64),
            features=np.empty((num_rows, features), np.float32) if features else None,
            categories=np.empty((num_rows, categories), np.int64) if categories else None,
            label=None if self.label is None else np.empty(num_rows, self.label_dtype),
            columns={name: form.empty(num_rows) for name, form in self.columns.items()},
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
            values = [to_float(batch.column(name)) for name in self.features]
            for first in range(0, batch.num_rows, _ROWS_AT_ONCE):
                part = slice(first, first + _ROWS_AT_ONCE)
                matrix = out.features[rows][part]
                for place, column in enumerate(values):
                    matrix[:, place] = column[part]
        if out.label is not None and self.label is not None:
            out.label[rows] = to_float(batch.column(self.label))
        for name, form in self.columns.items():
            with _naming(name):
                form.write(batch.column(name), out.columns[name], at)

    def finish(self, block: RowBlock) -> RowBlock:
        """Return a block of rows that were gathered from buffers, its columns in their forms.

        Calls the functions given to `decode`. Does no I/O; may be called in any thread.
        """
        if not self.columns:
            return block
        columns: dict[str, Column] = {}
        for name, form in self.columns.items():
            with _naming(name):
                columns[name] = form.finish(block.columns[name])
        return replace(block, columns=columns)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Tell of which column a value does not fit."""
    try:
        yield
    except OverflowError as error:
        raise ColumnError(path="data", column=name, problem=str(error)) from error


def make_layout(
    reader: GroupReader,
    *,
    columns: Columns | None,
    features: Sequence[str] | None,
    label: str | None,
    preprocess: Preprocessor | None,
    has_nulls: Callable[[str], bool],
) -> Layout:
    """Return the layout for what a user asked for.

    Without `columns`, `features` and `preprocess`, all columns are given by name. A struct's
    name stands for all its fields.

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
        _check_hidden(reader, columns)
    choices = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns)
    prepared = preprocess.columns if preprocess else ()
    named = [] if label is None else [label]
    reader.check_columns([*choices, *(features or ()), *named, *prepared])
    for name in features or ():
        kind = reader.types[name]
        if not is_numeric(kind):
            problem = f"is {kind}, and features are numbers: give it to a Preprocessor"
            raise ColumnError(path=reader.name, column=name, problem=problem)
    if label is not None and label in (*(features or ()), *prepared):
        problem = "is the label, and cannot be a feature as well"
        raise ColumnError(path=reader.name, column=label, problem=problem)
    forms = {
        name: _form(reader, name, choice, has_nulls)
        for name, choice in _divided(reader, choices).items()
    }
    loose = [name for name, form in forms.items() if form.row_bytes is None]
    return Layout(
        features=tuple(features or ()),
        preprocess=preprocess,
        label=label,
        label_dtype=_label_dtype(reader, label),
        columns=forms,
        loose_bytes=sum(max(reader.mean_bytes(name), _LEAST_BYTES) for name in loose),
    )


def _divided(reader: GroupReader, choices: Mapping[str, Choice | None]) -> dict[str, Choice | None]:
    """Return the choices with the fields of structs in the place of these."""
    divided: dict[str, Choice | None] = {}
    for name, choice in choices.items():
        fields = reader.fields_of(name)
        if fields and not isinstance(choice, Arrow):
            if choice is not None:
                problem = f"has fields; declare what becomes of each: {', '.join(fields)}"
                raise ColumnError(path=reader.name, column=name, problem=problem)
            reader.check_columns(fields)
            _check_hidden(reader, fields)
            divided |= {field: None for field in fields if field not in choices}
        else:
            divided[name] = choice
    return divided


def _check_hidden(reader: GroupReader, names: Sequence[str]) -> None:
    """Refuse to give a column in the place of a field that it hides, where both were meant."""
    for name in names:
        if name in reader.hidden_fields:
            whole = reader.hidden_fields[name]
            problem = f"hides a field of {whole!r}: name the columns to read, with "
            problem += f"columns={{{whole!r}: fa.arrow()}} for the field"
            raise ColumnError(path=reader.name, column=name, problem=problem)


def _form(
    reader: GroupReader, name: str, choice: Choice | None, has_nulls: Callable[[str], bool]
) -> Form:
    try:
        return make_form(name, reader.types[name], choice, has_nulls=lambda: has_nulls(name))
    except ValueError as error:
        raise ColumnError(path=reader.name, column=name, problem=str(error)) from error


def _label_dtype(reader: GroupReader, label: str | None) -> np.dtype[Any]:
    if label is None or pt.is_integer(reader.types[label]) or pt.is_boolean(reader.types[label]):
        return np.dtype(np.int64)
    kind = reader.types[label]
    if pt.is_floating(kind) or pt.is_decimal(kind):
        return np.dtype(np.float32)
    problem = f"is {kind}, and a label is a number or bool"
    raise ColumnError(path=reader.name, column=label, problem=problem)
