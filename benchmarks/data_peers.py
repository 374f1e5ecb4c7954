"""Reading a shuffled table: Farandole and its peers, each in its own environment.

`python -m benchmarks data-peers`. A contestant is a script in `peers/`, which yields an epoch's
batches as one float32 matrix each. All take turns, in as many rounds as asked for. Peers get two
loader workers or threads where they have such a setting and are no slower with it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

SCRIPTS = Path(__file__).parent / "peers"
NUM_COLUMNS = 40
OWN = {
    "raw decode": ["raw_decode.py"],
    "farandole, 1 thread": ["farandole_loader.py", "1"],
    "farandole, 2 threads": ["farandole_loader.py", "2"],
    "torch DataLoader": ["torch_loader.py"],
}
PEERS = {
    "petastorm": ("petastorm_loader.py", ["torch", "petastorm", "pyarrow<15", "numpy<2",
                                          "pandas<2.3", "pyspark<4"]),
    "huggingface": ("huggingface.py", ["torch", "datasets"]),
    "ray": ("ray_data.py", ["ray[data]"]),
    "mosaicml": ("mosaicml.py", ["torch", "pyarrow", "mosaicml-streaming"]),
    "litdata": ("litdata_loader.py", ["torch", "pyarrow", "litdata"]),
    "tensorflow": ("tf_data.py", ["tensorflow", "pyarrow"]),
    "daft": ("daft_frame.py", ["daft", "numpy", "pyarrow"]),
}  # fmt: skip


def make_table(folder: Path, num_rows: int) -> None:
    """Write normal float32 values in files of 65,536 rows; column 0 numbers the rows."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for start in range(0, num_rows, 65536):
        rows = min(65536, num_rows - start)
        columns = {f"c{i}": rng.standard_normal(rows, np.float32) for i in range(NUM_COLUMNS)}
        columns["c0"] = np.arange(start, start + rows, dtype=np.float32)
        path = folder / f"{start:09d}.parquet"
        pq.write_table(pa.table(columns), path, use_dictionary=False)


def install(name: str, requirements: list[str], cache: Path) -> str:
    """Make a peer's environment unless it is there; return why that failed, or nothing."""
    folder = cache / name
    if (folder / "ok").exists():
        return ""
    python = folder / "bin/python"
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        command = [str(python), "-m", "pip", "install", "-q", *requirements]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    (folder / "ok").touch()
    return ""


def compete(python: str, script: list[str], settings: list[str]) -> dict[str, Any] | str:
    """Run a contestant once; return what it found, or why it failed."""
    command = [python, str(SCRIPTS / script[0]), *settings, *script[1:]]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=600, check=False
        )
    except subprocess.TimeoutExpired:
        return "took more than 600 s"
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return (done.stderr.strip().splitlines() or ["ended without a result"])[-1]


def verdict(found: dict[str, Any], num_rows: int) -> str:
    """Say whether each row came out once."""
    if not found["complete"]:
        once = "none twice" if found["most"] == 1 else f"up to {found['most']} times"
        return f"cut short; {once}"
    lost = num_rows - found["distinct"]
    repeated = found["num_rows"] - found["distinct"]
    same = found["id_sum"] == num_rows * (num_rows - 1) // 2
    if lost == repeated == 0 and same:
        return "yes"
    return f"lost {lost:,}, repeated {repeated:,}"


def spread(values: Iterable[float], digits: int = 2) -> str:
    low, *_, high = ordered = sorted([*values] * 2)
    return f"{statistics.median(ordered):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser("benchmarks data-peers", description=__doc__)
    parser.add_argument("--rows", type=int, default=1 << 20)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=20.0, help="per contestant and round")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--cache", type=Path, default=Path(".cache/peers"))
    options = parser.parse_args(arguments)
    cache = options.cache.absolute()
    table = cache / f"table-{options.rows}"
    if not table.exists():
        make_table(table, options.rows)
    contestants = {name: (sys.executable, script) for name, script in OWN.items()}
    for name in options.peers:
        script, requirements = PEERS[name]
        if problem := install(name, requirements, cache):
            print(f"{name} does not install: {problem}", flush=True)
        else:
            contestants[name] = (str(cache / name / "bin/python"), [script])
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    for seed in range(options.rounds):
        for name, (python, script) in contestants.items():
            if len(results[name]) < seed:
                continue  # it has failed
            made = cache / f"made-{options.rows}-{name}"
            limits = (options.batch_size, options.limit_s, seed)
            found = compete(python, script, [str(table), str(made), *map(str, limits)])
            if isinstance(found, str):
                print(f"{name} failed: {found}", flush=True)
            else:
                results[name].append(found)
                print(f"{name}: {found['pace']:,.0f} rows/s", file=sys.stderr, flush=True)
    show({name: found for name, found in results.items() if found}, options)


def show(results: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    title = f"{options.rows:,} rows of {NUM_COLUMNS} float32, batches of {options.batch_size:,}"
    table = Table(title=f"{title}, medians (lowest to highest)")
    for column in (
        "contestant", "version", "million rows/s", "farandole / it", "first batch, s",
        "each row once", "spread of batch means",
    ):  # fmt: skip
        table.add_column(column)
    ours = [found["pace"] for found in results["farandole, 2 threads"]]
    for name, found in results.items():
        paces = [one["pace"] for one in found]
        spreads = [one["spread"] for one in found if one["spread"] is not None]
        table.add_row(
            name,
            found[0]["version"],
            spread((pace / 1e6 for pace in paces), 3),
            spread(a / b for a, b in zip(ours, paces, strict=False)),
            spread(one["first_s"] for one in found),
            verdict(found[-1], options.rows),
            spread(spreads) if spreads else "",
        )
    Console(width=180).print(table)
