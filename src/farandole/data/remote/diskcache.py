"""Blocks of remote files on the local disk, shared by the processes of a host."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from farandole.data.remote.ranges import BLOCK_BYTES
from farandole.data.remote.sources import Version

_HEADER = struct.Struct("<4sII")
_MAGIC = b"FAB1"
_USAGE = struct.Struct("<q")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_KEPT = 0.9
"""The share of the limit that is left when room is made."""
_ABANDONED_S = 3600.0
_LOCK_S = 30.0

_logger = logging.getLogger("farandole.data")


class DiskCache:
    """A folder of blocks, the least recently used deleted to keep within a limit.

    A block is a file of its own, under a name made of the file's address and version and the
    block's number. It is written under another name and then renamed, and begins with its size
    and checksum: so what a crash or a full disk left is never taken for data, without waiting
    for the disk at every block. A counter in the folder, under a lock, says how much is in use;
    it is raised before a block is written, so that it never says too little, and set right
    whenever room is made.

    Parameters
    ----------
    folder : Path
        Made at first use, for this user only.
    limit_bytes : int
        Of all blocks together.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._writes = True

    def key(self, address: str, version: Version) -> str:
        """Return the name under which a version of a file is kept."""
        told = f"{address}\n{version.size_bytes}\n{version.tag}\n{BLOCK_BYTES}"
        return hashlib.sha256(told.encode()).hexdigest()[:40]

    def get(self, key: str, block: int) -> memoryview | None:
        """Return a block, or None if it is not there or not whole."""
        path = self._path(key, block)
        try:
            stored = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        data = memoryview(stored)[_HEADER.size :]
        if len(stored) < _HEADER.size:
            return None
        magic, size_bytes, checksum = _HEADER.unpack_from(stored)
        if magic != _MAGIC or size_bytes != len(data) or checksum != zlib.crc32(data):
            return None
        return data

    def put(self, key: str, first: int, data: bytes) -> None:
        """Keep blocks from number `first` on. Never fails: a disk that is full is let be."""
        if not self._writes:
            return
        view = memoryview(data)
        blocks = [view[at : at + BLOCK_BYTES] for at in range(0, len(view), BLOCK_BYTES)]
        num_bytes = sum(_HEADER.size + len(block) for block in blocks)
        if num_bytes > self._limit_bytes:
            return
        try:
            self._reserve(num_bytes)
            for number, block in enumerate(blocks, first):
                self._write(self._path(key, number), block)
        except OSError as error:
            self._give_up(error)

    def _path(self, key: str, block: int) -> Path:
        return self._folder / key[:2] / f"{key[2:]}-{block}"

    def _write(self, path: Path, block: memoryview) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(_HEADER.pack(_MAGIC, len(block), zlib.crc32(block)))
                stream.write(block)
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise

    def _give_up(self, error: OSError) -> None:
        with self._lock:
            if not self._writes:
                return
            self._writes = False
        why = "the disk is full" if error.errno in _FULL else f"cannot be written: {error}"
        _logger.warning(
            "cache_dir=%s: %s; going on without keeping more of the data", self._folder, why
        )

    def _reserve(self, num_bytes: int) -> None:
        """Count bytes as used, and delete what was used longest ago if they are too many."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._usage() as handle:
            stored = os.pread(handle, _USAGE.size, 0)
            used = _USAGE.unpack(stored)[0] if len(stored) == _USAGE.size else self._limit_bytes
            used += num_bytes
            if used > self._limit_bytes:
                used = self._make_room(int(self._limit_bytes * _KEPT) - num_bytes) + num_bytes
            os.pwrite(handle, _USAGE.pack(used), 0)

    @contextlib.contextmanager
    def _usage(self) -> Iterator[int]:
        handle = os.open(self._folder / "usage", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_S
            while not _try_lock(handle):
                if time.monotonic() > deadline:
                    raise OSError(errno.ETIMEDOUT, f"another process locked it for {_LOCK_S:g} s")
                time.sleep(0.005)
            yield handle
        finally:
            os.close(handle)

    def _make_room(self, target_bytes: int) -> int:
        """Delete blocks until at most so many bytes are left; return how many there are."""
        now = time.time()
        found: list[tuple[float, int, str]] = []
        for folder in self._folder.iterdir():
            if folder.is_dir():
                for entry in os.scandir(folder):
                    # Others delete as well, damaged blocks and their own unfinished files.
                    with contextlib.suppress(FileNotFoundError):
                        stat = entry.stat()
                        unfinished = entry.name.startswith(".")
                        if unfinished and now - stat.st_mtime < _ABANDONED_S:
                            continue
                        age = 0.0 if unfinished else stat.st_mtime
                        found.append((age, stat.st_size, entry.path))
        used = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if used <= target_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
            used -= size
        return used


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
