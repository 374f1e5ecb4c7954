"""Tensors as plain bytes: how lists of one length are stored, and how they come back.

Parquet stores a list with a level for each element, and reading these costs many times what
copying the values does. So a rewritten data set keeps lists of a fixed size as binary values of a
fixed size. The field's metadata say what they were; any other reader sees the raw bytes, as
`numpy.frombuffer` takes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import prod

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

KEY = b"farandole.tensor"


def is_tensor(kind: pa.DataType) -> bool:
    """Return whether a type is of Arrow's tensors of a fixed shape."""
    return isinstance(kind, pa.FixedShapeTensorType)


def is_packed(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether values of a type are the bytes of the tensors that are wanted."""
    if not pt.is_fixed_size_binary(kind) or not (
        pt.is_fixed_size_list(wanted) or is_tensor(wanted)
    ):
        return False
    field = stored_field(pa.field("", wanted))
    return field is not None and field.type == kind


def tensor_type(field: pa.Field) -> pa.DataType | None:
    """Return the type of the tensors that a stored column holds as bytes, or None."""
    text = (field.metadata or {}).get(KEY)
    if text is None or not pt.is_fixed_size_binary(field.type):
        return None
    told = json.loads(text)
    value_type = pa.from_numpy_dtype(told["dtype"])
    if told["tensor"]:
        return pa.fixed_shape_tensor(value_type, told["shape"])
    kind = value_type
    for size in reversed(told["shape"]):
        kind = pa.list_(kind, size)
    return kind


def stored_field(field: pa.Field) -> pa.Field | None:
    """Return the field of bytes that stores a column of tensors, or None if it is none.

    Tensors are lists of a fixed size, nested or not, and Arrow's tensors of a fixed shape, of
    integers or floats.
    """
    kind, shape = field.type, []
    is_arrow_tensor = isinstance(kind, pa.FixedShapeTensorType)
    if is_arrow_tensor:
        if kind.permutation is not None or kind.dim_names is not None:
            return None
        shape, kind = list(kind.shape), kind.value_type
    while pt.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    if prod(shape) == 0 or not shape or not (pt.is_integer(kind) or pt.is_floating(kind)):
        return None
    dtype = np.dtype(kind.to_pandas_dtype())
    told = {"dtype": dtype.name, "shape": shape, "tensor": is_arrow_tensor}
    binary = pa.binary(prod(shape) * dtype.itemsize)
    return pa.field(field.name, binary, metadata={KEY: json.dumps(told)})


def as_tensor(field: pa.Field, arrays: Iterable[pa.Array]) -> pa.Field | None:
    """Return the field of bytes for a column of tensors, or of lists that all have one length.

    None if it is something else. Looks at `arrays`, the values, up to the first that says so.
    """
    stored = stored_field(field)
    if stored is None and not pt.is_list(field.type):
        return None
    for array in arrays:
        if stored is None:
            lengths = array.value_lengths().drop_null()
            if not len(lengths):
                continue
            tensors = pa.list_(field.type.value_type, lengths[0].as_py())
            stored = stored_field(pa.field(field.name, tensors))
            if stored is None:
                return None
        try:
            pack(array, stored.type)
        except ValueError:
            return None
    return stored


def pack(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return lists of one length as bytes of the type `kind`.

    Raises
    ------
    ValueError
        If lists have another length, or a value inside of one is null.
    """
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        places = pa.array(np.cumsum(valid) - 1, mask=~valid)
        return pack(array.drop_null(), kind).take(places)
    values = array
    while pt.is_fixed_size_list(values.type) or pt.is_list(values.type):
        values = values.flatten()
        if values.null_count:
            raise ValueError("a value is null")
    size = values.type.bit_width // 8
    if len(values) * size != len(array) * kind.byte_width:
        raise ValueError("lists differ in length")
    data = values.buffers()[1].slice(values.offset * size, len(values) * size)
    return pa.Array.from_buffers(kind, len(array), [None, data])


def unpack(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return bytes as the tensors that `tensor_type` named, without a copy of the values."""
    storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    sizes, value_type = [], storage
    while pt.is_fixed_size_list(value_type):
        sizes.append(value_type.list_size)
        value_type = value_type.value_type
    width = array.type.byte_width
    data = array.buffers()[1].slice(array.offset * width, len(array) * width)
    values = pa.Array.from_buffers(value_type, len(array) * prod(sizes), [None, data])
    for size in reversed(sizes[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    mask = array.is_null() if array.null_count else None
    lists = pa.FixedSizeListArray.from_arrays(values, sizes[0], mask=mask)
    return lists if storage is kind else pa.ExtensionArray.from_storage(kind, lists)
