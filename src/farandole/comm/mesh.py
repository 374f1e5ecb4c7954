"""Messages between the workers of one host: a full mesh of Unix sockets, and its failures.

A peer's messages are read in the order in which it sent them, each labelled with the
operation that it belongs to. So a rank that does something else is found by whoever hears
from it, and a rank that ended is missed by whoever still needs a message from it, but not by
those who have all they need.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

from farandole.errors import FarandoleError, MismatchError, PeerLostError

_HEADER = struct.Struct("<BIIII")
"""Kind, sequence, number, bytes of the operation's name, bytes of the payload."""

_MESSAGE, _MESSAGE_WITH_FD, _LEFT, _FAILED = range(4)
_READ_BYTES = 1 << 16
_FD_SPACE = socket.CMSG_SPACE(struct.calcsize("i"))
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

DIED = "the connection broke off: its process ended"
LEFT = "it left"


class Message(NamedTuple):
    """A peer's message: part of one operation."""

    sequence: int
    number: int
    operation: bytes
    payload: bytes
    fd: int | None


class _Link:
    """The connection with one peer, what was read from it, and what is still to be sent."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        self.peer = peer
        self.sock = sock
        self.fd = sock.fileno()
        self.incoming = bytearray()
        self.fds: deque[int] = deque()
        self.messages: deque[Message] = deque()
        self.outgoing: deque[tuple[memoryview, int | None]] = deque()
        self.end: MismatchError | tuple[int, str] | None = None
        """Why nothing follows: the peer's own error, or who was lost and why."""

    def close(self) -> None:
        """Close the socket and every descriptor in transit."""
        self.sock.close()
        unread = [message.fd for message in self.messages if message.fd is not None]
        unsent = [fd for _, fd in self.outgoing if fd is not None]
        for fd in (*self.fds, *unread, *unsent):
            os.close(fd)
        self.fds.clear()
        self.messages.clear()
        self.outgoing.clear()


class Mesh:
    """Connected sockets to all other ranks. Not thread-safe, except `abort`.

    Parameters
    ----------
    rank : int
        This rank.
    sockets : mapping of int to socket
        A connected stream socket per other rank. The mesh owns them.
    timeout : timedelta
        A peer that is waited for and silent so long is lost.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], timeout: timedelta) -> None:
        self.rank = rank
        self.peers = sorted(sockets)
        self._timeout = timeout
        self._links = {peer: _Link(peer, sockets[peer]) for peer in self.peers}
        self._by_fd = {link.fd: link for link in self._links.values()}
        self._poller = select.poll()
        for link in self._links.values():
            link.sock.setblocking(False)
            self._poller.register(link.fd, select.POLLIN)
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._sequence = 0
        self._operation = b""
        self._error: FarandoleError | None = None
        self._abort_reason: str | None = None
        _open_meshes.add(self)

    # --- operations -----------------------------------------------------------------------

    def begin(self, operation: bytes) -> None:
        """Start the next operation; its name must be alike on all ranks."""
        if self._error is not None:
            raise self._error
        self._sequence += 1
        self._operation = operation
        if self._abort_reason is not None:
            self.fail(self._lost(None, self._abort_reason))

    def send(self, number: int, payload: bytes = b"", fd: int | None = None) -> None:
        """Send a message of the operation to every peer. Does not block.

        `fd` is passed along; the caller keeps its own.
        """
        kind = _MESSAGE if fd is None else _MESSAGE_WITH_FD
        sizes = len(self._operation), len(payload)
        header = _HEADER.pack(kind, self._sequence, number, *sizes)
        data = memoryview(header + self._operation + payload)
        for link in self._links.values():
            if link.end is None:
                link.outgoing.append((data, None if fd is None else os.dup(fd)))
                self._flush(link)

    def take(self, peer: int) -> Message | None:
        """Return the peer's next message of the operation, or None if none has arrived.

        Raises
        ------
        MismatchError
            If the message belongs to another operation.
        PeerLostError
            If no message can follow.
        """
        if self._error is not None:
            raise self._error
        link = self._links[peer]
        if not link.messages:
            if link.end is not None:
                self.fail(self._error_of(link.end))
            return None
        message = link.messages.popleft()
        if message.operation != self._operation or message.sequence != self._sequence:
            theirs = f"{message.operation.decode()} (call {message.sequence})"
            self.fail(
                MismatchError(
                    what="what to exchange",
                    rank=self.rank,
                    other_rank=peer,
                    mine=f"{self._operation.decode()} (call {self._sequence})",
                    theirs=theirs,
                )
            )
        return message

    def collect(self) -> dict[int, Message]:
        """Block until every peer has sent one message of the operation."""
        messages: dict[int, Message] = {}
        while True:
            for peer in self.peers:
                if peer not in messages and (message := self.take(peer)) is not None:
                    messages[peer] = message
            missing = next((peer for peer in self.peers if peer not in messages), None)
            if missing is None and not self.unsent:
                return messages
            self.wait(missing)

    @property
    def unsent(self) -> bool:
        """Whether a peer has not taken all that was sent to it."""
        return any(link.outgoing for link in self._links.values())

    def poll(self) -> None:
        """Read what has arrived and send what can be sent. Does not block."""
        self._handle(self._poller.poll(0))

    def wait(self, missing: int | None) -> None:
        """Block until something arrives or can be sent.

        Raises
        ------
        PeerLostError
            If nothing does within the timeout. It names `missing`, the peer waited for.
        """
        events = self._poller.poll(self._timeout.total_seconds() * 1e3)
        if not events:
            slow = next((peer for peer, link in self._links.items() if link.outgoing), None)
            silence = f"it was silent for {self._timeout.total_seconds():g} s"
            self.fail(self._lost(slow if missing is None else missing, silence))
        self._handle(events)

    # --- failures -------------------------------------------------------------------------

    def fail(self, error: FarandoleError) -> None:
        """Break the mesh, tell the peers why, and raise the error."""
        self._error = error
        if isinstance(error, MismatchError | PeerLostError):
            name = type(error).__name__
            self._tell(_FAILED, json.dumps({"error": name, "fields": error.fields()}).encode())
        raise error

    def abort(self, reason: str) -> None:
        """Make pending and later calls raise `PeerLostError`. Callable from any thread."""
        self._abort_reason = reason
        for link in self._links.values():
            try:
                link.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # already gone

    def close(self) -> None:
        """Say goodbye and close the sockets."""
        if self in _open_meshes:
            self._tell(_LEFT)
            self._drop()

    def _drop(self) -> None:
        _open_meshes.discard(self)
        self._abort_reason = self._abort_reason or "this rank has closed its connections"
        for link in self._links.values():
            if link.end is None:
                self._end(link, (link.peer, self._abort_reason))
            link.close()

    def _tell(self, kind: int, payload: bytes = b"") -> None:
        data = memoryview(_HEADER.pack(kind, self._sequence, 0, 0, len(payload)) + payload)
        for link in self._links.values():
            if link.end is None:
                link.outgoing.append((data, None))
                self._flush(link)

    def _lost(self, peer: int | None, reason: str) -> PeerLostError:
        during = self._operation.decode()
        return PeerLostError(rank=self.rank, peer=peer, during=during, reason=reason)

    def _error_of(self, end: MismatchError | tuple[int, str]) -> FarandoleError:
        if isinstance(end, MismatchError):
            return end
        return self._lost(*end)

    # --- sockets --------------------------------------------------------------------------

    def _handle(self, events: list[tuple[int, int]]) -> None:
        for fd, event in events:
            link = self._by_fd[fd]
            if event & select.POLLOUT:
                self._flush(link)
            if event & ~select.POLLOUT:
                self._read(link)

    def _flush(self, link: _Link) -> None:
        was_waiting = len(link.outgoing) > 1
        while link.outgoing:
            data, fd = link.outgoing[0]
            passed = [] if fd is None else [_rights(fd)]
            try:
                num_sent = link.sock.sendmsg([data], passed, _FLAGS)
            except BlockingIOError:
                break
            except OSError:
                # The peer is gone. What it sent before is still to be read, then its end.
                num_sent = len(data)
            if fd is not None:
                os.close(fd)
            if num_sent < len(data):
                link.outgoing[0] = (data[num_sent:], None)
            else:
                link.outgoing.popleft()
        if link.end is None and (link.outgoing or was_waiting):
            wanted = select.POLLOUT if link.outgoing else 0
            self._poller.modify(link.fd, select.POLLIN | wanted)

    def _read(self, link: _Link) -> None:
        try:
            num_bytes, ancillary, _, _ = link.sock.recvmsg_into(
                [self._buffer], _FD_SPACE, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            num_bytes, ancillary = 0, []
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                link.fds.extend(array.array("i", data))
        if num_bytes:
            link.incoming += self._buffer[:num_bytes]
            self._parse(link)
        else:
            self._end(link, (link.peer, self._abort_reason or DIED))

    def _parse(self, link: _Link) -> None:
        incoming, start = link.incoming, 0
        while link.end is None and len(incoming) - start >= _HEADER.size:
            kind, sequence, number, name_size, size = _HEADER.unpack_from(incoming, start)
            name_end = start + _HEADER.size + name_size
            if len(incoming) < name_end + size:
                break
            name = bytes(incoming[start + _HEADER.size : name_end])
            payload = bytes(incoming[name_end : name_end + size])
            start = name_end + size
            if kind == _LEFT:
                self._end(link, (link.peer, LEFT))
            elif kind == _FAILED:
                self._end(link, _read_failure(payload, self.rank, link.peer))
            else:
                fd = link.fds.popleft() if kind == _MESSAGE_WITH_FD else None
                link.messages.append(Message(sequence, number, name, payload, fd))
        del incoming[:start]

    def _end(self, link: _Link, end: MismatchError | tuple[int, str]) -> None:
        link.end = end
        for _, fd in link.outgoing:
            if fd is not None:
                os.close(fd)
        link.outgoing.clear()
        self._poller.unregister(link.fd)


def _rights(fd: int) -> tuple[int, int, array.array[int]]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd])


def _read_failure(payload: bytes, rank: int, sender: int) -> MismatchError | tuple[int, str]:
    """Return what a peer's failure means here: the rank that it lost is lost for us as well."""
    failure = json.loads(payload)
    fields = failure["fields"]
    if failure["error"] == MismatchError.__name__:
        return MismatchError(**fields)
    lost, reason = fields["peer"], fields["reason"]
    if lost is None or lost == rank:
        return sender, f"it gave up: {reason}"
    return lost, f"{reason} (noticed by rank {sender})"


_open_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _drop_in_child() -> None:
    """Close a forked child's copies of the sockets: they would hide its parent's death."""
    for mesh in list(_open_meshes):
        mesh._drop()


os.register_at_fork(after_in_child=_drop_in_child)
