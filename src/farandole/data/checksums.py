"""Sums over rows that do not depend on their order, to prove that two tables hold the same.

Each value is hashed to 64 bits, the hashes of a row are folded into one, and each of these is
added up modulo 2**64. So a value that changed, or moved to another row, changes a sum. Nothing
about the hash is promised from one release to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

_ODD = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0x6A09E667F3BCC908)
_SHIFT = np.uint64(32)


class Checksums:
    """Sums of some columns, row by row as they come; equal for equal rows in any order."""

    def __init__(self, names: Sequence[str]) -> None:
        self.num_rows = 0
        self.rows = 0
        """Sum over whole rows."""
        self.columns = dict.fromkeys(names, 0)

    def add(self, batch: pa.RecordBatch) -> None:
        """Take the rows of a batch into account."""
        rows: Hashes = np.zeros(batch.num_rows, np.uint64)
        for name in self.columns:
            hashes = hash_values(batch.column(name))
            self.columns[name] = (self.columns[name] + _sum(hashes)) % 2**64
            rows = _mixed(rows ^ hashes)
        self.rows = (self.rows + _sum(rows)) % 2**64
        self.num_rows += batch.num_rows

    def differences(self, other: Checksums) -> list[str]:
        """Say in what these rows are not the rows of `other`; empty if they are."""
        if self.num_rows != other.num_rows:
            return [f"{self.num_rows:,} rows instead of {other.num_rows:,}"]
        changed = [name for name, total in self.columns.items() if other.columns[name] != total]
        if changed:
            return [f"other values in {', '.join(map(repr, changed))}"]
        return [] if self.rows == other.rows else ["values that are in other rows"]


def hash_values(array: pa.Array) -> Hashes:
    """Return a hash of each value. Lists of fixed size hash like other lists."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    if pt.is_null(kind):
        return np.full(len(array), _NULL)
    if pt.is_struct(kind):
        hashes = np.zeros(len(array), np.uint64)
        for child in array.flatten():
            hashes = _mixed(hashes ^ hash_values(child))
    elif pt.is_fixed_size_list(kind):
        ends = np.arange(len(array) + 1, dtype=np.int64) * kind.list_size
        first = array.offset * kind.list_size
        hashes = _hash_lists(hash_values(array.values[first : first + int(ends[-1])]), ends)
    elif pt.is_list(kind) or pt.is_large_list(kind) or pt.is_map(kind):
        ends = np.asarray(array.offsets).astype(np.int64)
        values = array.values[int(ends[0]) : int(ends[-1])]
        hashes = _hash_lists(hash_values(values), ends - ends[0])
    elif pt.is_string(kind) or pt.is_binary(kind):
        hashes = _hash_bytes(array, np.int32)
    elif pt.is_large_string(kind) or pt.is_large_binary(kind):
        hashes = _hash_bytes(array, np.int64)
    else:
        hashes = _hash_fixed(array)
    if array.null_count:
        hashes = np.where(_is_valid(array), hashes, _NULL)
    return hashes


def _hash_fixed(array: pa.Array) -> Hashes:
    """Hash values that all have the same number of bytes."""
    if pt.is_boolean(array.type):
        array = pc.cast(array, pa.uint8())
    buffer = array.buffers()[1]
    size = array.type.bit_width // 8
    if buffer is None or size == 0:
        return np.zeros(len(array), np.uint64)
    raw = np.frombuffer(buffer, np.uint8)
    raw = raw[array.offset * size : (array.offset + len(array)) * size]
    if size in (1, 2, 4, 8):
        return _mixed(raw.view(f"u{size}").astype(np.uint64))
    words = np.zeros((len(array), -(-size // 8) * 8), np.uint8)
    words[:, :size] = raw.reshape(len(array), size)
    return _mixed(words.view(np.uint64) @ _weights(words.shape[1] // 8))


def _hash_bytes(array: pa.Array, offset_type: Any) -> Hashes:
    """Hash strings or bytes, of any length."""
    _, offsets, data = array.buffers()
    if len(array) == 0 or offsets is None:
        return np.zeros(len(array), np.uint64)
    ends = np.frombuffer(offsets, offset_type)[array.offset : array.offset + len(array) + 1]
    ends = ends.astype(np.int64)
    raw = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return _hash_lists(raw[ends[0] : ends[-1]].astype(np.uint64), ends - ends[0])


def _hash_lists(values: Hashes, ends: NDArray[np.int64]) -> Hashes:
    """Hash runs of values, with their places in the run and its length."""
    lengths = np.diff(ends)
    places = np.arange(len(values)) - np.repeat(ends[:-1], lengths)
    weighted = values * _weights(int(lengths.max(initial=0)))[places]
    # The sum up to each end: a run is the difference of two, also where it is empty.
    sums = np.concatenate(([np.uint64(0)], np.cumsum(weighted, dtype=np.uint64)))
    return _mixed(sums[ends[1:]] - sums[ends[:-1]] + lengths.astype(np.uint64))


def _weights(count: int) -> Hashes:
    """Return odd numbers that look random."""
    return _mixed(np.arange(1, count + 1, dtype=np.uint64)) | np.uint64(1)


def _mixed(values: Hashes) -> Hashes:
    """Spread the bits of each value over all 64."""
    values = values + _ODD
    values ^= values >> _SHIFT
    values *= _ODD
    values ^= values >> _SHIFT
    values *= _ODD
    values ^= values >> _SHIFT
    return values


def _sum(hashes: Hashes) -> int:
    return int(hashes.sum(dtype=np.uint64))


def _is_valid(array: pa.Array) -> NDArray[np.bool_]:
    return array.is_valid().to_numpy(zero_copy_only=False)
