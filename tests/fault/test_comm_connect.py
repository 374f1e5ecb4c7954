"""Connecting workers on one host: strangers, wrong secrets, ranks that never come."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole import topology
from farandole.comm.rendezvous import Listener
from farandole.comm.shared_memory import SharedMemoryComm
from farandole.config import JobConfig
from farandole.errors import AuthenticationError, MembershipError, PeerLostError, UsageError
from farandole.job import runtime
from farandole.job.rundir import RunDir
from farandole.job.runtime import Place
from farandole.membership.coordinator import Coordinator
from farandole.protocols import Bucket, Comm, Reducer
from farandole.testing.worlds import (
    Connect,
    ProcessWorld,
    Worker,
    connect_gloo,
    connect_shared_memory,
)

SECRET = b"the job's"
LONG = timedelta(seconds=60)


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[list[Listener]]:
    made = [SharedMemoryComm.listen(tmp_path) for _ in range(3)]
    yield made
    for listener in made:
        listener.close()
    assert list(tmp_path.iterdir()) == []


def connect(listeners: list[Listener], rank: int, **changes: Any) -> SharedMemoryComm:
    options: dict[str, Any] = {"secret": SECRET, "generation": 3, "timeout": LONG, **changes}
    addresses = [listener.address for listener in listeners]
    return SharedMemoryComm.connect(listeners[rank], rank=rank, addresses=addresses, **options)


class Background(threading.Thread):
    """Runs a function; keeps what it returns or raises."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self._result: Any = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._function()
        except Exception as error:
            self._error = error

    def result(self) -> Any:
        self.join(30)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
        return self._result


def close_all(*comms: SharedMemoryComm) -> None:
    for comm in comms:
        comm.close()


def test_sockets_are_private_and_removed(listeners: list[Listener], tmp_path: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    low = Background(lambda: connect(listeners[:2], 0))
    high = connect(listeners[:2], 1)
    comm = low.result()
    assert [Path(listener.address).exists() for listener in listeners] == [False, False, True]
    assert isinstance(comm, Comm)
    close_all(comm, high)


def test_a_deep_directory_is_no_obstacle(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    listeners = [SharedMemoryComm.listen(deep) for _ in range(2)]
    assert len(listeners[0].address) > 200
    low = Background(lambda: connect(listeners, 0))
    close_all(connect(listeners, 1), low.result())


@pytest.mark.parametrize("change", [{"secret": b"another"}, {"generation": 2}])
def test_a_wrong_secret_or_generation_is_refused_on_both_sides(
    listeners: list[Listener], change: dict[str, Any]
) -> None:
    low = Background(lambda: connect(listeners[:2], 0, timeout=timedelta(seconds=1)))
    with pytest.raises(AuthenticationError, match="secret"):
        connect(listeners[:2], 1, **change)
    with pytest.raises(PeerLostError, match="has not connected within 1 s") as raised:
        low.result()
    assert raised.value.peer == 1


@pytest.mark.parametrize(
    "words", [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"fdl1\x01\0\0\0" + bytes(64)]
)
def test_a_stranger_does_not_keep_the_others_out(listeners: list[Listener], words: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(listeners[0].address)
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
        low = Background(lambda: connect(listeners[:2], 0))
        close_all(connect(listeners[:2], 1), low.result())


def test_a_rank_that_is_gone_is_named(listeners: list[Listener]) -> None:
    listeners[0].close()
    with pytest.raises(PeerLostError) as raised:
        connect(listeners[:2], 1)
    assert (raised.value.rank, raised.value.peer, raised.value.during) == (1, 0, "connect")


def test_connecting_can_be_aborted(listeners: list[Listener]) -> None:
    accepting = Background(lambda: connect(listeners, 0))
    calling = Background(lambda: connect([listeners[2], listeners[1]], 1))  # it never answers
    for listener in listeners[:2]:
        listener.abort()
    for waiting in (accepting, calling):
        with pytest.raises(PeerLostError, match="aborted"):
            waiting.result()


JOIN_ONLY = """
import sys, time
from datetime import timedelta
from farandole.membership.client import join
from farandole.plan.quorum import Member
address, host, endpoint = sys.argv[1:]
me = Member(worker_id=int(sys.stdin.readline()), host=host, pid=1, endpoint=endpoint)
membership = join(address, b"the job's", me, timedelta(seconds=60))
print("joined", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("end", ["a worker", "the coordinator"])
@pytest.mark.parametrize("victim", range(3))
def test_whoever_connects_hears_of_an_end(victim: int, end: str, tmp_path: Path) -> None:
    run = RunDir.create(JobConfig(target="train.py", run_dir=tmp_path / "job"))
    coordinator = Coordinator(SECRET, expected=3)
    coordinator.start()

    def connecting(worker_id: int) -> None:
        with ExitStack() as stack:
            place = Place(run.path, worker_id, coordinator.address, SECRET)
            runtime._connect(place, run_config, stack)

    run_config = JobConfig(target="train.py", transport="shared_memory", run_dir=run.path)
    # A socket at which calls are taken and never answered.
    silent = SharedMemoryComm.listen(tmp_path)
    arguments = [coordinator.address, topology.host_id(), silent.address]
    with subprocess.Popen(
        [sys.executable, "-c", JOIN_ONLY, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{victim}\n")
            process.stdin.flush()
            others = [Background(lambda w=w: connecting(w)) for w in range(3) if w != victim]
            assert process.stdout.readline() == "joined\n"
            if end == "a worker":
                process.kill()
            else:
                coordinator.close()
            for other in others:
                # One that has given up already may be what the other notices, and one that has
                # not heard its rank yet may notice the coordinator.
                with pytest.raises((PeerLostError, MembershipError)):
                    other.result()
        finally:
            process.kill()
            coordinator.close()
            silent.close()


def test_memory_must_be_the_host_s(listeners: list[Listener]) -> None:
    low = Background(lambda: connect(listeners[:2], 0))
    comm = connect(listeners[:2], 1)
    with pytest.raises(UsageError, match="cannot hold a bucket on meta"):
        comm.reducer([Bucket(0, 1, torch.float32, torch.device("meta"))], 2)
    close_all(comm, low.result())


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_is_left_open(tmp_path: Path) -> None:
    before = num_open_files()
    listeners = [SharedMemoryComm.listen(tmp_path) for _ in range(2)]
    low = Background(lambda: use(connect(listeners, 0)))
    use(connect(listeners, 1))
    low.result()
    assert num_open_files() == before
    assert list(tmp_path.iterdir()) == []


def use(comm: SharedMemoryComm) -> None:
    reducer = comm.reducer([Bucket(0, 1000, torch.float32, torch.device("cpu"))], 2)
    assert isinstance(reducer, Reducer)
    reducer.ready(0)
    reducer.wait()
    comm.broadcast("x", [torch.ones(5)])
    reducer.close()
    comm.close()


def _die_with_a_child(worker: Worker, directory: Path) -> PeerLostError:
    """Die while a forked child, as a loader's, lives on with copies of all descriptors."""
    comm = worker.comm
    comm.all_gather("start", b"")
    if comm.rank == 1:
        if os.fork() == 0:
            try:
                wait_for(lambda: (directory / "over").exists())
                (directory / "child-was-there").touch()
            finally:
                os._exit(0)
        worker.die()
    with pytest.raises(PeerLostError) as raised:
        comm.all_gather("never", b"")
    return raised.value


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("connect", [connect_shared_memory, connect_gloo])
def test_a_forked_child_does_not_hide_a_death(connect: Connect, tmp_path: Path) -> None:
    outcomes = ProcessWorld(connect).run(2, _die_with_a_child, tmp_path)
    assert isinstance(outcomes[0].value, PeerLostError)
    (tmp_path / "over").touch()
    wait_for((tmp_path / "child-was-there").exists)
