"""Fields of structs as columns of their own, by dotted names; types as they are worked with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from farandole.data.tensors import is_tensor, tensor_type

_KEY, _VALUE = "key", "value"


@dataclass(frozen=True)
class Node:
    """A column, or a field inside one.

    Attributes
    ----------
    path : tuple of str
        Name of the column, then of the fields in it; lists are passed through.
    kind : pyarrow.DataType
        With the lists around the field; see `plain`.
    leaves : range
        Places among the stored columns of the file.
    is_divided : bool
        Whether it has fields, which are nodes as well.
    is_nullable : bool
        Whether the schema allows nulls, here or around it.
    """

    path: tuple[str, ...]
    kind: pa.DataType
    leaves: range
    is_divided: bool
    is_nullable: bool

    @property
    def name(self) -> str:
        """Dotted name."""
        return ".".join(self.path)


@lru_cache(maxsize=64)
def nodes_of(schema: pa.Schema) -> tuple[Node, ...]:
    """Return all columns of a file and their fields, each before its own fields."""
    made: list[Node] = []
    start = 0
    for field in schema:
        nodes = list(
            _nodes((field.name,), tensor_type(field) or plain(field.type), start, field.nullable)
        )
        start = nodes[0].leaves.stop
        made += nodes
    return tuple(made)


@lru_cache(maxsize=64)
def named_nodes(schema: pa.Schema) -> dict[str, Node]:
    """Return columns and fields by their dotted names; a column hides a field of its name."""
    nodes: dict[str, Node] = {}
    for node in nodes_of(schema):
        if node.name not in nodes or len(node.path) < len(nodes[node.name].path):
            nodes[node.name] = node
    return nodes


def is_among(name: str, names: Collection[str]) -> bool:
    """Return whether a column or field, or what it is a field of, is among some names."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in names for end in range(1, len(parts) + 1))


def _nodes(
    path: tuple[str, ...], kind: pa.DataType, start: int, is_nullable: bool
) -> Iterator[Node]:
    """Yield a node and those below it."""
    fields = _fields(kind)
    below: list[Node] = []
    stop = start if fields else start + 1
    for field in fields:
        nodes = list(_nodes((*path, field.name), field.type, stop, is_nullable or field.nullable))
        below += nodes
        stop = nodes[0].leaves.stop
    is_nullable = is_nullable or _has_nullable_elements(kind)
    yield Node(path, kind, range(start, stop), bool(fields), is_nullable)
    yield from below


def _fields(kind: pa.DataType) -> list[pa.Field]:
    """Return the fields inside a type, with the lists around them as part of their types."""
    if pt.is_struct(kind):
        return [kind.field(place) for place in range(kind.num_fields)]
    if pt.is_map(kind):
        return [
            pa.field(_KEY, pa.list_(kind.key_type), kind.key_field.nullable),
            pa.field(_VALUE, pa.list_(kind.item_type), kind.item_field.nullable),
        ]
    if is_list(kind):
        fields = _fields(kind.value_type)
        return [field.with_type(_list_like(kind, field)) for field in fields]
    return []


def is_divided(kind: pa.DataType) -> bool:
    """Return whether a type has fields, which are columns of their own."""
    return bool(_fields(kind))


def _has_nullable_elements(kind: pa.DataType) -> bool:
    while is_list(kind) or pt.is_fixed_size_list(kind):
        if kind.value_field.nullable:
            return True
        kind = kind.value_type
    return False


def is_list(kind: pa.DataType) -> bool:
    """Return whether a type is of lists of any length; see `plain`."""
    return pt.is_list(kind) or pt.is_large_list(kind)


def plain(kind: pa.DataType) -> pa.DataType:
    """Return the type in which a stored one is worked with: the same values, plainly laid out.

    Dictionaries (they differ from group to group) become their values, views what they view,
    extension types their storage, except tensors of a fixed shape; zones become UTC.
    """
    if pt.is_dictionary(kind):
        return plain(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType) and not is_tensor(kind):
        return pa.bool_() if kind.extension_name == "arrow.bool8" else plain(kind.storage_type)
    if pt.is_timestamp(kind):
        return kind if kind.tz is None else pa.timestamp(kind.unit, "UTC")
    if kind == pa.string_view():
        return pa.string()
    if kind == pa.binary_view():
        return pa.binary()
    if pt.is_struct(kind):
        fields = [kind.field(place) for place in range(kind.num_fields)]
        return pa.struct([field.with_type(plain(field.type)) for field in fields])
    if pt.is_map(kind):
        return pa.map_(plain(kind.key_type), plain(kind.item_type))
    if pt.is_fixed_size_list(kind):
        field = kind.value_field
        return pa.list_(field.with_type(plain(field.type)), kind.list_size)
    if is_list(kind) or pt.is_list_view(kind) or pt.is_large_list_view(kind):
        return _list_like(kind, kind.value_field.with_type(plain(kind.value_type)))
    return kind


def _list_like(kind: pa.DataType, field: pa.Field) -> pa.DataType:
    large = pt.is_large_list(kind) or pt.is_large_list_view(kind)
    return pa.large_list(field) if large else pa.list_(field)


def pick(array: pa.Array, path: Sequence[str]) -> pa.Array:
    """Return a field of structs, also inside lists and maps; null where what holds it is."""
    kind = array.type
    if not path:
        # Arrow's own cast of views gives arrays without a last offset.
        is_view = pt.is_list_view(kind) or pt.is_large_list_view(kind)
        return _relisted(array, array.flatten()) if is_view else array
    if pt.is_struct(kind):
        return pick(array.flatten()[kind.get_field_index(path[0])], path[1:])
    if pt.is_map(kind):
        entries = pa.struct([(_KEY, kind.key_type), (_VALUE, kind.item_type)])
        array = array.cast(pa.list_(entries))
    return _relisted(array, pick(array.flatten(), path))


def _relisted(array: pa.Array, elements: pa.Array) -> pa.Array:
    """Return lists of other elements, as long as those of an array and null where they are."""
    lengths, _ = elements_of(array)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    missing = np.append(array.is_null().to_numpy(zero_copy_only=False), False)
    large = pt.is_large_list(array.type) or pt.is_large_list_view(array.type)
    make = pa.LargeListArray if large else pa.ListArray
    width = pa.int64() if large else pa.int32()
    return make.from_arrays(pa.array(offsets, width, mask=missing), elements)


def elements_of(array: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Return the length of each list, 0 for null, and all elements, one list after another."""
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64), array.flatten()
