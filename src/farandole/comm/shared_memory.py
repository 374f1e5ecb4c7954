"""Collectives between workers on one host, through memory that they share.

Every rank has an arena: anonymous memory, whose descriptor it passes to its peers. Gradients
live there, and each rank adds its own slice of everyone's in the tree's order, in place. The
sockets carry only small messages: which buckets are written, and who is done.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch

from farandole.comm.layout import ALIGNMENT, Layout, check_ready, check_wait, make_layout
from farandole.comm.mesh import Mesh
from farandole.comm.rendezvous import Listener, connect_all
from farandole.errors import UsageError
from farandole.protocols import Bucket

_CHUNK_BYTES = 1 << 18
"""What is added at a time: both operands fit in a core's cache."""

Shape = tuple[torch.dtype, int]
"""Dtype and number of elements of one vector."""


def _padded(shape: Shape) -> int:
    dtype, size = shape
    return -(-size * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _create_memory(shapes: Sequence[Shape]) -> int:
    """Return a descriptor of zeroed memory for vectors; it has no name.

    Raises
    ------
    OSError
        If there is not so much memory. It is taken now: else its lack would show as a crash
        at the first write.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("farandole")
    else:
        fd, path = tempfile.mkstemp()
        Path(path).unlink()
    try:
        os.posix_fallocate(fd, 0, max(ALIGNMENT, sum(map(_padded, shapes))))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _map_vectors(fd: int, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """Return the vectors in a memory, one after another. It stays mapped as long as they live."""
    memory = mmap.mmap(fd, 0)
    vectors, offset = [], 0
    for dtype, size in shapes:
        if size:
            vectors.append(torch.frombuffer(memory, dtype=dtype, count=size, offset=offset))
        else:
            vectors.append(torch.empty(0, dtype=dtype))
        offset += _padded((dtype, size))
    return vectors


class _Work:
    """A rank's share of one bucket: its slice of all regions, cut into chunks."""

    def __init__(self, layout: Layout, bucket: Bucket, rank: int, regions: _Regions) -> None:
        self._mine = layout.slice_of(bucket, rank)
        self._regions = regions[rank]
        self._lent: list[tuple[int, int, torch.Tensor]] = []
        size = _CHUNK_BYTES // bucket.dtype.itemsize
        self._chunks = [
            slice(start, min(start + size, self._mine.stop))
            for start in range(self._mine.start, self._mine.stop, size)
        ]
        self._additions = [
            [(regions[i[0]][i[1]][chunk], regions[j[0]][j[1]][chunk]) for i, j in layout.additions]
            for chunk in self._chunks
        ]
        self._copies = [
            (regions[0][0][chunk], [regions[r][0][chunk] for r in range(1, layout.world_size)])
            for chunk in self._chunks
        ]

    def put(self, subtree: int, offset: int, values: torch.Tensor) -> None:
        """Copy what the peers add; what this rank adds itself is taken from `values` then."""
        stop = offset + len(values)
        begin = min(max(self._mine.start, offset), stop)
        end = max(min(self._mine.stop, stop), begin)
        if (end - begin) * values.itemsize < _CHUNK_BYTES:
            begin = end = stop
        region = self._regions[subtree]
        region[offset:begin].copy_(values[: begin - offset])
        region[end:stop].copy_(values[end - offset :])
        if begin < end:
            self._lent.append((subtree, begin, values[begin - offset : end - offset]))

    def do(self) -> None:
        """Add every chunk in the tree's order, and give the total to every rank."""
        for chunk, additions, (total, others) in zip(
            self._chunks, self._additions, self._copies, strict=True
        ):
            for subtree, begin, values in self._lent:
                first, stop = max(chunk.start, begin), min(chunk.stop, begin + len(values))
                if first < stop:
                    part = values[first - begin : stop - begin]
                    self._regions[subtree][first:stop].copy_(part)
            for into, other in additions:
                into.add_(other)
            for other in others:
                other.copy_(total)
        self._lent.clear()


_Regions = list[list[torch.Tensor]]
"""One bucket's vectors, by rank and region."""


class SharedMemoryReducer:
    """Adds in place, in shared memory; no thread: `ready` and `wait` do this rank's share.

    Made by `SharedMemoryComm.reducer`. In every step each rank sends, per bucket, that its
    regions are written, and at last that its share of all buckets is added.
    """

    def __init__(self, mesh: Mesh, name: str, layout: Layout, fds: Sequence[int]) -> None:
        self._mesh = mesh
        self._name = name.encode()
        self._num_buckets = len(layout.buckets)
        arenas = [_arena_regions(layout, rank, fds[rank]) for rank in range(layout.world_size)]
        self._regions = arenas[mesh.rank]
        self._work = [
            _Work(layout, bucket, mesh.rank, [arena[bucket.index] for arena in arenas])
            for bucket in layout.buckets
        ]
        self._start_step()

    def region(self, bucket: int, subtree: int) -> torch.Tensor:
        """Return the vector of a bucket for this rank's subtree of that position."""
        return self._regions[bucket][subtree]

    def put(self, bucket: int, subtree: int, offset: int, values: torch.Tensor) -> None:
        """Give some of a region's values; those that this rank adds itself are read later."""
        self._work[bucket].put(subtree, offset, values)

    def ready(self, bucket: int) -> None:
        """Announce a bucket, and add whatever is complete on all ranks. Does not wait."""
        check_ready(bucket, self._num_ready)
        if bucket == 0:
            self._mesh.begin(self._name)
        self._num_ready += 1
        self._mesh.send(self._num_ready)
        self._mesh.poll()
        self._advance()

    def wait(self, record: bytes = b"") -> list[bytes]:
        """Block until all totals are there; return every rank's record."""
        check_wait(self._num_ready, self._num_buckets)
        if self._num_buckets == 0:
            self._mesh.begin(self._name)
        while self._num_added < self._num_buckets:
            self._mesh.wait(min(self._peer_ready, key=lambda peer: self._peer_ready[peer]))
            self._advance()
        self._records[self._mesh.rank] = record
        self._mesh.send(self._num_buckets + 1, record)
        self._advance()
        while self._mesh.unsent or len(self._records) <= len(self._mesh.peers):
            missing = (peer for peer in self._mesh.peers if peer not in self._records)
            self._mesh.wait(next(missing, None))
            self._advance()
        records = [self._records[rank] for rank in range(len(self._records))]
        self._start_step()
        return records

    def close(self) -> None:
        """Let go of the memory; it is freed when no tensor uses it any more."""
        self._regions = []
        self._work = []

    def _start_step(self) -> None:
        self._num_ready = 0
        self._num_added = 0
        self._peer_ready = dict.fromkeys(self._mesh.peers, 0)
        self._records: dict[int, bytes] = {}

    def _advance(self) -> None:
        """Take in what the peers said, and add the buckets that are complete."""
        for peer in self._mesh.peers:
            # A peer that is done may have begun the next operation: leave that unread.
            while peer not in self._records and (message := self._mesh.take(peer)) is not None:
                if message.number <= self._num_buckets:
                    self._peer_ready[peer] = message.number
                else:
                    self._records[peer] = message.payload
        num_complete = min((self._num_ready, *self._peer_ready.values()))
        while self._num_added < num_complete:
            self._work[self._num_added].do()
            self._num_added += 1


def _arena_regions(layout: Layout, rank: int, fd: int) -> _Regions:
    """Return a rank's vectors, by bucket and region."""
    count = layout.num_regions(rank)
    shapes = _arena_shapes(layout, rank)
    vectors = _map_vectors(fd, shapes)
    return [vectors[i : i + count] for i in range(0, len(vectors), count)]


def _arena_shapes(layout: Layout, rank: int) -> list[Shape]:
    return [
        (bucket.dtype, bucket.num_elements)
        for bucket in layout.buckets
        for _ in range(layout.num_regions(rank))
    ]


class SharedMemoryComm:
    """A world of two or more workers on one host. Use `listen`, then `connect`.

    Parameters
    ----------
    mesh : Mesh
        Connections with all peers; the comm owns it.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._num_reducers = 0

    @staticmethod
    def listen(directory: Path) -> Listener:
        """Bind a Unix socket in an existing directory; its address is for the other ranks.

        Raises
        ------
        OSError
            If the directory cannot hold a socket.
        """
        return Listener(directory)

    @classmethod
    def connect(
        cls,
        listener: Listener,
        *,
        rank: int,
        addresses: Sequence[str],
        secret: bytes,
        generation: int,
        timeout: timedelta,
    ) -> SharedMemoryComm:
        """Connect with all peers, and close the listener. Blocks; every rank must call it.

        Parameters
        ----------
        listener : Listener
            This rank's.
        rank : int
            This rank.
        addresses : sequence of str
            Every rank's listener's address, by rank.
        secret : bytes
            The job's.
        generation : int
            Number of the membership; workers of another one are refused.
        timeout : timedelta
            For connecting, and afterwards for every wait for a silent peer.

        Raises
        ------
        PeerLostError
            If a rank cannot be reached, or has not connected within the timeout.
        AuthenticationError
            If a peer does not know the secret, or is of another generation.
        """
        sockets = connect_all(
            listener,
            rank=rank,
            addresses=addresses,
            secret=secret,
            generation=generation,
            timeout=timeout,
        )
        return cls(Mesh(rank, sockets, timeout))

    @property
    def rank(self) -> int:
        """The rank of this worker."""
        return self._mesh.rank

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return len(self._mesh.peers) + 1

    def all_gather(self, tag: str, payload: bytes) -> list[bytes]:
        """Exchange small messages: return every rank's, by rank. Blocks."""
        self._mesh.begin(f"all_gather {tag!r}".encode())
        self._mesh.send(0, payload)
        payloads = {peer: message.payload for peer, message in self._mesh.collect().items()}
        payloads[self.rank] = payload
        return [payloads[rank] for rank in range(self.world_size)]

    def broadcast(self, tag: str, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Overwrite `tensors` (on any device) with those of rank `source`. Blocks."""
        shapes = [(tensor.dtype, tensor.numel()) for tensor in tensors]
        digest = hashlib.sha256(repr([(t.dtype, tuple(t.shape)) for t in tensors]).encode())
        self._mesh.begin(
            f"broadcast {tag!r} of {len(tensors)} tensors from rank {source} "
            f"(shapes {digest.hexdigest()[:8]})".encode()
        )
        if self.rank != source:
            self._mesh.send(0)
            fd = self._mesh.collect()[source].fd
            assert fd is not None
            with torch.no_grad():
                for tensor, vector in zip(tensors, _take_vectors(fd, shapes), strict=True):
                    tensor.copy_(vector.view(tensor.shape))
            return
        fd = _create_memory(shapes)
        try:
            with torch.no_grad():
                for tensor, vector in zip(tensors, _map_vectors(fd, shapes), strict=True):
                    vector.view(tensor.shape).copy_(tensor)
            self._mesh.send(0, fd=fd)
        finally:
            os.close(fd)
        self._mesh.collect()

    def reducer(
        self, buckets: Sequence[Bucket], num_slots: int, *, exact: bool = True
    ) -> SharedMemoryReducer:
        """Make a reducer for these buckets. Blocks; every rank must pass the same ones.

        Raises
        ------
        UsageError
            If a bucket is not in host memory.
        MismatchError
            If the ranks pass other buckets or slots.
        OSError
            If there is not enough memory.
        """
        for bucket in buckets:
            if bucket.device.type != "cpu":
                raise UsageError(
                    problem=f"shared memory cannot hold a bucket on {bucket.device}",
                    remedy="exchange a copy on the CPU, or use the network transport",
                )
        layout = make_layout(buckets, self.world_size, num_slots, exact)
        self._mesh.begin(f"reducer of {layout.describe()}".encode())
        fds = {self.rank: _create_memory(_arena_shapes(layout, self.rank))}
        try:
            self._mesh.send(0, fd=fds[self.rank])
            for peer, message in self._mesh.collect().items():
                assert message.fd is not None
                fds[peer] = message.fd
            name = f"exchange of reducer {self._num_reducers}"
            self._num_reducers += 1
            return SharedMemoryReducer(
                self._mesh, name, layout, [fds[rank] for rank in range(self.world_size)]
            )
        finally:
            for fd in fds.values():
                os.close(fd)

    def abort(self, reason: str) -> None:
        """Break the connections: pending and later calls raise `PeerLostError`. From any thread."""
        self._mesh.abort(reason)

    def close(self) -> None:
        """Leave. Peers that still wait for this rank get `PeerLostError`."""
        self._mesh.close()


def _take_vectors(fd: int, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """Map a memory, and close its descriptor."""
    try:
        return _map_vectors(fd, shapes)
    finally:
        os.close(fd)
