"""Small worlds of workers, as threads or processes, that run one function on every rank."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

import torch
import torch.distributed as dist

from farandole.comm.inprocess import InProcessComm
from farandole.comm.network import NetworkComm
from farandole.comm.shared_memory import SharedMemoryComm
from farandole.comm.single import SingleComm
from farandole.protocols import Comm

DEADLINE = timedelta(seconds=60)
"""A world must have ended by then, whatever happens in it."""

_SECRET = b"a secret for tests"


class Worker(Protocol):
    """What a scenario gets on each rank."""

    comm: Comm

    def die(self) -> NoReturn:
        """End at once, without a word to the peers."""
        ...

    def freeze(self) -> NoReturn:
        """Stop to run, with all connections open, until the world ends."""
        ...


Scenario = Callable[..., Any]
"""Called on every rank as ``scenario(worker, *args)``. For processes it must be picklable."""


@dataclass(frozen=True)
class Outcome:
    """How a scenario ended on one rank."""

    how: Literal["returned", "raised", "died", "froze"]
    value: Any = None
    error: BaseException | None = None


class World(Protocol):
    """Runs scenarios."""

    def run(
        self, size: int, scenario: Scenario, *args: Any, timeout: timedelta = DEADLINE
    ) -> list[Outcome]:
        """Run a scenario on `size` ranks; return how it ended on each. Leaves nothing behind.

        `timeout` is the collectives'. Raises TimeoutError if a rank has not ended within
        `DEADLINE`.
        """
        ...


class SoloWorld:
    """A world of `SingleComm`, in the calling thread."""

    def run(
        self, size: int, scenario: Scenario, *args: Any, timeout: timedelta = DEADLINE
    ) -> list[Outcome]:
        """Run a scenario on one rank."""
        if size != 1:
            raise ValueError(f"a world of one cannot have {size} ranks")
        return [_run_on(_Thread(SingleComm(), threading.Event(), []), scenario, args)]


class _DiedError(BaseException):
    """Unwinds a thread that plays dead."""


class _Thread:
    """A rank that is a thread."""

    def __init__(
        self, comm: InProcessComm | SingleComm, over: threading.Event, outcomes: list[Outcome]
    ) -> None:
        self.comm: Comm = comm
        self._inprocess = comm
        self._over = over
        self._outcomes = outcomes

    def die(self) -> NoReturn:
        if isinstance(self._inprocess, InProcessComm):
            self._inprocess.kill()
        raise _DiedError

    def freeze(self) -> NoReturn:
        self._outcomes.append(Outcome("froze"))
        self._over.wait()
        raise _DiedError


class ThreadWorld:
    """Worlds of `InProcessComm`."""

    def run(
        self, size: int, scenario: Scenario, *args: Any, timeout: timedelta = DEADLINE
    ) -> list[Outcome]:
        """Run a scenario on every rank, each in a thread."""
        over = threading.Event()
        outcomes: list[list[Outcome]] = [[] for _ in range(size)]

        def serve(comm: InProcessComm) -> None:
            mine = outcomes[comm.rank]
            mine.append(_run_on(_Thread(comm, over, mine), scenario, args))

        threads = [
            threading.Thread(target=serve, args=(comm,), daemon=True)
            for comm in InProcessComm.world(size, timeout=timeout)
        ]
        for thread in threads:
            thread.start()
        try:
            deadline = time.monotonic() + DEADLINE.total_seconds()
            for rank, thread in enumerate(threads):
                while not outcomes[rank]:
                    thread.join(0.005)
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"rank {rank} has not ended")
        finally:
            over.set()
            for thread in threads:
                thread.join(DEADLINE.total_seconds())
        return [of_rank[0] for of_rank in outcomes]


def _run_on(worker: Worker, scenario: Scenario, args: Sequence[Any]) -> Outcome:
    try:
        value = scenario(worker, *args)
    except _DiedError:
        return Outcome("died")
    except Exception as error:
        outcome = Outcome("raised", error=error)
    else:
        outcome = Outcome("returned", value=value)
    worker.comm.close()
    return outcome


# --- processes ----------------------------------------------------------------------------

Connect = Callable[[int, int, Path, timedelta], Comm]
"""Makes a rank's comm, from (rank, size, a directory that all ranks share, timeout)."""


class ProcessWorld:
    """Worlds of real processes.

    Parameters
    ----------
    connect : callable
        Picklable; called on every rank.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        # Forked from a server that has torch already: starting a process takes milliseconds.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])

    def run(
        self, size: int, scenario: Scenario, *args: Any, timeout: timedelta = DEADLINE
    ) -> list[Outcome]:
        """Run a scenario on every rank, each in a process."""
        pipes = [self._context.Pipe(duplex=False) for _ in range(size)]
        with tempfile.TemporaryDirectory(prefix="world-") as directory:
            job = (self._connect, size, Path(directory), timeout, scenario, args)
            processes = [
                self._context.Process(target=_serve, args=(rank, *job, sender), daemon=True)
                for rank, (_, sender) in enumerate(pipes)
            ]
            try:
                for process, (_, sender) in zip(processes, pipes, strict=True):
                    process.start()
                    sender.close()
                outcomes = _receive_all([receiver for receiver, _ in pipes])
                for process, outcome in zip(processes, outcomes, strict=True):
                    if outcome.how != "froze":
                        process.join(DEADLINE.total_seconds())
            finally:
                for process, (receiver, _) in zip(processes, pipes, strict=True):
                    process.kill()
                    process.join()
                    process.close()
                    receiver.close()
        return outcomes


class _Process:
    """A rank that is a process."""

    def __init__(self, comm: Comm, sender: Connection) -> None:
        self.comm = comm
        self._sender = sender

    def die(self) -> NoReturn:
        self._sender.send(Outcome("died"))  # the pipe may stay open in a forked child
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")

    def freeze(self) -> NoReturn:
        self._sender.send(Outcome("froze"))
        os.kill(os.getpid(), signal.SIGSTOP)
        raise AssertionError("was continued")


def _serve(
    rank: int,
    connect: Connect,
    size: int,
    directory: Path,
    timeout: timedelta,
    scenario: Scenario,
    args: Sequence[Any],
    sender: Connection,
) -> None:
    torch.set_num_threads(1)
    try:
        comm = connect(rank, size, directory, timeout)
    except Exception as error:
        sender.send(Outcome("raised", error=error))
        return
    sender.send(_run_on(_Process(comm, sender), scenario, args))


def _receive_all(receivers: Sequence[Connection]) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + DEADLINE.total_seconds()
    while len(outcomes) < len(receivers):
        waiting = [r for rank, r in enumerate(receivers) if rank not in outcomes]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = [rank for rank in range(len(receivers)) if rank not in outcomes]
            raise TimeoutError(f"ranks {silent} have not ended; others: {outcomes}")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            try:
                outcome = receiver.recv()
            except EOFError:
                outcome = Outcome("died")
            outcomes[receivers.index(receiver)] = outcome
    return [outcomes[rank] for rank in range(len(receivers))]


def connect_shared_memory(rank: int, size: int, directory: Path, timeout: timedelta) -> Comm:
    """Connect through shared memory; the addresses are exchanged as files."""
    listener = SharedMemoryComm.listen(directory)
    name = directory / f"address-{rank}"
    name.with_suffix(".tmp").write_text(listener.address)
    name.with_suffix(".tmp").rename(name)
    addresses = [_read_when_there(directory / f"address-{peer}") for peer in range(size)]
    return SharedMemoryComm.connect(
        listener, rank=rank, addresses=addresses, secret=_SECRET, generation=1, timeout=timeout
    )


def connect_gloo(rank: int, size: int, directory: Path, timeout: timedelta) -> Comm:
    """Connect over Gloo on the loopback interface."""
    store = dist.FileStore(str(directory / "store"), size)  # pyright: ignore[reportPrivateImportUsage]
    return NetworkComm.connect(store, rank=rank, world_size=size, generation=1, timeout=timeout)


def _read_when_there(path: Path) -> str:
    deadline = time.monotonic() + DEADLINE.total_seconds()
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            return path.read_text()
        time.sleep(0.005)
    raise TimeoutError(f"{path} has not appeared")
