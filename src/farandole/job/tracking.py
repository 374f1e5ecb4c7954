"""The launcher's side of tracking: checks, the tracking process, and sending later.

Without a tracker in the configuration nothing of this runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

from farandole.config import JobConfig, TrackerConfig
from farandole.errors import (
    ConfigError,
    ConfigProblem,
    FarandoleError,
    MissingExtraError,
    RunDirectoryError,
    TrackerError,
    UnknownNameError,
    without_credentials,
)
from farandole.extras import known_names, load_named
from farandole.job.rundir import RunDir
from farandole.job.spool import Spool, read_place, sending
from farandole.protocols import Tracker

EXIT_UNSENT = 3
KILL_GRACE_S = 5.0
"""From a missed deadline until a tracking process is killed."""

RESTART_AFTER_S = (0.0, 10.0, 60.0)
"""From a tracking process's death until the next one, by how many there were. What it died of
(want of memory, say) may last a while."""

SYNC_WAIT = timedelta(seconds=5)
REASON_LENGTH = 300

_OWN_TRACKERS = ("mlflow",)
_END = {"finished": "finished", "failed": "failed"}


def check_tracker(config: JobConfig) -> None:
    """Raise what would keep the job's tracker from working, without importing it.

    Raises
    ------
    UnknownNameError
        No tracker has this name.
    MissingExtraError
        What it adapts is not installed.
    ConfigError
        Its URI is none that it can use.
    """
    name = config.tracker.name
    if name is None:
        return
    known = known_names("tracker")
    if name not in known:
        raise UnknownNameError(kind="tracker", name=name, known=known)
    if name in _OWN_TRACKERS and not _installed(name):
        raise MissingExtraError(extra=name, package=name, purpose=f"the {name} tracker")
    uri = config.tracker.uri
    if uri is not None and uri != "databricks" and urlsplit(uri).scheme in ("", "file"):
        raise ConfigError(
            problems=(
                ConfigProblem(
                    key="tracker.uri",
                    value=without_credentials(uri),
                    expected="a server (http://…, https://…) or a database (sqlite:///FILE)",
                ),
            )
        )


def _installed(package: str) -> bool:
    """Whether a package can be imported; a mere folder of that name is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def make_tracker(config: JobConfig) -> Tracker:
    """Import and make the job's tracker. Slow; does not connect.

    A tracker's class is called with the keywords `uri`, `experiment` and `runs` (the folder of
    the run directories).
    """
    tracker = config.tracker
    make = load_named("tracker", tracker.name or "")
    return make(uri=tracker.uri, experiment=tracker.experiment, runs=config.runs.absolute())


@dataclass(frozen=True)
class TrackingEnd:
    """How tracking ended: everything `sent`, or a `message` on what to do, if not told before."""

    sent: bool
    message: str = ""


class TrackingProcess:
    """The process that sends a job to its tracker while the job runs."""

    def __init__(self, run: RunDir, config: JobConfig) -> None:
        self._run = run
        self._config = config
        self._process = self._launch()
        self._num_restarts = 0
        self._restart_at: float | None = None
        self._given_up = False

    @classmethod
    def start(cls, run: RunDir, config: JobConfig) -> TrackingProcess | None:
        """Start it, or return None if the job has no tracker. Does not block.

        The run directory must hold the configuration and the state by now.
        """
        return None if config.tracker.name is None else cls(run, config)

    def _launch(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "farandole.job.track"]
        with (self._run.path / "logs" / "tracker.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, str(self._run.path.absolute())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; its end tells
            process.stdin.write(json.dumps({"uri": self._config.tracker.uri}).encode() + b"\n")
            process.stdin.flush()
        return process

    @property
    def pid(self) -> int:
        """The process's id; another one after a restart."""
        return self._process.pid

    def keep_alive(self) -> None:
        """Start it again if it has died, a few times; then warn, once. Does not block.

        To be called again and again while the job runs. The new process goes on from the run
        directory, where the one before noted what it had sent.
        """
        code = self._process.poll()
        if code is None or self._given_up:
            return
        if self._num_restarts == len(RESTART_AFTER_S):
            self._given_up = True
            times = f"{self._num_restarts + 1} times, lastly with code {code}"
            self._event("warning", message=f"the tracking process died {times}; {self._remedy()}")
            return
        now = time.monotonic()
        if self._restart_at is None:
            self._restart_at = now + RESTART_AFTER_S[self._num_restarts]
        if now >= self._restart_at:
            self._restart(code)

    def _restart(self, code: int) -> None:
        self._num_restarts += 1
        self._restart_at = None
        self._event("tracker_restart", reason=f"the tracking process ended with code {code}")
        self._close_pipe()
        with contextlib.suppress(OSError):  # no process can be started now: perhaps later
            self._process = self._launch()

    def _event(self, kind: str, **fields: str) -> None:
        with contextlib.suppress(FarandoleError):  # a full disk is no reason to end the job here
            self._run.event(kind, **fields)

    def _close_pipe(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> TrackingEnd:
        """Let it send what is left and end the run; kill it if it takes too long.

        The final state must be in the run directory by now: the run is ended by it. One that was
        killed is started again for that, if it was not too often. Blocks for `tracker.flush_s`
        and a few seconds at most.
        """
        deadline = time.monotonic() + self._config.tracker.flush_s + 2 * KILL_GRACE_S
        code = self._finish(deadline)
        while code < 0 and self._num_restarts < len(RESTART_AFTER_S):
            self._restart(code)
            code = self._finish(deadline)
        if code == 0:
            return TrackingEnd(sent=True)
        if self._given_up:
            return TrackingEnd(sent=False)
        name = self._config.tracker.name
        problem = (
            f"the tracker {name} did not take everything in time"
            if code == EXIT_UNSENT
            else f"the tracking process ended with code {code}"
        )
        return TrackingEnd(sent=False, message=f"{problem}; {self._remedy()}")

    def _finish(self, deadline: float) -> int:
        """Tell the process that the job has ended; return the code with which it then ends."""
        self._close_pipe()
        try:
            return self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return EXIT_UNSENT

    def _remedy(self) -> str:
        log = self._run.path / "logs" / "tracker.log"
        return f"after the job, send the rest with `farandole sync {self._run.path}` (log: {log})"


def sync(run_dir: Path, *, tracker: TrackerConfig | None = None) -> str:
    """Send what a tracker has not been sent of a job that has ended; return the run's id.

    Parameters
    ----------
    run_dir : Path
        The job's run directory.
    tracker : TrackerConfig, optional
        Where to send it. Default: where the job was to be recorded. Credentials are in no run
        directory, so a URI with credentials must be given again.

    Raises
    ------
    RunDirectoryError
        There is no job, it still runs, or it was to be recorded nowhere.
    TrackerError
        The tracker could not be reached or refused; what was sent stays sent.
    """
    run = RunDir(run_dir)
    config = run.read_config()
    if tracker is not None:
        config = config.model_copy(update={"tracker": tracker})
    if config.tracker.name is None:
        raise RunDirectoryError(
            path=str(run_dir), problem="the job has no tracker", remedy="name one with --tracker"
        )
    if run.read_state().active:
        raise RunDirectoryError(
            path=str(run_dir),
            problem="the job still runs, and its own process sends it",
            remedy="wait for its end",
        )
    check_tracker(config)
    with sending(run, SYNC_WAIT):
        try:
            spool = Spool(run, make_tracker(config), config)
            spool.open()
            spool.send_metrics()
            spool.send_files()
            spool.send_model()
            spool.finish(final_status(run))
        except (RunDirectoryError, TrackerError):
            raise
        except Exception as error:
            uri = config.tracker.uri
            raise TrackerError(
                tracker=config.tracker.name,
                problem=redact(one_line(f"{type(error).__name__}: {error}"), uri),
                remedy="see that it can be reached, then run `farandole sync` again",
            ) from None
    return tracked_run(run_dir) or ""


def tracked_run(run_dir: Path) -> str | None:
    """Return the tracker's own name for the run of a job; None if it was never reached."""
    run = RunDir(run_dir)
    place = read_place(run, run.read_config().tracker)
    return place.run_id if place else None


def final_status(run: RunDir) -> str:
    """Return how a job ended, as a tracker is told: `finished`, `failed` or `killed`.

    A job that was stopped counts as killed, and so does one whose launcher has ended without
    writing how.
    """
    return _END.get(run.read_state().status, "killed")


def one_line(text: str) -> str:
    """Return a message short enough for a line of a log."""
    text = " ".join(text.split())
    return text if len(text) <= REASON_LENGTH else text[:REASON_LENGTH] + "…"


def redact(text: str, uri: str | None) -> str:
    """Return a text without the credentials of a URI, wherever and however they stand in it."""
    password = urlsplit(uri).password if uri else None
    text = without_credentials(text)
    for secret in {password, unquote(password)} if password else ():
        text = text.replace(secret, "***")
    return text
