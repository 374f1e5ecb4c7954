"""Reading the workers' logs of a job."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from farandole.errors import RunDirectoryError
from farandole.job.rundir import RunDir

POLL_S = 0.2
BLOCK_BYTES = 1 << 16


def log_lines(
    run: RunDir, *, worker_id: int | None = None, num_lines: int = 50, follow: bool = False
) -> Iterator[tuple[int, str]]:
    """Yield (worker id, line) of the last lines of each worker's log, then of new ones.

    Parameters
    ----------
    run : RunDir
        The job's folder.
    worker_id : int, optional
        Only this worker's log.
    num_lines : int
        How many of the last lines of each log.
    follow : bool
        Go on with what is written until the job has ended. Blocks between lines.

    Raises
    ------
    RunDirectoryError
        There is no such log.
    """
    if not follow:
        _check(run, worker_id)
    places: dict[Path, int] = {}
    while True:
        # Looked up first, so that nothing written before the end is missed.
        ended = not follow or not run.read_state().active
        for path in _logs(run, worker_id):
            if path not in places:
                places[path] = _start_of_last(path, num_lines)
            lines, places[path] = _whole_lines(path, places[path], also_torn=ended)
            for line in lines:
                yield _worker_id(path), line
        if ended:
            return
        time.sleep(POLL_S)


def _check(run: RunDir, worker_id: int | None) -> None:
    if _logs(run, worker_id):
        return
    known = ", ".join(str(_worker_id(path)) for path in _logs(run, None))
    problem = "has no log" if worker_id is None else f"has no log of worker {worker_id}"
    remedy = f"there are logs of workers {known}" if known else "no worker has started yet"
    raise RunDirectoryError(path=str(run.path), problem=problem, remedy=remedy)


def _logs(run: RunDir, worker_id: int | None) -> list[Path]:
    if worker_id is not None:
        path = run.worker_log(worker_id)
        return [path] if path.is_file() else []
    return sorted(run.worker_log(0).parent.glob("worker-*.log"), key=_worker_id)


def _worker_id(path: Path) -> int:
    digits = path.stem.removeprefix("worker-")
    return int(digits) if digits.isdigit() else -1


def _start_of_last(path: Path, num_lines: int) -> int:
    """Return the offset at which the last lines of a file begin, reading only its end."""
    with path.open("rb") as file:
        offset = file.seek(0, os.SEEK_END)
        tail = b""
        while offset > 0 and tail.count(b"\n") <= num_lines:
            step = min(BLOCK_BYTES, offset)
            offset -= step
            file.seek(offset)
            tail = file.read(step) + tail
    lines = tail.splitlines(keepends=True)
    kept = lines[max(len(lines) - num_lines, 0) :]
    return offset + len(tail) - sum(map(len, kept))


def _whole_lines(path: Path, start: int, *, also_torn: bool) -> tuple[list[str], int]:
    """Return the lines from an offset on and the offset after them."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    if not also_torn:
        data = data[: data.rfind(b"\n") + 1]
    return data.decode(errors="replace").splitlines(), start + len(data)
