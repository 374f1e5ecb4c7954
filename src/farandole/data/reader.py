"""Read the rows of a plan: each lane's window in memory, gathered step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from farandole.data.block import RowBlock, copy_runs, put_chunks, take_rows
from farandole.data.columns import runs
from farandole.data.layout import Layout
from farandole.data.shards import ShardSource
from farandole.data.streams import Rows
from farandole.plan.lanes import EpochPlan, Piece

Ints = NDArray[np.int64]

_GATHERED_BYTES = 5 << 20
"""Of steps gathered at once: numpy asks for huge pages from 4 MiB on."""


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

    def close(self) -> None:
        """Close all files and threads."""
        self._rows.close()

    def steps(self, start_step: int) -> Iterator[list[RowBlock]]:
        """Yield each step's blocks, one for each slot."""
        rows = self._plan.batch_size * len(self._slots) / self._plan.num_slots
        most = max(1, int(_GATHERED_BYTES / (rows * self._layout.row_bytes)))
        step, num_steps = start_step, 1
        while step < self._plan.num_steps:
            steps = range(step, min(step + num_steps, self._plan.num_steps))
            yield from self._cut(steps, self._gather(steps))
            step, num_steps = steps.stop, min(2 * num_steps, most)

    def _cut(self, steps: range, gathered: RowBlock) -> Iterator[list[RowBlock]]:
        """Cut the rows of some steps into each slot's."""
        stop = 0
        for step in steps:
            blocks: list[RowBlock] = []
            for slot in self._slots:
                start, stop = stop, stop + self._plan.slot_rows(step, slot)
                blocks.append(self._layout.finish(gathered.slice(start, stop)))
            yield blocks

    def _gather(self, steps: range) -> RowBlock:
        """Return the rows of some steps: of each step all lanes', in their order.

        Several steps at once, since large pieces of memory come much cheaper than small ones.
        """
        spans = [self._plan.lane_spans(step, self._lanes) for step in steps]
        at, stop = (np.stack(ends) for ends in zip(*spans, strict=True))
        sizes = stop - at
        self._load_next(at[0], stop[-1])
        base = self._base - self._start
        if (stop[-1] <= np.maximum(self._stop, at[0])).all():
            return self._block.gather((base + at).ravel(), sizes.ravel())
        # Some lanes go on in their next windows: what is beyond a window is mended afterwards.
        out = self._layout.empty(int(sizes.sum()))
        take_rows(self._block, runs((base + at).ravel(), sizes.ravel()), out)
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
