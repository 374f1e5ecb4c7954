"""The forms in which a column comes, and the operations that all of them have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True)
class Masked:
    """Values some of which are missing.

    Attributes
    ----------
    values : ndarray or Tensor, shape (n, ...)
        Where nothing is valid: 0, False, or what `padded` was told to fill with.
    valid : ndarray or Tensor of bool, shape of `values`
        Where there is a value.
    """

    values: Any
    valid: Any

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.valid)

    def __getitem__(self, rows: Any) -> Masked:
        """Return some rows: a slice, or what numpy and torch take as an index."""
        return Masked(self.values[rows], self.valid[rows])

    def map(self, function: Callable[[Any], Any]) -> Masked:
        """Return the same of what `function` makes of each array."""
        return Masked(function(self.values), function(self.valid))


@dataclass(frozen=True)
class Ragged:
    """Lists of different lengths: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``.

    Attributes
    ----------
    values : ndarray, Tensor, Masked or Ragged
        All elements, one list after another. Lists of lists are Ragged values.
    offsets : ndarray or Tensor of int64, shape (n + 1,)
        From 0 up.
    """

    values: Any
    offsets: Any

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.offsets) - 1

    def __getitem__(self, row: int | slice) -> Any:
        """Return the elements of one row, or a run of rows as a Ragged column. Shares memory."""
        if not isinstance(row, slice):
            row = range(len(self))[row]
            return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]
        start, stop, step = row.indices(len(self))
        if step != 1:
            raise IndexError("a Ragged column is cut by runs of rows, without a step")
        stop = max(start, stop)
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def map(self, function: Callable[[Any], Any]) -> Ragged:
        """Return the same of what `function` makes of each array."""
        return Ragged(mapped(self.values, function), function(self.offsets))


Column = Any
"""A numpy array (or tensor), `Masked`, `Ragged`, a pyarrow.Array, or a list."""


def mapped(column: Column, function: Callable[[Any], Any]) -> Column:
    """Return a column of what `function` makes of each of its arrays; Arrow and lists stay."""
    if isinstance(column, Masked | Ragged):
        return column.map(function)
    return column if isinstance(column, pa.Array | pa.ChunkedArray | list) else function(column)


def take(column: Column, rows: NDArray[np.intp]) -> Column:
    """Return a copy of some rows of a column of numpy arrays, Arrow, or a list."""
    if isinstance(column, Masked):
        return column.map(lambda array: array.take(rows, axis=0))
    if isinstance(column, Ragged):
        starts = column.offsets[:-1][rows]
        sizes = column.offsets[1:][rows] - starts
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        return Ragged(take(column.values, runs(starts, sizes)), offsets)
    if isinstance(column, list):
        return [column[row] for row in rows]
    return column.take(rows) if isinstance(column, pa.Array) else column.take(rows, axis=0)


def concatenate(
    parts: Sequence[Column], join: Callable[[list[Any]], Any] = np.concatenate
) -> Column:
    """Return the rows of columns of one form; `join` concatenates arrays or tensors."""
    first = parts[0]
    if isinstance(first, Masked):
        return Masked(join([part.values for part in parts]), join([part.valid for part in parts]))
    if isinstance(first, Ragged):
        offsets, total = [first.offsets[:1]], 0
        for part in parts:
            offsets.append(part.offsets[1:] + total)
            total += int(part.offsets[-1])
        return Ragged(concatenate([part.values for part in parts], join), join(offsets))
    if isinstance(first, pa.Array):
        return pa.concat_arrays(parts)
    if isinstance(first, list):
        return [row for part in parts for row in part]
    return join(list(parts))


def runs(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the concatenation of ``arange(start, start + size)``."""
    ends = np.cumsum(sizes)
    return np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1] if len(ends) else 0)


class Chunks:
    """A column in a buffer whose values have no fixed size: Arrow arrays, by their first row.

    What is written replaces all arrays that it overlaps. Nothing is copied, so small pieces of
    large arrays keep those alive. Safe to use from several threads.
    """

    def __init__(self, kind: pa.DataType, num_rows: int) -> None:
        self.kind = kind
        self._num_rows = num_rows
        self._arrays: dict[int, pa.Array] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of rows, written or not."""
        return self._num_rows

    def put(self, at: int, values: pa.Array | pa.ChunkedArray) -> None:
        """Write values into rows `at` and following."""
        if not len(values):
            return
        chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
        stop = at + len(values)
        with self._lock:
            for start, array in list(self._arrays.items()):
                if start < stop and at < start + len(array):
                    del self._arrays[start]
            for chunk in chunks:
                if len(chunk):
                    self._arrays[at] = chunk
                    at += len(chunk)

    def __getitem__(self, rows: slice) -> pa.ChunkedArray:
        """Return a run of rows, without a copy."""
        start, stop, _ = rows.indices(self._num_rows)
        return self.gather(np.array([start]), np.array([max(stop - start, 0)]))

    def gather(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> pa.ChunkedArray:
        """Return several runs of rows, one after another, without a copy."""
        with self._lock:
            arrays = dict(self._arrays)
        keys = np.array(sorted(arrays), np.int64)
        pieces: list[pa.Array] = []
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            place = int(np.searchsorted(keys, start, side="right")) - 1
            while size > 0:
                key = int(keys[place])
                piece = arrays[key].slice(start - key, size)
                pieces.append(piece)
                start, size, place = start + len(piece), size - len(piece), place + 1
        return pa.chunked_array(pieces, self.kind)
