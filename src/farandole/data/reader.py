"""Read the rows of a plan: each lane's window in memory, gathered step by step."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from farandole.data.block import RowBlock, copy_runs, put_chunks, take_rows
from farandole.data.columns import Chunks, runs
from farandole.data.layout import Layout
from farandole.data.shards import ShardSource
from farandole.data.streams import Rows
from farandole.plan.lanes import EpochPlan, Piece

Ints = NDArray[np.int64]

_GATHERED_BYTES = 2 << 20
"""Of steps gathered at once: large pieces cost less for each row, small ones stay in caches."""
_MAX_BUFFERS = 8


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
    rows : Rows
        Where they come from; closed with the reader.
    """

    def __init__(self, plan: EpochPlan, slots: range, layout: Layout, rows: Rows) -> None:
        self._plan = plan
        self._slots = slots
        self._lanes = plan.lanes_of(slots)
        self._layout = layout
        self._rows = rows
        lengths = [min(plan.window_rows, plan.lane_rows(lane)) for lane in self._lanes]
        base = np.concatenate(([0], np.cumsum(lengths)))
        self._base, num_rows = base[:-1], int(base[-1])
        self._start = np.zeros(len(self._lanes), np.int64)
        self._stop = np.zeros(len(self._lanes), np.int64)
        self._block = layout.empty(num_rows)
        self._decoded = layout.empty(max(lengths, default=0))
        self._buffers = _Buffers(layout)

    def close(self) -> None:
        """Close all files and threads."""
        self._rows.close()

    def steps(self, start_step: int) -> Iterator[RowBlock]:
        """Yield the rows of each step, those of all slots one after another."""
        rows = self._plan.batch_size * len(self._slots) / self._plan.num_slots
        most = max(1, int(_GATHERED_BYTES / (rows * self._layout.row_bytes)))
        step, num_steps = start_step, 1
        while step < self._plan.num_steps:
            steps = range(step, min(step + num_steps, self._plan.num_steps))
            spans = [self._plan.lane_spans(step, self._lanes) for step in steps]
            starts, stops = (np.stack(ends) for ends in zip(*spans, strict=True))
            gathered = self._gather(starts, stops)
            gathered = replace(gathered, seed=self._plan.seed, epoch=self._plan.epoch)
            first = 0
            for size in (stops - starts).sum(axis=1).tolist():
                yield self._layout.finish(gathered.slice(first, first + size))
                first += size
            del gathered  # or its buffer could not be used again
            step, num_steps = steps.stop, min(2 * num_steps, most)

    def cut(self, step: int, block: RowBlock) -> list[RowBlock]:
        """Return the rows of each slot in a step."""
        sizes = [self._plan.slot_rows(step, slot) for slot in self._slots]
        ends = np.cumsum(sizes).tolist()
        return [block.slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def _gather(self, at: Ints, stop: Ints) -> RowBlock:
        """Return the rows of some steps: of each step all lanes', in their order.

        ``at[i, j]`` and ``stop[i, j]`` are where a step starts and stops in a lane. Several steps
        at once, since large pieces of memory come much cheaper than small ones.
        """
        sizes = stop - at
        self._load_next(at[0], stop[-1])
        base = self._base - self._start
        out = self._buffers.take(int(sizes.sum()))
        starts = (base + at).ravel()
        take_rows(self._block, runs(starts, sizes.ravel()), out)
        if (stop[-1] <= np.maximum(self._stop, at[0])).all():
            loose = {
                name: column.gather(starts, sizes.ravel())
                for name, column in self._block.columns.items()
                if isinstance(column, Chunks)
            }
            return replace(out, columns={**out.columns, **loose})
        # Some lanes go on in their next windows: what is beyond a window is mended afterwards.
        targets = (np.cumsum(sizes) - sizes.ravel()).reshape(sizes.shape)
        until = np.maximum(np.minimum(stop, self._stop), at)
        put_chunks(self._block, base + at, until - at, out, targets)
        while (until < stop).any():
            targets, at = targets + (until - at), until
            rest = np.where(at < stop, at, np.iinfo(np.int64).max).min(axis=0)
            self._load_next(rest, stop[-1])
            base = self._base - self._start
            until = np.where(at < stop, np.maximum(np.minimum(stop, self._stop), at), stop)
            part = until > at
            copy_runs(self._block, (base + at)[part], (until - at)[part], out, targets[part])
        return out

    def _load_next(self, at: Ints, stop: Ints) -> None:
        """Read windows for lanes that go on at `at`, before `stop`, and are not in a window."""
        outside = (at < self._start) | (at >= self._stop)
        self._load(np.flatnonzero(outside & (at < stop)).tolist(), at)

    def _load(self, indices: Sequence[int], at: Ints) -> None:
        """Read the windows that hold places of some lanes, in the order in which they are dealt."""
        windows = [self._plan.window_at(self._lanes[i], int(at[i])) for i in indices]
        loads = sorted(
            (self._plan.window_place(self._lanes[index], window[0]), index, window)
            for index, window in zip(indices, windows, strict=True)
        )
        for _, index, (window, _, _) in loads:
            piece = self._plan.window_pieces(self._lanes[index], window)[0]
            self._rows.expect(self._section(index), piece)
        for _, index, window in loads:
            self._load_window(index, *window)

    def _load_window(self, index: int, window: int, start: int, stop: int) -> None:
        lane, base = self._lanes[index], int(self._base[index])
        num_rows = 0
        for piece in self._plan.window_pieces(lane, window):
            self._rows.copy(self._section(index), piece, self._decoded, num_rows)
            num_rows += piece.stop - piece.first
        order = self._plan.window_order(lane, window, num_rows)
        for source, target in zip(self._decoded.arrays(), self._block.arrays(), strict=True):
            # Without a mode, take would go through a buffer of its own.
            source.take(order, axis=0, out=target[base : base + num_rows], mode="clip")
        for source, target in zip(self._decoded.chunks(), self._block.chunks(), strict=True):
            target.put(base, source[:num_rows].combine_chunks().take(order))
        self._start[index], self._stop[index] = start, stop

    def _section(self, index: int) -> int:
        return self._lanes[index] // self._plan.lanes_per_section


class _Buffers:
    """Blocks that are used again as soon as nobody has a view of their arrays.

    Fresh memory costs more than what is copied into it: the system clears it page by page.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._blocks: deque[RowBlock] = deque(maxlen=_MAX_BUFFERS)
        self._unused: list[int] = []

    def take(self, num_rows: int) -> RowBlock:
        """Return a block of unset values."""
        for block in self._blocks:
            if block.num_rows == num_rows and _references(block) == self._unused:
                return block
        block = self._layout.empty(num_rows)
        if not block.chunks():  # which would keep Arrow's memory
            self._unused = _references(block)
            self._blocks.append(block)
        return block


def _references(block: RowBlock) -> list[int]:
    return [sys.getrefcount(array) for array in block.arrays()]


def shards_of(plan: EpochPlan, lanes: range) -> set[int]:
    """Return the shards of the sections that some lanes belong to."""
    sections = {lane // plan.lanes_per_section for lane in lanes}
    return {piece.shard for section in sections for piece in plan.section_pieces(section)}


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
            rows.copy(0, Piece(shard, first, stop), out, at)
            start, at, shard = start + stop - first, at + stop - first, shard + 1
        yield [source.layout.finish(out.slice(0, len(wanted)))]
