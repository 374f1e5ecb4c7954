"""What every engine must do, as tests that any adapter can run.

Subclass `EngineSuite` in a test module, name the engine, and let pytest collect it::

    class TestMyEngine(EngineSuite):
        engine = "my_package.my_module:MyEngine"

The suite looks for processes of the workers in ``/proc``, so they must run on this host.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.errors import UsageError
from farandole.protocols import Engine, WorkerEnd, WorkerSpec

if TYPE_CHECKING:
    import pytest

_MARK = "FARANDOLE_TESTING_MARK"
_WITHIN_S = 20.0

_SLEEP = "import time; time.sleep(600)"

_FAMILY = f"""
import pathlib, signal, subprocess, sys
child = [sys.executable, "-ISc", {_SLEEP!r}]
stubborn = [sys.executable, "-ISc",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + {_SLEEP!r}]
stopped = subprocess.Popen(child)
stopped.send_signal(signal.SIGSTOP)
subprocess.Popen(stubborn)
pathlib.Path(sys.argv[1]).touch()
"""
"""A worker that starts two children, one of them stopped, then says so by making a file."""

_LAUNCHER = """
import json, os, pathlib, signal, sys, time
from farandole.protocols import WorkerSpec
from farandole.testing.engine import load_engine
engine = load_engine(sys.argv[1])
folder = pathlib.Path(sys.argv[2])
for worker_id, argv in enumerate(json.loads(sys.argv[3])):
    env = {sys.argv[4]: sys.argv[5]}
    engine.start(WorkerSpec(worker_id, tuple(argv), env, folder / f"{worker_id}.log"))
(folder / "started").touch()
sys.stdin.readline()
os._exit(0)
"""


def load_engine(name: str) -> Engine:
    """Make an engine from its class's name, ``module:Class``."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)()


def wait_until(condition: Callable[[], object], what: str, within_s: float = _WITHIN_S) -> None:
    """Block until a condition holds; raise AssertionError if it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(0.005)


class Bench:
    """An engine under test, a folder, and a mark by which all processes of its workers show."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self.mark = uuid.uuid4().hex

    def start(self, worker_id: int, argv: Sequence[str], log: str | None = None) -> Path:
        """Start a worker with any command; return its log's path."""
        path = self.folder / (log or f"{worker_id}.log")
        self.engine.start(WorkerSpec(worker_id, tuple(argv), {_MARK: self.mark}, path))
        return path

    def python(self, worker_id: int, code: str, *args: str) -> Path:
        """Start a worker that runs Python code; return its log's path."""
        return self.start(worker_id, python(code, *args))

    def family(self, worker_id: int, then: str) -> None:
        """Start a worker with two children, and return once they run."""
        ready = self.folder / f"family-{worker_id}"
        self.python(worker_id, _FAMILY + then, str(ready))
        wait_until(ready.exists, "children started")

    def ends(self, count: int) -> list[WorkerEnd]:
        """Return the next ends, in order."""
        ends: list[WorkerEnd] = []
        deadline = time.monotonic() + _WITHIN_S
        while len(ends) < count:
            left = deadline - time.monotonic()
            assert left > 0, f"only {len(ends)} of {count} workers ended: {ends}"
            ends += self.engine.wait(timedelta(seconds=left))
        return ends

    def end(self) -> WorkerEnd:
        """Return the next end, which must be the only one."""
        (end,) = self.ends(1)
        return end

    def expect_none_left(self, within_s: float = 2.0) -> None:
        """Check that no process of any worker is left."""
        wait_until(lambda: not self.processes(), "all processes gone", within_s)

    def processes(self) -> list[int]:
        """Return the processes of all workers, their children included; zombies are none."""
        wanted = f"{_MARK}={self.mark}".encode()
        found: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found


def python(code: str, *args: str) -> list[str]:
    """Return a command that runs Python code, and starts fast."""
    return [sys.executable, "-S", "-c", code, *args]


class EngineSuite:
    """Tests of an engine; see the module."""

    engine: str
    """``module:Class`` of the engine; the class takes no arguments."""

    @contextlib.contextmanager
    def bench(self, folder: Path) -> Iterator[Bench]:
        """Give a bench with a new engine, and close the engine afterwards."""
        bench = Bench(load_engine(self.engine), folder)
        try:
            yield bench
        finally:
            bench.engine.close()
            bench.expect_none_left()

    # --- ends ---------------------------------------------------------------------------

    def test_is_an_engine(self, tmp_path: Path) -> None:
        """It has all methods, a name, and at least one core."""
        with self.bench(tmp_path) as bench:
            assert isinstance(bench.engine, Engine)
            assert bench.engine.name
            assert bench.engine.available_cores() >= 1

    def test_each_end_is_reported_once_with_its_code(self, tmp_path: Path) -> None:
        """Exit codes arrive, and nothing arrives twice."""
        with self.bench(tmp_path) as bench:
            for code in (0, 1, 3, 255):
                bench.python(code, f"raise SystemExit({code})")
            ends = bench.ends(4)
            assert {end.worker_id: end.exit_code for end in ends} == {0: 0, 1: 1, 3: 3, 255: 255}
            assert [end.worker_id for end in ends if end.ok] == [0]
            assert all(end.signal is None for end in ends)
            assert bench.engine.wait(timedelta(0)) == []

    def test_ends_come_in_order(self, tmp_path: Path) -> None:
        """Workers that end one after the other are reported so, with rising times."""
        code = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): "
        with self.bench(tmp_path) as bench:
            for worker_id in range(3):
                bench.python(worker_id, code + "time.sleep(0.005)", str(tmp_path / f"{worker_id}"))
            ends: list[WorkerEnd] = []
            for worker_id in (2, 0, 1):
                (tmp_path / f"{worker_id}").touch()
                ends.append(bench.end())
            assert [end.worker_id for end in ends] == [2, 0, 1]
            assert [end.time for end in ends] == sorted(end.time for end in ends)
            assert abs(ends[-1].time - time.time()) < 60

    def test_signals_are_reported(self, tmp_path: Path) -> None:
        """A worker that dies by a signal has no exit code."""
        with self.bench(tmp_path) as bench:
            for number in (signal.SIGKILL, signal.SIGSEGV):
                bench.python(number, f"import os; os.kill(os.getpid(), {number.value})")
                end = bench.end()
                assert (end.worker_id, end.exit_code, end.signal) == (number, None, number)
                assert not end.ok

    def test_wait_ends_when_the_time_is_over(self, tmp_path: Path) -> None:
        """With nothing to report, wait returns nothing."""
        with self.bench(tmp_path) as bench:
            bench.python(0, _SLEEP)
            assert bench.engine.wait(timedelta(milliseconds=20)) == []

    # --- stopping -----------------------------------------------------------------------

    def test_terminate_lets_a_worker_finish(self, tmp_path: Path) -> None:
        """The worker gets SIGTERM and may end as it likes; afterwards nothing happens."""
        code = (
            "import pathlib, signal, sys, time\n"
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
            "pathlib.Path(sys.argv[1]).touch()\n"
            "time.sleep(600)"
        )
        with self.bench(tmp_path) as bench:
            bench.python(0, code, str(tmp_path / "ready"))
            wait_until((tmp_path / "ready").exists, "handler installed")
            bench.engine.terminate(0)
            assert bench.end().exit_code == 7
            bench.engine.terminate(0)
            bench.engine.kill(0)

    def test_kill_ends_a_worker_and_its_children(self, tmp_path: Path) -> None:
        """Children go too, stopped and stubborn ones included; other workers stay."""
        with self.bench(tmp_path) as bench:
            bench.family(0, _SLEEP)
            assert len(bench.processes()) == 3
            bench.python(1, _SLEEP)
            bench.engine.kill(0)
            assert bench.end().signal == signal.SIGKILL
            wait_until(lambda: len(bench.processes()) == 1, "only the other worker left", 2.0)

    def test_kill_ends_a_stopped_worker(self, tmp_path: Path) -> None:
        """A worker under SIGSTOP is killed like any other."""
        with self.bench(tmp_path) as bench:
            bench.python(0, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
            bench.engine.kill(0)
            assert bench.end().signal == signal.SIGKILL

    def test_children_end_with_their_worker(self, tmp_path: Path) -> None:
        """What a worker leaves behind when it ends by itself is killed."""
        with self.bench(tmp_path) as bench:
            bench.family(0, "raise SystemExit(5)")
            assert bench.end().exit_code == 5
            bench.expect_none_left()

    def test_close_leaves_nothing(self, tmp_path: Path) -> None:
        """After close no process, thread or file descriptor is left; closing again is fine."""
        threads, descriptors = threading.active_count(), _open_descriptors()
        with self.bench(tmp_path) as bench:
            bench.family(0, _SLEEP)
            bench.family(1, "import os; os.kill(os.getpid(), signal.SIGSTOP)")
            bench.python(2, "pass")
            bench.engine.close()
            bench.expect_none_left()
            bench.engine.close()
            try:
                bench.python(3, _SLEEP)
            except UsageError:
                pass
            else:
                raise AssertionError("a closed engine has started a worker")
        assert threading.active_count() == threads
        assert _open_descriptors() == descriptors

    def test_a_worker_outlives_the_thread_that_started_it(self, tmp_path: Path) -> None:
        """Which thread calls start does not matter."""
        with self.bench(tmp_path) as bench:
            thread = threading.Thread(target=bench.python, args=(0, _SLEEP))
            thread.start()
            thread.join()
            assert bench.engine.wait(timedelta(milliseconds=100)) == []
            assert len(bench.processes()) == 1

    def test_two_engines_do_not_meddle(self, tmp_path: Path) -> None:
        """The same worker ids in two engines at once are different workers."""
        with self.bench(tmp_path) as one, self.bench(tmp_path / "other") as other:
            one.python(0, _SLEEP)
            other.python(0, "raise SystemExit(4)")
            assert other.end().exit_code == 4
            other.engine.close()
            assert one.engine.wait(timedelta(0)) == []
            assert len(one.processes()) == 1

    def test_nothing_is_left_when_the_launcher_is_killed(self, tmp_path: Path) -> None:
        """SIGKILL of the launcher ends all workers, stopped and stubborn ones included."""
        self._expect_workers_to_go(tmp_path, lambda launcher: launcher.kill())

    def test_nothing_is_left_when_the_launcher_forgets_to_close(self, tmp_path: Path) -> None:
        """So does its ordinary end."""
        self._expect_workers_to_go(tmp_path, lambda launcher: launcher.communicate(b"\n"))

    def _expect_workers_to_go(
        self, folder: Path, end: Callable[[subprocess.Popen[bytes]], object]
    ) -> None:
        bench = Bench(load_engine(self.engine), folder)
        stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
        deaf = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)];" + _SLEEP
        commands = [
            python(_FAMILY + _SLEEP, str(folder / "family-0")),
            python(_FAMILY + stop, str(folder / "family-1")),
            python(deaf),
            ["sleep", "600"],
        ]
        arguments = [self.engine, str(folder), json.dumps(commands), _MARK, bench.mark]
        launcher = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, *arguments], stdin=subprocess.PIPE
        )
        try:
            for name in ("started", "family-0", "family-1"):
                wait_until((folder / name).exists, f"{name} is there")
            assert len(bench.processes()) == 8
            end(launcher)
            launcher.wait(_WITHIN_S)
            bench.expect_none_left()
        finally:
            launcher.kill()
            launcher.communicate()
            bench.engine.close()

    # --- what a worker is given ---------------------------------------------------------

    def test_output_is_complete(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Both streams are in the log: raw bytes, a half line, and what was just printed."""
        monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
        code = (
            "import os, signal, sys\n"
            "os.write(1, b'\\xff\\x00raw')\n"
            "os.write(2, b'|error|')\n"
            "print('half a line', end='')\n"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        with self.bench(tmp_path) as bench:
            log = bench.python(0, code)
            bench.end()
            assert log.read_bytes() == b"\xff\x00raw|error|half a line"

    def test_a_log_is_appended_to(self, tmp_path: Path) -> None:
        """A worker started again under its id goes on in its log."""
        with self.bench(tmp_path) as bench:
            for text in ("one,", "two"):
                log = bench.python(0, f"print({text!r}, end='')")
                assert bench.end().ok
            assert log.read_text() == "one,two"

    def test_odd_characters_arrive(self, tmp_path: Path) -> None:
        """Arguments are passed as they are, and logs may be in oddly named folders."""
        odd = ["", " ", "a b", "'\"`", "$HOME *;", "new\nline", "größe 漢", "--x=\\"]
        with self.bench(tmp_path) as bench:
            code = "import json, sys; print(json.dumps(sys.argv[1:]))"
            log = bench.start(0, python(code, *odd), log="a b/größe 'x'\n$/the log")
            assert bench.end().ok
            assert json.loads(log.read_text()) == odd

    def test_environment_and_input(self, tmp_path: Path) -> None:
        """Variables are added to the inherited ones; standard input is empty."""
        code = (
            "import os, sys\n"
            f"print(os.environ[{_MARK!r}], 'PATH' in os.environ, sys.stdin.read() == '',"
            " os.getcwd())"
        )
        with self.bench(tmp_path) as bench:
            log = bench.python(0, code)
            assert bench.end().ok
            assert log.read_text() == f"{bench.mark} True True {os.getcwd()}\n"  # noqa: PTH109

    def test_start_failures_are_named(self, tmp_path: Path) -> None:
        """What cannot be started raises OSError, leaves nothing, and can be tried again."""
        descriptors = _open_descriptors()
        with self.bench(tmp_path) as bench:
            (tmp_path / "file").touch()
            _expect_os_error("no-such-command", lambda: bench.start(0, ["no-such-command"]))
            _expect_os_error("null byte", lambda: bench.start(0, [sys.executable, "\0"]))
            _expect_os_error("empty", lambda: bench.start(0, []))
            _expect_os_error("file", lambda: bench.start(0, ["true"], log="file/log"))
            bench.python(0, _SLEEP)
            _expect_os_error("runs already", lambda: bench.start(0, ["true"]))
            assert len(bench.processes()) == 1
        assert _open_descriptors() == descriptors


def _expect_os_error(text: str, start: Callable[[], object]) -> None:
    message = "it was started"
    try:
        start()
    except OSError as error:
        message = str(error)
    assert text in message
    assert "worker 0" in message


def _open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir() if entry.exists()}
