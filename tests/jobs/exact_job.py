"""A training function with all that could make the number of workers show."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import farandole as fa

NUM_ROWS = 1013  # a prime
BATCH_SIZE = 96
LEARNING_RATE = 0.02
MAX_NORM = 0.7


def make_data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    features = rng.standard_normal((NUM_ROWS, 12)).astype(np.float32)
    label = (features[:, 0] * features[:, 1] + 0.3 * rng.standard_normal(NUM_ROWS) > 0).astype(int)
    return features, label


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 33),
        nn.BatchNorm1d(33),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(33, 17),
        nn.ReLU(),
        nn.Linear(17, 1),
    )


def make_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LEARNING_RATE, weight_decay=0.1)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)


def loss_of(model: nn.Module, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    # Noise from all three generators: a slot's randomness must not depend on who computes it.
    noise = torch.from_numpy(np.random.standard_normal(features.shape)).float() * 0.01
    output = model(features + noise).squeeze(1)
    return binary_cross_entropy_with_logits(output, label.float())


class Average:
    """An exponential moving average of the weights: state that the job knows nothing of."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.values = [p.detach().clone() for p in model.parameters()]

    def update(self) -> None:
        for value, parameter in zip(self.values, self._model.parameters(), strict=True):
            value.lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict:
        return {"values": self.values}

    def load_state_dict(self, state: dict) -> None:
        self.values = [value.clone() for value in state["values"]]


def train(
    job: fa.Job, out: str, epochs: int = 2, accumulate: int = 1, stop_at: int | None = None
) -> None:
    features, label = make_data()
    dataset = fa.ArrayDataset(features, label, rows_per_shard=100)
    model, optimizer, scheduler = job.prepare(make_model(), make_optimizer, make_scheduler)
    average = job.register("average", Average(model))
    used: list[list[int]] = []
    for epoch in job.epochs(epochs):
        for batch in job.loader(dataset, batch_size=BATCH_SIZE, accumulate=accumulate):
            optimizer.zero_grad()
            loss = loss_of(model, batch.features, batch.label)
            job.backward(loss)
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()
            if job.at_step_end:
                average.update()
            job.log(loss=loss, positives=batch.label.float().mean())
            job.log_step(norm=norm, lr=scheduler.get_last_lr()[0])
            used.append([epoch, job.step, *batch.row_ids.tolist()])
            if job.step == stop_at:
                job.request_stop("the test asks")
                (Path(out) / f"used-{job.rank}-stopped.json").write_text(json.dumps(used))
        job.evaluate(
            lambda batch: {
                "loss": loss_of(model, batch.features, batch.label),
                "score": model(batch.features).squeeze(1).sigmoid(),
                "row": batch.row_ids,
            },
            dataset,
            batch_size=100,
            name="holdout",
        )
    (Path(out) / f"used-{job.rank}.json").write_text(json.dumps(used))
    if job.rank == 0:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "average": average.state_dict(),
        }
        torch.save(state, Path(out) / "state.pt")
