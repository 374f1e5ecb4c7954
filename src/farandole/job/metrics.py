"""Logged values: averaged over a step's rows in the tree's order, then written by rank 0."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from farandole.errors import UsageError
from farandole.job.rundir import write_errors
from farandole.plan.tree import Node, tree_sum

FLUSH_S = 0.5

# Of one slot and name: the weighted sum of the values, and the sum of the weights.
_Pair = tuple[float, float]


class StepMetrics:
    """Collects what a worker's slots log within one step.

    Values stay tensors until the step is over, so that logging never waits for a device.
    """

    def __init__(self) -> None:
        self._logged: list[tuple[int, float, str, Any]] = []
        self._alike: dict[str, Any] = {}
        self._of_batch: set[str] = set()

    def begin_batch(self) -> None:
        """Note that what is added from now on is of another batch."""
        self._of_batch.clear()

    def add(self, slot: int, weight: float, values: Mapping[str, Any]) -> None:
        """Log means over rows; `weight` is these rows' share of the step."""
        for name, value in values.items():
            if name in self._of_batch:
                raise UsageError(
                    problem=f"{name!r} was logged twice for one batch",
                    remedy="log it once, or give the second value a name of its own",
                )
            self._logged.append((slot, weight, name, to_scalar(name, value)))
            self._of_batch.add(name)

    def set_alike(self, values: Mapping[str, Any]) -> None:
        """Log values of the whole step, alike on every worker."""
        for name, value in values.items():
            self._alike[name] = to_scalar(name, value)

    def summary(self) -> dict[str, Any]:
        """Return this worker's part, as JSON-able data."""
        slots: dict[int, dict[str, _Pair]] = {}
        for slot, weight, name, value in self._logged:
            pairs = slots.setdefault(slot, {})
            done, done_weight = pairs.get(name, (0.0, 0.0))
            pairs[name] = (done + float(value) * weight, done_weight + weight)
        alike = {name: float(value) for name, value in self._alike.items()}
        return {"slots": slots, "alike": alike}


def combine(summaries: list[dict[str, Any]], num_slots: int) -> dict[str, float]:
    """Return the values of a step from all workers' summaries, in rank order.

    Means over rows are added in the tree's order in float64: the same bits for any number of
    workers. A name that was not logged for all batches is averaged over the rows of those for
    which it was.
    """
    by_name: dict[str, dict[int, _Pair]] = {}
    for summary in summaries:
        for slot, pairs in summary["slots"].items():
            for name, pair in pairs.items():
                by_name.setdefault(name, {})[int(slot)] = pair
    values: dict[str, float] = {}
    for name, pairs in by_name.items():
        leaves = [(Node(0, slot), pairs.get(slot)) for slot in range(num_slots)]
        total = tree_sum(leaves, num_slots, _add)
        assert total is not None
        whole = math.isclose(total[1], 1.0, rel_tol=0.0, abs_tol=1e-9)  # up to rounding
        values[name] = total[0] if whole else total[0] / total[1]
    values.update(summaries[0]["alike"])
    return values


def _add(left: _Pair | None, right: _Pair | None) -> _Pair | None:
    if left is None or right is None:
        return right if left is None else left
    return left[0] + right[0], left[1] + right[1]


def to_scalar(name: str, value: Any) -> Any:
    """Return a number or a detached tensor of one element."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UsageError(
                problem=f"{name!r} was logged with shape {tuple(value.shape)}",
                remedy="log one number: its mean over the rows of the batch",
            )
        return value.detach()
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(
            problem=f"{name!r} was logged with a {type(value).__name__}", remedy="log one number"
        ) from None


class MetricsWriter:
    """Appends metrics to a file of JSON lines from a thread of its own, off the step path.

    A line that the file holds already (the same kind, name and step; a resumed job computes
    them again, with the same values) is not written twice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = _mend(path)
        self._lines: list[str] = []
        self._num_queued = 0
        self._num_synced = 0
        self._error: OSError | None = None
        self._wake = threading.Condition()
        self._syncing = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def write(self, kind: str, step: int, values: Mapping[str, float], **fields: Any) -> None:
        """Queue one line. Does not block.

        Raises
        ------
        RunDirectoryError
            An earlier line was not written.
        """
        self._raise_error()
        key = (kind, fields.get("name"), step)
        if key in self._known:
            return
        record = {"kind": kind, "step": step, "time": time.time(), **fields, "values": values}
        with self._wake:
            self._lines.append(json.dumps(record) + "\n")
            self._num_queued += 1

    def flush(self) -> None:
        """Block until all that is queued so far is on the disk. Any thread may call it.

        Raises `RunDirectoryError` if something could not be written.
        """
        with self._wake:
            target = self._num_queued
            if self._num_synced < target:
                self._syncing = True
                self._wake.notify_all()
            self._wake.wait_for(lambda: self._num_synced >= target or self._error is not None)
        self._raise_error()

    def close(self) -> None:
        """Write what is left. Blocks. Raises `RunDirectoryError` if it could not be written."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            with write_errors(self._path.parent):
                raise self._error

    def _run(self) -> None:
        try:
            with self._path.open("ab", buffering=0) as file:
                while True:
                    with self._wake:
                        self._wake.wait_for(lambda: self._syncing or self._closing, FLUSH_S)
                        lines, self._lines, closing = self._lines, [], self._closing
                        syncing, self._syncing = self._syncing, False
                        num_queued = self._num_queued
                    if lines:
                        file.write("".join(lines).encode())
                    if syncing or closing:
                        os.fsync(file.fileno())
                        with self._wake:
                            self._num_synced = num_queued
                            self._wake.notify_all()
                    if closing:
                        return
        except OSError as error:
            with self._wake:
                self._error = error
                self._wake.notify_all()


def _mend(path: Path) -> set[tuple[str, str | None, int]]:
    """Cut a torn last line off; return the keys of the whole ones."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    records = (json.loads(line) for line in whole.splitlines())
    return {(record["kind"], record.get("name"), record["step"]) for record in records}
