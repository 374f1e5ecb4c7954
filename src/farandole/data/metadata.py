"""Metadata of files that were opened lately, within a limit."""

from __future__ import annotations

import threading
from collections import OrderedDict

import pyarrow.parquet as pq

MAX_BYTES = 16 << 20
"""Serialized size of the metadata that is kept; in memory it is a few times as large."""


class KeptMetadata:
    """Metadata of the files that were opened last. Safe from many threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, pq.FileMetaData] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, file: int) -> pq.FileMetaData | None:
        """Return a file's metadata if it is kept."""
        with self._lock:
            if file in self._kept:
                self._kept.move_to_end(file)
            return self._kept.get(file)

    def put(self, file: int, metadata: pq.FileMetaData) -> None:
        """Keep a file's metadata, instead of what was not asked for longest."""
        with self._lock:
            if self._kept.setdefault(file, metadata) is metadata:
                self._bytes += metadata.serialized_size
            while self._bytes > MAX_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].serialized_size
