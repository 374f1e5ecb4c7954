"""Conformance suite of `farandole.protocols.Tracker`.

An adapter's test gives a `TrackerHarness` and runs every check::

    @pytest.mark.parametrize("check", TRACKER_CHECKS, ids=lambda check: check.__name__)
    def test_conformance(check, harness, tmp_path):
        check(harness, tmp_path)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from farandole.protocols import MetricPoint, Tracker

JOB_TAG = "farandole.job"


@dataclass(frozen=True)
class RecordedRun:
    """A run as read back from where a tracker has recorded it."""

    status: str
    """`running`, `finished`, `failed` or `killed`."""
    params: Mapping[str, str]
    tags: Mapping[str, str]
    metrics: Mapping[str, list[tuple[int, float]]]
    """By key, the steps and values in order of steps."""
    artifacts: frozenset[str]
    """Paths of the files."""


class TrackerHarness(Protocol):
    """What the suite needs of an adapter's test."""

    def make(self) -> Tracker:
        """Return a new tracker object, always for the same place of record."""
        ...

    def read(self, run_id: str) -> RecordedRun:
        """Read a run back."""
        ...

    def num_runs(self) -> int:
        """Return how many runs there are."""
        ...


def _insist(call: Callable[[], None]) -> None:
    """Call as a job does: a slow server may miss a deadline, and is tried again."""
    for _ in range(2):
        with contextlib.suppress(Exception):
            return call()
    return call()


def _start(tracker: Tracker, job: str, run_id: str | None = None) -> str:
    return tracker.start(run_name=f"run of {job}", run_id=run_id, tags={JOB_TAG: job})


def check_makes_one_run(harness: TrackerHarness, folder: Path) -> None:
    """Starting makes one running run, with its tags, and making the object none."""
    before = harness.num_runs()
    tracker = harness.make()
    assert isinstance(tracker, Tracker)
    assert harness.num_runs() == before
    run_id = _start(tracker, "one")
    assert harness.num_runs() == before + 1
    run = harness.read(run_id)
    assert run.status == "running"
    assert run.tags[JOB_TAG] == "one"


def check_unanswered_start(harness: TrackerHarness, folder: Path) -> None:
    """A start whose answer was lost, done again by another process, makes no second run."""
    first = _start(harness.make(), "unanswered")
    before = harness.num_runs()
    assert _start(harness.make(), "unanswered") == first
    assert harness.num_runs() == before


def check_status(harness: TrackerHarness, folder: Path) -> None:
    """A run ends as told, may be told twice, and can be opened again."""
    for status in ("finished", "failed", "killed"):
        tracker = harness.make()
        run_id = _start(tracker, f"ends {status}")
        tracker.finish(status)
        tracker.finish(status)
        assert harness.read(run_id).status == status
    before = harness.num_runs()
    again = harness.make()
    assert _start(again, "ends killed", run_id) == run_id
    assert harness.read(run_id).status == "running"
    again.finish("finished")
    assert harness.read(run_id).status == "finished"
    assert harness.num_runs() == before


def check_params(harness: TrackerHarness, folder: Path) -> None:
    """Many, long and changed parameters are no errors, in a resumed run either."""
    tracker = harness.make()
    run_id = _start(tracker, "params")
    params = {f"params.p{i}": str(i) for i in range(250)} | {"long": "x" * 20_000, "empty": ""}
    tracker.log_params(params)
    tracker.log_params(params)
    tracker.log_params({"params.p0": "changed", "params.new": "1"})
    read = harness.read(run_id).params
    assert read["params.p249"] == "249"
    assert read["params.new"] == "1"
    assert read["long"].startswith("xxx")


def check_metrics_once(harness: TrackerHarness, folder: Path) -> None:
    """A batch larger than any limit arrives whole; sent again, it is there once."""
    tracker = harness.make()
    run_id = _start(tracker, "metrics")
    points = [
        MetricPoint(key=key, value=step / 3, step=step, time=1.7e9 + step / 7)
        for step in range(600)
        for key in ("loss", "holdout/auc")
    ]
    _insist(lambda: tracker.log_metrics(points))
    _insist(lambda: tracker.log_metrics(points))
    tracker.log_metrics([])
    read = harness.read(run_id).metrics
    assert read["loss"] == [(step, step / 3) for step in range(600)]
    assert read["holdout/auc"] == read["loss"]


def check_metrics_not_finite(harness: TrackerHarness, folder: Path) -> None:
    """NaN and infinities are recorded, the latter perhaps as the largest numbers."""
    tracker = harness.make()
    run_id = _start(tracker, "not finite")
    values = [math.nan, math.inf, -math.inf, 1e-320]
    tracker.log_metrics(
        [MetricPoint(key="loss", value=v, step=i, time=1.7e9) for i, v in enumerate(values)]
    )
    read = [value for _, value in harness.read(run_id).metrics["loss"]]
    assert math.isnan(read[0])
    assert read[1] > 1e308
    assert read[2] < -1e308
    assert read[3] == 1e-320


def check_metric_names(harness: TrackerHarness, folder: Path) -> None:
    """Any name that a user may give is recorded, under itself or one alike."""
    tracker = harness.make()
    run_id = _start(tracker, "names")
    names = ["loss", "a/b.c-d e", "f1@0.5", "größe", "x" * 400, "recall (late)", "a//c", "../up"]
    tracker.log_metrics([MetricPoint(key=name, value=1.0, step=0, time=1.7e9) for name in names])
    assert len(harness.read(run_id).metrics) == len(names)


def check_artifacts(harness: TrackerHarness, folder: Path) -> None:
    """Files and folders are recorded under a folder or none, and may be recorded again."""
    tracker = harness.make()
    run_id = _start(tracker, "artifacts")
    tree = folder / "tree"
    (tree / "inner").mkdir(parents=True)
    (tree / "inner" / "deep.txt").write_text("deep")
    (folder / "flat.txt").write_text("flat")
    tracker.log_artifact(folder / "flat.txt", "")
    tracker.log_artifact(folder / "flat.txt", "report")
    tracker.log_artifact(tree, "report")
    tracker.log_artifact(tree, "report")
    read = harness.read(run_id).artifacts
    assert {"flat.txt", "report/flat.txt", "report/inner/deep.txt"} <= read


TRACKER_CHECKS: tuple[Callable[[TrackerHarness, Path], None], ...] = (
    check_makes_one_run,
    check_unanswered_start,
    check_status,
    check_params,
    check_metrics_once,
    check_metrics_not_finite,
    check_metric_names,
    check_artifacts,
)
