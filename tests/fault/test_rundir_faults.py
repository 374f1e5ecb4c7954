"""Run directories under kills, full disks and many writers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import farandole as fa
from farandole.config import JobConfig
from farandole.errors import FarandoleError
from farandole.job.rundir import RunDir, RunState

HOLDER = """
import sys, time
from farandole.job.rundir import RunDir, RunState
run = RunDir(sys.argv[1])
with run.lock():
    run.write_state(RunState("running"))
    print("ready", flush=True)
    time.sleep(60)
"""

APPENDER = """
import sys
from farandole.job.rundir import RunDir
run = RunDir(sys.argv[1])
for number in range(300):
    run.event("from", writer=sys.argv[2], number=number, pad="x" * 200)
"""

REWRITER = """
import itertools, sys
from farandole.job.rundir import RunDir
run = RunDir(sys.argv[1])
for number in itertools.count():
    run.write_json("data.json", [number] * 20_000)
    if number == 0:
        print("ready", flush=True)
"""

# A file size limit is what a full disk looks like to one process.
FULL_DISK = """
import resource, signal, sys
from farandole.errors import RunDirectoryError
from farandole.job.rundir import RunDir, RunState
run = RunDir(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
def attempt(action):
    try:
        action()
    except RunDirectoryError as error:
        print(error)
attempt(lambda: run.write_json("state.json", ["x" * 5000]))
attempt(lambda: [run.event("filler", pad="x" * 80) for _ in range(40)])
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(JobConfig(target="train.py", run_dir=tmp_path / "job"))


@contextlib.contextmanager
def started(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def test_a_killed_launcher_is_seen_and_frees_the_folder(run):
    with started(HOLDER, str(run.path)) as process:
        wait_until_ready(process)
        assert run.read_state().status == "running"
        assert run.lock_holder() == process.pid
        process.kill()
        process.wait(timeout=10)
    assert run.lock_holder() is None
    assert run.read_state().status == "killed"
    with run.lock():
        pass


def test_a_stopped_launcher_still_holds_the_folder(run):
    with started(HOLDER, str(run.path)) as process:
        wait_until_ready(process)
        os.kill(process.pid, signal.SIGSTOP)
        assert run.read_state().status == "running"


def test_many_writers_lose_no_line(run):
    with contextlib.ExitStack() as stack:
        writers = [started(APPENDER, str(run.path), str(number)) for number in range(4)]
        for process in [stack.enter_context(writer) for writer in writers]:
            assert process.wait(timeout=60) == 0
    events = list(run.events())
    assert len(events) == 4 * 300
    for writer in "0123":
        numbers = [event["number"] for event in events if event["writer"] == writer]
        assert numbers == list(range(300))


@pytest.mark.parametrize("delay", range(5))
def test_a_reader_never_sees_a_half_written_file_even_after_a_kill(run, delay):
    file = run.path / "data.json"
    with started(REWRITER, str(run.path)) as process:
        wait_until_ready(process)
        for _ in range(10 + 7 * delay):
            assert len(set(json.loads(file.read_bytes()))) == 1
        process.kill()
    data = json.loads(file.read_bytes())
    assert (len(data), len(set(data))) == (20_000, 1)


def test_a_full_disk_keeps_the_old_file_and_names_the_remedy(run):
    run.write_state(RunState("finished"))
    before = (run.path / "state.json").read_bytes()
    with started(FULL_DISK, str(run.path)) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert len(out.splitlines()) == 2
    assert out.count("free some space") == 2
    assert (run.path / "state.json").read_bytes() == before
    assert not list(run.path.glob("*.tmp")) + list(run.path.glob(".*.tmp"))
    events = list(run.events())
    assert events
    assert {event["kind"] for event in events} == {"filler"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a disk of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


FILLS_THE_DISK = """
import numpy as np
import torch
import farandole as fa

def train(job, disk: str):
    model, optimizer = job.prepare(torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    features = np.ones((64, 4), np.float32)
    data = fa.ArrayDataset(features, features[:, 0] > 0)
    for epoch in job.epochs(10_000):
        for batch in job.loader(data, batch_size=32):
            if job.step == 2 and job.rank == 0:
                with open(f"{disk}/filler", "wb", buffering=0) as file:
                    try:
                        while True:
                            file.write(bytes(4096))
                    except OSError:
                        pass
            job.backward(model(batch.features).mean())
            optimizer.step()
            job.log(loss=1.0)
"""


@pytest.mark.parametrize("workers", [1])
def test_a_disk_that_fills_up_ends_a_job_in_one_line(
    workers: int, small_disk: Path, tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    file.write_text(FILLS_THE_DISK)
    run_dir = small_disk / "job"
    with pytest.raises(FarandoleError) as raised:
        fa.run(
            file,
            workers=workers,
            slots=2,
            run_dir=run_dir,
            progress=False,
            params={"disk": str(small_disk)},
        )
    told = str(raised.value)
    assert "Traceback" not in told
    said = f"run directory {run_dir}: cannot be written (No space left on device); free some space"
    assert sum(said in line for line in told.splitlines()) == 1
