"""What a training function sees of its job, on one worker and on worlds of threads."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import farandole as fa
from farandole.checkpoint.store import CheckpointStore
from farandole.checkpoint.tree import unflatten
from farandole.errors import JobStoppedError
from farandole.job.ends import Completion
from farandole.job.rundir import RunDir
from farandole.plan.random import slot_seed

JOBS = Path(__file__).parent.parent / "jobs"
sys.path.insert(0, str(JOBS))

from inline_job import (  # noqa: E402
    BATCH_SIZE,
    NUM_ROWS,
    SLOTS,
    data,
    loss_of,
    run_inline,
    sgd,
    value_of,
)

NUM_STEPS = 4


def run_dir(folder: Path) -> RunDir:
    return RunDir(folder / "job")


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in run_dir(folder).metrics() if record["kind"] == kind]


def fixed_model() -> nn.Module:
    """Return the same model on every thread, whoever else draws random numbers."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def train_fixed(job: fa.Job, **options: Any) -> dict[str, torch.Tensor]:
    model, optimizer = job.prepare(fixed_model(), lambda params: torch.optim.AdamW(params, lr=0.05))
    for _ in job.epochs(2):
        for batch in job.loader(data(), batch_size=BATCH_SIZE, **options):
            with job.autocast():
                loss = loss_of(model, batch)
            job.backward(loss)
            optimizer.step()
            job.log(loss=loss, rows=float(len(batch)))
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_same_bits_on_any_number_of_workers(
    workers: int, precision: str, tmp_path: Path
) -> None:
    alone = value_of(run_inline(train_fixed, tmp_path / "1", precision=precision))
    many = run_inline(train_fixed, tmp_path / "n", workers=workers, precision=precision)
    assert all(torch.equal(value_of(many)[name], alone[name]) for name in alone)
    values = [[r["values"] for r in records(tmp_path / run, "step")] for run in ("1", "n")]
    assert values[0] == values[1]
    assert len(values[0]) == 2 * NUM_STEPS


def test_bf16_is_another_result_than_fp32(tmp_path: Path) -> None:
    plain, half = (
        value_of(run_inline(train_fixed, tmp_path / name, precision=name))
        for name in ("fp32", "bf16")
    )
    assert not all(torch.equal(plain[name], half[name]) for name in plain)
    assert all(value.dtype is torch.float32 for value in half.values())


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_row_once_per_epoch(workers: int, accumulate: int, tmp_path: Path) -> None:
    used: Counter[tuple[int, int]] = Counter()

    def train(job: fa.Job) -> None:
        model, optimizer = job.prepare(fixed_model(), sgd)
        for epoch in job.epochs(2):
            for batch in job.loader(data(), batch_size=BATCH_SIZE, accumulate=accumulate):
                job.backward(loss_of(model, batch))
                optimizer.step()
                used.update((epoch, row) for row in batch.row_ids.tolist())

    value_of(run_inline(train, tmp_path, workers=workers))
    assert used == {(epoch, row): 1 for epoch in range(2) for row in range(NUM_ROWS)}


def test_steps_microsteps_and_their_ends(tmp_path: Path) -> None:
    seen: list[tuple[int, int, bool, bool]] = []

    def train(job: fa.Job) -> None:
        model, optimizer = job.prepare(fixed_model(), sgd)
        assert not job.at_step_end
        for _ in job.epochs(1):
            loader = job.loader(data(), batch_size=BATCH_SIZE)
            assert loader.num_steps == NUM_STEPS
            for batch in loader:
                before = job.at_step_end
                job.backward(loss_of(model, batch))
                optimizer.step()
                seen.append((job.step, job.epoch, before, job.at_step_end))
        assert job.step == NUM_STEPS

    value_of(run_inline(train, tmp_path))
    assert seen == [
        (step, 0, False, slot == SLOTS - 1) for step in range(NUM_STEPS) for slot in range(SLOTS)
    ]


def test_max_steps_and_dropped_tails(tmp_path: Path) -> None:
    def train(job: fa.Job) -> list[int]:
        model, optimizer = job.prepare(fixed_model(), sgd)
        steps = []
        for options in ({"max_steps": 2}, {"tail": "drop"}, {"max_steps": 100}):
            before = job.step
            for _ in job.epochs(job.epoch + 1):
                for batch in job.loader(data(), batch_size=BATCH_SIZE, **options):
                    job.backward(loss_of(model, batch))
                    optimizer.step()
            steps.append(job.step - before)
        return steps

    assert value_of(run_inline(train, tmp_path)) == [2, NUM_ROWS // BATCH_SIZE, NUM_STEPS]


def test_randomness_is_that_of_the_slot(tmp_path: Path) -> None:
    drawn: dict[tuple[int, int], float] = {}

    def train(job: fa.Job) -> None:
        model, optimizer = job.prepare(fixed_model(), sgd)
        for _ in job.epochs(1):
            for number, batch in enumerate(job.loader(data(), batch_size=BATCH_SIZE)):
                drawn[job.step, number % SLOTS] = torch.rand(()).item()
                job.backward(loss_of(model, batch))
                optimizer.step()

    value_of(run_inline(train, tmp_path, seed=7))
    for (step, slot), value in drawn.items():
        generator = torch.Generator().manual_seed(slot_seed(7, step, slot))
        assert value == torch.rand((), generator=generator).item()


@pytest.mark.parametrize("workers", [1, 2])
def test_the_seed_of_the_slot_at_hand_can_be_asked_for(workers: int, tmp_path: Path) -> None:
    within: set[tuple[int, int]] = set()
    between: list[tuple[int, int]] = []

    def train(job: fa.Job) -> None:
        def judge(batch: fa.Batch) -> dict[str, float]:
            between.append((job.step, job.slot_seed))
            return {"one": 1.0}

        model, optimizer = job.prepare(fixed_model(), sgd)
        between.append((job.step, job.slot_seed))
        for _ in job.epochs(1):
            for batch in job.loader(data(), batch_size=BATCH_SIZE):
                within.add((job.step, job.slot_seed))
                job.backward(loss_of(model, batch))
                optimizer.step()
                if job.at_step_end:
                    job.evaluate(judge, data(), batch_size=NUM_ROWS // 2)
        between.append((job.step, job.slot_seed))

    value_of(run_inline(train, tmp_path, workers=workers, seed=7))
    assert within == {
        (step, slot_seed(7, step, slot)) for step in range(NUM_STEPS) for slot in range(SLOTS)
    }
    assert set(between) == {(step, slot_seed(7, step, SLOTS)) for step in range(NUM_STEPS + 1)}


def test_weights_begin_as_those_of_rank_0(tmp_path: Path) -> None:
    weights: dict[int, torch.Tensor] = {}

    def train(job: fa.Job) -> None:
        linear = nn.Linear(4, 1)
        nn.init.constant_(linear.weight, float(job.rank))
        model, _ = job.prepare(linear, sgd)
        weights[job.rank] = model.weight.detach().clone()

    value_of(run_inline(train, tmp_path, workers=3))
    assert [weights[rank].tolist() for rank in range(3)] == [[[0.0] * 4]] * 3


# --- logging --------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_what_is_logged_is_written_once(workers: int, tmp_path: Path) -> None:
    def train(job: fa.Job) -> dict[str, float]:
        model, optimizer = job.prepare(fixed_model(), sgd)
        for _ in job.epochs(1):
            for batch in job.loader(data(), batch_size=BATCH_SIZE):
                job.backward(loss_of(model, batch))
                optimizer.step()
                job.log(row=batch.row_ids.double().mean())
                job.log_step(at=job.step)
        job.log_step(final=2.5)
        return job.metrics

    last = value_of(run_inline(train, tmp_path, workers=workers))
    steps = records(tmp_path, "step")
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert [record["rows"] for record in steps] == [16, 16, 16, 12]
    assert [record["values"]["at"] for record in steps] == [0, 1, 2, 3]
    # The mean over all rows of the epoch is that over the steps by their rows.
    whole = sum(record["values"]["row"] * record["rows"] for record in steps) / NUM_ROWS
    assert whole == pytest.approx((NUM_ROWS - 1) / 2)
    (summary,) = records(tmp_path, "summary")
    assert (summary["step"], summary["values"]) == (NUM_STEPS, {"final": 2.5})
    assert last == {**steps[-1]["values"], "final": 2.5}


def test_a_batch_too_small_for_its_slots_gets_a_warning(tmp_path: Path) -> None:
    value_of(run_inline(train_fixed, tmp_path))
    warnings = [e["message"] for e in run_dir(tmp_path).events() if e["kind"] == "warning"]
    assert len(warnings) == 1
    assert "a batch of 16 rows makes 4 in each of 4 slots" in warnings[0]
    assert "--slots 1 or with batches of 128 rows" in warnings[0]


# --- evaluating -----------------------------------------------------------------------------


def evaluate_fixed(job: fa.Job) -> Any:
    model, _ = job.prepare(nn.Sequential(fixed_model(), nn.Dropout(0.5)), sgd)
    modes: list[tuple[bool, bool]] = []

    def score(batch: fa.Batch) -> dict[str, Any]:
        output = model(batch.features).squeeze(1)
        modes.append((model.training, output.requires_grad))
        return {
            "loss": loss_of(model, batch),
            "score": output,
            "mean": output.double().mean(),
            "row": batch.row_ids,
            "wide": batch.features,
            "one": 1.0,
        }

    evaluation = job.evaluate(score, data(), batch_size=7, name="holdout")
    assert set(modes) <= {(False, False)}
    assert model.training
    return evaluation


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_evaluation_counts_every_row_once(workers: int, tmp_path: Path) -> None:
    alone = value_of(run_inline(evaluate_fixed, tmp_path / "1"))
    evaluation = value_of(run_inline(evaluate_fixed, tmp_path / "n", workers=workers))
    assert evaluation.num_rows == NUM_ROWS
    assert evaluation.rows["row"].tolist() == list(range(NUM_ROWS))
    assert evaluation.metrics == alone.metrics
    assert evaluation.metrics["one"] == pytest.approx(1.0)
    assert evaluation.metrics["mean"] == pytest.approx(evaluation.rows["score"].mean(), rel=1e-6)
    for name, values in alone.rows.items():
        assert np.array_equal(values, evaluation.rows[name]), name
    table = pq.read_table(run_dir(tmp_path / "n").evaluations / "holdout.parquet")
    assert table["row"].to_pylist() == list(range(NUM_ROWS))
    assert np.array_equal(np.stack(table["wide"].to_pylist()), alone.rows["wide"])
    (record,) = records(tmp_path / "n", "evaluation")
    assert (record["name"], record["step"], record["values"]) == ("holdout", 0, alone.metrics)


def test_evaluating_changes_nothing_of_the_training(tmp_path: Path) -> None:
    def train(job: fa.Job, often: bool) -> dict[str, torch.Tensor]:
        model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.3), nn.Linear(3, 1))
        model, optimizer = job.prepare(model, sgd)
        for _ in job.epochs(2):
            for batch in job.loader(data(), batch_size=BATCH_SIZE):
                job.backward(loss_of(model, batch))
                optimizer.step()
                if often and job.at_step_end:
                    job.evaluate(lambda b: {"loss": loss_of(model, b)}, data(), batch_size=9)
        return copy.deepcopy(model.state_dict())

    never = value_of(run_inline(lambda job: train(job, False), tmp_path / "a"))
    often = value_of(run_inline(lambda job: train(job, True), tmp_path / "b"))
    assert all(torch.equal(never[name], often[name]) for name in never)
    steps = [record["step"] for record in records(tmp_path / "b", "evaluation")]
    assert steps == list(range(1, 2 * NUM_STEPS + 1))


def train_judging(job: fa.Job, losses: dict[int, float], name: str = "holdout") -> None:
    """Evaluate after some steps, within the loop."""
    model, optimizer = job.prepare(fixed_model(), sgd)
    for _ in job.epochs(1):
        for batch in job.loader(data(), batch_size=BATCH_SIZE):
            job.backward(loss_of(model, batch))
            optimizer.step()
            job.log(logged=1.0)
            if job.at_step_end and job.step + 1 in losses:
                loss = losses[job.step + 1]
                job.evaluate(lambda _, loss=loss: {"loss": loss}, data(), name=name)


def warnings_of(folder: Path) -> list[str]:
    events = run_dir(folder).events()
    return [e["message"] for e in events if e["kind"] == "warning" and "best" in e["message"]]


@pytest.mark.parametrize("every_steps", [None, 1])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_evaluation_within_the_loop_decides_about_the_best(
    workers: int, every_steps: int | None, tmp_path: Path
) -> None:
    settings = {
        "checkpoint.every_steps": every_steps,
        "checkpoint.every_s": 3600.0,
        "checkpoint.keep": 1,
        "checkpoint.best": "holdout/loss",
    }
    losses = {1: 0.5, 2: 0.25, 3: 0.75}
    train = partial(train_judging, losses=losses)
    value_of(run_inline(train, tmp_path, workers=workers, **settings))
    store = CheckpointStore(run_dir(tmp_path).checkpoints)
    assert store.steps() == [2, NUM_STEPS]
    _, _, about = store.read(NUM_STEPS)
    assert about["best"] == {"step": 2, "value": 0.25}
    tensors, skeleton, _ = store.read(2)
    assert unflatten(tensors, skeleton)["position"]["row"] == 2 * BATCH_SIZE
    assert warnings_of(tmp_path) == []


@pytest.mark.parametrize(
    ("best", "losses", "hint"),
    [
        ("logged", {1: 0.5}, "the nearest that one gave is 'holdout/loss'"),
        ("holdout/los", {1: 0.5}, "the nearest that one gave is 'holdout/loss'"),
        ("holdout/loss", {}, "there was none"),
    ],
)
def test_a_best_that_no_evaluation_gave_is_warned_of(
    best: str, losses: dict[int, float], hint: str, tmp_path: Path
) -> None:
    train = partial(train_judging, losses=losses)
    value_of(run_inline(train, tmp_path, workers=2, **{"checkpoint.best": best}))
    (warning,) = warnings_of(tmp_path)
    assert warning.startswith(f"checkpoint.best = {best!r}: no evaluation gave it")
    assert warning.endswith(hint)


# --- stopping -------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("asking", [0, 2])
def test_all_workers_stop_after_the_same_step(workers: int, asking: int, tmp_path: Path) -> None:
    after: list[int] = []

    def train(job: fa.Job) -> None:
        model, optimizer = job.prepare(fixed_model(), sgd)
        try:
            for _ in job.epochs(5):
                for batch in job.loader(data(), batch_size=BATCH_SIZE):
                    if job.step == 5 and job.rank == min(asking, workers - 1):
                        job.request_stop("the test asks")
                    job.backward(loss_of(model, batch))
                    optimizer.step()
        except JobStoppedError:
            after.append(job.step)
            raise

    ends = run_inline(train, tmp_path, workers=workers)
    for end in ends:
        assert isinstance(end, Completion)
        assert (end.stopped_after, end.reason) == (6, "the test asks")
    assert after == [6] * workers
    assert [record["step"] for record in records(tmp_path, "step")] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in run_dir(tmp_path).checkpoints.iterdir()] == ["step-0000000006"]


def test_a_stop_that_comes_too_late_changes_nothing(tmp_path: Path) -> None:
    def train(job: fa.Job) -> str:
        model, optimizer = job.prepare(fixed_model(), sgd)
        for _ in job.epochs(1):
            for batch in job.loader(data(), batch_size=BATCH_SIZE):
                job.backward(loss_of(model, batch))
                optimizer.step()
        job.request_stop("too late")
        return "done"

    assert value_of(run_inline(train, tmp_path)) == "done"


# --- fast reduction -------------------------------------------------------------------------


def test_fast_reduction_takes_a_workers_slots_at_once(tmp_path: Path) -> None:
    sizes: list[tuple[int, int]] = []

    def train(job: fa.Job) -> dict[str, torch.Tensor]:
        model, optimizer = job.prepare(fixed_model(), sgd)
        for _ in job.epochs(1):
            for batch in job.loader(data(), batch_size=BATCH_SIZE):
                sizes.append((job.rank, len(batch)))
                job.backward(loss_of(model, batch))
                optimizer.step()
        return copy.deepcopy(model.state_dict())

    fast = value_of(run_inline(train, tmp_path / "fast", workers=2, reduction="fast"))
    assert sorted(sizes) == [(r, n) for r in range(2) for n in (6, 8, 8, 8)]
    sizes.clear()
    exact = value_of(run_inline(train, tmp_path / "exact", workers=2))
    assert sorted(sizes) == [(r, n) for r in range(2) for n in (3, 3, 4, 4, 4, 4, 4, 4)]
    for name, value in exact.items():
        assert torch.allclose(fast[name], value, atol=1e-5)


def test_parameters_and_ranks(tmp_path: Path) -> None:
    def train(job: fa.Job, lr: float) -> tuple[int, int, dict[str, Any]]:
        assert lr == 0.5
        return job.rank, job.world_size, job.params

    check: Callable[..., Any] = train
    ends = run_inline(check, tmp_path, workers=2, params={"lr": 0.5})
    assert value_of(ends) == (0, 2, {"lr": 0.5})
