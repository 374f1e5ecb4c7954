"""Batches as a `tf.data.Dataset`, through TensorFlow."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
import tensorflow as tf

from farandole.data.block import RowBlock
from farandole.data.columns import Masked, Ragged
from farandole.data.loader import BatchLoader
from farandole.errors import ColumnError, UsageError

_PARTS = ("row_ids", "features", "categories", "label", "mask")


def to_tf(loader: BatchLoader) -> tf.data.Dataset:
    """See `BatchLoader.to_tf`."""
    place = loader.state_dict()
    first = next(iter(loader), None)
    loader.load_state_dict(place)
    if not isinstance(first, RowBlock):
        problem = f"to_tf is for loaders of numpy arrays, not {type(loader).__name__}"
        raise UsageError(problem=problem, remedy='pass as_="numpy" to dataset.loader')
    specs = tf.nest.map_structure(_spec, _elements(first))

    def batches() -> Iterator[dict[str, Any]]:
        for block in loader:
            yield _elements(block)

    return tf.data.Dataset.from_generator(batches, output_signature=specs)


def _elements(block: RowBlock) -> dict[str, Any]:
    """Return a block as nested dicts of arrays."""
    found = {name: getattr(block, name) for name in _PARTS if getattr(block, name) is not None}
    columns = {name: _element(name, column) for name, column in block.columns.items()}
    return {**found, "columns": columns} if columns else found


def _element(name: str, column: Any) -> Any:
    if isinstance(column, Masked):
        return {"values": _element(name, column.values), "valid": column.valid}
    if isinstance(column, Ragged):
        return {"values": _element(name, column.values), "offsets": column.offsets}
    kind: Any = getattr(column, "dtype", None) or getattr(column, "type", type(column).__name__)
    if isinstance(kind, np.dtype) and kind.kind in "fiub":
        return column
    if isinstance(kind, pa.DataType) and (_is_text(kind) or _is_bytes(kind)):
        empty = "" if _is_text(kind) else b""
        return np.array([empty if x is None else x for x in column.to_pylist()], object)
    problem = f"is {kind}, for which TensorFlow has no type"
    raise ColumnError(path="tf.data", column=name, problem=problem)


def _is_text(kind: pa.DataType) -> bool:
    return pt.is_string(kind) or pt.is_large_string(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return pt.is_binary(kind) or pt.is_large_binary(kind)


def _spec(array: np.ndarray[Any, Any]) -> tf.TensorSpec:
    dtype = tf.string if array.dtype.hasobject else tf.as_dtype(array.dtype)
    return tf.TensorSpec((None, *array.shape[1:]), dtype)
