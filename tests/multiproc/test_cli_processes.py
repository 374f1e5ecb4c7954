"""The command line against real processes: a launcher to be stopped, a machine to be looked at."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole import cli
from farandole.config import JobConfig
from farandole.job import doctor
from farandole.job.rundir import RunDir, RunState

# Holds a run directory as a launcher does; ends well on SIGTERM, unless it is stubborn.
LAUNCHER = """
import dataclasses, signal, sys, time
from farandole.job.rundir import RunDir, RunState
run = RunDir(sys.argv[1])
stopping = []
signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
with run.lock():
    state = RunState("running", workers=1)
    run.write_state(state)
    print("ready", flush=True)
    while not stopping or sys.argv[2] == "stubborn":
        signal.pause()
    run.write_state(dataclasses.replace(state, status="stopped", ended=time.time(), exit_code=143))
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    config = JobConfig(target="train.py", run_dir=tmp_path / "job")
    run = RunDir.create(config)
    run.write_config(config)
    return run


@pytest.fixture
def launcher(run: RunDir, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LAUNCHER, str(run.path), request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.parametrize("launcher", ["obedient"], indirect=True)
def test_stop_waits_for_the_end(run, launcher, capsys):
    assert run.lock_holder() == launcher.pid
    assert cli.main(["stop", str(run.path), "--timeout", "30"]) == 0
    assert launcher.wait(timeout=10) == 0
    assert "job: stopped" in capsys.readouterr().out


@pytest.mark.parametrize("launcher", ["stubborn"], indirect=True)
def test_stop_gives_up_and_then_kills(run, launcher, capsys):
    assert cli.main(["stop", str(run.path), "--timeout", "0.3"]) == 2
    assert "end it with --now" in capsys.readouterr().err
    assert cli.main(["stop", str(run.path), "--now", "--timeout", "30"]) == 0
    assert launcher.wait(timeout=10) == -9
    assert "job: killed" in capsys.readouterr().out


def test_a_pid_that_is_someone_elses_by_now_is_left_alone(run, capsys):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        run.write_state(RunState("running", pid=other.pid))
        run.lock_file.write_text(f"{other.pid}\n")
        assert cli.main(["stop", str(run.path)]) == 2
        assert other.poll() is None
        other.communicate(b"\n", timeout=10)
    assert "does not run; it is killed" in capsys.readouterr().err


def test_the_doctor_looks_at_everything_and_leaves_nothing(tmp_path):
    found = {check.name: check for check in doctor.diagnose(tmp_path / "not" / "yet")}
    needed = ["python", "packages", "torch", "cores", "memory", "shared memory", "sockets"]
    assert {name: found[name].status for name in needed} == dict.fromkeys(needed, "ok")
    assert found["engine local"].status == "ok"
    assert "tracker mlflow" in found
    assert list(tmp_path.iterdir()) == []


def test_help_and_errors_as_a_command():
    def farandole(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "farandole.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert farandole("--help").returncode == 0
    wrong = farandole("run", "nowhere.py")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("farandole: error: training function 'nowhere.py'")
    assert "Traceback" not in wrong.stderr
