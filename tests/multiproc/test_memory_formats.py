"""Gradients laid out as no plain vector of their elements: the bits stay the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

import farandole as fa


def train(job: fa.Job, out: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 1),
    ).to(memory_format=torch.channels_last)
    model, optimizer = job.prepare(model, lambda params: torch.optim.SGD(params, lr=0.5))
    images = np.random.default_rng(3).standard_normal((64, 3 * 8 * 8)).astype(np.float32)
    norms = []
    for _ in job.epochs(2):
        for batch in job.loader(fa.ArrayDataset(images), batch_size=16):
            pixels = batch.features.view(-1, 3, 8, 8).to(memory_format=torch.channels_last)
            job.backward((model(pixels) - pixels.mean()).square().mean())
            # Summed in the order in which a gradient lies in memory.
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            if job.at_step_end:
                norms.append(norm)
    if job.rank == 0:
        torch.save({**model.state_dict(), "norms": torch.stack(norms)}, out)


def test_channels_last_gives_the_same_bits_for_any_number_of_workers(tmp_path: Path) -> None:
    states = []
    for workers in (1, 2):
        out = tmp_path / f"{workers}.pt"
        params = {"out": str(out)}
        fa.run(train, workers=workers, slots=4, runs=tmp_path, params=params, progress=False)
        states.append(torch.load(out, weights_only=True))
    one, two = states
    assert one["2.weight"].is_contiguous(memory_format=torch.channels_last)
    for name, value in one.items():
        assert value.numpy().tobytes() == two[name].numpy().tobytes(), name
