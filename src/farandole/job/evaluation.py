"""Evaluation over all workers: every row once, and the same bits for any number of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from farandole.config import JobConfig
from farandole.errors import UsageError
from farandole.job.batch import Batch
from farandole.job.keeper import describe_missing
from farandole.job.likeness import check_same
from farandole.job.randomness import seed_all
from farandole.job.recorder import Recorder
from farandole.job.rundir import write_errors
from farandole.plan.lanes import evaluation_units, units_of
from farandole.plan.random import evaluation_seed
from farandole.plan.tree import Node, tree_sum
from farandole.protocols import Comm, Dataset

EvaluationFunction = Callable[[Batch], Mapping[str, Any]]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation gave; the same on every worker.

    Attributes
    ----------
    name : str
    num_rows : int
    metrics : dict of str to float
        Means over all rows, in float64.
    rows : dict of str to ndarray, shape (num_rows, ...)
        Values per row, in the order of the data set.
    """

    name: str
    num_rows: int
    metrics: dict[str, float]
    rows: dict[str, np.ndarray]


@contextlib.contextmanager
def evaluating(model: torch.nn.Module | None) -> Iterator[None]:
    """Put a model into evaluation mode, without gradients, and back into what it was."""
    modules = [] if model is None else [(module, module.training) for module in model.modules()]
    try:
        if model is not None:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modules:
            module.training = training


def evaluate(
    function: EvaluationFunction,
    dataset: Dataset,
    *,
    name: str,
    unit_rows: int,
    comm: Comm,
    device: torch.device,
    seed: int,
    step: int,
) -> Evaluation:
    """Call `function` on this rank's share of the units, and put all ranks' results together.

    Blocks; every rank must call it. See `Job.evaluate`.
    """
    dataset.validate()
    units = evaluation_units(dataset.num_rows, unit_rows)
    mine = units_of(comm.rank, comm.world_size, len(units))
    results: list[dict[str, np.ndarray]] = []
    blocks = dataset.read_rows([units[unit] for unit in mine])
    try:
        for unit, block in zip(mine, blocks, strict=True):
            seed_all(evaluation_seed(seed, step, unit))
            values = function(Batch.from_block(block, device))
            results.append(_as_arrays(values, block.num_rows))
            if results[-1].keys() != results[0].keys():
                raise _mixed_keys(results[0], results[-1])
    finally:
        blocks.close()
    payloads = comm.all_gather(f"evaluate {name}", _pack(results))
    parts = [_unpack(payload) for payload in payloads if payload]
    if not any(parts):
        raise UsageError(
            problem="the evaluation function returned an empty dict",
            remedy="return a dict of means (numbers) and of values per row (1-D tensors)",
        )
    for part in parts:
        if part.keys() != parts[0].keys():
            raise _mixed_keys(parts[0], part)
    whole = _join(parts)
    weights = np.array([len(unit) for unit in units], np.float64) / dataset.num_rows
    return Evaluation(
        name=name,
        num_rows=dataset.num_rows,
        metrics={key[1:]: _mean(values, weights) for key, values in whole.items() if key[0] == "m"},
        rows={key[1:]: values for key, values in whole.items() if key[0] == "r"},
    )


def _as_arrays(values: Mapping[str, Any], num_rows: int) -> dict[str, np.ndarray]:
    """Sort what a function returned: "m<name>" holds a mean, "r<name>" a value per row."""
    if not isinstance(values, Mapping):
        raise UsageError(
            problem=f"the evaluation function returned a {type(values).__name__}",
            remedy="return a dict of means (numbers) and of values per row (1-D tensors)",
        )
    arrays: dict[str, np.ndarray] = {}
    for name, value in values.items():
        detached = value.detach() if isinstance(value, torch.Tensor) else value
        if isinstance(detached, torch.Tensor) and detached.dtype is torch.bfloat16:
            detached = detached.float()
        array = detached.cpu().numpy() if isinstance(detached, torch.Tensor) else np.asarray(value)
        if array.ndim == 0 and array.dtype.kind in "fiub":
            arrays[f"m{name}"] = array.astype(np.float64).reshape(1)
        elif array.ndim and array.shape[0] == num_rows and array.dtype.kind in "fiub":
            arrays[f"r{name}"] = array
        else:
            raise UsageError(
                problem=f"the evaluation function returned {name!r} with shape {array.shape} and "
                f"dtype {array.dtype} for {num_rows} rows",
                remedy="return a number (a mean over the rows) or one value for each row",
            )
    return arrays


def _check_arguments(function: Any, name: Any, batch_size: Any) -> None:
    if not callable(function) or isinstance(function, torch.nn.Module):
        raise UsageError(
            problem=f"job.evaluate got a {type(function).__name__} as the function",
            remedy="pass a function of a batch: lambda batch: {'loss': ...}",
        )
    if not isinstance(name, str) or not name or "/" in name:
        raise UsageError(
            problem=f"job.evaluate(name={name!r})", remedy="give a name that can be a file's"
        )
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(
            problem=f"job.evaluate(batch_size={batch_size!r})",
            remedy="give a whole number from 1 up",
        )


def _join(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Put arrays of the same names one behind the other."""
    joined: dict[str, np.ndarray] = {}
    for key in parts[0]:
        arrays = [part[key] for part in parts]
        shapes = sorted({array.shape[1:] for array in arrays})
        if len(shapes) > 1:
            raise UsageError(
                problem=f"the evaluation function returned {key[1:]!r} with rows of shape "
                f"{shapes[0]} for some batches and of shape {shapes[1]} for others",
                remedy="return the same shape for every row",
            )
        joined[key] = np.concatenate(arrays)
    return joined


def _mixed_keys(first: Mapping[str, Any], other: Mapping[str, Any]) -> UsageError:
    names = sorted(key[1:] for key in first.keys() ^ other.keys())
    return UsageError(
        problem=f"the evaluation function returned {', '.join(names)} for some batches only",
        remedy="return the same names for every batch",
    )


def _pack(results: list[dict[str, np.ndarray]]) -> bytes:
    """Return all units' arrays as one message: a line of JSON that describes them, then bytes.

    numpy's own format is read with `ast`, which Python 3.11 cannot do in two threads at once.
    """
    if not results:
        return b""
    joined = _join(results)
    header = {key: [array.dtype.str, array.shape] for key, array in joined.items()}
    return b"".join([json.dumps(header).encode(), b"\n", *(a.tobytes() for a in joined.values())])


def _unpack(payload: bytes) -> dict[str, np.ndarray]:
    line, _, data = payload.partition(b"\n")
    arrays: dict[str, np.ndarray] = {}
    start = 0
    for key, (dtype, shape) in json.loads(line).items():
        count = int(np.prod(shape, dtype=int))
        array = np.frombuffer(data, dtype, count, start)
        arrays[key] = array.reshape(shape)
        start += array.nbytes
    return arrays


def _mean(values: np.ndarray, weights: np.ndarray) -> float:
    """Add the units' weighted means in the tree's order."""
    leaves = [(Node(0, unit), float(v)) for unit, v in enumerate(values * weights)]
    return tree_sum(leaves, len(leaves), lambda left, right: left + right)


def write_rows(evaluation: Evaluation, path: Path) -> None:
    """Write the values per row as a Parquet file, whole or not at all."""
    columns = {n: pa.array(list(a) if a.ndim > 1 else a) for n, a in evaluation.rows.items()}
    table = pa.table(columns)
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(table, temporary)
    temporary.replace(path)


class Evaluations:
    """Makes a job's evaluations, and writes them into the run directory."""

    def __init__(
        self, config: JobConfig, comm: Comm, recorder: Recorder, device: torch.device
    ) -> None:
        self._config = config
        self._comm = comm
        self._recorder = recorder
        self._device = device
        self._names: set[str] = set()

    def evaluate(
        self,
        function: EvaluationFunction,
        dataset: Dataset,
        *,
        name: str,
        batch_size: int,
        step: int,
        model: torch.nn.Module | None,
    ) -> Evaluation:
        """Evaluate the model after a step. Blocks; every rank must call it."""
        _check_arguments(function, name, batch_size)
        about = f"{name!r} of data {dataset.fingerprint[:12]} by {batch_size} rows"
        check_same(self._comm, "the data of job.evaluate", about)
        with evaluating(model):
            evaluation = evaluate(
                function,
                dataset,
                name=name,
                unit_rows=batch_size,
                comm=self._comm,
                device=self._device,
                seed=self._config.seed,
                step=step,
            )
        self._names.update(f"{name}/{key}" for key in evaluation.metrics)
        if self._recorder.active and evaluation.rows:
            run = self._recorder.run
            with write_errors(run.path):
                write_rows(evaluation, run.evaluations / f"{name}.parquet")
        return evaluation

    def check_best(self) -> None:
        """Warn if no evaluation, of this start or an earlier one, gave `checkpoint.best`."""
        best = self._config.checkpoint.best
        if best is None or best in self._names or not self._recorder.active:
            return
        names = self._names.union(
            f"{record['name']}/{key}"
            for record in self._recorder.run.metrics()
            if record["kind"] == "evaluation"
            for key in record["values"]
        )
        if best not in names:
            self._recorder.warn(describe_missing(best, names))
