"""Whole jobs of real workers: from Python, by value, over the network path, in bf16."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fa

JOBS = Path(__file__).parent.parent / "jobs"
sys.path.insert(0, str(JOBS))

import inline_job  # noqa: E402


def train(job: fa.Job, out: str, lr: float = 0.05) -> dict[str, Any]:
    model, optimizer = job.prepare(
        torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 1)),
        lambda params: torch.optim.AdamW(params, lr=lr),
    )
    dataset = inline_job.data()
    for _ in job.epochs(2):
        for batch in job.loader(dataset, batch_size=16):
            with job.autocast():
                loss = inline_job.loss_of(model, batch)
            job.backward(loss)
            optimizer.step()
            job.log(loss=loss)
    job.evaluate(lambda b: {"loss": inline_job.loss_of(model, b)}, dataset, name="holdout")
    job.save(model, [torch.ones(2, 4)])
    if job.rank == 0:
        torch.save(model.state_dict(), Path(out) / "weights.pt")
    return {"workers": job.world_size}


def run(folder: Path, workers: int, **settings: Any) -> fa.Result:
    folder.mkdir()
    function = functools.partial(train, out=str(folder))
    return fa.run(
        function, workers=workers, slots=4, runs=folder / "runs", progress=False, **settings
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "weights.pt", weights_only=True)


def predict_elsewhere(model: Path) -> str:
    """Predict in a process that has never seen the code that trained the model."""
    script = (
        "import sys, numpy, farandole as fa;"
        "rows = numpy.ones((3, 4), numpy.float32);"
        "print(fa.load_model(sys.argv[1]).predict(rows)['output'].shape)"
    )
    command = [sys.executable, "-c", script, str(model)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, check=True, cwd=model
    )
    return done.stdout.strip()


@pytest.mark.timeout(240)
def test_bf16_over_both_paths_equals_one_worker(tmp_path: Path) -> None:
    alone = run(tmp_path / "1", 1, precision="bf16")
    shared = run(tmp_path / "2", 2, precision="bf16")
    network = run(tmp_path / "3", 3, precision="bf16", transport="network", params={"lr": 0.05})
    for result, workers in ((shared, 2), (network, 3)):
        assert (result.status, result.value) == ("finished", {"workers": workers})
        assert result.metrics == alone.metrics
    assert set(alone.metrics) == {"loss", "holdout/loss"}
    first, *others = (weights(tmp_path / name) for name in "123")
    for other in others:
        assert all(torch.equal(value, other[name]) for name, value in first.items())
    rows = np.ones((3, 4), np.float32)
    assert predict_elsewhere(network.model) == "(3, 1)"
    predicted = [fa.load_model(result.model).predict(rows)["output"] for result in (alone, network)]
    assert np.array_equal(*predicted)
