import json
import math
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from farandole.config import JobConfig, TrackerConfig
from farandole.errors import ConfigError, MissingExtraError, RunDirectoryError, UnknownNameError
from farandole.job import tracking
from farandole.job.hostmetrics import CPU, JOB_MEMORY, MEMORY, MEMORY_SHARE, HostSampler
from farandole.job.rundir import RunDir, RunState, append_line
from farandole.job.spool import Spool, flat_params, points_of, read_place, read_records, sending
from farandole.job.track import Attempts, follow
from farandole.job.tracking import TrackingProcess, check_tracker, final_status, redact
from farandole.protocols import MetricPoint, Tracker


class Recorder:
    """A tracker that keeps what it is sent, and fails as often as it is told to."""

    name = "recorder"

    def __init__(self) -> None:
        self.runs: dict[str, str] = {}
        self.batches: list[list[MetricPoint]] = []
        self.params: list[dict[str, str]] = []
        self.artifacts: list[str] = []
        self.models: list[Path] = []
        self.failures = 0

    def start(self, *, run_name: str, run_id: str | None, tags: Mapping[str, str]) -> str:
        self._may_fail()
        run_id = run_id or f"run-{len(self.runs)}"
        self.runs[run_id] = "running"
        return run_id

    def log_params(self, params: Mapping[str, str]) -> None:
        self._may_fail()
        self.params.append(dict(params))

    def log_metrics(self, points: Sequence[MetricPoint]) -> None:
        self._may_fail()
        self.batches.append(list(points))

    def log_artifact(self, path: Path, folder: str) -> None:
        self._may_fail()
        self.artifacts.append(f"{folder}/{path.name}")

    def log_model(self, model_dir: Path) -> None:
        self._may_fail()
        self.models.append(model_dir)

    def finish(self, status: str) -> None:
        self._may_fail()
        self.runs[next(reversed(self.runs))] = status

    def _may_fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no answer")

    @property
    def sent(self) -> list[tuple[str, int, float]]:
        return [(p.key, p.step, p.value) for batch in self.batches for p in batch]


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    return JobConfig(
        target="train.py",
        params={"lr": 0.1, "deep": {"a": 1}},
        runs=tmp_path,
        tracker=TrackerConfig(name="mlflow", uri="http://me:pa%2Fss@host:1/x"),
    )


@pytest.fixture
def run(config: JobConfig) -> RunDir:
    run = RunDir.create(config)
    run.write_config(config)
    run.write_state(RunState(status="running", workers=2))
    return run


def step(run: RunDir, number: int, **values: float) -> None:
    record = {"kind": "step", "step": number, "epoch": 0, "time": 1.0 + number, "rows": 8}
    append_line(run.metrics_file, record | {"values": values})


def spool_of(run: RunDir, tracker: Tracker, config: JobConfig) -> Spool:
    spool = Spool(run, tracker, config)
    spool.open()
    return spool


def test_the_recorder_is_a_tracker():
    assert isinstance(Recorder(), Tracker)


def test_metrics_are_sent_once_as_they_appear(run: RunDir, config: JobConfig):
    tracker = Recorder()
    spool = spool_of(run, tracker, config)
    spool.send_metrics()
    step(run, 0, loss=1.0, acc=0.5)
    spool.send_metrics()
    spool.send_metrics()
    step(run, 1, loss=0.5)
    spool.send_metrics()
    assert tracker.sent == [("loss", 0, 1.0), ("acc", 0, 0.5), ("loss", 1, 0.5)]


def test_another_process_goes_on_where_the_first_stopped(run: RunDir, config: JobConfig):
    first, second = Recorder(), Recorder()
    spool = spool_of(run, first, config)
    step(run, 0, loss=1.0)
    spool.send_metrics()
    step(run, 1, loss=0.5)
    again = spool_of(run, second, config)
    again.send_metrics()
    assert second.sent == [("loss", 1, 0.5)]
    assert list(second.runs) == ["run-0"]
    assert second.params == []


def test_steps_that_are_computed_again_are_not_sent_again(run: RunDir, config: JobConfig):
    tracker = Recorder()
    spool = spool_of(run, tracker, config)
    for number in [0, 1, 2, 3, 2, 3, 4]:
        step(run, number, loss=float(number))
        spool.send_metrics()
    assert [s for _, s, _ in tracker.sent] == [0, 1, 2, 3, 4]


def test_a_file_written_anew_is_read_from_its_start(run: RunDir, config: JobConfig):
    tracker = Recorder()
    spool = spool_of(run, tracker, config)
    for number in range(4):
        step(run, number, loss=1.0)
    spool.send_metrics()
    run.metrics_file.unlink()
    step(run, 3, loss=1.0)
    step(run, 4, loss=1.0)
    spool.send_metrics()
    assert [s for _, s, _ in tracker.sent] == [0, 1, 2, 3, 4]


def test_batches_are_bounded(run: RunDir, config: JobConfig):
    lines = [
        json.dumps({"kind": "step", "step": i, "time": 0.0, "values": {"a": 0.0, "b": 1.0}}) + "\n"
        for i in range(1700)
    ]
    run.metrics_file.write_text("".join(lines))
    tracker = Recorder()
    spool_of(run, tracker, config).send_metrics()
    assert [len(batch) for batch in tracker.batches] == [1000, 1000, 1000, 400]


def test_a_failed_batch_is_sent_again_and_nothing_is_skipped(run: RunDir, config: JobConfig):
    tracker = Recorder()
    spool = spool_of(run, tracker, config)
    step(run, 0, loss=1.0)
    tracker.failures = 1
    with pytest.raises(ConnectionError):
        spool.send_metrics()
    spool.send_metrics()
    assert tracker.sent == [("loss", 0, 1.0)]


def test_batches_shrink_after_failures_and_grow_again(run: RunDir, config: JobConfig):
    for number in range(300):
        step(run, number, a=0.0, b=1.0, c=2.0, d=3.0)
    tracker = Recorder()
    spool = spool_of(run, tracker, config)
    tracker.failures = 4
    for _ in range(4):
        with pytest.raises(ConnectionError):
            spool.send_metrics()
    spool.send_metrics()
    assert [len(batch) for batch in tracker.batches] == [52, 100, 200, 400, 448]


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    good = {"kind": "step", "step": 1, "time": 0.0, "values": {"x": 1.0}}
    path.write_text('{"kind": "st\n[1]\n{"kind":"note"}\n' + json.dumps(good) + "\n" + '{"kind"')
    records, end = read_records(path, 0, 10)
    assert records == [good]
    assert end == path.stat().st_size - len('{"kind"')
    assert read_records(tmp_path / "none", 7, 10) == ([], 7)


def test_names_of_evaluations_and_summaries():
    evaluation = {"kind": "evaluation", "name": "holdout", "step": 5, "time": 1.0}
    (point,) = points_of(evaluation | {"values": {"auc": 0.7}})
    assert point == MetricPoint(key="holdout/auc", value=0.7, step=5, time=1.0)
    (point,) = points_of({"kind": "summary", "step": 5, "time": 1.0, "values": {"s": 2}})
    assert point.key == "summary/s"


def test_values_that_are_not_finite_survive(run: RunDir, config: JobConfig):
    tracker = Recorder()
    step(run, 0, a=math.nan, b=math.inf)
    spool_of(run, tracker, config).send_metrics()
    (_, _, nan), (_, _, inf) = tracker.sent
    assert math.isnan(nan)
    assert inf == math.inf


def test_files_are_sent_when_they_change(run: RunDir, config: JobConfig):
    tracker = Recorder()
    spool = spool_of(run, tracker, config)
    spool.send_files()
    (run.report / "report.md").write_text("one")
    (run.report / ".report.md.1.tmp").write_text("half")
    spool.send_files()
    spool.send_files()
    (run.report / "report.md").write_text("two two")
    spool.send_files()
    assert tracker.artifacts == ["/config.json", "report/report.md", "report/report.md"]


def test_a_model_is_sent_when_there_is_a_new_one(run: RunDir, config: JobConfig):
    tracker = Recorder()
    spool = spool_of(run, tracker, config)
    spool.send_model()
    run.model.mkdir()
    (run.model / "weights").write_text("1")
    spool.send_model()
    spool.send_model()
    assert tracker.models == [run.model]


def test_another_place_of_record_starts_from_nothing(run: RunDir, config: JobConfig):
    step(run, 0, loss=1.0)
    spool_of(run, Recorder(), config).send_metrics()
    other = config.model_copy(update={"tracker": TrackerConfig(name="mlflow", experiment="b")})
    tracker = Recorder()
    spool_of(run, tracker, other).send_metrics()
    assert tracker.sent == [("loss", 0, 1.0)]
    assert len(tracker.params) == 1


def test_a_spoilt_place_says_what_to_do(run: RunDir, config: JobConfig):
    (run.path / "tracker.json").write_text("{")
    with pytest.raises(RunDirectoryError, match=r"remove tracker\.json"):
        read_place(run, config.tracker)


def test_parameters_are_flat_and_without_credentials(config: JobConfig):
    flat = flat_params(config)
    assert flat["params.lr"] == "0.1"
    assert flat["params.deep.a"] == "1"
    assert flat["tracker.uri"] == "http://host:1/x"
    assert "workers" not in flat


def test_no_file_holds_credentials(run: RunDir, config: JobConfig):
    tracker = Recorder()
    tracker.failures = 1
    attempts = Attempts(run, config.tracker.uri)
    spool = Spool(run, tracker, config)
    assert not attempts.attempt(spool.open)

    def leak() -> None:
        raise ConnectionError(f"{config.tracker.uri} refused me with pa/ss and pa%2Fss")

    assert not Attempts(run, config.tracker.uri).attempt(leak)
    assert attempts.attempt(spool.open)
    spool.finish("finished")
    for path in run.path.rglob("*"):
        if path.is_file():
            assert "pa%2Fss" not in path.read_text()
            assert "pa/ss" not in path.read_text()
    assert any("http://host:1/x" in event.get("reason", "") for event in run.events())


def test_redact_handles_a_password_with_signs():
    text = redact("bad http://u:p@ss@h/x and p@ss", "http://u:p@ss@h/x")
    assert "p@ss" not in text
    assert redact("see http://host/a@b", None) == "see http://host/a@b"


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ("finished", "finished"),
        ("failed", "failed"),
        ("stopped", "killed"),
        ("killed", "killed"),
        ("running", "killed"),
        ("starting", "killed"),
    ],
)
def test_final_status(run: RunDir, status, told: str):
    run.write_state(RunState(status=status))
    assert final_status(run) == told


def test_one_warning_for_many_failures(run: RunDir, capsys: pytest.CaptureFixture[str]):
    attempts = Attempts(run, None)
    calls = 0

    def task() -> None:
        nonlocal calls
        calls += 1
        if calls in (2, 3, 5):
            raise ConnectionError("no\nanswer" + "x" * 1000)

    for _ in range(7):
        attempts.attempt(task)
    kinds = [event["kind"] for event in run.events()]
    assert kinds == ["tracker_unreachable", "tracker_reached"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(len(line) < 400 for line in lines)


def test_following_ends_with_the_launcher(run: RunDir):
    ended = threading.Event()
    done: list[str] = []

    def last() -> None:
        done.append("last")
        ended.set()

    follow([lambda: done.append("first"), last], Attempts(run, None), ended)
    assert done == ["first", "last"]


def test_only_one_process_sends(run: RunDir):
    short = timedelta(seconds=0.05)
    with (
        sending(run, short),
        pytest.raises(RunDirectoryError, match="another process"),
        sending(run, short),
    ):
        pass
    with sending(run, short):
        pass


def test_checks_before_anything_starts(config: JobConfig, monkeypatch: pytest.MonkeyPatch):
    def with_tracker(**fields: str) -> JobConfig:
        return config.model_copy(update={"tracker": TrackerConfig(**fields)})

    monkeypatch.setattr(tracking, "known_names", lambda kind: ("mlflow",))
    check_tracker(JobConfig(target="train.py"))
    with pytest.raises(UnknownNameError, match="did you mean 'mlflow'"):
        check_tracker(with_tracker(name="mlfow"))
    monkeypatch.setattr(tracking, "_installed", lambda package: False)
    with pytest.raises(MissingExtraError, match=r"pip install 'farandole\[mlflow\]'"):
        check_tracker(with_tracker(name="mlflow"))
    monkeypatch.setattr(tracking, "_installed", lambda package: True)
    for uri in ("./mlruns", "file:///tmp/mlruns", "/tmp/mlruns"):
        with pytest.raises(ConfigError, match=r"tracker\.uri"):
            check_tracker(with_tracker(name="mlflow", uri=uri))
    for uri in ("http://host:5000", "sqlite:///x.db", "databricks", "postgresql://u:p@h/db"):
        check_tracker(with_tracker(name="mlflow", uri=uri))


def test_a_folder_is_no_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "lookalike").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not tracking._installed("lookalike")
    assert not tracking._installed("farandole_has_no_such_package")
    assert tracking._installed("farandole")


def test_without_a_tracker_nothing_runs(run: RunDir):
    assert TrackingProcess.start(run, JobConfig(target="train.py")) is None
    assert not (run.path / "logs" / "tracker.log").exists()


def test_sync_refuses_what_it_cannot_send(run: RunDir, config: JobConfig):
    with run.lock(), pytest.raises(RunDirectoryError, match="still runs"):
        tracking.sync(run.path)
    run.write_config(JobConfig(target="train.py"))
    with pytest.raises(RunDirectoryError, match="has no tracker"):
        tracking.sync(run.path)


def test_importing_loads_nothing_heavy():
    code = (
        "import sys, farandole.job.tracking, farandole.job.track;"
        "print([m for m in ('torch', 'mlflow', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_host_metrics_from_a_proc_file_system(tmp_path: Path):
    def process(pid: int, parent: int, pages: int) -> None:
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1")
        (folder / "statm").write_text(f"999 {pages} 0 0 0 0 0")

    def cpu(busy: int, idle: int) -> None:
        (tmp_path / "stat").write_text(f"cpu {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\n")

    for pid, parent, pages in [(1, 0, 1000), (10, 1, 256), (11, 10, 256), (12, 11, 512)]:
        process(pid, parent, pages)
    (tmp_path / "meminfo").write_text("MemTotal: 4096 kB\nMemFree: 1 kB\nMemAvailable: 1024 kB\n")
    cpu(100, 100)
    sampler = HostSampler(10, tmp_path)
    cpu(175, 125)
    sample = sampler.sample()
    assert sample[CPU] == 75
    assert sample[MEMORY] == 3
    assert sample[MEMORY_SHARE] == 75
    assert sample[JOB_MEMORY] == pytest.approx(4)
    assert CPU not in sampler.sample()  # no time has gone by
