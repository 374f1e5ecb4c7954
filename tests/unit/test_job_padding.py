"""A padded tail: full shapes everywhere, and every row counts exactly once."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import farandole as fa
from farandole.errors import ConfigError, UsageError

sys.path.insert(0, str(Path(__file__).parent.parent / "jobs"))

from inline_job import SLOTS, data, run_inline, sgd, value_of

BATCH_SIZE = 4 * SLOTS
NUM_ROWS = 2 * BATCH_SIZE + 2
"""Below a row for each slot is left: the batch before must give it some."""


def model_of() -> nn.Module:
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -0.25, 0.125, 1.0]]))
        model.bias.zero_()
    return model


def losses_of(model: nn.Module, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    outputs = model(features).squeeze(1)
    return nn.functional.binary_cross_entropy_with_logits(outputs, label.float(), reduction="none")


def train(job: fa.Job, used: Counter[int], accumulate: int) -> dict[str, torch.Tensor]:
    model, optimizer = job.prepare(model_of(), sgd)
    for _ in job.epochs(1):
        loader = job.loader(
            data(NUM_ROWS), batch_size=BATCH_SIZE, tail="pad", accumulate=accumulate
        )
        for batch in loader:
            losses = losses_of(model, batch.features, batch.label)
            job.backward((losses * batch.weight).sum())
            optimizer.step()
            assert batch.mask.any()
            assert batch.weight.sum().item() == pytest.approx(1)
            assert accumulate > 1 or len(batch) % (BATCH_SIZE // SLOTS) == 0
            used.update(batch.row_ids[batch.mask].tolist())
            job.log(rows=float(len(batch)))
    return copy.deepcopy(model.state_dict())


def plain_loop() -> dict[str, torch.Tensor]:
    model = model_of()
    optimizer = sgd(list(model.parameters()))
    plan = data(NUM_ROWS).epoch_plan(
        seed=0, epoch=0, batch_size=BATCH_SIZE, num_slots=SLOTS, tail="pad"
    )
    (rows,) = data(NUM_ROWS).read_rows([range(NUM_ROWS)])
    for step in range(plan.num_steps):
        ids = np.concatenate([plan.slot_row_ids(step, slot) for slot in range(SLOTS)])
        taken = rows.take(ids)
        optimizer.zero_grad()
        losses_of(
            model, torch.from_numpy(taken.features), torch.from_numpy(taken.label)
        ).mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_row_counts_once_on_any_number_of_workers(accumulate, tmp_path):
    results = []
    for workers in (1, 2, 3):
        used: Counter[int] = Counter()
        ends = run_inline(
            lambda job, used=used: train(job, used, accumulate),
            tmp_path / str(workers),
            workers=workers,
        )
        results.append(value_of(ends))
        assert used == dict.fromkeys(range(NUM_ROWS), 1)
    expected = plain_loop()
    for name in expected:
        assert torch.equal(results[0][name], results[1][name])
        assert torch.equal(results[0][name], results[2][name])
        assert torch.allclose(results[0][name], expected[name], atol=1e-6)


def test_fast_reduction_joins_padded_slots(tmp_path):
    used: Counter[int] = Counter()
    ends = run_inline(lambda job: train(job, used, 2), tmp_path, reduction="fast")
    value = value_of(ends)
    assert used == dict.fromkeys(range(NUM_ROWS), 1)
    for name, expected in plain_loop().items():
        assert torch.allclose(value[name], expected, atol=1e-6)


def test_other_tails_have_no_mask_and_even_weights(tmp_path):
    def look(job: fa.Job) -> None:
        model, optimizer = job.prepare(model_of(), sgd)
        for _ in job.epochs(1):
            for batch in job.loader(data(NUM_ROWS), batch_size=BATCH_SIZE):
                assert batch.mask is None
                assert batch.weight.tolist() == pytest.approx([1 / len(batch)] * len(batch))
                job.backward(losses_of(model, batch.features, batch.label).mean())
                optimizer.step()

    value_of(run_inline(look, tmp_path))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tail": "fill", "batch_size": BATCH_SIZE}, UsageError),
        ({"tail": "pad", "batch_size": 2 * SLOTS - 1}, ConfigError),
    ],
)
def test_what_cannot_be_padded_is_refused(options, error, tmp_path):
    def wrong(job: fa.Job) -> None:
        job.prepare(model_of(), sgd)
        for _ in job.epochs(1):
            list(job.loader(data(NUM_ROWS), **options))

    with pytest.raises(error, match="pad"):
        value_of(run_inline(wrong, tmp_path))
