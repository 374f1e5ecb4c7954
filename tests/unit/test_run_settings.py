"""What `run` and `launch` make of a function and its settings before any worker starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farandole.config import JobConfig
from farandole.errors import TargetError
from farandole.job import launch as launch_module
from farandole.job.launch import Result, run


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
