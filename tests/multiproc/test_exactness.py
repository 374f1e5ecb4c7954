"""The promise: the same bits for any number of workers, and for a plain loop without Farandole."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import farandole as fa
from farandole.errors import JobStoppedError
from farandole.job.rundir import RunDir
from farandole.plan.random import evaluation_seed, slot_seed

JOBS = Path(__file__).parent.parent / "jobs"
sys.path.insert(0, str(JOBS))

import exact_job  # noqa: E402

SLOTS = 8
SEED = 5
EPOCHS = 2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def tree_total(values: list[Any]) -> Any:
    """Add in the documented order, by the definition of the tree: neighbours, level by level."""
    while len(values) > 1:
        pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
        values = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return values[0]


def plain_loop(num_slots: int, accumulate: int = 1) -> dict[str, Any]:
    """Train without Farandole: the slots one by one, their gradients added in the tree's order."""
    features, label = (torch.from_numpy(array) for array in exact_job.make_data())
    dataset = fa.ArrayDataset(features, label, rows_per_shard=100)
    seed_all(slot_seed(SEED, 0, num_slots))
    model = exact_job.make_model()
    parameters = list(model.parameters())
    optimizer = exact_job.make_optimizer(parameters)
    scheduler = exact_job.make_scheduler(optimizer)
    average = exact_job.Average(model)
    buffers = list(model.buffers())
    step = 0
    logged: list[dict[str, float]] = []
    evaluated: list[float] = []
    for epoch in range(EPOCHS):
        plan = dataset.epoch_plan(
            seed=SEED, epoch=epoch, batch_size=exact_job.BATCH_SIZE, num_slots=num_slots
        )
        for k in range(plan.num_steps):
            total = plan.step_rows(k)
            base = [buffer.clone() for buffer in buffers]
            gradients, changes, losses, positives = [], [], [], []
            for slot in range(num_slots):
                rows = torch.from_numpy(plan.slot_row_ids(k, slot))
                seed_all(slot_seed(SEED, step, slot))
                for buffer, value in zip(buffers, base, strict=True):
                    buffer.copy_(value)
                model.zero_grad()
                loss_sum = positive_sum = 0.0
                pieces = min(accumulate, len(rows))
                for piece in range(pieces):
                    part = rows[len(rows) * piece // pieces : len(rows) * (piece + 1) // pieces]
                    loss = exact_job.loss_of(model, features[part], label[part])
                    weight = len(part) / total
                    (loss * weight if num_slots > 1 or pieces > 1 else loss).backward()
                    loss_sum += loss.item() * weight
                    positive_sum += label[part].float().mean().item() * weight
                gradients.append([p.grad.clone() for p in parameters])
                weight = len(rows) / total
                changes.append(
                    [
                        (b - v) * weight
                        for b, v in zip(buffers, base, strict=True)
                        if b.is_floating_point()
                    ]
                )
                losses.append(loss_sum)
                positives.append(positive_sum)
            for i, parameter in enumerate(parameters):
                parameter.grad = tree_total([slot_gradients[i] for slot_gradients in gradients])
            if num_slots > 1:
                floating = [
                    (b, v) for b, v in zip(buffers, base, strict=True) if b.is_floating_point()
                ]
                for i, (buffer, value) in enumerate(floating):
                    buffer.copy_(value + tree_total([slot_changes[i] for slot_changes in changes]))
            norm = nn.utils.clip_grad_norm_(parameters, exact_job.MAX_NORM)
            optimizer.step()
            scheduler.step()
            average.update()
            step += 1
            logged.append(
                {
                    "loss": tree_total(losses),
                    "positives": tree_total(positives),
                    "norm": float(norm),
                    "lr": scheduler.get_last_lr()[0],
                }
            )
        evaluated.append(evaluate_plainly(model, features, label, step))
    return {
        "state": {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "average": average.state_dict(),
        },
        "logged": logged,
        "evaluated": evaluated,
    }


def evaluate_plainly(
    model: nn.Module, features: torch.Tensor, label: torch.Tensor, step: int
) -> float:
    model.eval()
    losses = []
    with torch.no_grad():
        for unit, start in enumerate(range(0, len(label), 100)):
            seed_all(evaluation_seed(SEED, step, unit))
            rows = slice(start, start + 100)
            loss = exact_job.loss_of(model, features[rows], label[rows])
            losses.append(float(loss) * (len(label[rows]) / len(label)))
    model.train()
    return tree_total(losses)


def assert_same_bits(left: Any, right: Any, path: str = "") -> None:
    assert type(left) is type(right), path
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, path
        assert left.numpy().tobytes() == right.numpy().tobytes(), path
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_same_bits(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same_bits(a, b, f"{path}.{i}")
    else:
        assert left == right, path


def run_job(folder: Path, workers: int, **settings: Any) -> RunDir:
    folder.mkdir(exist_ok=True)
    params = {"out": str(folder), "epochs": EPOCHS, **settings.pop("params", {})}
    settings = {"slots": SLOTS, "seed": SEED, "runs": folder / "runs", **settings}
    result = fa.run(
        JOBS / "exact_job.py", workers=workers, params=params, progress=False, **settings
    )
    return RunDir(result.run_dir)


def assert_equals(run: RunDir, folder: Path, reference: dict[str, Any]) -> None:
    state = torch.load(folder / "state.pt", weights_only=True)
    assert_same_bits(state, reference["state"])
    records = list(run.metrics())
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, len(reference["logged"]) + 1))
    assert [record["values"] for record in steps] == reference["logged"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    assert [record["values"]["loss"] for record in evaluations] == reference["evaluated"]
    rows = pq.read_table(run.evaluations / "holdout.parquet")["row"].to_pylist()
    assert rows == list(range(exact_job.NUM_ROWS))


def assert_every_row_once(*files: Path) -> None:
    counts: Counter[tuple[int, int]] = Counter()
    for file in files:
        for epoch, _step, *rows in json.loads(file.read_text()):
            counts.update((epoch, row) for row in rows)
    expected = {(e, row): 1 for e in range(EPOCHS) for row in range(exact_job.NUM_ROWS)}
    assert counts == expected


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    torch.set_num_threads(1)
    return plain_loop(SLOTS)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_any_number_of_workers_equals_the_plain_loop(
    workers: int, reference: dict[str, Any], tmp_path: Path
) -> None:
    run = run_job(tmp_path, workers)
    assert_equals(run, tmp_path, reference)
    assert_every_row_once(*tmp_path.glob("used-*.json"))


@pytest.mark.parametrize("workers", [2, 3])
def test_the_network_path_gives_the_same_bits(
    workers: int, reference: dict[str, Any], tmp_path: Path
) -> None:
    run = run_job(tmp_path, workers, transport="network", bucket_bytes=1024)
    assert_equals(run, tmp_path, reference)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 4), (2, 1)])
def test_stopped_in_mid_epoch_and_resumed_on_another_number_of_workers(
    before: int, after: int, reference: dict[str, Any], tmp_path: Path
) -> None:
    stop_at = 13  # in the second epoch
    with pytest.raises(JobStoppedError) as caught:
        run_job(tmp_path, before, run_dir=tmp_path / "run", params={"stop_at": stop_at})
    assert caught.value.step == stop_at + 1
    run = run_job(tmp_path, after, run_dir=tmp_path / "run", resume=True)
    assert_equals(run, tmp_path, reference)
    stopped = list(tmp_path.glob("used-*-stopped.json"))
    resumed = [file for file in tmp_path.glob("used-*.json") if file not in stopped]
    assert_every_row_once(*stopped, *resumed)


def test_one_slot_is_the_ordinary_loop(tmp_path: Path) -> None:
    run = run_job(tmp_path, 1, slots=1)
    assert_equals(run, tmp_path, plain_loop(1))


@pytest.mark.parametrize("workers", [1, 3])
def test_accumulation_within_a_slot(workers: int, tmp_path: Path) -> None:
    run = run_job(tmp_path, workers, slots=4, params={"accumulate": 3})
    assert_equals(run, tmp_path, plain_loop(4, accumulate=3))


@pytest.mark.parametrize("transport", ["shared_memory", "network"])
def test_fast_reduction_keeps_the_plan(
    transport: str, reference: dict[str, Any], tmp_path: Path
) -> None:
    run = run_job(tmp_path, 2, reduction="fast", transport=transport)
    assert_every_row_once(*tmp_path.glob("used-*.json"))
    losses = [r["values"]["loss"] for r in run.metrics() if r["kind"] == "step"]
    expected = [values["loss"] for values in reference["logged"]]
    # Dropout and batch statistics are those of half a batch, not of an eighth.
    assert np.allclose(losses, expected, atol=0.2)
