from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole.config import load_config
from farandole.errors import RunDirectoryError
from farandole.job.report import write_report
from farandole.job.rundir import RunDir, RunState, append_line

PNG = b"\x89PNG\r\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    config = load_config(
        None, {"target": "train.py", "run_dir": tmp_path / "job", "params": {"sep": "a|b"}}
    )
    run = RunDir.create(config)
    run.write_config(config)
    run.write_state(RunState("finished", started=10.0, ended=75.0, workers=2))
    return run


def add(run: RunDir, kind: str, step: int, name: str = "holdout", **values: float) -> None:
    record = {"kind": kind, "step": step, "values": values}
    append_line(run.metrics_file, record | ({"name": name} if kind == "evaluation" else {}))


def test_text_and_picture(run):
    pytest.importorskip("matplotlib")
    for step in range(1, 201):
        add(run, "step", step, loss=1 / step + 0.1 * (step % 3), lr=0.1)
    add(run, "evaluation", 100, loss=0.6)
    add(run, "evaluation", 200, loss=0.5, auc=0.75)
    add(run, "summary", 200, base_rate=0.25)
    score = np.linspace(0, 1, 500)
    table = pa.table({"score": score, "label": (score > 0.5).astype(int)})
    pq.write_table(table, run.evaluations / "holdout.parquet")
    assert write_report(run) == [run.report / "report.md", run.report / "report.png"]
    assert (run.report / "report.png").read_bytes().startswith(PNG)
    text = (run.report / "report.md").read_text()
    for part in (
        "![Learning curves](report.png)",
        "| time | 1:05 |",
        "| parameter `sep` | `a\\|b` |",
        "| lr | 0.1 | 0.1 | 200 |",
        "| holdout | auc | 0.75 | 200 |",
        "| base_rate | 0.25 |",
    ):
        assert part in text
    assert sorted(p.name for p in run.report.iterdir()) == ["report.md", "report.png"]


def test_a_job_without_values_gets_a_text(run):
    assert write_report(run) == [run.report / "report.md"]


def test_without_matplotlib_there_is_the_text(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    add(run, "step", 1, loss=1.0)
    add(run, "step", 2, loss=1.0)
    assert write_report(run) == [run.report / "report.md"]
    assert "report.png" not in (run.report / "report.md").read_text()


def test_values_that_are_no_numbers_do_no_harm(run):
    pytest.importorskip("matplotlib")
    for step in range(1, 100):
        add(run, "step", step, loss=math.nan if step % 2 else math.inf, other=float(step))
    assert len(write_report(run)) == 2


TABLES = [
    {"score": [0.5, 1.5], "label": [0, 1]},
    {"score": [0.5, 0.7], "label": [0, 2]},
    {"score": ["a", "b"], "label": [0, 1]},
    {"score": [[0.1], [0.2]], "label": [0, 1]},
    {"score": [None, math.nan], "label": [0, 1]},
    {"other": [1]},
]


@pytest.mark.parametrize("columns", TABLES)
def test_an_evaluation_without_probabilities_is_left_out(run, columns):
    pq.write_table(pa.table(columns), run.evaluations / "holdout.parquet")
    (run.evaluations / "torn.parquet").write_bytes(b"PAR1")
    assert write_report(run) == [run.report / "report.md"]


def test_one_label_only(run):
    pytest.importorskip("matplotlib")
    pq.write_table(pa.table({"score": [0.5], "label": [1]}), run.evaluations / "a.parquet")
    assert len(write_report(run)) == 2


def test_a_folder_that_cannot_be_written(run):
    run.report.rmdir()
    run.report.write_text("")
    with pytest.raises(RunDirectoryError, match="the report cannot be written"):
        write_report(run)
