"""Stopping a job from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from datetime import timedelta

from farandole.errors import RunDirectoryError
from farandole.job.rundir import RunDir, RunState

POLL_S = 0.05


def stop_job(run: RunDir, *, timeout: timedelta, now: bool = False) -> RunState:
    """Stop a job and wait until its launcher has ended; return how it stands then.

    Its workers finish their step and write a checkpoint, so that it can be resumed. With
    `now` the launcher is killed instead, its workers end with it, and the work since the
    newest checkpoint is lost.

    Raises
    ------
    RunDirectoryError
        The job does not run, runs on another host, or still runs after `timeout`.
    """
    state = run.read_state()
    if state.active and state.host != socket.gethostname():
        problem = f"its launcher runs on {state.host}"
        raise RunDirectoryError(path=str(run.path), problem=problem, remedy="stop it there")
    holder = run.lock_holder()
    if not holder:
        problem = f"the job does not run; it is {state.status}"
        remedy = "go on with it by --resume" if state.status != "finished" else "nothing to stop"
        raise RunDirectoryError(path=str(run.path), problem=problem, remedy=remedy)
    # The lock's holder is the launcher, alive; a pid from a file alone could be anyone's by now.
    with contextlib.suppress(ProcessLookupError):  # it ended just now
        os.kill(holder, signal.SIGKILL if now else signal.SIGTERM)
    deadline = time.monotonic() + timeout.total_seconds()
    while run.lock_holder() is not None:
        if time.monotonic() > deadline:
            problem = f"still runs {timeout.total_seconds():g} s after it was asked to stop"
            remedy = "wait longer with --timeout, or end it with --now"
            raise RunDirectoryError(path=str(run.path), problem=problem, remedy=remedy)
        time.sleep(POLL_S)
    return run.read_state()
