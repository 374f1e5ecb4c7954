"""`fa.run` with MLflow, from the training function to the recorded model."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlflow")

from mlflow_support import EXPERIMENT, Harness, new_database

import farandole as fa
from farandole.job.rundir import RunDir
from farandole.job.tracking import tracked_run

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

TRAIN = """
import numpy as np
import torch
import farandole as fa

def train(job, broken=False):
    features = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
    dataset = fa.ArrayDataset(features, features[:, 0] > 0)
    net = torch.nn.Linear(4, 1)
    model, optimizer = job.prepare(net, lambda params: torch.optim.Adam(params, lr=0.01))
    loss_fn = torch.nn.BCEWithLogitsLoss()
    for _ in job.epochs(2):
        for batch in job.loader(dataset, batch_size=16):
            loss = loss_fn(model(batch.features).squeeze(1), batch.label.float())
            job.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            job.log(loss=loss)
        if broken:
            raise ValueError("on purpose")
    job.save(model, example=batch)
"""


@pytest.fixture
def harness(mlflow_template: Path, tmp_path: Path) -> Harness:
    (tmp_path / "train.py").write_text(TRAIN)
    return Harness(new_database(mlflow_template, tmp_path), tmp_path, embedded=True)


def run(folder: Path, **settings) -> fa.Result:
    tracker = {"name": "mlflow", "experiment": EXPERIMENT, "flush_s": 120.0}
    target = str(folder / "train.py")
    return fa.run(target, workers=2, runs=folder, tracker=tracker, progress=False, **settings)


def test_a_job_is_recorded_with_metrics_report_and_model(harness: Harness, tmp_path: Path):
    import mlflow.pyfunc
    import pandas as pd

    result = run(tmp_path)
    (run_id,) = harness.run_ids()
    assert tracked_run(Path(result.run_dir)) == run_id
    recorded = harness.read(run_id)
    assert recorded.status == "finished"
    lines = [line for line in RunDir(result.run_dir).metrics() if line["kind"] == "step"]
    assert len(lines) > 20
    assert recorded.metrics["loss"] == [(line["step"], line["values"]["loss"]) for line in lines]
    assert recorded.tags["farandole.workers"] == "2"
    assert "report/report.md" in recorded.artifacts
    (logged,) = harness.client.search_logged_models(
        [harness.client.get_run(run_id).info.experiment_id]
    )
    loaded = mlflow.pyfunc.load_model(logged.artifact_location)
    rows = pd.DataFrame(
        [[0.5, 1.0, 0.0, 2.0]], columns=loaded.metadata.signature.inputs.input_names()
    )
    ours = fa.load_model(Path(result.run_dir) / "model").predict(rows)["output"]
    assert loaded.predict(rows)["output"].tolist()[0] == ours[0]


def test_a_job_that_fails_is_recorded_as_failed(harness: Harness, tmp_path: Path):
    with pytest.raises(fa.errors.WorkerFailedError, match="on purpose"):
        run(tmp_path, params={"broken": True})
    (run_id,) = harness.run_ids()
    assert harness.status(run_id) == "failed"
