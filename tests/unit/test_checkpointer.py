"""When checkpoints are written and which are kept, with a store that only remembers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.checkpoint import checkpointer as checkpointer_module
from farandole.checkpoint.checkpointer import Checkpointer
from farandole.checkpoint.store import CheckpointStore
from farandole.config import CheckpointConfig
from farandole.errors import CheckpointError

FULL = CheckpointError(path="c", problem="cannot be written", remedy="free some space")


class MemoryStore(CheckpointStore):
    """Keeps what it is given; writes when it may."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.held: dict[int, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {}
        self.may_write = threading.Event()
        self.may_write.set()
        self.error: BaseException | None = None

    def steps(self) -> list[int]:
        return sorted(self.held)

    def write(
        self,
        step: int,
        tensors: Any,
        skeleton: Any,
        about: dict[str, Any],
        before_commit: Any = None,
    ) -> Path:
        assert self.may_write.wait(30)
        if self.error is not None:
            raise self.error
        if before_commit is not None:
            before_commit()
        self.held[step] = (dict(tensors), about)
        return self.path(step)

    def remove(self, step: int) -> None:
        del self.held[step]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def make(store: MemoryStore, **options: Any) -> Checkpointer:
    return Checkpointer(store, CheckpointConfig(**options), lambda step, seconds: None)


def save(checkpointer: Checkpointer, *steps: int, best: bool = False) -> None:
    for step in steps:
        checkpointer.save(step, {"w": torch.tensor(float(step))}, {"seed": 1}, best=best)
    checkpointer.wait()


def test_every_steps(store: MemoryStore) -> None:
    checkpointer = make(store, every_steps=3, every_s=None)
    assert [step for step in range(1, 10) if checkpointer.due(step)] == [3, 6, 9]


def test_every_seconds(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(checkpointer_module.time, "monotonic", lambda: now)
    checkpointer = make(store, every_s=10.0)
    assert not checkpointer.due(1)
    now = 110.0
    assert checkpointer.due(2)
    save(checkpointer, 2)
    assert not checkpointer.due(3)
    now = 121.0
    assert checkpointer.due(4)
    # A store that is slower than that does not make training wait.
    store.may_write.clear()
    checkpointer.save(4, {}, {})
    now = 200.0
    assert not checkpointer.due(5)
    store.may_write.set()
    checkpointer.wait()
    assert checkpointer.due(6)


def test_never(store: MemoryStore) -> None:
    checkpointer = make(store, every_s=None)
    assert not any(checkpointer.due(step) for step in range(1, 100))


def test_the_newest_are_kept(store: MemoryStore) -> None:
    save(make(store, keep=2), 1, 2, 3, 4)
    assert store.steps() == [3, 4]


def test_later_ones_that_were_refused_cost_no_good_one(store: MemoryStore) -> None:
    store.held = {step: ({}, {}) for step in (8, 9, 10)}
    save(make(store, keep=2), 3, 4, 5)
    assert store.steps() == [4, 5, 8, 9, 10]


def test_the_best_is_kept_too(store: MemoryStore) -> None:
    checkpointer = make(store, keep=1, best="holdout/loss")
    save(checkpointer, 1, 2)
    save(checkpointer, 3, best=True)
    save(checkpointer, 4, 5)
    assert store.steps() == [3, 5]
    save(checkpointer, 6, best=True)
    save(checkpointer, 7)
    assert store.steps() == [6, 7]


@pytest.mark.parametrize(
    ("mode", "improving"),
    [("min", [True, False, True, False, False]), ("max", [True, True, False, False, False])],
)
def test_what_is_better(mode: Any, improving: list[bool], store: MemoryStore) -> None:
    checkpointer = make(store, best="holdout/loss", mode=mode)
    assert not checkpointer.improves("other/loss", -1e9)
    values = [0.5, 0.7, 0.4, 0.5, float("nan")]
    assert [checkpointer.improves("holdout/loss", value) for value in values] == improving


def test_a_resumed_job_remembers_the_best(store: MemoryStore) -> None:
    before = make(store, keep=1, best="holdout/loss")
    assert before.improves("holdout/loss", 0.3)
    save(before, 5, best=True)
    save(before, 6)
    after = make(store, keep=1, best="holdout/loss")
    after.restore_best(store.held[6][1])
    assert not after.improves("holdout/loss", 0.4)
    save(after, 7)
    assert store.steps() == [5, 7]
    assert after.improves("holdout/loss", 0.2)
    make(store).restore_best({})


def test_state_is_as_it_was_when_it_was_saved(store: MemoryStore) -> None:
    checkpointer = make(store)
    weight = torch.ones(2)
    store.may_write.clear()
    checkpointer.save(1, {"w": weight}, {})
    weight.add_(5)
    store.may_write.set()
    checkpointer.wait()
    (tensor,) = store.held[1][0].values()
    assert torch.equal(tensor, torch.ones(2))


def test_commits_are_told(store: MemoryStore) -> None:
    told: list[int] = []
    checkpointer = Checkpointer(store, CheckpointConfig(), lambda step, seconds: told.append(step))
    save(checkpointer, 1, 2)
    store.error = FULL
    with pytest.raises(CheckpointError):
        save(checkpointer, 3)
    assert told == [1, 2]


def test_what_is_to_precede_a_commit_is_called_by_the_writing_thread(store: MemoryStore) -> None:
    seen: list[tuple[str, list[int]]] = []

    def before_commit() -> None:
        seen.append((threading.current_thread().name, store.steps()))

    checkpointer = Checkpointer(store, CheckpointConfig(), lambda *_: None, before_commit)
    save(checkpointer, 1, 2)
    assert seen == [("checkpoint", []), ("checkpoint", [1])]


@pytest.mark.parametrize("call", ["due", "wait", "save"])
def test_an_error_is_told_once_at_the_next_call(call: str, store: MemoryStore) -> None:
    checkpointer = make(store, every_s=None)
    store.error = FULL
    checkpointer.save(1, {}, {})
    checkpointer._thread.join()  # type: ignore[union-attr]
    calls = {
        "due": lambda: checkpointer.due(2),
        "wait": checkpointer.wait,
        "save": lambda: checkpointer.save(2, {}, {}),
    }
    with pytest.raises(CheckpointError, match="free some space"):
        calls[call]()
    store.error = None
    save(checkpointer, 3)
    assert store.steps() == [3]


def test_closing_waits_and_raises_nothing(store: MemoryStore) -> None:
    checkpointer = make(store)
    store.error = FULL
    checkpointer.save(1, {}, {})
    checkpointer.close()
    checkpointer.close()
    assert not any(thread.name == "checkpoint" for thread in threading.enumerate())
