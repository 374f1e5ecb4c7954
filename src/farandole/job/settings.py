"""The configuration of a job, new or resumed, from a file and flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farandole.config import JobConfig, load_config, read_config_file
from farandole.job.rundir import RunDir


def resolve_config(file: Path | None, overrides: Mapping[str, Any]) -> JobConfig:
    """Return a job's configuration; that of a job to resume starts from what it was.

    Parameters
    ----------
    file : Path, optional
        A TOML or YAML file.
    overrides : mapping
        Values by key, dotted inside sections; they win over the file.

    Raises
    ------
    ConfigError
        With every problem.
    RunDirectoryError
        There is no job to resume.
    """
    given = dict(overrides) if file is None else read_config_file(file) | dict(overrides)
    if given.get("resume") is not True or not isinstance(given.get("run_dir"), str | Path):
        return load_config(file, overrides)
    run = RunDir(Path(given["run_dir"]).absolute())
    base = run.read_config()
    # A tracker's database is in the folder of the runs, and the job stays in it.
    kept = {**overrides, "runs": base.runs, "run_dir": run.path}
    return load_config(file, kept, base)
