"""What each Arrow type becomes in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

Array = NDArray[Any]


def is_numeric(kind: pa.DataType) -> bool:
    """Return whether values of a type are numbers, bools included."""
    return (
        pt.is_integer(kind)
        or pt.is_floating(kind)
        or pt.is_boolean(kind)
        or pt.is_decimal(kind)
        or pt.is_null(kind)
    )


def numpy_dtype(kind: pa.DataType, *, has_nulls: bool) -> np.dtype[Any]:
    """Return the dtype of a column given by name.

    Integers are int64 (uint64 stays) and bools bool, both float64 with NaN where there are
    nulls; floats keep their width; decimals are float64; timestamps, dates and durations keep
    their unit, without a zone (UTC). All else is of Python objects, null as None.
    """
    if pt.is_boolean(kind) or pt.is_integer(kind):
        if has_nulls:
            return np.dtype(np.float64)
        if pt.is_boolean(kind):
            return np.dtype(np.bool_)
        return np.dtype(np.uint64 if pt.is_uint64(kind) else np.int64)
    if pt.is_floating(kind):
        return np.dtype(kind.to_pandas_dtype())
    if pt.is_decimal(kind):
        return np.dtype(np.float64)
    if pt.is_timestamp(kind):
        return np.dtype(f"datetime64[{kind.unit}]")
    if pt.is_date(kind):
        return np.dtype("datetime64[D]" if pt.is_date32(kind) else "datetime64[ms]")
    if pt.is_duration(kind):
        return np.dtype(f"timedelta64[{kind.unit}]")
    return np.dtype(np.object_)


def to_numpy(array: pa.Array, dtype: np.dtype[Any]) -> Array:
    """Return an Arrow array as numpy values of a dtype that `numpy_dtype` gave."""
    if dtype.kind == "f":
        return to_float(array)
    if dtype.kind == "O" and not _is_text(array.type):
        values = np.empty(len(array), np.object_)
        values[:] = array.to_pylist()
        return values
    return array.to_numpy(zero_copy_only=False)


def to_float(array: pa.Array) -> Array:
    """Return numbers as some numpy type that casts to float, null as NaN."""
    if pt.is_boolean(array.type):
        array = pc.cast(array, pa.uint8())
    elif pt.is_decimal(array.type) or pt.is_null(array.type):
        array = pc.cast(array, pa.float64())
    return array.to_numpy(zero_copy_only=False)


def to_seconds(array: pa.Array) -> Array:
    """Return numbers as they are, and times as seconds (since 1970), in float64 with NaN."""
    kind = array.type
    if pt.is_date(kind):
        array, kind = pc.cast(array, pa.timestamp("ms")), pa.timestamp("ms")
    if pt.is_timestamp(kind) or pt.is_duration(kind):
        per_second = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[kind.unit]
        return to_float(pc.cast(array, pa.int64())).astype(np.float64) / per_second
    return to_float(array).astype(np.float64)


def _is_text(kind: pa.DataType) -> bool:
    return (
        pt.is_string(kind)
        or pt.is_large_string(kind)
        or pt.is_binary(kind)
        or pt.is_large_binary(kind)
    )
