"""`farandole data` as a process: what a kill, a signal and a full disk leave behind."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

NUM_ROWS = 400_000
WAIT_S = 60


@pytest.fixture
def source(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    columns = {f"f{i}": rng.standard_normal(NUM_ROWS) for i in range(8)}
    columns["label"] = np.repeat([0, 1], NUM_ROWS // 2)
    pq.write_table(pa.table(columns), tmp_path / "in.parquet", row_group_size=1000)
    return tmp_path / "in.parquet"


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "farandole.cli", "data", *map(str, arguments)]


def call(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=WAIT_S, check=False, **options
    )


def rewriting(source: Path) -> subprocess.Popen[str]:
    """Start a rewrite and wait until it has put rows on the disk."""
    arguments = command("rewrite", source, source.parent / "out", "--memory", "16MiB")
    process = subprocess.Popen(
        arguments, stderr=subprocess.PIPE, text=True, preexec_fn=_hear_interrupts
    )
    end = time.monotonic() + WAIT_S
    while not list(source.parent.glob(".out.rewriting-*/rows/*.arrow")):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    return process


def _hear_interrupts() -> None:
    # Shells start what runs in the background deaf to Ctrl-C, these tests perhaps as well.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_nothing(source, number, code):
    process = rewriting(source)
    process.send_signal(number)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert names_in(source.parent) == ["in.parquet"]


def test_a_kill_leaves_no_result_and_the_next_rewrite_clears_up(source):
    process = rewriting(source)
    process.kill()
    process.communicate(timeout=WAIT_S)
    assert not (source.parent / "out").exists()
    assert len(names_in(source.parent)) == 2
    again = call("rewrite", source, source.parent / "out", "--quiet")
    assert again.returncode == 0, again.stderr
    assert "had left" in again.stderr
    assert names_in(source.parent) == ["in.parquet", "out"]


def test_a_file_that_may_not_grow_is_one_line_and_leaves_nothing(source):
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = call("rewrite", source, source.parent / "out", "--quiet", preexec_fn=limit)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"farandole: error: rewriting to {source.parent}/out: ")
    assert names_in(source.parent) == ["in.parquet"]


def test_inspecting_before_and_after_a_rewrite(source):
    before = json.loads(call("inspect", source, "--label", "label", "--json").stdout)
    done = call("rewrite", source, source.parent / "out", "--quiet")
    assert done.returncode == 0, done.stderr
    assert f"{NUM_ROWS:,} rows" in done.stdout
    after = json.loads(call("inspect", source.parent / "out", "--label", "label", "--json").stdout)
    assert (before["label"]["order"], after["label"]["order"]) == ("ascending", "none")
    assert before["label"]["ratio"] > 1.5
    assert after["label"]["ratio"] < 1.2
    assert before["num_row_groups"] == 400 > after["num_row_groups"]
    assert any("sorted by label" in line for line in before["advice"])
    assert not any("label" in line for line in after["advice"])
