"""Find the files of a data set, in an order that is the same on every machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from farandole.errors import DataError, MissingExtraError

PathLike = str | Path
PartitionValue = int | str | None

_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?\d{1,18}")


@dataclass(frozen=True)
class DataFile:
    """A file, with the values that its folders give to columns (``month=3``)."""

    path: str
    size_bytes: int
    partition: Mapping[str, PartitionValue]


def find_files(
    paths: PathLike | Sequence[PathLike], *, hive: bool
) -> tuple[pafs.FileSystem, list[DataFile]]:
    """Return the file system and all files, sorted by the parts of their paths.

    Folders are walked; what starts with ``.`` or ``_`` in them is left out. A name that does
    not exist may be a pattern (``*``, ``?``, ``[...]``, and ``**`` for any folders).

    Raises
    ------
    DataError
        If a path does not exist, or no file is found.
    """
    given = [str(paths)] if isinstance(paths, str | Path) else [str(path) for path in paths]
    if not given:
        raise DataError(path="[]", problem="no path is given", remedy="name a file or folder")
    found: dict[str, int] = {}
    filesystem: pafs.FileSystem | None = None
    for name in given:
        this, path = _resolve(name)
        if filesystem is not None and not filesystem.equals(this):
            problem = "is not on the same file system as the paths before it"
            raise DataError(path=name, problem=problem, remedy="use one file system")
        filesystem = this
        try:
            found.update(_expand(this, path, name))
        except (OSError, pa.ArrowException) as error:
            problem, remedy = f"cannot be listed: {error}", "check the address and your rights"
            raise DataError(path=name, problem=problem, remedy=remedy) from error
    assert filesystem is not None
    ordered = sorted(found, key=lambda path: path.split("/"))
    partitions = _partitions(ordered) if hive else [{} for _ in ordered]
    files = [
        DataFile(path, found[path], partition)
        for path, partition in zip(ordered, partitions, strict=True)
    ]
    return filesystem, files


def _resolve(name: str) -> tuple[pafs.FileSystem, str]:
    if "://" not in name:
        return pafs.LocalFileSystem(), Path(name).expanduser().absolute().as_posix()
    try:
        return pafs.FileSystem.from_uri(name)
    except pa.ArrowInvalid:
        pass  # a scheme that pyarrow does not know: fsspec may
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        scheme = name.partition("://")[0]
        raise MissingExtraError(
            extra="fsspec", package="fsspec", purpose=f"reading {scheme}://"
        ) from None
    try:
        handler, path = url_to_fs(name)
    except (ImportError, ValueError) as error:
        raise DataError(path=name, problem=str(error), remedy="check the URL") from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(handler)), path


def _expand(filesystem: pafs.FileSystem, path: str, given: str) -> dict[str, int]:
    """Return the files of one path, with their sizes."""
    info = filesystem.get_file_info(path)
    if info.type == pafs.FileType.File:
        return {info.path: info.size}
    if info.type == pafs.FileType.Directory:
        files = _walk(filesystem, path)
        problem, remedy = "holds no data file", "write Parquet files into it"
    elif any(char in path for char in "*?["):
        parts = path.split("/")
        fixed = next(i for i, part in enumerate(parts) if any(char in part for char in "*?["))
        base = "/".join(parts[:fixed])
        files = {
            file: size
            for file, size in _walk(filesystem, base).items()
            if _matches(file.split("/")[fixed:], parts[fixed:])
        }
        problem, remedy = "matches no file", "check the pattern"
    else:
        raise DataError(path=given, problem="does not exist", remedy="check the path")
    if not files:
        raise DataError(path=given, problem=problem, remedy=remedy)
    return files


def _walk(filesystem: pafs.FileSystem, base: str) -> dict[str, int]:
    selector = pafs.FileSelector(base, recursive=True, allow_not_found=True)
    depth = len(base.rstrip("/").split("/"))
    return {
        info.path: info.size
        for info in filesystem.get_file_info(selector)
        if info.type == pafs.FileType.File
        and not any(part.startswith((".", "_")) for part in info.path.split("/")[depth:])
    }


def _matches(parts: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[skip:], pattern[1:]) for skip in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _partitions(paths: Sequence[str]) -> list[dict[str, PartitionValue]]:
    """Return the values of ``key=value`` folders right above each file.

    A column is of integers if all its values are, else of strings.
    """
    raw = [_raw_partition(path) for path in paths]
    for path, values in zip(paths, raw, strict=True):
        if values.keys() != raw[0].keys():
            raise DataError(
                path=path,
                problem=f"is partitioned by {sorted(values)}, {paths[0]} by {sorted(raw[0])}",
                remedy="use one layout, or partitioning=None",
            )
    integers = {
        key
        for key in raw[0]
        if all(_INTEGER.fullmatch(value) for v in raw if (value := v[key]) is not None)
    }
    return [
        {
            key: int(value) if value is not None and key in integers else value
            for key, value in values.items()
        }
        for values in raw
    ]


def _raw_partition(path: str) -> dict[str, str | None]:
    values: dict[str, str | None] = {}
    for part in reversed(path.split("/")[:-1]):
        key, equals, value = part.partition("=")
        if not equals:
            break
        values[unquote(key)] = None if value == _HIVE_NULL else unquote(value)
    return dict(reversed(values.items()))
