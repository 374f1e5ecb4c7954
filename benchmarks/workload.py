"""What every contestant trains: the same models, batches and optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from farandole.data import ArrayDataset, RowBlock
from farandole.plan.lanes import EpochPlan

NUM_DISTINCT_BATCHES = 8


def mlp(inputs: int, width: int, hidden: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(inputs, width), nn.ReLU()]
    for _ in range(hidden):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class WideEmbedding(nn.Module):
    """A large table and a small network: more gradient bytes than arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200_000, 32)
        self.net = mlp(16 * 32, 128, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        ids = (features[:, :16].abs() * 50_000).long() % 200_000
        return self.net(self.table(ids).flatten(1))


@dataclass(frozen=True)
class Workload:
    """A model and the sizes of its batches."""

    name: str
    batch_size: int
    num_inputs: int

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        if self.name == "small":
            return mlp(self.num_inputs, 512, 2)
        if self.name == "medium":
            return mlp(self.num_inputs, 2048, 2)
        return WideEmbedding()

    def optimizer(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01, momentum=0.9)

    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        rng = np.random.default_rng(1)
        shape = (self.batch_size, self.num_inputs)
        return [
            (
                rng.standard_normal(shape, dtype=np.float32),
                rng.integers(0, 10, self.batch_size),
            )
            for _ in range(NUM_DISTINCT_BATCHES)
        ]


WORKLOADS = {
    "small": Workload("small", 512, 512),
    "medium": Workload("medium", 64, 1024),
    "wide": Workload("wide", 1024, 16),
}


class Prebuilt:
    """A data set whose batches lie ready in memory: it costs a loader nothing to read."""

    def __init__(self, workload: Workload, num_steps: int) -> None:
        self._batches = workload.batches()
        self._shape = ArrayDataset(np.zeros((workload.batch_size * num_steps, 1), np.float32))
        self.num_rows = self._shape.num_rows
        self.fingerprint = workload.name

    def validate(self) -> None:
        """Do nothing."""

    def epoch_plan(self, **settings: object) -> EpochPlan:
        return self._shape.epoch_plan(**settings)  # type: ignore[arg-type]

    def read(self, plan: EpochPlan, slots: range, start_step: int = 0) -> Iterator[RowBlock]:
        for step in range(start_step, plan.num_steps):
            features, label = self._batches[step % NUM_DISTINCT_BATCHES]
            for slot in slots:
                start = len(label) * slot // plan.num_slots
                stop = len(label) * (slot + 1) // plan.num_slots
                yield RowBlock(
                    row_ids=np.arange(start, stop),
                    features=features[start:stop],
                    label=label[start:stop],
                )


def digest(model: nn.Module) -> list[float]:
    """Return numbers that two equal models share: sums of weights, by parameter."""
    return [float(p.detach().double().sum()) for p in model.parameters()]
