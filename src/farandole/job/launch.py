"""Starting a job and staying with it until its end: what `farandole run` and `fa.run` do."""

from __future__ import annotations

import contextlib
import functools
import inspect
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from farandole import topology
from farandole.config import JobConfig
from farandole.errors import FarandoleError, JobStoppedError, MissingExtraError, WorkerFailedError
from farandole.extras import load_named
from farandole.job.ends import Failure, clear_ends, read_completion, read_failure
from farandole.job.progress import Display, Progress
from farandole.job.rundir import RunDir, RunState, write_atomic
from farandole.job.settings import resolve_config
from farandole.job.target import check_function, check_target
from farandole.job.tracking import TrackingProcess, check_tracker
from farandole.membership.coordinator import Coordinator
from farandole.protocols import Engine, WorkerEnd, WorkerSpec

POLL = timedelta(seconds=0.1)
# After a first failure, so long for the other workers to tell theirs: it may be the earlier one.
FAILURE_GRACE_S = 1.5


@dataclass(frozen=True)
class Result:
    """A job that finished.

    Attributes
    ----------
    run_dir : Path
        Where everything of the job is.
    metrics : dict of str to float
        The last value of everything logged; those of evaluations as ``name/metric``.
    value : object
        What the training function returned on rank 0, as JSON can hold it.
    """

    run_dir: Path
    metrics: dict[str, float] = field(default_factory=dict)
    value: Any = None
    status: str = "finished"
    exit_code: int = 0

    @property
    def model(self) -> Path:
        """Folder of the saved model, for `farandole.load_model`."""
        return RunDir(self.run_dir).model

    @property
    def report(self) -> Path:
        """Folder of the report."""
        return RunDir(self.run_dir).report


def run(
    train: Callable[..., Any] | str | Path,
    *,
    config: str | Path | None = None,
    progress: bool = True,
    **settings: Any,
) -> Result:
    """Run a training function as a job. Blocks until its end.

    Parameters
    ----------
    train : callable or str
        The function, or ``FILE.py:function``. A function that no worker can import (from a
        notebook or ``__main__``, a closure) is sent by value, with cloudpickle.
    config : path, optional
        A TOML or YAML file. Settings win over it, parameter by parameter.
    progress : bool, default=True
        Show a live line on standard error.
    **settings
        Any key of the configuration: ``workers=2``, ``params={"lr": 0.01}``,
        ``tracker={"name": "mlflow"}``.

    Returns
    -------
    Result

    Raises
    ------
    UserError
        Something given is wrong; no worker was started.
    WorkerFailedError
        A worker failed: the first one to do so.
    JobStoppedError
        The job was stopped from outside (Ctrl-C, `farandole stop`).
    """
    settings["target"] = _origin(train) if callable(train) else str(train)
    overrides: dict[str, Any] = {}
    for key, value in settings.items():
        if key in ("checkpoint", "tracker", "params") and isinstance(value, Mapping):
            overrides.update({f"{key}.{inner}": v for inner, v in value.items()})
        else:
            overrides[key] = value
    loaded = resolve_config(None if config is None else Path(config), overrides)
    function = train if callable(train) else None
    if function is not None:
        check_function(function, loaded.params)
    if progress:
        return launch(loaded, function, on_error=_print_line)
    return launch(loaded, function, display=NoDisplay())


def _print_line(error: FarandoleError) -> None:
    """Tell of an error that will be raised once the job is closed."""
    text = error.reason if isinstance(error, WorkerFailedError) else str(error)
    print(f"farandole: {text}", file=sys.stderr, flush=True)


def _origin(function: Callable[..., Any]) -> str:
    """Return where a function comes from, for people to read."""
    while isinstance(function, functools.partial):
        function = function.func
    named: Any = function if inspect.isroutine(function) else type(function)
    try:
        file = inspect.getsourcefile(named)
    except TypeError:  # a class of a notebook, say
        file = None
    return f"{file or named.__module__}:{named.__name__}"


class NoDisplay:
    """Shows nothing."""

    def start(self) -> None:
        """Do nothing."""

    def poll(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


def launch(
    config: JobConfig,
    function: Callable[..., Any] | None = None,
    *,
    display: Display | None = None,
    on_error: Callable[[FarandoleError], None] | None = None,
) -> Result:
    """Run a job by its configuration. Blocks until its end; see `run`.

    Parameters
    ----------
    config : JobConfig
    function : callable, optional
        The training function; by default what ``config.target`` names, or the function that
        a job to resume was given as an object.
    display : Display, optional
        Default: a live line on standard error.
    on_error : callable, optional
        Called with the error that ends the job as soon as it is known. It is raised only when
        the report is written and the tracker has been told, which may take a minute.
    """
    kept = function is None and _keeps_function(config)
    if function is None and not kept:
        target = check_target(config.target, config.params)
        config = config.model_copy(update={"target": str(target)})
    check_tracker(config)
    _check_torch()
    engine: Engine = load_named("engine", config.engine)()
    run_dir = RunDir.create(config)
    num_workers = config.workers or default_workers(engine.available_cores(), config)
    config = config.model_copy(update={"workers": num_workers, "run_dir": run_dir.path})
    with run_dir.lock():
        run_dir.write_config(config)
        if not kept:
            _write_function(run_dir, function)
        launcher = Launcher(config, run_dir, engine, display or Progress(run_dir), on_error)
        return launcher.run()


def default_workers(num_cores: int, config: JobConfig) -> int:
    """Return how many workers a job gets that names no number: one for its threads' cores."""
    return max(1, min(num_cores // config.threads, config.slots))


def _check_torch() -> None:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError(extra="torch", package="torch", purpose="a training job")


def _keeps_function(config: JobConfig) -> bool:
    """Return whether a job to resume goes on with the function that it was given as an object."""
    if not config.resume or config.run_dir is None:
        return False
    run = RunDir(config.run_dir)
    return run.function_file.exists() and run.read_config().target == config.target


def _write_function(run_dir: RunDir, function: Callable[..., Any] | None) -> None:
    if function is None:
        run_dir.function_file.unlink(missing_ok=True)
    else:
        import cloudpickle

        write_atomic(run_dir.function_file, cloudpickle.dumps(function))


class Launcher:
    """One job's launcher: starts its workers, watches them, and tells how it ended."""

    def __init__(
        self,
        config: JobConfig,
        run_dir: RunDir,
        engine: Engine,
        display: Display,
        on_error: Callable[[FarandoleError], None] | None = None,
    ) -> None:
        assert config.workers is not None
        self._config = config
        self._run = run_dir
        self._engine = engine
        self._display = display
        self._on_error = on_error
        self._num_workers = config.workers
        self._ends: dict[int, WorkerEnd] = {}
        self._signals: list[int] = []
        self._state = RunState(status="starting", workers=config.workers)

    def run(self) -> Result:
        """Run the job. Blocks until its end, however it ends; leaves nothing running."""
        run = self._run
        clear_ends(run, range(self._num_workers))
        run.write_state(self._state)
        run.event(
            "start", workers=self._num_workers, slots=self._config.slots, resume=self._config.resume
        )
        tracking: TrackingProcess | None = None
        try:
            with self._catching_signals():
                try:
                    tracking = TrackingProcess.start(run, self._config)
                    self._display.start()
                    with self._coordinating() as (address, secret):
                        self._start_workers(address, secret)
                        self._run.write_environment()  # takes a while; the workers load torch
                        self._write_state(status="running")
                        self._watch(tracking)
                finally:
                    self._engine.close()
                    shutil.rmtree(run.sockets, ignore_errors=True)
                    self._display.poll()
                    self._display.stop()
            result = self._conclude()
        except BaseException as error:
            self._end_badly(error)
            if self._on_error is not None and isinstance(error, FarandoleError):
                self._on_error(error)  # now: closing may take as long as a tracker does
            raise
        else:
            self._write_state(status="finished", ended=time.time(), exit_code=0)
            return result
        finally:
            self._close(tracking)

    # --- workers ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _coordinating(self) -> Iterator[tuple[str | None, str]]:
        """Serve the membership while workers run. One worker needs none."""
        if self._num_workers == 1:
            yield None, ""
            return
        secret = secrets.token_hex(32)
        coordinator = Coordinator(
            secret.encode(),
            expected=self._num_workers,
            start_timeout=timedelta(seconds=self._config.start_timeout_s),
        )
        coordinator.start()
        try:
            yield coordinator.address, secret
        finally:
            coordinator.close()

    def _start_workers(self, address: str | None, secret: str) -> None:
        env = self._worker_environment(address, secret)
        for worker_id in range(self._num_workers):
            argv = (sys.executable, "-m", "farandole.worker", str(self._run.path), str(worker_id))
            log_path = self._run.worker_log(worker_id)
            self._engine.start(WorkerSpec(worker_id, argv, env, log_path))

    def _worker_environment(self, address: str | None, secret: str) -> dict[str, str]:
        threads = str(self._config.threads)
        env = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
            # What this process can import, a worker can.
            "PYTHONPATH": ":".join(dict.fromkeys(str(Path(p).absolute()) for p in sys.path if p)),
        }
        if address is not None:
            env |= {"FARANDOLE_COORDINATOR": address, "FARANDOLE_SECRET": secret}
        return env

    def _watch(self, tracking: TrackingProcess | None) -> None:
        """Wait until all workers have ended well, or one has not, or a signal came."""
        deadline: float | None = None
        while len(self._ends) < self._num_workers:
            for end in self._engine.wait(POLL):
                self._ends[end.worker_id] = end
                self._run.event(
                    "worker_end",
                    worker_id=end.worker_id,
                    exit_code=end.exit_code,
                    signal=end.signal,
                )
            if tracking is not None:
                tracking.keep_alive()
            self._display.poll()
            if self._failed() and deadline is None:
                deadline = time.monotonic() + FAILURE_GRACE_S
            if self._signals and deadline is None:
                deadline = time.monotonic() + self._config.stop_grace_s
                for worker_id in self._running():
                    self._engine.terminate(worker_id)
            if len(self._signals) > 1 or (deadline is not None and time.monotonic() > deadline):
                return

    def _running(self) -> list[int]:
        return [w for w in range(self._num_workers) if w not in self._ends]

    def _failed(self) -> list[int]:
        """Return the workers that ended without having done their part."""
        return [w for w in self._ends if read_completion(self._run, w) is None]

    # --- the end ----------------------------------------------------------------------------

    def _conclude(self) -> Result:
        """Return the result, or raise what ended the job."""
        failed = self._failed()
        if self._signals:
            # One that was asked to stop and left no word may have been ended by that.
            failed = [w for w in range(self._num_workers) if self._failed_itself(w)]
        if failed:
            raise _to_error(self._first_failure(failed), self._run)
        completions = [read_completion(self._run, w) for w in range(self._num_workers)]
        reason = _signal_name(self._signals[0]) if self._signals else ""
        if not all(completions):
            raise self._unfinished(reason)
        stopped = [c for c in completions if c is not None and c.stopped_after is not None]
        if stopped:
            step = max(c.stopped_after or 0 for c in stopped)
            raise JobStoppedError(step=step, reason=reason or str(stopped[0].reason))
        return self._result(completions)  # perhaps it finished before it noticed a signal

    def _failed_itself(self, worker_id: int) -> bool:
        failure = read_failure(self._run, worker_id)
        return failure is not None and not failure.follows

    def _unfinished(self, reason: str) -> JobStoppedError:
        """Describe a stop in which not every worker came to the end of its step."""
        if len(self._signals) > 1:
            how = "killed at once"
        elif self._running():
            how = f"killed after {self._config.stop_grace_s:g} s of grace"
        else:
            how = "before every worker had finished a step"
        step = _newest_checkpoint(self._run)
        newest = "no checkpoint yet" if step is None else f"newest checkpoint: step {step}"
        return JobStoppedError(step=step or 0, reason=f"{reason}; {how}; {newest}")

    def _result(self, completions: list[Any]) -> Result:
        value = next((c.value for c in completions if c is not None and c.rank == 0), None)
        return Result(self._run.path, metrics=last_metrics(self._run), value=value)

    def _first_failure(self, failed: list[int]) -> Failure:
        """Choose the failure that came first and that no other caused."""
        failures = [read_failure(self._run, w) or self._unexplained(w) for w in failed]
        return min(failures, key=lambda failure: (failure.follows, failure.time))

    def _unexplained(self, worker_id: int) -> Failure:
        """Describe the end of a worker that left no word."""
        end = self._ends[worker_id]
        if end.signal is not None:
            name = signal.Signals(end.signal).name
            reason = f"it was killed by signal {end.signal} ({name})"
            if end.signal == signal.SIGKILL:
                reason += "; if nobody did that, the system ran out of memory"
        else:
            reason = f"it ended with exit code {end.exit_code} before its function returned"
        tail = _tail(self._run.worker_log(worker_id))
        return Failure(worker_id, None, topology.host_name(), end.time, reason, tail)

    def _end_badly(self, error: BaseException) -> None:
        status = "stopped" if isinstance(error, JobStoppedError) else "failed"
        if isinstance(error, KeyboardInterrupt):
            status = "killed"
        code = error.exit_code if isinstance(error, FarandoleError) else 1
        message = str(error) or type(error).__name__
        with contextlib.suppress(FarandoleError):  # a full disk must not hide the error itself
            self._write_state(status=status, ended=time.time(), exit_code=code, message=message)

    def _close(self, tracking: TrackingProcess | None) -> None:
        """Write the report and let the tracker finish; neither changes how the job ended."""
        from farandole.job.report import write_report  # slow to import, and not needed before

        try:
            write_report(self._run)
        except Exception as error:
            self._warn(f"the report could not be written: {error}")
        if tracking is not None:
            end = tracking.close()
            if end.message:
                self._warn(end.message)

    def _warn(self, message: str) -> None:
        print(f"farandole: warning: {message}", file=sys.stderr)
        with contextlib.suppress(FarandoleError):
            self._run.event("warning", message=message)

    def _write_state(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        self._run.write_state(self._state)
        self._run.event("state", status=self._state.status, message=self._state.message)

    # --- signals ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _catching_signals(self) -> Iterator[None]:
        """Note SIGINT and SIGTERM: the first stops the job after a step, the second at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._note_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note_signal(self, number: int, frame: Any) -> None:
        self._signals.append(number)
        if len(self._signals) == 1:
            text = "stopping after this step and a checkpoint; once more to stop at once"
            print(f"farandole: {text}", file=sys.stderr)


def last_metrics(run: RunDir) -> dict[str, float]:
    """Return the last value of everything that a job has logged."""
    values: dict[str, float] = {}
    for record in run.metrics():
        prefix = f"{record['name']}/" if record["kind"] == "evaluation" else ""
        values.update({f"{prefix}{name}": value for name, value in record["values"].items()})
    return values


def _newest_checkpoint(run: RunDir) -> int | None:
    # `CheckpointStore` knows these names too, but it needs torch, which the launcher does not load.
    names = (folder.name.removeprefix("step-") for folder in run.checkpoints.glob("step-*"))
    return max((int(name) for name in names if name.isdigit()), default=None)


def _to_error(failure: Failure, run: RunDir) -> WorkerFailedError:
    return WorkerFailedError(
        worker_id=failure.worker_id,
        rank=failure.rank,
        host=failure.host,
        reason=failure.reason,
        log_path=str(run.worker_log(failure.worker_id)),
        traceback=failure.traceback,
        user_error=failure.user_error,
    )


def _signal_name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _tail(path: Path, num_bytes: int = 4000) -> str | None:
    """Return the last lines of a log, as far as they are text."""
    try:
        data = path.read_bytes()[-num_bytes:]
    except OSError:
        return None
    return data.decode(errors="replace").strip() or None
