"""What the tests of MLflow share: databases, servers and what is read back from them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from mlflow import MlflowClient

from farandole.integrations.mlflow import MlflowTracker
from farandole.testing.tracker import RecordedRun

EXPERIMENT = "dances"


def wait_until(ready: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as response:
            return response.status == 200
    except OSError:
        return False


@contextlib.contextmanager
def command(argv: list[str], log: Path, **env: str) -> Iterator[None]:
    """Run a command with all its children; end all of them on the way out."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **env},
        )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


@contextlib.contextmanager
def server(folder: Path, port: int) -> Iterator[str]:
    """Run `mlflow server` on a database in a folder; yield its URL."""
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    argv += ["--artifacts-destination", str(folder / "artifacts")]
    with command(argv, folder / "server.log"):
        wait_until(lambda: answers(f"{url}/health"), 90, "server")
        yield url


def new_database(template: Path, folder: Path) -> str:
    """Put a database with all tables into a folder; return its URI."""
    shutil.copy(template, folder / "mlflow.db")
    return f"sqlite:///{folder / 'mlflow.db'}"


class Harness:
    """Makes trackers for one place of record, and reads it by MLflow's client."""

    def __init__(self, uri: str, runs: Path, *, embedded: bool) -> None:
        self.uri = uri
        self.runs = runs
        self.client = MlflowClient(uri)
        self._embedded = embedded

    def make(self) -> MlflowTracker:
        uri = None if self._embedded else self.uri
        return MlflowTracker(uri=uri, experiment=EXPERIMENT, runs=self.runs)

    def num_runs(self) -> int:
        return len(self.run_ids())

    def run_ids(self) -> list[str]:
        experiment = self.client.get_experiment_by_name(EXPERIMENT)
        if experiment is None:
            return []
        found = self.client.search_runs([experiment.experiment_id], max_results=1000)
        return [run.info.run_id for run in found]

    def read(self, run_id: str) -> RecordedRun:
        run = self.client.get_run(run_id)
        return RecordedRun(
            status=run.info.status.lower(),
            params=run.data.params,
            tags=run.data.tags,
            metrics={key: self.history(run_id, key) for key in run.data.metrics},
            artifacts=frozenset(self._files(run_id, "")),
        )

    def status(self, run_id: str) -> str:
        return self.client.get_run(run_id).info.status.lower()

    def history(self, run_id: str, key: str) -> list[tuple[int, float]]:
        points = self.client.get_metric_history(run_id, key)
        return sorted(((p.step, p.value) for p in points), key=lambda pair: pair[0])

    def _files(self, run_id: str, folder: str) -> Iterator[str]:
        for entry in self.client.list_artifacts(run_id, folder or None):
            if entry.is_dir:
                yield from self._files(run_id, entry.path)
            else:
                yield entry.path
