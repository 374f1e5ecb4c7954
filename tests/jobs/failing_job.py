"""A training function that fails in the way, on the worker and at the step that it is told to."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

import farandole as fa

NUM_ROWS = 64
BATCH_SIZE = 16


def fail(how: str, out: Path) -> None:
    (out / "failed-at").write_text(repr(time.time()))
    match how:
        case "raise":
            raise ValueError("the sky fell")
        case "exit":
            sys.exit(3)
        case "vanish":
            os._exit(0)
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "half_a_line":
            print("half a li", end="", flush=True)
            os._exit(7)
        case "memory":
            memory = psutil.Process().memory_info().vms + (1 << 28)
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            torch.ones(1 << 28)


def linger() -> None:
    """Leave a thread behind that is no daemon and never ends."""
    threading.Thread(target=threading.Event().wait).start()


def small_data() -> Any:
    features = np.random.default_rng(0).standard_normal((NUM_ROWS, 4)).astype(np.float32)
    return fa.ArrayDataset(features, features[:, 0] > 0)


def train(
    job: fa.Job,
    how: str = "",
    who: int = 1,
    at: int = 2,
    where: str = "step",
    out: str = ".",
    lingers: bool = False,
    wraps: bool = False,
) -> str:
    if lingers:
        linger()
    failing = job.rank == who and how
    dataset = small_data()
    model, optimizer = job.prepare(nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    loss_fn = nn.BCEWithLogitsLoss()
    for _ in job.epochs(2):
        for batch in job.loader(dataset, batch_size=BATCH_SIZE):
            if failing and where == "step" and job.step == at:
                fail(how, Path(out))
            loss = loss_fn(model(batch.features).squeeze(1), batch.label.float())
            try:
                job.backward(loss)
            except fa.errors.PeerLostError as error:
                if wraps:
                    raise RuntimeError("training broke") from error
                raise
            optimizer.step()

        def score(batch: fa.Batch) -> dict[str, Any]:
            if failing and where == "evaluate":
                fail(how, Path(out))
            return {"mean": model(batch.features).mean()}

        job.evaluate(score, dataset, batch_size=8)
    return "done"
