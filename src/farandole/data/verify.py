"""Decode everything once, and remember what cannot be decoded, so that plans leave it out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from farandole.data.groups import GroupReader
from farandole.data.progress import Progress, no_progress
from farandole.errors import DamagedFileError

Damage = tuple[str, bytes, int, str, str]
"""Path, what tells the file from one written anew, row group, column, problem."""

_TABLE = pa.schema(
    [
        ("path", pa.string()),
        ("identity", pa.binary()),
        ("group", pa.int32()),
        ("column", pa.string()),
        ("problem", pa.string()),
    ]
)


@dataclass(frozen=True)
class VerifyReport:
    """What a pass over all pages of the columns that are used has found.

    Attributes
    ----------
    num_files, num_groups : int
        How many were looked at.
    damaged : tuple of DamagedFileError
        Files without a usable footer, then row groups by column.
    """

    num_files: int
    num_groups: int
    damaged: tuple[DamagedFileError, ...]

    def __str__(self) -> str:
        head = f"{self.num_files} files, {self.num_groups} row groups: "
        if not self.damaged:
            return head + "all can be decoded"
        return head + "\n  ".join([f"{len(self.damaged)} damaged", *map(str, self.damaged)])


def find_damage(
    reader: GroupReader, names: Sequence[str], threads: int, progress: Progress = no_progress
) -> list[Damage]:
    """Decode all row groups of some columns; record in the reader's cache what fails. Blocks.

    Raises
    ------
    DataError
        If a file cannot be read or has changed, or a value does not fit its column's type.
    """
    places = [
        (file, group)
        for file in range(len(reader.files))
        for group in range(len(reader.footers.rows(file)))
    ]

    def look(place: tuple[int, int]) -> list[Damage]:
        file, group = place
        try:
            for _ in reader.batches(file, group, names):
                pass
        except DamagedFileError as error:
            held = reader.columns_of(file)
            present = [name for name in names if name in held]
            found = reader.damaged_columns(file, group, present)
            path, identity = error.path, _identity(reader, file)
            return [(path, identity, group, column, problem) for column, problem in found] or [
                (path, identity, group, error.column or "", error.problem)
            ]
        return []

    with ThreadPoolExecutor(threads) as pool:
        found: list[Damage] = []
        for done, some in enumerate(pool.map(look, places), 1):
            found += some
            progress("decoding row groups", done, len(places))
    if found:
        every = sorted({*_load(reader), *found})
        rows = [dict(zip(_TABLE.names, damage, strict=True)) for damage in every]
        cache = reader.cache
        cache.tables.store(cache.name("damage"), pa.Table.from_pylist(rows, _TABLE))
    return found


def known_damage(
    reader: GroupReader, names: Sequence[str], found: Sequence[Damage] = ()
) -> dict[tuple[int, int], DamagedFileError]:
    """Return (file, row group) in which one of some columns is known to be damaged.

    Parameters
    ----------
    found : sequence of Damage
        Found in this process, where there is no cache.
    """
    every = {*_load(reader), *found}
    if not every:
        return {}
    numbers = {
        (entry.path, _identity(reader, file)): file for file, entry in enumerate(reader.files)
    }
    damaged: dict[tuple[int, int], DamagedFileError] = {}
    for damage in sorted(every):
        path, identity, group, column, _ = damage
        file = numbers.get((path, identity))
        used = not column or any(_overlap(name, column) for name in names)
        if file is not None and used:
            damaged.setdefault((file, group), damage_error(damage))
    return damaged


def _overlap(one: str, other: str) -> bool:
    """Return whether two dotted names are of one column, or of a column and a field of it."""
    short, long = sorted((f"{one}.", f"{other}."), key=len)
    return long.startswith(short)


def damage_error(damage: Damage) -> DamagedFileError:
    """Return the error for a row group that was found to be damaged."""
    path, _, group, column, problem = damage
    return DamagedFileError(
        path=path,
        row_group=group,
        column=column or None,
        problem=f"cannot be read: {problem}",
        remedy="write the file anew, or pass on_bad='skip' to leave the row group out",
    )


def _identity(reader: GroupReader, file: int) -> bytes:
    # A file that is mended by writing it anew may have the very same footer.
    return reader.files[file].version.encode() + reader.footers.digest(file)


def _load(reader: GroupReader) -> list[Damage]:
    table = reader.cache.tables.load(reader.cache.name("damage"))
    if table is None or table.schema != _TABLE:
        return []
    return [tuple(row.values()) for row in table.to_pylist()]
