"""How workers on one host connect: Unix sockets, each side proving that it knows the secret."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from farandole.errors import AuthenticationError, PeerLostError

_log = logging.getLogger(__name__)

_HELLO = struct.Struct("<4sI32s")
"""Magic, the caller's rank, its nonce."""

_MAGIC = b"fdl1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_STRANGER_TIMEOUT_S = 5.0
"""A caller that is accepted must prove itself within it, so that none can hold up the others."""


class Listener:
    """A Unix socket that peers connect to, in a file that only this user may open.

    Parameters
    ----------
    directory : Path
        An existing directory, on a file system that can hold sockets.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory.resolve() / f"{os.getpid()}-{secrets.token_hex(4)}.sock"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.alarm: int | None = None
        """A descriptor that makes a connect give up, with `PeerLostError`, once it can be read."""
        try:
            with _short_name(self._path) as name:
                self._sock.bind(name)
            self._path.chmod(0o600)
            self._sock.listen(socket.SOMAXCONN)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """What peers are told."""
        return str(self._path)

    @property
    def socket(self) -> socket.socket:
        """The listening socket."""
        return self._sock

    def abort(self) -> None:
        """Make a connect in progress raise `PeerLostError`. Callable from any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Remove the file and close the socket. May be called twice."""
        self._path.unlink(missing_ok=True)
        self._sock.close()


@contextlib.contextmanager
def _short_name(path: Path) -> Iterator[str]:
    """Name a socket file through its open directory: an address holds only 107 bytes."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def connect_all(
    listener: Listener,
    *,
    rank: int,
    addresses: Sequence[str],
    secret: bytes,
    generation: int,
    timeout: timedelta,
) -> dict[int, socket.socket]:
    """Connect with every other rank: call the lower ones, then accept the higher ones. Blocks.

    Every rank must call it. The listener is closed in any case.

    Raises
    ------
    PeerLostError
        If a rank cannot be reached, or has not connected within the timeout.
    AuthenticationError
        If a rank that was called does not know the secret, or is of another generation.
    """
    meeting = _Meeting(listener, rank, secret, generation, timeout)
    sockets: dict[int, socket.socket] = {}
    try:
        for peer in range(rank):
            sockets[peer] = meeting.call(peer, addresses[peer])
        missing = set(range(rank + 1, len(addresses)))
        while missing:
            peer, sock = meeting.accept(missing)
            sockets[peer] = sock
            missing.remove(peer)
    except BaseException:
        for sock in sockets.values():
            sock.close()
        raise
    finally:
        listener.close()
    return sockets


class _Meeting:
    """One rank's side of connecting a generation."""

    def __init__(
        self, listener: Listener, rank: int, secret: bytes, generation: int, timeout: timedelta
    ) -> None:
        self._listener = listener
        self._rank = rank
        self._secret = secret
        self._generation = generation
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout.total_seconds()

    def call(self, peer: int, address: str) -> socket.socket:
        """Connect with a lower rank."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short_name(Path(address)) as name:
                sock.connect(name)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            sock.sendall(_HELLO.pack(_MAGIC, self._rank, nonce))
            answer = self._read(sock, _NONCE_BYTES + _PROOF_BYTES, self._deadline)
            nonces = nonce + answer[:_NONCE_BYTES]
            expected = self._proof(b"accept", self._rank, peer, nonces)
            if not hmac.compare_digest(answer[_NONCE_BYTES:], expected):
                reason = "it does not know the job's secret, or is of another generation"
                raise AuthenticationError(peer=f"rank {peer}", reason=reason)
            sock.sendall(self._proof(b"call", self._rank, peer, nonces))
        except OSError as error:
            sock.close()
            raise self._lost(peer, error) from error
        except BaseException:
            sock.close()
            raise
        return sock

    def accept(self, missing: set[int]) -> tuple[int, socket.socket]:
        """Wait for one of the missing ranks to connect; refuse whoever is none of them."""
        while True:
            try:
                self._wait(self._listener.socket, self._deadline)
                sock, _ = self._listener.socket.accept()
            except OSError as error:
                raise self._lost(min(missing), error) from error
            deadline = min(self._deadline, time.monotonic() + _STRANGER_TIMEOUT_S)
            try:
                return self._check(sock, missing, deadline), sock
            except (OSError, AuthenticationError) as error:
                _log.warning("rank %d refused a connection: %s", self._rank, error)
                sock.close()
            except BaseException:
                sock.close()
                raise

    def _check(self, sock: socket.socket, missing: set[int], deadline: float) -> int:
        """Let a caller prove who it is; return its rank."""
        magic, peer, nonce = _HELLO.unpack(self._read(sock, _HELLO.size, deadline))
        if magic != _MAGIC or peer not in missing:
            reason = f"no worker of rank {peer} is expected"
            raise AuthenticationError(peer="a caller", reason=reason)
        mine = secrets.token_bytes(_NONCE_BYTES)
        nonces = nonce + mine
        sock.sendall(mine + self._proof(b"accept", peer, self._rank, nonces))
        proof = self._read(sock, _PROOF_BYTES, deadline)
        if not hmac.compare_digest(proof, self._proof(b"call", peer, self._rank, nonces)):
            reason = "it does not know the job's secret, or is of another generation"
            raise AuthenticationError(peer=f"a caller as rank {peer}", reason=reason)
        return peer

    def _proof(self, role: bytes, caller: int, accepter: int, nonces: bytes) -> bytes:
        text = b"%s %d %d %d " % (role, self._generation, caller, accepter)
        return hmac.digest(self._secret, text + nonces, "sha256")

    def _read(self, sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
        data = b""
        while len(data) < num_bytes:
            self._wait(sock, deadline)
            part = sock.recv(num_bytes - len(data))
            if not part:
                raise ConnectionError("it closed the connection")
            data += part
        return data

    def _wait(self, sock: socket.socket, deadline: float) -> None:
        """Block until a socket can be read; raise OSError past the deadline or on `abort`."""
        poller = select.poll()
        poller.register(self._listener.socket, 0)
        poller.register(sock, select.POLLIN)
        alarm = self._listener.alarm
        if alarm is not None:
            poller.register(alarm, select.POLLIN)
        events = dict(poller.poll(max(0.0, deadline - time.monotonic()) * 1e3))
        if events.get(self._listener.socket.fileno(), 0) & select.POLLHUP:
            raise ConnectionAbortedError("connecting was aborted")
        if alarm in events and sock.fileno() not in events:
            raise ConnectionAbortedError("another worker has ended, or the coordinator")
        if not events:
            seconds = self._timeout.total_seconds()
            raise TimeoutError(f"it has not connected within {seconds:g} s")

    def _lost(self, peer: int, error: OSError) -> PeerLostError:
        reason = error.strerror or str(error)
        return PeerLostError(rank=self._rank, peer=peer, during="connect", reason=reason)
