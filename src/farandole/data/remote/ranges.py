"""Which bytes are asked for at once, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow.parquet as pq

BLOCK_BYTES = 256 << 10
"""Requests begin and end at multiples of this: so pieces that are closer are asked for at once,
and what is kept on disk fits whoever asks, whichever columns."""
REQUEST_BYTES = 8 << 20
"""The largest request: long enough to hide latency, short enough for many to overlap."""

ByteRange = tuple[int, int]
"""First byte, and the byte to stop before."""


@dataclass(frozen=True)
class Run:
    """Consecutive blocks of a file, asked for by one request."""

    first: int
    stop: int
    wanted_bytes: int
    """Bytes that will be read from it."""

    @property
    def num_bytes(self) -> int:
        """Size, if the file does not end within it."""
        return (self.stop - self.first) * BLOCK_BYTES


@dataclass(frozen=True)
class Ranges:
    """Byte ranges of a file that are each read from front to back, all at about the same pace."""

    ranges: tuple[ByteRange, ...]

    @cached_property
    def _blocks(self) -> dict[int, tuple[float, int]]:
        """Return each block's place in its range, from 0 to 1, and the bytes wanted of it."""
        blocks: dict[int, tuple[float, int]] = {}
        for start, stop in self.ranges:
            for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
                first = max(start, block * BLOCK_BYTES)
                wanted = min(stop, (block + 1) * BLOCK_BYTES) - first
                place, others = blocks.get(block, (1.0, 0))
                blocks[block] = min(place, (first - start) / (stop - start)), others + wanted
        return blocks

    def runs(self, ahead_bytes: int) -> list[Run]:
        """Return what to ask for, in the order in which it will be needed.

        Parameters
        ----------
        ahead_bytes : int
            How much is read ahead. All ranges advance together, so each gets its share of it.
        """
        share = ahead_bytes // max(2 * len(self.ranges), 1)
        whole = len(self._blocks) * BLOCK_BYTES <= ahead_bytes
        most = max((REQUEST_BYTES if whole else min(share, REQUEST_BYTES)) // BLOCK_BYTES, 1)
        groups: list[list[int]] = []
        for block in sorted(self._blocks):
            if groups and block == groups[-1][-1] + 1 and len(groups[-1]) < most:
                groups[-1].append(block)
            else:
                groups.append([block])
        groups.sort(key=lambda blocks: min(self._blocks[block][0] for block in blocks))
        return [
            Run(blocks[0], blocks[-1] + 1, sum(self._blocks[block][1] for block in blocks))
            for blocks in groups
        ]


def column_ranges(metadata: pq.FileMetaData, group: int, leaves: Sequence[int]) -> Ranges:
    """Return the bytes of some stored columns, by their places, in a row group."""
    stored = metadata.row_group(group)
    ranges: list[ByteRange] = []
    for leaf in leaves:
        column = stored.column(leaf)
        start = column.data_page_offset
        if column.has_dictionary_page:
            start = min(start, column.dictionary_page_offset or start)
        if column.total_compressed_size > 0:
            ranges.append((start, start + column.total_compressed_size))
    return Ranges(tuple(ranges))
