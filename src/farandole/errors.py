"""Every error that Farandole raises on purpose.

An error keeps its fields, derives its message from them, names the remedy, and survives
pickling, so that it can travel from a worker to the launcher and still be acted upon.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` was most likely meant to be, or None."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return matches[0] if matches else None


def without_credentials(text: str) -> str:
    """Return a text with every ``user:password@`` inside a URI taken out."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)


def _rebuild(cls: type[FarandoleError], fields: dict[str, Any]) -> FarandoleError:
    return cls(**fields)


@dataclass(kw_only=True, eq=False, repr=False)
class FarandoleError(Exception):
    """Base of all errors: a message derived from fields, and an exit code for the launcher."""

    @property
    def exit_code(self) -> int:
        """The launcher's exit code when this ends it."""
        return 1

    def describe(self) -> str:
        """Return the message: what is wrong, with which value, and what to do."""
        return type(self).__name__

    def fields(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self.fields().items())
        return f"{type(self).__name__}({inside})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.fields())


@dataclass(kw_only=True, eq=False, repr=False)
class UserError(FarandoleError):
    """Input that cannot be used: found before any work starts where that is possible."""

    @property
    def exit_code(self) -> int:
        """The launcher's exit code when this ends it: bad input."""
        return 2


# --- configuration ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ConfigProblem:
    """One thing wrong with a configuration."""

    key: str
    value: Any
    expected: str
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f" (did you mean {self.nearest!r}?)" if self.nearest else ""
        return f"{self.key} = {self.value!r}: {self.expected}{hint}"


@dataclass(kw_only=True, eq=False, repr=False)
class ConfigError(UserError):
    """A configuration is wrong; carries every problem, not only the first."""

    problems: tuple[ConfigProblem, ...]
    source: str | None = None

    def describe(self) -> str:
        """List all problems."""
        where = f" in {self.source}" if self.source else ""
        if len(self.problems) == 1:
            return f"configuration{where}: {self.problems[0]}"
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        return f"configuration{where} has {len(self.problems)} problems:{lines}"


@dataclass(kw_only=True, eq=False, repr=False)
class TargetError(UserError):
    """The training function cannot be found or used."""

    target: str
    problem: str
    remedy: str

    def describe(self) -> str:
        """Say which target, what is wrong and the remedy."""
        return f"training function {self.target!r}: {self.problem}; {self.remedy}"


@dataclass(kw_only=True, eq=False, repr=False)
class MissingExtraError(UserError):
    """An optional dependency is needed and not installed."""

    extra: str
    package: str
    purpose: str

    def describe(self) -> str:
        """Name the package and the command that installs it."""
        return (
            f"{self.purpose} needs {self.package}, which is not installed; "
            f"run: pip install 'farandole[{self.extra}]'"
        )


@dataclass(kw_only=True, eq=False, repr=False)
class UnknownNameError(UserError):
    """A name (an engine, a tracker, a run) is none of the known ones."""

    kind: str
    name: str
    known: tuple[str, ...]

    def describe(self) -> str:
        """Offer the nearest name and list the known ones."""
        guess = nearest(self.name, self.known)
        hint = f"did you mean {guess!r}? " if guess else ""
        listed = ", ".join(self.known) if self.known else "none"
        return f"no {self.kind} is called {self.name!r}; {hint}known: {listed}"


@dataclass(kw_only=True, eq=False, repr=False)
class RunDirectoryError(UserError):
    """A run directory cannot be used."""

    path: str
    problem: str
    remedy: str

    def describe(self) -> str:
        """Say which directory, what is wrong and the remedy."""
        return f"run directory {self.path}: {self.problem}; {self.remedy}"


# --- data ---------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class DataError(UserError):
    """A data set, or one file of it, cannot be used."""

    path: str
    problem: str
    remedy: str

    def describe(self) -> str:
        """Say which path, what is wrong and the remedy."""
        return f"{self.path}: {self.problem}; {self.remedy}"


@dataclass(kw_only=True, eq=False, repr=False)
class DamagedFileError(DataError):
    """A file, or a part of it, is there and cannot be decoded."""

    row_group: int | None = None
    """None where the footer is unusable, and with it the whole file."""
    column: str | None = None

    def describe(self) -> str:
        """Say which file, row group and column, what is wrong and the remedy."""
        group = "" if self.row_group is None else f"row group {self.row_group}"
        column = "" if self.column is None else f"column {self.column!r}"
        where = ", ".join(part for part in (group, column) if part)
        return f"{self.path}: {where}{' ' if where else ''}{self.problem}; {self.remedy}"


@dataclass(kw_only=True, eq=False, repr=False)
class StoreError(FarandoleError):
    """A remote store did not answer, whatever the patience with it."""

    path: str
    problem: str
    remedy: str

    def describe(self) -> str:
        """Say for which path, what went wrong and the remedy."""
        return f"{self.path}: {self.problem}; {self.remedy}"


@dataclass(kw_only=True, eq=False, repr=False)
class ColumnError(UserError):
    """A column is missing, misspelt or of a type that cannot be used."""

    path: str
    column: str
    problem: str
    known: tuple[str, ...] = ()

    def describe(self) -> str:
        """Name the column and offer the nearest one."""
        guess = None if self.column in self.known else nearest(self.column, self.known)
        hint = f"; did you mean {guess!r}?" if guess else ""
        return f"{self.path}: column {self.column!r} {self.problem}{hint}"


@dataclass(kw_only=True, eq=False, repr=False)
class PlanStateError(UserError):
    """An epoch cannot be taken up from a saved state; names all that differs."""

    differences: tuple[str, ...]
    remedy: str

    def describe(self) -> str:
        """List what differs and the remedy."""
        return f"the epoch cannot go on: {'; '.join(self.differences)}; {self.remedy}"


@dataclass(kw_only=True, eq=False, repr=False)
class RewriteError(FarandoleError):
    """A data set could not be rewritten. Nothing is at `path` that was not there before."""

    path: str
    problem: str
    remedy: str

    def describe(self) -> str:
        """Say which path, what is wrong and the remedy."""
        return f"rewriting to {self.path}: {self.problem}; {self.remedy}"


# --- the job ------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class UsageError(FarandoleError):
    """The training function uses the job wrongly; names the mistake and the right call."""

    problem: str
    remedy: str

    def describe(self) -> str:
        """Say the mistake and the remedy."""
        return f"{self.problem}; {self.remedy}"


@dataclass(kw_only=True, eq=False, repr=False)
class MismatchError(FarandoleError):
    """Workers disagree on something that must be alike on all of them."""

    what: str
    rank: int
    other_rank: int
    mine: str
    theirs: str

    def describe(self) -> str:
        """Name both sides."""
        return (
            f"workers disagree on {self.what}: rank {self.rank} has {self.mine}, "
            f"rank {self.other_rank} has {self.theirs}; the training function must do the same "
            "on every worker"
        )


@dataclass(kw_only=True, eq=False, repr=False)
class NumericsError(UserError):
    """What computes the job now may not give the bits of what computed, or computes, it too."""

    differences: tuple[str, ...]
    """One for each worker or checkpoint that differs: which one, and how."""

    def describe(self) -> str:
        """Name all differences and the remedy."""
        return (
            f"the result's bits may differ: {'; '.join(self.differences)}; use machines and "
            "versions that are alike, or allow it by --no-require-exact"
        )


@dataclass(kw_only=True, eq=False, repr=False)
class PeerLostError(FarandoleError):
    """Another worker ended or fell silent. Never a job's first failure: that is the peer's."""

    rank: int
    peer: int | None
    """None where the backend does not tell which one."""
    during: str
    reason: str

    def describe(self) -> str:
        """Say who was lost and during what."""
        peer = "a peer" if self.peer is None else f"rank {self.peer}"
        return f"rank {self.rank} lost {peer} during {self.during}: {self.reason}"


@dataclass(kw_only=True, eq=False, repr=False)
class AuthenticationError(FarandoleError):
    """A peer did not prove that it knows the job's secret."""

    peer: str
    reason: str

    def describe(self) -> str:
        """Say which peer was refused and why."""
        return f"connection with {self.peer} refused: {self.reason}"


@dataclass(kw_only=True, eq=False, repr=False)
class MembershipError(FarandoleError):
    """A worker could not become, or is no longer, a member of the job."""

    problem: str
    remedy: str

    def describe(self) -> str:
        """Say what is wrong and the remedy."""
        return f"{self.problem}; {self.remedy}"


@dataclass(kw_only=True, eq=False, repr=False)
class CheckpointError(FarandoleError):
    """A checkpoint cannot be written or read."""

    path: str
    problem: str
    remedy: str

    def describe(self) -> str:
        """Say which checkpoint, what is wrong and the remedy."""
        return f"checkpoint {self.path}: {self.problem}; {self.remedy}"


@dataclass(kw_only=True, eq=False, repr=False)
class WorkerFailedError(FarandoleError):
    """A job failed: the first failure of a worker, with where to read on."""

    worker_id: int
    rank: int | None
    host: str
    reason: str
    log_path: str
    traceback: str | None = None
    user_error: bool = False
    """Whether input was wrong, as only a worker could see."""

    @property
    def exit_code(self) -> int:
        """As of a `UserError` if it was one."""
        return 2 if self.user_error else 1

    def describe(self) -> str:
        """Print the traceback if there is one, then one line on the failure and its log."""
        name = f"worker {self.worker_id}" if self.rank is None else f"rank {self.rank}"
        head = f"{self.traceback.rstrip()}\n\n" if self.traceback else ""
        return f"{head}{name} on {self.host} failed: {self.reason}\nlog: {self.log_path}"


@dataclass(kw_only=True, eq=False, repr=False)
class JobStoppedError(FarandoleError):
    """A job was stopped from outside (Ctrl-C, `farandole stop`) after its last whole step."""

    step: int
    reason: str

    @property
    def exit_code(self) -> int:
        """As a shell has it for a process that SIGINT or SIGTERM ended."""
        return 130 if self.reason.startswith("Ctrl-C") else 143

    def describe(self) -> str:
        """Say after which step, and how to go on."""
        return f"stopped after step {self.step} ({self.reason}); go on with --resume"


@dataclass(kw_only=True, eq=False, repr=False)
class TrackerError(FarandoleError):
    """A tracker refused what it was sent, or could not be reached."""

    tracker: str
    problem: str
    remedy: str

    def describe(self) -> str:
        """Say which tracker, what is wrong and the remedy."""
        return f"tracker {self.tracker}: {self.problem}; {self.remedy}"
