"""A folder in which tables are kept for later opens of a data set.

Nothing depends on it: what is torn, of another version or cannot be written counts as absent.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

_log = logging.getLogger(__name__)

_MAGIC = b"farandole index 1\n"
_DIGEST_BYTES = 16
_MAX_BYTES = 1 << 30
_LOCK_POLL_S = 0.05
_ABANDONED_S = 3600.0


class TableCache:
    """Tables by name, each written at once. Safe from many threads, processes and hosts.

    Parameters
    ----------
    folder : Path, optional
        Made when first written to. None keeps nothing.
    max_bytes : int
        The tables that were not used for longest are removed to keep within it.
    """

    def __init__(self, folder: Path | None, max_bytes: int = _MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def __bool__(self) -> bool:
        """Return whether anything is kept."""
        return self._folder is not None

    def load(self, name: str) -> pa.Table | None:
        """Return a table, or None if there is none that can be used."""
        if self._folder is None:
            return None
        path = self._folder / name
        try:
            content = path.read_bytes()
        except OSError:
            return None
        head = len(_MAGIC) + _DIGEST_BYTES
        body = memoryview(content)[head:]
        if content[:head] != _MAGIC + _digest(body):
            _log.debug("%s is torn or of another version", path)
            return None
        with contextlib.suppress(OSError):  # read-only: it serves as well
            os.utime(path)
        try:
            return pa.ipc.open_stream(pa.BufferReader(body)).read_all()
        except (pa.ArrowException, OSError) as error:
            _log.debug("%s cannot be used: %s", path, error)
            return None

    def store(self, name: str, table: pa.Table) -> None:
        """Keep a table. Blocks until it is on the disk; does nothing where that is impossible."""
        if self._folder is None:
            return
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(
            compression="zstd" if pa.Codec.is_available("zstd") else None
        )
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        body = memoryview(sink.getvalue())
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._prune(len(body))
            _write(self._folder / name, _MAGIC + _digest(body), body)
        except OSError as error:
            _log.debug("%s cannot be written: %s", self._folder / name, error)

    def drop(self, name: str) -> None:
        """Remove a table."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()

    @contextlib.contextmanager
    def making(self, name: str, timeout_s: float) -> Iterator[None]:
        """Let one process at a time make a table; the others find it made when their turn comes.

        Goes on after the time without the right to: a table that is made twice does no harm.
        """
        with contextlib.ExitStack() as stack:
            if self._folder is not None:
                with contextlib.suppress(OSError):
                    self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                    # Few locks serve all names, so that they need not be removed.
                    lock = (self._folder / f".{name[:2]}.lock").open("ab")
                    stack.enter_context(lock)
                    _lock(lock.fileno(), time.monotonic() + timeout_s)
            yield

    def _prune(self, needed_bytes: int) -> None:
        """Make room, and remove what interrupted writers left."""
        assert self._folder is not None
        kept: list[tuple[float, int, Path]] = []
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.name.startswith(".new-") and status.st_mtime < time.time() - _ABANDONED_S:
                    path.unlink()
                elif not path.name.startswith("."):
                    kept.append((status.st_mtime, status.st_size, path))
        excess = sum(size for _, size, _ in kept) + needed_bytes - self._max_bytes
        for _, size, path in sorted(kept):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size


def _digest(body: memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _write(path: Path, head: bytes, body: memoryview) -> None:
    """Write a file whole or not at all."""
    number, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(head)
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _lock(number: int, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOCK_POLL_S)
