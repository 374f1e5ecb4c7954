"""The Parquet files of one version of a table that other tools keep."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from farandole.data.parquet import ParquetDataset


class SnapshotDataset(ParquetDataset):
    """One version of a Delta or Iceberg table; later commits do not show.

    Made by `from_delta` and `from_iceberg`; in all else a `ParquetDataset`.

    Parameters
    ----------
    paths : sequence of str
        The version's files.
    snapshot : str
        Names table and version; part of the fingerprint.
    types : pyarrow.Schema
        The table's columns. Their types are kept where they are not nested; without
        ``columns=``, ``features=`` and ``preprocess=`` these columns are given, and no others.
    **options
        As for `ParquetDataset`.
    """

    def __init__(
        self, paths: Sequence[str], *, snapshot: str, types: pa.Schema, **options: Any
    ) -> None:
        if not {"columns", "features", "preprocess"} & options.keys():
            options["columns"] = [name for name in types.names if name != options.get("label")]
        plain = [field for field in types if not pa.types.is_nested(field.type)]
        super().__init__(paths, **{"schema": pa.schema(plain), **options})
        self.snapshot = snapshot

    def __repr__(self) -> str:
        return f"SnapshotDataset({self.snapshot!r})"

    @property
    def fingerprint(self) -> str:
        """Hex digest over the table's version and all that a `ParquetDataset`'s is over."""
        content = f"{self.snapshot}\n{super().fingerprint}"
        return hashlib.sha256(content.encode()).hexdigest()
