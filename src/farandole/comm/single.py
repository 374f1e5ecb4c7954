"""Collectives of a world of one: no socket, no shared memory, nothing to wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.comm.layout import make_layout
from farandole.protocols import Bucket


class SingleReducer:
    """The sums of one worker: all slots fold into one subtree, which is the total."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._regions = [
            torch.zeros(bucket.num_elements, dtype=bucket.dtype, device=bucket.device)
            for bucket in buckets
        ]

    def region(self, bucket: int, subtree: int) -> torch.Tensor:
        """Return the vector of a bucket; `subtree` is 0."""
        if subtree != 0:
            raise IndexError(f"one worker holds one subtree, not {subtree + 1}")
        return self._regions[bucket]

    def put(self, bucket: int, subtree: int, offset: int, values: torch.Tensor) -> None:
        """Write values to a region from an element on."""
        self.region(bucket, subtree)[offset : offset + len(values)].copy_(values)

    def ready(self, bucket: int) -> None:
        """Do nothing: the region is the total."""

    def wait(self, record: bytes = b"") -> list[bytes]:
        """Return the record."""
        return [record]

    def close(self) -> None:
        """Free the memory."""
        self._regions = []


class SingleComm:
    """A world of one worker."""

    rank = 0
    world_size = 1

    def all_gather(self, tag: str, payload: bytes) -> list[bytes]:
        """Return the payload."""
        return [payload]

    def broadcast(self, tag: str, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Do nothing: the tensors are the source's."""

    def reducer(
        self, buckets: Sequence[Bucket], num_slots: int, *, exact: bool = True
    ) -> SingleReducer:
        """Make a reducer for these buckets; the order of additions is the caller's fold."""
        return SingleReducer(make_layout(buckets, 1, num_slots, exact).buckets)

    def abort(self, reason: str) -> None:
        """Do nothing: no call ever waits."""

    def close(self) -> None:
        """Do nothing."""
