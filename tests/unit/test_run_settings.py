"""What `run` and `launch` make of a function and its settings before any worker starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farandole.config import JobConfig
from farandole.errors import TargetError
from farandole.job import launch as launch_module
from farandole.job.launch import Result, launch, run
from farandole.job.rundir import RunDir


def train(job: Any, lr: float, width: int = 4) -> None: ...


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[JobConfig]:
    """Catch the configurations that would be launched."""
    configs: list[JobConfig] = []

    def fake(config: JobConfig, function: Any = None, **options: Any) -> Result:
        configs.append(config)
        return Result(Path("job"))

    monkeypatch.setattr(launch_module, "launch", fake)
    return configs


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text("[params]\nlr = 0.5\nwidth = 8\n")
    return path


def test_parameters_are_merged_with_those_of_the_file(
    launched: list[JobConfig], file: Path
) -> None:
    run(train, config=file)
    run(train, config=file, params={"lr": 0.25})
    run(str(file), config=file, params={"width": 2})
    assert [config.params for config in launched] == [
        {"lr": 0.5, "width": 8},
        {"lr": 0.25, "width": 8},
        {"lr": 0.5, "width": 2},
    ]


def test_a_function_is_judged_with_the_parameters_of_the_file(
    launched: list[JobConfig], file: Path
) -> None:
    with pytest.raises(TargetError, match="needs a value for lr"):
        run(train)
    file.write_text("[params]\nlr = 0.5\nwdth = 8\n")
    with pytest.raises(TargetError, match="did you mean 'width'"):
        run(train, config=file)
    assert launched == []


# --- resuming -------------------------------------------------------------------------------


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> JobConfig:
    """Return the configuration of a job to resume that was given its function as an object."""

    class NoLauncher:
        def __init__(self, config: JobConfig, run: RunDir, *rest: Any) -> None:
            self._run = run

        def run(self) -> Result:
            return Result(self._run.path)

    monkeypatch.setattr(launch_module, "Launcher", NoLauncher)
    settings = {"run_dir": tmp_path / "job", "workers": 1, "params": {"lr": 0.5}}
    # A closure of a notebook: no file holds it.
    launch(JobConfig(target="<cell 3>:train", **settings), lambda job, lr: None)
    return JobConfig(target="<cell 3>:train", resume=True, **settings)


def test_a_resumed_job_keeps_the_function_that_it_was_given(given: JobConfig) -> None:
    assert given.run_dir is not None
    file = RunDir(given.run_dir).function_file
    before = file.read_bytes()
    launch(given)
    assert file.read_bytes() == before
    launch(given, train)
    assert file.read_bytes() != before


def test_a_resumed_job_can_be_given_a_file_instead(given: JobConfig, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("def train(job, lr): ...\n")
    launch(given.model_copy(update={"target": str(tmp_path / "other.py")}))
    run = RunDir(tmp_path / "job")
    assert not run.function_file.exists()
    assert run.read_config().target == f"{tmp_path / 'other.py'}:train"
