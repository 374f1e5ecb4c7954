"""Predict whether a flight arrives more than 15 minutes late, from what is known as it leaves.

An ordinary PyTorch training loop. It knows nothing of workers: `farandole run train.py
--workers 4 -p data=data/flights` uses four of them, and gives the same weights as one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as log_loss

import farandole as fa

NUMERIC = [
    *("dep_delay", "distance", "sched_dep_minute", "sched_arr_minute"),
    *("origin_lat", "origin_lon", "dest_lat", "dest_lon", "dest_alt"),
    *("plane_year", "engines", "seats"),
    *("temp", "dewp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib"),
]
CATEGORICAL = ["weekday", "carrier", "origin", "dest", "manufacturer", "engine", "wind_dir"]
TRAINING = [("month", "<=", 10)]
HOLDOUT = [("month", ">", 10)]


class LateFlight(nn.Module):
    """Embeddings of the categories beside the numbers, through a small MLP, to a logit."""

    def __init__(
        self,
        num_features: int,
        cardinalities: Sequence[int],
        width: int = 128,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        sizes = [min(16, 1 + cardinality // 2) for cardinality in cardinalities]
        self.embeddings = nn.ModuleList(map(nn.Embedding, cardinalities, sizes))
        layers: list[nn.Module] = []
        for inputs in (num_features + sum(sizes), width):
            layers += [nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU()]
            layers += [nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, features: Tensor, categories: Tensor) -> Tensor:
        """Return logits of shape (n,)."""
        embedded = [
            embedding(categories[:, column]) for column, embedding in enumerate(self.embeddings)
        ]
        return self.layers(torch.cat([features, *embedded], dim=1)).squeeze(1)


class Chance(nn.Module):
    """What is saved: the model, answering with a chance under its name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Tensor, categories: Tensor) -> dict[str, Tensor]:
        """Return the chance that a flight is late, of shape (n,)."""
        return {"late": self.model(features, categories).sigmoid()}


def base_rate_log_loss(labels: np.ndarray) -> float:
    """Return the log-loss of the best constant: predicting the share of late flights."""
    rate = labels.mean()
    return float(-(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)))


def train(
    job: fa.Job, data: str, epochs: int = 2, lr: float = 1e-2, batch_size: int = 4096
) -> dict[str, float]:
    """Train on January to October, judge on November and December, and save the model."""
    preprocessor = fa.Preprocessor.fit(
        fa.ParquetDataset(data, columns=NUMERIC + CATEGORICAL, filters=TRAINING),
        numeric=NUMERIC,
        categorical=CATEGORICAL,
    )
    flights = fa.ParquetDataset(data, label="late", filters=TRAINING, preprocess=preprocessor)
    holdout = fa.ParquetDataset(data, label="late", filters=HOLDOUT, preprocess=preprocessor)
    loader = job.loader(flights, batch_size=batch_size)

    model, optimizer, scheduler = job.prepare(
        LateFlight(len(NUMERIC), preprocessor.cardinalities),
        lambda params: torch.optim.AdamW(params, lr=lr, weight_decay=0.01),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=lr, total_steps=epochs * loader.num_steps
        ),
    )

    def judge(batch: fa.Batch) -> dict[str, Tensor]:
        logits = model(batch.features, batch.categories)
        label = batch.label.float()
        return {"loss": log_loss(logits, label), "score": logits.sigmoid(), "label": label}

    scores: dict[str, float] = {}
    for _ in job.epochs(epochs):
        for batch in loader:
            loss = log_loss(model(batch.features, batch.categories), batch.label.float())
            job.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            job.log(loss=loss)
        evaluation = job.evaluate(judge, holdout, batch_size=16384, name="holdout")
        labels = evaluation.rows["label"]
        scores = {
            "holdout_log_loss": evaluation.metrics["loss"],
            "holdout_auc": float(roc_auc_score(labels, evaluation.rows["score"])),
            "base_rate_log_loss": base_rate_log_loss(labels),
        }
        job.log_step(**scores)
    example = torch.zeros(2, len(NUMERIC)), torch.zeros(2, len(CATEGORICAL), dtype=torch.long)
    job.save(Chance(model), example, preprocessor=preprocessor)
    return scores
