"""Read ahead in a background thread, bounded, and stoppable at once."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Generic, TypeVar

from farandole.errors import UsageError

T = TypeVar("T")


class _Channel(Generic[T]):
    """A bounded queue of chunks between two threads, closed from either side."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._chunks: deque[Sequence[T]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._closed = False
        self._failure: BaseException | None = None

    def put(self, chunk: Sequence[T]) -> bool:
        """Add a chunk, blocking while the queue is full; return whether anyone reads on."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._chunks) < self._depth)
            if not self._closed:
                self._chunks.append(chunk)
                self._changed.notify_all()
            return not self._closed

    def end(self, failure: BaseException | None = None) -> None:
        with self._changed:
            self._ended, self._failure = True, failure
            self._changed.notify_all()

    def get(self) -> Sequence[T] | None:
        """Return the next chunk, or None at the end; raises what the thread raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._chunks or self._ended or self._closed)
            if self._chunks and not self._closed:
                self._changed.notify_all()
                return self._chunks.popleft()
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._chunks.clear()
            self._changed.notify_all()


def _produce(channel: _Channel[T], chunks: Generator[Sequence[T]]) -> None:
    failure: BaseException | None = None
    try:
        for chunk in chunks:
            if not channel.put(chunk):
                break
        chunks.close()
    except BaseException as error:  # it belongs to the consumer, whatever it is
        failure = error
    channel.end(failure)


def _stop(channel: _Channel[T], thread: threading.Thread, process: int) -> None:
    if process != os.getpid():
        return  # forked: the thread is not here, and may have held the channel's lock
    channel.close()
    if thread is not threading.current_thread():
        thread.join()


class Prefetch(Generic[T]):
    """An iterator over the items of chunks that a thread makes ahead.

    What the thread raises is raised by `__next__`, after the items before it. The thread ends
    with `close`, with the last reference, and before the interpreter does.

    Parameters
    ----------
    chunks : generator of sequences
        Advanced and closed in the thread only.
    depth : int
        Chunks that may wait.
    """

    def __init__(self, chunks: Generator[Sequence[T]], depth: int) -> None:
        self._channel: _Channel[T] = _Channel(depth)
        self._items: Iterator[T] = iter(())
        # A daemon, since `_stop` at exit comes after the interpreter waits for other threads.
        thread = threading.Thread(
            target=_produce,
            args=(self._channel, chunks),
            name="farandole-prefetch",
            daemon=True,
        )
        self._process = os.getpid()
        self._stop = weakref.finalize(self, _stop, self._channel, thread, self._process)
        thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._process != os.getpid():
            raise UsageError(
                problem="batches are read on in a forked process",
                remedy="make a new iterator there",
            )
        while True:
            for item in self._items:
                return item
            chunk = self._channel.get()
            if chunk is None:
                self.close()
                raise StopIteration
            self._items = iter(chunk)

    def close(self) -> None:
        """End the thread and drop what it has read. Blocks for the piece being decoded."""
        self._items = iter(())
        self._stop()
