"""Which rows each slot takes in each step of an epoch, from sizes and a seed alone.

*Order.* The shards are permuted and laid end to end: the *stream*. The stream is cut by row
into `L` lanes; in a lane, windows of rows are permuted. Slot `v` of `V` owns the lanes
``[v * L / V, (v + 1) * L / V)``. A batch takes a few rows from every lane, so it mixes rows
from all over the data set, and a worker reads only the lanes of its slots.

*State.* Only the number of rows consumed, `T`. Lane `l`, the `j`-th of slot `v`, has the phase
``phi = j * V + v`` and has given ``(T + phi) // L`` rows after `T`. The phases are 0 to L - 1,
so by Hermite's identity the lanes have given exactly `T` rows together, and a slot exactly
``(T + v) // V``. Every step thus takes exactly `B` rows, no two slots of a step differ by
more than one row, and no rule for remainders is needed; a lane is as long as what it has given
at the end, so that all lanes end together. Since `T` says it all, an epoch may go on
from it with another batch size.

*Number of lanes.* The multiple of `V` nearest above 48, which many worker counts divide; fewer
if a lane would otherwise be empty. Without a shuffle, each slot has one lane.

*Sections.* A row group can only be decoded from its beginning, so a lane that begins in the
middle of one is dear, and 48 row groups open at once take much memory. So the stream is cut into
a few sections, a run of lanes each, and the rows of a section are dealt to its lanes window by
window, in the order in which steps come to need them. Whoever reads a section reads on and on,
whatever the size of its row groups; where there are many small ones, each lane is a section.

*Windows.* The first window of a lane is shortened, by its phase, so that the lanes of a slot
come to their next windows at different times and reading is spread evenly. A lane that fits
into one window is not cut, for the better shuffle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farandole.plan.random import Stream, generator
from farandole.plan.slots import slots_of
from farandole.plan.state import digest_of
from farandole.plan.steps import Steps, Tail

MIN_LANES = 48
DEFAULT_WINDOW_ROWS = 8192
_SHARDS_PER_SECTION = 4
"""With four, about an eighth of the rows is decoded only to get to where a section begins."""

Ints = NDArray[np.int64]


class Piece(NamedTuple):
    """A run of rows of a shard."""

    shard: int
    first: int
    stop: int


@dataclass(frozen=True)
class EpochPlan(Steps):
    """The order of one epoch, or of what is left of it from `start_row` on.

    Its steps are those of `farandole.plan.steps.Steps`. No method costs time or memory in
    proportion to the number of rows, only to that of windows.

    Parameters
    ----------
    shard_rows : tuple of int
        Rows selected in each shard, in the order of the data set.
    seed, epoch : int
        Decide the order.
    batch_size : int
        Rows of a step over all slots, B; at least `num_slots`, twice that with ``tail="pad"``.
    num_slots : int
        V.
    start_row : int, default=0
        Rows of the epoch that are consumed already.
    shuffle : bool, default=True
        False gives each slot rows in the order of the data set; one slot gets them all.
    tail : {"short", "drop", "pad"}, default="short"
        Whether rows that fill no batch are a short one, left out or filled up; see `Steps`.
    window_rows : int, default=8192
        Rows that are permuted together.
    max_sections : int, optional
        Most places of the stream that are read at the same time.

    Raises
    ------
    ValueError
        If a step would leave a slot without a row, or a number is out of range.
    """

    shard_rows: tuple[int, ...]
    seed: int
    epoch: int
    batch_size: int
    num_slots: int
    start_row: int = 0
    shuffle: bool = True
    tail: Tail = "short"
    window_rows: int = DEFAULT_WINDOW_ROWS
    max_sections: int | None = None

    def __post_init__(self) -> None:
        if self.max_sections is not None and self.max_sections < 1:
            raise ValueError(f"max_sections must be at least 1, not {self.max_sections}")
        if self.window_rows < 1:
            raise ValueError(f"window_rows must be at least 1, not {self.window_rows}")
        if any(rows < 0 for rows in self.shard_rows):
            raise ValueError("shard_rows must not be negative")
        self.check_steps()

    @property
    def num_rows(self) -> int:
        """Rows of the whole epoch, N."""
        return int(self.shard_starts[-1])

    @property
    def order_digest(self) -> str:
        """Digest of the sizes that decide the order, and of whether there is a shuffle."""
        lanes = (self.num_slots, self.lanes_per_slot, self.num_sections)
        return digest_of(*lanes, self.shuffle, self.window_rows)

    def slot_row_ids(self, step: int, slot: int) -> Ints:
        """Return the rows of a slot in a step, in the order in which the slot gets them.

        Returns
        -------
        ndarray of int64, shape (slot_rows(step, slot),)
            Places of the rows in the order of the data set.
        """
        lanes = self.lanes_of(range(slot, slot + 1))
        starts, stops = self.lane_spans(step, lanes)
        parts: list[Ints] = []
        for lane, start, stop in zip(lanes, starts.tolist(), stops.tolist(), strict=True):
            while start < stop:
                begin, end, ids = self._window_row_ids(lane, start)
                until = min(stop, end)
                parts.append(ids[start - begin : until - begin])
                start = until
        return np.concatenate(parts)

    # --- lanes ----------------------------------------------------------------------------

    @cached_property
    def lanes_per_slot(self) -> int:
        """Lanes of a slot, L / V."""
        if not self.shuffle:
            return 1
        return min(-(-MIN_LANES // self.num_slots), self.num_rows // self.num_slots)

    @property
    def num_lanes(self) -> int:
        """L."""
        return self.num_slots * self.lanes_per_slot

    def lanes_of(self, slots: range) -> range:
        """Return the lanes of a run of slots."""
        return range(slots.start * self.lanes_per_slot, slots.stop * self.lanes_per_slot)

    def lane_spans(self, step: int, lanes: range) -> tuple[Ints, Ints]:
        """Return where a step starts and stops in each of `lanes`, as places in the lane."""
        phases = self._phases[lanes.start : lanes.stop]
        before, after = self.rows_before(step), self.rows_after(step)
        return (before + phases) // self.num_lanes, (after + phases) // self.num_lanes

    def lane_rows(self, lane: int) -> int:
        """Return the length of a lane."""
        return int(self._lane_starts[lane + 1] - self._lane_starts[lane])

    @cached_property
    def _phases(self) -> Ints:
        slots = np.arange(self.num_slots)[:, None]
        return (np.arange(self.lanes_per_slot) * self.num_slots + slots).ravel()

    @cached_property
    def _lane_starts(self) -> Ints:
        """Where each lane starts in the stream, and the end."""
        lengths = (self.num_rows + self._phases) // self.num_lanes
        return np.concatenate(([0], np.cumsum(lengths)))

    # --- windows --------------------------------------------------------------------------

    def window_at(self, lane: int, position: int) -> tuple[int, int, int]:
        """Return the window that holds a place of a lane: its number, and its span there."""
        rows = self.lane_rows(lane)
        if not 0 <= position < rows:
            raise ValueError(f"lane {lane} has {rows} rows, no place {position}")
        first = self._first_window_rows(lane)
        if position < first:
            return 0, 0, first
        window = 1 + (position - first) // self.window_rows
        start = first + (window - 1) * self.window_rows
        return window, start, min(start + self.window_rows, rows)

    def _first_window_rows(self, lane: int) -> int:
        rows = self.lane_rows(lane)
        if rows <= self.window_rows:
            return rows
        return max(1, self.window_rows * (int(self._phases[lane]) + 1) // self.num_lanes)

    def window_order(self, lane: int, window: int, num_rows: int) -> Ints:
        """Return the order in which the rows of a window are given, as a permutation."""
        if not self.shuffle:
            return np.arange(num_rows)
        rng = generator(self.seed, Stream.WINDOW_ORDER, self.epoch, lane, window)
        return rng.permutation(num_rows)

    def window_pieces(self, lane: int, window: int) -> list[Piece]:
        """Return the rows of a window, before they are permuted."""
        start = self.window_place(lane, window)
        return self._pieces(start, start + self._window_rows(lane, window))

    def window_place(self, lane: int, window: int) -> int:
        """Return where in the stream a window starts."""
        section, nth = divmod(lane, self.lanes_per_section)
        firsts, places = self._dealt(section)
        return int(places[firsts[nth] + window])

    def _window_rows(self, lane: int, window: int) -> int:
        rows, first = self.lane_rows(lane), self._first_window_rows(lane)
        if window == 0:
            return first
        return min(self.window_rows, rows - first - (window - 1) * self.window_rows)

    # --- sections -------------------------------------------------------------------------

    @cached_property
    def num_sections(self) -> int:
        """Places of the stream that are read at the same time, at most."""
        squares = sum(rows * rows for rows in self.shard_rows)
        limit = max(1, self.num_rows**2 // (_SHARDS_PER_SECTION * squares))
        if self.max_sections is not None:
            limit = min(limit, self.max_sections)
        if limit < self.num_slots:
            return _largest_divisor(self.num_slots, limit)
        return self.num_slots * _largest_divisor(self.lanes_per_slot, limit // self.num_slots)

    @property
    def lanes_per_section(self) -> int:
        """Lanes of a section; section `s` owns the `s`-th run of so many."""
        return self.num_lanes // self.num_sections

    def section_pieces(self, section: int) -> list[Piece]:
        """Return all rows of a section, in the order in which they are dealt to its lanes."""
        lanes = self.lanes_per_section
        start, stop = self._lane_starts[[section * lanes, (section + 1) * lanes]].tolist()
        return self._pieces(start, stop)

    @cached_property
    def _dealt_sections(self) -> dict[int, tuple[Ints, Ints]]:
        return {}

    def _dealt(self, section: int) -> tuple[Ints, Ints]:
        """Deal a section to the windows of its lanes.

        Returns
        -------
        firsts : ndarray of int64, shape (lanes_per_section,)
            Where each lane's windows start in `places`.
        places : ndarray of int64, shape (number of windows in the section,)
            Where in the stream each window starts.
        """
        if section not in self._dealt_sections:
            self._dealt_sections[section] = self._deal(section)
        return self._dealt_sections[section]

    def _deal(self, section: int) -> tuple[Ints, Ints]:
        lanes = range(section * self.lanes_per_section, (section + 1) * self.lanes_per_section)
        first_rows = np.array([self._first_window_rows(lane) for lane in lanes])
        rows = np.array([self.lane_rows(lane) for lane in lanes])
        counts = 1 - (first_rows - rows) // self.window_rows
        firsts = np.cumsum(counts) - counts
        nth = np.repeat(np.arange(len(lanes)), counts)
        window = np.arange(len(nth)) - firsts[nth]
        starts = np.where(window == 0, 0, first_rows[nth] + (window - 1) * self.window_rows)
        stops = np.where(window == 0, first_rows[nth], starts + self.window_rows)
        sizes = np.minimum(stops, rows[nth]) - starts
        # The rows of the epoch that are given before a window is needed, up to a constant.
        needed_after = starts * self.num_lanes - self._phases[lanes.start : lanes.stop][nth]
        order = np.argsort(needed_after, kind="stable")
        places = np.empty(len(nth), np.int64)
        places[order] = np.cumsum(sizes[order]) - sizes[order]
        return firsts, places + self._lane_starts[lanes.start]

    def _pieces(self, start: int, stop: int) -> list[Piece]:
        """Return a span of the stream as pieces of shards."""
        pieces: list[Piece] = []
        place = int(np.searchsorted(self._stream_starts, start, side="right")) - 1
        while start < stop:
            begin, end = int(self._stream_starts[place]), int(self._stream_starts[place + 1])
            until = min(stop, end)
            if until > start:
                pieces.append(Piece(int(self._shard_order[place]), start - begin, until - begin))
            start, place = max(start, until), place + 1
        return pieces

    @cached_property
    def _shard_order(self) -> Ints:
        num_shards = len(self.shard_rows)
        if not self.shuffle:
            return np.arange(num_shards)
        return generator(self.seed, Stream.SHARD_ORDER, self.epoch).permutation(num_shards)

    @cached_property
    def _stream_starts(self) -> Ints:
        """Where each place of the permuted shards starts in the stream, and the end."""
        return np.concatenate(([0], np.cumsum(np.array(self.shard_rows)[self._shard_order])))

    @cached_property
    def shard_starts(self) -> Ints:
        """Where each shard starts in the order of the data set, and the end."""
        return np.concatenate(([0], np.cumsum(self.shard_rows)))

    @cached_property
    def _last_windows(self) -> dict[int, tuple[int, int, Ints]]:
        return {}

    def _window_row_ids(self, lane: int, position: int) -> tuple[int, int, Ints]:
        """Return the span of the window that holds a place, and its row ids in the order given.

        The last window of each lane is kept, since a lane is read from start to end.
        """
        last = self._last_windows.get(lane)
        if last is None or not last[0] <= position < last[1]:
            window, start, stop = self.window_at(lane, position)
            ids = np.concatenate(
                [
                    np.arange(begin, end, dtype=np.int64) + self.shard_starts[shard]
                    for shard, begin, end in self.window_pieces(lane, window)
                ]
            )
            last = (start, stop, ids[self.window_order(lane, window, stop - start)])
            self._last_windows[lane] = last
        return last


def _largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number that is at most `limit`."""
    return next(size for size in range(min(limit, number), 0, -1) if number % size == 0)


def evaluation_units(num_rows: int, unit_rows: int) -> tuple[range, ...]:
    """Cut rows into consecutive units of `unit_rows` (the last may be shorter).

    Units do not depend on the number of workers; sums over them, taken in their order, do
    not either.
    """
    if unit_rows < 1:
        raise ValueError(f"unit_rows must be at least 1, not {unit_rows}")
    return tuple(
        range(start, min(start + unit_rows, num_rows)) for start in range(0, num_rows, unit_rows)
    )


def units_of(rank: int, world_size: int, num_units: int) -> range:
    """Return the contiguous run of evaluation units that a rank takes; it may be empty."""
    return slots_of(rank, world_size, num_units)
