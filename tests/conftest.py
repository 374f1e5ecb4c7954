"""Rules for all tests: the same examples every time, and no process left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# A failure should be of the change at hand, not of the examples or the load of the day.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

# Inherited by all that the tests start, orphans too.
MARK = "FARANDOLE_TESTS"
os.environ[MARK] = uuid.uuid4().hex
LEAVE_S = 5.0
# Of the standard library, one for the whole test process.
SHARED = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


def started_processes() -> dict[int, str]:
    """Return the living processes that these tests started, as pid and command."""
    found: dict[int, str] = {}
    mark = f"{MARK}={os.environ[MARK]}".encode()
    for entry in Path("/proc").iterdir():
        # A process may end while it is looked at; one without a command line is ending.
        with contextlib.suppress(OSError):
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            command = (entry / "cmdline").read_bytes()
            shared = any(name in command for name in SHARED)
            if command and not shared and mark in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


@pytest.fixture(autouse=True)
def _no_process_left_behind() -> Iterator[None]:
    before = started_processes()
    yield
    deadline = time.monotonic() + LEAVE_S
    while left := {p: c for p, c in started_processes().items() if p not in before}:
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pytest.fail(f"processes were left behind: {left}")
        time.sleep(0.02)


@pytest.fixture(autouse=True, scope="session")
def _caches_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's caches out of the tests, and what the tests cache away from the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
