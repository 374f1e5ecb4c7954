"""Numbers standardised or bucketed, categories coded, as fitted on the training rows."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from farandole.data.convert import is_numeric, to_seconds
from farandole.data.names import check_names
from farandole.data.nested import is_list, named_nodes, pick
from farandole.errors import ColumnError, DataError, UsageError
from farandole.plan.random import row_uniforms

_VERSION = 2
_READABLE = (1, 2)
_SAMPLED_ROWS = 1 << 16
_NAME = "preprocessor"

Category = str | int | bool


class Scannable(Protocol):
    """A data set whose columns can be read in order, once."""

    def scan(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield batches of these columns."""
        ...


@dataclass(frozen=True)
class Preprocessor:
    """Turns columns into a matrix of numbers and a matrix of codes.

    Made by `fit`. Numeric columns (numbers, bools, times in seconds) are standardised, null
    and NaN become 0, the mean. Categories (strings, integers, bools) become codes from 1 in the
    sorted order of their values; null and what was not seen in fitting is 0. Bucketed columns
    (numbers, times) become codes from 1 by their buckets, after the categories; null is 0.

    Attributes
    ----------
    numeric, categorical, bucketed : tuple of str
        Columns, in the order of the matrices.
    means, stds, fills : tuple of float
        Of the numeric columns; a constant column has the std 1. Null is read as its fill.
    vocabularies : tuple of tuples
        Sorted values of each categorical column.
    boundaries : tuple of tuples of float
        Of each bucketed column, ascending. A value's code is 1 and the number of those that it
        is not below.
    """

    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    means: tuple[float, ...]
    stds: tuple[float, ...]
    vocabularies: tuple[tuple[Category, ...], ...]
    fills: tuple[float, ...]
    bucketed: tuple[str, ...] = ()
    boundaries: tuple[tuple[float, ...], ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are needed."""
        return tuple(dict.fromkeys((*self.numeric, *self.categorical, *self.bucketed)))

    @property
    def cardinalities(self) -> tuple[int, ...]:
        """Number of codes of each column of the codes, with 0: sizes for embeddings."""
        coded = (len(vocabulary) + 1 for vocabulary in self.vocabularies)
        return (*coded, *(len(boundaries) + 2 for boundaries in self.boundaries))

    @classmethod
    def fit(
        cls,
        dataset: Scannable,
        *,
        numeric: Sequence[str] = (),
        categorical: Sequence[str] = (),
        bucketed: Mapping[str, int | Sequence[float]] | None = None,
        fill: float | Mapping[str, float] | None = None,
        max_categories: int | None = None,
    ) -> Preprocessor:
        """Fit on all rows of a data set, in one pass.

        Sums are float64 and merged in the order of the data set, so the result has the same
        bits wherever it is computed. Blocks while reading; any rank may call it alone.

        Parameters
        ----------
        dataset : ParquetDataset or ArrayDataset
        numeric, categorical : sequence of str
        bucketed : dict of str to int or sequence of float, optional
            For each column a number of buckets, about equally full, or their boundaries.
            Quantiles are those of 65,536 rows chosen by a hash of their places; exact for fewer.
        fill : float, or dict of str to float, optional
            What null is read as in numeric columns, in their own unit; default: the mean.
        max_categories : int, optional
            Keep only so many categories of a column, the most frequent ones.

        Raises
        ------
        ColumnError
            If a column does not exist, is of a wrong type, or holds infinite values.
        UsageError
            If buckets or fills are not such.
        """
        check_names(numeric=numeric, categorical=categorical)
        samples = _check_buckets(bucketed or {})
        _check_fill(fill, numeric)
        moments = {name: _Moments() for name in numeric}
        counts: dict[str, Counter[Category]] = {name: Counter() for name in categorical}
        first_row = 0
        for batch in dataset.scan(list(dict.fromkeys((*numeric, *categorical, *samples)))):
            for name, moment in moments.items():
                moment.add(name, _numbers(name, batch.column(name)))
            for name, counter in counts.items():
                _count(name, batch.column(name), counter)
            for name, sample in samples.items():
                if sample.num_buckets:
                    sample.add(_numbers(name, batch.column(name)), first_row)
            first_row += batch.num_rows
        means = {name: moment.mean for name, moment in moments.items()}
        fills = fill if isinstance(fill, Mapping) else dict.fromkeys(means, fill)
        return cls(
            numeric=tuple(moments),
            categorical=tuple(counts),
            means=tuple(means.values()),
            stds=tuple(moment.std for moment in moments.values()),
            vocabularies=tuple(_vocabulary(counter, max_categories) for counter in counts.values()),
            fills=tuple(
                mean if (value := fills.get(name)) is None else float(value)
                for name, mean in means.items()
            ),
            bucketed=tuple(samples),
            boundaries=tuple(sample.boundaries() for sample in samples.values()),
        )

    def apply(self, data: Any) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the matrices of some rows.

        Parameters
        ----------
        data : dict of arrays, pyarrow.Table, pyarrow.RecordBatch or pandas.DataFrame
            With all of `columns`; others are ignored.

        Returns
        -------
        features : ndarray of float32, shape (n, len(numeric))
        categories : ndarray of int64, shape (n, len(categorical) + len(bucketed))

        Raises
        ------
        ColumnError
            If a column is missing or of a wrong type.
        """
        arrays = {name: _arrow_column(data, name) for name in self.columns}
        num_rows = len(next(iter(arrays.values()))) if arrays else 0
        features = np.empty((num_rows, len(self.numeric)), np.float32)
        num_codes = len(self.categorical) + len(self.bucketed)
        categories = np.empty((num_rows, num_codes), np.int64)
        moments = zip(self.numeric, self.means, self.stds, self.fills, strict=True)
        for place, (name, mean, std, fill) in enumerate(moments):
            scaled = (_numbers(name, arrays[name]) - mean) / std
            features[:, place] = np.where(np.isnan(scaled), (fill - mean) / std, scaled)
        for place, name in enumerate(self.categorical):
            categories[:, place] = _codes(name, arrays[name], self._value_sets[place])
        buckets = zip(self.bucketed, self.boundaries, strict=True)
        for place, (name, boundaries) in enumerate(buckets, len(self.categorical)):
            numbers = _numbers(name, arrays[name])
            codes = 1 + np.searchsorted(np.array(boundaries, np.float64), numbers, side="right")
            categories[:, place] = np.where(np.isnan(numbers), 0, codes)
        return features, categories

    def to_json(self) -> str:
        """Return all that was fitted, as JSON that `from_json` reads back exactly."""
        numeric = zip(self.numeric, self.means, self.stds, self.fills, strict=True)
        categorical = zip(self.categorical, self.vocabularies, strict=True)
        bucketed = zip(self.bucketed, self.boundaries, strict=True)
        content = {
            "version": _VERSION,
            "numeric": [
                {"column": c, "mean": mean, "std": std, "fill": fill}
                for c, mean, std, fill in numeric
            ],
            "categorical": [{"column": c, "vocabulary": list(v)} for c, v in categorical],
            "bucketed": [{"column": c, "boundaries": list(b)} for c, b in bucketed],
        }
        return json.dumps(content, allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Preprocessor:
        """Return the preprocessor that `to_json` wrote.

        Raises
        ------
        DataError
            If the text is something else, or of another version.
        """
        try:
            content = json.loads(text)
            if content["version"] not in _READABLE:
                raise ValueError(f"version {content['version']} is not among {_READABLE}")
            numeric, categorical = content["numeric"], content["categorical"]
            bucketed = content.get("bucketed", [])  # the first version had none, nor fills
            return cls(
                numeric=tuple(entry["column"] for entry in numeric),
                categorical=tuple(entry["column"] for entry in categorical),
                means=tuple(float(entry["mean"]) for entry in numeric),
                stds=tuple(float(entry["std"]) for entry in numeric),
                vocabularies=tuple(tuple(entry["vocabulary"]) for entry in categorical),
                fills=tuple(float(entry.get("fill", entry["mean"])) for entry in numeric),
                bucketed=tuple(entry["column"] for entry in bucketed),
                boundaries=tuple(tuple(map(float, entry["boundaries"])) for entry in bucketed),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                path=_NAME,
                problem=f"this is not a saved Preprocessor: {error!r}",
                remedy="use the text that Preprocessor.to_json returned",
            ) from error

    @cached_property
    def _value_sets(self) -> tuple[pa.Array, ...]:
        return tuple(pa.array(vocabulary) for vocabulary in self.vocabularies)


def fit_vocabulary(
    dataset: Scannable, column: str, *, max_categories: int | None = None
) -> tuple[Category, ...]:
    """Return the sorted values of a column, or of the elements of its lists, for `coded`.

    Reads all rows of a data set, once. Blocks; any rank may call it alone.

    Parameters
    ----------
    dataset : ParquetDataset or ArrayDataset
    column : str
    max_categories : int, optional
        Keep only so many values, the most frequent ones.

    Raises
    ------
    ColumnError
        If the column does not exist, or is not of strings, integers or bools.
    """
    counter: Counter[Category] = Counter()
    for batch in dataset.scan([column]):
        values = batch.column(column)
        while is_list(values.type):
            values = values.flatten()
        _count(column, values, counter)
    return _vocabulary(counter, max_categories)


class _Sample:
    """Rows of one column whose places have the smallest hashes."""

    def __init__(self, buckets: int | Sequence[float]) -> None:
        self.num_buckets = buckets if isinstance(buckets, int) else 0
        self._boundaries = () if isinstance(buckets, int) else tuple(map(float, buckets))
        self._values = np.empty(0, np.float64)
        self._keys = np.empty(0, np.float64)

    def add(self, values: NDArray[np.float64], first_row: int) -> None:
        """Enter the values of a run of rows."""
        keys = row_uniforms(0, 0, np.arange(first_row, first_row + len(values)), 1)[:, 0]
        there = ~np.isnan(values)
        self._values = np.concatenate([self._values, values[there]])
        self._keys = np.concatenate([self._keys, keys[there]])
        if len(self._keys) > _SAMPLED_ROWS:
            kept = np.argpartition(self._keys, _SAMPLED_ROWS)[:_SAMPLED_ROWS]
            self._values, self._keys = self._values[kept], self._keys[kept]

    def boundaries(self) -> tuple[float, ...]:
        """Return the quantiles between buckets, or the boundaries that were given."""
        if not self.num_buckets or not len(self._values):
            return self._boundaries
        shares = np.arange(1, self.num_buckets) / self.num_buckets
        found = np.quantile(self._values, shares, method="inverted_cdf")
        return tuple(np.unique(found).tolist())


def _check_buckets(bucketed: Mapping[str, int | Sequence[float]]) -> dict[str, _Sample]:
    for name, buckets in bucketed.items():
        if isinstance(buckets, int):
            is_good = buckets >= 2
        else:
            is_good = len(buckets) > 0 and bool(np.all(np.diff(buckets) > 0))
        if not is_good:
            raise UsageError(
                problem=f"bucketed={{{name!r}: {buckets!r}}}",
                remedy="give a number of buckets from 2 up, or boundaries that ascend",
            )
    return {name: _Sample(buckets) for name, buckets in bucketed.items()}


def _check_fill(fill: float | Mapping[str, float] | None, numeric: Sequence[str]) -> None:
    fills = fill if isinstance(fill, Mapping) else {} if fill is None else {"": fill}
    for name, value in fills.items():
        if (name and name not in numeric) or not math.isfinite(value):
            raise UsageError(
                problem=f"fill={fill!r}",
                remedy="give a finite number, or one for some of the numeric columns",
            )


class _Moments:
    """Mean and spread of one column, merged batch by batch."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def add(self, name: str, values: NDArray[np.float64]) -> None:
        """Merge in a batch of values, by the rule of Chan et al."""
        values = values[~np.isnan(values)]
        if len(values) == 0:
            return
        mean = float(values.sum()) / len(values)
        if not math.isfinite(mean):
            raise ColumnError(path=_NAME, column=name, problem="holds infinite values")
        total, delta = self.count + len(values), mean - self.mean
        self._squares += float(np.square(values - mean).sum())
        self._squares += delta * delta * self.count * len(values) / total
        self.mean += delta * len(values) / total
        self.count = total

    @property
    def std(self) -> float:
        """Standard deviation, or 1 where there is none to divide by."""
        if self.count == 0:
            return 1.0
        std = math.sqrt(self._squares / self.count)
        # Below this, a constant column's rounding errors would be blown up to size 1.
        return std if std > 1e-12 * abs(self.mean) else 1.0


def _arrow_column(data: Any, name: str) -> pa.Array:
    try:
        if isinstance(data, pa.RecordBatch | pa.Table):
            path = named_nodes(data.schema)[name].path
            column = data.column(path[0])
            if len(path) > 1:
                whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
                column = pick(whole, path[1:])
        else:
            column = pa.array(data[name], from_pandas=True)
    except KeyError:
        arrow = isinstance(data, pa.RecordBatch | pa.Table)
        known = tuple(data.schema.names if arrow else (str(key) for key in data))
        raise ColumnError(path=_NAME, column=name, problem="is missing", known=known) from None
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ColumnError(path=_NAME, column=name, problem=f"has mixed types: {error}") from error
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _numbers(name: str, column: pa.Array) -> NDArray[np.float64]:
    kind = column.type
    if not (is_numeric(kind) or (pt.is_temporal(kind) and not pt.is_interval(kind))):
        problem = f"is {kind}, which is neither a number nor a time"
        raise ColumnError(path=_NAME, column=name, problem=problem)
    return to_seconds(column)


def _count(name: str, column: pa.Array, counter: Counter[Category]) -> None:
    kind = column.type
    if not (_is_string(kind) or pt.is_integer(kind) or pt.is_boolean(kind) or pt.is_null(kind)):
        problem = f"is {kind}, and categories are strings, integers or bools"
        raise ColumnError(path=_NAME, column=name, problem=problem)
    for entry in column.drop_null().value_counts():
        counter[entry["values"].as_py()] += entry["counts"].as_py()


def _vocabulary(counter: Counter[Any], max_categories: int | None) -> tuple[Category, ...]:
    if max_categories is not None and len(counter) > max_categories:
        frequent = sorted(counter, key=lambda value: (-counter[value], value))
        return tuple(sorted(frequent[:max_categories]))
    return tuple(sorted(counter))


def _codes(name: str, column: pa.Array, values: pa.Array) -> NDArray[np.int64]:
    """Return each value's place in a vocabulary, from 1; 0 where it is not in it."""
    if pt.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pt.is_null(kind) or pt.is_null(values.type):
        return np.zeros(len(column), np.int64)
    if _is_string(kind) and _is_string(values.type):
        values = values.cast(kind)
    elif pt.is_integer(kind) and pt.is_integer(values.type):
        column = column.cast(pa.int64())
    elif pt.is_floating(kind) and pt.is_integer(values.type):
        # What pandas makes of integers with nulls.
        column, values = column.cast(pa.float64()), values.cast(pa.float64())
    elif kind != values.type:
        problem = f"is {kind}, and was {values.type} in fitting"
        raise ColumnError(path=_NAME, column=name, problem=problem)
    places = pc.fill_null(pc.call_function("index_in", [column], pc.SetLookupOptions(values)), -1)
    return places.to_numpy(zero_copy_only=False).astype(np.int64) + 1


def _is_string(kind: pa.DataType) -> bool:
    return pt.is_string(kind) or pt.is_large_string(kind)
