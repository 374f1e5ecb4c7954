"""What is decided about remote reads, without any store."""

from __future__ import annotations

import copy
import pickle

import pyarrow.fs as pafs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.data import ParquetDataset
from farandole.data.remote import Storage, split_credentials
from farandole.data.remote.ranges import BLOCK_BYTES, REQUEST_BYTES, Ranges
from farandole.data.remote.retry import RetryPolicy, cause_of
from farandole.data.remote.sources import _tag
from farandole.errors import ConfigError, DataError

SECRET = "s3cr3t/of+farandole"

# --- ranges -------------------------------------------------------------------------------


@given(
    pieces=st.lists(st.tuples(st.integers(0, 20_000_000), st.integers(1, 9_000_000)), max_size=8),
    ahead_bytes=st.integers(1, 64 << 20),
)
def test_runs_cover_what_is_wanted_once_and_nothing_far_from_it(
    pieces: list[tuple[int, int]], ahead_bytes: int
) -> None:
    ranges = tuple((start, start + size) for start, size in pieces)
    runs = Ranges(ranges).runs(ahead_bytes)
    blocks = [block for run in runs for block in range(run.first, run.stop)]
    wanted = {
        block
        for start, stop in ranges
        for block in range(start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES + 1)
    }
    assert len(blocks) == len(set(blocks))
    assert set(blocks) == wanted
    assert all(0 < run.num_bytes <= REQUEST_BYTES for run in runs)
    assert sum(run.wanted_bytes for run in runs) == sum(size for _, size in pieces)


def test_neighbouring_columns_become_one_request() -> None:
    columns = tuple((start, start + 50_000) for start in range(4, 2_000_000, 50_000))
    (run,) = Ranges(columns).runs(64 << 20)
    assert (run.first, run.stop) == (0, 8)


def test_what_is_needed_first_is_asked_for_first() -> None:
    megabyte = 1 << 20
    ranges = Ranges(((0, 32 * megabyte), (40 * megabyte, 72 * megabyte)))
    runs = ranges.runs(16 * megabyte)
    starts = [run.first * BLOCK_BYTES // megabyte for run in runs]
    assert starts[:6] == [0, 40, 4, 44, 8, 48]


# --- failures -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError("AWS Error SLOW_DOWN during GetObject operation: reduce"), "busy"),
        (OSError("AWS Error UNKNOWN (HTTP status 429) during GetObject operation"), "busy"),
        (OSError("AWS Error INTERNAL_FAILURE (HTTP status 500) during GetObject"), "busy"),
        (OSError("AWS Error NETWORK_CONNECTION: curlCode: 28, Timeout was reached"), "busy"),
        (ConnectionResetError("reset"), "busy"),
        (TimeoutError(), "busy"),
        (FileNotFoundError(2, "Path does not exist 'bucket/none'"), "missing"),
        (OSError("AWS Error NO_SUCH_BUCKET during ListObjectsV2 operation"), "missing"),
        (PermissionError("no"), "denied"),
        (OSError("AWS Error ACCESS_DENIED during HeadObject operation: No response"), "denied"),
        (OSError("AWS Error INVALID_ACCESS_KEY_ID during GetObject operation"), "denied"),
        (OSError("google::cloud::Status(PERMISSION_DENIED: HTTP status code: 403)"), "denied"),
        (IsADirectoryError("folder"), "unusable"),
        (ValueError("no such option"), "unusable"),
        (OSError("something new"), "unknown"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_causes(error: Exception, cause: str) -> None:
    assert cause_of(error) == cause


@given(num_failures=st.integers(1, 10_000), chance=st.floats(0, 1))
def test_waits_grow_to_a_limit_and_are_spread(num_failures: int, chance: float) -> None:
    policy = RetryPolicy(first_delay_s=0.2, max_delay_s=10.0)
    longest = min(0.2 * 2 ** min(num_failures - 1, 30), 10.0)
    assert longest / 2 <= policy.delay_s(num_failures, chance) <= longest


def test_a_version_is_the_stores_own_mark_if_it_has_one() -> None:
    told = {"ETag": '"1a"', "Last-Modified": "2026-01-01", "Content-Length": "3"}
    assert _tag(told) == 'etag="1a"'
    assert _tag({"last_modified": "2026-01-01", "name": "x"}) == "lastmodified=2026-01-01"
    assert _tag({}) == ""


# --- secrets ------------------------------------------------------------------------------


def dataset() -> ParquetDataset:
    return ParquetDataset(
        ["s3://AKID:s3cr3t%2Fof%2Bfarandole@bucket/x", "s3://bucket/y"],
        storage_options={"region": "eu-west-3"},
    )


def test_credentials_of_a_url_are_kept_out_of_sight() -> None:
    paths, options = split_credentials("s3://AKID:s3cr3t%2Fof%2Bfarandole@bucket/x", None)
    assert paths == "s3://bucket/x"
    assert options == {"access_key": "AKID", "secret_key": SECRET}
    assert SECRET not in repr(dataset())
    assert "s3cr3t" not in repr(dataset())
    storage = Storage(options)
    assert SECRET not in repr(storage)
    assert SECRET not in str(vars(dataset()))
    assert storage.redact(f"Bad request for {SECRET}") == "Bad request for ***"


def test_a_data_set_with_credentials_is_not_saved() -> None:
    for made in (dataset(), ParquetDataset("x", filesystem=pafs.S3FileSystem(anonymous=True))):
        with pytest.raises(DataError, match=r"holds credentials.*within the training function"):
            pickle.dumps(made)
    with pytest.raises(DataError, match="holds credentials"):
        copy.deepcopy(dataset())
    plain = ParquetDataset("s3://bucket/x", storage_options={"region": "eu-west-3"})
    assert repr(pickle.loads(pickle.dumps(plain))) == repr(plain)


def test_a_data_set_with_credentials_reaches_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.data.remote.storage.get_spawning_popen", lambda: object())
    again = pickle.loads(pickle.dumps(dataset()))
    assert again._storage.options["secret_key"] == SECRET


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"storage_options": {"num_requests": 0}}, "storage_options.num_requests"),
        ({"storage_options": {"num_requests": 2.5}}, "storage_options.num_requests"),
        ({"storage_options": {"deadline_s": 0}}, "storage_options.deadline_s"),
        ({"cache_bytes": 1 << 20}, "cache_bytes"),
        (
            {"storage_options": {"region": "x"}, "filesystem": pafs.LocalFileSystem()},
            "storage_options",
        ),
    ],
)
def test_wrong_options_are_refused_at_once(given: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParquetDataset("s3://bucket/x", **given)
    assert [problem.key for problem in caught.value.problems] == [key]
