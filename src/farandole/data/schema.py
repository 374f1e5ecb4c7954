"""One schema for files that differ, and what becomes of each file's columns under it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa
import pyarrow.types as pt

from farandole.data.nested import is_divided, named_nodes, nodes_of
from farandole.errors import ColumnError, DataError

_INTEGER = re.compile(r"-?\d{1,18}")


@dataclass(frozen=True)
class Conflict:
    """Why a column has no type: `first` and `second` are numbers of schemas."""

    column: str
    first: int
    second: int
    first_type: pa.DataType
    second_type: pa.DataType
    twice: bool = False
    """Whether a file has several columns of the name."""

    @property
    def is_of_fields(self) -> bool:
        """Whether both types are divided into fields: then these have types or conflicts."""
        return is_divided(self.first_type) and is_divided(self.second_type)

    def error(self, paths: Sequence[str]) -> DataError:
        """Return the error; `paths` has a file for each schema."""
        if self.twice:
            return DataError(
                path=paths[self.second],
                problem=f"there are several columns {self.column!r}",
                remedy="write the file with distinct names",
            )
        problem = (
            f"column {self.column!r} is {self.second_type}, "
            f"but {self.first_type} in {paths[self.first]}"
        )
        remedy = "write both files with one type, or name it in schema="
        return DataError(path=paths[self.second], problem=problem, remedy=remedy)


@dataclass(frozen=True)
class Resolution:
    """The type of each column over all files, in the order in which files first have them.

    Fields of structs are columns, too, by dotted names; see `Node`.

    Attributes
    ----------
    types : dict of str to DataType
    conflicts : dict of str to Conflict
        Columns without a type.
    fields : dict of str to list of str
        What columns are divided into.
    hidden : dict of str to str
        Fields that a column of their name hides, each with the column in which it is.
    """

    types: dict[str, pa.DataType] = field(default_factory=dict[str, pa.DataType])
    conflicts: dict[str, Conflict] = field(default_factory=dict[str, Conflict])
    fields: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    hidden: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Deviation:
    """How some files' columns differ from what is read of them.

    Attributes
    ----------
    column : str
        Empty where the order of columns is meant.
    kind : {"missing", "cast", "conflict", "order"}
        Conflicting columns cannot be read; all else can.
    detail : str
    paths : tuple of str
    """

    column: str
    kind: Literal["missing", "cast", "conflict", "order"]
    detail: str
    paths: tuple[str, ...]

    def __str__(self) -> str:
        first, *others = self.paths
        more = f" and {len(others)} more" if others else ""
        column = f"{self.column!r} " if self.column else ""
        return f"{column}{self.detail}: {first}{more}"


@dataclass(frozen=True)
class SchemaReport:
    """The schema that all files are cast to, and which files deviate from it.

    Attributes
    ----------
    schema : pyarrow.Schema
        Without columns that have no common type.
    num_files : int
    deviations : tuple of Deviation
        Empty if all files have this very schema.
    """

    schema: pa.Schema
    num_files: int
    deviations: tuple[Deviation, ...]

    def __str__(self) -> str:
        if not self.deviations:
            return f"{self.num_files} files of one schema, {len(self.schema)} columns"
        head = f"{self.num_files} files, {len(self.schema)} columns"
        return "\n  ".join(
            [f"{head}; {len(self.deviations)} deviations:", *map(str, self.deviations)]
        )


def resolve(schemas: Sequence[pa.Schema]) -> Resolution:
    """Return the narrowest type that holds each column of all schemas without loss of range.

    Integers widen, and become floating beside floats; null takes any type; decimals, times and
    strings take the larger precision, unit and offsets; times of two zones become UTC; the
    fields of structs are joined, the elements of lists likewise. Of dictionaries, the values
    count.
    """
    found = Resolution()
    first_with: dict[str, int] = {}
    for number, schema in enumerate(schemas):
        nodes = named_nodes(schema)
        twice = _note_names(found, schema)
        for name, node in nodes.items():
            if name in found.conflicts:
                continue
            first = first_with.setdefault(name, number)
            known = found.types.setdefault(name, node.kind)
            common = None if name in twice else common_type(known, node.kind)
            if common is None:
                found.conflicts[name] = Conflict(
                    name, first, number, known, node.kind, name in twice
                )
            else:
                found.types[name] = common
    for name in found.conflicts:
        del found.types[name]
    return found


def _note_names(found: Resolution, schema: pa.Schema) -> set[str]:
    """Note which columns have which fields; return the names that several columns have."""
    nodes, twice = named_nodes(schema), set[str]()
    for node in nodes_of(schema):
        if len(node.path) > 1:
            siblings = found.fields.setdefault(".".join(node.path[:-1]), [])
            siblings += [] if node.name in siblings else [node.name]
        if nodes[node.name] is not node:
            if len(node.path) > 1:
                found.hidden[node.name] = node.path[0]
            else:
                twice.add(node.name)
    return twice


def with_given(found: Resolution, given: pa.Schema | None, path: str) -> Resolution:
    """Return a resolution in which the types that a user gave stand.

    Raises
    ------
    ColumnError
        If a column does not exist.
    """
    types, conflicts = dict(found.types), dict(found.conflicts)
    for column in given or ():
        if column.name not in types and column.name not in conflicts:
            problem = "of schema= does not exist"
            raise ColumnError(path=path, column=column.name, problem=problem, known=tuple(types))
        for node in nodes_of(pa.schema([column])):
            types[node.name] = node.kind
            conflicts.pop(node.name, None)
    return Resolution(types, conflicts, found.fields, found.hidden)


def partition_type(values: Sequence[str | None]) -> pa.DataType:
    """Return int64 if all values are integers, else string."""
    integers = all(_INTEGER.fullmatch(value) for value in values if value is not None)
    return pa.int64() if integers else pa.string()


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the type that holds both of two plain ones, or None."""
    if one == other:
        return one
    schemas = [pa.schema([("x", kind)]) for kind in (one, other)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return None


def deviations(
    schemas: Sequence[pa.Schema],
    paths: Sequence[tuple[str, ...]],
    resolution: Resolution,
    elsewhere: Mapping[str, pa.DataType],
) -> tuple[Deviation, ...]:
    """Return how schemas differ from what they are resolved to.

    Parameters
    ----------
    paths : sequence of tuple of str
        The files of each schema.
    elsewhere : mapping
        Columns that come from folders.
    """
    order = [
        name for name in resolution.types if name not in elsewhere and name not in resolution.fields
    ]
    place = {name: number for number, name in enumerate(order)}
    found: dict[tuple[str, Literal["missing", "cast", "conflict", "order"], str], list[str]] = {}
    for schema, files in zip(schemas, paths, strict=True):
        nodes = {n: node for n, node in named_nodes(schema).items() if not node.is_divided}
        for name in order:
            if name not in nodes:
                found.setdefault((name, "missing", "is missing, null is read"), []).extend(files)
        for name, node in nodes.items():
            if name in resolution.conflicts:
                detail = f"is {node.kind}, which has no common type with other files"
                found.setdefault((name, "conflict", detail), []).extend(files)
            elif node.kind != resolution.types[name]:
                detail = _cast_detail(node.kind, resolution.types[name])
                found.setdefault((name, "cast", detail), []).extend(files)
        places = [place[name] for name in nodes if name in place]
        if places != sorted(places):
            found.setdefault(("", "order", "columns in another order"), []).extend(files)
    return tuple(
        Deviation(column, kind, detail, tuple(files))
        for (column, kind, detail), files in found.items()
    )


def _cast_detail(stored: pa.DataType, resolved: pa.DataType) -> str:
    detail = f"is {stored}, read as {resolved}"
    if pt.is_integer(stored) and pt.is_floating(resolved):
        digits = {16: 11, 32: 24, 64: 53}[resolved.bit_width]
        return f"{detail} (integers beyond 2**{digits} are an error)"
    if pt.is_uint64(stored) and pt.is_int64(resolved):
        return f"{detail} (values from 2**63 up are an error)"
    return detail
