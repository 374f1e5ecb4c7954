"""The metrics of steps, on their way from all workers into the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from farandole.job.metrics import StepMetrics, combine

if TYPE_CHECKING:
    from farandole.job.recorder import Recorder


class StepRecords:
    """Collects what this worker logs in a step, and puts all workers' parts together.

    A worker's part of a step travels with the exchange of the next one, so that it costs no
    message of its own; until then it is pending.

    Parameters
    ----------
    recorder : Recorder
    num_leaves : int
        How many parts of a step are added in the tree.

    Attributes
    ----------
    current : StepMetrics
        Of the step at hand.
    latest : dict of str to float
        The last value of everything logged.
    """

    def __init__(self, recorder: Recorder, num_leaves: int) -> None:
        self.current = StepMetrics()
        self.latest: dict[str, float] = {}
        self._recorder = recorder
        self._num_leaves = num_leaves
        self._about: dict[str, Any] | None = None
        self._pending: dict[str, Any] | None = None

    def end_step(self, step: int, *, epoch: int, rows: int) -> None:
        """Begin a new step; what was logged in this one is pending."""
        self._about = {"step": step, "epoch": epoch, "rows": rows}
        self._pending = self.current.summary()
        self.current = StepMetrics()

    @property
    def pending(self) -> dict[str, Any] | None:
        """What this worker logged in the step before, as JSON-able data; None if there is none."""
        return self._pending

    def record(self, parts: list[dict[str, Any]]) -> None:
        """Write the pending step by all workers' parts, in rank order."""
        assert self._about is not None
        about, self._about, self._pending = self._about, None, None
        values = combine(parts, self._num_leaves)
        self.latest.update(values)
        self._recorder.metrics("step", about.pop("step"), values, **about)

    def record_alike(self, kind: str, step: int, values: Mapping[str, float], **about: Any) -> None:
        """Write values that are alike on every worker and belong to no loader's step."""
        prefix = f"{about['name']}/" if "name" in about else ""
        self.latest.update({f"{prefix}{name}": value for name, value in values.items()})
        self._recorder.metrics(kind, step, values, **about)
