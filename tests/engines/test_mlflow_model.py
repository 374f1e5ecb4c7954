"""Our saved models as MLflow's: recorded, loaded and served by MLflow's own tools."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlflow")

import mlflow
import pandas as pd
import torch
from mlflow_support import Harness, answers, command, free_port, new_database, wait_until

import farandole
from farandole.data.preprocess import Preprocessor
from farandole.errors import DataError, TrackerError
from farandole.integrations.mlflow import save_pyfunc
from farandole.job.model import save_model

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

ROWS = pd.DataFrame(
    {
        "distance": [100.0, 2500.0, None],
        "hour": [5, 18, 23],
        "carrier": ["UA", "ZZ", None],
    }
)


class Net(torch.nn.Module):
    """A small model of two numbers and a category."""

    def __init__(self) -> None:
        super().__init__()
        self.carriers = torch.nn.Embedding(3, 2)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        self.out = torch.nn.Linear(8, 1)

    def forward(self, features: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        x = torch.cat([features, self.carriers(categories[:, 0])], dim=1)
        return torch.sigmoid(self.out(self.layers(x))).squeeze(1)


class Secretive(Net):
    """A model that cannot be exported, since what it does depends on its values."""

    def forward(self, features: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        result = super().forward(features, categories)
        return result if float(result.detach().sum()) > 0 else -result


def save(folder: Path, net: Net) -> Path:
    preprocessor = Preprocessor(
        numeric=("distance", "hour"),
        categorical=("carrier",),
        means=(1000.0, 12.0),
        stds=(500.0, 6.0),
        vocabularies=(("AA", "UA"),),
        fills=(1000.0, 12.0),
    )
    example = (torch.zeros(2, 2), torch.zeros(2, 1, dtype=torch.int64))
    save_model(folder, net.eval(), example, preprocessor)
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return save(tmp_path_factory.mktemp("saved") / "model", Net())


@pytest.fixture
def harness(mlflow_template: Path, tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(new_database(mlflow_template, tmp_path), tmp_path, embedded=True)
    mlflow.set_tracking_uri(harness.uri)
    yield harness
    mlflow.set_tracking_uri(None)


def expected(model_dir: Path) -> list[float]:
    return farandole.load_model(model_dir).predict(ROWS)["output"].tolist()


def test_a_recorded_model_loads_and_predicts(harness: Harness, model_dir: Path):
    import mlflow.pyfunc

    tracker = harness.make()
    run_id = tracker.start(run_name="x", run_id=None, tags={})
    tracker.log_model(model_dir)
    tracker.log_model(model_dir)
    experiment = harness.client.get_run(run_id).info.experiment_id
    (logged,) = harness.client.search_logged_models([experiment])
    loaded = mlflow.pyfunc.load_model(f"runs:/{run_id}/model")
    assert loaded.metadata.model_id == logged.model_id
    assert loaded.predict(ROWS)["output"].tolist() == expected(model_dir)
    assert loaded.metadata.signature.inputs.input_names() == ["distance", "hour", "carrier"]
    assert loaded.metadata.signature.outputs.input_names() == ["output"]
    assert list(loaded.input_example.columns) == ["distance", "hour", "carrier"]
    assert len(loaded.predict(loaded.input_example)) == 2


def test_a_changed_model_is_recorded_beside_the_first(
    harness: Harness, model_dir: Path, tmp_path: Path
):
    tracker = harness.make()
    run_id = tracker.start(run_name="x", run_id=None, tags={})
    tracker.log_model(model_dir)
    tracker.log_model(save(tmp_path / "other", Net()))
    experiment = harness.client.get_run(run_id).info.experiment_id
    assert len(harness.client.search_logged_models([experiment])) == 2


def test_a_pickle_is_loaded_only_by_those_who_trust_it(harness: Harness, tmp_path: Path):
    import mlflow.pyfunc

    path = tmp_path / "packed"
    save_pyfunc(save(tmp_path / "saved", Secretive()), path)
    with pytest.raises(DataError, match="allow_pickle"):
        mlflow.pyfunc.load_model(str(path))
    loaded = mlflow.pyfunc.load_model(str(path), model_config={"allow_pickle": True})
    assert len(loaded.predict(ROWS)) == 3


def test_a_column_without_a_type_in_mlflow(tmp_path: Path):
    columns: list[dict[str, Any]] = [{"name": "z", "dtype": "complex128"}]
    (tmp_path / "signature.json").write_text(json.dumps({"inputs": columns, "outputs": []}))
    with pytest.raises(TrackerError, match="complex128"):
        save_pyfunc(tmp_path, tmp_path / "out")


def test_a_recorded_model_is_served(harness: Harness, model_dir: Path, tmp_path: Path):
    tracker = harness.make()
    run_id = tracker.start(run_name="x", run_id=None, tags={})
    tracker.log_model(model_dir)
    with serving(f"runs:/{run_id}/model", harness.uri, tmp_path) as url:
        body = json.dumps({"dataframe_split": json.loads(ROWS.to_json(orient="split"))})
        answer = post(f"{url}/invocations", body)
    predicted = [row["output"] for row in answer["predictions"]]
    assert predicted == pytest.approx(expected(model_dir), rel=1e-6)


@contextlib.contextmanager
def serving(model: str, uri: str, folder: Path) -> Iterator[str]:
    """Run `mlflow models serve` in this environment; yield its URL."""
    port = free_port()
    argv = [sys.executable, "-m", "mlflow", "models", "serve", "--model-uri", model]
    argv += ["--port", str(port), "--env-manager", "local", "--workers", "1"]
    # It looks its own server's command up, also where no environment is activated.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with command(argv, folder / "serve.log", MLFLOW_TRACKING_URI=uri, PATH=path):
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{url}/ping"), 120, "model server")
        yield url


def post(url: str, body: str) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body.encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)
