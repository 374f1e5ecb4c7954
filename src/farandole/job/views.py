"""Jobs as they are listed and looked at: summaries of run directories."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole.errors import RunDirectoryError, UnknownNameError
from farandole.job.rundir import LineReader, RunDir, RunState

TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class RunSummary:
    """A job in short.

    Parameters
    ----------
    run : RunDir
        Its folder.
    state : RunState
        How it stands.
    step, epoch, total_steps : int, optional
        The last step that was recorded; the epoch counts from 0. The total as planned.
    values : dict
        What was logged at that step, by name.
    evaluations : dict
        The last result of each evaluation, by its name.
    """

    run: RunDir
    state: RunState
    step: int | None
    epoch: int | None
    total_steps: int | None
    values: dict[str, float]
    evaluations: dict[str, dict[str, float]]

    @property
    def elapsed_s(self) -> float:
        """Seconds from start to end, or to now."""
        end = self.state.ended if self.state.ended is not None else time.time()
        return max(end - self.state.started, 0.0)


def summarize(run: RunDir) -> RunSummary:
    """Return a job in short. Reads only the ends of its files. Raises `RunDirectoryError`."""
    state = run.read_state()
    step = epoch = total_steps = None
    values: dict[str, float] = {}
    evaluations: dict[str, dict[str, float]] = {}
    for record in _tail(run.metrics_file):
        if record.get("kind") == "step":
            step, epoch, values = record["step"], record.get("epoch"), record["values"]
        elif record.get("kind") == "evaluation":
            evaluations[record.get("name", "evaluation")] = record["values"]
    for event in _tail(run.events_file):
        if event.get("kind") == "plan":
            total_steps = event.get("total_steps")
    return RunSummary(run, state, step, epoch, total_steps, values, evaluations)


def list_runs(runs: Path) -> list[RunSummary]:
    """Return the jobs in a folder, oldest first; folders that hold no job are left out."""
    found: list[RunSummary] = []
    for run in _folders(runs):
        try:
            found.append(summarize(run))
        except RunDirectoryError:
            continue
    return sorted(found, key=lambda summary: summary.state.started)


def find_run(name: str, runs: Path) -> RunDir:
    """Return the job that is meant by a path, a name in `runs`, or the unique start of one.

    Raises
    ------
    UnknownNameError
        No job, or more than one, has this name.
    """
    path = Path(name)
    if RunDir(path).config_file.is_file():
        return RunDir(path.absolute())
    names = {run.name: run for run in _folders(runs)}
    matches = [name] if name in names else [known for known in names if known.startswith(name)]
    if len(matches) != 1:
        known = tuple(sorted(matches or names))
        raise UnknownNameError(kind=f"job in {runs}", name=name, known=known)
    return names[matches[0]]


def newest_run(runs: Path) -> RunDir:
    """Return the job in a folder that was started last. Raises `RunDirectoryError` if none is."""
    found = list_runs(runs)
    if not found:
        problem, remedy = "holds no jobs", "start one with `farandole run`, or give --runs"
        raise RunDirectoryError(path=str(runs), problem=problem, remedy=remedy)
    return found[-1].run


def _folders(runs: Path) -> Iterator[RunDir]:
    if runs.is_dir():
        for path in sorted(runs.iterdir()):
            if (path / "config.json").is_file():
                yield RunDir(path.absolute())


def _tail(path: Path) -> list[dict[str, Any]]:
    """Return the last records of a file of JSON lines."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return []
    return LineReader(path, start=max(size - TAIL_BYTES, 0)).read()
