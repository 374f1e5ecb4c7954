"""How members and their coordinator talk: authenticated, versioned, bounded in size and time.

A connection opens with a mutual challenge-response over the job's secret, in messages of fixed
size, so that nothing of a stranger is ever parsed::

    client -> server   magic, version, nonce
    server -> client   magic, version, nonce          (closes if it speaks another version)
    client -> server   HMAC(secret, client | nonces)
    server -> client   HMAC(secret, server | nonces)  (zeros if the client's is wrong)

After that each message is a JSON object, preceded by its length as four bytes. Bytes inside it
are base64. The client's side blocks; the server's is asyncio.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from farandole.errors import AuthenticationError, MembershipError
from farandole.plan.quorum import Member

VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20
PEER_TIMEOUT_S = 10.0
"""Time for a handshake, and for the rest of a message that has begun."""

_MAGIC = b"farandole"
_NONCE_BYTES = 32
_GREETING = struct.Struct(f">{len(_MAGIC)}sH")
"""Magic and version: alike in all versions, so that each can name the other's."""
_PROOF_BYTES = 32
_REFUSED = bytes(_PROOF_BYTES)
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]


class ProtocolError(Exception):
    """A peer sent what is no message. Ends the connection, nothing else."""


def encode(message: Message) -> bytes:
    """Return a message as it goes over the wire.

    Raises
    ------
    ProtocolError
        If it is larger than `MAX_MESSAGE_BYTES`.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    _check_length(len(body))
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Return the message with this body; raises `ProtocolError` if it is no JSON object."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {type(error).__name__}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"not an object but {type(message).__name__}")
    return message


def bytes_to_text(data: bytes) -> str:
    """Return bytes as text, for a message."""
    return base64.b64encode(data).decode()


def text_to_bytes(text: str) -> bytes:
    """Return the bytes of `bytes_to_text`."""
    return base64.b64decode(text, validate=True)


def member_from_dict(data: Any) -> Member:
    """Return a member from its dict, as it comes out of a message.

    Raises
    ------
    ProtocolError
        If a field is missing, unknown or of another type.
    """
    types = {"worker_id": int, "host": str, "pid": int, "endpoint": str, "fingerprint": Mapping}
    if not isinstance(data, dict) or data.keys() != {field.name for field in fields(Member)}:
        raise ProtocolError("not a member's fields")
    for name, kind in types.items():
        if not isinstance(data[name], kind):
            raise ProtocolError(f"member's {name} is {type(data[name]).__name__}")
    return Member(**data)


def _check_length(num_bytes: int) -> None:
    if num_bytes > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {num_bytes} bytes, more than {MAX_MESSAGE_BYTES}")


def _hello(nonce: bytes) -> bytes:
    return _GREETING.pack(_MAGIC, VERSION) + nonce


def _proof(secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    # The version is bound in, so that nobody in between can talk two peers down to an older one.
    text = b"|".join([_MAGIC, str(VERSION).encode(), role, client_nonce, server_nonce])
    return hmac.digest(secret, text, "sha256")


# --- the server's side --------------------------------------------------------------------


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Check that a client knows the secret, and prove it to the client.

    Raises
    ------
    ProtocolError
        If it is no client, does not know the secret, or is too slow.
    """
    try:
        async with asyncio.timeout(PEER_TIMEOUT_S):
            magic = await reader.readexactly(len(_MAGIC))
            if magic != _MAGIC:
                raise ProtocolError("not a Farandole worker")
            rest = await reader.readexactly(_GREETING.size - len(_MAGIC))
            _, version = _GREETING.unpack(magic + rest)
            server_nonce = secrets.token_bytes(_NONCE_BYTES)
            writer.write(_hello(server_nonce))
            await writer.drain()
            if version != VERSION:
                raise ProtocolError(f"speaks version {version} of the protocol, not {VERSION}")
            client_nonce = await reader.readexactly(_NONCE_BYTES)
            proof = await reader.readexactly(_PROOF_BYTES)
            expected = _proof(secret, b"client", client_nonce, server_nonce)
            if not hmac.compare_digest(proof, expected):
                writer.write(_REFUSED)
                raise ProtocolError("does not know the job's secret")
            writer.write(_proof(secret, b"server", client_nonce, server_nonce))
            await writer.drain()
    except TimeoutError:
        raise ProtocolError(f"handshake not finished within {PEER_TIMEOUT_S:g} s") from None
    except asyncio.IncompleteReadError:
        raise ProtocolError("closed the connection during the handshake") from None


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """Return the next message, however long it takes to begin; None when the peer has left.

    Raises
    ------
    ProtocolError
        If it is too large, no JSON object, or does not end in time.
    """
    first = await reader.read(1)
    if not first:
        return None
    try:
        async with asyncio.timeout(PEER_TIMEOUT_S):
            (num_bytes,) = _LENGTH.unpack(first + await reader.readexactly(_LENGTH.size - 1))
            _check_length(num_bytes)
            return decode(await reader.readexactly(num_bytes))
    except TimeoutError:
        raise ProtocolError(f"message not finished within {PEER_TIMEOUT_S:g} s") from None
    except asyncio.IncompleteReadError:
        raise ProtocolError("closed the connection within a message") from None


async def send(writer: asyncio.StreamWriter, message: Message) -> None:
    """Send a message; raises `ProtocolError` if the peer does not take it in time."""
    writer.write(encode(message))
    try:
        async with asyncio.timeout(PEER_TIMEOUT_S):
            await writer.drain()
    except TimeoutError:
        raise ProtocolError(f"did not read for {PEER_TIMEOUT_S:g} s") from None


# --- the client's side --------------------------------------------------------------------


class Connection:
    """A client's authenticated connection to the coordinator. Not thread-safe, but for `close`."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self._socket = sock
        self._address = address

    def request(self, message: Message, timeout_s: float) -> Message:
        """Send a message and block for the answer.

        Raises
        ------
        MembershipError
            If the message is too large, or the coordinator has left or does not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(encode(message))
            (num_bytes,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
            _check_length(num_bytes)
            return decode(self._read(num_bytes, deadline))
        except ProtocolError as error:
            raise MembershipError(
                problem=f"message to or from the coordinator at {self._address}: {error}",
                remedy="exchange less at once",
            ) from error
        except TimeoutError:
            raise MembershipError(
                problem=f"the coordinator at {self._address} did not answer in {timeout_s:g} s",
                remedy="see whether the launcher still runs and its host can be reached",
            ) from None
        except OSError as error:
            raise MembershipError(
                problem=f"lost the coordinator at {self._address} ({error})",
                remedy="the launcher has ended; see its output for why",
            ) from error

    def fileno(self) -> int:
        """Return the descriptor, to wait on."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close it; a thread that waits for an answer gets `MembershipError`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def authenticate(self, secret: bytes, deadline: float) -> None:
        """Prove to know the secret, and check that the server does."""
        client_nonce = secrets.token_bytes(_NONCE_BYTES)
        self._socket.sendall(_hello(client_nonce))
        magic, version = _GREETING.unpack(self._read(_GREETING.size, deadline))
        if magic != _MAGIC:
            raise AuthenticationError(peer=self._address, reason="it is no Farandole coordinator")
        if version != VERSION:
            raise MembershipError(
                problem=f"the coordinator at {self._address} speaks version {version} of the "
                f"protocol, this worker version {VERSION}",
                remedy="install the same version of farandole on every host",
            )
        server_nonce = self._read(_NONCE_BYTES, deadline)
        self._socket.sendall(_proof(secret, b"client", client_nonce, server_nonce))
        proof = self._read(_PROOF_BYTES, deadline)
        if proof == _REFUSED:
            raise AuthenticationError(
                peer=self._address, reason="it does not accept this worker's secret"
            )
        if not hmac.compare_digest(proof, _proof(secret, b"server", client_nonce, server_nonce)):
            raise AuthenticationError(
                peer=self._address, reason="it does not know the job's secret"
            )

    def _read(self, num_bytes: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            part = self._socket.recv(num_bytes - len(data))
            if not part:
                raise ConnectionError("it closed the connection")
            data += part
        return bytes(data)


def connect(address: str, secret: bytes, timeout_s: float = PEER_TIMEOUT_S) -> Connection:
    """Connect to a coordinator. Blocks.

    Raises
    ------
    MembershipError
        If nobody answers there in time, or it speaks another version.
    AuthenticationError
        If either side does not know the other's secret.
    """
    deadline = time.monotonic() + timeout_s
    host, _, port = address.rpartition(":")
    sock: socket.socket | None = None
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock, address)
        connection.authenticate(secret, deadline)
        return connection
    except (OSError, ValueError, OverflowError) as error:
        if sock is not None:
            sock.close()
        reason = str(error) or f"no answer in {timeout_s:g} s"
        raise MembershipError(
            problem=f"cannot reach the coordinator at {address!r} ({reason})",
            remedy="see whether the launcher still runs and its host can be reached",
        ) from error
    except (MembershipError, AuthenticationError):
        if sock is not None:
            sock.close()
        raise
