"""The launcher's decisions, with an engine whose workers only leave word of how they ended."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from farandole.config import JobConfig
from farandole.errors import JobStoppedError, RunDirectoryError, WorkerFailedError
from farandole.job import launch as launch_module
from farandole.job import report
from farandole.job.ends import Completion, Failure, write_completion, write_failure
from farandole.job.launch import Launcher, NoDisplay, Result, _origin, default_workers
from farandole.job.rundir import RunDir, RunState, append_line
from farandole.protocols import WorkerEnd, WorkerSpec

Action = Callable[[RunDir, WorkerSpec], WorkerEnd | None]


class ScriptedEngine:
    """Starts nothing; each worker does its action and ends, or stays for ever."""

    name = "scripted"

    def __init__(self, run: RunDir, actions: list[Action]) -> None:
        self._run = run
        self._actions = actions
        self._ends: list[WorkerEnd] = []
        self.started: list[WorkerSpec] = []
        self.terminated: list[int] = []
        self.closed = False

    def available_cores(self) -> int:
        return 2

    def start(self, worker: WorkerSpec) -> None:
        self.started.append(worker)
        end = self._actions[worker.worker_id](self._run, worker)
        if end is not None:
            self._ends.append(end)

    def wait(self, timeout: timedelta) -> list[WorkerEnd]:
        if not self._ends:
            time.sleep(0.005)
        ends, self._ends = self._ends, []
        return ends

    def terminate(self, worker_id: int) -> None:
        self.terminated.append(worker_id)

    def kill(self, worker_id: int) -> None:
        raise AssertionError

    def close(self) -> None:
        self.closed = True


def ended(
    code: int | None, number: int | None = None, at: float = 1.0
) -> Callable[[int], WorkerEnd]:
    return lambda worker_id: WorkerEnd(worker_id, code, number, at)


def does(completion: Completion) -> Action:
    def act(run: RunDir, worker: WorkerSpec) -> WorkerEnd:
        write_completion(run, worker.worker_id, completion)
        return WorkerEnd(worker.worker_id, 0, None, 1.0)

    return act


def fails(reason: str, at: float, **fields: Any) -> Action:
    def act(run: RunDir, worker: WorkerSpec) -> WorkerEnd:
        me = worker.worker_id
        write_failure(run, Failure(me, me, "here", at, reason, "its traceback\n", **fields))
        return WorkerEnd(me, 1, None, at)

    return act


def vanishes(code: int | None, number: int | None = None, says: str = "") -> Action:
    def act(run: RunDir, worker: WorkerSpec) -> WorkerEnd:
        worker.log_path.write_text(says)
        return WorkerEnd(worker.worker_id, code, number, 1.0)

    return act


def stays(run: RunDir, worker: WorkerSpec) -> None:
    return None


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "FAILURE_GRACE_S", 0.05)
    monkeypatch.setattr(report, "write_report", lambda run: None)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Launcher, ScriptedEngine, RunDir]]:
    def make(*actions: Action, **settings: Any) -> tuple[Launcher, ScriptedEngine, RunDir]:
        config = JobConfig(
            target="t.py", workers=len(actions), run_dir=tmp_path / "job", **settings
        )
        run = RunDir.create(config)
        run.write_config(config)
        engine = ScriptedEngine(run, list(actions))
        return Launcher(config, run, engine, NoDisplay()), engine, run

    return make


def test_a_job_that_finishes(make: Any) -> None:
    launcher, engine, run = make(does(Completion(rank=1)), does(Completion(rank=0, value=[1, "x"])))
    append_line(run.metrics_file, {"kind": "step", "step": 1, "values": {"loss": 2.0}})
    append_line(run.metrics_file, {"kind": "step", "step": 2, "values": {"loss": 1.5}})
    record = {"kind": "evaluation", "step": 2, "name": "holdout", "values": {"loss": 1.25}}
    append_line(run.metrics_file, record)
    expected = Result(run.path, metrics={"loss": 1.5, "holdout/loss": 1.25}, value=[1, "x"])
    assert launcher.run() == expected
    state = run.read_state()
    assert (state.status, state.exit_code, state.workers) == ("finished", 0, 2)
    assert engine.closed
    kinds = [event["kind"] for event in run.events()]
    assert kinds == ["start", "state", "worker_end", "worker_end", "state"]


def test_the_first_failure_is_told_not_those_that_follow(make: Any) -> None:
    launcher, engine, run = make(
        fails("lost a peer", at=5.0, follows=True),
        fails("came second", at=7.0),
        fails("came first", at=6.0),
        stays,
    )
    with pytest.raises(WorkerFailedError) as caught:
        launcher.run()
    error = caught.value
    assert (error.worker_id, error.rank, error.reason) == (2, 2, "came first")
    assert (error.host, error.log_path) == ("here", str(run.worker_log(2)))
    assert str(error).startswith("its traceback\n\nrank 2 on here failed: came first\nlog: ")
    assert engine.closed
    state = run.read_state()
    assert (state.status, state.exit_code, state.message) == ("failed", 1, str(error))


def test_a_failure_that_only_follows_is_better_than_none(make: Any) -> None:
    launcher, *_ = make(fails("lost a peer", at=5.0, follows=True), stays)
    with pytest.raises(WorkerFailedError, match="lost a peer"):
        launcher.run()


@pytest.mark.parametrize(
    ("code", "number", "reason"),
    [
        (0, None, "it ended with exit code 0 before its function returned"),
        (9, None, "it ended with exit code 9 before its function returned"),
        (None, signal.SIGKILL, r"it was killed by signal 9 \(SIGKILL\); .* out of memory"),
        (None, signal.SIGSEGV, r"it was killed by signal 11 \(SIGSEGV\)$"),
    ],
)
def test_ends_without_a_word(make: Any, code: int, number: int, reason: str) -> None:
    launcher, *_ = make(vanishes(code, number, says="last\nwords\n"))
    with pytest.raises(WorkerFailedError, match=reason.removesuffix("$")) as caught:
        launcher.run()
    assert caught.value.traceback == "last\nwords"
    assert str(caught.value).startswith("last\nwords\n\nworker 0 on ")


def test_a_log_that_is_no_text(make: Any) -> None:
    launcher, *_ = make(lambda run, worker: ended(1)(worker.worker_id))
    with pytest.raises(WorkerFailedError) as caught:
        launcher.run()
    assert caught.value.traceback is None


def test_a_failure_is_told_before_the_report_and_the_tracker(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, *_ = make(fails("its own", at=1.0))
    told: list[Any] = []
    launcher._on_error = told.append
    monkeypatch.setattr(report, "write_report", lambda run: told.append("closing"))
    with pytest.raises(WorkerFailedError) as caught:
        launcher.run()
    assert told == [caught.value, "closing"]


def test_a_full_disk_does_not_hide_a_failure(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state = RunDir.write_state

    def full(run: RunDir, state: RunState) -> None:
        if state.status == "failed":
            raise RunDirectoryError(path="job", problem="is full", remedy="free some space")
        write_state(run, state)

    monkeypatch.setattr(RunDir, "write_state", full)
    launcher, *_ = make(fails("its own", at=1.0))
    with pytest.raises(WorkerFailedError, match="its own"):
        launcher.run()


def test_bad_input_that_a_worker_found_has_its_exit_code(make: Any) -> None:
    launcher, _, run = make(fails("no such column", at=1.0, user_error=True))
    with pytest.raises(WorkerFailedError) as caught:
        launcher.run()
    assert caught.value.exit_code == 2
    assert run.read_state().exit_code == 2


def test_a_worker_that_cannot_be_started(make: Any) -> None:
    def cannot(run: RunDir, worker: WorkerSpec) -> WorkerEnd:
        raise OSError("no more processes")

    launcher, engine, run = make(stays, cannot)
    with pytest.raises(OSError, match="no more processes"):
        launcher.run()
    assert engine.closed
    assert run.read_state().status == "failed"


def test_ends_of_an_earlier_run_are_forgotten(make: Any) -> None:
    launcher, _, run = make(vanishes(3))
    write_completion(run, 0, Completion(rank=0))
    with pytest.raises(WorkerFailedError, match="exit code 3"):
        launcher.run()


# --- stopping -------------------------------------------------------------------------------


def stopped(step: int | None) -> Action:
    return does(Completion(rank=0, stopped_after=step, reason="asked to stop"))


@pytest.mark.parametrize(
    ("number", "reason", "code"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)]
)
def test_a_signal_stops_after_a_step(
    make: Any, number: signal.Signals, reason: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def signalled(run: RunDir, worker: WorkerSpec) -> WorkerEnd:
        os.kill(os.getpid(), number)
        return stopped(8)(run, worker)

    before = signal.getsignal(number)
    launcher, _, run = make(signalled, stopped(9))
    with pytest.raises(JobStoppedError) as caught:
        launcher.run()
    assert (caught.value.step, caught.value.reason, caught.value.exit_code) == (9, reason, code)
    state = run.read_state()
    assert (state.status, state.exit_code) == ("stopped", code)
    assert "once more to stop at once" in capsys.readouterr().err
    assert signal.getsignal(number) is before


def test_who_does_not_stop_is_killed_after_the_grace(make: Any) -> None:
    def signalled(run: RunDir, worker: WorkerSpec) -> None:
        append_line(run.metrics_file, {"kind": "step", "step": 4, "values": {}})
        for name in ("step-0000000002", "step-0000000003", "refused-step-0000000004"):
            (run.checkpoints / name).mkdir()
        os.kill(os.getpid(), signal.SIGTERM)

    launcher, engine, run = make(signalled, stopped(4), stop_grace_s=0.1)
    with pytest.raises(JobStoppedError) as caught:
        launcher.run()
    assert caught.value.step == 3  # the fourth is lost
    assert caught.value.reason == "SIGTERM; killed after 0.1 s of grace; newest checkpoint: step 3"
    assert caught.value.exit_code == run.read_state().exit_code == 143
    assert engine.terminated == [0]
    assert engine.closed


def test_a_second_signal_does_not_wait(make: Any) -> None:
    def signalled(run: RunDir, worker: WorkerSpec) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    launcher, engine, _ = make(signalled, stop_grace_s=1e6)
    with pytest.raises(
        JobStoppedError, match=r"after step 0 \(Ctrl-C; killed at once; no"
    ) as caught:
        launcher.run()
    assert caught.value.exit_code == 130
    assert engine.closed


def test_a_failure_while_stopping_is_told(make: Any) -> None:
    def signalled(run: RunDir, worker: WorkerSpec) -> WorkerEnd | None:
        os.kill(os.getpid(), signal.SIGTERM)
        return fails("peer lost", at=1.0, follows=True)(run, worker)

    launcher, _, run = make(signalled, fails("disk full", at=2.0), stopped(4))
    with pytest.raises(WorkerFailedError, match=r"rank 1 .*disk full"):
        launcher.run()
    assert run.read_state().status == "failed"


def test_what_only_follows_a_stop_is_no_failure(make: Any) -> None:
    def signalled(run: RunDir, worker: WorkerSpec) -> WorkerEnd | None:
        os.kill(os.getpid(), signal.SIGTERM)
        return fails("peer lost", at=1.0, follows=True)(run, worker)

    launcher, *_ = make(signalled, vanishes(None, signal.SIGTERM))
    with pytest.raises(JobStoppedError, match="SIGTERM; before every worker had finished a step"):
        launcher.run()


def test_a_job_that_finishes_before_it_notices(make: Any) -> None:
    def signalled(run: RunDir, worker: WorkerSpec) -> WorkerEnd:
        os.kill(os.getpid(), signal.SIGTERM)
        return does(Completion(rank=0, value="done"))(run, worker)  # type: ignore[return-value]

    launcher, *_ = make(signalled)
    assert launcher.run().value == "done"


def test_a_function_that_stops_itself(make: Any) -> None:
    launcher, *_ = make(does(Completion(rank=0, stopped_after=3, reason="the function asked")))
    with pytest.raises(JobStoppedError, match=r"after step 3 \(the function asked\)"):
        launcher.run()


# --- what workers get -----------------------------------------------------------------------


def test_one_worker_needs_no_coordinator(make: Any) -> None:
    launcher, engine, run = make(does(Completion(rank=0)), threads=3)
    launcher.run()
    (spec,) = engine.started
    assert spec.argv[1:] == ("-m", "farandole.worker", str(run.path), "0")
    assert spec.env["OMP_NUM_THREADS"] == "3"
    assert not {"FARANDOLE_COORDINATOR", "FARANDOLE_SECRET"} & set(spec.env)


def test_several_get_an_address_and_a_secret_that_is_written_nowhere(make: Any) -> None:
    launcher, engine, run = make(does(Completion(rank=0)), does(Completion(rank=1)))
    launcher.run()
    secrets = {spec.env["FARANDOLE_SECRET"] for spec in engine.started}
    (secret,) = secrets
    assert len(secret) == 64
    assert len({spec.env["FARANDOLE_COORDINATOR"] for spec in engine.started}) == 1
    for spec in engine.started:
        assert secret not in repr(spec)
        assert spec.log_path == run.worker_log(spec.worker_id)
    for file in run.path.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes()


def test_the_default_number_of_workers() -> None:
    config = JobConfig(target="t.py", threads=2, slots=3)
    assert [default_workers(cores, config) for cores in (1, 2, 5, 64)] == [1, 1, 2, 3]


def test_where_a_function_comes_from() -> None:
    class Train:
        def __call__(self, job: Any) -> None: ...

        def method(self, job: Any) -> None: ...

    def train(job: Any, lr: float) -> None: ...

    assert _origin(train) == f"{__file__}:train"
    assert _origin(functools.partial(functools.partial(train), lr=1)) == f"{__file__}:train"
    assert _origin(Train()) == f"{__file__}:Train"
    assert _origin(Train().method) == f"{__file__}:method"
    assert _origin(print) == "builtins:print"
