"""Checkpoints of whole jobs: damaged, interrupted, on full disks, of other jobs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fa
from farandole.checkpoint.store import CheckpointStore
from farandole.config import NUMERICS
from farandole.errors import CheckpointError, ConfigError, DataError, PeerLostError
from farandole.job.rundir import RunDir
from farandole.job.settings import resolve_config

JOBS = Path(__file__).parent.parent / "jobs"
sys.path.insert(0, str(JOBS))

from inline_job import BATCH_SIZE, data, loss_of, make_run, run_inline, value_of  # noqa: E402

# PyTorch does not see that the optimizer of a resumed job has taken steps before.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")

STEPS_PER_EPOCH = 4
EVERY_2 = {"checkpoint.every_steps": 2, "checkpoint.every_s": None, "checkpoint.keep": 10}
NEVER = {"checkpoint.every_s": 3600.0}


class Trainer:
    """A training function with a scheduler per epoch, state of its own, and a hook per step."""

    def __init__(
        self,
        epochs: int = 2,
        *,
        after_step: Callable[[fa.Job], None] = lambda job: None,
        dataset: fa.ArrayDataset | None = None,
        width: int = 8,
        extra: str = "count",
        max_steps: int | None = None,
    ) -> None:
        self._epochs = epochs
        self._after_step = after_step
        self._dataset = dataset or data()
        self._width = width
        self._extra = extra
        self._loading: dict[str, Any] = {"batch_size": BATCH_SIZE, "max_steps": max_steps}

    def __call__(self, job: fa.Job) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(4, self._width), nn.Dropout(0.3), nn.Linear(self._width, 1))
        model, optimizer, scheduler = job.prepare(
            model,
            lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
            lambda made: torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5),
        )
        count = job.register(self._extra, Count())
        for _ in job.epochs(self._epochs):
            for batch in job.loader(self._dataset, **self._loading):
                loss = loss_of(model, batch)
                job.backward(loss)
                optimizer.step()
                job.log(loss=loss)
                if job.at_step_end:
                    count.value += 1
                    self._after_step(job)
            scheduler.step()
            job.evaluate(lambda b: {"loss": loss_of(model, b)}, data(), name="holdout")
        return {
            "weights": {name: value.clone() for name, value in model.state_dict().items()},
            "lr": scheduler.get_last_lr(),
            "count": count.value,
        }


class Count:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Interruption(Exception):  # noqa: N818
    """What ends a job in these tests, at a step."""


def interrupted_at(step: int) -> Callable[[fa.Job], None]:
    def after_step(job: fa.Job) -> None:
        if job.step == step:  # the step at hand is not counted yet
            raise Interruption

    return after_step


def run_until(step: int, folder: Path, **settings: Any) -> RunDir:
    """Train until an error after a step; return the run directory."""
    (end,) = run_inline(Trainer(after_step=interrupted_at(step)), folder, **settings)
    assert isinstance(end, Interruption), end
    return RunDir(folder / "job")


def resume(folder: Path, train: Any = None, **settings: Any) -> dict[str, Any]:
    return value_of(run_inline(train or Trainer(), folder, resume=True, **settings))


def events(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["kind"] == kind]


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left["lr"] == right["lr"]
    assert left["count"] == right["count"]
    assert left["weights"].keys() == right["weights"].keys()
    for name, value in left["weights"].items():
        assert torch.equal(value, right["weights"][name]), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a job gives that nothing befalls."""
    return value_of(run_inline(Trainer(), tmp_path_factory.mktemp("whole"), **NEVER))


# --- resuming -------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 3, 4, 5, 7])
def test_a_job_goes_on_from_its_newest_checkpoint(
    step: int, whole: dict[str, Any], tmp_path: Path
) -> None:
    run = run_until(step, tmp_path, **EVERY_2)
    assert_same(resume(tmp_path), whole)
    (resumed,) = events(run, "resume")
    assert resumed["step"] == step // 2 * 2
    steps = [record["step"] for record in run.metrics() if record["kind"] == "step"]
    assert steps == list(range(1, 2 * STEPS_PER_EPOCH + 1))


@pytest.mark.parametrize("step", [4, 5])
def test_what_follows_a_loop_is_not_done_twice(
    step: int, whole: dict[str, Any], tmp_path: Path
) -> None:
    """The best checkpoint is written after the scheduler's step, which a resumed job repeats."""
    run_until(step, tmp_path, **NEVER, **{"checkpoint.best": "holdout/loss"})
    assert CheckpointStore(tmp_path / "job" / "checkpoints").steps() == [STEPS_PER_EPOCH]
    assert_same(resume(tmp_path), whole)


def test_a_finished_job_has_nothing_to_do(whole: dict[str, Any], tmp_path: Path) -> None:
    value_of(run_inline(Trainer(), tmp_path, **NEVER))
    steps: list[int] = []
    again = resume(tmp_path, Trainer(after_step=lambda job: steps.append(job.step)))
    assert steps == []
    assert_same(again, whole)
    # More epochs can be added; what was trained is not trained again.
    longer = resume(tmp_path, Trainer(3, after_step=lambda job: steps.append(job.step)))
    assert steps == list(range(2 * STEPS_PER_EPOCH, 3 * STEPS_PER_EPOCH))
    assert longer["lr"] == [0.5**4]


def test_state_goes_to_other_workers_too(whole: dict[str, Any], tmp_path: Path) -> None:
    run_until(5, tmp_path, **EVERY_2)
    seen: list[tuple[int, int]] = []
    # Dropout's numbers are the process's own, so of several threads only the steps are compared.
    train = Trainer(after_step=lambda job: seen.append((job.rank, job.step)))
    assert resume(tmp_path, train, workers=3)["count"] == whole["count"]
    assert sorted(seen) == [(rank, step) for rank in range(3) for step in range(4, 8)]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("best", [None, "holdout/loss"])
def test_a_checkpoint_s_own_step_is_logged_though_the_next_never_comes(
    best: str | None, workers: int, tmp_path: Path
) -> None:
    """Where nothing else is said, a step's metrics travel with the next step's exchange."""
    checkpoint = tmp_path / "job" / "checkpoints" / "step-0000000002"

    def train(job: fa.Job, end_at: int | None) -> None:
        model, optimizer = job.prepare(nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.1))
        for _ in job.epochs(1):
            for batch in job.loader(data(), batch_size=BATCH_SIZE):
                if job.step == end_at:
                    wait_until(checkpoint.exists)
                    raise Interruption
                loss = loss_of(model, batch)
                job.backward(loss)
                optimizer.step()
                job.log(loss=loss)
                if best and job.at_step_end and job.step == 1:
                    job.evaluate(lambda b: {"loss": loss_of(model, b)}, data(), name="holdout")

    settings = {"checkpoint.best": best, **NEVER} if best else EVERY_2
    ends = run_inline(lambda job: train(job, 2), tmp_path, workers=workers, **settings)
    assert any(isinstance(end, Interruption) for end in ends), ends
    value_of(run_inline(lambda job: train(job, None), tmp_path, workers=workers, resume=True))
    run = RunDir(tmp_path / "job")
    assert [event["step"] for event in events(run, "resume")] == [2]
    steps = [record["step"] for record in run.metrics() if record["kind"] == "step"]
    assert steps == list(range(1, STEPS_PER_EPOCH + 1))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_to_go_on_from_starts_anew(whole: dict[str, Any], tmp_path: Path) -> None:
    run = run_until(1, tmp_path, **NEVER)
    assert_same(resume(tmp_path), whole)
    assert events(run, "resume") == []
    (warning,) = [e["message"] for e in events(run, "warning") if "checkpoint" in e["message"]]
    assert warning == "there is no checkpoint yet, so the job goes on from its beginning"


@pytest.mark.parametrize(
    ("epochs", "stop_at", "said"),
    [
        (2, None, "2 epochs were done at the checkpoint of step 8, and .* asks for no more"),
        (1, None, r"2 epochs were done at the checkpoint of step 8, .* fewer \(job.epochs\(1\)\)"),
        (1, 7, "1 epochs and a part of another were done at the checkpoint of step 6, .* fewer"),
        (3, None, None),
        (2, 7, None),
    ],
)
def test_a_resume_that_has_nothing_to_do_says_so(
    epochs: int, stop_at: int | None, said: str | None, tmp_path: Path
) -> None:
    if stop_at is None:
        value_of(run_inline(Trainer(2), tmp_path, **EVERY_2))
    else:
        run_until(stop_at, tmp_path, **EVERY_2)
    resume(tmp_path, Trainer(epochs), **EVERY_2)
    told = [e["message"] for e in events(RunDir(tmp_path / "job"), "warning")]
    nothing = [message for message in told if message.startswith("nothing was trained")]
    assert len(nothing) == (said is not None)
    assert said is None or re.search(said, nothing[0])


@pytest.mark.parametrize("key", NUMERICS)
def test_what_decides_the_result_stays(key: str, tmp_path: Path) -> None:
    run, _ = make_run(tmp_path)
    other = {"slots": 5, "seed": 9, "threads": 3, "reduction": "fast", "precision": "bf16"}[key]
    with pytest.raises(ConfigError, match=f"{key} = .*a resumed job must keep"):
        resolve_config(None, {"run_dir": run.path, "resume": True, key: other})


@pytest.mark.parametrize("workers", [1, 2])
def test_data_that_changed_within_an_epoch_are_refused(workers: int, tmp_path: Path) -> None:
    run_until(3, tmp_path, **EVERY_2)
    train = Trainer(dataset=data(seed=1))
    for end in run_inline(train, tmp_path, resume=True, workers=workers):
        assert isinstance(end, DataError)
        assert "the data have changed since the checkpoint" in str(end)


def test_data_may_change_between_epochs(tmp_path: Path) -> None:
    value_of(run_inline(Trainer(1), tmp_path, **NEVER))
    assert resume(tmp_path, Trainer(2, dataset=data(seed=1)))["count"] == 2 * STEPS_PER_EPOCH


@pytest.mark.parametrize(
    ("change", "said"),
    [({"width": 9}, "size mismatch"), ({"extra": "other"}, "has no state for extra.other")],
)
def test_another_function_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    run_until(3, tmp_path, **EVERY_2)
    for end in run_inline(Trainer(**change), tmp_path, resume=True, workers=2):
        assert isinstance(end, CheckpointError)
        assert said in str(end)
        assert "resume with the function that wrote it" in str(end)


def test_a_shortened_epoch_stays_as_short(tmp_path: Path) -> None:
    train = Trainer(after_step=interrupted_at(2), max_steps=3)
    run_inline(train, tmp_path, **EVERY_2)
    steps: list[int] = []
    train = Trainer(after_step=lambda job: steps.append(job.step), max_steps=3)
    assert resume(tmp_path, train)["count"] == 6
    assert steps == [2, 3, 4, 5]


# --- damage ---------------------------------------------------------------------------------


def data_file(checkpoint: Path) -> Path:
    return next(checkpoint.glob("*.distcp"))


def tear(checkpoint: Path) -> None:
    os.truncate(data_file(checkpoint), data_file(checkpoint).stat().st_size - 10)


def flip_a_bit(checkpoint: Path) -> None:
    file = data_file(checkpoint)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def lose_a_file(checkpoint: Path) -> None:
    data_file(checkpoint).unlink()


def lose_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def tear_the_manifest(checkpoint: Path) -> None:
    os.truncate(checkpoint / "manifest.json", 100)


def replace_by_another_step(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoint.with_name("step-0000000002"), checkpoint)


def replace_by_a_later_format(checkpoint: Path) -> None:
    file = checkpoint / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))


def replace_by_a_list(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (tear, r"is torn: .* bytes, not \d+"),
        (flip_a_bit, "was changed: .* another SHA-256"),
        (lose_a_file, "lacks its file"),
        (lose_the_manifest, "has no manifest, so it was never committed"),
        (tear_the_manifest, "has a manifest that cannot be read"),
        (replace_by_another_step, "is a foreign one .*'step': 2"),
        (replace_by_a_later_format, "is a foreign one .*'format': 99"),
        (replace_by_a_list, "has a manifest that cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_used(
    damage: Callable[[Path], None], reason: str, whole: dict[str, Any], tmp_path: Path
) -> None:
    run = run_until(5, tmp_path, **EVERY_2)
    newest = run.checkpoints / "step-0000000004"
    damage(newest)
    with pytest.raises(CheckpointError, match=reason):
        CheckpointStore(run.checkpoints).read(4)
    assert_same(resume(tmp_path), whole)
    assert [event["step"] for event in events(run, "resume")] == [2]
    said = [event["message"] for event in events(run, "warning") if str(newest) in event["message"]]
    assert len(said) == 1
    assert said[0].endswith("it is left as refused-step-0000000004; the one before it is used")


@pytest.mark.parametrize("workers", [1, 2])
def test_no_whole_checkpoint_at_all_is_an_error_until_they_are_removed(
    workers: int, whole: dict[str, Any], tmp_path: Path
) -> None:
    run = run_until(5, tmp_path, **EVERY_2)
    for step in (2, 4):
        tear(run.checkpoints / f"step-{step:010d}")
    for _ in range(2):  # to try again does not start anew either
        first, *others = run_inline(Trainer(), tmp_path, resume=True, workers=workers)
        with pytest.raises(CheckpointError, match=r"none can be used .*remove them to go on from"):
            raise first
        assert all(isinstance(other, PeerLostError) for other in others)
    assert sum("is torn" in event["message"] for event in events(run, "warning")) == 2
    for refused in run.checkpoints.glob("refused-*"):
        shutil.rmtree(refused)
    assert_same(resume(tmp_path), whole)
    assert events(run, "resume") == []


# --- writing --------------------------------------------------------------------------------


def test_training_goes_on_while_a_checkpoint_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = CheckpointStore.write
    going_on = threading.Event()
    patience: list[bool] = []

    def slow_write(store: CheckpointStore, *args: Any) -> Path:
        patience.append(going_on.wait(30))
        return write(store, *args)

    def after_step(job: fa.Job) -> None:
        if job.step == 2:  # the third, after the checkpoint of the second was begun
            going_on.set()

    monkeypatch.setattr(CheckpointStore, "write", slow_write)
    value_of(run_inline(Trainer(1, after_step=after_step), tmp_path, **EVERY_2))
    assert patience == [True, True, True]
    assert CheckpointStore(tmp_path / "job" / "checkpoints").steps() == [2, 4]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    losses = iter([0.5, 0.3, 0.4, 0.6])

    def train(job: fa.Job) -> None:
        model, optimizer = job.prepare(nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.1))
        for _ in job.epochs(4):
            for batch in job.loader(data(), batch_size=BATCH_SIZE):
                job.backward(loss_of(model, batch))
                optimizer.step()
            loss = next(losses)
            job.evaluate(lambda _, loss=loss: {"loss": loss}, data(), name="holdout")

    settings = {
        "checkpoint.every_steps": 1,
        "checkpoint.keep": 2,
        "checkpoint.best": "holdout/loss",
    }
    value_of(run_inline(train, tmp_path, **settings))
    store = CheckpointStore(tmp_path / "job" / "checkpoints")
    assert store.steps() == [8, 15, 16]
    _, _, about = store.read(16)
    assert about["best"] == {"step": 8, "value": 0.3}
    assert about["slots"] == 4
    assert about["numerics"]["threads"] == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of checkpoints of the job in `tmp_path`, on a disk of 300 kB."""
    run, _ = make_run(tmp_path, **EVERY_2)
    run.checkpoints.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(run.checkpoints)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield run.checkpoints
    subprocess.run(["umount", "-l", str(run.checkpoints)], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_told_in_one_line(small_disk: Path, workers: int, tmp_path: Path) -> None:
    train = Trainer(width=2000)  # with momentum, about 100 kB a checkpoint
    ends = run_inline(train, tmp_path, workers=workers, resume=True, **EVERY_2)
    error = ends[0]
    assert isinstance(error, CheckpointError), error
    assert "\n" not in str(error)
    assert "cannot be written (No space left on device); free some space, then go on" in str(error)
    store = CheckpointStore(small_disk)
    written = store.steps()
    assert written
    assert {entry.name for entry in small_disk.iterdir()} == {f"step-{s:010d}" for s in written}
    for step in written:
        store.read(step)
    subprocess.run(["mount", "-o", "remount,size=10m", str(small_disk)], check=True)
    assert resume(tmp_path, train, workers=workers)["count"] == 2 * STEPS_PER_EPOCH
    assert store.steps()[-1] == 2 * STEPS_PER_EPOCH


def write_and_die(store: CheckpointStore, value: int, point: int) -> bool:
    """Write the checkpoint of step 1 in a child that is killed at a point; return whether it was.

    Points are what makes things durable, and what moves or removes them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads
        pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        return os.WIFSIGNALED(status)
    passed = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal passed
            if passed == point:
                os.kill(os.getpid(), signal.SIGKILL)
            passed += 1
            return function(*args, **kwargs)

        return call

    os.fsync, os.rmdir, os.unlink = counted(os.fsync), counted(os.rmdir), counted(os.unlink)
    Path.rename = counted(Path.rename)  # type: ignore[method-assign]
    try:
        store.write(1, {"x": torch.full((4,), value)}, skeleton(), {})
    finally:
        os._exit(0)


def skeleton() -> dict[str, Any]:
    return {"dict": [["x", {"tensor": "x", "dtype": "torch.int64", "shape": [4]}]]}


@pytest.mark.parametrize("before", [False, True], ids=["new", "replaced"])
def test_a_kill_at_any_point_leaves_whole_checkpoints(before: bool, tmp_path: Path) -> None:
    point, killed = 0, True
    while killed:
        store = CheckpointStore(tmp_path / str(point))
        if before:
            store.write(1, {"x": torch.zeros(4, dtype=torch.int64)}, skeleton(), {})
        killed = write_and_die(store, 7, point)
        for step in store.steps():
            store.read(step)
        store.sweep()
        assert [entry.name for entry in store.folder.glob(".*")] == []
        values = [int(store.read(step)[0]["x"][0]) for step in store.steps()]
        # One that was committed is never lost.
        assert values in ([[0], [7]] if before else [[], [7]]), point
        assert killed or values == [7]
        point += 1
    assert point > 5
