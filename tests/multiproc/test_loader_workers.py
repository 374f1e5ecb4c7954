"""Loops outside a job in real processes: PyTorch's loader workers, and its process groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

from farandole.data import ArrayDataset
from farandole.data.loader import BatchLoader


def rows() -> ArrayDataset:
    return ArrayDataset(np.arange(2000.0).reshape(1000, 2), rows_per_shard=77)


def make_loader(**options: Any) -> Any:
    return rows().loader(batch_size=96, seed=3, **options)


def ids(batches: Iterable[Any]) -> list[list[int]]:
    return [batch.row_ids.tolist() for batch in batches]


def joined(parts: list[list[int]], size: int) -> list[list[int]]:
    return [
        list(itertools.chain(*parts[start : start + size])) for start in range(0, len(parts), size)
    ]


@pytest.mark.parametrize(("num_workers", "context"), [(1, "fork"), (2, "forkserver")])
def test_loader_workers_share_the_slots(num_workers: int, context: str) -> None:
    loader = make_loader(rank=1, world_size=2)
    expected = ids(loader)
    loader.set_epoch(0)
    parts = DataLoader(
        loader, batch_size=None, num_workers=num_workers, multiprocessing_context=context
    )
    assert joined(ids(parts), num_workers) == expected


def test_persistent_loader_workers_follow_set_epoch() -> None:
    loader = make_loader()
    parts = DataLoader(loader, batch_size=None, num_workers=2, persistent_workers=True)
    for epoch in (0, 3, 1):
        loader.set_epoch(epoch)
        expected = ids(make_loader(epoch=epoch))
        assert joined(ids(parts), 2) == expected


def test_loader_workers_of_its_own_give_whole_batches() -> None:
    expected = make_loader()
    loader = make_loader(num_workers=2)
    assert ids(loader) == ids(expected)
    steps, alone = iter(loader), iter(expected)
    for _ in range(3):
        assert next(steps).row_ids.tolist() == next(alone).row_ids.tolist()
        assert loader.step_rows == 96
    state = loader.state_dict()
    assert state == expected.state_dict()
    del steps
    loader.load_state_dict(state)
    expected.load_state_dict(state)
    assert ids(loader) == ids(expected)


def read_in_group(rank: int, world_size: int, folder: str) -> None:
    loader = make_loader(as_="numpy")
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        assert isinstance(loader, BatchLoader)
        np.save(f"{folder}/{rank}.npy", np.concatenate([block.row_ids for block in loader]))
    finally:
        dist.destroy_process_group()


def test_rank_and_world_size_are_those_of_the_process_group(tmp_path: Path) -> None:
    mp.start_processes(read_in_group, (2, str(tmp_path)), nprocs=2, start_method="spawn")
    for rank in range(2):
        expected = itertools.chain(*ids(make_loader(rank=rank, world_size=2)))
        assert np.load(tmp_path / f"{rank}.npy").tolist() == list(expected)
