"""Whole jobs tracked by MLflow: the tracking process, databases, servers, and what can befall."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlflow")

from mlflow_support import EXPERIMENT, Harness, free_port, new_database, server, wait_until

from farandole.config import JobConfig, TrackerConfig
from farandole.job import tracking
from farandole.job.rundir import RunDir, RunState, append_line
from farandole.job.tracking import TrackingProcess

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

PATIENCE_S = 120.0
SECRET = "s3cr%2Fet-pass"


class Job:
    """A launcher's part in a tracked job."""

    def __init__(self, folder: Path, uri: str | None, flush_s: float = PATIENCE_S) -> None:
        tracker = TrackerConfig(name="mlflow", uri=uri, experiment=EXPERIMENT, flush_s=flush_s)
        self.config = JobConfig(target="train.py", params={"lr": 0.1}, runs=folder, tracker=tracker)
        self.run = RunDir.create(self.config)
        self.run.write_config(self.config)
        self.run.write_environment()
        self.state("running")
        self.num_steps = 0

    def state(self, status: Any) -> None:
        self.run.write_state(RunState(status=status, workers=3))

    def log(self, num_steps: int) -> None:
        for _ in range(num_steps):
            step = self.num_steps
            record = {"kind": "step", "step": step, "time": 1.7e9 + step}
            append_line(self.run.metrics_file, record | {"values": {"loss": step / 7}})
            self.num_steps += 1

    def start(self) -> TrackingProcess:
        process = TrackingProcess.start(self.run, self.config)
        assert process is not None
        return process

    def expected(self) -> list[tuple[int, float]]:
        return [(step, step / 7) for step in range(self.num_steps)]

    def events(self, kind: str) -> int:
        return sum(event["kind"] == kind for event in self.run.events())

    def sent_steps(self) -> int:
        """Return how many steps the tracking process knows to be sent."""
        path = self.run.path / "tracker.json"
        last = json.loads(path.read_text())["last_steps"] if path.exists() else {}
        return last.get("loss", -1) + 1


@pytest.fixture
def harness(mlflow_template: Path, tmp_path: Path) -> Harness:
    return Harness(new_database(mlflow_template, tmp_path), tmp_path, embedded=True)


def test_a_job_is_one_run_with_all_that_belongs_to_it(harness: Harness, tmp_path: Path):
    job = Job(tmp_path, None)
    process = job.start()
    job.log(50)
    wait_until(lambda: job.sent_steps() == 50, PATIENCE_S, "first steps")
    assert harness.read(harness.run_ids()[0]).status == "running"
    not_finite = {"nan": math.nan, "inf": math.inf}
    summary = {"kind": "summary", "step": 50, "time": 1.7e9, "values": not_finite}
    append_line(job.run.metrics_file, summary)
    (job.run.report / "report.md").write_text("good")
    job.state("finished")
    end = process.close()
    assert end.sent, end.message

    assert harness.num_runs() == 1
    run = harness.read(harness.run_ids()[0])
    assert tracking.tracked_run(job.run.path) == harness.run_ids()[0]
    assert run.status == "finished"
    assert run.metrics["loss"] == job.expected()
    assert math.isnan(run.metrics["summary/nan"][0][1])
    assert run.metrics["summary/inf"][0][1] > 1e308
    assert run.params["params.lr"] == "0.1"
    assert run.tags["mlflow.source.name"] == "train.py"
    assert run.tags["mlflow.runName"] == job.run.name
    assert run.tags["farandole.workers"] == "3"
    wanted = {"config.json", "environment.json", "code.json", "report/report.md"}
    assert wanted <= run.artifacts


def test_a_resumed_job_goes_on_in_the_same_run(harness: Harness, tmp_path: Path):
    job = Job(tmp_path, None)
    process = job.start()
    job.log(20)
    job.state("failed")
    assert process.close().sent
    assert harness.read(harness.run_ids()[0]).status == "failed"

    job.state("running")
    process = job.start()
    job.num_steps = 15
    job.log(15)
    wait_until(lambda: job.sent_steps() == 30, PATIENCE_S, "steps after the resume")
    assert harness.read(harness.run_ids()[0]).status == "running"
    job.state("finished")
    assert process.close().sent
    assert harness.num_runs() == 1
    run = harness.read(harness.run_ids()[0])
    assert run.status == "finished"
    assert run.metrics["loss"] == job.expected()


def test_a_server_that_dies_and_comes_back_gets_everything_once(harness: Harness, tmp_path: Path):
    port = free_port()
    job = Job(tmp_path, f"http://me:{SECRET}@127.0.0.1:{port}")
    process = job.start()
    job.log(10)
    wait_until(lambda: job.events("tracker_unreachable") == 1, PATIENCE_S, "warning")
    with server(tmp_path, port):
        wait_until(lambda: job.sent_steps() == 10, PATIENCE_S, "steps")
    job.log(10)
    wait_until(lambda: "will retry" in last_line(job.run), PATIENCE_S, "second outage")
    with server(tmp_path, port):
        job.state("finished")
        end = process.close()
        assert end.sent, end.message
    (run_id,) = harness.run_ids()
    assert harness.status(run_id) == "finished"
    assert harness.history(run_id, "loss") == job.expected()
    assert job.events("tracker_unreachable") == 1
    assert_no_secret(tmp_path)


def test_a_server_that_is_never_there(tmp_path: Path):
    job = Job(tmp_path, f"http://me:{SECRET}@127.0.0.1:{free_port()}", flush_s=1.0)
    process = job.start()
    job.log(10)
    wait_until(lambda: job.events("tracker_unreachable") == 1, PATIENCE_S, "warning")
    job.state("finished")
    began = time.monotonic()
    end = process.close()
    assert time.monotonic() - began < 1.0 + 2 * tracking.KILL_GRACE_S
    assert not end.sent
    assert "farandole sync" in end.message
    assert job.events("tracker_unreachable") == 1
    assert_no_secret(tmp_path)


def test_a_server_that_answers_after_seconds(harness: Harness, tmp_path: Path):
    port = free_port()
    with server(tmp_path, port), delayed(port, delay_s=1.0) as slow_port:
        job = Job(tmp_path, f"http://127.0.0.1:{slow_port}")
        process = job.start()
        job.log(30)
        wait_until(lambda: job.sent_steps() == 30, PATIENCE_S, "steps")
        job.state("finished")
        end = process.close()
        assert end.sent, end.message
    (run_id,) = harness.run_ids()
    assert harness.status(run_id) == "finished"
    assert harness.history(run_id, "loss") == job.expected()


def last_line(run: RunDir) -> str:
    return (run.path / "logs" / "tracker.log").read_text().splitlines()[-1]


def assert_no_secret(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "tracker.log" for path in files)
    for path in files:
        content = path.read_bytes()
        for secret in (SECRET.encode(), b"s3cr/et-pass"):
            assert secret not in content, path


class delayed:  # noqa: N801 - reads as a function
    """A proxy on one host that passes each answer on after a delay."""

    def __init__(self, port: int, delay_s: float) -> None:
        self._port = port
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> int:
        self._run(self._accept)
        return self._listener.getsockname()[1]

    def __exit__(self, *exception: object) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join(10)

    def _run(self, function: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        try:
            while True:
                client, _ = self._listener.accept()
                upstream = socket.create_connection(("127.0.0.1", self._port))
                self._open += [client, upstream]
                self._run(self._pump, client, upstream, 0.0)
                self._run(self._pump, upstream, client, self._delay_s)
        except OSError:
            return

    def _pump(self, source: socket.socket, target: socket.socket, delay_s: float) -> None:
        try:
            while data := source.recv(1 << 16):
                time.sleep(delay_s)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return
