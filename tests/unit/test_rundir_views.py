from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest

from farandole.config import load_config
from farandole.errors import RunDirectoryError, UnknownNameError
from farandole.job.logs import log_lines
from farandole.job.rundir import RunDir, RunState, append_line
from farandole.job.stop import stop_job
from farandole.job.views import find_run, list_runs, newest_run, summarize


def make_run(folder: Path, name: str, *, started: float = 1.0, status="finished") -> RunDir:
    run_dir = folder / "runs" / name
    config = load_config(None, {"target": "train.py", "run_dir": run_dir})
    run = RunDir.create(config)
    run.write_config(config)
    run.write_state(RunState(status, started=started, ended=started + 5, exit_code=0, workers=2))
    return run


def test_runs_are_listed_oldest_first_and_other_folders_left_out(tmp_path):
    make_run(tmp_path, "b", started=1.0)
    make_run(tmp_path, "a", started=2.0)
    (tmp_path / "runs" / "other").mkdir()
    broken = make_run(tmp_path, "broken")
    (broken.path / "state.json").write_text("{")
    assert [summary.run.name for summary in list_runs(tmp_path / "runs")] == ["b", "a"]
    assert newest_run(tmp_path / "runs").name == "a"
    assert list_runs(tmp_path / "nothing") == []


def test_no_runs_at_all(tmp_path):
    with pytest.raises(RunDirectoryError, match="holds no jobs"):
        newest_run(tmp_path)


def test_a_run_is_found_by_path_name_or_unique_start(tmp_path):
    run = make_run(tmp_path, "2026-one")
    make_run(tmp_path, "2026-other")
    runs = tmp_path / "runs"
    assert find_run(str(run.path), runs).path == run.path
    assert find_run("2026-one", runs).path == run.path
    assert find_run("2026-on", runs).path == run.path
    with pytest.raises(UnknownNameError, match="2026-one, 2026-other"):
        find_run("2026", runs)
    with pytest.raises(UnknownNameError, match="did you mean '2026-one'"):
        find_run("2026-oen", runs)


def test_a_summary_is_read_from_the_ends_of_long_files(tmp_path):
    run = make_run(tmp_path, "job")
    run.event("plan", total_steps=5000, batch_size=8)
    with run.metrics_file.open("w") as file:
        for step in range(1, 4001):
            file.write(
                f'{{"kind": "step", "step": {step}, "epoch": 1, "values": {{"loss": 0.5}}}}\n'
            )
    evaluation = {"kind": "evaluation", "name": "holdout", "step": 4000, "values": {"auc": 0.7}}
    append_line(run.metrics_file, evaluation)
    summary = summarize(run)
    assert (summary.step, summary.epoch, summary.total_steps) == (4000, 1, 5000)
    assert summary.values == {"loss": 0.5}
    assert summary.evaluations == {"holdout": {"auc": 0.7}}
    assert summary.elapsed_s == 5


def test_last_lines_of_each_log(tmp_path):
    run = make_run(tmp_path, "job")
    run.worker_log(0).write_text("".join(f"a{n}\n" for n in range(100)))
    run.worker_log(1).write_bytes(b"b0\nhalf \xff line")
    assert list(log_lines(run, num_lines=2)) == [
        (0, "a98"), (0, "a99"), (1, "b0"), (1, "half \ufffd line"),
    ]  # fmt: skip
    assert list(log_lines(run, worker_id=1, num_lines=1)) == [(1, "half \ufffd line")]
    assert list(log_lines(run, num_lines=0)) == []


def test_last_lines_of_a_log_longer_than_a_block(tmp_path):
    run = make_run(tmp_path, "job")
    lines = [f"{n} " + "x" * 1000 for n in range(300)]
    run.worker_log(0).write_text("\n".join(lines) + "\n")
    assert [line for _, line in log_lines(run, num_lines=200)] == lines[100:]


def test_a_log_that_is_not_there(tmp_path):
    run = make_run(tmp_path, "job")
    with pytest.raises(RunDirectoryError, match="no worker has started"):
        list(log_lines(run))
    run.worker_log(0).write_text("x\n")
    with pytest.raises(RunDirectoryError, match=r"no log of worker 7.*workers 0"):
        list(log_lines(run, worker_id=7))


def test_following_ends_with_the_job_and_misses_nothing(tmp_path):
    run = make_run(tmp_path, "job")
    run.worker_log(0).write_text("one\ntw")
    found: list[str] = []
    with run.lock():
        run.write_state(RunState("running"))
        lines = log_lines(run, follow=True)
        found.append(next(lines)[1])
        with run.worker_log(0).open("a") as file:
            file.write("o\nthree")
        run.write_state(RunState("finished", ended=1.0))
        rest = threading.Thread(target=lambda: found.extend(line for _, line in lines))
        rest.start()
        rest.join(timeout=10)
    assert found == ["one", "two", "three"]


def test_what_does_not_run_cannot_be_stopped(tmp_path):
    run = make_run(tmp_path, "job", status="failed")
    with pytest.raises(RunDirectoryError, match=r"does not run; it is failed.*--resume"):
        stop_job(run, timeout=timedelta(seconds=1))
    run.write_state(RunState("running", host="elsewhere"))
    with pytest.raises(RunDirectoryError, match="runs on elsewhere"):
        stop_job(run, timeout=timedelta(seconds=1))
