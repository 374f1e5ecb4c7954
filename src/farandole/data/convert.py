"""What the values of each Arrow type become in numpy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from farandole.data.nested import is_tensor

Array = NDArray[Any]

MAX_DIGITS = 18
"""Digits of decimals that all fit into an int64."""


def is_numeric(kind: pa.DataType) -> bool:
    """Return whether values of a type are numbers, bools included."""
    return (
        pt.is_integer(kind)
        or pt.is_floating(kind)
        or pt.is_boolean(kind)
        or pt.is_decimal(kind)
        or pt.is_null(kind)
    )


def is_text(kind: pa.DataType) -> bool:
    """Return whether values of a type are strings."""
    return pt.is_string(kind) or pt.is_large_string(kind)


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether values of a type are bytes of any length."""
    return pt.is_binary(kind) or pt.is_large_binary(kind)


def to_float(array: pa.Array) -> Array:
    """Return numbers as some numpy type that casts to float, null as NaN."""
    if array.null_count == 0 and (pt.is_integer(array.type) or pt.is_floating(array.type)):
        return np.from_dlpack(array)  # unlike to_numpy, it does not import pandas
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
    if pt.is_timestamp(kind) or pt.is_duration(kind) or pt.is_time(kind):
        per_second = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[kind.unit]
        return to_float(_ticks(array)).astype(np.float64) / per_second
    return to_float(array).astype(np.float64)


@dataclass(frozen=True)
class Numbers:
    """How the values of a type become numpy's.

    Attributes
    ----------
    dtype : numpy.dtype
    shape : tuple of int
        Of one value.
    function : callable
        Takes an Arrow array of n values, returns an array of shape (n, *shape), perhaps one
        that shares memory and cannot be written to. Missing values are 0 or NaN.
    says : str
        What the numbers are, where that is not plain.
    shows_null : bool
        Whether a missing value is told from others without a mask.
    """

    dtype: np.dtype[Any]
    function: Callable[[pa.Array], Array]
    shape: tuple[int, ...] = ()
    says: str = ""
    shows_null: bool = False


def numbers_of(kind: pa.DataType) -> Numbers | None:
    """Return how values of a type (see `plain`) become numbers, or None if they cannot."""
    if pt.is_boolean(kind):
        return Numbers(np.dtype(np.bool_), _integers)
    if pt.is_integer(kind):
        return Numbers(np.dtype(kind.to_pandas_dtype()), _integers)
    if pt.is_floating(kind):
        return Numbers(np.dtype(kind.to_pandas_dtype()), to_float, shows_null=True)
    if pt.is_decimal(kind):
        return Numbers(np.dtype(np.float64), to_float, shows_null=True)
    if pt.is_null(kind):
        return Numbers(np.dtype(np.float32), to_float, shows_null=True, says="NaN")
    if pt.is_temporal(kind) and not pt.is_interval(kind):
        says = _time_says(kind)
        return Numbers(np.dtype(np.int64), lambda array: _integers(_ticks(array)), says=says)
    if pt.is_fixed_size_binary(kind):
        return Numbers(np.dtype(np.uint8), _bytes, (kind.byte_width,))
    if pt.is_fixed_size_list(kind):
        return _list_numbers(kind)
    return _tensor_numbers(kind) if is_tensor(kind) else None


def scaled_numbers(kind: pa.DataType) -> Numbers:
    """Return how decimals become int64, without loss."""
    says = f"times 10**{kind.scale}"
    exact = pa.decimal128(MAX_DIGITS, kind.scale)

    def scaled(array: pa.Array) -> Array:
        try:
            array = array.cast(exact)
        except pa.ArrowInvalid as error:
            raise OverflowError(f"holds a decimal of more than {MAX_DIGITS} digits") from error
        # The low half of 128 bits is an int64.
        values = np.frombuffer(array.buffers()[1], "<i8")[::2]
        return _missing_as(values[array.offset : array.offset + len(array)], array, 0)

    return Numbers(np.dtype(np.int64), scaled, says=says)


def hash_numbers(num_buckets: int | None) -> Numbers:
    """Return how strings, bytes and integers become hashes; see `hashed`."""

    def digest(value: str | bytes | int) -> int:
        data = value if isinstance(value, bytes) else str(value).encode()
        code = hashlib.blake2b(data, digest_size=8).digest()
        if num_buckets is None:
            return int.from_bytes(code, "little", signed=True)
        return 1 + int.from_bytes(code, "little") % (num_buckets - 1)

    def hashes(array: pa.Array) -> Array:
        encoded = array.dictionary_encode()
        codes = [digest(value) for value in encoded.dictionary.to_pylist()]
        table = np.array([*codes, 0], np.int64)
        places = encoded.indices.fill_null(len(codes))
        return table[places.to_numpy(zero_copy_only=False)]

    says = "hash, 0 null" if num_buckets is None else f"hash from 1 to {num_buckets - 1}, 0 null"
    return Numbers(np.dtype(np.int64), hashes, says=says, shows_null=True)


def code_numbers(kind: pa.DataType, vocabulary: tuple[Any, ...]) -> Numbers:
    """Return how values become their places in a vocabulary; see `coded`.

    Raises
    ------
    ValueError
        If the vocabulary's values are of another type.
    """
    common = pa.int64() if pt.is_integer(kind) and not pt.is_uint64(kind) else kind
    try:
        values = pa.array(vocabulary, common)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise ValueError(f"is {kind}, and the vocabulary is not: {error}") from error

    def codes(array: pa.Array) -> Array:
        places = pc.call_function("index_in", [array.cast(common)], pc.SetLookupOptions(values))
        return places.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64) + 1

    says = f"code from 1 to {len(vocabulary)}, 0 null or unseen"
    return Numbers(np.dtype(np.int64), codes, says=says, shows_null=True)


def validity(array: pa.Array, shape: tuple[int, ...]) -> Array:
    """Return where there are values, as an array of shape (n, *shape)."""
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    if not shape:
        return valid
    if is_tensor(array.type):
        size, order = _tensor_order(array.type)
        flat = validity(array.storage, (array.type.storage_type.list_size,))
        return flat.reshape(len(array), *size).transpose(order)
    here = valid.reshape(len(array), *(1 for _ in shape))
    if pt.is_fixed_size_list(array.type):
        here = here & validity(fixed_elements(array), shape[1:]).reshape(len(array), *shape)
    return np.broadcast_to(here, (len(array), *shape))


def _missing_as(values: Array, array: pa.Array, missing: float) -> Array:
    """Return values with `missing` where an Arrow array is null."""
    if array.null_count == 0:
        return values
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return np.where(valid.reshape(len(array), *(1 for _ in values.shape[1:])), values, missing)


def _integers(array: pa.Array) -> Array:
    if array.null_count:
        array = array.fill_null(False if pt.is_boolean(array.type) else 0)
    return array.to_numpy(zero_copy_only=False)


def _ticks(array: pa.Array) -> pa.Array:
    """Return times as integers of their own unit."""
    return array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())


def _time_says(kind: pa.DataType) -> str:
    if pt.is_date(kind):
        return "days since 1970-01-01" if pt.is_date32(kind) else "ms since 1970-01-01"
    since = {True: " since 1970-01-01", False: ""}[pt.is_timestamp(kind)]
    zone = " UTC" if pt.is_timestamp(kind) and kind.tz else ""
    return f"{kind.unit}{since}{zone}" + (" since midnight" if pt.is_time(kind) else "")


def _bytes(array: pa.Array) -> Array:
    width = array.type.byte_width
    values = np.frombuffer(array.buffers()[1] or b"", np.uint8)
    values = values[array.offset * width : (array.offset + len(array)) * width]
    return _missing_as(values.reshape(len(array), width), array, 0)


def fixed_elements(array: pa.Array) -> pa.Array:
    """Return the elements of lists of a fixed size, those of null lists included."""
    size = array.type.list_size
    return array.values.slice(array.offset * size, len(array) * size)


def _list_numbers(kind: pa.DataType) -> Numbers | None:
    inner = numbers_of(kind.value_type)
    if inner is None:
        return None
    shape = (kind.list_size, *inner.shape)
    missing = np.nan if inner.shows_null else 0

    def stacked(array: pa.Array) -> Array:
        values = inner.function(fixed_elements(array)).reshape(len(array), *shape)
        return _missing_as(values, array, missing)

    return Numbers(inner.dtype, stacked, shape, inner.says, inner.shows_null)


def _tensor_order(kind: pa.DataType) -> tuple[list[int], list[int]]:
    """Return the shape as stored, and how a stack of tensors is transposed to the one meant."""
    order = kind.permutation or range(len(kind.shape))
    return kind.shape, [0, *(axis + 1 for axis in order)]


def _tensor_numbers(kind: pa.DataType) -> Numbers | None:
    inner = _list_numbers(kind.storage_type)
    if inner is None:
        return None
    stored, order = _tensor_order(kind)

    def shaped(array: pa.Array) -> Array:
        return inner.function(array.storage).reshape(len(array), *stored).transpose(order)

    shape = tuple(stored[axis - 1] for axis in order[1:])
    return Numbers(inner.dtype, shaped, shape, inner.says, inner.shows_null)
