"""Which rows each slot takes when an epoch draws on several sources, or on a part of one.

A source is read in *passes*: the lanes of `farandole.plan.lanes.EpochPlan`, each pass with a
shuffle of its own. What differs from an ordinary epoch is only how many rows a slot has taken
from a pass before each step; see `PassPlan`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from farandole.plan.interleave import Interleave
from farandole.plan.lanes import EpochPlan
from farandole.plan.random import source_seed
from farandole.plan.state import digest_of
from farandole.plan.steps import Steps, Tail

_MIN_WINDOW_ROWS = 256
_MIN_LANE_ROWS = 16

Ints = NDArray[np.int64]


class Draws(Protocol):
    """How slots draw on a pass."""

    @property
    def num_steps(self) -> int:
        """The step after the last one that draws on it."""
        ...

    @property
    def totals(self) -> Ints:
        """What each slot would draw in all if the pass were used to its end; shape (V,)."""
        ...

    def given(self, step: int) -> Ints:
        """Return what each slot has drawn before a step; shape (V,)."""
        ...


@dataclass(frozen=True)
class PassPlan(EpochPlan):
    """A pass over a source. A slot may draw nothing from it in a step."""

    draws: Draws | None = None

    def check_steps(self) -> None:
        """Do nothing: the plan that this is a part of has checked it all."""

    @property
    def _draws(self) -> Draws:
        assert self.draws is not None
        return self.draws

    @cached_property
    def num_steps(self) -> int:
        """The step after the last one that draws on this pass."""
        return self._draws.num_steps

    @cached_property
    def _given(self) -> dict[int, Ints]:
        return {}

    def given(self, step: int) -> Ints:
        """Return the rows of the pass that each slot has taken before a step; shape (V,)."""
        known = self._given.get(step)
        if known is None:
            known = self._draws.given(step)
            if len(self._given) > 2:
                self._given.clear()
            self._given[step] = known
        return known

    def rows_before(self, step: int) -> int:
        """Return the rows of the pass consumed before a step."""
        return int(self.given(step).sum())

    def slot_rows(self, step: int, slot: int) -> int:
        """Return the rows of the pass that a slot takes in a step; it may be none."""
        return int(self.given(step + 1)[slot] - self.given(step)[slot])

    def slot_row_ids(self, step: int, slot: int) -> Ints:
        """Return the rows of a slot in a step; it may be none."""
        if self.slot_rows(step, slot) == 0:
            return np.empty(0, np.int64)
        return super().slot_row_ids(step, slot)

    @cached_property
    def lanes_per_slot(self) -> int:
        """Lanes of a slot: fewer where they would be too short to be shuffled."""
        fits = int(self._draws.totals.min()) // _MIN_LANE_ROWS
        return max(1, min(super().lanes_per_slot, fits))

    def lane_spans(self, step: int, lanes: range) -> tuple[Ints, Ints]:
        """Return where a step starts and stops in each of `lanes`, as places in the lane."""
        chosen = slice(lanes.start, lanes.stop)
        return (
            self._lane_shares(self.given(step))[chosen],
            self._lane_shares(self.given(step + 1))[chosen],
        )

    def _lane_shares(self, slot_rows: Ints) -> Ints:
        """Return how the rows of each slot are spread over its lanes; shape (L,)."""
        turns = np.arange(self.lanes_per_slot)
        return ((slot_rows[:, None] + turns) // self.lanes_per_slot).ravel()

    @cached_property
    def _lane_starts(self) -> Ints:
        return np.concatenate(([0], np.cumsum(self._lane_shares(self._draws.totals))))


def _pass_plan(source: EpochPlan, draws: Draws, **changes: Any) -> PassPlan:
    values: dict[str, Any] = {field.name: getattr(source, field.name) for field in fields(source)}
    values.update(changes)
    values.update(start_row=0, tail="short", draws=draws)
    return PassPlan(**values)


def _spread(num_rows: int, num_slots: int) -> Ints:
    return (num_rows + np.arange(num_slots)) // num_slots


# --- a part of one source -----------------------------------------------------------------


@dataclass(frozen=True)
class SamplePlan(Steps):
    """An epoch of `sample_rows` rows of a source, other ones each time.

    A pass is cut into ``k = ceil(N / n)`` pieces of `n` rows, one for each epoch, the last of
    which reaches back so that it has `n` rows too. So an epoch has no row twice, and `k`
    epochs, counted from a multiple of `k`, have every row.

    Parameters
    ----------
    source : EpochPlan
        Any plan of the source's, for its shards.
    sample_rows : int
        n.
    seed, epoch, batch_size, num_slots, start_row, shuffle, tail
        See `EpochPlan`.
    """

    source: EpochPlan
    sample_rows: int
    seed: int
    epoch: int
    batch_size: int
    num_slots: int
    start_row: int = 0
    shuffle: bool = True
    tail: Tail = "short"

    def __post_init__(self) -> None:
        if not 1 <= self.sample_rows <= self.source.num_rows:
            rows = self.source.num_rows
            raise ValueError(f"sample_rows {self.sample_rows} is not in 1 to {rows}")
        self.check_steps()

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return self.sample_rows

    @property
    def order_digest(self) -> str:
        """Digest of the source's order and the size of the sample."""
        return digest_of(self.part.order_digest, self.sample_rows)

    @cached_property
    def first_row(self) -> int:
        """Where in the pass this epoch's rows begin."""
        piece = self.epoch % self._num_pieces
        return min(piece * self.sample_rows, self.source.num_rows - self.sample_rows)

    @property
    def _num_pieces(self) -> int:
        return -(-self.source.num_rows // self.sample_rows)

    @cached_property
    def part(self) -> PassPlan:
        """The pass to read, step by step."""
        return _pass_plan(
            self.source,
            _SampleDraws(self),
            seed=self.seed,
            epoch=self.epoch // self._num_pieces,
            batch_size=self.batch_size,
            num_slots=self.num_slots,
            shuffle=self.shuffle,
        )

    def slot_row_ids(self, step: int, slot: int) -> Ints:
        """Return the rows of a slot in a step, as places in the order of the source."""
        return self.part.slot_row_ids(step, slot)

    def _share(self, before: int, after: int, slot: int) -> int:
        return super()._share(self.first_row + before, self.first_row + after, slot)


@dataclass(frozen=True)
class _SampleDraws:
    plan: SamplePlan

    @property
    def num_steps(self) -> int:
        return self.plan.num_steps

    @property
    def totals(self) -> Ints:
        return _spread(self.plan.source.num_rows, self.plan.num_slots)

    def given(self, step: int) -> Ints:
        return _spread(self.plan.first_row + self.plan.rows_before(step), self.plan.num_slots)


# --- several sources ----------------------------------------------------------------------


@dataclass(frozen=True)
class MixPlan(Steps):
    """An epoch of rows from several sources, in the order of an `Interleave`.

    In an epoch source `i` gives ``source_rows(i)`` rows, always as many. If it has as many or
    more, no row of it comes twice; successive epochs take other rows of one pass as long as
    they last, then a new pass begins. If it has fewer, pass follows pass, so that each of its
    rows comes equally often, to one time.

    All sizes are multiples of V, and every slot gets equally many rows in each step.

    Parameters
    ----------
    sources : tuple of EpochPlan
        Any plan of each source, for its shards.
    shares : tuple of int
        Rows of each source in a period; see `Interleave`.
    epoch_rows : int
        Rows of an epoch: ``Interleave.epoch_rows``.
    seed, epoch, batch_size, num_slots, start_row, shuffle, tail
        See `EpochPlan`; without `shuffle`, rows of a source keep their order.
    """

    sources: tuple[EpochPlan, ...]
    shares: tuple[int, ...]
    epoch_rows: int
    seed: int
    epoch: int
    batch_size: int
    num_slots: int
    start_row: int = 0
    shuffle: bool = True
    tail: Tail = "short"

    def __post_init__(self) -> None:
        for name in ("epoch_rows", "batch_size", "start_row"):
            if getattr(self, name) % self.num_slots:
                value = getattr(self, name)
                raise ValueError(f"{name} {value} is no multiple of num_slots {self.num_slots}")
        self.check_steps()

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return self.epoch_rows

    @property
    def order_digest(self) -> str:
        """Digest of shares, sizes and the sources' own orders."""
        windows = [self._window_rows(source) for source in range(len(self.sources))]
        parts = (self.num_slots, self.shuffle, self.shares, self.epoch_rows, windows)
        return digest_of(*parts, [source.order_digest for source in self.sources])

    @cached_property
    def interleave(self) -> Interleave:
        """The order of sources."""
        return Interleave(self.shares, self.num_slots)

    def source_rows(self, source: int) -> int:
        """Return the rows of a source in an epoch."""
        return int(self.interleave.given(source, self.epoch_rows).sum())

    def step_sources(self, step: int, slot: int) -> Ints:
        """Return the source of each row of a slot in a step; shape (slot_rows(step, slot),)."""
        return self.interleave.sources_of(self.rows_before(step), self.rows_after(step), slot)

    def passes(self, source: int, start_step: int = 0) -> Iterator[tuple[int, PassPlan]]:
        """Yield the passes over a source from a step on, each with its first step there."""
        size, used = self.sources[source].num_rows, self.source_rows(source)
        begun = int(self.interleave.given(source, self.rows_before(start_step)).sum())
        ended = int(self.interleave.given(source, self.rows_before(self.num_steps)).sum())
        for number in range(begun // size, -(-ended // size)):
            first = max(number * size, begun)
            last = min((number + 1) * size, ended) - 1
            if first <= last:
                draws = self._draws(source, number, size, used, self._step_of(source, last) + 1)
                yield self._step_of(source, first), self._pass(source, draws)

    def _step_of(self, source: int, nth: int) -> int:
        """Return the step that takes the `nth` row of a source."""
        row = self.interleave.row_of(source, nth)
        low, high = 0, self.num_steps - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if row < self.rows_after(middle) else (middle + 1, high)
        return low

    def _draws(self, source: int, number: int, size: int, used: int, num_steps: int) -> _MixDraws:
        bounds = [
            self._given(source, min(nth, used)) for nth in (number * size, (number + 1) * size)
        ]
        inside = bounds[1] - bounds[0]
        if used >= size:
            before, total = np.zeros_like(inside), inside
            number += self.epoch * -(-used // size)
        else:
            per_pass = size // used
            before, total = inside * (self.epoch % per_pass), inside * per_pass
            number = self.epoch // per_pass
        rest = _spread(size - int(total.sum()), self.num_slots)
        return _MixDraws(
            self, source, number, (bounds[0], bounds[1]), before, total + rest, num_steps
        )

    def _given(self, source: int, nth: int) -> Ints:
        """Return what slots have had of a source before its `nth` row."""
        return self.interleave.given(source, self.interleave.row_of(source, nth))

    def _pass(self, source: int, draws: _MixDraws) -> PassPlan:
        share = self.shares[source] / sum(self.shares)
        return _pass_plan(
            self.sources[source],
            draws,
            seed=source_seed(self.seed, source),
            epoch=draws.number,
            batch_size=max(1, round(self.batch_size * share)),
            num_slots=self.num_slots,
            shuffle=self.shuffle,
            window_rows=self._window_rows(source),
        )

    def _window_rows(self, source: int) -> int:
        """Return smaller windows than the source's own, so that all need no more memory."""
        own = self.sources[source].window_rows
        scaled = own * self.shares[source] // sum(self.shares)
        return min(own, max(scaled, _MIN_WINDOW_ROWS))


@dataclass(frozen=True, eq=False)
class _MixDraws:
    plan: MixPlan
    source: int
    number: int
    """Of the pass, over all epochs."""
    bounds: tuple[Ints, Ints]
    """What slots have had of the source in the epoch where the pass begins and ends."""
    before: Ints
    """What slots had of the pass in epochs before."""
    totals: Ints
    num_steps: int

    def given(self, step: int) -> Ints:
        given = self.plan.interleave.given(self.source, self.plan.rows_before(step))
        return np.clip(given, *self.bounds) - self.bounds[0] + self.before
