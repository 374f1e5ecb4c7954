"""The row groups of a data set, or what a filter leaves of them, as Arrow batches."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing

import numpy as np
import pyarrow as pa

from farandole.data.block import RowBlock
from farandole.data.budget import batch_rows
from farandole.data.counting import label_nulls
from farandole.data.groups import GroupReader
from farandole.data.layout import Layout
from farandole.data.selection import Shard
from farandole.errors import DataError


class ShardSource:
    """The shards of a data set, decoded from a given row on."""

    def __init__(self, reader: GroupReader, shards: Sequence[Shard], layout: Layout) -> None:
        self.shards = shards
        self.layout = layout
        self.starts = np.concatenate(([0], np.cumsum([shard.num_rows for shard in shards])))
        self._reader = reader

    def batches(
        self, index: int, start: int, stop: int, names: Sequence[str] | None = None
    ) -> Generator[pa.RecordBatch]:
        """Yield the selected rows of a shard from `start` to before `stop`, in batches.

        The file is closed before the last batch is yielded.

        Parameters
        ----------
        index : int
            Of the shard.
        start, stop : int
            First row, and the row to stop before.
        names : sequence of str, optional
            Columns; default: all that the layout needs, with the label checked for nulls.

        Raises
        ------
        DataError
            If the row group cannot be decoded or is shorter than its footer says, or a label
            is null.
        """
        shard = self.shards[index]
        label = self.layout.label if names is None else None
        names = self.layout.names if names is None else names
        kept = None
        if shard.kept is not None:
            kept = np.unpackbits(shard.kept).view(np.bool_)
        decoded = self._reader.batches(
            shard.file, shard.group, names, self._batch_rows(shard, names)
        )
        place = row = 0
        with closing(decoded):
            for batch in decoded:
                if kept is not None:
                    keep, place = kept[place : place + batch.num_rows], place + batch.num_rows
                    batch = batch.filter(pa.array(keep))
                first, row = row, row + batch.num_rows
                if row <= start:
                    continue
                batch = batch.slice(max(start - first, 0), min(stop, row) - max(start, first))
                if label is not None and (nulls := batch.column(label).null_count):
                    raise label_nulls(self._reader, shard.file, label, nulls)
                if row >= stop:
                    decoded.close()
                yield batch
        if row < stop:
            raise DataError(
                path=self._reader.files[shard.file].path,
                problem=f"row group {shard.group} has fewer rows than its footer says",
                remedy="do not change files while they are read",
            )

    def expect(self, index: int) -> None:
        """Begin to read a shard that `batches` will be called for. Does not block."""
        shard = self.shards[index]
        self._reader.expect(shard.file, shard.group, self.layout.names)

    def write(self, index: int, batch: pa.RecordBatch, out: RowBlock, at: int) -> None:
        """Write a batch of a shard into a block."""
        shard = self.shards[index]
        with self._reader.reading(shard.file, shard.group):
            self.layout.write(batch, out, at)

    def _batch_rows(self, shard: Shard, names: Sequence[str]) -> int:
        num_rows = self._reader.num_rows(shard.file, shard.group)
        return batch_rows(self._reader.row_bytes(shard.file, shard.group, names), num_rows)
