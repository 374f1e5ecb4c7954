"""A data set of numpy arrays in memory."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Unpack

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike

from farandole.data.block import RowBlock, Transform, transformed
from farandole.data.loader import Loadable
from farandole.data.plans import make_epoch_plan
from farandole.data.sampling import Samplable
from farandole.data.splits import Part, Splittable
from farandole.errors import ColumnError, DataError
from farandole.plan.lanes import EpochPlan
from farandole.plan.steps import EpochSettings

_NAME = "in-memory data"


class ArrayDataset(Loadable, Samplable, Splittable):
    """Rows held in numpy arrays, given in the same order as a Parquet data set would.

    Parameters
    ----------
    features : array-like, shape (n, F), optional
        Converted to float32, row-major.
    label : array-like, shape (n,), optional
        Bools and integers become int64, floats float32.
    categories : array-like of int, shape (n, C), optional
        Converted to int64.
    rows_per_shard : int, default=65536
        Rows that are moved as one by the shuffle of shards.
    transform : callable, optional
        Takes a `RowBlock` and returns one of as many rows.
        It must keep no state, and take random numbers from `RowBlock.rng` or
        `RowBlock.uniform` only: those hang on the epoch and the rows, not on who reads them.
    **columns : array-like, shape (n, ...)
        Further arrays, given by name as they are.

    Raises
    ------
    DataError
        If lengths or shapes do not fit, or there are no rows.
    """

    def __init__(
        self,
        features: ArrayLike | None = None,
        label: ArrayLike | None = None,
        *,
        categories: ArrayLike | None = None,
        rows_per_shard: int = 65536,
        transform: Transform | None = None,
        **columns: ArrayLike,
    ) -> None:
        arrays: dict[str, np.ndarray[Any, Any]] = {
            name: np.asarray(values) for name, values in columns.items()
        }
        if features is not None:
            arrays["features"] = np.ascontiguousarray(features, np.float32)
        if categories is not None:
            arrays["categories"] = np.ascontiguousarray(categories, np.int64)
        if label is not None:
            arrays["label"] = _as_label(np.asarray(label))
        lengths = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            problem = f"arrays differ in length: {lengths}" if lengths else "there is no array"
            raise DataError(path=_NAME, problem=problem, remedy="pass arrays of one length")
        for name in ("features", "categories"):
            if name in arrays and arrays[name].ndim != 2:
                problem = f"{name} has the shape {arrays[name].shape}"
                raise DataError(path=_NAME, problem=problem, remedy="pass it as rows x columns")
        num_rows = next(iter(lengths.values()))
        if num_rows == 0:
            raise DataError(path=_NAME, problem="there are no rows", remedy="pass some")
        self._rows = RowBlock(
            row_ids=np.arange(num_rows),
            features=arrays.get("features"),
            categories=arrays.get("categories"),
            label=arrays.get("label"),
            columns={name: arrays[name] for name in columns},
        )
        self._rows_per_shard = rows_per_shard
        self._part: str | None = None
        self._transform = transform

    @property
    def num_rows(self) -> int:
        """Rows."""
        return self._rows.num_rows

    @property
    def fingerprint(self) -> str:
        """Hex digest over all values."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(f"{self._shard_rows}{self._part or ''}".encode())
        for array in self._rows.arrays():
            digest.update(f"{array.dtype} {array.shape}".encode())
            if array.dtype.hasobject:
                digest.update(repr(array.tolist()).encode())
            else:
                digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        return digest.hexdigest()

    @property
    def label_name(self) -> str | None:
        """The name of the label in `scan`, if there is one."""
        return None if self._rows.label is None else "label"

    @property
    def _shard_rows(self) -> tuple[int, ...]:
        full, rest = divmod(self.num_rows, self._rows_per_shard)
        return (self._rows_per_shard,) * full + ((rest,) if rest else ())

    def select_part(self, part: Part) -> ArrayDataset:
        """Return the rows of a part, as a data set; see `split`."""
        chosen = copy.copy(self)
        chosen.__dict__.pop("_digest", None)
        rows = self._rows.take(np.flatnonzero(part.kept()))
        chosen._rows = replace(rows, row_ids=np.arange(rows.num_rows))
        chosen._part = f"{self._part or ''}{part.says}"
        return chosen

    def validate(self) -> None:
        """Do nothing: the constructor has checked it all."""

    def epoch_plan(self, **settings: Unpack[EpochSettings]) -> EpochPlan:
        """Return the order of an epoch; see `EpochPlan`. Raises ConfigError and DataError."""
        return make_epoch_plan(_NAME, self._shard_rows, settings)

    def read(self, plan: EpochPlan, slots: range, start_step: int = 0) -> Generator[RowBlock]:
        """Yield the blocks of `slots`, in the order of (step, slot). Does no I/O."""
        for step in range(start_step, plan.num_steps):
            for slot in slots:
                block = self._rows.take(plan.slot_row_ids(step, slot))
                yield transformed(block, self._transform, plan)

    def read_rows(self, ranges: Sequence[range]) -> Generator[RowBlock]:
        """Yield one block for each range of rows, in the order of the data set."""
        for rows in ranges:
            yield transformed(self._rows.take(np.arange(rows.start, rows.stop)), self._transform)

    def scan(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield columns by name as Arrow batches, one per shard, in order."""
        known = dict(self._rows.columns)
        if self._rows.label is not None:
            known.setdefault("label", self._rows.label)
        for name in names:
            if name not in known:
                raise ColumnError(
                    path=_NAME, column=name, problem="does not exist", known=tuple(known)
                )
        start = 0
        for rows in self._shard_rows:
            arrays = [
                pa.array(known[name][start : start + rows], from_pandas=True) for name in names
            ]
            yield pa.RecordBatch.from_arrays(arrays, names=list(names))
            start += rows


def _as_label(label: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if label.ndim != 1:
        problem = f"label has the shape {label.shape}"
        raise DataError(path=_NAME, problem=problem, remedy="pass one value for each row")
    if label.dtype.kind in "biu":
        return label.astype(np.int64)
    if label.dtype.kind == "f":
        return label.astype(np.float32)
    raise ColumnError(path=_NAME, column="label", problem=f"is {label.dtype}, not numeric")
