"""Read the rows of a plan: each lane's window in memory, gathered step by step."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from farandole.data.block import RowBlock, copy_rows, copy_runs
from farandole.data.counting import label_nulls
from farandole.data.groups import GroupReader
from farandole.data.layout import Layout
from farandole.data.selection import Shard
from farandole.errors import DataError
from farandole.plan.lanes import EpochPlan

Ints = NDArray[np.int64]
Piece = tuple[int, int, int]
"""A run of rows: shard, first row in the shard, row to stop before."""


class ShardSource:
    """The shards of a data set, decoded from a given row on."""

    def __init__(self, reader: GroupReader, shards: Sequence[Shard], layout: Layout) -> None:
        self.shards = shards
        self.layout = layout
        self.starts = np.concatenate(([0], np.cumsum([shard.num_rows for shard in shards])))
        self._reader = reader

    def batches(
        self, index: int, start: int, names: Sequence[str] | None = None
    ) -> Generator[pa.RecordBatch]:
        """Yield the selected rows of a shard from `start` on, in batches.

        Parameters
        ----------
        index : int
            Of the shard.
        start : int
            First row.
        names : sequence of str, optional
            Columns; default: all that the layout needs, with the label checked for nulls.

        Raises
        ------
        DataError
            If the row group cannot be decoded, or a label is null.
        """
        shard = self.shards[index]
        label = self.layout.label if names is None else None
        names = self.layout.names if names is None else names
        kept = None
        if shard.kept is not None:
            kept = np.unpackbits(shard.kept).view(np.bool_)
        place = 0
        for batch in self._reader.batches(shard.file, shard.group, names):
            if kept is not None:
                keep, place = kept[place : place + batch.num_rows], place + batch.num_rows
                batch = batch.filter(pa.array(keep))
            if start >= batch.num_rows:
                start -= batch.num_rows
                continue
            batch, start = batch.slice(start), 0
            if label is not None and (nulls := batch.column(label).null_count):
                raise label_nulls(self._reader, shard.file, label, nulls)
            yield batch

    def write(self, index: int, batch: pa.RecordBatch, out: RowBlock, at: int) -> None:
        """Write a batch of a shard into a block."""
        shard = self.shards[index]
        with self._reader.reading(shard.file, shard.group):
            self.layout.write(batch, out, at)

    def changed(self, index: int) -> DataError:
        """Return the error for a shard with fewer rows than its footer promised."""
        return DataError(
            path=self._reader.files[self.shards[index].file].path,
            problem=f"row group {self.shards[index].group} has fewer rows than its footer says",
            remedy="do not change files while they are read",
        )


class Rows(Protocol):
    """Where decoded rows come from."""

    def copy(self, piece: Piece, out: RowBlock, at: int) -> None:
        """Write a piece of a shard into rows `at` and following of a block."""
        ...

    def close(self) -> None:
        """Free files."""
        ...


class Cursor:
    """Decodes shards as a stream: cheap as long as each piece goes on from the one before."""

    def __init__(self, source: ShardSource) -> None:
        self._source = source
        self._next: tuple[int, int] | None = None
        self._batches: Generator[pa.RecordBatch] | None = None
        self._rest: pa.RecordBatch | None = None

    def copy(self, piece: Piece, out: RowBlock, at: int) -> None:
        """Write a piece of a shard into rows `at` and following of a block."""
        shard, first, stop = piece
        if self._next != (shard, first):
            self.close()
            self._batches = self._source.batches(shard, first)
        row_id = int(self._source.starts[shard]) + first
        out.row_ids[at : at + stop - first] = np.arange(row_id, row_id + stop - first)
        while first < stop:
            batch = self._rest
            if batch is None and self._batches is not None:
                batch = next(self._batches, None)
            if batch is None:
                raise self._source.changed(shard)
            taken = batch.slice(0, stop - first)
            left = batch.num_rows - taken.num_rows
            self._rest = batch.slice(taken.num_rows) if left else None
            self._source.write(shard, taken, out, at)
            first, at = first + taken.num_rows, at + taken.num_rows
        self._next = (shard, first)
        if first == self._source.shards[shard].num_rows:
            self.close()

    def close(self) -> None:
        """Close the file that is open."""
        if self._batches is not None:
            self._batches.close()
        self._next = self._rest = self._batches = None


class ShardCache:
    """Whole decoded shards, the least recently used dropped to keep within a budget."""

    def __init__(self, source: ShardSource, budget_bytes: int) -> None:
        self._source = source
        self._budget_rows = budget_bytes // source.layout.row_bytes
        self._blocks: OrderedDict[int, RowBlock] = OrderedDict()
        self._num_rows = 0
        self._lock = threading.Lock()

    def holds(self, shards: set[int]) -> bool:
        """Return whether all these shards fit at once."""
        rows = sum(self._source.shards[shard].num_rows for shard in shards)
        return rows <= self._budget_rows

    def copy(self, piece: Piece, out: RowBlock, at: int) -> None:
        """Write a piece of a shard into rows `at` and following of a block."""
        shard, first, stop = piece
        copy_rows(self._block(shard), first, stop, out, at)

    def close(self) -> None:
        """Do nothing: the cache outlives its users."""

    def _block(self, shard: int) -> RowBlock:
        with self._lock:  # held while decoding, so that no shard is decoded twice
            if shard in self._blocks:
                self._blocks.move_to_end(shard)
                return self._blocks[shard]
            num_rows = self._source.shards[shard].num_rows
            self._num_rows += num_rows
            while self._blocks and self._num_rows > self._budget_rows:
                _, dropped = self._blocks.popitem(last=False)
                self._num_rows -= dropped.num_rows
            block = self._source.layout.empty(num_rows)
            cursor = Cursor(self._source)
            try:
                cursor.copy((shard, 0, num_rows), block, 0)
            except BaseException:
                self._num_rows -= num_rows
                raise
            finally:
                cursor.close()
            self._blocks[shard] = block
            return block


class LaneReader:
    """The windows of some slots' lanes, from which each step's rows are gathered.

    One window of each lane is in memory, in one block: lane `i` of the reader has the rows
    from ``base[i]`` on, its window covers the places ``[start[i], stop[i])`` of the lane. A
    window is permuted as soon as it is decoded, while it is in the processor's cache; the
    gathering of a step then copies short runs.

    Parameters
    ----------
    plan : EpochPlan
    slots : range
    layout : Layout
    open_rows : callable
        Returns where a lane's rows come from.
    """

    def __init__(
        self, plan: EpochPlan, slots: range, layout: Layout, open_rows: Callable[[], Rows]
    ) -> None:
        self._plan = plan
        self._slots = slots
        self._lanes = plan.lanes_of(slots)
        self._layout = layout
        self._rows = [open_rows() for _ in self._lanes]
        lengths = [min(plan.window_rows, plan.lane_rows(lane)) for lane in self._lanes]
        base = np.concatenate(([0], np.cumsum(lengths)))
        self._base, num_rows = base[:-1], int(base[-1])
        self._start = np.zeros(len(self._lanes), np.int64)
        self._stop = np.zeros(len(self._lanes), np.int64)
        self._block = layout.empty(num_rows)
        self._decoded = layout.empty(max(lengths, default=0))

    def close(self) -> None:
        """Close all files."""
        for rows in self._rows:
            rows.close()

    def steps(self, start_step: int) -> Iterator[list[RowBlock]]:
        """Yield each step's blocks, one for each slot."""
        for step in range(start_step, self._plan.num_steps):
            gathered = self._gather(step)
            sizes = [self._plan.slot_rows(step, slot) for slot in self._slots]
            ends = np.cumsum(sizes).tolist()
            yield [
                self._layout.finish(gathered.slice(end - size, end))
                for size, end in zip(sizes, ends, strict=True)
            ]

    def _gather(self, step: int) -> RowBlock:
        """Return a step's rows of all lanes, in the order of lanes."""
        at, stop = self._plan.lane_spans(step, self._lanes)
        outside = (at < self._start) | (at >= self._stop)
        for lane in np.flatnonzero(outside & (at < stop)).tolist():
            self._load(lane, int(at[lane]))
        if (stop <= np.maximum(self._stop, at)).all():
            return self._block.gather(self._base + at - self._start, stop - at)
        return self._gather_over_windows(at, stop)

    def _gather_over_windows(self, at: Ints, stop: Ints) -> RowBlock:
        """Gather rows of lanes some of which go on in their next window."""
        sizes = stop - at
        targets = np.cumsum(sizes) - sizes
        out = self._layout.empty(int(sizes.sum()))
        while True:
            until = np.maximum(np.minimum(stop, self._stop), at)
            copy_runs(self._block, self._base + at - self._start, until - at, out, targets)
            targets, at = targets + (until - at), until
            unfinished = np.flatnonzero(at < stop).tolist()
            if not unfinished:
                return out
            for lane in unfinished:
                self._load(lane, int(at[lane]))

    def _load(self, index: int, position: int) -> None:
        """Read the window that holds a place of a lane."""
        lane, base = self._lanes[index], int(self._base[index])
        window, start, stop = self._plan.window_at(lane, position)
        num_rows = 0
        for piece in self._plan.window_pieces(lane, start, stop):
            self._rows[index].copy(piece, self._decoded, num_rows)
            num_rows += piece[2] - piece[1]
        order = self._plan.window_order(lane, window, num_rows)
        for source, target in zip(self._decoded.arrays(), self._block.arrays(), strict=True):
            # Without a mode, take would go through a buffer of its own.
            source.take(order, axis=0, out=target[base : base + num_rows], mode="clip")
        for source, target in zip(self._decoded.chunks(), self._block.chunks(), strict=True):
            target.put(base, source[:num_rows].combine_chunks().take(order))
        self._start[index], self._stop[index] = start, stop


def shards_of(plan: EpochPlan, lanes: range) -> set[int]:
    """Return the shards that some lanes need."""
    return {
        piece[0] for lane in lanes for piece in plan.window_pieces(lane, 0, plan.lane_rows(lane))
    }


def decoding_factor(plan: EpochPlan, lanes: range) -> float:
    """Return how often each row is decoded if every lane is a stream of its own.

    A lane that starts inside a row group must decode that from its beginning.
    """
    rows = [plan.lane_rows(lane) for lane in lanes]
    skipped = [plan.window_pieces(lane, 0, 1)[0][1] for lane in lanes]
    return 1 + sum(skipped) / max(sum(rows), 1)


def read_ranges(
    ranges: Sequence[range], source: ShardSource, rows: Rows
) -> Iterator[list[RowBlock]]:
    """Yield one block for each run of rows in the order of the data set."""
    for wanted in ranges:
        out = source.layout.empty(len(wanted))
        start, at = wanted.start, 0
        shard = int(np.searchsorted(source.starts, start, side="right")) - 1
        while at < len(wanted):
            first = start - int(source.starts[shard])
            stop = min(source.shards[shard].num_rows, first + len(wanted) - at)
            rows.copy((shard, first, stop), out, at)
            start, at, shard = start + stop - first, at + stop - first, shard + 1
        yield [source.layout.finish(out.slice(0, len(wanted)))]
