from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def mlflow_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an MLflow database with all its tables; making them takes seconds."""
    mlflow = pytest.importorskip("mlflow")
    path = tmp_path_factory.mktemp("template") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path
