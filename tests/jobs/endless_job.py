"""Trains for as many epochs as it is told, slowly; its weights tell which steps it has taken."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import farandole as fa

NUM_ROWS = 64
BATCH_SIZE = 16
STEPS_PER_EPOCH = NUM_ROWS // BATCH_SIZE


def train(job: fa.Job, epochs: int, out: str, pause_s: float = 0.0, stuck: bool = False) -> None:
    features = np.random.default_rng(0).standard_normal((NUM_ROWS, 4)).astype(np.float32)
    dataset = fa.ArrayDataset(features, features[:, 0] > 0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    model, optimizer = job.prepare(model, lambda params: torch.optim.Adam(params, lr=0.01))
    loss_fn = nn.BCEWithLogitsLoss()
    for _ in job.epochs(epochs):
        for batch in job.loader(dataset, batch_size=BATCH_SIZE):
            loss = loss_fn(model(batch.features).squeeze(1), batch.label.float())
            job.backward(loss)
            optimizer.step()
            job.log(loss=loss)
            time.sleep(pause_s)
            while stuck and job.step == 2:
                time.sleep(0.05)
    if job.rank == 0:
        torch.save(model.state_dict(), Path(out) / "weights.pt")
