"""In which order rows of several sources follow one another, in stated shares.

*Sources.* A periodic word of `D` letters says from which source each row comes; source `i` has
`n_i` letters in it, so that its share is ``n_i / D``. The letters are spread by Tijdeman's rule
(The chairman assignment problem, 1980): among the first `T` rows, source `i` has its share of
`T` to within ``1 - 1 / (2 S - 2)`` rows, for `S` sources and every `T`.

*Slots.* Rows are dealt to the `V` slots in rounds of one row each. If the slots took turns in
the same order for ever, and `D` and `V` had a common divisor, a slot would get some letters of
the word only: with two equal sources and two slots, one source each. So the turn moves on by one
after ``lcm(D, V)`` rows, and after ``D * V`` rows each slot has had every letter exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

Stop = Literal["first_exhausted", "all_exhausted"] | int

_RESOLUTION = 1000
_TOLERANCE = 1e-9


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return whole numbers in the proportions of `weights`.

    They add up to the smallest number up to 1000 that makes it exact. If none does, they are
    rounded to a thousandth of the whole (or a tenth of an equal share, if that is less), each to
    at least one.

    Raises
    ------
    ValueError
        If a weight is not a positive, finite number.
    """
    given = np.array(weights, np.float64)
    if not len(given) or not np.all(np.isfinite(given) & (given > 0)):
        raise ValueError(f"weights must be positive numbers, not {list(weights)}")
    exact = given / given.sum()
    for total in range(len(given), _RESOLUTION + 1):
        counts = np.rint(exact * total)
        if counts.min() >= 1 and np.abs(counts - exact * total).max() <= _TOLERANCE * total:
            return _reduced(counts)
    total = max(_RESOLUTION, 10 * len(given))
    counts = np.maximum(np.floor(exact * total), 1)
    while (missing := int(total - counts.sum())) != 0:
        surplus = exact * total - counts
        if missing > 0:
            counts[np.argsort(-surplus, kind="stable")[:missing]] += 1
        else:
            surplus[counts == 1] = np.inf
            counts[np.argmin(surplus)] -= 1
    return _reduced(counts)


def _reduced(counts: NDArray[np.float64]) -> tuple[int, ...]:
    whole = [int(count) for count in counts]
    divisor = math.gcd(*whole)
    return tuple(count // divisor for count in whole)


@lru_cache(maxsize=16)
def chairman_word(shares: tuple[int, ...]) -> Ints:
    """Return the word in which source `i` has ``shares[i]`` letters, evenly spread.

    Returns
    -------
    ndarray of int64, shape (sum(shares),)
    """
    num_sources, total = len(shares), sum(shares)
    if num_sources == 1:
        return np.zeros(total, np.int64)
    slack = 2 * num_sources - 2
    counts = np.array(shares, np.int64)
    given = np.zeros(num_sources, np.int64)
    word = np.empty(total, np.int64)
    for place in range(total):
        due = (counts * (place + 1) - given * total) * slack >= total
        deadlines = np.where(due, (given * slack + slack - 1) / counts, np.inf)
        word[place] = source = int(np.argmin(deadlines))
        given[source] += 1
    return word


@dataclass(frozen=True)
class Interleave:
    """The endless sequence of rows of some sources, and how slots take it.

    Parameters
    ----------
    shares : tuple of int
        Rows of each source in a period of the word.
    num_slots : int
        V.
    """

    shares: tuple[int, ...]
    num_slots: int

    @cached_property
    def period(self) -> int:
        """Rows after which everything repeats, ``D * V``."""
        return sum(self.shares) * self.num_slots

    @cached_property
    def _letters(self) -> tuple[Ints, Ints]:
        """The source and the slot of each row of a period."""
        length = sum(self.shares)
        block = math.lcm(length, self.num_slots)
        rows = np.arange(self.period)
        return chairman_word(self.shares)[rows % length], (rows + rows // block) % self.num_slots

    @cached_property
    def _places(self) -> list[Ints]:
        """Of each source: the rows of a period that are its, by slot; shape (V, n_i)."""
        sources, slots = self._letters
        order = np.lexsort((np.arange(self.period), slots, sources))
        ends = np.cumsum(np.array(self.shares) * self.num_slots)[:-1]
        return [part.reshape(self.num_slots, -1) for part in np.split(order, ends)]

    @cached_property
    def _sorted_places(self) -> list[Ints]:
        return [np.sort(places, axis=None) for places in self._places]

    def given(self, source: int, row: int) -> Ints:
        """Return how many of the first `row` rows are of a source, by slot; shape (V,)."""
        periods, rest = divmod(row, self.period)
        inside = (self._places[source] < rest).sum(axis=1)
        return periods * self.shares[source] + inside

    def row_of(self, source: int, nth: int) -> int:
        """Return which row is the `nth` of a source, counted from 0."""
        places = self._sorted_places[source]
        periods, rest = divmod(nth, len(places))
        return periods * self.period + int(places[rest])

    def sources_of(self, start: int, stop: int, slot: int) -> Ints:
        """Return the sources of a slot's rows among rows `start` to `stop`, in order."""
        rows = np.arange(start, stop) % self.period
        sources, slots = self._letters
        return sources[rows[slots[rows] == slot]]

    def epoch_rows(self, sizes: Sequence[int], stop: Stop) -> int:
        """Return the length of an epoch over sources of such sizes: a multiple of V.

        Parameters
        ----------
        sizes : sequence of int
            Rows of each source.
        stop : {"first_exhausted", "all_exhausted"} or int
            As long as every source has rows left that were not used (rounded down), until every
            row of each source was used (rounded up), or so many rows (rounded down).
        """
        if stop == "first_exhausted":
            rows = min(self.row_of(source, size) for source, size in enumerate(sizes))
        elif stop == "all_exhausted":
            rows = max(self.row_of(source, size - 1) for source, size in enumerate(sizes))
            rows += self.num_slots
        else:
            rows = stop
        return rows - rows % self.num_slots
