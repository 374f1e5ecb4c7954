"""How a worker's part of a job ended: left in the run directory, read by the launcher."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from farandole import topology
from farandole.errors import (
    CheckpointError,
    FarandoleError,
    MembershipError,
    PeerLostError,
    UserError,
)
from farandole.job.rundir import RunDir, write_atomic


@dataclass(frozen=True)
class Failure:
    """The error that ended a worker.

    Attributes
    ----------
    time : float
        Seconds since the epoch.
    reason : str
        One line, for errors made on purpose; else the exception's last line.
    traceback : str or None
        None where the message says all.
    follows : bool
        Whether another worker's failure caused it, which is then the one to report.
    user_error : bool
        Whether input was wrong: the launcher's exit code is then 2.
    """

    worker_id: int
    rank: int | None
    host: str
    time: float
    reason: str
    traceback: str | None
    follows: bool = False
    user_error: bool = False

    @classmethod
    def of(cls, error: BaseException, *, worker_id: int, rank: int | None) -> Failure:
        """Describe an error that a worker's function raised."""
        own = isinstance(error, FarandoleError)
        reason = str(error) if own else _last_line(error)
        return cls(
            worker_id=worker_id,
            rank=rank,
            host=topology.host_name(),
            time=time.time(),
            reason=reason,
            traceback=_traceback(error),
            follows=any(isinstance(e, PeerLostError) for e in _chain(error)),
            user_error=own and error.exit_code == 2,
        )


@dataclass(frozen=True)
class Completion:
    """A training function that returned, or that was stopped after a step."""

    rank: int
    value: Any = None
    stopped_after: int | None = None
    reason: str | None = None


def _last_line(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it ended itself with sys.exit({error.code!r}) before its function returned"
    if _is_out_of_memory(error):
        return "it ran out of memory; use a smaller batch, accumulate=N, or fewer workers"
    return "".join(traceback.format_exception_only(error)).strip()


def _is_out_of_memory(error: BaseException) -> bool:
    # Of a GPU's memory torch says so by the type, of the host's by the text alone.
    by_type = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return by_type or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was made of: a training function may wrap what it catches."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _traceback(error: BaseException) -> str | None:
    # These say all that there is to know; where they were raised does not matter.
    if isinstance(error, SystemExit | UserError | CheckpointError | MembershipError):
        return None
    return "".join(traceback.format_exception(error))


def _completion_file(run: RunDir, worker_id: int) -> Any:
    return run.worker_log(worker_id).with_suffix(".done")


def clear_ends(run: RunDir, worker_ids: Iterable[int]) -> None:
    """Forget how workers ended before a job went on."""
    for worker_id in worker_ids:
        run.failure_file(worker_id).unlink(missing_ok=True)
        _completion_file(run, worker_id).unlink(missing_ok=True)


def write_failure(run: RunDir, failure: Failure) -> None:
    """Leave a failure for the launcher. Raises OSError."""
    data = json.dumps(asdict(failure)).encode()
    write_atomic(run.failure_file(failure.worker_id), data)


def read_failure(run: RunDir, worker_id: int) -> Failure | None:
    """Return what a worker left, if anything."""
    try:
        return Failure(**json.loads(run.failure_file(worker_id).read_bytes()))
    except FileNotFoundError:
        return None


def write_completion(run: RunDir, worker_id: int, completion: Completion) -> None:
    """Leave word that a worker has done its part. A value that JSON cannot hold becomes text."""
    data = json.dumps(asdict(completion), default=str).encode()
    write_atomic(_completion_file(run, worker_id), data)


def read_completion(run: RunDir, worker_id: int) -> Completion | None:
    """Return how a worker completed, if it did."""
    try:
        return Completion(**json.loads(_completion_file(run, worker_id).read_bytes()))
    except FileNotFoundError:
        return None
