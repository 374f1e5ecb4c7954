from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from farandole.config import JobConfig
from farandole.errors import CheckpointError, DataError, PeerLostError, UsageError
from farandole.job.ends import (
    Completion,
    Failure,
    clear_ends,
    read_completion,
    read_failure,
    write_completion,
    write_failure,
)
from farandole.job.rundir import RunDir


class OutOfMemoryError(RuntimeError):
    """As torch has it for a GPU."""


LOST = PeerLostError(rank=0, peer=1, during="exchange", reason="its process ended")


def failure_of(error: BaseException, cause: BaseException | None = None) -> Failure:
    try:
        raise error from cause
    except BaseException as raised:
        return Failure.of(raised, worker_id=4, rank=2)


def failure_after(first: BaseException, second: BaseException) -> Failure:
    try:
        try:
            raise first
        except BaseException:
            raise second  # noqa: B904
    except BaseException as raised:
        return Failure.of(raised, worker_id=4, rank=2)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(JobConfig(target="train.py", run_dir=tmp_path / "job"))


def test_an_exception_keeps_its_traceback() -> None:
    failure = failure_of(ValueError("two\nlines"))
    assert failure.reason == "ValueError: two\nlines"
    assert failure.traceback is not None
    assert "raise error from cause" in failure.traceback
    assert (failure.worker_id, failure.rank, failure.host) == (4, 2, socket.gethostname())
    assert not failure.follows
    assert not failure.user_error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SystemExit(3), r"sys\.exit\(3\) before its function returned"),
        (MemoryError(), "ran out of memory; use a smaller batch"),
        (OutOfMemoryError("CUDA out of memory"), "ran out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (UsageError(problem="this", remedy="that"), "^this; that$"),
    ],
)
def test_what_is_said(error: BaseException, said: str) -> None:
    failure = failure_of(error)
    assert re.search(said, failure.reason)


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(1),
        CheckpointError(path="c", problem="cannot be written", remedy="free some space"),
        DataError(path="d", problem="is empty", remedy="pass some"),
    ],
)
def test_what_says_all_needs_no_traceback(error: BaseException) -> None:
    assert failure_of(error).traceback is None


def test_wrong_input_is_told_apart() -> None:
    assert failure_of(DataError(path="d", problem="is empty", remedy="pass some")).user_error
    assert not failure_of(UsageError(problem="this", remedy="that")).user_error


def test_what_another_workers_end_caused_follows_it() -> None:
    assert failure_of(LOST).follows
    assert failure_of(RuntimeError("wrapped"), cause=LOST).follows
    assert failure_after(LOST, SystemExit(1)).follows
    assert not failure_after(KeyError("own"), SystemExit(1)).follows


def test_ends_are_left_and_read(run: RunDir) -> None:
    assert read_failure(run, 4) is None
    assert read_completion(run, 4) is None
    failure = failure_of(ValueError("no"))
    write_failure(run, failure)
    completion = Completion(rank=2, value={"path": Path("x")})
    write_completion(run, 4, completion)
    assert read_failure(run, 4) == failure
    assert read_completion(run, 4) == Completion(rank=2, value={"path": "x"})
    assert read_failure(run, 3) is None
    clear_ends(run, range(5))
    assert read_failure(run, 4) is None
    assert read_completion(run, 4) is None
