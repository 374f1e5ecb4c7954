from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from farandole.config import load_config
from farandole.errors import RunDirectoryError
from farandole.job.rundir import LineReader, RunDir, RunState, append_line, write_atomic
from farandole.job.settings import resolve_config


def config_in(folder: Path, **overrides):
    return load_config(None, {"target": "some/train.py:fit", "runs": folder / "runs", **overrides})


def test_new_folders_are_named_after_time_and_file_and_never_collide(tmp_path):
    config = config_in(tmp_path)
    runs = [RunDir.create(config) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    assert all(run.path.parent == tmp_path / "runs" for run in runs)
    assert all("-train" in run.name for run in runs)


def test_making_the_object_does_no_io(tmp_path):
    run = RunDir(tmp_path / "none")
    assert run.worker_log(3).name == "worker-3.log"
    assert run.lock_holder() is None
    assert list(run.events()) == []
    assert not run.path.exists()


def test_a_folder_with_a_job_is_refused_unless_resumed(tmp_path):
    config = config_in(tmp_path, run_dir=tmp_path / "job")
    run = RunDir.create(config)
    run.write_config(config)
    with pytest.raises(RunDirectoryError, match=r"holds a job already.*--resume"):
        RunDir.create(config)
    again = RunDir.create(config.model_copy(update={"resume": True}))
    assert again.path == run.path


def test_without_a_job_there_is_nothing_to_resume(tmp_path):
    config = config_in(tmp_path, run_dir=tmp_path / "job", resume=True)
    with pytest.raises(RunDirectoryError, match="no job to resume"):
        RunDir.create(config)
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize("key", ["run_dir", "runs"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, key):
    (tmp_path / "file").write_text("")
    config = config_in(tmp_path, **{key: tmp_path / "file" / "job"})
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        RunDir.create(config)


def test_config_round_trip_without_credentials(tmp_path):
    config = config_in(
        tmp_path,
        params={"lr": 0.1, "big": math.inf, "none": None},
        **{"tracker.name": "mlflow", "tracker.uri": "http://user:secret@host/x"},
    )
    run = RunDir.create(config)
    run.write_config(config)
    read = run.read_config()
    assert (read.params, read.run_dir) == (config.params, run.path)
    assert "secret" not in run.config_file.read_text()


@pytest.mark.parametrize("text", ["{", '{"slots": 3}', '{"target": "a", "nope": 1}'])
def test_a_broken_config_is_refused(tmp_path, text):
    run = RunDir.create(config_in(tmp_path))
    run.config_file.write_text(text)
    with pytest.raises(RunDirectoryError, match=r"config\.json cannot be read"):
        run.read_config()


def test_state_is_what_was_written_while_the_lock_is_held(tmp_path):
    run = RunDir.create(config_in(tmp_path))
    state = RunState("running", workers=2)
    with run.lock():
        run.write_state(state)
        assert run.read_state() == state
        assert run.lock_holder() == os.getpid()
    assert run.read_state().status == "killed"


@pytest.mark.parametrize("status", ["finished", "failed", "stopped"])
def test_an_ended_job_stays_what_it_is(tmp_path, status):
    run = RunDir.create(config_in(tmp_path))
    run.write_state(RunState(status, ended=1.0, exit_code=0))
    assert run.read_state().status == status


def test_another_hosts_lock_is_not_judged(tmp_path):
    run = RunDir.create(config_in(tmp_path))
    run.write_state(RunState("running", host="elsewhere"))
    assert run.read_state().status == "running"


def test_a_folder_without_a_job(tmp_path):
    with pytest.raises(RunDirectoryError, match="holds no job"):
        RunDir(tmp_path).read_state()


def test_the_lock_is_exclusive_and_names_its_holder(tmp_path):
    run = RunDir.create(config_in(tmp_path))
    with run.lock():
        with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()}"):
            RunDir(run.path).lock().__enter__()
        assert run.lock_holder() == os.getpid()
    with run.lock():
        pass


def test_a_torn_line_is_left_out_and_spoils_no_other(tmp_path):
    run = RunDir.create(config_in(tmp_path))
    run.event("one")
    with run.events_file.open("a") as file:
        file.write('{"kind": "torn')
    assert [event["kind"] for event in run.events()] == ["one"]
    run.event("two")
    assert [event["kind"] for event in run.events()] == ["one", "two"]


def test_nan_and_infinity_survive(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"values": {"a": math.nan, "b": -math.inf}})
    values = LineReader(path).read()[0]["values"]
    assert math.isnan(values["a"])
    assert values["b"] == -math.inf


def test_lines_are_read_as_they_come(tmp_path):
    path = tmp_path / "lines"
    reader = LineReader(path)
    assert reader.read() == []
    path.write_text('{"n": 1}\n{"n"')
    assert reader.read() == [{"n": 1}]
    with path.open("a") as file:
        file.write(": 2}\n[3]\n")
    assert reader.read() == [{"n": 2}]
    assert reader.read() == []


def test_an_atomic_write_leaves_no_other_file(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_environment_and_code_without_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "very-secret-value")
    source = tmp_path / "train.py"
    source.write_text("def train(job): ...\n")
    config = config_in(tmp_path, target=f"{source}:train")
    run = RunDir.create(config)
    run.write_config(config)
    run.write_environment()
    environment = json.loads((run.path / "environment.json").read_text())
    code = json.loads((run.path / "code.json").read_text())
    assert "numpy" in environment["packages"]
    assert len(code["sha256"]) == 64
    assert (run.code / "train.py").read_bytes() == source.read_bytes()
    assert {"git_commit", "git_dirty"} <= set(code)
    everything = b"".join(p.read_bytes() for p in run.path.rglob("*") if p.is_file())
    assert b"very-secret-value" not in everything


def test_a_resumed_jobs_config_starts_from_what_it_was(tmp_path):
    config = config_in(tmp_path, run_dir=tmp_path / "job", workers=2, params={"lr": 0.1})
    run = RunDir.create(config)
    run.write_config(config)
    flags = {"resume": True, "run_dir": str(run.path), "workers": 3, "runs": "elsewhere"}
    resumed = resolve_config(None, flags)
    assert (resumed.workers, resumed.params, resumed.resume) == (3, {"lr": 0.1}, True)
    assert resumed.runs == tmp_path / "runs"
    assert resumed.target == config.target
