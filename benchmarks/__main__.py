"""Farandole and its peers side by side, in one run: `make bench`.

Reading against other libraries: `python -m benchmarks data-peers`.

Prints ratios of paces (steps per second), the median over rounds and their spread, after
checking that all contestants computed the same thing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks import data_peers
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
import data

HERE = Path(__file__).parent
CONTESTANTS = HERE / "contestants.py"
TIMEOUT_S = 300
NUM_STEPS = {"small": 100, "medium": 60, "wide": 60}


def call(command: list[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def farandole(function: str, folder: Path, *, params: dict[str, Any], **flags: Any) -> None:
    command = [sys.executable, "-m", "farandole.cli", "run", f"{CONTESTANTS}:{function}"]
    command += ["--runs", str(folder / "runs"), "-o", "checkpoint.every_s=1000000"]
    for name, value in params.items():
        command += ["-p", f"{name}={json.dumps(value)}"]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    call(command)


def torchrun(mode: str, workload: str, num_steps: int, out: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    call([*command, str(CONTESTANTS), mode, workload, str(num_steps), str(out)])


def side_by_side(workload: str, num_steps: int, out: Path) -> None:
    """Run two loops at once that exchange nothing: the limit."""
    command = [sys.executable, str(CONTESTANTS), "alone", workload, str(num_steps), str(out)]
    both = [
        subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(r), "WORLD_SIZE": "2"}
        )
        for r in range(2)
    ]
    if any(process.wait(TIMEOUT_S) for process in both):
        raise SystemExit("a loop of its own failed")


def spread(values: Iterable[float]) -> str:
    ordered = sorted(values)
    return f"{statistics.median(ordered):.2f} ({ordered[0]:.2f} to {ordered[-1]:.2f})"


def ratios(paces: list[float], others: list[float]) -> str:
    """Compare round by round: what disturbs one contestant of a round disturbs the other."""
    return spread(a / b for a, b in zip(paces, others, strict=True))


def one_worker(folder: Path, models: list[str], rounds: int, console: Console) -> None:
    table = Table(title="One worker against a plain loop in the same process")
    for column in ("model", "slots", "Farandole steps/s", "plain", "ratio"):
        table.add_column(column)
    for workload in models:
        for slots in (1, 8):
            num_steps = NUM_STEPS[workload] // (2 if slots == 1 else 5)
            out = folder / f"one-{workload}-{slots}.json"
            params = {"workload": workload, "num_steps": num_steps, "rounds": rounds}
            farandole(
                "alternate", folder, params={**params, "out": str(out)}, workers=1, slots=slots
            )
            result = json.loads(out.read_text())
            if not np.allclose(*result["digests"], rtol=1e-3, atol=1e-2):
                raise SystemExit(
                    f"{workload}, {slots} slots: the two loops computed different things"
                )
            ours, plain = result["paces"]["farandole"], result["paces"]["plain"]
            table.add_row(workload, str(slots), spread(ours), spread(plain), ratios(ours, plain))
            said = f"{workload}, {slots} slots: {ratios(ours, plain)} of the plain loop"
            print(said, file=sys.stderr, flush=True)
    console.print(table)


def two_workers(folder: Path, models: list[str], rounds: int, console: Console) -> None:
    names = ("limit", "ddp", "exact", "network exact", "network fast")
    ratio_names = ("exact/ddp", "exact/limit", "net. exact/ddp", "net. fast/ddp")
    for workload in models:
        num_steps = NUM_STEPS[workload]
        paces: dict[str, list[float]] = {name: [] for name in names}
        digests: dict[str, list[float]] = {}

        def ours(out: Path, workload: str = workload, n: int = num_steps, **flags: str) -> None:
            params = {"workload": workload, "num_steps": n, "out": str(out)}
            farandole("train", folder, params=params, workers=2, slots=2, **flags)

        contestants: dict[str, Callable[[Path], None]] = {
            "limit": lambda out, w=workload, n=num_steps: side_by_side(w, n, out),
            "ddp": lambda out, w=workload, n=num_steps: torchrun("ddp", w, n, out),
            "exact": ours,
            "network exact": lambda out: ours(out, transport="network"),
            "network fast": lambda out: ours(out, transport="network", reduction="fast"),
        }
        for _ in range(rounds):
            for name in names:
                out = folder / "pace.json"
                out.unlink(missing_ok=True)
                contestants[name](out)
                result = json.loads(out.read_text())
                paces[name].append(result["pace"])
                digests[name] = result["digest"]
            said = ", ".join(f"{name} {values[-1]:.1f}" for name, values in paces.items())
            print(f"{workload}: {said}", file=sys.stderr, flush=True)
        for name in names[2:]:
            if not np.allclose(digests[name], digests["ddp"], rtol=1e-3, atol=1e-2):
                raise SystemExit(f"{workload}: {name} and ddp computed different things")
        table = Table(*names, *ratio_names, title=f"Two workers, two slots, {workload} model")
        table.add_row(
            *(spread(paces[name]) for name in names),
            ratios(paces["exact"], paces["ddp"]),
            ratios(paces["exact"], paces["limit"]),
            ratios(paces["network exact"], paces["ddp"]),
            ratios(paces["network fast"], paces["ddp"]),
        )
        console.print(table)


def slots_cost(folder: Path, models: list[str], rounds: int, console: Console) -> None:
    table = Table(title="What slots cost: one worker, steps/s against one slot")
    table.add_column("model (rows a batch)")
    all_slots = (1, 2, 4, 8, 16)
    for slots in all_slots:
        table.add_column(f"{slots} slots")
    for workload in models:
        num_steps = NUM_STEPS[workload] // 2
        paces: dict[int, list[float]] = {slots: [] for slots in all_slots}
        for _ in range(rounds):
            for slots in all_slots:
                out = folder / "pace.json"
                params = {"workload": workload, "num_steps": num_steps, "out": str(out)}
                farandole("train", folder, params=params, workers=1, slots=slots)
                paces[slots].append(json.loads(out.read_text())["pace"])
        cells = [ratios(paces[slots], paces[1]) for slots in all_slots]
        table.add_row(workload, *cells)
    console.print(table)


def time_to_first_step(folder: Path, models: list[str], rounds: int, console: Console) -> None:
    table = Table(title="Seconds from command to first step, two workers")
    for column in ("Farandole", "torchrun", "ratio"):
        table.add_column(column)
    seconds: dict[str, list[float]] = {"farandole": [], "torchrun": []}
    out = folder / "first.json"
    for _ in range(rounds):
        start = time.time()
        farandole("first_step", folder, params={"out": str(out)}, workers=2)
        seconds["farandole"].append(json.loads(out.read_text())["time"] - start)
        start = time.time()
        torchrun("first_step", "wide", 1, out)
        seconds["torchrun"].append(json.loads(out.read_text())["time"] - start)
    both = list(seconds.values())
    table.add_row(*(spread(values) for values in both), ratios(*both))
    console.print(table)


def reading(folder: Path, models: list[str], rounds: int, console: Console) -> None:
    data.compare(folder, rounds, console, spread)


PARTS = {
    "one-worker": one_worker,
    "two-workers": two_workers,
    "slots": slots_cost,
    "first-step": time_to_first_step,
    "data": reading,
}


def main() -> None:
    if sys.argv[1:2] == ["data-peers"]:
        data_peers.main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--models", nargs="+", choices=NUM_STEPS, default=list(NUM_STEPS))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    console = Console(width=160)
    console.print(
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores, medians of {arguments.rounds} rounds (lowest to highest)"
    )
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder:
        for part in arguments.parts:
            PARTS[part](Path(folder), arguments.models, arguments.rounds, console)


if __name__ == "__main__":
    main()
