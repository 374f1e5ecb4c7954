"""Blocks on the local disk: whole, and within a limit."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from farandole.data.remote.diskcache import DiskCache
from farandole.data.remote.ranges import BLOCK_BYTES
from farandole.data.remote.sources import Version

VERSION = Version(10 * BLOCK_BYTES, 'etag="1"')
BLOCK = BLOCK_BYTES + 12


def content(number: int) -> bytes:
    return bytes([number]) * BLOCK_BYTES


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "usage"]


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def test_blocks_come_back_by_address_and_version(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", 1 << 30)
    key = cache.key("s3://bucket/x", VERSION)
    cache.put(key, 3, content(1) + content(2) + b"end")
    assert [bytes(cache.get(key, block) or b"") for block in (2, 3, 4, 5)] == [
        b"",
        content(1),
        content(2),
        b"end",
    ]
    others = [
        cache.key("s3://bucket/y", VERSION),
        cache.key("s3://bucket/x", Version(VERSION.size_bytes, 'etag="2"')),
        cache.key("s3://bucket/x", Version(VERSION.size_bytes + 1, VERSION.tag)),
    ]
    assert all(cache.get(other, 3) is None for other in others)
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "header"])
def test_a_damaged_block_is_not_there(tmp_path: Path, damage: str) -> None:
    cache = DiskCache(tmp_path, 1 << 30)
    key = cache.key("s3://bucket/x", VERSION)
    cache.put(key, 0, content(1))
    (path,) = files(tmp_path)
    stored = bytearray(path.read_bytes())
    stored[1000] ^= 1
    torn = {"cut": bytes(stored[:-5]), "flip": bytes(stored), "empty": b"", "header": b"FAB1"}
    path.write_bytes(torn[damage])
    assert cache.get(key, 0) is None
    cache.put(key, 0, content(1))
    assert cache.get(key, 0) == content(1)


def test_what_was_used_longest_ago_goes(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 10 * BLOCK)
    key = cache.key("s3://bucket/x", VERSION)
    for block in range(10):
        cache.put(key, block, content(block))
        os.utime(cache._path(key, block), (1000 + block, 1000 + block))
    assert cache.get(key, 0) == content(0)  # now the one used last
    cache.put(key, 10, content(10))
    assert used(tmp_path) <= 10 * BLOCK
    assert cache.get(key, 1) is None
    assert cache.get(key, 0) == content(0)
    assert cache.get(key, 10) == content(10)
    for block in range(11, 200):
        cache.put(key, block, content(block % 256))
        assert used(tmp_path) <= 10 * BLOCK


def test_leftovers_count_and_go_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 4 * BLOCK)
    key = cache.key("s3://bucket/x", VERSION)
    cache.put(key, 0, content(0))
    left = cache._path(key, 0).parent / ".abandoned"
    left.write_bytes(content(7))
    os.utime(left, (1000, 1000))
    young = left.with_name(".being-written")
    young.write_bytes(b"x")
    for block in range(1, 5):
        cache.put(key, block, content(block))
    assert not left.exists()
    assert young.exists()
    assert cache.get(key, 4) == content(4)


def test_a_lost_counter_is_made_anew(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 4 * BLOCK)
    key = cache.key("s3://bucket/x", VERSION)
    for block in range(4):
        cache.put(key, block, content(block))
    (tmp_path / "usage").write_bytes(b"torn")
    for block in range(4, 9):
        cache.put(key, block, content(block))
        assert used(tmp_path) <= 4 * BLOCK


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_told_of_once(
    tmp_path: Path,
    code: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = DiskCache(tmp_path, 1 << 30)
    key = cache.key("s3://bucket/x", VERSION)
    cache.put(key, 0, content(0))

    def full(self: Path, target: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "replace", full)
    with caplog.at_level(logging.WARNING, "farandole.data"):
        for block in range(1, 5):
            cache.put(key, block, content(block))
    assert [record.getMessage() for record in caplog.records] == [caplog.messages[0]]
    assert "going on without" in caplog.messages[0]
    assert cache.get(key, 0) == content(0)
    assert len(files(tmp_path)) == 1


def test_a_folder_that_cannot_be_made_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = DiskCache(tmp_path / "file" / "cache", 1 << 30)
    key = cache.key("s3://bucket/x", VERSION)
    cache.put(key, 0, content(0))
    assert cache.get(key, 0) is None
    assert len(caplog.messages) == 1
