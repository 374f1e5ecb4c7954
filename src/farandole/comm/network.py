"""Collectives between hosts, over torch.distributed: Gloo, and NCCL for what lies on GPUs.

Process groups are built directly: nothing here is global to the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from farandole.comm.exchange import AllReduce, Collectives, Exchange, PointToPoint
from farandole.comm.layout import Layout, check_ready, check_wait, make_layout
from farandole.errors import FarandoleError, MismatchError, PeerLostError, UsageError
from farandole.protocols import Bucket

_Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
_PrefixStore = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]

T = TypeVar("T")

_LENGTHS = struct.Struct("<II")
"""Bytes of an operation's name, and of the payload after it."""

_SHORT_BYTES = 1024
"""What every rank sends of a message at once; longer ones take a second round."""


class _Sockets:
    """The sockets of a Gloo device, by which a stuck group can be freed.

    Gloo tells only the ring neighbours of a dead peer. Ending this rank's connections tells
    everyone who waits for it, and frees its own calls.
    """

    def __init__(self, hostname: str) -> None:
        before = set(_sockets())
        self.device = dist.ProcessGroupGloo.create_device(hostname=hostname)
        self.port = next(
            sock.getsockname()[1]
            for fd in set(_sockets()) - before
            for sock in _duplicates([fd])
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        )
        self._connected: list[socket.socket] = []
        _open_sockets.add(self)

    def find(self, ports: Sequence[int]) -> None:
        """Keep hold of all connections between this port and the peers' `ports`."""
        known = self._connected
        # Not `sock.dup()`: that would make the connection block, for Gloo's thread as well.
        self._connected = [
            socket.socket(fileno=os.dup(sock.fileno()))
            for sock in _duplicates(_sockets())
            if self._is_ours(sock, ports)
        ]
        for sock in known:
            sock.close()

    def shut_down(self) -> None:
        """End all connections. May be called from any thread, and more than once."""
        for sock in self._connected:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the descriptors."""
        for sock in self._connected:
            sock.close()
        self._connected = []

    def drop_in_child(self) -> None:
        """Close a forked child's copies, Gloo's own too: they would hide its parent's death."""
        inodes = {os.fstat(sock.fileno()).st_ino for sock in self._connected}
        for fd in _sockets():
            if os.fstat(fd).st_ino in inodes:
                os.close(fd)
        for sock in self._connected:
            sock.detach()
        self._connected = []

    def _is_ours(self, sock: socket.socket, ports: Sequence[int]) -> bool:
        """Never say so of the listening socket: Gloo ends the process when that one fails."""
        try:
            peer_port = sock.getpeername()[1]
            return sock.getsockname()[1] == self.port or peer_port in ports
        except (OSError, IndexError):
            return False  # not connected, or no address with a port


def _sockets() -> list[int]:
    """Return the descriptors of all sockets of this process."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith("socket:"):
                found.append(int(link.name))
    return found


def _duplicates(fds: Sequence[int]) -> Iterator[socket.socket]:
    """Yield a socket object per descriptor, one at a time, each closed after its turn."""
    for fd in fds:
        try:
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue  # closed meanwhile
        with sock:
            yield sock


_open_sockets: weakref.WeakSet[_Sockets] = weakref.WeakSet()


def _drop_in_child() -> None:
    for sockets in list(_open_sockets):
        sockets.drop_in_child()


os.register_at_fork(after_in_child=_drop_in_child)


class _Gather:
    """An exchange of one message per rank, named by its operation; begun at once."""

    def __init__(self, group: Any, rank: int, world_size: int, name: str, payload: bytes) -> None:
        self._group = group
        self._rank = rank
        self._world_size = world_size
        self._name = name.encode()
        self._message = _LENGTHS.pack(len(self._name), len(payload)) + self._name + payload
        self._received, self._work = self._start(self._message[:_SHORT_BYTES], _SHORT_BYTES)

    def finish(self) -> list[bytes]:
        """Block until all messages are there; return the payloads by rank.

        Raises
        ------
        MismatchError
            If a rank's operation is another one.
        RuntimeError
            If the backend fails.
        """
        self._work.wait()
        messages = self._rows()
        sizes = [_LENGTHS.size + sum(_LENGTHS.unpack_from(message)) for message in messages]
        if max(sizes) > _SHORT_BYTES:
            self._received, self._work = self._start(self._message, max(sizes))
            self._work.wait()
            messages = self._rows()
        payloads = []
        for rank, (message, size) in enumerate(zip(messages, sizes, strict=True)):
            start = _LENGTHS.size + _LENGTHS.unpack_from(message)[0]
            name = message[_LENGTHS.size : start]
            if name != self._name:
                raise MismatchError(
                    what="what to exchange",
                    rank=self._rank,
                    other_rank=rank,
                    mine=self._name.decode(),
                    theirs=name.decode(),
                )
            payloads.append(message[start:size])
        return payloads

    def _start(self, data: bytes, size: int) -> tuple[torch.Tensor, Any]:
        sent = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        received = torch.empty(self._world_size * size, dtype=torch.uint8)
        return received, self._group._allgather_base(received, sent)

    def _rows(self) -> list[bytes]:
        return [row.numpy().tobytes() for row in self._received.view(self._world_size, -1)]


class NetworkReducer:
    """Adds over the network; the first half of the traffic overlaps what follows `ready`.

    Made by `NetworkComm.reducer`.
    """

    def __init__(self, comm: NetworkComm, name: str, exchange: Exchange, num_buckets: int) -> None:
        self._comm = comm
        self._name = name
        self._exchange = exchange
        self._num_buckets = num_buckets
        self._num_ready = 0

    def region(self, bucket: int, subtree: int) -> torch.Tensor:
        """Return the vector of a bucket for this rank's subtree of that position."""
        return self._exchange.region(bucket, subtree)

    def put(self, bucket: int, subtree: int, offset: int, values: torch.Tensor) -> None:
        """Write values to a region from an element on."""
        self.region(bucket, subtree)[offset : offset + len(values)].copy_(values)

    def ready(self, bucket: int) -> None:
        """Announce a bucket and start to send it. Does not wait."""
        check_ready(bucket, self._num_ready)
        self._num_ready += 1
        self._comm.run(self._name, lambda: self._exchange.start(bucket))

    def wait(self, record: bytes = b"") -> list[bytes]:
        """Block until all totals are there; return every rank's record."""
        check_wait(self._num_ready, self._num_buckets)
        # Records first: a rank that does something else is found before buckets are missed.
        records = self._comm.gather(self._name, record)
        self._comm.run(self._name, self._exchange.finish)
        self._num_ready = 0
        return records

    def close(self) -> None:
        """Free the memory."""
        self._exchange.close()


class NetworkComm:
    """A world of workers on any hosts. Use `connect`."""

    def __init__(
        self,
        store: _Store,
        generation: int,
        sockets: _Sockets,
        *,
        rank: int,
        world_size: int,
        backend: str,
        timeout: timedelta,
    ) -> None:
        # A store written in Python works only as long as its Python object lives.
        self._given_store = store
        self._store = _PrefixStore(f"generation-{generation}", store)
        self._sockets = sockets
        self._rank = rank
        self._world_size = world_size
        self._backend = backend
        self._timeout = timeout
        self._error: FarandoleError | None = None
        self._reason: str | None = None
        self._num_reducers = 0
        self._num_tags = 0
        self._groups: dict[str, Any] = {}

    @classmethod
    def connect(
        cls,
        store: _Store,
        *,
        rank: int,
        world_size: int,
        generation: int,
        backend: str = "gloo",
        hostname: str = "127.0.0.1",
        timeout: timedelta,
    ) -> NetworkComm:
        """Connect with all peers. Blocks; every rank must call it.

        Parameters
        ----------
        store : torch.distributed.Store
            Where the ranks find each other's addresses.
        rank, world_size : int
            This rank, and how many there are.
        generation : int
            Number of the membership: keys of another one are not seen.
        backend : {"gloo", "nccl"}
            What carries the buckets that lie on GPUs; all else goes over Gloo.
        hostname : str
            Address of the interface to use on this host.
        timeout : timedelta
            For connecting, and afterwards for every wait for a silent peer.

        Raises
        ------
        PeerLostError
            If the ranks do not find each other within the timeout.
        UsageError
            If this build of torch does not have the backend.
        """
        if backend == "nccl" and not dist.is_nccl_available():
            raise UsageError(
                problem="this build of torch has no NCCL", remedy="use backend = 'gloo'"
            )
        comm = cls(
            store,
            generation,
            _Sockets(hostname),
            rank=rank,
            world_size=world_size,
            backend=backend,
            timeout=timeout,
        )
        try:
            comm._group("control")
        except BaseException:
            comm.close()
            raise
        return comm

    @property
    def rank(self) -> int:
        """The rank of this worker."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return self._world_size

    def all_gather(self, tag: str, payload: bytes) -> list[bytes]:
        """Exchange small messages: return every rank's, by rank. Blocks."""
        return self.gather(f"all_gather {tag!r}", payload)

    def broadcast(self, tag: str, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Overwrite `tensors` (on any device) with those of rank `source`. Blocks."""
        shapes = repr([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])
        digest = hashlib.sha256(shapes.encode()).hexdigest()[:8]
        name = f"broadcast {tag!r} of {len(tensors)} tensors from rank {source} (shapes {digest})"
        self.gather(name, b"")
        with torch.no_grad():
            for tensor in tensors:
                staged = tensor.detach().cpu().contiguous().clone().view(-1)
                self.run(name, lambda staged=staged: self._broadcast(staged, source))
                if self._rank != source:
                    tensor.copy_(staged.view(tensor.shape))

    def reducer(
        self, buckets: Sequence[Bucket], num_slots: int, *, exact: bool = True
    ) -> NetworkReducer:
        """Make a reducer for these buckets. Blocks; every rank must pass the same ones.

        Raises
        ------
        UsageError
            If the buckets lie on several kinds of devices, or on one that the backend
            cannot reach.
        MismatchError
            If the ranks pass other buckets or slots.
        """
        layout = make_layout(buckets, self._world_size, num_slots, exact)
        kind = self._device_type(buckets)
        self.gather(f"reducer of {layout.describe()} on {kind}", b"")
        exchange = self._exchange(layout, kind)
        name = f"exchange of reducer {self._num_reducers}"
        self._num_reducers += 1
        return NetworkReducer(self, name, exchange, len(layout.buckets))

    def abort(self, reason: str) -> None:
        """End the connections: pending and later calls raise `PeerLostError`. From any thread."""
        self._reason = reason
        self._sockets.shut_down()
        if "nccl" in self._groups:
            self._groups["nccl"].abort()

    def close(self) -> None:
        """Leave. Peers that still wait for this rank get `PeerLostError`."""
        if self._reason is None:
            self.abort("this rank has closed its connections")
        self._groups.clear()
        self._sockets.close()

    # --- for reducers ---------------------------------------------------------------------

    def gather(self, name: str, payload: bytes) -> list[bytes]:
        """Exchange a message per rank, all in the operation `name`. Blocks."""
        group = self._groups.get("control")
        return self.run(
            name, lambda: _Gather(group, self._rank, self._world_size, name, payload).finish()
        )

    def run(self, name: str, action: Callable[[], T]) -> T:
        """Do something with the backend; a failure breaks the comm and frees the peers."""
        if self._error is not None:
            raise self._error
        try:
            if self._reason is not None:
                raise ConnectionAbortedError(self._reason)
            return action()
        except MismatchError as error:
            self._error = error
            raise
        except (RuntimeError, OSError) as error:
            reason = self._reason or str(error).splitlines()[0]
            self._error = PeerLostError(rank=self._rank, peer=None, during=name, reason=reason)
            self.abort(reason)
            raise self._error from error

    # --- groups ---------------------------------------------------------------------------

    def _exchange(self, layout: Layout, kind: str) -> Exchange:
        if kind == "cuda":
            group = self._group("nccl")
            return (
                Collectives(group, layout, self._rank) if layout.exact else AllReduce(group, layout)
            )
        if not layout.exact:
            return AllReduce(self._group("all-reduce"), layout)
        first_tag = self._num_tags
        self._num_tags += 2 * len(layout.buckets)
        return PointToPoint(self._group("control"), layout, self._rank, first_tag)

    def _device_type(self, buckets: Sequence[Bucket]) -> str:
        kinds = sorted({bucket.device.type for bucket in buckets}) or ["cpu"]
        if len(kinds) > 1:
            raise UsageError(
                problem=f"one reducer cannot hold buckets on {' and '.join(kinds)}",
                remedy="make one per kind of device",
            )
        reachable = ("cpu", "cuda") if self._backend == "nccl" else ("cpu",)
        if kinds[0] not in reachable:
            raise UsageError(
                problem=f"the {self._backend} backend cannot exchange buckets on {kinds[0]}",
                remedy="exchange a copy on the CPU, or use backend = 'nccl' for GPUs",
            )
        return kinds[0]

    def _group(self, name: str) -> Any:
        """Return a process group, made at its first use. Blocks then; every rank must call."""
        if name not in self._groups:
            make = self._make_nccl if name == "nccl" else self._make_gloo
            self._groups[name] = self.run("connect", lambda: make(name))
        return self._groups[name]

    def _make_nccl(self, name: str) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        store = _PrefixStore(name, self._store)
        return dist.ProcessGroupNCCL(store, self._rank, self._world_size, options)

    def _make_gloo(self, name: str) -> Any:
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [self._sockets.device]
        options._timeout = self._timeout
        store = _PrefixStore(name, self._store)
        group = dist.ProcessGroupGloo(store, self._rank, self._world_size, options)
        port = str(self._sockets.port).encode()
        ports = _Gather(group, self._rank, self._world_size, f"ports of {name}", port).finish()
        self._sockets.find([int(port) for port in ports])
        return group

    def _broadcast(self, vector: torch.Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        if vector.numel():
            self._groups["control"].broadcast([vector.view(torch.uint8)], options).wait()
