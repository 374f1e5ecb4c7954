"""Jobs inside this process: each worker a thread, without sockets, launcher or a second import."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

import farandole as fa
from farandole.comm.inprocess import InProcessComm
from farandole.comm.single import SingleComm
from farandole.config import JobConfig, load_config
from farandole.job import runtime
from farandole.job.ends import Completion
from farandole.job.rundir import RunDir

NUM_ROWS = 60
BATCH_SIZE = 16
SLOTS = 4
DEADLINE = timedelta(seconds=30)

Train = Callable[[fa.Job], Any]


def make_run(folder: Path, **settings: Any) -> tuple[RunDir, JobConfig]:
    """Make a run directory, or open the one that is there."""
    overrides = {"target": "train.py", "slots": SLOTS, "run_dir": folder / "job", **settings}
    config = load_config(None, overrides)
    run = RunDir.create(config)
    run.write_config(config)
    return run, config


def run_inline(
    function: Train, folder: Path, *, workers: int = 1, **settings: Any
) -> list[Completion | BaseException]:
    """Run a training function; return how it ended on every rank."""
    run, config = make_run(folder, **settings)
    comms = [SingleComm()] if workers == 1 else InProcessComm.world(workers, timeout=DEADLINE)
    ends: list[Completion | BaseException] = [TimeoutError() for _ in comms]

    def serve(comm: Any) -> None:
        try:
            with ExitStack() as stack:
                stack.callback(comm.close)
                ends[comm.rank] = runtime._run_function(config, run, comm, (), stack)
        except BaseException as error:
            ends[comm.rank] = error

    threads = [threading.Thread(target=serve, args=(comm,), daemon=True) for comm in comms]
    with (
        mock.patch.object(runtime, "_load_function", return_value=function),
        mock.patch.object(runtime.signal, "signal"),
    ):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * DEADLINE.total_seconds())
    return ends


def value_of(ends: list[Completion | BaseException]) -> Any:
    """Return what rank 0 returned; raise what a rank raised."""
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    first = ends[0]
    assert isinstance(first, Completion)
    return first.value


def data(num_rows: int = NUM_ROWS, seed: int = 0) -> fa.ArrayDataset:
    features = np.random.default_rng(seed).standard_normal((num_rows, 4)).astype(np.float32)
    return fa.ArrayDataset(features, features[:, 0] > 0)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def loss_of(model: nn.Module, batch: fa.Batch) -> torch.Tensor:
    assert batch.features is not None
    assert batch.label is not None
    return nn.functional.binary_cross_entropy_with_logits(
        model(batch.features).squeeze(1), batch.label.float()
    )
