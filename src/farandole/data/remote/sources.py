"""What is asked of a store, by pyarrow's file systems or by those of fsspec."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.fs as pafs

_VERSION_KEYS = ("generation", "etag", "versionid", "md5hash", "contentmd5")
_TIME_KEYS = ("lastmodified", "mtime", "updated", "modified", "created")
_MAX_OPENED = 512


@dataclass(frozen=True)
class Version:
    """What tells one content of a file from another."""

    size_bytes: int
    tag: str
    """The store's own mark (an etag), else the time of the last change, else empty."""


class Source(Protocol):
    """Where bytes come from. Every call is one attempt, blocks, and may be made by any thread."""

    def version(self, path: str) -> Version:
        """Return the present version of a file."""
        ...

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes of a file, perhaps fewer than were asked for."""
        ...


class ArrowSource:
    """Files of a pyarrow file system.

    Opening a file asks the store for its size, so opened files are kept: those of object stores
    hold nothing but a name.
    """

    def __init__(self, filesystem: pafs.FileSystem) -> None:
        self._filesystem = filesystem
        self._opened: OrderedDict[str, pa.NativeFile] = OrderedDict()
        self._lock = threading.Lock()

    def version(self, path: str) -> Version:
        """Return the present version of a file."""
        opened = self._open(path)
        raw = opened.metadata() or {}
        told = {_text(name): _text(value) for name, value in raw.items()}
        if not told:  # not an object store
            info = self._filesystem.get_file_info(path)
            told = {"mtime": str(info.mtime_ns)} if info.mtime_ns is not None else {}
        return Version(opened.size(), _tag(told))

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes of a file, perhaps fewer than were asked for."""
        with self._lock:
            opened = self._opened.get(path)
        return (opened or self._open(path)).read_at(stop - start, start)

    def _open(self, path: str) -> pa.NativeFile:
        opened = self._filesystem.open_input_file(path)
        with self._lock:
            self._opened[path] = opened
            self._opened.move_to_end(path)
            if len(self._opened) > _MAX_OPENED:
                self._opened.popitem(last=False)
        return opened


class FsspecSource:
    """Files of an fsspec file system, read without its own caches."""

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem

    def version(self, path: str) -> Version:
        """Return the present version of a file."""
        self._filesystem.invalidate_cache(self._filesystem._parent(path))
        told = self._filesystem.info(path)
        if told["type"] != "file":
            raise IsADirectoryError(f"{path} is not a file")
        return Version(int(told["size"]), _tag(told))

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes of a file, perhaps fewer than were asked for."""
        return self._filesystem.cat_file(path, start=start, end=stop)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _tag(told: dict[str, Any]) -> str:
    """Return what a store tells of a file's version."""
    plain = {name.lower().replace("-", "").replace("_", ""): told[name] for name in told}
    for keys in (_VERSION_KEYS, _TIME_KEYS):
        found = [f"{key}={plain[key]}" for key in keys if plain.get(key)]
        if found:
            return " ".join(found)
    return ""
