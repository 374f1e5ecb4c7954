"""The tracking process against trackers that fail, hang and come back, and deaths on either side.

The tracker here writes what it is told to a file, and behaves as another file says.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import farandole as fa
from farandole.config import JobConfig, TrackerConfig
from farandole.errors import RunDirectoryError, TrackerError
from farandole.job import tracking
from farandole.job.rundir import RunDir, RunState, append_line
from farandole.job.spool import read_place
from farandole.job.tracking import TrackingProcess

pytestmark = pytest.mark.timeout(120)

SPY = """
import json, os, time
from dataclasses import asdict
from pathlib import Path

class Spy:
    name = "spy"

    def __init__(self, *, uri, experiment, runs):
        self.folder = Path(runs) / "spy"

    def _note(self, call, value):
        behaviour = (self.folder / "behaviour").read_text()
        if behaviour == "refuse":
            raise ConnectionError("no answer")
        if behaviour == "slow":
            time.sleep(0.5)
        if behaviour == "hang":
            while True:
                time.sleep(60)
        while behaviour == "hang for good":
            try:
                time.sleep(60)
            except BaseException:
                pass
        if behaviour == "refuse models" and call == "model":
            raise ValueError("no such type")
        with (self.folder / "calls").open("a") as file:
            file.write(json.dumps([call, value]) + "\\n")
        if behaviour == "note and hang" and call == "metrics":
            time.sleep(60)

    def start(self, *, run_name, run_id, tags):
        with (self.folder / "pids").open("a") as file:
            file.write(f"{os.getpid()}\\n")
        run_id = run_id or "run of " + tags["farandole.job"]
        self._note("start", run_id)
        return run_id

    def log_params(self, params):
        self._note("params", params)

    def log_metrics(self, points):
        self._note("metrics", [[p.key, p.step, p.value] for p in points if "system" not in p.key])

    def log_artifact(self, path, folder):
        self._note("artifact", path.name)

    def log_model(self, model_dir):
        self._note("model", model_dir.name)

    def finish(self, status):
        self._note("finish", status)
"""


class Job:
    """A run directory, and a launcher's part in it."""

    def __init__(self, folder: Path, flush_s: float = 30.0) -> None:
        self.spy = folder / "spy"
        self.spy.mkdir()
        self.behave("well")
        self.config = JobConfig(
            target="train.py",
            runs=folder,
            tracker=TrackerConfig(name="spy", flush_s=flush_s),
        )
        self.run = RunDir.create(self.config)
        self.run.write_config(self.config)
        self.state("running")
        self.num_steps = 0

    def behave(self, how: str) -> None:
        temporary = self.spy / "behaviour.tmp"
        temporary.write_text(how)
        temporary.replace(self.spy / "behaviour")

    def state(self, status: Any) -> None:
        self.run.write_state(RunState(status=status, workers=1))

    def log(self, num_steps: int) -> None:
        for _ in range(num_steps):
            step = self.num_steps
            record = {"kind": "step", "step": step, "time": float(step)}
            append_line(self.run.metrics_file, record | {"values": {"loss": step / 7}})
            self.num_steps += 1

    def start(self) -> TrackingProcess:
        process = TrackingProcess.start(self.run, self.config)
        assert process is not None
        return process

    def calls(self, kind: str) -> list[Any]:
        path = self.spy / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [value for call, value in map(json.loads, lines) if call == kind]

    def steps(self) -> list[int]:
        return [step for batch in self.calls("metrics") for _, step, _ in batch]

    def saved_step(self) -> int | None:
        """Return the last step that is noted as sent."""
        place = read_place(self.run, self.config.tracker)
        return place.last_steps.get("loss") if place else None

    def events(self, kind: str) -> int:
        return sum(event["kind"] == kind for event in self.run.events())


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    yield from _job(tmp_path, monkeypatch, 30.0)


@pytest.fixture
def hasty_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job that hardly waits for its tracker."""
    yield from _job(tmp_path, monkeypatch, 0.5)


def _job(folder: Path, monkeypatch: pytest.MonkeyPatch, flush_s: float) -> Iterator[Job]:
    """Make a job, with the spy as an installed tracker; see that no process is left."""
    site = folder / "site"
    info = site / "spy-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "spytracker.py").write_text(SPY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[farandole.trackers]\nspy = spytracker:Spy\n")
    source = Path(tracking.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{site}:{source}")
    monkeypatch.syspath_prepend(site)
    started: list[TrackingProcess] = []
    start = TrackingProcess.start

    def remembered(run: RunDir, config: JobConfig) -> TrackingProcess | None:
        process = start(run, config)
        if process is not None:
            started.append(process)
        return process

    monkeypatch.setattr(TrackingProcess, "start", remembered)
    yield Job(folder, flush_s)
    for process in started:
        left = process._process.poll() is None
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process._process.wait(10)
        assert process._process.stdin is not None
        process._process.stdin.close()
        assert not left, "a tracking process was left running"
    sys.modules.pop("spytracker", None)


def wait_until(ready: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.05)


def test_all_is_sent_once_and_the_run_ends_truthfully(job: Job):
    job.log(3)
    process = job.start()
    wait_until(lambda: job.steps() == [0, 1, 2], "first steps")
    job.log(2500)
    job.run.model.mkdir()
    (job.run.report / "report.md").write_text("good")
    job.state("finished")
    assert process.close().sent
    assert job.steps() == list(range(2503))
    assert job.calls("finish") == ["finished"]
    assert job.calls("model") == ["model"]
    assert "report.md" in job.calls("artifact")
    assert job.events("tracker_unreachable") == 0


@pytest.mark.parametrize(("status", "told"), [("failed", "failed"), ("stopped", "killed")])
def test_a_job_that_did_not_finish(job: Job, status: str, told: str):
    process = job.start()
    job.state(status)
    assert process.close().sent
    assert job.calls("finish") == [told]


def test_a_tracker_that_is_dead_at_first_and_comes_back(job: Job):
    job.behave("refuse")
    job.log(5)
    process = job.start()
    wait_until(lambda: job.events("tracker_unreachable") == 1, "warning")
    job.log(5)
    job.behave("well")
    wait_until(lambda: job.steps() == list(range(10)), "steps")
    job.state("finished")
    assert process.close().sent
    assert len(job.calls("start")) == 1
    assert job.events("tracker_unreachable") == job.events("tracker_reached") == 1


def test_a_tracker_that_dies_in_the_middle_and_comes_back(job: Job):
    process = job.start()
    job.log(5)
    wait_until(lambda: job.steps() == list(range(5)), "steps")
    job.behave("refuse")
    job.log(5)
    wait_until(lambda: job.events("tracker_unreachable") == 1, "warning")
    job.behave("well")
    job.log(5)
    job.state("finished")
    assert process.close().sent
    assert job.steps() == list(range(15))


def test_a_tracker_that_is_never_there_delays_nothing_and_is_sent_later(hasty_job: Job):
    job = hasty_job
    job.behave("refuse")
    process = job.start()
    job.log(20)
    wait_until(lambda: job.events("tracker_unreachable") == 1, "warning")
    job.state("finished")
    began = time.monotonic()
    end = process.close()
    assert time.monotonic() - began < 0.5 + 2 * tracking.KILL_GRACE_S
    assert not end.sent
    assert f"farandole sync {job.run.path}" in end.message
    assert job.events("tracker_unreachable") == job.events("tracker_unsent") == 1
    with pytest.raises(TrackerError, match="no answer"):
        tracking.sync(job.run.path)
    job.behave("well")
    run_id = tracking.sync(job.run.path)
    assert run_id == tracking.tracked_run(job.run.path)
    assert job.steps() == list(range(20))
    assert job.calls("finish") == ["finished"]
    tracking.sync(job.run.path)
    assert job.steps() == list(range(20))


@pytest.mark.parametrize("how", ["hang", "hang for good"])
def test_a_tracker_that_hangs_is_left_at_the_deadline(hasty_job: Job, how: str):
    job = hasty_job
    process = job.start()
    wait_until(lambda: bool(job.calls("start")), "start")
    job.behave(how)
    job.log(1)
    job.state("finished")
    began = time.monotonic()
    assert not process.close().sent
    assert time.monotonic() - began < 0.5 + 3 * tracking.KILL_GRACE_S


def test_a_slow_tracker_gets_everything(job: Job):
    job.behave("slow")
    process = job.start()
    for _ in range(5):
        job.log(10)
        time.sleep(0.1)
    job.state("finished")
    assert process.close().sent
    assert job.steps() == list(range(50))


def test_a_refused_model_does_not_keep_the_run_open(job: Job):
    short = job.config.tracker.model_copy(update={"flush_s": 3.0})
    job.config = job.config.model_copy(update={"tracker": short})
    job.run.write_config(job.config)
    job.behave("refuse models")
    process = job.start()
    wait_until(lambda: bool(job.calls("start")), "start")
    job.run.model.mkdir()
    job.state("finished")
    end = process.close()
    assert not end.sent
    assert job.calls("finish") == ["finished"]
    assert "no such type" in (job.run.path / "logs" / "tracker.log").read_text()


def test_a_killed_launcher_ends_the_run_as_killed(job: Job):
    code = (
        "import sys, time; from pathlib import Path;"
        "from farandole.job.rundir import RunDir; from farandole.job.tracking import *;"
        "run = RunDir(Path(sys.argv[1])); t = TrackingProcess.start(run, run.read_config());"
        "print(t.pid, flush=True); time.sleep(300)"
    )
    job.log(4)
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(job.run.path)], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    try:
        wait_until(lambda: bool(job.steps()), "steps")
        job.log(1)
    finally:
        launcher.kill()
        launcher.wait(10)
        launcher.stdout.close()
    wait_until(lambda: job.calls("finish") == ["killed"], "end of the run")
    assert job.steps() == list(range(5))
    wait_until(lambda: not _runs(pid), "end of the tracking process")


def _runs(pid: int) -> bool:
    """Whether a process lives; one that no parent has collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(process: TrackingProcess) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_a_killed_tracking_process_is_started_again(job: Job, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracking, "RESTART_AFTER_S", (0.0, 0.0, 0.0))
    process = job.start()
    for round_number in range(3):
        job.log(5)
        so_far = list(range(job.num_steps))
        wait_until(lambda so_far=so_far: job.saved_step() == so_far[-1], "steps")
        process.keep_alive()
        assert job.events("tracker_restart") == round_number
        kill(process)
        process.keep_alive()
    job.log(5)
    job.state("finished")
    assert process.close().sent
    assert job.steps() == list(range(20))
    assert len(set(job.calls("start"))) == 1
    assert job.events("tracker_restart") == 3
    assert job.events("warning") == 0


def test_a_process_killed_within_a_call_sends_that_batch_again(job: Job):
    job.behave("note and hang")
    job.log(5)
    process = job.start()
    wait_until(lambda: job.steps() == list(range(5)), "steps")
    kill(process)
    job.behave("well")
    process.keep_alive()
    job.log(5)
    job.state("finished")
    assert process.close().sent
    assert job.steps() == [*range(5), *range(10)]


def test_one_that_is_killed_at_the_end_is_started_again(job: Job):
    process = job.start()
    job.log(5)
    wait_until(lambda: bool(job.steps()), "steps")
    kill(process)
    job.log(5)
    job.state("finished")
    assert process.close().sent
    assert sorted(set(job.steps())) == list(range(10))
    assert job.calls("finish") == ["finished"]


def test_one_that_dies_again_and_again_is_given_up_with_one_warning(
    job: Job, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tracking, "RESTART_AFTER_S", (0.0, 0.0, 0.0))
    process = job.start()
    job.log(5)
    wait_until(lambda: job.saved_step() == 4, "steps")
    for _ in range(4):
        kill(process)
        process.keep_alive()
    process.keep_alive()
    job.log(5)
    job.state("finished")
    end = process.close()
    assert not end.sent
    assert not end.message
    assert job.events("tracker_restart") == 3
    (warning,) = (e["message"] for e in job.run.events() if e["kind"] == "warning")
    assert "died 4 times, lastly with code -9" in warning
    assert f"farandole sync {job.run.path}" in warning
    tracking.sync(job.run.path)
    assert job.steps() == list(range(10))
    assert len(set(job.calls("start"))) == 1


KILLER = """
import os, signal, time
import numpy as np, torch, farandole as fa
from pathlib import Path

def train(job, spy):
    model, optimizer = job.prepare(torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    data = fa.ArrayDataset(np.ones((80, 2), np.float32))
    pids = Path(spy) / "pids"
    for _ in job.epochs(1):
        for batch in job.loader(data, batch_size=8):
            loss = model(batch.features).mean()
            job.backward(loss)
            optimizer.step()
            job.log(loss=loss)
            if job.at_step_end and job.step == 4:
                wait_for(pids, 1)
                os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)
                wait_for(pids, 2)

def wait_for(pids, number):
    deadline = time.monotonic() + 60
    while not pids.exists() or len(pids.read_text().split()) < number:
        assert time.monotonic() < deadline
        time.sleep(0.05)
"""


def test_a_job_whose_tracking_process_is_killed(job: Job):
    """Its launcher starts another, and the run holds every step once."""
    train = job.spy / "train.py"
    train.write_text(KILLER)
    config = {"runs": job.spy.parent, "params": {"spy": str(job.spy)}, "progress": False}
    result = fa.run(train, workers=1, slots=1, tracker={"name": "spy"}, **config)
    events = [event["kind"] for event in RunDir(result.run_dir).events()]
    assert events.count("tracker_restart") == 1
    assert events.count("warning") == 0
    recorded = {(key, step) for batch in job.calls("metrics") for key, step, _ in batch}
    assert recorded == {("loss", step) for step in range(1, 11)}
    assert len(set(job.calls("start"))) == 1
    assert job.calls("finish") == ["finished"]


def test_a_resumed_job_goes_on_in_the_same_run(job: Job):
    process = job.start()
    job.log(10)
    wait_until(lambda: bool(job.steps()), "steps")
    job.state("stopped")
    assert process.close().sent
    job.state("running")
    again = job.start()
    job.num_steps = 6
    job.log(10)
    job.state("finished")
    assert again.close().sent
    assert job.steps() == list(range(16))
    assert len(set(job.calls("start"))) == 1
    assert job.calls("finish") == ["killed", "finished"]
    assert len(job.calls("params")) == 1


def test_deaths_at_any_moment_lose_nothing(job: Job):
    """Killed again and again while it sends: every step arrives, and only whole batches twice."""
    for round_number in range(6):
        process = job.start()
        job.log(40)
        if round_number:
            wait_until(lambda: bool(job.calls("start")), "start")
        time.sleep(0.03 * round_number)
        kill(process)
        process._close_pipe()
    job.state("finished")
    tracking.sync(job.run.path)
    counts = collections.Counter(job.steps())
    assert sorted(counts) == list(range(job.num_steps))
    assert len(set(job.calls("start"))) == 1
    batches = [tuple(map(tuple, batch)) for batch in job.calls("metrics") if batch]
    assert sum(map(len, set(batches))) == job.num_steps


def test_sync_waits_for_no_other_sender_for_ever(job: Job, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracking, "SYNC_WAIT", tracking.timedelta(seconds=0.2))
    process = job.start()
    wait_until(lambda: bool(job.calls("start")), "start")
    job.state("finished")
    with pytest.raises(RunDirectoryError, match="another process"):
        tracking.sync(job.run.path)
    assert process.close().sent
