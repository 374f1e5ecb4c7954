"""The tracking process: ``python -m farandole.job.track RUN_DIR``, one beside each job.

It follows the run directory and sends what appears there, so nothing of a tracker, slow or dead,
ever touches training. Its standard input is a pipe from the launcher: one line with the
tracker's URI (which may hold credentials and so stands in no file or argument), then nothing.
The end of the pipe means that the launcher has ended, however it did; then the run is ended
truthfully, within `tracker.flush_s`.

Exit code: 0 if all was sent, 3 if something is left for `farandole sync`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType

from farandole.config import JobConfig
from farandole.errors import RunDirectoryError
from farandole.job.hostmetrics import HostSampler
from farandole.job.rundir import LineReader, RunDir, append_line
from farandole.job.spool import SYSTEM_FILE, Spool, sending
from farandole.job.tracking import (
    EXIT_UNSENT,
    KILL_GRACE_S,
    final_status,
    make_tracker,
    one_line,
    redact,
)

SEND_EVERY_S = 2.0
SAMPLE_EVERY_S = 10.0
LONGEST_WAIT_S = 60.0
RETRY_AT_END_S = 1.0
NICENESS = 10
"""Training comes first."""


class DeadlineError(BaseException):
    """The time for the last sending is over. No `Exception`, so that nobody retries it."""


class Attempts:
    """Calls what may fail, and tells of failures once: a dead tracker is one warning."""

    def __init__(self, run: RunDir, uri: str | None) -> None:
        self._run = run
        self._uri = uri
        self._failing = False
        self._told: set[str] = set()

    def attempt(self, task: Callable[[], None]) -> bool:
        """Call a task; return whether it succeeded."""
        try:
            task()
        except Exception as error:
            reason = self._reason(error)
            if not self._failing:
                self._tell("tracker_unreachable", f"cannot send, will retry: {reason}", reason)
            self._failing = True
            return False
        if self._failing:
            self._tell("tracker_reached", "sending again", "")
        self._failing = False
        return True

    def unsent(self) -> None:
        """Tell that the time is over before all was sent."""
        self._tell("tracker_unsent", "not all was sent; run `farandole sync` to send it later", "")

    def _reason(self, error: Exception) -> str:
        return redact(one_line(f"{type(error).__name__}: {error}"), self._uri)

    def _tell(self, kind: str, text: str, reason: str) -> None:
        _log(text)
        if kind not in self._told:
            self._told.add(kind)
            try:
                self._run.event(kind, reason=reason)
            except RunDirectoryError as error:
                _log(str(error))


def follow(tasks: Sequence[Callable[[], None]], attempts: Attempts, ended: threading.Event) -> None:
    """Do the tasks in order, again and again, until the launcher has ended.

    After a failure they are done again from the first, after longer and longer waits.
    """
    wait_s = 0.0
    while not ended.wait(wait_s):
        done = all(attempts.attempt(task) for task in tasks)
        wait_s = SEND_EVERY_S if done else min(2 * max(wait_s, 1.0), LONGEST_WAIT_S)


def flush(tasks: Sequence[Callable[[], None]], attempts: Attempts) -> None:
    """Do each task once, the later ones even if an earlier one fails; `DeadlineError` ends it."""
    pending = list(tasks)
    while pending := [task for task in pending if not attempts.attempt(task)]:
        time.sleep(RETRY_AT_END_S)


def main(argv: Sequence[str]) -> int:
    """Track the job whose run directory is given. Blocks until the launcher has ended."""
    os.nice(NICENESS)
    run = RunDir(Path(argv[1]))
    config = _read_config(run)
    attempts = Attempts(run, config.tracker.uri)
    ended = threading.Event()
    signal.signal(signal.SIGALRM, _raise_deadline)
    try:
        _start(_watch_launcher, ended, config.tracker.flush_s)
        _start(_sample, run, ended)
        _track(run, config, attempts, ended)
    except DeadlineError:
        attempts.unsent()
        return EXIT_UNSENT
    except Exception:
        _log(redact(traceback.format_exc(), config.tracker.uri))
        return 1
    return 0


def _track(run: RunDir, config: JobConfig, attempts: Attempts, ended: threading.Event) -> None:
    # The tracking process of a job that is resumed at once may still be ending.
    patience = timedelta(seconds=config.tracker.flush_s + 2 * KILL_GRACE_S)
    with sending(run, patience):
        spool = Spool(run, make_tracker(config), config)
        tasks = [spool.open, spool.send_files, spool.send_metrics]
        follow(tasks, attempts, ended)
        flush([*tasks, spool.send_model, partial(spool.finish, final_status(run))], attempts)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _read_config(run: RunDir) -> JobConfig:
    config = run.read_config()
    line = sys.stdin.buffer.readline()
    if not line:
        return config
    tracker = config.tracker.model_copy(update={"uri": json.loads(line)["uri"]})
    return config.model_copy(update={"tracker": tracker})


def _start(function: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


def _watch_launcher(ended: threading.Event, flush_s: float) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    ended.set()
    if flush_s > 0:
        signal.setitimer(signal.ITIMER_REAL, flush_s)
    else:
        signal.raise_signal(signal.SIGALRM)
    time.sleep(flush_s + KILL_GRACE_S)
    os._exit(EXIT_UNSENT)  # the main thread hangs in a call that no signal interrupts


def _raise_deadline(signum: int, frame: FrameType | None) -> None:
    raise DeadlineError


def _sample(run: RunDir, ended: threading.Event) -> None:
    path = run.path / SYSTEM_FILE
    step = len(LineReader(path).read())
    sampler = HostSampler(os.getppid())
    while not ended.wait(SAMPLE_EVERY_S):
        record = {"kind": "system", "step": step, "time": time.time(), "values": sampler.sample()}
        append_line(path, record)
        step += 1


def _log(text: str) -> None:
    print(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
