"""Reads of a store: in parallel, repeated where that helps, and of one version of a file."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from farandole.data.remote.diskcache import DiskCache
from farandole.data.remote.pool import RequestPool, shared_pool
from farandole.data.remote.ranges import BLOCK_BYTES, REQUEST_BYTES, Run
from farandole.data.remote.retry import RetryPolicy, cause_of
from farandole.data.remote.sources import Source, Version
from farandole.errors import DataError, StoreError

T = TypeVar("T")
Redact = Callable[[str], str]

_MAX_TEXT = 500
_WARN_FAILURES = 3
_WARN_EVERY_S = 60.0
_DENIED = (
    "check the credentials (storage_options=, or where the store's own tools look for them) and "
    "that they allow listing and reading; a store may also deny what does not exist"
)

_logger = logging.getLogger("farandole.data")


class File:
    """A file of a store, in the version in which it was first seen."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.version: Version | None = None
        self.lock = threading.Lock()
        self.changed = threading.Condition()
        self.num_begun = 0
        self.num_confirmed = 0
        self.is_confirming = False


class Store:
    """Files of a store, as one data set sees them.

    Parameters
    ----------
    source : Source
    prefix : str
        Put before paths in messages, such as ``s3://``.
    num_requests : int
        Limit on requests in flight, for all stores of this process with that limit together.
    policy : RetryPolicy
    cache : DiskCache, optional
    redact : callable
        Takes secrets out of a message.
    """

    def __init__(
        self,
        source: Source,
        *,
        prefix: str,
        num_requests: int,
        policy: RetryPolicy,
        cache: DiskCache | None,
        redact: Redact,
    ) -> None:
        self.prefix = prefix
        self._source = source
        self._num_requests = num_requests
        self._shared = shared_pool(num_requests)
        self._policy = policy
        self._cache = cache
        self._redact = redact
        self._files: dict[str, File] = {}
        self._listed: dict[str, int] = {}
        self._warned_at = -_WARN_EVERY_S
        self._lock = threading.Lock()

    @property
    def _pool(self) -> RequestPool:
        if not self._shared.is_ours:
            self._shared = shared_pool(self._num_requests)
        return self._shared

    def expect(self, path: str, size_bytes: int) -> None:
        """Note the size that a listing gave; a file of another one has changed since."""
        self._listed[path] = size_bytes

    def ask(self, path: str, request: Callable[[], T]) -> T:
        """Make a request that may be repeated, within the limit. Blocks."""
        return result_of(self._pool.submit(self._repeated, path, request))

    def file(self, path: str) -> File:
        """Return the one object for a file. Does not block."""
        with self._lock:
            return self._files.setdefault(path, File(path))

    def version(self, file: File) -> Version:
        """Return the version in which a file was first seen. Blocks the first time.

        Raises
        ------
        DataError
            If it does not exist or may not be read, or has changed since it was listed.
        StoreError
            If the store fails for too long.
        """
        if file.version is None:
            return result_of(self._pool.submit(self._seen, file))
        return file.version

    def fetch(self, file: File, run: Run) -> Future[memoryview]:
        """Ask for blocks of a file. Does not block; what goes wrong is in the result."""
        return self._pool.submit(self._blocks, file, run)

    # --- in the pool's threads ------------------------------------------------------------

    def _seen(self, file: File) -> Version:
        """Return the version of a file, that of the first look at it."""
        with file.lock:
            if file.version is None:
                version = self._repeated(file.path, lambda: self._source.version(file.path))
                if self._listed.get(file.path, version.size_bytes) != version.size_bytes:
                    raise self._changed(file.path)
                file.version = version
            return file.version

    def _blocks(self, file: File, run: Run) -> memoryview:
        """Return the bytes of a run, those that are on disk from there."""
        version = self._seen(file)
        end = min(run.stop * BLOCK_BYTES, version.size_bytes)
        if self._cache is None:
            return memoryview(self._download(file, run.first * BLOCK_BYTES, end))
        key = self._cache.key(self.prefix + file.path, version)
        kept = {block: self._cache.get(key, block) for block in range(run.first, run.stop)}
        pieces: list[bytes | memoryview] = []
        block = run.first
        while block < run.stop:
            piece = kept[block]
            if piece is not None:
                pieces.append(piece)
                block += 1
                continue
            first = block
            while block < run.stop and kept[block] is None:
                block += 1
            data = self._download(file, first * BLOCK_BYTES, min(block * BLOCK_BYTES, end))
            self._cache.put(key, first, data)
            pieces.append(data)
        return memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def _download(self, file: File, start: int, stop: int) -> bytes:
        """Read bytes from the store, going on where an answer was cut short."""
        pieces: list[bytes] = []
        at = start

        def read_on() -> None:
            nonlocal at
            while at < stop:
                try:
                    data = self._source.read(file.path, at, min(at + REQUEST_BYTES, stop))
                except Exception as error:
                    # A store's answer may be lost: that the file is gone shows when asked again.
                    if cause_of(error) in ("unknown", "unusable"):
                        self._compare(file)
                    raise
                if not data:
                    self._compare(file)
                    raise ConnectionError("the store gave no bytes")
                pieces.append(data)
                at += len(data)

        self._repeated(file.path, read_on)
        self._confirm(file)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _confirm(self, file: File) -> None:
        """Make sure that what was read up to now is of the file's version.

        Asks the store anew; whoever comes while another asks shares the next question.
        """
        with file.changed:
            mine = file.num_begun + 1
            file.changed.wait_for(lambda: file.num_confirmed >= mine or not file.is_confirming)
            if file.num_confirmed >= mine:
                return
            file.is_confirming = True
            file.num_begun += 1
            begun = file.num_begun
        try:
            self._repeated(file.path, lambda: self._compare(file))
        except BaseException:
            with file.changed:
                file.is_confirming = False
                file.changed.notify_all()
            raise
        with file.changed:
            file.is_confirming = False
            file.num_confirmed = begun
            file.changed.notify_all()

    def _compare(self, file: File) -> None:
        if self._source.version(file.path) != file.version:
            raise self._changed(file.path)

    def _repeated(self, path: str, request: Callable[[], T]) -> T:
        """Return what a request gives, made again while that may help."""
        deadline = time.monotonic() + self._policy.deadline_s
        num_failures = 0
        while True:
            try:
                return request()
            except (DataError, StoreError):
                raise
            except Exception as error:
                num_failures += 1
                self._wait(path, error, num_failures, deadline)

    def _wait(self, path: str, error: Exception, num_failures: int, deadline: float) -> None:
        """Wait after a failure; raise if another attempt would not help, or be too late."""
        if cause_of(error) not in ("busy", "unknown"):
            raise self._final(path, error) from None
        delay_s = self._policy.delay_s(num_failures, random.random())
        if time.monotonic() + delay_s > deadline:
            raise self._exhausted(path, error, num_failures) from None
        self._warn(path, error, num_failures)
        if not self._pool.pause(delay_s):
            raise self._exhausted(path, error, num_failures) from None

    def _warn(self, path: str, error: Exception, num_failures: int) -> None:
        """Say that a store fails, but not for each of its answers."""
        now = time.monotonic()
        if num_failures >= _WARN_FAILURES and now - self._warned_at > _WARN_EVERY_S:
            self._warned_at = now
            told = self._told(error)
            _logger.warning("%s%s: failed, trying again: %s", self.prefix, path, told)

    # --- errors ---------------------------------------------------------------------------

    def _told(self, error: Exception) -> str:
        """Return the first line of an error, without secrets."""
        text = self._redact(str(error) or type(error).__name__)
        return text.partition("\n")[0][:_MAX_TEXT]

    def _final(self, path: str, error: Exception) -> DataError:
        cause, told = cause_of(error), self._told(error)
        if cause == "missing":
            problem, remedy = f"does not exist in the store: {told}", "check the path"
        elif cause == "denied":
            problem, remedy = f"may not be read: {told}", _DENIED
        else:
            problem, remedy = f"cannot be read: {told}", "check the path and storage_options="
        return DataError(path=self.prefix + path, problem=problem, remedy=remedy)

    def _exhausted(self, path: str, error: Exception, num_failures: int) -> StoreError:
        return StoreError(
            path=self.prefix + path,
            problem=f"the store failed {num_failures} times in a row: {self._told(error)}",
            remedy="see whether it can be reached and is not overloaded; for more patience than "
            f"{self._policy.deadline_s:g} s pass storage_options={{'deadline_s': ...}}",
        )

    def _changed(self, path: str) -> DataError:
        return DataError(
            path=self.prefix + path,
            problem="was changed in the store after it was first seen",
            remedy="do not change files while they are read; start again with the new ones",
        )


def result_of(future: Future[T]) -> T:
    """Wait for a request, which has a deadline of its own."""
    try:
        return future.result()
    except CancelledError:
        raise StoreError(path="store", problem="the process ends", remedy="start again") from None
