"""Put the rows of a table that is larger than memory into a random order.

Each row draws a 64-bit key, and the rows are sorted by their keys. The order is thus a uniform
permutation that hangs on the seed and the rows alone, not on the memory that there is. The
sorting goes over disk: rows are scattered to buckets by the first bits of their keys, and each
bucket is then sorted in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from farandole.plan.random import Stream, generator

_KEY = "farandole.key"
_MAX_BUCKET_BITS = 10
_KEY_BITS = 64


class RowShuffle:
    """Takes batches, then gives all their rows in a random order.

    Parameters
    ----------
    folder : Path
        Exists; rows that do not fit into memory are put there, as large as they are in memory.
    schema : pyarrow.Schema
    num_rows : int
        How many there will be, to choose the number of buckets.
    seed : int
    memory_bytes : int
        About what is held at any time.
    """

    def __init__(
        self, folder: Path, schema: pa.Schema, *, num_rows: int, seed: int, memory_bytes: int
    ) -> None:
        random = generator(seed, Stream.REWRITE_ORDER).bit_generator
        self._random_raw = random.random_raw
        schema = schema.append(pa.field(_KEY, pa.uint64()))
        # A chunk is held three times while it is sorted: as given, as one piece, and in order.
        self._buckets = _Buckets(folder, schema, num_rows, memory_bytes // 4, 0)

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows. May write to the disk."""
        keys = self._random_raw(batch.num_rows)
        self._buckets.add(batch.append_column(_KEY, pa.array(np.asarray(keys, np.uint64))))

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows in their new order. To be called once, after the last `add`."""
        for table in self._buckets.tables():
            yield table.drop_columns([_KEY])


class _Buckets:
    """Rows with keys, of which the first `used_bits` bits are the same."""

    def __init__(
        self, folder: Path, schema: pa.Schema, num_rows: int, chunk_bytes: int, used_bits: int
    ) -> None:
        self._folder = folder
        self._schema = schema
        self._num_rows = num_rows
        self._chunk_bytes = chunk_bytes
        self._used_bits = used_bits
        self._bits = 0
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._spilled: dict[int, tuple[int, int]] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        self._pending.append(batch)
        self._pending_bytes += batch.nbytes
        if self._pending_bytes >= self._chunk_bytes:
            self._spill()

    def tables(self) -> Iterator[pa.Table]:
        if not self._spilled:
            yield self._take_pending()
            return
        self._spill()
        for bucket in range(1 << self._bits):
            if bucket in self._spilled:
                yield from self._read(bucket)

    def _take_pending(self) -> pa.Table:
        """Return the rows that are held, in the order of their keys."""
        table = pa.Table.from_batches(self._pending, self._schema)
        self._pending, self._pending_bytes = [], 0
        keys = table.column(_KEY).to_numpy()
        return table.take(pa.array(np.argsort(keys, kind="stable")))

    def _spill(self) -> None:
        """Append the rows that are held to the files of their buckets."""
        if not self._bits:
            rows = sum(batch.num_rows for batch in self._pending)
            total_bytes = self._pending_bytes * self._num_rows / rows
            wanted = int(1.25 * total_bytes / self._chunk_bytes).bit_length()
            free_bits = _KEY_BITS - self._used_bits
            self._bits = max(1, min(wanted, _MAX_BUCKET_BITS, free_bits))
        table = self._take_pending()
        starts = self._starts(table.column(_KEY).to_numpy())
        for bucket in np.flatnonzero(np.diff(starts)).tolist():
            start, stop = int(starts[bucket]), int(starts[bucket + 1])
            part = table.slice(start, stop - start)
            with (
                self._file(bucket).open("ab") as sink,
                pa.ipc.new_stream(sink, self._schema) as writer,
            ):
                writer.write_table(part)
            rows, size = self._spilled.get(bucket, (0, 0))
            self._spilled[bucket] = rows + part.num_rows, size + part.nbytes

    def _starts(self, keys: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return where each bucket starts among sorted keys, and the end."""
        shift = np.uint64(_KEY_BITS - self._used_bits - self._bits)
        buckets = (keys >> shift) & np.uint64((1 << self._bits) - 1)
        return np.searchsorted(buckets, np.arange((1 << self._bits) + 1, dtype=np.uint64))

    def _read(self, bucket: int) -> Iterator[pa.Table]:
        """Yield a bucket's rows in order; scatter them again where they are too many."""
        rows, size = self._spilled[bucket]
        used_bits = self._used_bits + self._bits
        fits = size <= 1.5 * self._chunk_bytes or used_bits == _KEY_BITS
        folder = self._folder / str(bucket)
        if not fits:
            folder.mkdir()
        limit = size + 1 if fits else self._chunk_bytes
        inner = _Buckets(folder, self._schema, rows, limit, used_bits)
        with pa.memory_map(str(self._file(bucket))) as source:
            while source.tell() < source.size():
                for batch in pa.ipc.open_stream(source):
                    inner.add(batch)
            self._file(bucket).unlink()  # its space is free once it is closed
            yield from inner.tables()

    def _file(self, bucket: int) -> Path:
        return self._folder / f"{bucket}.arrow"
