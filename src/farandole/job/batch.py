"""What the training function gets from a loader: rows as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from farandole.data.columns import concatenate, mapped

if TYPE_CHECKING:
    from farandole.data.block import RowBlock


@dataclass(frozen=True)
class Batch:
    """Rows of one microstep.

    Attributes
    ----------
    features : Tensor of shape (n, F), float32, or None
        The columns named as features, or what the preprocessor made of them.
    categories : Tensor of shape (n, C), int64, or None
        Codes of the preprocessor's categorical columns; 0 is null or unseen.
    label : Tensor of shape (n,), int64 or float32, or None
        The label column.
    columns : dict of str to column
        Every other column: a Tensor of shape (n, ...), or `Masked` or `Ragged` ones; what is no
        number stays as it is in the block, a pyarrow.Array.
    row_ids : Tensor of shape (n,), int64
        Position of each row in the data set: the same for every number of workers and epoch.
    mask : Tensor of shape (n,), bool, or None
        With ``tail="pad"``: False for copies that fill a batch up and must not count. No batch
        is of copies alone.
    source : Tensor of shape (n,), int64, or None
        With `mix` and `balance`: from which data set each row is, as a place in ``mix.names``.
    """

    num_rows: int
    features: torch.Tensor | None
    categories: torch.Tensor | None
    label: torch.Tensor | None
    row_ids: torch.Tensor
    columns: Mapping[str, Any] = field(default_factory=dict)
    mask: torch.Tensor | None = None
    source: torch.Tensor | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.num_rows

    def __getitem__(self, column: str) -> Any:
        """Return a column by name."""
        return self.columns[column]

    @property
    def weight(self) -> torch.Tensor:
        """What each row counts in a mean over the batch: ``(losses * batch.weight).sum()``."""
        if self.mask is None:
            return torch.full((self.num_rows,), 1 / self.num_rows, device=self.row_ids.device)
        return self.mask.float() / self.mask.sum()

    @classmethod
    def from_block(cls, block: RowBlock, device: torch.device) -> Batch:
        """Make tensors of a block's arrays; on the CPU they share its memory."""

        def tensor(array: Any) -> Any:
            if array is None or array.dtype.kind not in "fiub":
                return array
            made = torch.from_numpy(array)
            return made if device.type == "cpu" else made.to(device)

        return cls(
            block.num_rows,
            tensor(block.features),
            tensor(block.categories),
            tensor(block.label),
            tensor(block.row_ids),
            {name: mapped(column, tensor) for name, column in block.columns.items()},
            mask=tensor(block.mask),
            source=tensor(block.source),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Batch]) -> Batch:
        """Return the rows of several batches as one; copies."""

        def join(arrays: list[Any]) -> Any:
            return torch.cat(arrays) if torch.is_tensor(arrays[0]) else np.concatenate(arrays)

        def joined(values: list[Any]) -> Any:
            return None if values[0] is None else concatenate(values, join)

        return cls(
            num_rows=sum(part.num_rows for part in parts),
            features=joined([part.features for part in parts]),
            categories=joined([part.categories for part in parts]),
            label=joined([part.label for part in parts]),
            columns={name: joined([part[name] for part in parts]) for name in parts[0].columns},
            row_ids=joined([part.row_ids for part in parts]),
            mask=joined([part.mask for part in parts]),
            source=joined([part.source for part in parts]),
        )

    def slice(self, start: int, stop: int) -> Batch:
        """Return rows ``[start, stop)``, sharing memory."""

        def cut(value: Any) -> Any:
            return None if value is None else value[start:stop]

        return Batch(
            num_rows=stop - start,
            features=cut(self.features),
            categories=cut(self.categories),
            label=cut(self.label),
            columns={name: cut(value) for name, value in self.columns.items()},
            row_ids=self.row_ids[start:stop],
            mask=cut(self.mask),
            source=cut(self.source),
        )
