from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.checkpoint import store as store_module
from farandole.checkpoint.checkpointer import newest_usable
from farandole.checkpoint.store import CheckpointStore
from farandole.checkpoint.tree import flatten, unflatten
from farandole.errors import CheckpointError


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def write(store: CheckpointStore, step: int, value: float = 1.0) -> Path:
    tensors, skeleton = flatten({"w": torch.full((3, 2), value), "n": [step, None, "text"]})
    return store.write(step, tensors, skeleton, {"seed": 5})


def read(store: CheckpointStore, step: int) -> tuple[Any, dict[str, Any]]:
    tensors, skeleton, about = store.read(step)
    return unflatten(tensors, skeleton), about


def test_what_is_written_is_read(store: CheckpointStore) -> None:
    assert store.steps() == []
    path = write(store, 12)
    assert path == store.path(12)
    assert store.steps() == [12]
    state, about = read(store, 12)
    assert torch.equal(state["w"], torch.ones(3, 2))
    assert state["n"] == [12, None, "text"]
    assert about == {"seed": 5}
    assert [entry.name for entry in store.folder.iterdir()] == ["step-0000000012"]


def test_all_dtypes_and_an_empty_tensor(store: CheckpointStore) -> None:
    made = {
        str(dtype): torch.arange(4).to(dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool)
    }
    made["empty"] = torch.empty(0, 3)
    made["scalar"] = torch.tensor(2.5)
    tensors, skeleton = flatten(made)
    store.write(1, tensors, skeleton, {})
    state, _ = read(store, 1)
    for name, tensor in made.items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name], tensor)


def test_state_without_tensors(store: CheckpointStore) -> None:
    tensors, skeleton = flatten({"step": 3})
    store.write(3, tensors, skeleton, {})
    assert read(store, 3) == ({"step": 3}, {})


def test_the_same_step_is_replaced(store: CheckpointStore) -> None:
    write(store, 3, 1.0)
    write(store, 3, 2.0)
    state, _ = read(store, 3)
    assert torch.equal(state["w"], torch.full((3, 2), 2.0))
    assert [entry.name for entry in store.folder.iterdir()] == ["step-0000000003"]


def test_only_committed_ones_are_listed_in_order(store: CheckpointStore) -> None:
    for step in (30, 4, 100):
        write(store, step)
    for name in (".step-0000000200.1.tmp", "step-5", "notes", "step-0000000005x"):
        (store.folder / name).mkdir()
    assert store.steps() == [4, 30, 100]


def test_sweeping_removes_what_was_left_and_nothing_else(store: CheckpointStore) -> None:
    write(store, 1)
    for name in (".step-0000000002.7.tmp", ".step-0000000003.7.old", "notes"):
        (store.folder / name).mkdir()
        (store.folder / name / "file").write_text("x")
    store.sweep()
    assert sorted(entry.name for entry in store.folder.iterdir()) == ["notes", "step-0000000001"]
    CheckpointStore(store.folder / "nowhere").sweep()


def test_sweeping_brings_back_what_was_to_be_replaced(store: CheckpointStore) -> None:
    write(store, 1, 1.0)
    write(store, 2, 2.0)
    for step in (1, 2):
        store.path(step).rename(store.folder / f".step-{step:010d}.7.replaced")
    write(store, 2, 3.0)
    store.sweep()
    assert store.steps() == [1, 2]
    assert [float(read(store, step)[0]["w"][0, 0]) for step in (1, 2)] == [1.0, 3.0]
    assert list(store.folder.glob(".*")) == []


def test_removing(store: CheckpointStore) -> None:
    write(store, 1)
    store.remove(1)
    store.remove(2)
    assert list(store.folder.iterdir()) == []


def test_a_missing_one_is_told(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match=r"step-0000000007: has no manifest"):
        store.read(7)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(store: CheckpointStore) -> None:
    store.folder.mkdir()
    store.folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(CheckpointError, match=r"Permission denied.*make the folder writable"):
        write(store, 1)


def test_a_folder_that_is_none(store: CheckpointStore) -> None:
    store.folder.write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot be written \(File exists\)"):
        write(store, 1)


@pytest.mark.parametrize("name", ["_save", "_write_synced", "_replace_folder"])
def test_an_error_at_any_stage_leaves_what_was(
    name: str, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, 1, 1.0)

    def fail(*args: Any) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(store_module, name, fail)
        for step in (1, 2):
            with pytest.raises(CheckpointError, match=r"No space left .*free some space, then"):
                write(store, step, 2.0)
    assert [entry.name for entry in store.folder.iterdir()] == ["step-0000000001"]
    assert float(read(store, 1)[0]["w"][0, 0]) == 1.0


def test_nothing_is_committed_before_what_is_to_precede_it(store: CheckpointStore) -> None:
    def fail() -> None:
        assert store.steps() == []
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match="free some space"):
        store.write(1, {}, {}, {}, fail)
    assert list(store.folder.iterdir()) == []


def test_the_newest_usable_one(store: CheckpointStore) -> None:
    refused: list[CheckpointError] = []
    assert newest_usable(store, refused.append) is None
    for step in (1, 2, 3):
        write(store, step, step)
    (store.path(3) / "manifest.json").unlink()
    (store.path(2) / "manifest.json").write_text("{")
    found = newest_usable(store, refused.append)
    assert found is not None
    assert found[0] == 1
    assert [error.path for error in refused] == [str(store.path(3)), str(store.path(2))]
    assert found[3] == {"seed": 5}


def test_refused_ones_are_kept_under_another_name(store: CheckpointStore) -> None:
    write(store, 1)
    for attempt in ("refused-step-0000000002", "refused-step-0000000002.2"):
        (write(store, 2) / "manifest.json").unlink()
        assert newest_usable(store, lambda error: None) is not None
        assert store.steps() == [1]
        assert (store.folder / attempt).is_dir()
