"""What reading holds: memory and open files, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole.data import ParquetDataset


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_huge_row_group_is_streamed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = pa.table({f"c{i}": rng.random(2_000_000, np.float32) for i in range(20)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=2_000_000, use_dictionary=False)
    del table
    code = f"""
import psutil
from farandole.data import ParquetDataset
data = ParquetDataset({str(tmp_path)!r}, features=[f"c{{i}}" for i in range(20)],
                      buffer_bytes=64 << 20, index_cache=None)
plan = data.epoch_plan(seed=0, epoch=0, batch_size=1024, num_slots=8)
process = psutil.Process()
before = process.memory_info().rss
most = rows = 0
for place, block in enumerate(data.read(plan, range(8))):
    rows += block.num_rows
    if place % 100 == 0:
        most = max(most, process.memory_info().rss)
assert rows == 2_000_000, rows
print((most - before) >> 20)
"""
    assert int(run(code)) < 140  # megabytes; decoded, the row group has 160


def test_memory_is_flat_over_epochs_and_few_files_are_open(tmp_path: Path) -> None:
    for place in range(100):
        columns = {"id": np.arange(place * 500, (place + 1) * 500)}
        pq.write_table(pa.table(columns), tmp_path / f"{place:03}.parquet", row_group_size=125)
    code = f"""
import gc, resource, psutil
from farandole.data import ParquetDataset
data = ParquetDataset({str(tmp_path)!r}, columns=["id"], buffer_bytes=1 << 10, index_cache=None)
data.validate()
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
process, sizes = psutil.Process(), []
for epoch in range(20):
    plan = data.epoch_plan(seed=0, epoch=epoch, batch_size=1000, num_slots=8)
    ids = [int(i) for block in data.read(plan, range(8)) for i in block.columns["id"]]
    assert sorted(ids) == list(range(50_000))
    gc.collect()
    sizes.append(process.memory_info().rss)
print((max(sizes[5:]) - max(sizes[:5])) >> 20)
"""
    assert int(run(code)) < 24


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 22])
@pytest.mark.parametrize("group_rows", [1, 700, 3000])
def test_neither_threads_nor_memory_change_what_is_read(
    tmp_path: Path, group_rows: int, buffer_bytes: int
) -> None:
    for place, rows in enumerate([0, 900, 2100]):
        table = pa.table({"id": np.arange(rows) + 900 * (place == 2)})
        pq.write_table(table, tmp_path / f"{place}.parquet", row_group_size=group_rows)
    for num_threads in (1, 3):
        data = ParquetDataset(
            tmp_path, columns=["id"], buffer_bytes=buffer_bytes, num_threads=num_threads
        )
        plan = data.epoch_plan(seed=2, epoch=1, batch_size=300, num_slots=4, window_rows=20)
        expected = [plan.slot_row_ids(step, slot) for step in range(10) for slot in range(4)]
        blocks = list(data.read(plan, range(4)))
        for ids, block in zip(expected, blocks, strict=True):
            assert np.array_equal(block.row_ids, ids)
            assert np.array_equal(block.columns["id"], ids)


def test_a_forked_process_is_told_to_read_anew(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": np.arange(5000)}), tmp_path / "x.parquet", row_group_size=500)
    code = f"""
import os, warnings
warnings.simplefilter("ignore")
from farandole.data import ParquetDataset
from farandole.errors import UsageError
data = ParquetDataset({str(tmp_path)!r}, columns=["id"], buffer_bytes=1)
plan = data.epoch_plan(seed=0, epoch=0, batch_size=50, num_slots=2)
blocks = data.read(plan, range(2))
next(blocks)
child = os.fork()
if child == 0:
    try:
        next(blocks)
    except UsageError as error:
        assert "make a new iterator" in str(error)
        ids = [i for block in data.read(plan, range(2)) for i in block.columns["id"].tolist()]
        os._exit(0 if sorted(ids) == list(range(5000)) else 3)
    os._exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
blocks.close()
"""
    run(code)
