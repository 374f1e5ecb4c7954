"""Who is a member of a job, in which order, and why a worker is not (yet) one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Member:
    """A worker as it presents itself when it joins."""

    worker_id: int
    """Given by whoever starts the worker; unique in the job."""
    host: str
    """Alike for workers that can share memory (`farandole.topology.host_id`)."""
    pid: int
    endpoint: str
    """Where its peers reach it."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`farandole.topology.NumericsFingerprint` as a dict."""


@dataclass(frozen=True)
class Generation:
    """One agreed membership. A worker's rank is its position in `members`."""

    number: int
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Waiting:
    """Why there is no generation yet."""

    joined: int
    expected: int

    @property
    def reason(self) -> str:
        """Say how many are missing."""
        return f"{self.joined} of {self.expected} workers have joined"


def first_generation(members: Iterable[Member], expected: int) -> Generation | Waiting:
    """Form generation 1 once all expected workers are there, ranked by worker id."""
    ordered = tuple(sorted(members, key=lambda member: member.worker_id))
    if len(ordered) < expected:
        return Waiting(len(ordered), expected)
    return Generation(1, ordered)


def refusal(candidate: Member, members: Iterable[Member], expected: int) -> str | None:
    """Return why a worker cannot join those that have, or None if it can."""
    present = {member.worker_id: member for member in members}
    holder = present.get(candidate.worker_id)
    if holder is not None:
        return f"worker id {candidate.worker_id} is taken by pid {holder.pid} on host {holder.host}"
    if len(present) >= expected:
        return f"all {expected} expected workers have joined already"
    return None
