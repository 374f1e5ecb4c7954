"""Records jobs in MLflow."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import farandole
from farandole.errors import TrackerError, without_credentials
from farandole.protocols import MetricPoint

# MLflow takes these from the environment only, some of them while it is imported. What the user
# has set stays. A server that is gone is noticed within seconds: the caller does the retrying.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_UV_AUTO_DETECT", "false")

from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput, Metric, Param, RunTag
from mlflow.environment_variables import MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_USERNAME
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, DataType, Schema
from mlflow.types.schema import AnyType

JOB_TAG = "farandole.job"
MODEL_TAG = "farandole.sha256"
MODEL_NAME = "model"
LOADER = "farandole.integrations.mlflow_model"

# Our tags that MLflow's own tools show under another name.
_KNOWN_TAGS = {
    "farandole.target": "mlflow.source.name",
    "farandole.commit": "mlflow.source.git.commit",
    "farandole.user": "mlflow.user",
}
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_NUMBERS = (
    DataType.boolean,
    DataType.integer,
    DataType.long,
    DataType.float,
    DataType.double,
)
_DATA_TYPES = {
    "bool": DataType.boolean,
    "int8": DataType.integer,
    "int16": DataType.integer,
    "int32": DataType.integer,
    "int64": DataType.long,
    "uint8": DataType.integer,
    "uint16": DataType.integer,
    "uint32": DataType.long,
    "float16": DataType.float,
    "float32": DataType.float,
    "float64": DataType.double,
    "string": DataType.string,
    "binary": DataType.binary,
}


class MlflowTracker:
    """An MLflow run, by the client of MLflow. Making the object does no I/O.

    Parameters
    ----------
    uri : str, optional
        Tracking server (http, https), database (``sqlite:///…``) or `databricks`. Default: an
        sqlite database ``mlflow.db`` in `runs`, with artifacts beside it in ``mlartifacts``.
        A user and password in the URI of a server are used and kept out of all that is recorded.
    experiment : str
        The experiment's name; it is made if there is none.
    runs : Path
        Folder of the run directories.

    Notes
    -----
    MLflow's switches (timeouts, credentials) are process-wide, so a process should hold one
    tracker only; the tracking process does.
    """

    name = "mlflow"

    def __init__(self, *, uri: str | None, experiment: str, runs: Path) -> None:
        self._embedded = uri is None
        self._runs = runs.absolute()
        self._uri = uri if uri is not None else f"sqlite:///{self._runs / 'mlflow.db'}"
        self._experiment = experiment
        self._run_id: str | None = None

    @cached_property
    def _client(self) -> MlflowClient:
        _silence()
        uri = self._uri
        parts = urlsplit(uri)
        if parts.scheme in ("http", "https") and parts.username is not None:
            # As a part of the URI they would show in MLflow's messages and links.
            MLFLOW_TRACKING_USERNAME.set(unquote(parts.username))
            MLFLOW_TRACKING_PASSWORD.set(unquote(parts.password or ""))
            uri = without_credentials(uri)
        return MlflowClient(uri)

    @cached_property
    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            try:
                return self._create_experiment()
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            found = self._client.get_experiment_by_name(self._experiment)
        if found is None or found.lifecycle_stage == "deleted":
            raise TrackerError(
                tracker=self.name,
                problem=f"the experiment {self._experiment!r} was deleted",
                remedy="restore it with `mlflow experiments restore`, or set tracker.experiment",
            )
        return found.experiment_id

    def _create_experiment(self) -> str:
        location = (self._runs / "mlartifacts").as_uri() if self._embedded else None
        return self._client.create_experiment(self._experiment, artifact_location=location)

    def start(self, *, run_name: str, run_id: str | None, tags: Mapping[str, str]) -> str:
        """Open the run `run_id` again, or find the job's by its tag, or make one."""
        run_id = run_id or self._find_run(tags.get(JOB_TAG))
        named = {_KNOWN_TAGS.get(key, key): value for key, value in tags.items()}
        if run_id is None:
            made = self._client.create_run(self._experiment_id, tags=named, run_name=run_name)
            run_id = made.info.run_id
        else:
            self._client.update_run(run_id, status="RUNNING")
            self._client.log_batch(run_id, tags=[RunTag(k, v) for k, v in named.items()])
        self._run_id = run_id
        return run_id

    def _find_run(self, job: str | None) -> str | None:
        """Return the run of a job whose making was never answered."""
        if job is None:
            return None
        query = f"tags.`{JOB_TAG}` = '{job}'"
        found = self._client.search_runs([self._experiment_id], query, max_results=1)
        return found[0].info.run_id if found else None

    def log_params(self, params: Mapping[str, str]) -> None:
        """Record parameters. One that is known keeps its first value, as MLflow demands."""
        known = self._client.get_run(self._run).data.params
        named = {_valid_key(key): value for key, value in params.items()}
        new = [Param(key, value) for key, value in named.items() if key not in known]
        self._client.log_batch(self._run, params=new)

    def log_metrics(self, points: Sequence[MetricPoint]) -> None:
        """Record a batch; MLflow's client cuts it to the size that a call may have."""
        metrics = [Metric(_valid_key(p.key), p.value, round(p.time * 1000), p.step) for p in points]
        self._client.log_batch(self._run, metrics=metrics, synchronous=True)

    def log_artifact(self, path: Path, folder: str) -> None:
        """Record a file or a directory."""
        if path.is_dir():
            self._client.log_artifacts(self._run, str(path), folder or None)
        else:
            self._client.log_artifact(self._run, str(path), folder or None)

    def log_model(self, model_dir: Path) -> None:
        """Record a saved model as a pyfunc model with signature and input example.

        A model that the run has already is not recorded again.
        """
        digest = _digest(model_dir)
        if self._has_model(digest):
            return
        logged = self._client.create_logged_model(
            self._experiment_id,
            name=MODEL_NAME,
            source_run_id=self._run,
            tags={MODEL_TAG: digest},
        )
        with tempfile.TemporaryDirectory(prefix="farandole-model-") as folder:
            described = Model(
                artifact_path=logged.artifact_location,
                run_id=self._run,
                model_uuid=logged.model_id,
                model_id=logged.model_id,
            )
            path = Path(folder) / MODEL_NAME
            save_pyfunc(model_dir, path, described)
            self._client.log_model_artifacts(logged.model_id, str(path))
        self._client.finalize_logged_model(logged.model_id, "READY")
        self._client.log_outputs(self._run, [LoggedModelOutput(logged.model_id, step=0)])

    def _has_model(self, digest: str) -> bool:
        query = f"source_run_id = '{self._run}' AND tags.`{MODEL_TAG}` = '{digest}'"
        found = self._client.search_logged_models([self._experiment_id], filter_string=query)
        return any(str(model.status) == "READY" for model in found)

    def finish(self, status: str) -> None:
        """End the run."""
        self._client.set_terminated(self._run, _STATUS[status])

    @property
    def _run(self) -> str:
        if self._run_id is None:
            raise TrackerError(
                tracker=self.name, problem="no run is open", remedy="call `start` first"
            )
        return self._run_id


def save_pyfunc(model_dir: Path, path: Path, described: Model | None = None) -> None:
    """Write one of our saved models as an MLflow pyfunc model directory.

    Parameters
    ----------
    model_dir : Path
        Saved model; holds ``signature.json`` and, optionally, ``input_example.json``.
    path : Path
        Directory to make.
    described : mlflow.models.Model, optional
        Identity under which the model is recorded.
    """
    # Slow to import (it needs pandas, scikit-learn), and needed at a job's end only.
    import mlflow.pyfunc
    import pandas as pd

    signature = json.loads((model_dir / "signature.json").read_text())
    extras: dict[str, Any] = {}
    example_file = model_dir / "input_example.json"
    if example_file.exists():
        extras["input_example"] = pd.DataFrame(json.loads(example_file.read_text()))
    mlflow.pyfunc.save_model(
        path,
        loader_module=LOADER,
        data_path=str(model_dir),
        mlflow_model=described,
        model_config={"allow_pickle": False},  # a default, which whoever loads it may change
        signature=ModelSignature(
            _schema(signature["inputs"], _input_type), _schema(signature["outputs"], _data_type)
        ),
        pip_requirements=[f"farandole[mlflow,torch]=={farandole.__version__}"],
        **extras,
    )


def _schema(
    columns: Sequence[Mapping[str, Any]], type_of: Callable[[str], DataType | AnyType]
) -> Schema:
    return Schema([ColSpec(type_of(column["dtype"]), column["name"]) for column in columns])


def _input_type(dtype: str) -> DataType | AnyType:
    """Return the type of an input: any, for numbers.

    MLflow refuses an int64 where a double is declared, and a double where an integer is; but a
    column of whole numbers is the one or the other in pandas as it holds nulls or not. Our
    models take both, and say themselves what they cannot take.
    """
    known = _data_type(dtype)
    return AnyType() if known in _NUMBERS else known


def _data_type(dtype: str) -> DataType:
    if dtype.startswith(("timestamp", "datetime", "date")):
        return DataType.datetime
    try:
        return _DATA_TYPES[dtype]
    except KeyError:
        raise TrackerError(
            tracker=MlflowTracker.name,
            problem=f"MLflow has no type for a model's column of {dtype}",
            remedy="leave the column out of the model's inputs, or cast it",
        ) from None


def _valid_key(key: str) -> str:
    """Return a name as MLflow allows it: word characters and ``-. :``, in parts of a clean path."""
    parts = re.sub(r"[^/\w.\- :]", "_", key)[:250].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(_files(folder)):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _silence() -> None:
    for name in ("mlflow", "alembic", "sqlalchemy"):
        logging.getLogger(name).setLevel(logging.ERROR)
