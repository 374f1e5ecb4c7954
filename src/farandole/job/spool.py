"""What of a job a tracker has been sent, and what is left to send.

A run directory holds all that there is to send, so a job never waits for its tracker: whoever
sends reads the directory and keeps its place in `tracker.json`. Sending can stop anywhere, at
any time, and go on later, in the same run, with nothing lost or sent twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import farandole
from farandole.config import JobConfig, TrackerConfig
from farandole.errors import RunDirectoryError, without_credentials
from farandole.job.rundir import RunDir
from farandole.protocols import MetricPoint, Tracker

PLACE_FILE = "tracker.json"
SYSTEM_FILE = "system.jsonl"
LOCK_FILE = "tracker.lock"
JOB_TAG = "farandole.job"
BATCH_POINTS = 1000
"""About as many values go with one call: a round trip each, and MLflow's limit."""

SMALLEST_BATCH = 50
"""After failures, so that a server too slow for large batches still takes small ones."""

_RECORDS = ("config.json", "environment.json", "code.json")


@dataclass
class Place:
    """How far a tracker has been sent a job; the content of `tracker.json`.

    Parameters
    ----------
    target : str
        Tracker, URI without credentials, and experiment. Another one starts from nothing.
    job : str
        Random name of the job, by which the tracker finds a run whose making it never answered.
    run_id : str, optional
        The tracker's own name for the run.
    offsets : dict of str to int
        By file, the bytes that are sent.
    last_steps : dict of str to int
        By metric, the last step that is sent. A resumed job computes steps again, bit-identical.
    files : dict of str to list of int
        By file, size and time of change (ns) as sent.
    model : list of int, optional
        The same of the saved model.
    params : bool
        Whether the configuration is sent.
    status : str, optional
        What the run was ended with; None while it is open.
    """

    target: str
    job: str = field(default_factory=lambda: uuid.uuid4().hex)
    run_id: str | None = None
    offsets: dict[str, int] = field(default_factory=dict)
    last_steps: dict[str, int] = field(default_factory=dict)
    files: dict[str, list[int]] = field(default_factory=dict)
    model: list[int] | None = None
    params: bool = False
    status: str | None = None


class Spool:
    """Sends a run directory to a tracker, one call at a time.

    Every method that sends raises what the tracker raises and can be called again; it goes on
    where it stopped. Only the holder of `sending` may use it.
    """

    def __init__(self, run: RunDir, tracker: Tracker, config: JobConfig) -> None:
        self._run = run
        self._tracker = tracker
        self._config = config
        self._place = read_place(run, config.tracker) or Place(target=target_of(config.tracker))
        self._opened = False
        self._batch = BATCH_POINTS

    def open(self) -> None:
        """Open the job's run in the tracker, again if there is one, and send the parameters."""
        if not self._opened:
            if self._place.run_id is None:
                self._save()  # the job's name must last: a run may be made and not answered
            self._place.run_id = self._tracker.start(
                run_name=self._run.name, run_id=self._place.run_id, tags=self._tags()
            )
            self._place.status = None
            self._save()
            self._opened = True
        if not self._place.params:
            self._tracker.log_params(flat_params(self._config))
            self._place.params = True
            self._save()

    def send_metrics(self) -> None:
        """Send all values that are there."""
        for path in (self._run.metrics_file, self._run.path / SYSTEM_FILE):
            while self._send_batch(path):
                pass

    def _send_batch(self, path: Path) -> bool:
        """Send a batch; return whether there may be more."""
        offset = self._place.offsets.get(path.name, 0)
        records, end = read_records(path, offset, self._batch)
        last = dict(self._place.last_steps)
        points: list[MetricPoint] = []
        for point in (p for record in records for p in points_of(record)):
            if point.step > last.get(point.key, -1):
                last[point.key] = point.step
                points.append(point)
        if points:
            batch, self._batch = self._batch, max(SMALLEST_BATCH, self._batch // 4)
            self._tracker.log_metrics(points)
            self._batch = min(BATCH_POINTS, 2 * batch)
        if end == offset:
            return False
        self._place.last_steps = last
        self._place.offsets[path.name] = end
        self._save()
        return True

    def send_files(self) -> None:
        """Send configuration, environment, code and report, as far as they have changed."""
        run = self._run
        files = [(run.path / name, "") for name in _RECORDS]
        files += [(path, "code") for path in sorted(run.code.glob("*.py"))]
        files += [(path, "report") for path in sorted(run.report.glob("[!.]*"))]
        for path, folder in files:
            stamp = _stamp(path)
            key = f"{folder}/{path.name}" if folder else path.name
            if stamp is not None and stamp != self._place.files.get(key):
                self._tracker.log_artifact(path, folder)
                self._place.files[key] = stamp
                self._save()

    def send_model(self) -> None:
        """Send the saved model, if there is one and it has changed."""
        if not self._run.model.is_dir():
            return
        stamps = [_stamp(path) for path in sorted(self._run.model.rglob("*"))]
        stamp = [number for each in stamps if each is not None for number in each]
        if stamp != self._place.model:
            self._tracker.log_model(self._run.model)
            self._place.model = stamp
            self._save()

    def finish(self, status: str) -> None:
        """End the run: `finished`, `failed` or `killed`."""
        self._tracker.finish(status)
        self._place.status = status
        self._save()

    def _tags(self) -> dict[str, str]:
        state = self._run.read_state()
        tags = {
            JOB_TAG: self._place.job,
            "farandole.version": farandole.__version__,
            "farandole.target": self._config.target,
            "farandole.host": state.host,
            "farandole.workers": str(state.workers),
            "farandole.run_dir": str(self._run.path),
        }
        with contextlib.suppress(OSError, ValueError):
            code = json.loads((self._run.path / "code.json").read_bytes())
            if code.get("git_commit"):
                tags["farandole.commit"] = code["git_commit"]
                tags["farandole.dirty"] = str(bool(code.get("git_dirty"))).lower()
        return tags

    def _save(self) -> None:
        self._run.write_json(PLACE_FILE, asdict(self._place))


def read_place(run: RunDir, config: TrackerConfig) -> Place | None:
    """Return how far this tracker has been sent the job; None if it was sent nothing.

    Raises
    ------
    RunDirectoryError
        The file cannot be read.
    """
    try:
        place = Place(**json.loads((run.path / PLACE_FILE).read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise RunDirectoryError(
            path=str(run.path),
            problem=f"{PLACE_FILE} cannot be read ({error})",
            remedy=f"remove {PLACE_FILE} to send the job again, as a new run",
        ) from error
    return place if place.target == target_of(config) else None


def target_of(config: TrackerConfig) -> str:
    """Return what tells one place of record from another, without credentials."""
    return f"{config.name} {without_credentials(config.uri or 'default')} {config.experiment}"


def read_records(path: Path, offset: int, num_values: int) -> tuple[list[dict[str, Any]], int]:
    """Return whole lines from an offset on, with about `num_values` values, and where they end.

    A file that is shorter than the offset was written anew and is read from its start. A last
    line without its end is left; one that is no record is left out.
    """
    records: list[dict[str, Any]] = []
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return records, offset
    with file:
        if os.fstat(file.fileno()).st_size < offset:
            offset = 0
        file.seek(offset)
        count = 0
        while count < num_values and (line := file.readline()).endswith(b"\n"):
            offset += len(line)
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("values"), dict):
                    records.append(record)
                    count += len(record["values"])
    return records, offset


def points_of(record: Mapping[str, Any]) -> Iterator[MetricPoint]:
    """Yield the values of one line: an evaluation's are named after it, a summary's `summary/…`."""
    prefix = {"evaluation": record.get("name"), "summary": "summary"}.get(record["kind"])
    for name, value in record["values"].items():
        key = name if prefix is None else f"{prefix}/{name}"
        yield MetricPoint(key=key, value=float(value), step=record["step"], time=record["time"])


def flat_params(config: JobConfig) -> dict[str, str]:
    """Return the configuration as flat keys, without credentials and without what is not set."""
    flat: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        elif value is not None:
            flat[prefix] = without_credentials(str(value))

    walk("", config.model_dump(mode="json"))
    return flat


@contextlib.contextmanager
def sending(run: RunDir, timeout: timedelta) -> Iterator[None]:
    """Hold the right to send this run directory. Blocks while another process sends it.

    Raises
    ------
    RunDirectoryError
        The other process still sends when the time is over.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    with (run.path / LOCK_FILE).open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunDirectoryError(
                        path=str(run.path),
                        problem="another process is sending it to the tracker",
                        remedy="wait for it to end, then try again",
                    ) from None
                time.sleep(0.1)
        yield


def _stamp(path: Path) -> list[int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return [status.st_size, status.st_mtime_ns]
