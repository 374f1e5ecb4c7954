"""However a worker or the launcher ends: the right message, at once, and nothing left running."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import farandole as fa
from farandole.checkpoint.store import CheckpointStore
from farandole.errors import TargetError, WorkerFailedError
from farandole.job.rundir import RunDir

JOBS = Path(__file__).parent.parent / "jobs"
sys.path.insert(0, str(JOBS))

import endless_job  # noqa: E402

pytestmark = pytest.mark.timeout(300)

# What is promised is 5 s; the rest is for machines that do other things as well.
ENDS_WITHIN_S = 15.0
STARTS_WITHIN_S = 90.0


def run_failing(folder: Path, workers: int, **params: Any) -> WorkerFailedError:
    """Run the failing job; return the launcher's error, and check that it came in time."""
    others = psutil.Process().children()
    with pytest.raises(WorkerFailedError) as caught:
        fa.run(
            JOBS / "failing_job.py",
            workers=workers,
            runs=folder,
            params={"out": str(folder), **params},
            progress=False,
        )
    assert time.time() - float((folder / "failed-at").read_text()) < ENDS_WITHIN_S
    assert psutil.Process().children() == others
    error = caught.value
    assert error.host == socket.gethostname()
    assert Path(error.log_path).is_file()
    run = RunDir(next(folder.glob("*/state.json")).parent)
    state = run.read_state()
    assert (state.status, state.exit_code) == ("failed", 1)
    assert error.reason in state.message
    return error


def test_an_exception_is_told_with_its_traceback(tmp_path: Path) -> None:
    # Two others wait for it, and make errors of their own of that; threads hang on.
    error = run_failing(tmp_path, 3, how="raise", who=1, wraps=True, lingers=True)
    assert (error.rank, error.reason) == (1, "ValueError: the sky fell")
    assert error.traceback is not None
    assert "failing_job.py" in error.traceback
    assert error.traceback.endswith("ValueError: the sky fell\n")
    assert str(error).endswith(f"failed: ValueError: the sky fell\nlog: {error.log_path}")
    assert "the sky fell" in Path(error.log_path).read_text()


@pytest.mark.parametrize(
    ("how", "where", "reason"),
    [
        ("exit", "evaluate", r"it ended itself with sys\.exit\(3\) before its function returned"),
        ("vanish", "step", "it ended with exit code 0 before its function returned"),
        ("sigkill", "evaluate", r"it was killed by signal 9 \(SIGKILL\); if nobody did that"),
        ("memory", "step", "it ran out of memory; use a smaller batch"),
    ],
)
def test_other_ends_are_told_too(how: str, where: str, reason: str, tmp_path: Path) -> None:
    error = run_failing(tmp_path, 2, how=how, where=where)
    assert re.match(reason, error.reason)
    assert error.worker_id == 1
    assert error.log_path == str(RunDir(Path(error.log_path).parent.parent).worker_log(1))


def test_a_worker_alone_that_dies_in_mid_line(tmp_path: Path) -> None:
    error = run_failing(tmp_path, 1, how="half_a_line", who=0)
    assert error.reason == "it ended with exit code 7 before its function returned"
    assert "\nhalf a li\n\nworker 0 on " in str(error)


def test_threads_left_behind_do_not_keep_a_job_that_is_done(tmp_path: Path) -> None:
    result = fa.run(
        JOBS / "failing_job.py", workers=1, runs=tmp_path, params={"lingers": True}, progress=False
    )
    assert (result.status, result.value) == ("finished", "done")


def test_a_file_that_cannot_be_imported(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("import nowhere_at_all\ndef train(job): ...\n")
    with pytest.raises(WorkerFailedError) as caught:
        fa.run(file, workers=2, runs=tmp_path / "runs", progress=False)
    assert "No module named 'nowhere_at_all'" in caught.value.reason
    assert caught.value.traceback is not None
    assert f'"{file}", line 1' in caught.value.traceback


def test_a_file_that_is_no_python_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("def train(job:\n")
    with pytest.raises(TargetError, match="syntax error in line 1"):
        fa.run(file, workers=2, runs=tmp_path / "runs", progress=False)
    assert not (tmp_path / "runs").exists()


# --- the launcher is stopped or killed ------------------------------------------------------


def farandole(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "farandole.cli", *map(str, arguments)]


def run_endless(folder: Path, name: str, workers: int, **params: Any) -> list[str]:
    """Return the command of a job that trains until it is stopped."""
    given = {"epochs": 100_000, "out": folder / name, "pause_s": 0.05, **params}
    flags = [text for key, value in given.items() for text in ("-p", f"{key}={value}")]
    (folder / name).mkdir()
    return farandole(
        "run",
        JOBS / "endless_job.py",
        "-q",
        "-w",
        str(workers),
        "--runs",
        folder / "runs",
        *flags,
        "-o",
        "collective_timeout_s=30",
    )


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(condition: Callable[[], Any], seconds: float = STARTS_WITHIN_S) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)
    return found


def run_of(process: subprocess.Popen[str], folder: Path) -> RunDir:
    """Return the run directory of a launcher, once its job has taken some steps."""

    def find() -> RunDir | None:
        assert process.poll() is None, process.communicate()
        runs = [RunDir(file.parent) for file in folder.glob("runs/*/state.json")]
        mine = [run for run in runs if run.read_state().pid == process.pid]
        return mine[0] if mine and sum(1 for _ in mine[0].metrics()) > 2 else None

    return wait_until(find)


def weights_after(folder: Path, epochs: int, resumed: RunDir | None = None) -> dict[str, Any]:
    """Train to the end of an epoch, from the start or from where a job stands."""
    again = {} if resumed is None else {"run_dir": resumed.path, "resume": True}
    params = {"epochs": epochs, "out": str(folder), "pause_s": 0.0}
    settings = {"runs": folder, **again}
    fa.run(JOBS / "endless_job.py", workers=1, params=params, progress=False, **settings)
    return torch.load(folder / "weights.pt", weights_only=True)


def test_two_jobs_at_once_are_stopped_by_ctrl_c_and_by_command(tmp_path: Path) -> None:
    with (
        started(run_endless(tmp_path, "one", 2)) as one,
        started(run_endless(tmp_path, "two", 1)) as two,
    ):
        first, second = run_of(one, tmp_path), run_of(two, tmp_path)
        assert first.path != second.path
        one.send_signal(signal.SIGINT)
        stop = subprocess.run(
            farandole("stop", second.path), capture_output=True, text=True, timeout=60, check=False
        )
        assert (stop.returncode, "stopped" in stop.stdout) == (0, True), stop
        said = [process.communicate(timeout=60)[1] for process in (one, two)]
    assert (one.returncode, two.returncode) == (130, 143)
    for run, text, reason, code in zip(
        (first, second), said, ("Ctrl-C", "SIGTERM"), (130, 143), strict=True
    ):
        state = run.read_state()
        assert (state.status, state.exit_code) == ("stopped", code)
        found = re.search(r"stopped after step (\d+) \((.*)\); go on with --resume", text)
        assert found is not None
        assert found[2] == reason
        assert (run.checkpoints / f"step-{int(found[1]):010d}").is_dir()
        assert "Traceback" not in text
    # What was stopped and goes on equals what was never stopped.
    steps = max(record["step"] for record in first.metrics())
    epochs = steps // endless_job.STEPS_PER_EPOCH + 1
    resumed = weights_after(tmp_path / "one", epochs, first)
    (tmp_path / "whole").mkdir()
    whole = weights_after(tmp_path / "whole", epochs)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert first.read_state().status == "finished"


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    with started(run_endless(tmp_path, "one", 1, stuck=True)) as process:
        run = wait_until(lambda: next(tmp_path.glob("runs/*/metrics.jsonl"), None))
        wait_until(lambda: '"step": 2' in run.read_text())
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "once more to stop at once" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        since = time.monotonic()
        said = process.communicate(timeout=60)[1]
        assert time.monotonic() - since < ENDS_WITHIN_S  # stop_grace_s is 20
    assert process.returncode == 130
    assert "stopped after step 0 (Ctrl-C; killed at once; no checkpoint yet)" in said


def test_workers_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    command = [*run_endless(tmp_path, "one", 2), "-o", "checkpoint.every_steps=1"]
    with started(command) as process:
        run = run_of(process, tmp_path)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2
        os.kill(process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(workers, timeout=ENDS_WITHIN_S)
        assert alive == []
    assert run.read_state().status == "killed"
    assert run.lock_holder() is None
    # Checkpoints were being written all the time, so one was about to be; some metrics were not.
    epochs = CheckpointStore(run.checkpoints).steps()[-1] // endless_job.STEPS_PER_EPOCH + 1
    (tmp_path / "whole").mkdir()
    whole = weights_after(tmp_path / "whole", epochs)
    resumed = weights_after(tmp_path / "one", epochs, run)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert list(run.checkpoints.glob(".*")) == []
