"""Parts of a data set that hang on the value of a column: splits and classes."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from farandole.data.mixing import MixedDataset, mix
from farandole.data.selection import Shard
from farandole.errors import ColumnError, DataError
from farandole.plan.interleave import Stop
from farandole.plan.random import scrambled

Codes = NDArray[np.uint16]

_MAX_CLASSES = 1000
_NULL_KEY = 0x6E756C6C
_TAGS = {"row": 1, "integer": 2, "float": 3, "text": 4, "bytes": 5, "time": 6}
_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


class _Table(Protocol):
    """What parts can be made of."""

    @property
    def num_rows(self) -> int: ...

    def scan(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]: ...


class Partition:
    """Which part each row of a data set belongs to; found out once, at first use.

    Parameters
    ----------
    table : data set
    by : str or None
        The column that decides; None stands for the position of the row.
    code : callable
        Returns the parts of values, as numbers.
    says : str
        The rule in words, for fingerprints.
    """

    def __init__(
        self, table: _Table, by: str | None, code: Callable[[pa.Array], Codes], says: str
    ) -> None:
        self._table = table
        self._by = by
        self._code = code
        self.says = says
        self._made: Codes | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_made": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def codes(self) -> Codes:
        """Return the part of each row, in the order of the data set. Blocks at first use."""
        with self._lock:
            if self._made is None or len(self._made) != self._table.num_rows:
                columns = self._columns()
                self._made = np.concatenate([self._code(column) for column in columns])
            return self._made

    def _columns(self) -> Iterator[pa.Array]:
        if self._by is None:
            yield pa.array(np.arange(self._table.num_rows))
        else:
            for batch in self._table.scan([self._by]):
                yield batch.column(0)


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a data set."""

    partition: Partition
    code: int
    name: str

    @property
    def says(self) -> str:
        """The rule in words, for fingerprints."""
        return f"{self.partition.says}[{self.name}]"

    def kept(self) -> NDArray[np.bool_]:
        """Return which rows of the data set belong to it. Blocks at first use."""
        kept = self.partition.codes() == self.code
        if not kept.any():
            problem = "no row belongs to it"
            raise DataError(path=self.says, problem=problem, remedy="make the part larger")
        return kept


def narrowed(shards: Sequence[Shard], kept: NDArray[np.bool_]) -> list[Shard]:
    """Return shards of those of their rows that are kept, without those that have none.

    `kept` is for all rows of all shards, one after another.
    """
    found: list[Shard] = []
    start = 0
    for shard in shards:
        keep = kept[start : start + shard.num_rows]
        start += shard.num_rows
        count = int(np.count_nonzero(keep))
        if count == shard.num_rows:
            found.append(shard)
        elif count:
            bits = keep
            if shard.kept is not None:
                bits = np.unpackbits(shard.kept).view(np.bool_)
                bits[np.flatnonzero(bits)] = keep
            found.append(Shard(shard.file, shard.group, count, np.packbits(bits)))
    return found


class Splittable:
    """What splits a data set. A mix-in for those with `num_rows`, `scan` and `select_part`."""

    def split(
        self: Any,
        fractions: Mapping[str, float],
        *,
        by: str | None = None,
        seed: int = 0,
    ) -> dict[str, Any]:
        """Return parts of the data set, to one of which each row belongs.

        On which side a row is hangs on the value of its key and the seed alone, through a hash
        of 64 bits: not on files, their order, other rows, or the type's width. Rows of one key
        are always on one side, as are all rows without one. The fractions are expectations: of
        `n` keys, a part of fraction `f` has ``f * n`` to within a few ``sqrt(n)``.

        Parameters
        ----------
        fractions : dict of str to float
            Names and sizes of the parts; they add up to 1. Sides are laid out in this order: a
            row stays in the first part when that grows.
        by : str, optional
            The column with the key: integers, floats, strings, bytes, bools, dates or times. By
            default the position of the row in the data set, which changes when rows are added
            before it.
        seed : int, default=0

        Raises
        ------
        DataError
            If the fractions do not add up to 1.

        Examples
        --------
        >>> parts = dataset.split({"train": 0.9, "valid": 0.1}, by="user")  # doctest: +SKIP
        """
        sizes = list(fractions.values())
        right = all(isinstance(size, Real) and 0 < size <= 1 for size in sizes)
        if not right or abs(math.fsum(sizes) - 1) > 1e-9:
            raise DataError(
                path=repr(self),
                problem=f"the fractions {dict(fractions)} do not add up to 1",
                remedy="give each part a positive one",
            )
        says = f"split(by={by!r}, {dict(fractions)}, seed={seed})"
        tag = "row" if by is None else None
        sides = _Sides(tuple(sizes), seed, tag, by, repr(self))
        partition = Partition(self, by, sides, says)
        return {
            name: self.select_part(Part(partition, code, name))
            for code, name in enumerate(fractions)
        }


@dataclass(frozen=True)
class _Sides:
    """Says on which side keys are."""

    fractions: tuple[float, ...]
    seed: int
    tag: str | None
    by: str | None
    path: str

    def __call__(self, keys: pa.Array) -> Codes:
        bounds = np.cumsum(self.fractions)[:-1]
        hashes = scrambled(key_hashes(keys, self.path, self.by, self.tag), self.seed)
        places = (hashes >> np.uint64(11)) * 2.0**-53
        return np.searchsorted(bounds, places, side="right").astype(np.uint16)


def key_hashes(
    keys: pa.Array, path: str = "keys", by: str | None = None, tag: str | None = None
) -> NDArray[np.uint64]:
    """Return 64-bit hashes of values, alike on all machines and for all widths of a type.

    Raises
    ------
    ColumnError
        If values of this type cannot be keys.
    """
    if pt.is_dictionary(keys.type):
        keys = keys.dictionary_decode()
    found = _key_bits(keys)
    if found is None:
        problem = f"is {keys.type}, which cannot be a key"
        raise ColumnError(path=path, column=str(by), problem=problem)
    kind, bits = found
    if keys.null_count:
        bits = np.where(keys.is_null().to_numpy(zero_copy_only=False), np.uint64(_NULL_KEY), bits)
    return scrambled(bits, _TAGS[tag or kind])


def _key_bits(keys: pa.Array) -> tuple[str, NDArray[np.uint64]] | None:
    """Return what kind of values there are and 64 bits of each; a null is anything."""
    kind = keys.type
    if pt.is_boolean(kind):
        keys, kind = keys.cast(pa.uint8()), pa.uint8()
    if pt.is_integer(kind):
        wide = pa.uint64() if pt.is_unsigned_integer(kind) else pa.int64()
        return "integer", _values(keys.cast(wide), 0).view(np.uint64)
    if pt.is_floating(kind):
        values = _values(keys.cast(pa.float64()), 0.0) + 0.0  # -0.0 becomes 0.0
        return "float", np.where(np.isnan(values), np.nan, values).view(np.uint64)
    if pt.is_timestamp(kind) or pt.is_duration(kind) or pt.is_date(kind):
        if pt.is_date(kind):
            keys, kind = keys.cast(pa.timestamp("ms")), pa.timestamp("ms")
        # Modulo 2**64, so that far dates in nanoseconds do no harm.
        ticks = _values(keys.cast(pa.int64()), 0).view(np.uint64)
        return "time", ticks * np.uint64(_NANOSECONDS[kind.unit])
    if pt.is_decimal(kind):
        keys, kind = keys.cast(pa.string()), pa.string()
    if pt.is_string(kind) or pt.is_large_string(kind):
        return "text", _digests(keys, lambda value: value.encode())
    if pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind):
        return "bytes", _digests(keys, bytes)
    return None


def _values(numbers: pa.Array, null: float) -> NDArray[Any]:
    return np.ascontiguousarray(numbers.fill_null(null).to_numpy(zero_copy_only=False))


def _digests(keys: pa.Array, encode: Callable[[Any], bytes]) -> NDArray[np.uint64]:
    encoded = keys.dictionary_encode()
    values = [encode(value) for value in encoded.dictionary.to_pylist()]
    codes = [hashlib.blake2b(value, digest_size=8).digest() for value in values]
    table = np.frombuffer(b"".join([*codes, bytes(8)]), "<u8").astype(np.uint64)
    places = encoded.indices.fill_null(len(codes)).to_numpy(zero_copy_only=False)
    return table[places]


# --- classes ------------------------------------------------------------------------------


def balance(
    dataset: Any,
    by: str | None = None,
    weights: Mapping[Any, float] | None = None,
    *,
    stop: Stop = "first_exhausted",
) -> MixedDataset:
    """Return a data set in every batch of which the classes have stated shares.

    It is a `mix` of one part for each value of a column. With ``stop="first_exhausted"`` an epoch
    ends when the smallest class (for its weight) has been used once: larger ones are
    under-sampled, with other rows in the next epochs. With ``"all_exhausted"`` it ends when all
    rows were used: smaller classes are over-sampled, each of their rows equally often, to one
    time.

    Each class is read as a data set of its own, so a row group is decoded once for each class
    that it holds rows of.

    Parameters
    ----------
    dataset : ParquetDataset or ArrayDataset
    by : str, optional
        The column with the class; by default the label.
    weights : dict of value to float, optional
        Share of each class; by default all are equal. Rows of classes that it does not name
        are left out, as are rows without a class.
    stop : {"first_exhausted", "all_exhausted"} or int, default="first_exhausted"
        See `mix`.

    Notes
    -----
    The first call reads the column. ``batch.source`` is the place of the class in ``names``,
    which are the values as text, ordered by value.

    Raises
    ------
    DataError
        If there is no label, or there are no classes, or more than 1000.
    """
    column = by if by is not None else dataset.label_name
    if column is None:
        raise DataError(
            path=repr(dataset), problem="it has no label", remedy="pass by=, a column of classes"
        )
    classes = _classes(dataset, column) if weights is None else list(weights)
    if not 0 < len(classes) <= _MAX_CLASSES:
        raise DataError(
            path=repr(dataset),
            problem=f"column {column!r} has {len(classes)} classes",
            remedy=f"balance by a column of 1 to {_MAX_CLASSES} values",
        )
    names = [str(value) for value in classes]
    says = f"balance(by={column!r}, {names})"
    partition = Partition(dataset, column, _ClassCodes(tuple(classes), column, repr(dataset)), says)
    parts = {
        name: dataset.select_part(Part(partition, code, name)) for code, name in enumerate(names)
    }
    given = None if weights is None else {str(value): weight for value, weight in weights.items()}
    return mix(parts, given, stop=stop)


def _classes(table: _Table, column: str) -> list[Any]:
    """Return the values of a column, in order, up to one more than are allowed."""
    found: set[Any] = set()
    for batch in table.scan([column]):
        values = _encoded(batch.column(0), column, repr(table)).dictionary.to_pylist()
        found.update(value for value in values if value is not None and value == value)  # no NaN
        if len(found) > _MAX_CLASSES:
            break
    return sorted(found)


def _encoded(values: pa.Array, column: str, path: str) -> pa.DictionaryArray:
    """Return values with each distinct one once; raise ColumnError if they cannot be classes."""
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    try:
        return values.dictionary_encode()
    except pa.ArrowNotImplementedError as error:
        problem = f"is {values.type}, which cannot be a class"
        raise ColumnError(path=path, column=column, problem=problem) from error


@dataclass(frozen=True)
class _ClassCodes:
    """Says which class values are of; the number after the last one stands for none."""

    classes: tuple[Any, ...]
    by: str
    path: str

    def __call__(self, values: pa.Array) -> Codes:
        encoded, none = _encoded(values, self.by, self.path), len(self.classes)
        codes = {value: code for code, value in enumerate(self.classes)}
        found = [codes.get(value, none) for value in encoded.dictionary.to_pylist()]
        places = encoded.indices.fill_null(len(found)).to_numpy(zero_copy_only=False)
        return np.array([*found, none], np.uint16)[places]
