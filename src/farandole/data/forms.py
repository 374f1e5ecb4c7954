"""From the type of a column, and what is declared of it, to the form in which it comes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from farandole.data.choices import (
    AlwaysMasked,
    Arrow,
    Choice,
    Coded,
    Decoded,
    Filled,
    Hashed,
    Npy,
    Padded,
    ScaledInt,
)
from farandole.data.columns import Chunks, Column, Masked, Ragged, runs
from farandole.data.convert import (
    Array,
    Numbers,
    code_numbers,
    fixed_elements,
    hash_numbers,
    is_bytes,
    is_text,
    numbers_of,
    scaled_numbers,
    validity,
)
from farandole.data.nested import elements_of, is_list, is_tensor
from farandole.errors import ColumnError

_NAME = "data"
_HEADERS = threading.Lock()


class Form(Protocol):
    """How a column goes from Arrow into a buffer, and from there into a block."""

    @property
    def says(self) -> str:
        """What the column becomes, in words."""
        ...

    @property
    def row_bytes(self) -> int | None:
        """Memory of a row; None if it hangs on the values."""
        ...

    def empty(self, num_rows: int) -> Array | Masked | Chunks:
        """Return a buffer of unset rows."""
        ...

    def write(self, array: pa.Array, out: Any, at: int) -> None:
        """Write an Arrow array into rows `at` and following of a buffer."""
        ...

    def finish(self, column: Any) -> Column:
        """Return what a block gets for rows gathered from buffers."""
        ...


@dataclass(frozen=True)
class Dense:
    """An array with one entry of one shape for each row; perhaps with a mask."""

    numbers: Numbers
    is_masked: bool = False
    fill: Any = None
    """An Arrow scalar, put in the place of nulls."""

    @property
    def says(self) -> str:
        """What the column becomes, in words."""
        return _says(self.numbers, self.is_masked)

    @property
    def row_bytes(self) -> int:
        """Memory of a row."""
        size = int(np.prod(self.numbers.shape))
        return size * (self.numbers.dtype.itemsize + self.is_masked)

    def empty(self, num_rows: int) -> Array | Masked:
        """Return a buffer of unset rows."""
        shape = (num_rows, *self.numbers.shape)
        values = np.empty(shape, self.numbers.dtype)
        return Masked(values, np.empty(shape, np.bool_)) if self.is_masked else values

    def write(self, array: pa.Array, out: Any, at: int) -> None:
        """Write an Arrow array into rows `at` and following of a buffer."""
        rows = slice(at, at + len(array))
        values = self.numbers.function(_filled(array, self.fill))
        if not self.is_masked:
            out[rows] = values
            return
        valid = validity(array, self.numbers.shape)
        out.values[rows] = np.where(valid, values, 0) if self.numbers.shows_null else values
        out.valid[rows] = valid

    def finish(self, column: Any) -> Column:
        """Return the rows as they are."""
        return column


@dataclass(frozen=True)
class PaddedLists:
    """Lists cut and filled up to one shape, with a mask."""

    numbers: Numbers
    lengths: tuple[int, ...]
    fill: float

    @property
    def says(self) -> str:
        """What the column becomes, in words."""
        shape = (*self.lengths, *self.numbers.shape)
        return _says(Numbers(self.numbers.dtype, self.numbers.function, shape), is_masked=True)

    @property
    def row_bytes(self) -> int:
        """Memory of a row."""
        size = int(np.prod((*self.lengths, *self.numbers.shape)))
        return size * (self.numbers.dtype.itemsize + 1)

    def empty(self, num_rows: int) -> Masked:
        """Return a buffer of unset rows."""
        shape = (num_rows, *self.lengths, *self.numbers.shape)
        return Masked(np.empty(shape, self.numbers.dtype), np.empty(shape, np.bool_))

    def write(self, array: pa.Array, out: Any, at: int) -> None:
        """Write an Arrow array into rows `at` and following of a buffer."""
        rows = slice(at, at + len(array))
        padded = self._padded(array, self.lengths)
        out.values[rows], out.valid[rows] = padded.values, padded.valid

    def finish(self, column: Any) -> Column:
        """Return the rows as they are."""
        return column

    def _padded(self, array: pa.Array, lengths: tuple[int, ...]) -> Masked:
        if not lengths:
            valid = validity(array, self.numbers.shape)
            return Masked(np.where(valid, self.numbers.function(array), self.fill), valid)
        sizes, elements = elements_of(array)
        inner = self._padded(elements, lengths[1:])
        shape = (len(array), lengths[0], *inner.valid.shape[1:])
        values, valid = np.full(shape, self.fill, self.numbers.dtype), np.zeros(shape, np.bool_)
        kept = np.minimum(sizes, lengths[0])
        rows = np.repeat(np.arange(len(array)), kept)
        places = runs(np.zeros(len(array), np.int64), kept)
        sources = runs(np.cumsum(sizes) - sizes, kept)
        values[rows, places], valid[rows, places] = inner.values[sources], inner.valid[sources]
        return Masked(values, valid)


@dataclass(frozen=True)
class Loose:
    """What has no fixed size: kept as Arrow until a block is made of it."""

    kind: pa.DataType
    inner: Elements

    @property
    def says(self) -> str:
        """What the column becomes, in words."""
        return self.inner.says

    @property
    def row_bytes(self) -> None:
        """It hangs on the values."""
        return

    def empty(self, num_rows: int) -> Chunks:
        """Return a buffer of unset rows."""
        return Chunks(self.kind, num_rows)

    def write(self, array: pa.Array, out: Any, at: int) -> None:
        """Keep an Arrow array as rows `at` and following of a buffer."""
        out.put(at, array)

    def finish(self, column: pa.ChunkedArray) -> Column:
        """Convert the rows."""
        return self.inner.convert(column)


class Elements(Protocol):
    """Converts Arrow values to what a block gets."""

    @property
    def says(self) -> str:
        """What they become, in words."""
        ...

    def convert(self, column: pa.ChunkedArray) -> Column:
        """Return what they become; arrays can be written to."""
        ...


@dataclass(frozen=True)
class AsArrow:
    """Arrow stays."""

    kind: pa.DataType
    fill: Any = None

    @property
    def says(self) -> str:
        """What they become, in words."""
        return f"Arrow {self.kind}"

    def convert(self, column: pa.ChunkedArray) -> pa.Array:
        """Return one array."""
        return _filled(column.combine_chunks(), self.fill)


@dataclass(frozen=True)
class NumberElements:
    """Elements of lists that are numbers."""

    dense: Dense

    @property
    def says(self) -> str:
        """What they become, in words."""
        return self.dense.says

    def convert(self, column: pa.ChunkedArray) -> Column:
        """Return an array, or one with a mask."""
        out = self.dense.empty(len(column))
        self.dense.write(column.combine_chunks(), out, 0)
        return out


@dataclass(frozen=True)
class Lists:
    """Lists become `Ragged`."""

    inner: Elements

    @property
    def says(self) -> str:
        """What they become, in words."""
        return f"Ragged of {self.inner.says}"

    def convert(self, column: pa.ChunkedArray) -> Ragged:
        """Return values and offsets."""
        sizes, elements = elements_of(column.combine_chunks())
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        return Ragged(self.inner.convert(pa.chunked_array([elements])), offsets)


@dataclass(frozen=True)
class Decode:
    """What a function makes of each value."""

    name: str
    choice: Decoded | Npy

    @property
    def says(self) -> str:
        """What they become, in words."""
        if isinstance(self.choice, Npy):
            return "array as numpy.save wrote it"
        return "what decode() makes of it" + (", stacked" if self.choice.stack else ", in a list")

    def convert(self, column: pa.ChunkedArray) -> Array | list[Any]:
        """Call the function for each row."""
        if isinstance(self.choice, Npy):
            return self._stacked([self._load(buffer) for buffer in _buffers(column)])
        function = self.choice.function
        try:
            made = [function(value) for chunk in column.chunks for value in chunk.to_pylist()]
        except Exception as error:
            error.add_note(f"raised by the decode() function of column {self.name!r}")
            raise
        return self._stacked([np.asarray(value) for value in made]) if self.choice.stack else made

    def _stacked(self, arrays: list[Array]) -> Array:
        forms = sorted({f"{array.dtype}{list(array.shape)}" for array in arrays})
        if len(forms) > 1:
            problem = f"holds arrays of several forms: {', '.join(forms[:3])}; "
            problem += "they cannot be stacked: decode them with stack=False"
            raise ColumnError(path=_NAME, column=self.name, problem=problem)
        return np.stack(arrays) if arrays else np.empty(0)

    def _load(self, buffer: pa.Buffer | None) -> Array:
        """Return the array of a file that numpy.save wrote, sharing memory."""
        problem = "holds a null, which is no npy file"
        try:
            if buffer is not None:
                view = memoryview(buffer)
                start = 10 + int.from_bytes(view[8:10], "little")
                if view[6] > 1:
                    start = 12 + int.from_bytes(view[8:12], "little")
                dtype, shape, is_fortran = _npy_header(bytes(view[:start]))
                values = np.frombuffer(view, dtype, int(np.prod(shape)), start)
                return values.reshape(shape, order="F" if is_fortran else "C")
        except (ValueError, IndexError) as error:
            problem = f"holds what is no npy file: {error}"
        raise ColumnError(path=_NAME, column=self.name, problem=problem)


@lru_cache(maxsize=1024)
def _npy_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    with _HEADERS:  # numpy reads it with `ast`, which Python 3.11 cannot do in two threads
        stream = BytesIO(header)
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read = np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    return dtype, shape, is_fortran


def _buffers(column: pa.ChunkedArray) -> list[pa.Buffer | None]:
    return [value.as_buffer() for chunk in column.chunks for value in chunk]


def _filled(array: pa.Array, fill: Any) -> pa.Array:
    """Return an array with a scalar in the place of nulls, inside lists of a fixed size too."""
    if fill is None:
        return array
    if is_tensor(array.type):
        return pa.ExtensionArray.from_storage(array.type, _filled(array.storage, fill))
    if pt.is_fixed_size_list(array.type):
        elements = fixed_elements(array)
        if array.null_count:  # what is below a null list may be anything
            valid = array.is_valid().to_numpy(zero_copy_only=False)
            places = np.where(np.repeat(valid, array.type.list_size), np.arange(len(elements)), -1)
            elements = elements.take(pa.array(places, mask=places < 0))
        return pa.FixedSizeListArray.from_arrays(_filled(elements, fill), type=array.type)
    return array.fill_null(fill) if array.null_count else array


def _says(numbers: Numbers, is_masked: bool) -> str:
    shape = "".join(f", {size}" for size in numbers.shape)
    meaning = f": {numbers.says}" if numbers.says else ""
    return f"{'Masked ' if is_masked else ''}{numbers.dtype} (n{shape}){meaning}"


def make_form(
    name: str, kind: pa.DataType, choice: Choice | None, *, has_nulls: Callable[[], bool]
) -> Form:
    """Return the form of a column.

    Parameters
    ----------
    name : str
    kind : pyarrow.DataType
        See `plain`.
    choice : Choice or None
        What the user declared.
    has_nulls : callable
        Returns whether there may be nulls anywhere in the data set; called only if it matters.

    Raises
    ------
    ValueError
        If the choice does not suit the type; the message continues "column x".
    """
    if isinstance(choice, Padded):
        return _padded(kind, choice)
    if isinstance(choice, Decoded | Npy):
        if not is_bytes(kind) and (isinstance(choice, Npy) or not is_text(kind)):
            raise ValueError(f"is {kind}, and only binaries can be decoded")
        return Loose(kind, Decode(name, choice))
    if isinstance(choice, Arrow):
        return Loose(kind, AsArrow(kind))
    elements = _elements(kind, choice, has_nulls)
    return elements.dense if isinstance(elements, NumberElements) else Loose(kind, elements)


def _elements(kind: pa.DataType, choice: Choice | None, has_nulls: Callable[[], bool]) -> Elements:
    if is_list(kind):
        inner = _elements(kind.value_type, choice, has_nulls)
        # Lists of what is no number stay as they are, whole.
        return Lists(inner) if not isinstance(inner, AsArrow) else _as_arrow(kind, choice)
    numbers = _numbers(kind, choice)
    if numbers is None:
        return _as_arrow(kind, choice)
    fill = _fill_scalar(kind, choice.value) if isinstance(choice, Filled) else None
    is_masked = isinstance(choice, AlwaysMasked)
    if not is_masked and not numbers.shows_null and fill is None:
        is_masked = has_nulls()
    return NumberElements(Dense(numbers, is_masked, fill))


def _as_arrow(kind: pa.DataType, choice: Choice | None) -> AsArrow:
    if isinstance(choice, Filled) and not is_list(kind):
        return AsArrow(kind, _fill_scalar(kind, choice.value))
    if choice is not None:
        names = {AlwaysMasked: "masked", Filled: "filled"}
        raise ValueError(f"is {kind}, and {names[type(choice)]}() is for numbers")
    return AsArrow(kind)


def _numbers(kind: pa.DataType, choice: Choice | None) -> Numbers | None:
    """Return how values become numbers, as declared; None if they stay as they are."""
    if isinstance(choice, ScaledInt):
        if not pt.is_decimal(kind):
            raise ValueError(f"is {kind}, and only decimals become scaled integers")
        return scaled_numbers(kind)
    if isinstance(choice, Hashed):
        fixed = pt.is_fixed_size_binary(kind)
        if not (is_text(kind) or is_bytes(kind) or fixed or pt.is_integer(kind)):
            raise ValueError(f"is {kind}, and only strings, binaries and integers are hashed")
        return hash_numbers(choice.num_buckets)
    if isinstance(choice, Coded):
        if not (is_text(kind) or pt.is_integer(kind) or pt.is_boolean(kind)):
            raise ValueError(f"is {kind}, and only strings, integers and bools are coded")
        return code_numbers(kind, choice.vocabulary)
    return numbers_of(kind)


def _padded(kind: pa.DataType, choice: Padded) -> PaddedLists:
    element = kind
    for _ in choice.lengths:
        if not is_list(element):
            levels = len(choice.lengths)
            raise ValueError(f"is {kind}, and padded() has {levels} length(s), one for each level")
        element = element.value_type
    numbers = _numbers(element, choice.of)
    if numbers is None:
        raise ValueError(f"is {kind}, which cannot be padded: say what elements become with of=")
    if not _fits(choice.fill, numbers.dtype):
        raise ValueError(f"becomes {numbers.dtype}, which cannot hold fill={choice.fill!r}")
    return PaddedLists(numbers, choice.lengths, choice.fill)


def _fits(fill: float, dtype: np.dtype[Any]) -> bool:
    """Return whether a type can hold a number, for floating types perhaps rounded."""
    if dtype.kind in "fb":
        return dtype.kind == "f" or fill in (0, 1)
    bounds = np.iinfo(dtype)
    return float(fill).is_integer() and bounds.min <= fill <= bounds.max


def _fill_scalar(kind: pa.DataType, value: Any) -> pa.Scalar:
    while pt.is_fixed_size_list(kind) or is_tensor(kind):
        kind = kind.value_type
    try:
        return pa.scalar(value, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"is {kind}, and filled({value!r}) is not: {error}") from error
