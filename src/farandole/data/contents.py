"""Which rows a data set of Parquet files has, and where they come from."""

from __future__ import annotations

import hashlib
import json
import posixpath
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from farandole.data.groups import GroupReader
from farandole.data.layout import Layout
from farandole.data.selection import Shard
from farandole.data.shards import ShardSource
from farandole.data.splits import Part, narrowed
from farandole.data.streams import ShardCache
from farandole.errors import DamagedFileError


@dataclass(frozen=True)
class Contents:
    """What the footers, and a pass over the filters' columns, have told."""

    reader: GroupReader
    shards: list[Shard]
    layout: Layout
    source: ShardSource
    cache: ShardCache
    filters: str
    skipped: tuple[DamagedFileError, ...]

    @cached_property
    def group_rows(self) -> NDArray[np.int64]:
        """Rows of the row group of each shard, selected or not."""
        return self.reader.footers.group_rows[self._groups]

    @cached_property
    def group_bytes(self) -> NDArray[np.float64]:
        """Size of the row group of each shard, with all columns, once decoded."""
        return self.reader.group_bytes()[self._groups]

    @cached_property
    def row_bytes(self) -> float:
        """Mean size of a row with all columns."""
        return float(self.group_bytes.sum() / max(self.group_rows.sum(), 1))

    @cached_property
    def _groups(self) -> NDArray[np.int64]:
        number = self.reader.group_number
        return np.array([number(shard.file, shard.group) for shard in self.shards], np.int64)

    def of_part(self, part: Part, cache_bytes: int) -> Contents:
        """Return the index of a part of the rows. Blocks at the first one of a partition."""
        shards = narrowed(self.shards, part.kept())
        source = ShardSource(self.reader, shards, self.layout)
        return replace(
            self,
            shards=shards,
            source=source,
            cache=ShardCache(source, cache_bytes),
            filters=f"{self.filters} {part.says}",
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of all that decides which rows there are."""
        files = self.reader.files
        base = posixpath.commonpath([posixpath.dirname(file.path) for file in files])
        digests = self.reader.footers.table["digest"].to_pylist()
        content = {
            "files": [
                [file.path[len(base) :], file.size_bytes, digest.hex(), dict(file.partition)]
                for file, digest in zip(files, digests, strict=True)
            ],
            "shards": [[shard.file, shard.group, shard.num_rows] for shard in self.shards],
            "schema": [[name, str(kind)] for name, kind in self.reader.types.items()],
            "filters": self.filters,
        }
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()
