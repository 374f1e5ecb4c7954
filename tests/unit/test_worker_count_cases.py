"""What once made the number of workers, a resume or a split of slots show in the result."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import farandole as fa
from farandole.errors import JobStoppedError, MismatchError, UsageError

sys.path.insert(0, str(Path(__file__).parent.parent / "jobs"))

from inline_job import BATCH_SIZE, data, loss_of, run_inline, sgd, value_of

Scheduler = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Scheduler] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=20),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=10),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "step": lambda o: lr_scheduler.StepLR(o, 3),
    "multi": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.StepLR(o, 2)], [4]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore::UserWarning:torch.optim.lr_scheduler")
def test_a_resumed_schedule_goes_on(name: str, tmp_path: Path) -> None:
    def train(job: fa.Job, stop_at: int | None) -> list[list[float]]:
        torch.manual_seed(0)
        model, optimizer, scheduler = job.prepare(nn.Linear(4, 1), sgd, SCHEDULERS[name])
        for _ in job.epochs(3):
            for batch in job.loader(data(), batch_size=BATCH_SIZE):
                job.backward(loss_of(model, batch))
                optimizer.step()
                scheduler.step()
                if job.step == stop_at:
                    job.request_stop("the test asks")
        return [p.tolist() for p in model.parameters()]

    whole = value_of(run_inline(lambda job: train(job, None), tmp_path / "whole"))
    run_inline(lambda job: train(job, 4), tmp_path / "parts")
    resumed = run_inline(lambda job: train(job, None), tmp_path / "parts", resume=True)
    assert value_of(resumed) == whole


def test_stopping_really_stops(tmp_path: Path) -> None:
    def train(job: fa.Job) -> None:
        model, optimizer = job.prepare(nn.Linear(4, 1), sgd)
        for _ in job.epochs(1):
            for batch in job.loader(data(), batch_size=BATCH_SIZE):
                job.request_stop("the test asks")
                job.backward(loss_of(model, batch))
                optimizer.step()

    (end,) = run_inline(train, tmp_path)
    assert not isinstance(end, BaseException | JobStoppedError)
    assert end.stopped_after == 1


def fitted(job: fa.Job, accumulate: int = 1, *, clear: bool = False) -> list[float]:
    torch.manual_seed(0)
    model, optimizer = job.prepare(nn.Linear(4, 1), sgd)
    for _ in job.epochs(2):
        for batch in job.loader(data(), batch_size=BATCH_SIZE, accumulate=accumulate):
            if clear:
                model.zero_grad()
            job.backward(loss_of(model, batch))
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    return [*model.weight.flatten().tolist(), *model.bias.tolist()]


@pytest.mark.parametrize("clear", [False, True])
def test_pieces_of_a_slot_are_neither_clipped_nor_cleared(clear: bool, tmp_path: Path) -> None:
    whole = value_of(run_inline(fitted, tmp_path / "whole"))
    pieces = value_of(run_inline(lambda job: fitted(job, 3, clear=clear), tmp_path / "pieces"))
    assert pieces == pytest.approx(whole, rel=1e-4)


def test_a_parameter_that_one_piece_alone_reaches(tmp_path: Path) -> None:
    def train(job: fa.Job) -> float:
        first, second = nn.Linear(4, 1), nn.Linear(4, 1)
        model, optimizer = job.prepare(nn.ModuleList([first, second]), sgd)
        for _ in job.epochs(1):
            for number, batch in enumerate(
                job.loader(data(), batch_size=BATCH_SIZE, accumulate=2, max_steps=1)
            ):
                job.backward(loss_of(model[number % 2], batch))
                if job.at_step_end:
                    gradient = float(first.weight.grad.abs().sum())
                optimizer.step()
        return gradient

    assert value_of(run_inline(train, tmp_path)) > 0


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.out = nn.Linear(8 * 2 * 2, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        image = features.repeat(1, 12).view(-1, 3, 4, 4)
        return self.out(self.conv(image).flatten(1))


class Counting(nn.Module):
    """Counts rows in a whole-number buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.rows += len(features)
        return self.layer(features)


@pytest.mark.parametrize("make", [Conv, Counting])
def test_strides_and_whole_number_buffers_do_not_show(
    make: type[nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    initial = make().state_dict()

    def train(job: fa.Job) -> list[Any]:
        model = make()
        model.load_state_dict(initial)
        model, optimizer = job.prepare(model, sgd)
        for _ in job.epochs(2):
            for batch in job.loader(data(53), batch_size=BATCH_SIZE):
                job.backward(loss_of(model, batch))
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
        return [value.flatten().tolist() for value in model.state_dict().values()]

    results = [
        value_of(run_inline(train, tmp_path / str(workers), workers=workers))
        for workers in (1, 2, 3, 4)
    ]
    assert results[1:] == results[:1] * 3


def test_a_layer_that_reenters_backward_is_refused(tmp_path: Path) -> None:
    def train(job: fa.Job) -> None:
        model, optimizer = job.prepare(nn.Linear(4, 4), sgd)
        for _ in job.epochs(1):
            for batch in job.loader(data(), batch_size=BATCH_SIZE):
                features = batch.features.requires_grad_()
                once = checkpoint(model, features, use_reentrant=True)
                job.backward(checkpoint(model, once, use_reentrant=True).mean())
                optimizer.step()

    (end,) = run_inline(train, tmp_path)
    assert isinstance(end, UsageError)
    assert "use_reentrant=False" in str(end)


def test_options_of_the_optimizer_are_compared(tmp_path: Path) -> None:
    def train(job: fa.Job) -> None:
        job.prepare(nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.1 * (1 + job.rank)))

    ends = run_inline(train, tmp_path, workers=2)
    assert all(isinstance(end, MismatchError) for end in ends)
    assert "'lr': 0.1" in str(ends[0])
    assert "'lr': 0.2" in str(ends[1])
