"""The run directory: one folder per job that holds all that is known of it.

Whole files are written to a temporary name, synced and renamed; lines are appended with a single
write. So whoever reads a run directory, at any time, sees no half-written file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from farandole.config import JobConfig
from farandole.errors import RunDirectoryError, without_credentials
from farandole.job.environment import environment, git_state

Status = Literal["starting", "running", "finished", "failed", "stopped", "killed"]

LOCK_WAIT_S = 0.5


@dataclass(frozen=True)
class RunState:
    """How a job stands, as its launcher wrote it last.

    Parameters
    ----------
    status : {"starting", "running", "finished", "failed", "stopped", "killed"}
        `stopped` was asked for and can be resumed; `killed` means that the launcher died.
    pid, host : int, str
        The launcher's.
    started, ended : float
        Seconds since the epoch.
    exit_code : int, optional
        The launcher's, once it ended.
    message : str
        Why it failed or stopped.
    workers : int
        How many it was started with.
    tracker_run_id : str, optional
        The tracker's own name for the run, to go on in it.
    """

    status: Status
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    started: float = field(default_factory=time.time)
    ended: float | None = None
    exit_code: int | None = None
    message: str = ""
    workers: int = 0
    tracker_run_id: str | None = None

    @property
    def active(self) -> bool:
        """Whether the job has not ended."""
        return self.status in ("starting", "running")


class RunDir:
    """A job's folder, and the names of the files in it. Making the object does no I/O."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @classmethod
    def create(cls, config: JobConfig) -> RunDir:
        """Make the folder of a new job, or find that of a job to go on with.

        The folder is `config.run_dir`, or a new one under `config.runs` that is named after
        the time (UTC) and the training function's file.

        Raises
        ------
        RunDirectoryError
            The folder cannot be written, holds a job already or, to resume, holds none.
        """
        if config.run_dir is None:
            return cls(_new_folder(config))
        run = cls(config.run_dir.absolute())
        held = run.config_file.exists()
        if held and not config.resume:
            problem, remedy = (
                "holds a job already",
                "go on with --resume, or give another --run-dir",
            )
            raise RunDirectoryError(path=str(run.path), problem=problem, remedy=remedy)
        if config.resume and not held:
            problem, remedy = "holds no job to resume", "leave out --resume to start a new one"
            raise RunDirectoryError(path=str(run.path), problem=problem, remedy=remedy)
        with write_errors(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
            _lay_out(run.path)
        return run

    # --- names ----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The folder's name, which is the job's."""
        return self.path.name

    @property
    def config_file(self) -> Path:
        """The configuration as resolved."""
        return self.path / "config.json"

    @property
    def state_file(self) -> Path:
        """How the job stands; read it with `read_state`."""
        return self.path / "state.json"

    @property
    def lock_file(self) -> Path:
        """Held by the launcher as long as it lives."""
        return self.path / "lock"

    @property
    def events_file(self) -> Path:
        """What happened, as JSON lines."""
        return self.path / "events.jsonl"

    @property
    def metrics_file(self) -> Path:
        """Logged values, as JSON lines; written by rank 0."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """Folder of the saved model."""
        return self.path / "model"

    @property
    def report(self) -> Path:
        """Folder of the report."""
        return self.path / "report"

    @property
    def evaluations(self) -> Path:
        """Folder of the evaluations' rows, a Parquet file each."""
        return self.path / "evaluations"

    @property
    def function_file(self) -> Path:
        """The training function when it was given as an object, pickled."""
        return self.path / "function.pkl"

    @property
    def sockets(self) -> Path:
        """Folder of the sockets by which workers of this host meet; gone when they have ended."""
        return self.path / "sockets"

    @property
    def code(self) -> Path:
        """Folder of the copy of the training function's file."""
        return self.path / "code"

    def worker_log(self, worker_id: int) -> Path:
        """Return where a worker's output goes."""
        return self.path / "logs" / f"worker-{worker_id}.log"

    def failure_file(self, worker_id: int) -> Path:
        """Return where a worker leaves the error that ended it."""
        return self.path / "logs" / f"worker-{worker_id}.failure"

    # --- lock -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for this process. Blocks for half a second at most.

        The system frees the lock when the process ends, however it ends.

        Raises
        ------
        RunDirectoryError
            Another process holds it; names its pid.
        """
        with write_errors(self.path):
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _flock(descriptor):
                raise RunDirectoryError(
                    path=str(self.path),
                    problem=f"is in use by process {self.lock_holder() or 'unknown'}",
                    remedy="wait for it, stop it with `farandole stop`, or give another --run-dir",
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def lock_holder(self) -> int | None:
        """Return the pid of the process that holds the lock, or None if nobody does.

        Sees the processes of this host, and those of others only on file systems that share
        locks. A holder that has not yet written its pid counts as 0.
        """
        try:
            descriptor = os.open(self.lock_file, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(descriptor, 32, 0).decode().strip()
            return int(text) if text.isdigit() else 0
        else:
            return None
        finally:
            os.close(descriptor)

    # --- configuration and state ----------------------------------------------------------

    def write_config(self, config: JobConfig) -> None:
        """Write the configuration, with this folder as its `run_dir`, without credentials.

        The folder of the runs is written as an absolute path, since a tracker's database is in it.
        """
        uri = config.tracker.uri
        tracker = config.tracker.model_copy(update={"uri": uri and without_credentials(uri)})
        here = config.model_copy(
            update={"run_dir": self.path, "runs": config.runs.absolute(), "tracker": tracker}
        )
        self.write_json("config.json", here.model_dump(mode="json"))

    def read_config(self) -> JobConfig:
        """Return the configuration. Raises `RunDirectoryError` if there is none to be read."""
        data = self._read_json(self.config_file)
        try:
            return JobConfig.model_validate(data)
        except ValueError as error:
            raise self._unreadable(self.config_file, str(error)) from error

    def write_state(self, state: RunState) -> None:
        """Write how the job stands."""
        self.write_json("state.json", asdict(state))

    def read_state(self) -> RunState:
        """Return how the job stands.

        A job that says that it runs, on this host, while nobody holds its lock is reported as
        killed: its launcher died without a word.

        Raises
        ------
        RunDirectoryError
            The folder holds no job.
        """
        data = self._read_json(self.state_file)
        if data.get("status") not in get_args(Status):
            raise self._unreadable(self.state_file, f"unknown status {data.get('status')!r}")
        state = RunState(**data)
        if state.active and state.host == socket.gethostname() and self.lock_holder() is None:
            # It may have ended between the two looks; the file is right then.
            state = RunState(**self._read_json(self.state_file))
            if state.active:
                return replace(state, status="killed", message="the launcher died")
        return state

    def _read_json(self, path: Path) -> dict[str, Any]:
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError:
            raise RunDirectoryError(
                path=str(self.path),
                problem=f"holds no job (there is no {path.name})",
                remedy="list the jobs with `farandole runs`",
            ) from None
        except (OSError, ValueError) as error:
            raise self._unreadable(path, str(error)) from error

    def _unreadable(self, path: Path, reason: str) -> RunDirectoryError:
        return RunDirectoryError(
            path=str(self.path),
            problem=f"{path.name} cannot be read ({reason})",
            remedy="the file was changed by something else; restore it, or start a new job",
        )

    # --- records --------------------------------------------------------------------------

    def write_json(self, name: str, data: Any) -> None:
        """Write one JSON file of the folder as a whole. Raises `RunDirectoryError`."""
        with write_errors(self.path):
            write_atomic(self.path / name, (json.dumps(data, indent=2) + "\n").encode())

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to the event log. Safe from many processes at once."""
        with write_errors(self.path):
            append_line(self.events_file, {"time": time.time(), "kind": kind, **fields})

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events so far, oldest first."""
        yield from LineReader(self.events_file).read()

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the logged values so far, oldest first."""
        yield from LineReader(self.metrics_file).read()

    def write_environment(self) -> None:
        """Record what the job runs on and which code it runs. `write_config` comes before.

        Writes `environment.json` (python, platform, versions of all packages) and `code.json`
        (git commit, SHA-256 of the training function's file), and copies that file to `code/`.
        No environment variable is recorded.
        """
        self.write_json("environment.json", environment())
        file = Path(self.read_config().target.split(":")[0])
        code: dict[str, Any] = {"file": str(file), **git_state(file.parent)}
        if file.is_file():
            content = file.read_bytes()
            code["sha256"] = hashlib.sha256(content).hexdigest()
            with write_errors(self.path):
                write_atomic(self.code / file.name, content)
        self.write_json("code.json", code)


class LineReader:
    """Reads a file of JSON lines piece by piece as it grows, from byte `start` on."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        self._offset = start

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that were completed since the last call; none if there is no file.

        A last line without its end is left for the next call. A line that is no JSON object
        (its writer was killed within it) is left out.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        records: list[dict[str, Any]] = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
        return records


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, even after a crash.

    Blocks until the content is on the disk. Raises OSError and then leaves the old file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Block until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line with a single write. Raises OSError."""
    line = (json.dumps(record) + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        # A writer that was killed within its line must not spoil the next one.
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = b"\n" + line if torn else line
        if os.write(descriptor, data) != len(data):
            raise OSError(f"{path}: only a part of a line could be written")
    finally:
        os.close(descriptor)


# --- details ------------------------------------------------------------------------------


def _new_folder(config: JobConfig) -> Path:
    stem = Path(config.target.split(":")[0]).stem or "job"
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{stem}"
    runs = config.runs.absolute()
    with write_errors(runs):
        runs.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = runs / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                number += 1
                continue
            _lay_out(path)
            return path


def _lay_out(path: Path) -> None:
    """Make the folders; this also shows whether files can be made at all."""
    for name in ("logs", "checkpoints", "evaluations", "report", "code"):
        (path / name).mkdir(exist_ok=True)
    (path / "lock").touch()


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a `RunDirectoryError` that names the folder and the remedy."""
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            path=str(path),
            problem=f"cannot be written ({error.strerror or error})",
            remedy="free some space or rights there, or give another --run-dir",
        ) from error


def _flock(descriptor: int) -> bool:
    """Take the lock; wait a moment, since a reader that looks at it holds it briefly."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
