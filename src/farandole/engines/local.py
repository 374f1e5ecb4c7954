"""Workers as processes of this machine."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path

from farandole import topology
from farandole.engines.lifeline import Lifeline
from farandole.errors import UsageError
from farandole.protocols import WorkerEnd, WorkerSpec

logger = logging.getLogger(__name__)

_GONE_WITHIN_S = 10.0
"""Time that killed processes have to vanish; only one stuck in the kernel takes longer."""


class LocalEngine:
    """Starts each worker as a process group of its own, with its own log file.

    Standard output and error are appended to the log as raw bytes; standard input is empty. The
    working directory and the environment are this process's, the latter with the worker's own
    variables added. When a worker ends, its children are killed; when this process ends in
    whatever way, all workers and their children are killed by the kernel. Only a child that
    has made a session of its own escapes.

    All methods may be called from any thread.
    """

    name = "local"

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._ends: queue.SimpleQueue[WorkerEnd] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    def available_cores(self) -> int:
        """Return the number of cores that this process, and so its workers, may use."""
        return topology.available_cores()

    def start(self, worker: WorkerSpec) -> None:
        """Start one worker. Returns once it runs.

        Raises
        ------
        OSError
            If its log cannot be opened, its command cannot be executed, or it runs already.
        """
        with self._lock:
            if self._closed:
                raise UsageError(
                    problem="the engine is closed", remedy="make another one to start workers"
                )
            before = self._workers.get(worker.worker_id)
            if before is not None and before.running:
                raise OSError(errno.EEXIST, f"worker {worker.worker_id} runs already")
            self._workers[worker.worker_id] = _Worker(worker, self._ends)

    def wait(self, timeout: timedelta) -> list[WorkerEnd]:
        """Block until a worker ends or the time is over; return the ends, in order, once each."""
        ends: list[WorkerEnd] = []
        with contextlib.suppress(queue.Empty):
            ends.append(self._ends.get(timeout=max(0.0, timeout.total_seconds())))
            while True:
                ends.append(self._ends.get_nowait())
        return ends

    def terminate(self, worker_id: int) -> None:
        """Send SIGTERM to the worker, not to its children. Nothing happens if it has ended."""
        self._workers[worker_id].terminate()

    def kill(self, worker_id: int) -> None:
        """Send SIGKILL to the worker and its children. Nothing happens if it has ended."""
        self._workers[worker_id].kill()

    def close(self) -> None:
        """Kill whatever still runs. Blocks until all processes and threads are gone."""
        with self._lock:
            self._closed = True
        deadline = time.monotonic() + _GONE_WITHIN_S
        for worker in self._workers.values():
            worker.kill()
        for worker in self._workers.values():
            worker.join(deadline)


class _Worker:
    """One process group, and a thread that blocks until its leader ends."""

    def __init__(self, spec: WorkerSpec, ends: queue.SimpleQueue[WorkerEnd]) -> None:
        self._worker_id = spec.worker_id
        self._ends = ends
        self._lock = threading.Lock()
        self.running = True
        self._lifeline = Lifeline()
        try:
            self._process = _spawn(spec, self._lifeline)
        except (OSError, ValueError) as error:
            self._lifeline.close()
            raise _start_error(spec, error) from error
        finally:
            self._lifeline.release_inherited()
        self._thread = threading.Thread(
            target=self._watch, name=f"farandole-worker-{spec.worker_id}", daemon=True
        )
        self._thread.start()

    def terminate(self) -> None:
        with self._lock:
            if self.running:
                os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        with self._lock:
            if self.running:
                os.killpg(self._process.pid, signal.SIGKILL)

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning(
                "worker %d (pid %d) was killed and does not end: it hangs in the kernel",
                self._worker_id,
                self._process.pid,
            )

    def _watch(self) -> None:
        pid = self._process.pid
        exit_code, signal_number = _wait_for_end(pid)
        with self._lock:
            if (exit_code, signal_number) != (None, None):
                os.killpg(pid, signal.SIGKILL)  # before its number is free for others
            self._process.wait()
            self.running = False
        self._lifeline.close()
        self._ends.put(WorkerEnd(self._worker_id, exit_code, signal_number, time.time()))
        _wait_for_group(pid)


def _spawn(spec: WorkerSpec, lifeline: Lifeline) -> subprocess.Popen[bytes]:
    if not spec.argv:
        raise ValueError("its command is empty")
    spec.log_path.parent.mkdir(parents=True, exist_ok=True)
    with spec.log_path.open("ab", buffering=0) as log:
        process = subprocess.Popen(
            spec.argv,
            # Inherited as by any child: nothing here depends on what it holds.
            env={**os.environ, "PYTHONUNBUFFERED": "1", **spec.env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lifeline.inherited_fd,),
        )
    try:
        lifeline.tie(process.pid)
    except OSError:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return process


def _start_error(spec: WorkerSpec, error: OSError | ValueError) -> OSError:
    """Return an OSError of the same kind that says which worker could not be started."""
    text = f"worker {spec.worker_id} cannot be started"
    if isinstance(error, OSError):
        return OSError(error.errno, f"{text}: {error.strerror}", error.filename)
    return OSError(errno.EINVAL, f"{text}: {error}")


def _wait_for_end(pid: int) -> tuple[int | None, int | None]:
    """Block until a child ends, without reaping it; return its exit code or its signal.

    Neither is known if something else in this process has reaped it.
    """
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return None, None
    if end is None:
        return None, None
    return (end.si_status, None) if end.si_code == os.CLD_EXITED else (None, end.si_status)


def _wait_for_group(process_group: int) -> None:
    """Block until the killed children of a worker are gone, or for one second."""
    deadline = time.monotonic() + 1.0
    while _group_runs(process_group) and time.monotonic() < deadline:
        time.sleep(0.005)


def _group_runs(process_group: int) -> bool:
    """Return whether a process of the group is left that is more than a zombie.

    Orphans are reaped by init, which takes its time in some containers; they hold nothing.
    """
    try:
        os.killpg(process_group, 0)
    except ProcessLookupError:
        return False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _parent, group = path.read_text().rpartition(")")[2].split()[:3]
            if int(group) == process_group and state != "Z":
                return True
    return False
