"""A training function that uses the job wrongly is told so, at once, on every worker."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fa
from farandole.errors import MismatchError, PeerLostError, UsageError, WorkerFailedError
from farandole.job.ends import read_failure
from farandole.job.rundir import RunDir

JOBS = Path(__file__).parent.parent / "jobs"
sys.path.insert(0, str(JOBS))

from inline_job import BATCH_SIZE, NUM_ROWS, data, loss_of, run_inline, sgd  # noqa: E402

Misuse = Callable[[fa.Job], Any]
MISUSES: list[tuple[Misuse, str]] = []


def misuse(message: str) -> Callable[[Misuse], Misuse]:
    """Collect a wrong training function, and what shall be said of it."""

    def collect(function: Misuse) -> Misuse:
        MISUSES.append((function, message))
        return function

    return collect


def prepare(job: fa.Job, model: nn.Module | None = None) -> tuple[Any, Any]:
    return job.prepare(model or nn.Linear(4, 1), sgd)


def batches(job: fa.Job, **options: Any) -> Iterator[fa.Batch]:
    for _ in job.epochs(1):
        yield from job.loader(data(), batch_size=BATCH_SIZE, **options)


def mean_output(model: nn.Module) -> Callable[[fa.Batch], dict[str, Any]]:
    return lambda batch: {"mean": model(batch.features).mean()}


def train_on(job: fa.Job, model: nn.Module, optimizer: Any) -> None:
    for batch in batches(job):
        job.backward(loss_of(model, batch))
        optimizer.step()


# --- backward -------------------------------------------------------------------------------


@misuse(r"job\.backward\(loss\) was called twice for one batch; add the losses up")
def backward_twice(job: fa.Job) -> None:
    model, _ = prepare(job)
    for batch in batches(job):
        job.backward(loss_of(model, batch))
        job.backward(loss_of(model, batch))


@misuse(r"job\.backward\(loss\) was called outside of a loader")
def backward_outside(job: fa.Job) -> None:
    model, _ = prepare(job)
    job.backward(model(torch.ones(1, 4)).mean())


@misuse(r"no gradient reached unused\.weight, unused\.bias; .*allow_unused=True")
def parameter_without_gradient(job: fa.Job) -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 1), "unused": nn.Linear(4, 1)})
    model, _ = prepare(job, model)
    for batch in batches(job):
        job.backward(loss_of(model["used"], batch))


@misuse(r"no gradient reached 1\.weight, .* and 3 more; ")
def many_parameters_without_gradient(job: fa.Job) -> None:
    model, _ = prepare(job, nn.Sequential(*(nn.Linear(4, 1) for _ in range(5))))
    for batch in batches(job):
        job.backward(loss_of(model[0], batch))


@misuse(r"parameter '0\.weight' has a sparse gradient; build its module with sparse=False")
def sparse_gradient(job: fa.Job) -> None:
    model, _ = prepare(job, nn.Sequential(nn.Embedding(10, 1, sparse=True)))
    for _ in batches(job):
        job.backward(model(torch.tensor([1, 2])).mean())


@misuse("job.backward got no loss that can be differentiated; pass a tensor of one element")
def loss_not_scalar(job: fa.Job) -> None:
    model, _ = prepare(job)
    for batch in batches(job):
        job.backward(model(batch.features))


@misuse("job.backward got no loss that can be differentiated")
def loss_without_gradient(job: fa.Job) -> None:
    model, _ = prepare(job)
    for batch in batches(job):
        job.backward(loss_of(model, batch).detach())


@misuse("job.backward got no loss that can be differentiated")
def loss_as_a_number(job: fa.Job) -> None:
    model, _ = prepare(job)
    for batch in batches(job):
        job.backward(loss_of(model, batch).item())


# --- the loader -----------------------------------------------------------------------------

HALF_READ = r"a loader was left half-read: .*; let it run to its end; .*max_steps=N"


def leave_half_read(job: fa.Job) -> nn.Module:
    model, optimizer = prepare(job)
    for batch in batches(job):
        job.backward(loss_of(model, batch))
        optimizer.step()
        break
    return model


@misuse(HALF_READ)
def half_read_at_the_end(job: fa.Job) -> None:
    leave_half_read(job)


@misuse(HALF_READ)
def half_read_then_evaluate(job: fa.Job) -> None:
    model = leave_half_read(job)
    job.evaluate(mean_output(model), data())


@misuse(HALF_READ)
def half_read_then_log(job: fa.Job) -> None:
    leave_half_read(job)
    job.log(loss=1.0)


@misuse(HALF_READ)
def half_read_then_next_epoch(job: fa.Job) -> None:
    prepare(job)
    for _ in job.epochs(2):
        for _ in job.loader(data(), batch_size=BATCH_SIZE):
            break


@misuse(HALF_READ)
def half_read_then_another_loader(job: fa.Job) -> None:
    prepare(job)
    for _ in job.epochs(2):
        for _ in job.loader(data(), batch_size=BATCH_SIZE):
            break
        for _ in job.loader(data(), batch_size=BATCH_SIZE):
            break


@misuse(HALF_READ)
def kept_beyond_the_epoch(job: fa.Job) -> None:
    model, optimizer = prepare(job)
    for _ in job.epochs(1):
        kept = iter(job.loader(data(), batch_size=BATCH_SIZE))
        until_a_step(job, model, optimizer, kept)
    for batch in kept:
        job.backward(loss_of(model, batch))
        optimizer.step()


@misuse(HALF_READ)
def kept_beyond_the_end(job: fa.Job) -> Any:
    model, optimizer = prepare(job)
    epochs = job.epochs(1)
    next(epochs)
    kept = iter(job.loader(data(), batch_size=BATCH_SIZE))
    until_a_step(job, model, optimizer, kept)
    return epochs, kept


def until_a_step(job: fa.Job, model: nn.Module, optimizer: Any, kept: Iterator[fa.Batch]) -> None:
    while not job.at_step_end:
        job.backward(loss_of(model, next(kept)))
        optimizer.step()


@misuse(r"job\.loader was begun before another one had ended; .*farandole\.mix")
def two_loaders_at_once(job: fa.Job) -> None:
    prepare(job)
    for _ in job.epochs(1):
        both = (job.loader(data(seed=seed), batch_size=BATCH_SIZE) for seed in (0, 1))
        for _ in zip(*both, strict=True):
            pass


@misuse(r"job\.loader was begun before another one had ended")
def a_loader_within_another(job: fa.Job) -> None:
    model, optimizer = prepare(job)
    for batch in batches(job):
        job.backward(loss_of(model, batch))
        optimizer.step()
        if job.at_step_end:
            next(iter(job.loader(data(), batch_size=BATCH_SIZE)))


@misuse(r"job\.epochs was called within the loop over job\.epochs; loop over it once")
def epochs_within_epochs(job: fa.Job) -> None:
    for _ in job.epochs(2):
        next(iter(job.epochs(2)))


@misuse(r"job\.epochs\(2\.5\); give a whole number from 0 up")
def half_an_epoch(job: fa.Job) -> None:
    next(iter(job.epochs(2.5)))  # type: ignore[arg-type]


@misuse(r"job\.loader was read outside of job\.epochs")
def loader_after_a_break(job: fa.Job) -> None:
    prepare(job)
    for _ in job.epochs(3):
        break
    next(iter(job.loader(data(), batch_size=BATCH_SIZE)))


@misuse(r"a batch was not used: job\.backward\(loss\) was not called for it")
def batch_unused(job: fa.Job) -> None:
    prepare(job)
    for _ in batches(job):
        continue


@misuse(r"a batch was not used")
def own_backward(job: fa.Job) -> None:
    model, _ = prepare(job)
    for batch in batches(job):
        loss_of(model, batch).backward()


@misuse(r"job\.loader was read outside of job\.epochs")
def loader_outside_of_epochs(job: fa.Job) -> None:
    prepare(job)
    for _ in job.loader(data(), batch_size=BATCH_SIZE):
        pass


@misuse(r"job\.loader was read before job\.prepare")
def loader_before_prepare(job: fa.Job) -> None:
    for _ in batches(job):
        pass


@misuse(r"job\.loader\(batch_size=0\); give a whole number from 1 up")
def no_rows_in_a_batch(job: fa.Job) -> None:
    prepare(job)
    job.loader(data(), batch_size=0)


@misuse(r"job\.loader\(max_steps=0\); give a whole number from 1 up, or leave it out")
def no_steps(job: fa.Job) -> None:
    prepare(job)
    job.loader(data(), batch_size=BATCH_SIZE, max_steps=0)


@misuse(r"job\.loader\(max_steps=-1\)")
def fewer_than_no_steps(job: fa.Job) -> None:
    prepare(job)
    job.loader(data(), batch_size=BATCH_SIZE, max_steps=-1)


# --- optimizer and scheduler ----------------------------------------------------------------


@misuse(r"optimizer\.step\(\) was called outside of a loader")
def step_outside(job: fa.Job) -> None:
    _, optimizer = prepare(job)
    optimizer.step()


@misuse(r"optimizer\.step\(\) was called before job\.backward\(loss\)")
def step_before_backward(job: fa.Job) -> None:
    _, optimizer = prepare(job)
    for _ in batches(job):
        optimizer.step()


@misuse(r"optimizer\.step\(\) was called twice in one step")
def step_twice(job: fa.Job) -> None:
    model, optimizer = prepare(job)
    for batch in batches(job):
        job.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.step()


@misuse(r"a step was not taken: optimizer\.step\(\) was not called")
def step_missing(job: fa.Job) -> None:
    model, _ = prepare(job)
    for batch in batches(job):
        job.backward(loss_of(model, batch))


@misuse(r"optimizer\.step\(closure\) evaluates the loss several times")
def step_with_a_closure(job: fa.Job) -> None:
    model, optimizer = prepare(job)
    for batch in batches(job):
        optimizer.step(lambda batch=batch: loss_of(model, batch))


@misuse(r"the job's optimizer was given to a GradScaler, .*; leave it out: job\.autocast\(\)")
def scaled_gradients(job: fa.Job) -> None:
    model, optimizer = prepare(job)
    scaler = torch.amp.GradScaler("cpu")
    for batch in batches(job):
        job.backward(scaler.scale(loss_of(model, batch)))
        scaler.step(optimizer)


@misuse(r"optimizer\.zero_grad\(\) between .* would drop the gradients")
def zero_grad_between(job: fa.Job) -> None:
    model, optimizer = prepare(job)
    for batch in batches(job):
        job.backward(loss_of(model, batch))
        optimizer.zero_grad()
        optimizer.step()


@misuse(r"scheduler\.step\(\) was called before optimizer\.step\(\)")
def scheduler_before_optimizer(job: fa.Job) -> None:
    model, optimizer, scheduler = job.prepare(
        nn.Linear(4, 1), sgd, lambda made: torch.optim.lr_scheduler.StepLR(made, 1)
    )
    for batch in batches(job):
        job.backward(loss_of(model, batch))
        scheduler.step()
        optimizer.step()


# --- setting up -----------------------------------------------------------------------------


@misuse(r"job\.prepare was called twice; put several models into one torch\.nn\.ModuleDict")
def prepare_twice(job: fa.Job) -> None:
    prepare(job)
    prepare(job)


@misuse(r"job\.prepare got a SGD as the optimizer; pass a function that makes it")
def prepare_with_an_optimizer(job: fa.Job) -> None:
    model = nn.Linear(4, 1)
    job.prepare(model, sgd(list(model.parameters())))


@misuse(r"job\.prepare got a function as the model")
def prepare_without_a_model(job: fa.Job) -> None:
    job.prepare(sgd, sgd)  # type: ignore[call-overload]


@misuse(r"the optimizer function returned a list")
def prepare_with_no_optimizer_made(job: fa.Job) -> None:
    job.prepare(nn.Linear(4, 1), list)  # type: ignore[arg-type]


@misuse(r"the optimizer has none of the model's parameters; make it of those that")
def prepare_with_an_optimizer_of_others(job: fa.Job) -> None:
    job.prepare(nn.Linear(4, 1), lambda _: sgd([nn.Parameter(torch.ones(2))]))


@misuse(r"1\.weight, 1\.bias became trainable after job\.prepare; build the whole model before")
def parameters_added_later(job: fa.Job) -> None:
    model, optimizer = prepare(job, nn.Sequential(nn.Linear(4, 1)))
    model.append(nn.Linear(1, 1))
    optimizer.add_param_group({"params": list(model[1].parameters())})
    train_on(job, model, optimizer)


@misuse(r"0\.weight, 0\.bias became trainable after job\.prepare")
def parameters_thawed_later(job: fa.Job) -> None:
    layers = nn.Sequential(nn.Linear(4, 1).requires_grad_(False), nn.Linear(1, 1))
    model, optimizer = prepare(job, layers)
    model.requires_grad_(True)
    train_on(job, model, optimizer)


@misuse(r"the model has no trainable parameter")
def nothing_to_train(job: fa.Job) -> None:
    prepare(job, nn.Flatten())


@misuse(r"job\.register got a dict; give it state_dict\(\)")
def register_without_state(job: fa.Job) -> None:
    job.register("average", {})


@misuse(r"'average' is registered already; give each part its own name")
def register_twice(job: fa.Job) -> None:
    job.register("average", nn.Linear(1, 1))
    job.register("average", nn.Linear(1, 1))


@misuse(r"state at 'extra\.odd\.x' is a set, which cannot be checkpointed")
def register_odd_state(job: fa.Job) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"x": {1}}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    job.register("odd", Odd())


# --- logging, evaluating, saving ------------------------------------------------------------


@misuse(r"job\.log was called outside of a loader; .*job\.log_step")
def log_outside(job: fa.Job) -> None:
    job.log(loss=1.0)


@misuse(r"'loss' was logged with shape \(\d, 1\); log one number")
def log_many(job: fa.Job) -> None:
    model, _ = prepare(job)
    for batch in batches(job):
        job.log(loss=model(batch.features))


@misuse(r"'loss' was logged with a str; log one number")
def log_text(job: fa.Job) -> None:
    prepare(job)
    for _ in batches(job):
        job.log(loss="low")


@misuse(r"'loss' was logged twice for one batch")
def log_twice(job: fa.Job) -> None:
    model, _ = prepare(job)
    for batch in batches(job):
        job.log(loss=loss_of(model, batch))
        job.log(loss=1.0)


@misuse(r"'norm' was logged with a str; log one number")
def log_text_outside(job: fa.Job) -> None:
    job.log_step(norm="low")


@misuse(r"job\.evaluate\(batch_size=0\); give a whole number from 1 up")
def evaluate_no_rows_at_once(job: fa.Job) -> None:
    job.evaluate(lambda batch: {"y": 1.0}, data(), batch_size=0)


@misuse(r"job\.evaluate\(name='a/b'\); give a name that can be a file's")
def evaluate_under_an_odd_name(job: fa.Job) -> None:
    job.evaluate(lambda batch: {"y": 1.0}, data(), name="a/b")


@misuse(r"job\.evaluate got a Linear as the function; pass a function of a batch")
def evaluate_a_module(job: fa.Job) -> None:
    model, _ = prepare(job)
    job.evaluate(model, data())


@misuse(r"returned 'y' with rows of shape \(2,\) for some batches and of shape \(3,\) for others")
def evaluate_to_rows_of_many_shapes(job: fa.Job) -> None:
    def score(batch: fa.Batch) -> dict[str, Any]:
        return {"y": torch.ones(batch.num_rows, 3 if batch.row_ids[0] == 50 else 2)}

    # The last of the batches: with two workers the difference is between them, too.
    job.evaluate(score, data(), batch_size=50)


@misuse(r"job\.evaluate was called in the middle of a step; .*job\.at_step_end")
def evaluate_in_the_middle(job: fa.Job) -> None:
    model, _ = prepare(job)
    for batch in batches(job):
        job.backward(loss_of(model, batch))
        job.evaluate(mean_output(model), data())


@misuse(r"job\.save was called in the middle of a step")
def save_in_the_middle(job: fa.Job) -> None:
    model, _ = prepare(job)
    for batch in batches(job):
        job.save(model, batch)


@misuse(r"the evaluation function returned a Tensor; return a dict")
def evaluate_to_a_tensor(job: fa.Job) -> None:
    model, _ = prepare(job)
    function: Any = lambda batch: model(batch.features)  # noqa: E731
    job.evaluate(function, data(), batch_size=10)


@misuse(r"the evaluation function returned an empty dict; return a dict of means")
def evaluate_to_nothing(job: fa.Job) -> None:
    job.evaluate(lambda batch: {}, data(), batch_size=10)


@misuse(r"the evaluation function returned an empty dict")
def evaluate_to_nothing_on_one_worker_of_two(job: fa.Job) -> None:
    job.evaluate(lambda batch: {}, data(), batch_size=NUM_ROWS)


@misuse(r"the evaluation function returned y for some batches only")
def evaluate_to_nothing_at_first(job: fa.Job) -> None:
    job.evaluate(lambda batch: {"y": 1.0} if batch.row_ids[0] else {}, data(), batch_size=30)


@misuse(r"the evaluation function returned 'y' with shape \(1, 2\) .* for \d+ rows")
def evaluate_to_odd_shapes(job: fa.Job) -> None:
    job.evaluate(lambda batch: {"y": torch.ones(1, 2)}, data(), batch_size=10)


@misuse(r"the evaluation function returned extra for some batches only")
def evaluate_to_mixed_names(job: fa.Job) -> None:
    def score(batch: fa.Batch) -> dict[str, Any]:
        return {"y": 1.0, **({"extra": 1.0} if batch.row_ids[0] % 20 else {})}

    job.evaluate(score, data(), batch_size=10)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("function", "message"), MISUSES, ids=[function.__name__ for function, _ in MISUSES]
)
def test_misuse_is_told_on_every_worker(
    function: Misuse, message: str, workers: int, tmp_path: Path
) -> None:
    for error in run_inline(function, tmp_path, workers=workers):
        assert isinstance(error, UsageError), error
        with pytest.raises(UsageError, match=message):
            raise error


# --- workers that do not do the same --------------------------------------------------------


def model_differs(job: fa.Job) -> None:
    prepare(job, nn.Linear(4 + job.rank // 2, 1))


def dtype_differs(job: fa.Job) -> None:
    prepare(job, nn.Linear(4, 1).to(torch.float64 if job.rank == 2 else torch.float32))


def optimizer_differs(job: fa.Job) -> None:
    job.prepare(nn.Linear(4, 1), sgd if job.rank < 2 else torch.optim.Adam)


def data_differ(job: fa.Job) -> None:
    model, optimizer = prepare(job)
    for _ in job.epochs(1):
        for batch in job.loader(data(seed=job.rank // 2), batch_size=BATCH_SIZE):
            job.backward(loss_of(model, batch))
            optimizer.step()


def batch_size_differs(job: fa.Job) -> None:
    model, optimizer = prepare(job)
    for _ in job.epochs(1):
        for batch in job.loader(data(), batch_size=BATCH_SIZE + job.rank // 2):
            job.backward(loss_of(model, batch))
            optimizer.step()


def learning_rate_differs(job: fa.Job) -> None:
    model, optimizer = prepare(job)
    optimizer.param_groups[0]["lr"] = 0.1 + job.rank // 2
    train_on(job, model, optimizer)


def schedule_differs(job: fa.Job) -> None:
    model, optimizer, scheduler = job.prepare(
        nn.Linear(4, 1), sgd, lambda made: torch.optim.lr_scheduler.StepLR(made, 1)
    )
    for _ in job.epochs(2):
        for batch in job.loader(data(), batch_size=BATCH_SIZE):
            job.backward(loss_of(model, batch))
            optimizer.step()
        if job.rank < 2:
            scheduler.step()


def epochs_differ(job: fa.Job) -> None:
    """As many loaders in all, but shared out among epochs in two ways."""
    model, optimizer = prepare(job)
    first, second = (1, 2) if job.rank == 2 else (2, 1)
    for _ in job.epochs(first):
        for _ in range(second):
            for batch in job.loader(data(), batch_size=BATCH_SIZE):
                job.backward(loss_of(model, batch))
                optimizer.step()


def one_skips_evaluate(job: fa.Job) -> None:
    model, optimizer = prepare(job)
    train_on(job, model, optimizer)
    if job.rank != 2:
        job.evaluate(mean_output(model), data())


def one_evaluates_other_data(job: fa.Job) -> None:
    model, _ = prepare(job)
    job.evaluate(mean_output(model), data(seed=job.rank // 2), batch_size=10)


def one_ends_early(job: fa.Job) -> None:
    model, optimizer = prepare(job)
    if job.rank != 2:
        train_on(job, model, optimizer)


def one_prepares_nothing(job: fa.Job) -> None:
    if job.rank != 2:
        prepare(job)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            model_differs,
            r"the model: rank 0 has parameter weight: \(1, 4\).* rank 2 has .*\(1, 5\)",
        ),
        (dtype_differs, r"rank 0 has .*float32.*, rank 2 has .*float64"),
        (optimizer_differs, r"rank 0 has optimizer SGD.*, rank 2 has optimizer Adam"),
        (data_differ, r"the loader: rank 0 has .*, rank 2 has .*"),
        (batch_size_differs, r"the loader: rank 0 has .*batch_size=16.*rank 2 .*batch_size=17"),
        (learning_rate_differs, r"the optimizer: rank 0 .*'lr': 0\.1,.*rank 2 .*'lr': 1\.1,"),
        (schedule_differs, r"the optimizer: rank 0 .*'lr': 0\.01\d*,.*rank 2 .*'lr': 0\.1,"),
        (epochs_differ, r"rank 0 has .* in epoch 2, number 1 .*rank 2 has .* in epoch 1, number 2"),
        (one_skips_evaluate, "evaluate"),
        (one_evaluates_other_data, r"the data of job\.evaluate: rank 0 has .*, rank 2 has"),
        (one_ends_early, "'end'"),
        (one_prepares_nothing, "'end'"),
    ],
)
def test_workers_that_disagree_are_told_so_everywhere(
    function: Misuse, message: str, tmp_path: Path
) -> None:
    for error in run_inline(function, tmp_path, workers=3):
        assert isinstance(error, MismatchError), error
        with pytest.raises(MismatchError, match=message):
            raise error


def test_the_mistake_of_one_worker_ends_the_others(tmp_path: Path) -> None:
    def one_breaks(job: fa.Job) -> None:
        model, optimizer = prepare(job)
        for batch in batches(job):
            job.backward(loss_of(model, batch))
            optimizer.step()
            if job.rank == 1:
                break

    first, second, third = run_inline(one_breaks, tmp_path, workers=3)
    assert isinstance(second, UsageError)
    assert isinstance(first, PeerLostError)
    assert isinstance(third, PeerLostError)


def real_misuse(job: fa.Job) -> None:
    """One calls what the other does not."""
    model, optimizer = prepare(job)
    train_on(job, model, optimizer)
    if job.rank == 0:
        job.evaluate(mean_output(model), data())


def test_real_workers_are_told_too(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match="workers disagree on"):
        fa.run(real_misuse, workers=2, slots=4, runs=tmp_path, progress=False)
    run = RunDir(next(tmp_path.glob("*/state.json")).parent)
    failures = [read_failure(run, worker_id) for worker_id in range(2)]
    assert all(failure and failure.reason.startswith("workers disagree") for failure in failures)
