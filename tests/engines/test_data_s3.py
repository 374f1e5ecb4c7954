"""Data sets on S3: pyarrow's own client, a real server, and a proxy between them that fails."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

pytest.importorskip("moto", reason="needs moto[s3], flask and flask-cors: pip install --group test")
pytest.importorskip("flask_cors", reason="moto's server needs flask and flask-cors")

from s3_support import KEY, SECRET, Proxy, options, proxied, s3_server

from farandole.data import ParquetDataset
from farandole.data.remote.retry import RetryPolicy
from farandole.errors import DataError, StoreError

NUM_ROWS = 48_000
COLUMNS = ["id", "x0", "x5", "month"]


def table(first: int, num_rows: int) -> pa.Table:
    ids = np.arange(first, first + num_rows)
    wide = np.random.default_rng(first).standard_normal((8, num_rows)).astype(np.float32)
    return pa.table({"id": ids, **{f"x{place}": values for place, values in enumerate(wide)}})


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(scope="module")
def admin(server: str) -> pafs.FileSystem:
    """Return the server's file system, past the proxy, with a bucket."""
    filesystem = pafs.S3FileSystem(**options(server), allow_bucket_creation=True)
    filesystem.create_dir("bucket")
    return filesystem


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, admin: pafs.FileSystem) -> Path:
    """Write a data set to a folder and to the bucket."""
    folder = tmp_path_factory.mktemp("local")
    for place in range(3):
        rows = table(place * NUM_ROWS // 3, NUM_ROWS // 3)
        name = f"rows/month={place}/part {place}.parquet"
        (folder / name).parent.mkdir(parents=True)
        pq.write_table(rows, folder / name, row_group_size=4000, use_dictionary=False)
        put(admin, name, (folder / name).read_bytes())
    put(admin, "rows/_SUCCESS", b"")
    return folder


def put(admin: pafs.FileSystem, name: str, data: bytes) -> None:
    with admin.open_output_stream(f"bucket/{name}") as stream:
        stream.write(data)


@pytest.fixture
def proxy(server: str, local: Path) -> Iterator[Proxy]:
    with proxied(server) as made:
        yield made


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    def delay_s(self: RetryPolicy, num_failures: int, chance: float) -> float:
        return 0.005 * chance

    monkeypatch.setattr(RetryPolicy, "delay_s", delay_s)


def remote(proxy: Proxy, url: str = "s3://bucket/rows", **more: Any) -> ParquetDataset:
    storage = {**options(proxy.address), **more.pop("storage_options", {})}
    given = {"columns": COLUMNS, "buffer_bytes": 1, **more}
    return ParquetDataset(url, storage_options=storage, **given)


def rows_of(dataset: ParquetDataset) -> np.ndarray:
    """Return a whole epoch in its order."""
    plan = dataset.epoch_plan(seed=3, epoch=1, batch_size=512, num_slots=4)
    blocks = list(dataset.read(plan, range(4)))
    return np.stack([np.concatenate([b.columns[name] for b in blocks]) for name in COLUMNS])


@pytest.fixture(scope="module")
def expected(local: Path) -> np.ndarray:
    found = rows_of(ParquetDataset(local / "rows", columns=COLUMNS))
    assert sorted(found[0].tolist()) == list(range(NUM_ROWS))
    return found


# --- what passes --------------------------------------------------------------------------


def test_an_epoch_is_the_local_one(proxy: Proxy, local: Path, expected: np.ndarray) -> None:
    dataset = remote(proxy)
    np.testing.assert_array_equal(rows_of(dataset), expected)
    assert dataset.fingerprint == ParquetDataset(local / "rows", columns=COLUMNS).fingerprint


@pytest.mark.parametrize("url", ["s3://bucket/rows/*/*.parquet", "s3://bucket/ro?s/month=*/part*"])
def test_patterns(proxy: Proxy, url: str) -> None:
    assert remote(proxy, url).num_rows == NUM_ROWS


def test_a_given_file_system_and_a_url_with_everything(proxy: Proxy, expected: np.ndarray) -> None:
    filesystem = pafs.S3FileSystem(**options(proxy.address))
    dataset = ParquetDataset("bucket/rows", columns=COLUMNS, filesystem=filesystem)
    np.testing.assert_array_equal(rows_of(dataset), expected)
    url = f"s3://{KEY}:{SECRET.replace('/', '%2F').replace('+', '%2B')}@bucket/rows"
    url += f"?endpoint_override=http://{proxy.address}&region=us-east-1"
    dataset = ParquetDataset(url, columns=COLUMNS)
    np.testing.assert_array_equal(rows_of(dataset), expected)
    assert "s3cr3t" not in repr(dataset)


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 28])
def test_an_epoch_through_a_store_that_fails_is_the_local_one(
    proxy: Proxy, expected: np.ndarray, buffer_bytes: int
) -> None:
    kinds = ["slow_down", "too_many", "error", "cut", "drop"]
    proxy.fault = lambda method, path, number: kinds[number // 3 % 5] if number % 3 == 0 else None
    np.testing.assert_array_equal(rows_of(remote(proxy, buffer_bytes=buffer_bytes)), expected)
    assert set(proxy.faults) == set(kinds)


def test_requests_overlap_within_the_limit(proxy: Proxy, expected: np.ndarray) -> None:
    proxy.latency_s = 0.05
    np.testing.assert_array_equal(
        rows_of(remote(proxy, storage_options={"num_requests": 4})), expected
    )
    assert 2 <= proxy.max_in_flight <= 4


def test_row_groups_are_read_by_one_request_each(proxy: Proxy) -> None:
    dataset = remote(proxy, buffer_bytes=1 << 28)
    dataset.validate()
    proxy.reset()
    rows_of(dataset)
    assert proxy.count("GET", "parquet") <= len(dataset.shard_rows) + 3  # and each footer
    assert proxy.count("HEAD") <= len(dataset.shard_rows) + 6


def test_the_second_epoch_asks_for_nothing(
    proxy: Proxy, tmp_path: Path, expected: np.ndarray
) -> None:
    dataset = remote(proxy, cache_dir=tmp_path)
    np.testing.assert_array_equal(rows_of(dataset), expected)
    proxy.reset()
    np.testing.assert_array_equal(rows_of(dataset), expected)
    assert proxy.requests == []
    np.testing.assert_array_equal(rows_of(remote(proxy, cache_dir=tmp_path)), expected)
    assert proxy.count("GET", "parquet") == 0


# --- what does not ------------------------------------------------------------------------


def test_what_does_not_exist_is_named_at_once(proxy: Proxy) -> None:
    for url in ("s3://bucket/none", "s3://no-such-bucket/rows"):
        proxy.reset()
        with pytest.raises(DataError, match="does not exist; check the path"):
            remote(proxy, url).validate()
        assert len(proxy.requests) <= 3


def test_denied_access_is_not_tried_again(proxy: Proxy) -> None:
    proxy.fault = lambda method, path, number: "denied"
    with pytest.raises(DataError, match=r"may not be read: .*ACCESS_DENIED.*check the credentials"):
        remote(proxy).validate()
    assert len(proxy.requests) == 1


def test_access_that_is_lost_in_mid_epoch(proxy: Proxy) -> None:
    dataset = remote(proxy)
    dataset.validate()
    proxy.reset()
    proxy.fault = lambda method, path, number: "denied"
    with pytest.raises(DataError, match=r"part \d\.parquet: may not be read: .*ACCESS_DENIED"):
        rows_of(dataset)
    assert len(proxy.requests) <= 2 * len(dataset.shard_rows)


def test_patience_has_an_end(proxy: Proxy) -> None:
    proxy.fault = lambda method, path, number: "slow_down"
    with pytest.raises(StoreError, match=r"failed \d+ times in a row.*deadline_s") as caught:
        remote(proxy, storage_options={"deadline_s": 0.2}).validate()
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("what", ["overwritten", "deleted"])
def test_a_file_that_changes_in_mid_epoch(proxy: Proxy, admin: pafs.FileSystem, what: str) -> None:
    name = f"changing-{what}/x.parquet"
    out = io.BytesIO()
    pq.write_table(table(0, 20_000), out, row_group_size=4000, use_dictionary=False)
    put(admin, name, out.getvalue())
    dataset = remote(proxy, f"s3://bucket/{name}", columns=["id", "x0", "x5"])
    dataset.validate()
    proxy.reset()
    plan = dataset.epoch_plan(seed=0, epoch=0, batch_size=512, num_slots=4)

    def change(method: str, path: str, number: int) -> None:
        if number == 3:
            if what == "deleted":
                admin.delete_file(f"bucket/{name}")
            else:
                out = io.BytesIO()
                pq.write_table(table(7, 20_000), out, row_group_size=4000, use_dictionary=False)
                put(admin, name, out.getvalue())

    proxy.fault = change
    problem = "was changed in the store" if what == "overwritten" else "does not exist in the store"
    with pytest.raises(DataError, match=rf"s3://bucket/{name}: {problem}"):
        list(dataset.read(plan, range(4)))


def test_wrong_options_are_named(proxy: Proxy) -> None:
    with pytest.raises(DataError, match=r"keyword argument 'key'.*pyarrow\.fs\.S3FileSystem"):
        remote(proxy, storage_options={"key": "x"}).validate()
