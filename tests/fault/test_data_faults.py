"""Files that break while they are read, and processes that end in the middle of it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole.data import ParquetDataset
from farandole.errors import DataError


def write(path: Path, num_rows: int = 40_000, group_rows: int = 10_000) -> None:
    rng = np.random.default_rng(0)
    columns = {"id": np.arange(num_rows), "x": rng.standard_normal(num_rows)}
    pq.write_table(
        pa.table(columns),
        path,
        row_group_size=group_rows,
        use_dictionary=False,
        write_page_checksum=True,
    )


def damage(path: Path, group: int) -> None:
    """Flip a byte in the middle of a column of one row group."""
    chunk = pq.read_metadata(path).row_group(group).column(1)
    with path.open("r+b") as stream:
        stream.seek(chunk.data_page_offset + chunk.total_compressed_size // 2)
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 0xFF]))


def read(dataset: ParquetDataset) -> int:
    plan = dataset.epoch_plan(seed=0, epoch=0, batch_size=512, num_slots=4)
    return sum(block.num_rows for block in dataset.read(plan, range(4)))


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 26])
def test_a_corrupt_page_names_file_and_row_group(tmp_path: Path, buffer_bytes: int) -> None:
    write(tmp_path / "0.parquet")
    write(tmp_path / "1.parquet")
    damage(tmp_path / "1.parquet", 2)
    dataset = ParquetDataset(tmp_path, features=["x"], buffer_bytes=buffer_bytes)
    dataset.validate()
    with pytest.raises(DataError, match=r"1\.parquet: row group 2, column 'x' cannot be read"):
        read(dataset)
    with pytest.raises(DataError, match=r"1\.parquet: row group 2, column 'x' cannot be read"):
        list(dataset.read_rows([range(dataset.num_rows)]))
    assert threading.active_count() == 1


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet")
    write(tmp_path / "1.parquet")
    dataset = ParquetDataset(tmp_path, features=["x"])
    dataset.validate()
    (tmp_path / "1.parquet").unlink()
    with pytest.raises(DataError, match=r"1\.parquet: cannot be read"):
        read(dataset)


def test_files_threads_and_memory_are_freed(tmp_path: Path) -> None:
    for place in range(30):
        write(tmp_path / f"{place}.parquet", 4000, 1000)
    process = psutil.Process()
    dataset = ParquetDataset(tmp_path, features=["x"], buffer_bytes=1)
    dataset.validate()
    before = process.num_fds()
    plan = dataset.epoch_plan(seed=0, epoch=0, batch_size=512, num_slots=4)
    for _ in range(3):
        blocks = dataset.read(plan, range(4))
        next(blocks)
        assert process.num_fds() - before <= plan.num_lanes
        del blocks
        gc.collect()
        assert threading.active_count() == 1
        assert process.num_fds() == before


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "raise RuntimeError('the end')"])
def test_a_process_that_ends_while_reading_ends_quietly(tmp_path: Path, end: str) -> None:
    write(tmp_path / "x.parquet", group_rows=500)
    code = f"""
import sys
from farandole.data import ParquetDataset
dataset = ParquetDataset({str(tmp_path)!r}, features=["x"], buffer_bytes=1)
plan = dataset.epoch_plan(seed=0, epoch=0, batch_size=512, num_slots=4)
blocks = dataset.read(plan, range(4))
next(blocks)
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    expected = {"pass": 0, "sys.exit(3)": 3}.get(end, 1)
    assert done.returncode == expected, done.stderr
    assert done.stderr.rstrip().endswith("the end") == (expected == 1)
    assert expected == 1 or done.stderr == ""
