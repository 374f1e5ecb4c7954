from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Generator

import pytest

from farandole.data.prefetch import Prefetch

DEADLINE_S = 10.0


class Source:
    """Counts what is asked of it, and notes when it is closed."""

    def __init__(self, num_chunks: int, fail_at: int | None = None) -> None:
        self.num_chunks = num_chunks
        self.fail_at = fail_at
        self.made = 0
        self.changed = threading.Condition()
        self.closed = threading.Event()
        self.threads: set[str] = set()

    def chunks(self) -> Generator[list[int]]:
        try:
            for chunk in range(self.num_chunks):
                self.threads.add(threading.current_thread().name)
                if chunk == self.fail_at:
                    raise ZeroDivisionError("from the thread")
                with self.changed:
                    self.made += 1
                    self.changed.notify_all()
                yield [2 * chunk, 2 * chunk + 1]
        finally:
            self.closed.set()

    def wait_made(self, number: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.made >= number, DEADLINE_S)


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "farandole-prefetch"]


@pytest.fixture(autouse=True)
def _leaves_no_thread() -> Generator[None]:
    yield
    assert threads() == []


def test_items_come_in_order_and_the_thread_ends() -> None:
    source = Source(5)
    assert list(Prefetch(source.chunks(), 2)) == list(range(10))
    assert source.threads == {"farandole-prefetch"}
    assert source.closed.is_set()


def test_it_reads_ahead_only_so_far() -> None:
    source = Source(100)
    items = Prefetch(source.chunks(), 3)
    assert source.wait_made(4)  # three wait, one is held by the thread
    assert next(items) == 0
    assert source.wait_made(5)
    assert source.made == 5
    items.close()


def test_an_error_comes_after_the_items_before_it_with_its_traceback() -> None:
    items = Prefetch(Source(5, fail_at=2).chunks(), 10)
    assert [next(items) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ZeroDivisionError, match="from the thread") as caught:
        next(items)
    assert "in chunks" in "".join(traceback.format_tb(caught.value.__traceback__))
    items.close()
    assert list(items) == []


def _close(items: list[Prefetch[int]]) -> None:
    items[0].close()
    items[0].close()


def _drop(items: list[Prefetch[int]]) -> None:
    items.clear()
    gc.collect()


@pytest.mark.parametrize("end", [_close, _drop])
@pytest.mark.parametrize("num_read", [0, 1])
def test_closing_or_dropping_ends_the_thread(
    end: Callable[[list[Prefetch[int]]], None], num_read: int
) -> None:
    source = Source(10**9)
    items = [Prefetch(source.chunks(), 2)]
    for _ in range(num_read):
        next(items[0])
    end(items)
    assert source.closed.is_set()
    assert threads() == []


def test_a_closed_one_is_at_its_end() -> None:
    items = Prefetch(Source(10).chunks(), 2)
    assert next(items) == 0
    items.close()
    assert next(items, None) is None


def test_no_chunks() -> None:
    assert list(Prefetch(Source(0).chunks(), 1)) == []
