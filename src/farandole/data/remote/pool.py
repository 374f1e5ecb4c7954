"""Threads that carry requests: their number is the limit on requests in flight."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary, finalize

P = ParamSpec("P")
T = TypeVar("T")


class _State:
    """What the threads share. They do not hold the pool, so that it can be collected."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.changed = threading.Condition()
        self.closing = threading.Event()
        self.num_idle = 0
        self.threads: list[threading.Thread] = []
        self.pid = os.getpid()


class RequestPool:
    """Up to so many threads, started as they are needed, ended with the last reference.

    Unlike an executor of the standard library it does not finish what is queued before the
    interpreter ends: a store that does not answer must not keep a process from ending.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._state = _State()
        self._stop = finalize(self, _stop, self._state)

    @property
    def is_ours(self) -> bool:
        """Whether its threads are of this process: a fork takes none along."""
        return self._state.pid == os.getpid()

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call. Does not block."""
        future: Future[T] = Future()
        state = self._state
        with state.changed:
            state.queue.append((future, lambda: function(*args, **kwargs)))
            if state.num_idle < len(state.queue) and len(state.threads) < self._num_threads:
                name = f"farandole-request-{len(state.threads)}"
                # Daemons: `_stop` ends them, after the interpreter has waited for other threads.
                thread = threading.Thread(target=_work, args=(state,), name=name, daemon=True)
                state.threads.append(thread)
                thread.start()
            else:
                state.changed.notify()
        return future

    def pause(self, seconds: float) -> bool:
        """Wait within a call; return whether to go on, False as soon as the process ends."""
        return not self._state.closing.wait(seconds) and threading.main_thread().is_alive()


def _work(state: _State) -> None:
    while True:
        with state.changed:
            state.num_idle += 1
            state.changed.wait_for(lambda: state.queue or state.closing.is_set())
            state.num_idle -= 1
            if state.closing.is_set():
                return
            future, call = state.queue.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        del future, call  # else the last result would stay in memory


def _stop(state: _State) -> None:
    if state.pid != os.getpid():
        return
    with state.changed:
        state.closing.set()
        for future, _ in state.queue:
            future.cancel()
        state.queue.clear()
        state.changed.notify_all()
    for thread in state.threads:
        if thread is not threading.current_thread():
            thread.join()


_pools: WeakValueDictionary[tuple[int, int], RequestPool] = WeakValueDictionary()


def shared_pool(num_threads: int) -> RequestPool:
    """Return this process's pool of so many threads."""
    return _pools.setdefault((os.getpid(), num_threads), RequestPool(num_threads))
