"""The footers of all files: from the cache where files are as they were, else from the files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from farandole.data.cache import TableCache
from farandole.data.files import DataFile
from farandole.data.footers import (
    TABLE,
    Footer,
    Footers,
    SchemaPool,
    as_numpy,
    damaged_footer,
    make_table,
    read_footer,
)
from farandole.errors import DamagedFileError
from farandole.topology import user_cache_dir

_THREADS = 16
_TASKS_AHEAD = 4 * _THREADS
_MAKING_TIMEOUT_S = 600.0


class IndexCache:
    """What is kept of one choice of paths: footers, counts of filters, damaged row groups.

    Parameters
    ----------
    folder : str or Path or None
        "auto" is the folder for this user's caches; None keeps nothing.
    names : sequence of str
        Absolute paths or URLs, as given.
    """

    def __init__(self, folder: str | Path | None, names: Sequence[str]) -> None:
        if folder == "auto":
            home = user_cache_dir()
            folder = None if home is None else home / "index"
        self.tables = TableCache(None if folder is None else Path(folder))
        self._key = _hash(*names)
        self._used: set[str] = set()

    def name(self, kind: str, *details: str) -> str:
        """Return the name under which a table is kept."""
        name = f"{self._key}-{kind}" + (f"-{_hash(*details)}" if details else "")
        self._used.add(name)
        return name

    def forget(self) -> None:
        """Remove what has turned out to be wrong."""
        for name in self._used:
            self.tables.drop(name)


def load_footers(
    filesystem: pafs.FileSystem,
    files: Sequence[DataFile],
    *,
    wanted: Collection[str] | None,
    cache: IndexCache,
    on_bad: Literal["error", "skip"],
) -> tuple[list[DataFile], Footers, list[DamagedFileError]]:
    """Return the files that can be used, what their footers say, and what is wrong with others.

    Parameters
    ----------
    wanted : collection of str, optional
        Columns whose nulls are counted; default: all.

    Raises
    ------
    DataError
        If a file cannot be read.
    DamagedFileError
        If a file is no Parquet, unless those are skipped, or if all of them are.
    """
    name = cache.name("footers")
    kept = _kept(cache.tables.load(name))
    if not _serves(kept, files, wanted):
        with cache.tables.making(name, _MAKING_TIMEOUT_S):
            kept = _kept(cache.tables.load(name))  # another may have made it by now
            if not _serves(kept, files, wanted):
                kept = _update(filesystem, files, kept, wanted)
                cache.tables.store(name, _pack(kept))
    assert kept is not None
    return _without_bad(list(files), kept, on_bad)


def _kept(table: pa.Table | None) -> Footers | None:
    """Return the footers that a cached table holds."""
    if table is None or table.schema.remove_metadata() != TABLE:
        return None
    about = table.schema.metadata or {}
    try:
        counted = json.loads(about[b"counted"])
        schemas = [
            pa.ipc.read_schema(pa.py_buffer(about[b"schema %d" % number]))
            for number in range(int(about[b"num_schemas"]))
        ]
        columns = json.loads(about[b"columns"])
    except (KeyError, ValueError, OSError):  # of another version of pyarrow
        return None
    table = table.replace_schema_metadata(None)
    return Footers(table, schemas, columns, None if counted is None else frozenset(counted))


def _serves(
    kept: Footers | None, files: Sequence[DataFile], wanted: Collection[str] | None
) -> bool:
    """Return whether footers are those of these files, and tell the nulls that are wanted."""
    if kept is None or kept.table.num_rows != len(files) or not _tells(kept, wanted):
        return False
    return len(_unchanged(kept, files)) == len(files)


def _tells(kept: Footers, wanted: Collection[str] | None) -> bool:
    return kept.counted is None or (wanted is not None and kept.counted.issuperset(wanted))


def _pack(footers: Footers) -> pa.Table:
    """Return the footers as a table from which `_kept` makes them again."""
    counted = None if footers.counted is None else sorted(footers.counted)
    about = {
        b"counted": json.dumps(counted).encode(),
        b"columns": json.dumps(list(footers.columns)).encode(),
        b"num_schemas": b"%d" % len(footers.schemas),
    }
    for number, schema in enumerate(footers.schemas):
        about[b"schema %d" % number] = schema.serialize().to_pybytes()
    return footers.table.replace_schema_metadata(about)


def _unchanged(kept: Footers, files: Sequence[DataFile]) -> dict[str, int]:
    """Return the row of each file that is as it was; one without a version never is."""
    columns = (kept.table[name].to_pylist() for name in ("path", "size", "version"))
    rows = {known: row for row, known in enumerate(zip(*columns, strict=True))}
    return {
        file.path: rows[known]
        for file in files
        if file.version and (known := (file.path, file.size_bytes, file.version)) in rows
    }


def _update(
    filesystem: pafs.FileSystem,
    files: Sequence[DataFile],
    kept: Footers | None,
    wanted: Collection[str] | None,
) -> Footers:
    """Read the footers of files that are new or have changed."""
    counted = None if wanted is None else frozenset(wanted)
    if kept is not None and not _tells(kept, wanted):
        # Count what was counted, too, lest two users of the files undo each other's work.
        counted = None if counted is None else counted | (kept.counted or frozenset())
        kept = None
    rows: dict[str, int] = {}
    parts = [TABLE.empty_table()]
    if kept is None:
        pool = SchemaPool(counted)
    else:
        counted = kept.counted
        pool = SchemaPool(counted, kept.schemas, kept.columns)
        rows = _unchanged(kept, files)
        parts.append(kept.table)
    missing = [file for file in files if file.path not in rows]
    first_new = sum(part.num_rows for part in parts)
    rows |= {file.path: first_new + place for place, file in enumerate(missing)}
    parts.append(make_table(missing, list(_read(filesystem, missing, pool))))
    table = pa.concat_tables(parts).take(pa.array([rows[file.path] for file in files]))
    # Threads number schemas as they come; what follows must not depend on that.
    numbers, first = np.unique(as_numpy(table["schema"].drop_null()), return_index=True)
    numbers = numbers[np.argsort(first)]
    options = pc.SetLookupOptions(pa.array(numbers, pa.int32()))
    renumbered = pc.call_function("index_in", [table["schema"]], options)
    place = table.schema.get_field_index("schema")
    table = table.set_column(place, table.schema.field(place), renumbered).combine_chunks()
    schemas = [pool.schemas[number] for number in numbers.tolist()]
    return Footers(table, schemas, pool.columns, counted)


def _read(
    filesystem: pafs.FileSystem, files: Sequence[DataFile], pool: SchemaPool
) -> Iterator[Footer | DamagedFileError]:
    """Yield footers in the order of the files, a bounded number at a time."""
    if len(files) == 1:
        yield read_footer(filesystem, files[0], pool)
        return
    stop = threading.Event()

    def read(some: Sequence[DataFile]) -> list[Footer | DamagedFileError]:
        return [] if stop.is_set() else [read_footer(filesystem, file, pool) for file in some]

    with ThreadPoolExecutor(_THREADS) as threads:
        try:
            for some in threads.map(read, _chunks(files)):
                yield from some
        finally:
            stop.set()  # of the others nobody waits for, if one cannot be read


def _chunks(files: Sequence[DataFile]) -> list[Sequence[DataFile]]:
    size = max(1, min(64, len(files) // _TASKS_AHEAD))
    return [files[start : start + size] for start in range(0, len(files), size)]


def _without_bad(
    files: list[DataFile], footers: Footers, on_bad: Literal["error", "skip"]
) -> tuple[list[DataFile], Footers, list[DamagedFileError]]:
    problems = footers.table["problem"]
    if problems.null_count == len(files):
        return files, footers, []
    bad = [
        damaged_footer(file.path, problem.as_py())
        for file, problem in zip(files, problems, strict=True)
        if problem.is_valid
    ]
    if on_bad == "error" or len(bad) == len(files):
        raise bad[0]
    left_out = {error.path for error in bad}
    good = footers.table.filter(problems.is_null()).combine_chunks()
    files = [file for file in files if file.path not in left_out]
    return files, Footers(good, footers.schemas, footers.columns, footers.counted), bad


def _hash(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
