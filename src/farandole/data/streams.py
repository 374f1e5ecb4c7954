"""Decode runs of row groups ahead in threads, each once and from start to end."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from farandole.data.block import RowBlock, copy_rows
from farandole.data.shards import ShardSource
from farandole.plan.lanes import Piece


class Rows(Protocol):
    """Where the decoded rows of sections come from."""

    def expect(self, section: int, piece: Piece) -> None:
        """Begin to read what `copy` will be called for next in a section. Does not block."""
        ...

    def copy(self, section: int, piece: Piece, out: RowBlock, at: int) -> None:
        """Write a piece of a shard into rows `at` and following of a block."""
        ...

    def close(self) -> None:
        """Free files and threads."""
        ...


class _Decoded(NamedTuple):
    """A batch, and where its first row is: in which shard of a route, and which row of that."""

    place: int
    first: int
    batch: pa.RecordBatch


class _Stream:
    """Decodes a route of shards, one batch ahead; cheap as long as it is asked for in order."""

    def __init__(
        self,
        source: ShardSource,
        route: Sequence[Piece],
        threads: ThreadPoolExecutor,
        ahead_after: float,
    ) -> None:
        """Make a stream that decodes on after so much (0 to 1) of a batch is used."""
        self._source = source
        self._ahead_after = ahead_after
        self._route = route
        self._places = {piece.shard: place for place, piece in enumerate(route)}
        self._threads = threads
        self._batches: Generator[_Decoded] | None = None
        self._held: _Decoded | None = None
        self._ahead: Future[_Decoded | None] | None = None

    def expect(self, piece: Piece) -> None:
        """Begin to decode where a piece is, if nothing is decoded yet."""
        if self._batches is None:
            self._start(self._places[piece.shard], piece.first)

    def copy(self, piece: Piece, out: RowBlock, at: int) -> None:
        """Write a piece of a shard into rows `at` and following of a block."""
        shard, first, stop = piece
        row_id = int(self._source.starts[shard]) + first
        out.row_ids[at : at + stop - first] = np.arange(row_id, row_id + stop - first)
        while first < stop:
            held = self._find(self._places[shard], first)
            taken = held.batch.slice(first - held.first, stop - first)
            self._source.write(shard, taken, out, at)
            first, at = first + taken.num_rows, at + taken.num_rows
            used = (first - held.first) / held.batch.num_rows
            if self._ahead is None and used >= self._ahead_after:
                self._ahead = self._decode_next()

    def close(self) -> None:
        """Stop decoding. Blocks until the batch that is being decoded is done."""
        if self._ahead is not None and not self._ahead.cancel():
            self._ahead.exception()
        if self._batches is not None:
            self._batches.close()
        self._batches = self._held = self._ahead = None

    def _find(self, place: int, row: int) -> _Decoded:
        """Return the batch with a row of the route, decoding on or anew."""
        held = self._held
        if held is not None and not (held.place, held.first) <= (place, row) < (held.place + 2, 0):
            self.close()
        while (held := self._held) is None or not (
            held.place == place and held.first <= row < held.first + held.batch.num_rows
        ):
            self._held = None
            if self._batches is None:
                self._start(place, row)
            ahead = self._ahead or self._decode_next()
            self._ahead = None
            self._held = ahead.result()
            if self._held is None:
                raise IndexError(f"row {row} of place {place} is beyond the end of the route")
        return held

    def _decode_next(self) -> Future[_Decoded | None]:
        batches = self._batches
        return self._threads.submit(lambda: None if batches is None else next(batches, None))

    def _start(self, place: int, row: int) -> None:
        self._source.expect(self._route[place].shard)
        self._batches = self._decode(place, row)
        self._ahead = self._decode_next()

    def _decode(self, start_place: int, start_row: int) -> Generator[_Decoded]:
        for place in range(start_place, len(self._route)):
            shard, first, stop = self._route[place]
            first, start_row = max(first, start_row), 0
            if place + 1 < len(self._route):
                self._source.expect(self._route[place + 1].shard)
            for batch in self._source.batches(shard, first, stop):
                if batch.num_rows:
                    yield _Decoded(place, first, batch)
                    first += batch.num_rows


class Streams:
    """Streams of sections, of which only so many hold something at the same time.

    Parameters
    ----------
    source : ShardSource
    route : callable
        Returns the pieces of a section, in order, each of another shard.
    num_sections : int
        Of which `copy` will be called.
    num_threads : int
        Threads that decode.
    max_open : int
        Streams that are kept; one that is dropped begins anew where it was, which costs time.
    """

    def __init__(
        self,
        source: ShardSource,
        route: Callable[[int], Sequence[Piece]],
        *,
        num_sections: int,
        num_threads: int,
        max_open: int,
    ) -> None:
        self._source = source
        self._route = route
        self._max_open = max_open
        # Few streams must be ahead at once; of many, some always are.
        self._ahead_after = 0.0 if num_sections <= 2 else 0.5
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="farandole-decode")
        self._streams: OrderedDict[int, _Stream] = OrderedDict()
        self._routes: dict[int, Sequence[Piece]] = {}

    def expect(self, section: int, piece: Piece) -> None:
        """Begin to read a section where a piece of it is. Does not block."""
        if section in self._streams or len(self._streams) < self._max_open:
            self._stream(section).expect(piece)

    def copy(self, section: int, piece: Piece, out: RowBlock, at: int) -> None:
        """Write a piece of a shard into rows `at` and following of a block."""
        self._stream(section).copy(piece, out, at)

    def close(self) -> None:
        """Close files and end threads. Blocks until what is being decoded is done."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def _stream(self, section: int) -> _Stream:
        stream = self._streams.get(section)
        if stream is None:
            if len(self._streams) >= self._max_open:
                self._streams.popitem(last=False)[1].close()
            if section not in self._routes:
                self._routes[section] = self._route(section)
            route = self._routes[section]
            stream = _Stream(self._source, route, self._threads, self._ahead_after)
            self._streams[section] = stream
        self._streams.move_to_end(section)
        return stream


class ShardCache:
    """Whole decoded shards, the least recently used dropped to keep within a budget."""

    def __init__(self, source: ShardSource, budget_bytes: int) -> None:
        self._source = source
        self._budget_rows = budget_bytes // source.layout.row_bytes
        self._clear()

    def _clear(self) -> None:
        self._blocks: OrderedDict[int, RowBlock] = OrderedDict()
        self._num_rows = 0
        self._lock = threading.Lock()
        self._process = os.getpid()

    def holds(self, shards: Collection[int]) -> bool:
        """Return whether all these shards fit at once."""
        rows = sum(self._source.shards[shard].num_rows for shard in shards)
        return rows <= self._budget_rows

    def expect(self, section: int, piece: Piece) -> None:
        """Do nothing."""

    def copy(self, section: int, piece: Piece, out: RowBlock, at: int) -> None:
        """Write a piece of a shard into rows `at` and following of a block."""
        shard, first, stop = piece
        copy_rows(self._block(shard), first, stop, out, at)

    def close(self) -> None:
        """Do nothing: the cache outlives its users."""

    def _block(self, shard: int) -> RowBlock:
        if self._process != os.getpid():
            self._clear()  # forked, maybe while a thread that is not here held the lock
        with self._lock:  # held while decoding, so that no shard is decoded twice
            if shard in self._blocks:
                self._blocks.move_to_end(shard)
                return self._blocks[shard]
            num_rows = self._source.shards[shard].num_rows
            while self._blocks and self._num_rows + num_rows > self._budget_rows:
                _, dropped = self._blocks.popitem(last=False)
                self._num_rows -= dropped.num_rows
            block = self._blocks[shard] = self._decode(shard)
            self._num_rows += num_rows
            return block

    def _decode(self, shard: int) -> RowBlock:
        num_rows = self._source.shards[shard].num_rows
        block = self._source.layout.empty(num_rows)
        first_id = int(self._source.starts[shard])
        block.row_ids[:] = np.arange(first_id, first_id + num_rows)
        at = 0
        for batch in self._source.batches(shard, 0, num_rows):
            self._source.write(shard, batch, block, at)
            at += batch.num_rows
        return block
