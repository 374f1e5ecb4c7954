"""The quickstart as a user runs it, on a tenth of its data."""

import hashlib
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "flights"
ROWS_PER_MONTH = 3000


@pytest.fixture
def data(tmp_path: Path) -> Path:
    whole, part = tmp_path / "whole", tmp_path / "flights"
    subprocess.run([sys.executable, EXAMPLE / "prepare.py", whole], check=True, timeout=60)
    for file in whole.rglob("*.parquet"):
        target = part / file.relative_to(whole)
        target.parent.mkdir(parents=True)
        table = pq.read_table(file, partitioning=None)
        pq.write_table(table.slice(0, ROWS_PER_MONTH), target, row_group_size=1000)
    return part


@pytest.mark.timeout(300)
def test_quickstart(data: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE / "quickstart.py", data],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The same weights, bit for bit, on 1, 2 and 3 workers." in done.stdout
    assert "predicting the base rate" in done.stdout

    runs = sorted(path for path in (tmp_path / "runs").iterdir() if (path / "state.json").exists())
    assert [json.loads((run / "config.json").read_text())["workers"] for run in runs] == [2, 1, 3]
    states = [json.loads((run / "state.json").read_text()) for run in runs]
    assert [state["status"] for state in states] == ["finished"] * 3
    weights = {
        hashlib.sha256((run / "model" / "weights.pt").read_bytes()).hexdigest() for run in runs
    }
    assert len(weights) == 1
    assert weights.pop() in done.stdout
    assert (runs[0] / "report" / "report.png").stat().st_size > 10_000

    with sqlite3.connect(tmp_path / "runs" / "mlflow.db") as database:
        assert database.execute("select status from runs").fetchall() == [("FINISHED",)]
    database.close()
