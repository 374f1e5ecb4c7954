"""Where every rank's regions lie, and in which order they are added. Pure; alike on all ranks."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from farandole.errors import UsageError
from farandole.plan.slots import slots_of
from farandole.plan.tree import Node, additions, subtrees
from farandole.protocols import Bucket

ALIGNMENT = 64
"""Bytes. Slices are cut at cache lines, so that no two ranks write to the same one."""

Position = tuple[int, int]
"""A vector to add: (rank, region)."""


@dataclass(frozen=True)
class Layout:
    """The regions of all ranks for some buckets.

    With ``exact=False`` every rank has one region, and they are added in a tree over ranks.
    """

    buckets: tuple[Bucket, ...]
    world_size: int
    num_slots: int
    exact: bool = True

    @cached_property
    def _nodes(self) -> tuple[tuple[Node, ...], ...]:
        if not self.exact:
            return tuple((Node(0, rank),) for rank in range(self.world_size))
        return tuple(
            subtrees(slots_of(rank, self.world_size, self.num_slots), self.num_slots)
            for rank in range(self.world_size)
        )

    def num_regions(self, rank: int) -> int:
        """Return how many vectors a rank has per bucket; one at least, for the total."""
        return max(1, len(self._nodes[rank]))

    @cached_property
    def additions(self) -> tuple[tuple[Position, Position], ...]:
        """The order of additions: ``(into, other)``. The total ends in region 0 of rank 0."""
        positions = [
            (rank, region) for rank, nodes in enumerate(self._nodes) for region in range(len(nodes))
        ]
        nodes = [node for nodes in self._nodes for node in nodes]
        num_leaves = self.num_slots if self.exact else self.world_size
        return tuple((positions[i], positions[j]) for i, j in additions(nodes, num_leaves))

    def slice_of(self, bucket: Bucket, rank: int) -> slice:
        """Return the elements of a bucket that a rank adds."""
        unit = ALIGNMENT // bucket.dtype.itemsize
        num_units = math.ceil(bucket.num_elements / unit)
        start, stop = (num_units * r // self.world_size * unit for r in (rank, rank + 1))
        return slice(min(start, bucket.num_elements), min(stop, bucket.num_elements))

    def describe(self) -> str:
        """Return what must be alike on all ranks, as text to compare and to show."""
        dtypes = Counter(str(bucket.dtype).removeprefix("torch.") for bucket in self.buckets)
        shape = repr([(b.num_elements, str(b.dtype)) for b in self.buckets])
        return (
            f"{sum(b.num_elements for b in self.buckets)} elements in {len(self.buckets)} buckets "
            f"({', '.join(f'{n} {dtype}' for dtype, n in sorted(dtypes.items()))}; "
            f"digest {hashlib.sha256(shape.encode()).hexdigest()[:8]}), "
            f"{self.num_slots} slots, {'exact' if self.exact else 'fast'}"
        )


def make_layout(buckets: Sequence[Bucket], world_size: int, num_slots: int, exact: bool) -> Layout:
    """Return the layout of buckets, which must be numbered from 0 without a gap.

    Raises
    ------
    ValueError
        If they are not.
    """
    indices = [bucket.index for bucket in buckets]
    if indices != list(range(len(buckets))):
        raise ValueError(f"buckets must be numbered from 0 in order, not {indices}")
    return Layout(tuple(buckets), world_size, num_slots, exact)


def check_ready(bucket: int, num_ready: int) -> None:
    """Raise `UsageError` unless a bucket is the next one to announce."""
    if bucket != num_ready:
        raise UsageError(
            problem=f"bucket {bucket} is announced where {num_ready} is next",
            remedy="announce every bucket once per step, in ascending order",
        )


def check_wait(num_ready: int, num_buckets: int) -> None:
    """Raise `UsageError` unless every bucket is announced."""
    if num_ready != num_buckets:
        raise UsageError(
            problem=f"{num_ready} of {num_buckets} buckets are announced",
            remedy="announce every bucket before waiting",
        )
