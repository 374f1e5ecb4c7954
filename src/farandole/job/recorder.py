"""What a worker writes into the run directory: rank 0 records, the others keep silent."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from farandole.job.metrics import MetricsWriter
from farandole.job.rundir import RunDir

_log = logging.getLogger(__name__)


class Recorder:
    """Events and metrics of one worker.

    Parameters
    ----------
    run : RunDir
    active : bool
        Whether this worker records: true of rank 0 only.
    """

    def __init__(self, run: RunDir, *, active: bool) -> None:
        self.run = run
        self.active = active
        self._writer = MetricsWriter(run.metrics_file) if active else None

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event."""
        if self.active:
            self.run.event(kind, **fields)

    def warn(self, message: str) -> None:
        """Append a warning to the events, and to this worker's log."""
        if self.active:
            _log.warning("%s", message)
            self.run.event("warning", message=message)

    def metrics(self, kind: str, step: int, values: Mapping[str, float], **fields: Any) -> None:
        """Queue a line of metrics. Does not block.

        A step has one even if nothing was logged in it: progress is told by them.
        """
        if self._writer is not None and (values or kind == "step"):
            self._writer.write(kind, step, values, **fields)

    def flush(self) -> None:
        """Block until the metrics so far are on the disk. Any thread may call it."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what is left. Blocks."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
