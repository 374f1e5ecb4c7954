"""A store that is slow, throttles, cuts answers short, changes files, or is gone."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

from farandole.data import ParquetDataset
from farandole.data.remote.retry import RetryPolicy
from farandole.errors import DataError, StoreError

NUM_ROWS = 60_000


class FakeStore(fsspec.AbstractFileSystem):
    """Files of a local folder, by requests that are counted and may fail."""

    protocol = "fake"
    cachable = False

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self._local = LocalFileSystem()
        self.lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        self.read_bytes = 0
        self.in_flight = self.max_in_flight = 0
        self.latency_s = 0.0
        self.fault: Callable[[str, str, int], Exception | int | None] = lambda kind, path, n: None

    def _request(self, kind: str, path: str) -> int | None:
        """Note a request; return after how many bytes its answer ends, if it is cut."""
        with self.lock:
            self.requests[kind] += 1
            number = self.requests.total()
            self.in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            time.sleep(self.latency_s)
            fault = self.fault(kind, path, number)
            if isinstance(fault, Exception):
                raise fault
            return fault
        finally:
            with self.lock:
                self.in_flight -= 1

    def _info(self, path: str) -> dict[str, Any]:
        told = self._local.info(self._root / path)
        stat = (self._root / path).stat()
        etag = f"{stat.st_ino}-{stat.st_mtime_ns}"
        return {"name": path, "size": told["size"], "type": told["type"], "etag": etag}

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        self._request("info", path)
        return self._info(path.strip("/"))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        self._request("ls", path)
        names = sorted(entry.name for entry in (self._root / path).iterdir())
        found = [self._info(f"{path.strip('/')}/{name}") for name in names]
        return found if detail else [info["name"] for info in found]

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        length = self._request("read", path)
        data = (self._root / path).read_bytes()[start:end][:length]
        with self.lock:
            self.read_bytes += len(data)
        return data


def table(first: int, num_rows: int) -> pa.Table:
    ids = np.arange(first, first + num_rows)
    wide = np.random.default_rng(first).standard_normal((8, num_rows)).astype(np.float32)
    return pa.table({"id": ids, **{f"x{place}": values for place, values in enumerate(wide)}})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    (folder / "rows").mkdir(parents=True)
    for place in range(3):
        path = folder / "rows" / f"{place}.parquet"
        rows = NUM_ROWS // 3
        pq.write_table(table(place * rows, rows), path, row_group_size=4000, use_dictionary=False)
    return folder


def remote(store: FakeStore, **more: Any) -> ParquetDataset:
    given = {"columns": ["id", "x1", "x6"], "buffer_bytes": 1, "filesystem": store}
    return ParquetDataset("rows", **{**given, **more})


def rows_of(dataset: ParquetDataset, epoch: int = 0) -> np.ndarray:
    """Return a whole epoch in its order."""
    plan = dataset.epoch_plan(seed=3, epoch=epoch, batch_size=512, num_slots=4)
    blocks = list(dataset.read(plan, range(4)))
    return np.stack(
        [np.concatenate([block.columns[name] for block in blocks]) for name in ("id", "x1", "x6")]
    )


@pytest.fixture
def expected(root: Path) -> np.ndarray:
    return rows_of(ParquetDataset(root / "rows", columns=["id", "x1", "x6"]))


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    def delay_s(self: RetryPolicy, num_failures: int, chance: float) -> float:
        return 0.002 * chance

    monkeypatch.setattr(RetryPolicy, "delay_s", delay_s)


@pytest.fixture(autouse=True)
def _no_thread_left_behind() -> Any:
    yield
    gc.collect()
    left = [thread.name for thread in threading.enumerate() if "request" in thread.name]
    assert left == []


# --- what passes --------------------------------------------------------------------------


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 28])
def test_an_epoch_through_a_store_that_fails_is_the_local_one(
    root: Path, expected: np.ndarray, buffer_bytes: int
) -> None:
    store = FakeStore(root)
    faults = [
        (OSError, "AWS Error SLOW_DOWN during GetObject operation: Please reduce"),
        (OSError, "HTTP status 429: too many requests"),
        (ConnectionResetError, "connection reset by peer"),
        (TimeoutError, "timed out"),
        (OSError, "something never seen before"),
    ]

    def fault(kind: str, path: str, number: int) -> Exception | int | None:
        if number % 3 == 0:
            error, text = faults[number // 3 % len(faults)]
            return error(text)
        return 70_001 if kind == "read" and number % 3 == 1 else None

    store.fault = fault
    found = rows_of(remote(store, buffer_bytes=buffer_bytes))
    np.testing.assert_array_equal(found, expected)
    assert len(set(found[0].tolist())) == NUM_ROWS


def test_requests_overlap_within_the_limit(root: Path, expected: np.ndarray) -> None:
    store = FakeStore(root)
    store.latency_s = 0.02
    found = rows_of(remote(store, storage_options={"num_requests": 5}))
    np.testing.assert_array_equal(found, expected)
    assert 2 <= store.max_in_flight <= 5


def test_only_what_is_wanted_is_read_in_few_requests(root: Path) -> None:
    """Columns that lie together are one request, whatever their number."""
    store = FakeStore(root)
    dataset = remote(store, columns=[f"x{place}" for place in range(8)], buffer_bytes=1 << 28)
    dataset.validate()
    footers = store.requests["read"]
    plan = dataset.epoch_plan(seed=0, epoch=0, batch_size=512, num_slots=4)
    list(dataset.read(plan, range(4)))
    assert store.requests["read"] - footers <= len(dataset.shard_rows) + 3  # and each footer
    size = sum(path.stat().st_size for path in (root / "rows").iterdir())
    assert store.read_bytes < 5 * size


def test_a_store_that_recovers_in_time_is_waited_for(
    root: Path, expected: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    store = FakeStore(root)
    outage = Counter[str]()

    def fault(kind: str, path: str, number: int) -> Exception | None:
        outage["requests"] += 1
        return OSError("HTTP status 503") if 20 < outage["requests"] < 80 else None

    store.fault = fault
    with caplog.at_level(logging.WARNING, "farandole.data"):
        np.testing.assert_array_equal(rows_of(remote(store)), expected)
    told = [message for message in caplog.messages if "trying again" in message]
    assert len(told) == 1


# --- what does not ------------------------------------------------------------------------


def test_patience_has_an_end_and_the_error_says_so(root: Path) -> None:
    store = FakeStore(root)
    store.fault = lambda kind, path, number: OSError("HTTP status 503: SlowDown")
    with pytest.raises(StoreError, match=r"failed \d+ times in a row: .*SlowDown.*deadline_s"):
        remote(store, storage_options={"deadline_s": 0.05}).validate()


def test_a_store_that_is_lost_in_mid_epoch_ends_the_epoch(root: Path) -> None:
    store = FakeStore(root)
    dataset = remote(store, storage_options={"deadline_s": 0.05})
    dataset.validate()
    store.fault = lambda kind, path, number: ConnectionError("no route to host")
    with pytest.raises(StoreError, match="no route to host"):
        rows_of(dataset)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError("Forbidden"), "may not be read: Forbidden; check the credentials"),
        (OSError("AWS Error ACCESS_DENIED during GetObject"), ".*; check the credentials"),
        (FileNotFoundError("gone"), "does not exist in the store: gone; check the path"),
    ],
)
def test_what_will_not_pass_is_not_tried_again(root: Path, error: Exception, message: str) -> None:
    store = FakeStore(root)
    dataset = remote(store)
    dataset.validate()
    reads = Counter[str]()

    def fault(kind: str, path: str, number: int) -> Exception | None:
        reads[path] += kind == "read"
        return type(error)(*error.args) if kind == "read" else None

    store.fault = fault
    with pytest.raises(DataError, match=rf"fake://rows/\d\.parquet: {message}"):
        rows_of(dataset)
    assert reads.total() <= 3 * len(dataset.shard_rows)


@pytest.mark.parametrize("same_size", [True, False])
def test_a_file_that_changes_in_mid_epoch_is_noticed(root: Path, same_size: bool) -> None:
    store = FakeStore(root)
    dataset = remote(store)
    dataset.validate()
    path = root / "rows" / "1.parquet"
    changed = Counter[str]()

    def fault(kind: str, name: str, number: int) -> None:
        if kind == "read" and name.endswith("1.parquet"):
            changed["reads"] += 1
            if changed["reads"] == 2:
                again = table(1_000_000, NUM_ROWS // 3 + (0 if same_size else 1))
                pq.write_table(again, path, row_group_size=4000, use_dictionary=False)

    store.fault = fault
    with pytest.raises(DataError, match=r"1\.parquet: was changed in the store"):
        rows_of(dataset)


def test_secrets_are_not_in_errors_or_logs(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = "s3cr3t/of+farandole"
    fsspec.register_implementation("fakestore", FakeStoreWithKey, clobber=True)
    dataset = ParquetDataset(
        "fakestore://rows",
        storage_options={"key": secret, "root": str(root), "deadline_s": 0.05},
    )
    with caplog.at_level(logging.DEBUG), pytest.raises(StoreError) as caught:
        dataset.validate()
    assert "***" in str(caught.value)
    for text in (str(caught.value), repr(caught.value), repr(dataset), caplog.text):
        assert secret not in text


class FakeStoreWithKey(FakeStore):
    """Fails, and tells the key in its errors."""

    def __init__(self, key: str, root: str) -> None:
        super().__init__(Path(root))
        self.fault = lambda kind, path, number: OSError(f"HTTP status 500 for key {key}")


# --- the local cache ----------------------------------------------------------------------


def test_the_second_epoch_asks_for_nothing(
    root: Path, tmp_path: Path, expected: np.ndarray
) -> None:
    store = FakeStore(root)
    dataset = remote(store, cache_dir=tmp_path / "cache")
    np.testing.assert_array_equal(rows_of(dataset), expected)
    before = store.requests["read"]
    np.testing.assert_array_equal(rows_of(dataset), expected)
    assert store.requests["read"] == before
    # Another process would ask for versions only, and see that a file is another one.
    again = remote(store, cache_dir=tmp_path / "cache")
    np.testing.assert_array_equal(rows_of(again), expected)
    assert store.requests["read"] == before
    rows = NUM_ROWS // 3
    pq.write_table(table(7 * NUM_ROWS, rows), root / "rows" / "1.parquet", row_group_size=4000)
    found = rows_of(remote(store, cache_dir=tmp_path / "cache"))
    assert set(range(7 * NUM_ROWS, 7 * NUM_ROWS + rows)) <= set(found[0].astype(int).tolist())


def test_damaged_blocks_are_read_anew(root: Path, tmp_path: Path, expected: np.ndarray) -> None:
    store = FakeStore(root)
    rows_of(remote(store, cache_dir=tmp_path / "cache"))
    blocks = [path for path in (tmp_path / "cache").rglob("*-*") if path.is_file()]
    for place, path in enumerate(blocks):
        stored = bytearray(path.read_bytes())
        stored[len(stored) // 2] ^= 0xFF
        path.write_bytes(bytes(stored) if place % 2 else bytes(stored[:100]))
    np.testing.assert_array_equal(rows_of(remote(store, cache_dir=tmp_path / "cache")), expected)


def test_a_full_disk_costs_a_warning(
    root: Path,
    tmp_path: Path,
    expected: np.ndarray,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(handle: int, mode: str) -> None:
        os.close(handle)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("farandole.data.remote.diskcache.os.fdopen", full)
    store = FakeStore(root)
    with caplog.at_level(logging.WARNING, "farandole.data"):
        found = rows_of(remote(store, cache_dir=tmp_path / "cache"))
    np.testing.assert_array_equal(found, expected)
    told = [message for message in caplog.messages if "the disk is full" in message]
    assert len(told) == 1


def test_processes_share_a_cache(tmp_path: Path) -> None:
    """Four writers of overlapping blocks: none reads a wrong one, and the limit holds."""
    code = """
import sys
from pathlib import Path
from farandole.data.remote.diskcache import DiskCache
from farandole.data.remote.ranges import BLOCK_BYTES
from farandole.data.remote.sources import Version
cache = DiskCache(Path(sys.argv[1]), 8 * (BLOCK_BYTES + 12))
key = cache.key("s3://bucket/x", Version(1, "1"))
me = int(sys.argv[2])
for turn in range(60):
    block = (turn * (me + 1)) % 16
    content = bytes([block]) * BLOCK_BYTES
    found = cache.get(key, block)
    assert found is None or found == content, block
    if found is None:
        cache.put(key, block, content)
assert cache._writes
"""
    argv = [sys.executable, "-c", code, str(tmp_path / "cache")]
    workers = [subprocess.Popen([*argv, str(me)], stderr=subprocess.PIPE) for me in range(4)]
    for worker in workers:
        _, error = worker.communicate(timeout=60)
        assert worker.returncode == 0, error.decode()
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert not [path for path in left if path.name.startswith(".")]
    assert sum(path.stat().st_size for path in left) <= 8 * (256 * 1024 + 12) + 8


# --- the end of a process -----------------------------------------------------------------


@pytest.mark.parametrize("end", ["pass", "raise RuntimeError('the end')"])
def test_a_process_does_not_wait_for_a_store_that_is_gone(root: Path, end: str) -> None:
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_remote_faults import FakeStore, remote
store = FakeStore(Path({str(root)!r}))
dataset = remote(store)
plan = dataset.epoch_plan(seed=0, epoch=0, batch_size=512, num_slots=4)
blocks = dataset.read(plan, range(4))
next(blocks)
store.fault = lambda kind, path, number: ConnectionError("gone")
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if end == "pass" else 1), done.stderr
    assert done.stderr.rstrip().endswith("the end") == (end != "pass")
    assert end != "pass" or done.stderr == ""
