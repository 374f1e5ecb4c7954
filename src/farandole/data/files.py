"""Find the files of a data set, in an order that is the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from farandole.data.remote import Resolver, Storage, remote_handler
from farandole.errors import DataError

PathLike = str | Path

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_WILD = "*?["


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file, as it was listed.

    Attributes
    ----------
    version : str
        Time of change in ns, or the store's tag; empty where neither is told.
    partition : mapping of str to str or None
        What its folders give to columns (``month=3``), as it stands there.
    """

    path: str
    size_bytes: int
    version: str
    partition: Mapping[str, str | None]


def find_files(
    paths: PathLike | Sequence[PathLike], *, hive: bool, storage: Storage | None = None
) -> tuple[pafs.FileSystem, list[DataFile]]:
    """Return the file system and all files, sorted by the parts of their paths, each once.

    Folders are walked; what starts with ``.`` or ``_`` in them is left out. A name that does
    not exist may be a pattern (``*``, ``?``, ``[...]``, and ``**`` for any folders).

    Raises
    ------
    DataError
        If a path does not exist, or no file is found.
    """
    storage = storage or Storage()
    given = given_names(paths, storage)
    resolver = Resolver(storage)
    if not given:
        raise DataError(path="[]", problem="no path is given", remedy="name a file or folder")
    found: dict[str, tuple[int, str]] = {}
    filesystem: pafs.FileSystem | None = None
    for name in given:
        try:
            this, path = _resolve(name, resolver)
            if filesystem is not None and not filesystem.equals(this):
                problem = "is not on the same file system as the paths before it"
                raise DataError(path=name, problem=problem, remedy="use one file system")
            filesystem = this
            for info in _expand(this, path, name):
                found[info.path] = (info.size, _version(this, info))
        except (OSError, pa.ArrowException) as error:
            problem, remedy = f"cannot be listed: {error}", "check the address and your rights"
            raise DataError(path=name, problem=problem, remedy=remedy) from error
    assert filesystem is not None
    ordered = sorted(found, key=lambda path: path.split("/"))
    partitions = _partitions(ordered) if hive else [{} for _ in ordered]
    files = [
        DataFile(path, *found[path], partition)
        for path, partition in zip(ordered, partitions, strict=True)
    ]
    return filesystem, files


def given_names(paths: PathLike | Sequence[PathLike], storage: Storage) -> list[str]:
    """Return paths as a list of URLs, paths on a given file system, and absolute paths."""
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    if not storage.is_local:
        return [str(name) for name in listed]
    return [
        name if "://" in name else Path(name).expanduser().absolute().as_posix()
        for name in map(str, listed)
    ]


def _resolve(name: str, resolver: Resolver) -> tuple[pafs.FileSystem, str]:
    if "://" not in name:
        return resolver(name)
    # A pattern is no part of an address: pyarrow takes no brackets, and ``?`` for a query.
    scheme, _, rest = name.partition("://")
    fixed, pattern = _split_pattern(rest)
    if not fixed:
        fixed, pattern = rest, ""
    filesystem, path = resolver(f"{scheme}://{fixed}")
    return filesystem, f"{path.rstrip('/')}/{pattern}" if pattern else path


def _split_pattern(path: str) -> tuple[str, str]:
    """Cut a path before the first part that is a pattern; a query (``?key=``) is none."""
    parts = path.partition("?")[0].split("/") if _has_query(path) else path.split("/")
    wild = [place for place, part in enumerate(parts) if any(char in part for char in _WILD)]
    if not wild:
        return path, ""
    query = path[path.index("?") :] if _has_query(path) else ""
    return "/".join(parts[: wild[0]]) + query, "/".join(parts[wild[0] :])


def _has_query(path: str) -> bool:
    _, mark, query = path.partition("?")
    return bool(mark) and "=" in query and "/" not in query.partition("=")[0]


def _version(filesystem: pafs.FileSystem, info: pafs.FileInfo) -> str:
    if info.mtime_ns is not None:
        return str(info.mtime_ns)
    handler = remote_handler(filesystem)
    return "" if handler is None else handler.version(info.path)


def _expand(filesystem: pafs.FileSystem, path: str, given: str) -> list[pafs.FileInfo]:
    """Return the files of one path."""
    info = filesystem.get_file_info(path)
    if info.type == pafs.FileType.File:
        return [info]
    if info.type == pafs.FileType.Directory:
        files = _walk(filesystem, path)
        problem, remedy = "holds no data file", "write Parquet files into it"
    elif any(char in path for char in _WILD):
        parts = path.split("/")
        fixed = next(i for i, part in enumerate(parts) if any(char in part for char in _WILD))
        base, pattern = "/".join(parts[:fixed]), parts[fixed:]
        files = [
            info
            for info in _walk(filesystem, base, recursive=pattern[0] == "**" or len(pattern) > 1)
            if _matches(info.path.split("/")[fixed:], pattern)
        ]
        problem, remedy = "matches no file", "check the pattern"
    else:
        raise DataError(path=given, problem="does not exist", remedy="check the path")
    if not files:
        raise DataError(path=given, problem=problem, remedy=remedy)
    return files


def _walk(filesystem: pafs.FileSystem, base: str, *, recursive: bool = True) -> list[pafs.FileInfo]:
    selector = pafs.FileSelector(base or "/", recursive=recursive, allow_not_found=True)
    depth = len(base.rstrip("/").split("/"))
    return [
        info
        for info in filesystem.get_file_info(selector)
        if info.type == pafs.FileType.File
        and not any(part.startswith((".", "_")) for part in info.path.split("/")[depth:])
    ]


def _matches(parts: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[skip:], pattern[1:]) for skip in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _partitions(paths: Sequence[str]) -> list[dict[str, str | None]]:
    """Return the values of ``key=value`` folders right above each file."""
    of_folder: dict[str, dict[str, str | None]] = {}
    partitions: list[dict[str, str | None]] = []
    for path in paths:
        folder = path.rpartition("/")[0]
        if folder not in of_folder:
            values = of_folder[folder] = _partition(folder)
            if partitions and values.keys() != partitions[0].keys():
                raise DataError(
                    path=path,
                    problem=f"is partitioned by {sorted(values)}, "
                    f"{paths[0]} by {sorted(partitions[0])}",
                    remedy="use one layout, or partitioning=None",
                )
        partitions.append(of_folder[folder])
    return partitions


def _partition(folder: str) -> dict[str, str | None]:
    values: dict[str, str | None] = {}
    for part in reversed(folder.split("/")):
        key, equals, value = part.partition("=")
        if not equals:
            break
        values[unquote(key)] = None if value == HIVE_NULL else unquote(value)
    return dict(reversed(values.items()))
