"""What a worker knows of the coordinator: how to join, and its store."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from types import TracebackType

from farandole.errors import MembershipError
from farandole.membership import wire
from farandole.plan.quorum import Member

_GRACE_S = 5.0
"""The coordinator keeps the deadlines; a client gives it this much longer to say so."""


class Membership:
    """A worker's part in one generation. Holds the connection that shows it to be alive."""

    def __init__(
        self, connection: wire.Connection, generation: int, members: Sequence[Member], rank: int
    ) -> None:
        self._connection = connection
        self.generation = generation
        self.members = tuple(members)
        self.rank = rank

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return len(self.members)

    @property
    def alarm(self) -> int:
        """A descriptor that can be read once another member, or the coordinator, has ended."""
        return self._connection.fileno()

    def close(self) -> None:
        """Leave."""
        self._connection.close()

    def __enter__(self) -> Membership:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def join(address: str, secret: bytes, member: Member, timeout: timedelta) -> Membership:
    """Join a job. Blocks until all expected workers have joined; every worker must call it once.

    Parameters
    ----------
    address : str
        ``host:port`` of the coordinator.
    secret : bytes
        The job's secret.
    member : Member
        This worker. Its rank follows from its `worker_id`.
    timeout : timedelta
        Time for all workers to join.

    Raises
    ------
    MembershipError
        If the coordinator cannot be reached, refuses this worker, or not all workers join in
        time; the message says how many had joined.
    AuthenticationError
        If either side does not know the other's secret.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    connection = wire.connect(address, secret, min(wire.PEER_TIMEOUT_S, timeout.total_seconds()))
    try:
        left_s = max(0.0, deadline - time.monotonic())
        answer = connection.request(
            {"op": "join", "member": asdict(member), "timeout_s": left_s}, left_s + _GRACE_S
        )
        if answer.get("op") != "generation":
            raise MembershipError(
                problem=f"worker {member.worker_id} could not join: {answer.get('reason')}",
                remedy="see the logs of the workers that are missing, or start as many as expected",
            )
        generation = answer["generation"]
        members = [wire.member_from_dict(data) for data in generation["members"]]
        rank = [other.worker_id for other in members].index(member.worker_id)
        return Membership(connection, int(generation["number"]), members, rank)
    except BaseException:
        connection.close()
        raise


class StoreClient:
    """The coordinator's store, for any number of threads.

    Each request that is under way has a connection of its own, so that one which waits for a
    key holds up no other; connections are kept for the next request.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._address = address
        self._secret = secret
        self._lock = threading.Lock()
        self._idle: list[wire.Connection] = []
        self._busy: set[wire.Connection] = set()
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        """Set a key's value."""
        self._request({"op": "set", "key": key, "value": wire.bytes_to_text(value)})

    def get(self, key: str, timeout: timedelta) -> bytes:
        """Block until a key is set; return its value. Raises `MembershipError` if it is not."""
        answer = self._request({"op": "get", "key": key}, timeout)
        if not answer["found"]:
            raise _not_set([key], timeout)
        return wire.text_to_bytes(answer["value"])

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Block until all keys are set. Raises `MembershipError` if they are not in time."""
        if not self._request({"op": "wait", "keys": list(keys)}, timeout)["found"]:
            raise _not_set(keys, timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at zero; return the total."""
        return self._request({"op": "add", "key": key, "amount": amount})["total"]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return self._request({"op": "check", "keys": list(keys)})["found"]

    def delete(self, key: str) -> bool:
        """Forget a key; return whether it was set."""
        return self._request({"op": "delete", "key": key})["found"]

    def close(self) -> None:
        """Close all connections; threads that wait get `MembershipError`."""
        with self._lock:
            self._closed = True
            connections = [*self._idle, *self._busy]
            self._idle.clear()
        for connection in connections:
            connection.close()

    def _request(self, message: wire.Message, timeout: timedelta | None = None) -> wire.Message:
        timeout_s = wire.PEER_TIMEOUT_S
        if timeout is not None:
            timeout_s = max(0.0, timeout.total_seconds())
            message = {**message, "timeout_s": timeout_s}
        connection = self._take()
        try:
            answer = connection.request(message, timeout_s + _GRACE_S)
        except BaseException:
            with self._lock:
                self._busy.discard(connection)
            connection.close()
            raise
        with self._lock:
            self._busy.discard(connection)
            if not self._closed:
                self._idle.append(connection)
        return answer

    def _take(self) -> wire.Connection:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = wire.connect(self._address, self._secret)
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
                return connection
        connection.close()
        raise MembershipError(
            problem="the client of the coordinator's store is closed",
            remedy="use it before the worker leaves the job",
        )


def _not_set(keys: Sequence[str], timeout: timedelta) -> MembershipError:
    return MembershipError(
        problem=f"{', '.join(keys)} not set in the coordinator's store within "
        f"{timeout.total_seconds():g} s",
        remedy="see the logs of the other workers: one has not come so far",
    )
