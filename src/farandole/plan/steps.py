"""How the rows of an epoch are cut into steps, and steps into slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Literal, NotRequired, TypedDict

Tail = Literal["short", "drop", "pad"]
TAILS: tuple[Tail, ...] = ("short", "drop", "pad")


class EpochSettings(TypedDict):
    """What decides an epoch's plan beside the data; see `farandole.plan.lanes.EpochPlan`."""

    seed: int
    epoch: int
    batch_size: int
    num_slots: int
    start_row: NotRequired[int]
    shuffle: NotRequired[bool]
    tail: NotRequired[Tail]
    window_rows: NotRequired[int]
    max_sections: NotRequired[int]


class Steps(ABC):
    """The steps of an epoch, or of what is left of it from `start_row` on.

    Steps are counted from `start_row`: step 0 is the first one from there. After `T` rows of the
    epoch, slot `v` of `V` has given exactly ``(T + v) // V`` of them.

    *Tail.* What becomes of the rows at the end that fill no batch:

    - ``short``: they are a short last batch; a remainder below ``min(2 * V, B)`` rows joins the
      last full batch instead, so that no slot of any step is empty and batch statistics have two
      rows to work on.
    - ``drop``: they are left out.
    - ``pad``: they are a last batch, which whoever reads it fills up to `B` rows with copies that
      weigh nothing. A remainder below `V` rows takes some from the batch before, which is padded
      as well, so that every slot has a row that counts.

    With ``short`` and ``pad``, the rows left after any step are zero or at least `V`, so the
    same holds however often the batch size changes on the way.
    """

    seed: int
    epoch: int
    batch_size: int
    num_slots: int
    start_row: int
    tail: Tail

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows of the whole epoch, N."""

    @property
    @abstractmethod
    def order_digest(self) -> str:
        """8 hex digits that change when, beside data, seed and epoch, what decides the order does.

        The batch size is not part of it.
        """

    def check_steps(self) -> None:
        """Raise ValueError if a step would leave a slot without a row, or a number is wrong."""
        if self.num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, not {self.num_slots}")
        if self.tail not in TAILS:
            raise ValueError(f"tail must be one of {TAILS}, not {self.tail!r}")
        smallest = smallest_batch(self.num_slots, self.tail)
        if self.batch_size < smallest:
            raise ValueError(f"batch_size {self.batch_size} is below {smallest}")
        if not 0 <= self.start_row <= self.num_rows:
            raise ValueError(f"start_row {self.start_row} is not in 0 to {self.num_rows}")
        needed = self.batch_size if self.tail == "drop" else self.num_slots
        left = self.num_rows - self.start_row
        if self.num_rows < needed or (self.tail != "drop" and 0 < left < needed):
            raise ValueError(f"{left} rows are too few: a step needs {needed}")

    @cached_property
    def num_steps(self) -> int:
        """Steps from `start_row` to the end of the epoch."""
        full, rest = divmod(self.num_rows - self.start_row, self.batch_size)
        if self.tail == "drop" or rest == 0:
            return full
        if self.tail == "short" and full > 0 and rest < min(2 * self.num_slots, self.batch_size):
            return full
        return full + 1

    def rows_before(self, step: int) -> int:
        """Return the rows of the epoch consumed before a step; of `num_steps`: at the end."""
        if not 0 <= step <= self.num_steps:
            raise ValueError(f"step {step} is not in 0 to {self.num_steps}")
        if step == self.num_steps and self.tail != "drop":
            return self.num_rows
        rows = self.start_row + step * self.batch_size
        if self.tail == "pad" and step > 0:
            return min(rows, self.num_rows - self.num_slots)
        return rows

    def rows_after(self, step: int) -> int:
        """Return the rows of the epoch consumed after a step: the state to resume from."""
        return self.rows_before(step + 1)

    def step_rows(self, step: int) -> int:
        """Return the rows of a step over all slots, without those that pad it."""
        return self.rows_after(step) - self.rows_before(step)

    def slot_rows(self, step: int, slot: int) -> int:
        """Return the rows of a slot in a step, without those that pad it."""
        return self._share(self.rows_before(step), self.rows_after(step), slot)

    def padded_slot_rows(self, step: int, slot: int) -> int:
        """Return the rows of a slot in a step, with those that pad it."""
        if self.tail != "pad":
            return self.slot_rows(step, slot)
        before = self.rows_before(step)
        return self._share(before, before + self.batch_size, slot)

    def _share(self, before: int, after: int, slot: int) -> int:
        return (after + slot) // self.num_slots - (before + slot) // self.num_slots


def smallest_batch(num_slots: int, tail: Tail) -> int:
    """Return the smallest batch size: a padded batch must be able to give rows to the next."""
    return 2 * num_slots if tail == "pad" else num_slots
