"""Collectives of a world of threads in one process, for tests and simulated worlds."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from farandole.comm.layout import Layout, check_ready, check_wait, make_layout
from farandole.errors import FarandoleError, MismatchError, PeerLostError
from farandole.protocols import Bucket


@dataclass
class _Call:
    """One collective call: who has arrived, with what, and how it ended."""

    operations: dict[int, str] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    done: bool = False
    result: Any = None
    error: MismatchError | None = None


class _World:
    """What the ranks share: the calls in progress, and who has ended and why."""

    def __init__(self, size: int, timeout: timedelta) -> None:
        self.size = size
        self._timeout = timeout
        self._changed = threading.Condition()
        self._calls: dict[int, _Call] = {}
        self._ended: dict[int, str] = {}
        self._aborted: dict[int, str] = {}

    def meet(
        self,
        rank: int,
        sequence: int,
        operation: str,
        value: Any,
        finish: Callable[[list[Any]], Any],
    ) -> Any:
        """Wait until all ranks are in the call; the last one computes everyone's result."""
        with self._changed:
            if rank in self._ended:
                reason = self._aborted.get(rank, "this rank has closed its connections")
                raise PeerLostError(rank=rank, peer=None, during=operation, reason=reason)
            call = self._calls.setdefault(sequence, _Call())
            call.operations[rank] = operation
            call.values[rank] = value
            self._compare(call, rank)
            if len(call.values) == self.size and call.error is None:
                call.result = finish([call.values[r] for r in range(self.size)])
                call.done = True
                del self._calls[sequence]
                self._changed.notify_all()
            deadline = time.monotonic() + self._timeout.total_seconds()
            while not call.done:
                error = self._failure(call, rank, operation, deadline)
                if error is not None:
                    self._end(rank, f"it gave up: {error}")
                    raise error
                self._changed.wait(deadline - time.monotonic())
            return call.result

    def end(self, rank: int, reason: str) -> None:
        """Let the peers miss a rank in every call that it has not arrived in."""
        with self._changed:
            self._end(rank, reason)

    def abort(self, rank: int, reason: str) -> None:
        """Make a rank's own calls fail, too."""
        with self._changed:
            self._aborted[rank] = reason
            self._end(rank, "the connection broke off")

    def _end(self, rank: int, reason: str) -> None:
        self._ended.setdefault(rank, reason)
        self._changed.notify_all()

    def _compare(self, call: _Call, rank: int) -> None:
        first, expected = next(iter(call.operations.items()))
        if call.operations[rank] != expected and call.error is None:
            call.error = MismatchError(
                what="what to exchange",
                rank=first,
                other_rank=rank,
                mine=expected,
                theirs=call.operations[rank],
            )
            self._changed.notify_all()

    def _failure(
        self, call: _Call, rank: int, operation: str, deadline: float
    ) -> FarandoleError | None:
        if call.error is not None:
            return copy.copy(call.error)
        missing = [r for r in range(self.size) if r not in call.values]
        lost = [r for r in self._ended if r in missing]  # the first to end comes first
        if rank in self._aborted:
            peer, reason = missing[0] if missing else None, self._aborted[rank]
        elif lost:
            peer, reason = lost[0], self._ended[lost[0]]
        elif time.monotonic() >= deadline:
            peer = missing[0]
            reason = f"it was silent for {self._timeout.total_seconds():g} s"
        else:
            return None
        return PeerLostError(rank=rank, peer=peer, during=operation, reason=reason)


def _add_all(layout: Layout, arenas: Sequence[list[list[torch.Tensor]]]) -> None:
    """Add all ranks' regions in the tree's order, and give the total to every rank."""
    for bucket in range(len(layout.buckets)):
        for (rank, region), (other_rank, other_region) in layout.additions:
            arenas[rank][bucket][region].add_(arenas[other_rank][bucket][other_region])
        for arena in arenas[1:]:
            arena[bucket][0].copy_(arenas[0][bucket][0])


class InProcessReducer:
    """Adds in the thread of the rank that comes last. Made by `InProcessComm.reducer`."""

    def __init__(self, comm: InProcessComm, name: str, layout: Layout) -> None:
        self._comm = comm
        self._name = name
        self._layout = layout
        self._num_ready = 0
        self._regions = [
            [
                torch.zeros(bucket.num_elements, dtype=bucket.dtype, device=bucket.device)
                for _ in range(layout.num_regions(comm.rank))
            ]
            for bucket in layout.buckets
        ]

    def region(self, bucket: int, subtree: int) -> torch.Tensor:
        """Return the vector of a bucket for this rank's subtree of that position."""
        return self._regions[bucket][subtree]

    def put(self, bucket: int, subtree: int, offset: int, values: torch.Tensor) -> None:
        """Write values to a region from an element on."""
        self._regions[bucket][subtree][offset : offset + len(values)].copy_(values)

    def ready(self, bucket: int) -> None:
        """Announce a bucket."""
        check_ready(bucket, self._num_ready)
        self._num_ready += 1

    def wait(self, record: bytes = b"") -> list[bytes]:
        """Block until all totals are there; return every rank's record."""
        check_wait(self._num_ready, len(self._layout.buckets))
        self._num_ready = 0

        def finish(values: list[tuple[list[list[torch.Tensor]], bytes]]) -> list[bytes]:
            _add_all(self._layout, [regions for regions, _ in values])
            return [record for _, record in values]

        return list(self._comm.meet(self._name, (self._regions, record), finish))

    def close(self) -> None:
        """Free the memory."""
        self._regions = []


class InProcessComm:
    """One rank of a world of threads. Make all of them with `world`; use each in one thread."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._sequence = 0
        self._num_reducers = 0
        self._error: FarandoleError | None = None

    @classmethod
    def world(cls, size: int, *, timeout: timedelta = timedelta(seconds=60)) -> list[InProcessComm]:
        """Make the comms of all ranks. A rank missing in a call so long is lost."""
        world = _World(size, timeout)
        return [cls(world, rank) for rank in range(size)]

    @property
    def rank(self) -> int:
        """The rank of this worker."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return self._world.size

    def meet(self, operation: str, value: Any, finish: Callable[[list[Any]], Any]) -> Any:
        """Wait for all ranks to make the same call; return what `finish` makes of their values."""
        if self._error is not None:
            raise self._error
        self._sequence += 1
        try:
            return self._world.meet(self._rank, self._sequence, operation, value, finish)
        except FarandoleError as error:
            self._error = error
            raise

    def all_gather(self, tag: str, payload: bytes) -> list[bytes]:
        """Exchange small messages: return every rank's, by rank. Blocks."""
        return list(self.meet(f"all_gather {tag!r}", payload, lambda payloads: payloads))

    def broadcast(self, tag: str, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Overwrite `tensors` with those of rank `source`. Blocks."""
        shapes = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        operation = f"broadcast {tag!r} from rank {source} of {shapes}"

        def finish(values: list[Sequence[torch.Tensor]]) -> None:
            for rank, targets in enumerate(values):
                if rank != source:
                    for target, original in zip(targets, values[source], strict=True):
                        target.detach().copy_(original.detach())

        self.meet(operation, tensors, finish)

    def reducer(
        self, buckets: Sequence[Bucket], num_slots: int, *, exact: bool = True
    ) -> InProcessReducer:
        """Make a reducer for these buckets. Blocks; every rank must pass the same ones."""
        layout = make_layout(buckets, self.world_size, num_slots, exact)
        self.meet(f"reducer of {layout.describe()}", None, lambda _: None)
        self._num_reducers += 1
        return InProcessReducer(self, f"exchange of reducer {self._num_reducers - 1}", layout)

    def abort(self, reason: str) -> None:
        """Break the collectives: pending and later calls raise `PeerLostError`. From any thread."""
        self._world.abort(self._rank, reason)

    def kill(self) -> None:
        """Let the peers see what they would see if this worker's process had died."""
        self._world.end(self._rank, "its process ended")

    def close(self) -> None:
        """Leave. Peers that still wait for this rank get `PeerLostError`."""
        self._world.end(self._rank, "it left")
