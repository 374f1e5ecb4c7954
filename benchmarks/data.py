"""How fast batches come out of Parquet files, against decoding the files and nothing more.

One thread decodes for the measure, in batches of 65,536 rows (the best size), in the order of the
files. Ours is shuffled, in batches of 1,024 rows, and is checked to give the same rows.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from farandole.data import ParquetDataset

BATCH_ROWS = 1024
NUM_SLOTS = 1
NUM_FILES = 4


@dataclass(frozen=True)
class Case:
    """A data set, and what is read of it."""

    name: str
    num_rows: int
    group_rows: int
    kind: str = "plain"

    def write(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        folder.mkdir(parents=True)
        for place in range(NUM_FILES):
            pq.write_table(
                self._table(rng, self.num_rows // NUM_FILES),
                folder / f"{place}.parquet",
                row_group_size=self.group_rows,
                use_dictionary=self.kind == "dictionary",
            )

    def _table(self, rng: np.random.Generator, num_rows: int) -> pa.Table:
        if self.kind == "binary":
            tensors = pa.array([rng.bytes(12_288) for _ in range(num_rows)], pa.binary())
            return pa.table({"x": tensors, "y": rng.random(num_rows, np.float32)})
        if self.kind == "dictionary":
            values = (rng.integers(0, 20_000, num_rows).astype(np.float32) for _ in range(40))
        else:
            values = (rng.standard_normal(num_rows, np.float32) for _ in range(40))
        return pa.table({f"c{place}": column for place, column in enumerate(values)})

    def dataset(self, folder: Path, num_threads: int) -> ParquetDataset:
        if self.kind == "binary":
            columns = ["x", "y"]
            return ParquetDataset(folder, columns=columns, num_threads=num_threads)
        features = [f"c{place}" for place in range(40)]
        return ParquetDataset(folder, features=features, num_threads=num_threads)


CASES = {
    case.name: case
    for case in (
        Case("plain, groups of 65,536", 4_200_000, 65_536),
        Case("plain, groups of 1,050,000", 4_200_000, 1_050_000),
        Case("dictionary, groups of 65,536", 4_200_000, 65_536, "dictionary"),
        Case("dictionary, groups of 1,050,000", 4_200_000, 1_050_000, "dictionary"),
        Case("12 KB binary", 40_000, 1000, "binary"),
    )
}


def raw(folder: Path) -> dict[str, float]:
    """Decode all files in one thread."""
    start, cpu, num_rows = time.perf_counter(), time.process_time(), 0
    first_s = 0.0
    for path in sorted(folder.iterdir()):
        with pq.ParquetFile(path, buffer_size=1 << 17) as source:
            for batch in source.iter_batches(batch_size=1 << 16, use_threads=False):
                first_s = first_s or time.perf_counter() - start
                num_rows += batch.num_rows
    return _result(start, cpu, first_s, num_rows)


def ours(case: Case, folder: Path, num_threads: int) -> dict[str, float]:
    """Read all batches, shuffled, and check that all rows come out."""
    start, cpu = time.perf_counter(), time.process_time()
    dataset = case.dataset(folder, num_threads)
    plan = dataset.epoch_plan(seed=0, epoch=0, batch_size=BATCH_ROWS, num_slots=NUM_SLOTS)
    first_s, ids = 0.0, np.zeros(case.num_rows, np.bool_)
    for block in dataset.read(plan, range(NUM_SLOTS)):
        first_s = first_s or time.perf_counter() - start
        ids[block.row_ids] = True
    result = _result(start, cpu, first_s, int(np.count_nonzero(ids)))
    if result["num_rows"] != case.num_rows:
        raise SystemExit(f"{case.name}: {result['num_rows']} of {case.num_rows} rows came out")
    return result


def _result(start: float, cpu: float, first_s: float, num_rows: int) -> dict[str, float]:
    return {
        "pace": num_rows / (time.perf_counter() - start),
        "cpu_pace": num_rows / (time.process_time() - cpu),
        "first_s": first_s,
        "num_rows": num_rows,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def contestant(name: str, case: Case, folder: Path) -> dict[str, float]:
    """Time one contestant in a process of its own."""
    command = [sys.executable, __file__, name, case.name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout)


def compare(
    folder: Path, rounds: int, console: Console, spread: Callable[[list[float]], str]
) -> None:
    """Print a table of all cases."""
    table = Table(title="Shuffled batches of 1,024 rows against decoding alone (rows per second)")
    for column in ("data", "decoding, M rows/s"):
        table.add_column(column)
    for threads in (1, 2):
        for column in ("ratio", "by CPU time", "first batch s", "peak RSS MB"):
            table.add_column(f"{threads} thr.: {column}")
    for case in CASES.values():
        case.write(folder / "data")
        results: dict[str, list[dict[str, float]]] = {"raw": [], "1": [], "2": []}
        for _ in range(rounds):
            for name, all_rounds in results.items():
                all_rounds.append(contestant(name, case, folder / "data"))
        cells = [case.name, spread([result["pace"] / 1e6 for result in results["raw"]])]
        for threads in ("1", "2"):
            pairs = list(zip(results[threads], results["raw"], strict=True))
            cells += [
                spread([ours[key] / raw[key] for ours, raw in pairs])
                for key in ("pace", "cpu_pace")
            ]
            cells += [spread([result[key] for result, _ in pairs]) for key in ("first_s", "rss_mb")]
        table.add_row(*cells)
        print(" | ".join(cells), file=sys.stderr, flush=True)
        shutil.rmtree(folder / "data")
    console.print(table)


def main() -> None:
    name, case, folder = CASES.get(sys.argv[2]), sys.argv[1], Path(sys.argv[3])
    assert name is not None
    result = raw(folder) if case == "raw" else ours(name, folder, int(case))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
