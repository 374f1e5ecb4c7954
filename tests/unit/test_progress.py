from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from farandole.config import load_config
from farandole.job.progress import PLAIN_EVERY_S, Pace, Progress, duration
from farandole.job.rundir import RunDir, RunState, append_line


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    config = load_config(None, {"target": "train.py", "run_dir": tmp_path / "job"})
    run = RunDir.create(config)
    run.write_state(RunState("finished", workers=2))
    return run


class Screen:
    """A display on a console that is no terminal (or one), with a clock that is set by hand."""

    def __init__(self, run: RunDir, *, terminal: bool = False) -> None:
        self.now = 100.0
        self.file = io.StringIO()
        console = Console(file=self.file, force_terminal=terminal, width=100, color_system=None)
        self.progress = Progress(run, console, clock=lambda: self.now)
        self.progress.start()

    def poll(self, after_s: float = PLAIN_EVERY_S) -> None:
        self.now += after_s
        self.progress.poll()

    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()[1:]


def step(run: RunDir, number: int, epoch: int = 0, loss: float = 0.5, **values: float) -> None:
    record = {"kind": "step", "step": number, "epoch": epoch, "time": float(number), "rows": 100}
    append_line(run.metrics_file, {**record, "values": {"loss": loss, **values}})


def evaluate(run: RunDir, number: int, **values: float) -> None:
    record = {"kind": "evaluation", "name": "holdout", "step": number, "time": float(number)}
    append_line(run.metrics_file, {**record, "values": values})


def test_a_plain_line_every_few_seconds(run):
    screen = Screen(run)
    screen.poll()
    assert screen.lines() == ["starting 2 workers"]
    run.event("plan", total_steps=63, batch_size=100)
    step(run, 2)
    step(run, 3, loss=0.25, lr=0.1)
    screen.poll(after_s=0.2)
    assert len(screen.lines()) == 1
    screen.poll()
    expected = "step 3/63 · epoch 1 · 100 rows/s · loss 0.25 · 2 workers · 1:00 left"
    assert screen.lines()[1:] == [expected]
    screen.poll()
    assert len(screen.lines()) == 2, "nothing new is not said again"


def test_results_of_epochs_and_evaluations_stay(run):
    screen = Screen(run)
    for number, loss in enumerate([0.4, 0.8], start=1):
        step(run, number, loss=loss)
    evaluate(run, 2, auc=0.75)
    step(run, 3, epoch=1, loss=0.1)
    screen.progress.stop()
    assert screen.lines() == [
        "epoch 1 · step 2 · loss 0.6 · 100 rows/s",
        "epoch 1 · step 2 · holdout: auc 0.75",
        "epoch 2 · step 3 · loss 0.1 · 100 rows/s",
    ]


def test_an_epoch_ends_where_the_next_begins(run):
    screen = Screen(run)
    step(run, 1, epoch=0)
    step(run, 2, epoch=1)
    screen.progress.stop()
    assert [line.split(" · ")[0] for line in screen.lines()] == ["epoch 1", "epoch 2"]


def test_a_resumed_job_shows_only_what_is_new(run):
    run.event("plan", total_steps=10, batch_size=100)
    step(run, 4)
    evaluate(run, 4, auc=0.75)
    screen = Screen(run)
    screen.poll()
    assert screen.lines() == ["step 4/10 · epoch 1 · 2 workers"]
    step(run, 5)
    screen.progress.stop()
    assert screen.lines()[1:] == ["epoch 1 · step 5 · loss 0.5"]


def test_a_warning_is_shown(run):
    screen = Screen(run)
    run.event("warning", message="the tracker [http://x] is gone")
    screen.poll()
    assert "warning: the tracker [http://x] is gone" in screen.lines()


def test_the_live_line_on_a_terminal(run):
    screen = Screen(run, terminal=True)
    run.event("plan", total_steps=10, batch_size=100)
    step(run, 1)
    step(run, 5)
    screen.poll()
    screen.progress.stop()
    screen.progress.stop()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.file.getvalue())
    assert "step 5/10 · epoch 1 · 25 rows/s" in text
    assert "\x1b[?25h" in screen.file.getvalue(), "the cursor is given back"


def test_pace_looks_back_ten_seconds():
    pace = Pace(total_steps=120)
    for number in range(1, 21):
        record = {
            "step": number,
            "time": number * (10.0 if number <= 10 else 1.0) + 100 * (number > 10),
        }
        pace.add_step({**record, "rows": 7, "values": {}})
    assert pace.rows_per_s == pytest.approx(7)
    assert pace.left_s == pytest.approx(100)
    assert pace.take_mean() is None


def test_pace_of_nothing():
    pace = Pace()
    assert (pace.rows_per_s, pace.left_s, pace.take_mean()) == (None, None, None)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61.2, "1:01"), (3661, "1:01:01")])
def test_durations(seconds, text):
    assert duration(seconds) == text
