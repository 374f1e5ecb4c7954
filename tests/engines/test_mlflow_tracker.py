"""The adapter by itself: on an embedded database, and on a server over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("mlflow")

from mlflow_support import Harness, free_port, new_database, server

from farandole.errors import TrackerError
from farandole.integrations.mlflow import MlflowTracker
from farandole.testing.tracker import TRACKER_CHECKS

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def embedded(mlflow_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    folder = tmp_path_factory.mktemp("embedded")
    return Harness(new_database(mlflow_template, folder), folder, embedded=True)


@pytest.fixture(scope="module", params=["embedded", "served"])
def harness(
    request: pytest.FixtureRequest,
    mlflow_template: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Harness]:
    folder = tmp_path_factory.mktemp(request.param)
    database = new_database(mlflow_template, folder)
    if request.param == "embedded":
        yield Harness(database, folder, embedded=True)
        return
    with server(folder, free_port()) as url:
        yield Harness(url, folder, embedded=False)


@pytest.mark.parametrize("check", TRACKER_CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, harness: Harness, tmp_path: Path):
    check(harness, tmp_path)


def test_embedded_artifacts_lie_beside_the_runs(embedded: Harness, tmp_path: Path):
    tracker = embedded.make()
    tracker.start(run_name="x", run_id=None, tags={})
    (tmp_path / "here.txt").write_text("x")
    tracker.log_artifact(tmp_path / "here.txt", "")
    assert list((embedded.runs / "mlartifacts").rglob("here.txt"))


def test_a_deleted_experiment_names_the_remedy(embedded: Harness):
    client = embedded.client
    client.delete_experiment(client.create_experiment("gone"))
    tracker = MlflowTracker(uri=embedded.uri, experiment="gone", runs=embedded.runs)
    with pytest.raises(TrackerError, match="restore it"):
        tracker.start(run_name="x", run_id=None, tags={})


def test_nothing_is_sent_before_the_start(embedded: Harness):
    with pytest.raises(TrackerError, match="start"):
        embedded.make().finish("finished")
