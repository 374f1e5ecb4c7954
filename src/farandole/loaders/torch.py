"""Batches of tensors for any PyTorch script."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from farandole.data.block import RowBlock
from farandole.data.loader import BatchLoader
from farandole.job.batch import Batch
from farandole.plan.slots import slots_of
from farandole.plan.steps import Steps
from farandole.protocols import Dataset

_CPU = torch.device("cpu")


class TorchLoader(BatchLoader, IterableDataset[Batch]):
    """Gives a `Batch` of tensors for each step; see `BatchLoader` for all else.

    It is an IterableDataset as well, with the state of torchdata's StatefulDataLoader. In a
    ``DataLoader(loader, batch_size=None, num_workers=n)`` the loader workers share the slots:
    each item is then a part of a step, and ``Batch.concatenate`` of `n` items in a row is the
    step's batch. Call `set_epoch` before each epoch, since loader workers only have copies.

    Parameters
    ----------
    dataset, **options
        As for `BatchLoader`.
    batch_size : int
        Rows of a step over all ranks.
    device : str or torch.device, default="cpu"
        Where the tensors go.
    num_workers : int, default=0
        Loader workers that this loader starts by itself; it gives whole batches. Rows are read
        ahead in threads anyway: these processes are for transforms that hold on to the GIL.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        device: str | torch.device = "cpu",
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(dataset, batch_size=batch_size, **options)
        self._device = torch.device(device)
        self._num_workers = num_workers
        # In shared memory, since loader workers that persist must see what set_epoch says.
        self._chosen_epoch = torch.tensor(self.epoch).share_memory_()

    def __getstate__(self) -> dict[str, Any]:
        # A process that is spawned has no process group to ask.
        return {**self.__dict__, "_place": self._place or self._current_place()}

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that iterating reads next, in loader workers too."""
        super().set_epoch(epoch)
        self._chosen_epoch.fill_(epoch)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a place; see `BatchLoader.load_state_dict`."""
        super().load_state_dict(state_dict)
        if get_worker_info() is None:
            self._chosen_epoch.fill_(self.epoch)

    def _next_epoch(self) -> int:
        return self.epoch if get_worker_info() is None else int(self._chosen_epoch)

    def _blocks(self, plan: Steps) -> Iterator[RowBlock]:
        if get_worker_info() is not None:
            # Locks that a thread of the parent held when it forked stay locked: leave them.
            self._dataset = copy.copy(self._dataset)
        return super()._blocks(plan)

    def _slots(self) -> range:
        slots = super()._slots()
        worker = get_worker_info()
        if worker is None:
            return slots
        mine = slots_of(worker.id, worker.num_workers, len(slots))
        return slots[mine.start : mine.stop]

    def _convert(self, block: RowBlock) -> Batch:
        return Batch.from_block(block, _CPU if get_worker_info() else self._device)

    def _batches(self, epoch: int, start_row: int) -> Iterator[Batch]:
        if self._num_workers and get_worker_info() is None:
            return self._whole_batches(epoch, start_row)
        return super()._batches(epoch, start_row)

    def _whole_batches(self, epoch: int, start_row: int) -> Iterator[Batch]:
        """Yield each step's batch, put together from its parts."""
        plan = self._plan(epoch, start_row)
        num_parts = min(self._num_workers, len(self._slots()))
        share = copy.copy(self)
        share._resumes = True
        parts = iter(DataLoader(share, batch_size=None, num_workers=num_parts))
        for step in range(plan.num_steps):
            batch = Batch.concatenate([next(parts) for _ in range(num_parts)])
            self._position, self.step_rows = (epoch, plan.rows_after(step)), plan.step_rows(step)
            yield batch
        self._position = (epoch + 1, 0)
