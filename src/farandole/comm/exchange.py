"""Ways to add buckets over a torch.distributed process group.

Each splits the work in two: `start` sends what it can without waiting, `finish` waits for the
rest. Errors are the backend's own (RuntimeError).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from farandole.comm.layout import ALIGNMENT, Layout
from farandole.protocols import Bucket


class Exchange(Protocol):
    """Holds a rank's regions and turns them into totals, once per step."""

    def region(self, bucket: int, subtree: int) -> torch.Tensor:
        """Return the vector of a bucket for this rank's subtree of that position."""
        ...

    def start(self, bucket: int) -> None:
        """Begin to exchange a bucket whose regions are written. Buckets come in order."""
        ...

    def finish(self) -> None:
        """Block until region 0 of every bucket holds the total."""
        ...

    def close(self) -> None:
        """Free the memory."""
        ...


class PointToPoint:
    """Exact, by plain messages: every rank gets its slice of all subtrees, and sends its sum.

    As many bytes cross the wire as in a ring all-reduce where each rank holds one subtree.
    Slices are sent from and received into the regions themselves.

    Parameters
    ----------
    group : ProcessGroup
        Gloo: its messages are matched by tag and need no thread of their own.
    layout : Layout
        Of the buckets.
    rank : int
        This rank.
    first_tag : int
        Two tags per bucket are used from here on; no one else may use them on the group.
    """

    def __init__(self, group: Any, layout: Layout, rank: int, first_tag: int) -> None:
        self._layout = layout
        self._buckets = [
            _PeerBucket(group, layout, bucket, rank, first_tag + 2 * bucket.index)
            for bucket in layout.buckets
        ]

    def region(self, bucket: int, subtree: int) -> torch.Tensor:
        """Return the vector of a bucket for this rank's subtree of that position."""
        return self._buckets[bucket].regions[subtree]

    def start(self, bucket: int) -> None:
        """Send the peers their slices of a bucket, and expect theirs."""
        self._buckets[bucket].start()

    def finish(self) -> None:
        """Add this rank's slices, send the sums, and wait for the peers'."""
        for bucket in self._buckets:
            bucket.add()
        for bucket in self._buckets:
            bucket.finish()

    def close(self) -> None:
        """Free the memory."""
        self._buckets = []


class _PeerBucket:
    """One bucket of `PointToPoint`."""

    def __init__(self, group: Any, layout: Layout, bucket: Bucket, rank: int, tag: int) -> None:
        self._group = group
        self._tag = tag
        self.regions = _zeros(layout.num_regions(rank), bucket.num_elements, bucket)
        slices = [layout.slice_of(bucket, peer) for peer in range(layout.world_size)]
        self._peers = [peer for peer in range(layout.world_size) if peer != rank]
        self._theirs = {peer: [r[slices[peer]] for r in self.regions] for peer in self._peers}
        size = slices[rank].stop - slices[rank].start
        self._mine = {peer: _zeros(layout.num_regions(peer), size, bucket) for peer in self._peers}
        self._mine[rank] = [region[slices[rank]] for region in self.regions]
        self._total = self._mine[rank][0]
        self._additions = [
            (self._mine[i[0]][i[1]], self._mine[j[0]][j[1]]) for i, j in layout.additions
        ]
        self._first = self._mine[0][0]
        self._sends: list[Any] = []
        self._receipts: list[Any] = []
        self._totals: list[Any] = []

    def start(self) -> None:
        """Expect everything, then send the peers their slices."""
        for peer in self._peers:
            self._receipts += self._receive(peer, self._mine[peer], self._tag)
            self._totals += self._receive(peer, self._theirs[peer][:1], self._tag + 1)
        for peer in self._peers:
            self._sends += self._send(peer, self._theirs[peer], self._tag)

    def add(self) -> None:
        """Add this rank's slice of all subtrees, and send the sum to all."""
        _wait_all(self._receipts)
        for into, other in self._additions:
            into.add_(other)
        if self._total is not self._first:
            self._total.copy_(self._first)
        for peer in self._peers:
            self._sends += self._send(peer, [self._total], self._tag + 1)

    def finish(self) -> None:
        """Wait for the peers' sums."""
        _wait_all(self._totals)
        _wait_all(self._sends)

    def _send(self, peer: int, vectors: list[torch.Tensor], tag: int) -> list[Any]:
        return [self._group.send([v], peer, tag) for v in vectors if v.numel()]

    def _receive(self, peer: int, vectors: list[torch.Tensor], tag: int) -> list[Any]:
        return [self._group.recv([v], peer, tag) for v in vectors if v.numel()]


class Collectives:
    """Exact, by all-to-all and all-gather, issued at once in the order of buckets.

    For NCCL, whose calls are put on a stream: nothing waits on the host.

    Parameters
    ----------
    group : ProcessGroup
        NCCL's.
    layout : Layout
        Of the buckets.
    rank : int
        This rank.
    """

    def __init__(self, group: Any, layout: Layout, rank: int) -> None:
        self._group = group
        self._layout = layout
        self._num_regions = [layout.num_regions(r) for r in range(layout.world_size)]
        self._starts = [sum(self._num_regions[:r]) for r in range(layout.world_size)]
        self._rank = rank
        self._storage = [self._make_storage(bucket) for bucket in layout.buckets]
        self._works: list[Any] = []

    def region(self, bucket: int, subtree: int) -> torch.Tensor:
        """Return the vector of a bucket for this rank's subtree of that position."""
        size = self._layout.buckets[bucket].num_elements
        return self._storage[bucket][subtree].view(-1)[:size]

    def start(self, bucket: int) -> None:
        """Exchange a bucket; the totals are there once the stream gets so far."""
        storage = self._storage[bucket]
        size = storage.shape[2]
        sent = storage.transpose(0, 1).contiguous()
        received = storage.new_empty(sum(self._num_regions), size)
        num_rows = [self._num_regions[self._rank]] * self._layout.world_size
        self._group.alltoall_base(
            received, sent.view(-1, size), self._num_regions, num_rows, dist.AllToAllOptions()
        ).wait()
        for (i, region), (j, other) in self._layout.additions:
            received[self._starts[i] + region].add_(received[self._starts[j] + other])
        self._works.append(self._group._allgather_base(storage[0].view(-1), received[0]))

    def finish(self) -> None:
        """Let what follows on the stream see the totals."""
        _wait_all(self._works)

    def close(self) -> None:
        """Free the memory."""
        self._storage = []

    def _make_storage(self, bucket: Bucket) -> torch.Tensor:
        """Return room for all regions, each cut into equal slices: (regions, ranks, size)."""
        unit = ALIGNMENT // bucket.dtype.itemsize
        size = -(-bucket.num_elements // (unit * self._layout.world_size)) * unit
        shape = self._num_regions[self._rank], self._layout.world_size, size
        return torch.zeros(shape, dtype=bucket.dtype, device=bucket.device)


class AllReduce:
    """Fast: the backend's own all-reduce, in the order of buckets.

    Parameters
    ----------
    group : ProcessGroup
        Any.
    layout : Layout
        Of the buckets, with one region each.
    """

    def __init__(self, group: Any, layout: Layout) -> None:
        self._group = group
        self._regions = [_zeros(1, bucket.num_elements, bucket)[0] for bucket in layout.buckets]
        self._works: list[Any] = []

    def region(self, bucket: int, subtree: int) -> torch.Tensor:
        """Return the vector of a bucket; `subtree` is 0."""
        if subtree != 0:
            raise IndexError(f"a rank has one region, not {subtree + 1}")
        return self._regions[bucket]

    def start(self, bucket: int) -> None:
        """Start the all-reduce of a bucket."""
        self._works.append(self._group.allreduce([self._regions[bucket]]))

    def finish(self) -> None:
        """Wait for all."""
        _wait_all(self._works)

    def close(self) -> None:
        """Free the memory."""
        self._regions = []


def _zeros(count: int, size: int, bucket: Bucket) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=bucket.dtype, device=bucket.device) for _ in range(count)]


def _wait_all(works: list[Any]) -> None:
    """Wait for works in order, and forget them."""
    for work in works:
        work.wait()
    works.clear()
