"""What a user may declare of a column in ``columns={name: choice}``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from farandole.errors import UsageError


@dataclass(frozen=True)
class Arrow:
    """See `arrow`."""


@dataclass(frozen=True)
class AlwaysMasked:
    """See `masked`."""


@dataclass(frozen=True)
class Filled:
    """See `filled`."""

    value: Any


@dataclass(frozen=True)
class ScaledInt:
    """See `scaled_int`."""


@dataclass(frozen=True)
class Hashed:
    """See `hashed`."""

    num_buckets: int | None


@dataclass(frozen=True)
class Coded:
    """See `coded`."""

    vocabulary: tuple[str, ...] | tuple[int, ...] | tuple[bool, ...]


@dataclass(frozen=True)
class Padded:
    """See `padded`."""

    lengths: tuple[int, ...]
    fill: float
    of: Hashed | Coded | ScaledInt | None


@dataclass(frozen=True)
class Decoded:
    """See `decode`."""

    function: Callable[[Any], Any]
    stack: bool


@dataclass(frozen=True)
class Npy:
    """See `npy`."""


Choice = Arrow | AlwaysMasked | Filled | ScaledInt | Hashed | Coded | Padded | Decoded | Npy


def arrow() -> Arrow:
    """Keep a column of any type as it is: a pyarrow.Array in the batch."""
    return Arrow()


def masked() -> AlwaysMasked:
    """Give a column (or the elements of its lists) as `Masked`, whether it has nulls or not."""
    return AlwaysMasked()


def filled(value: Any) -> Filled:
    """Put a value of the column's own type in the place of nulls, in lists for null elements."""
    return Filled(value)


def scaled_int() -> ScaledInt:
    """Give decimals as int64: the value times ten to the power of the type's scale.

    Exact. A value of more than 18 digits is an error.
    """
    return ScaledInt()


def hashed(num_buckets: int | None = None) -> Hashed:
    """Give strings, binaries or integers, also in lists, as int64 by a hash. Null is 0.

    The hash is the same everywhere and for ever: BLAKE2b with a digest of 8 bytes, read as a
    little-endian integer, of the bytes of a binary, the UTF-8 of a string, the decimal digits
    of an integer.

    Parameters
    ----------
    num_buckets : int, optional
        Give ``1 + hash % (num_buckets - 1)``, so that all is in 0 to `num_buckets` - 1: the
        size of an embedding. Without it the hash's 64 bits are those of a signed integer.
    """
    if num_buckets is not None and num_buckets < 2:
        problem = f"hashed(num_buckets={num_buckets})"
        raise UsageError(problem=problem, remedy="give a number from 2 up, or none")
    return Hashed(num_buckets)


def coded(vocabulary: Sequence[str] | Sequence[int]) -> Coded:
    """Give values, also in lists, as int64 by their places in a vocabulary, from 1.

    Null, and what is not in it, is 0. `fit_vocabulary` returns one.
    """
    values: Any = tuple(vocabulary)
    if len(set(values)) != len(values) or None in values:
        raise UsageError(
            problem="coded() got a vocabulary with a value twice, or None",
            remedy="give each value once; None has the code 0 anyway",
        )
    return Coded(values)


def padded(*lengths: int, fill: float = 0, of: Hashed | Coded | ScaledInt | None = None) -> Padded:
    """Give lists as `Masked` of one shape: longer lists are cut, shorter ones filled up.

    Parameters
    ----------
    *lengths : int
        One for each level of lists: ``padded(4, 16)`` for lists of lists.
    fill : float, default=0
        Stands where there is no element, or a null one; there `valid` is False.
    of : optional
        What becomes of the elements: `hashed`, `coded` or `scaled_int`.
    """
    if not lengths or any(not isinstance(length, int) or length < 1 for length in lengths):
        problem = f"padded({', '.join(map(repr, lengths))})"
        raise UsageError(problem=problem, remedy="give a length from 1 up for each level of lists")
    return Padded(lengths, fill, of)


def decode(function: Callable[[Any], Any], *, stack: bool = True) -> Decoded:
    """Give what a function makes of each row's bytes (or text, of strings).

    Called in the loader's threads, with None for a null. It must keep no state, and be able to
    run in several threads at once.

    Parameters
    ----------
    function : callable
        Takes bytes, returns what `numpy.asarray` takes: an array, a PIL image.
    stack : bool, default=True
        Whether arrays of one shape and dtype become one array of shape (n, ...). Otherwise
        the batch holds a list of what the function returned.
    """
    return Decoded(function, stack)


def npy() -> Npy:
    """Give binaries that `numpy.save` wrote, all of one shape and dtype, as one array."""
    return Npy()
