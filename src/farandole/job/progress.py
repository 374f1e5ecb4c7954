"""What a user sees of a running job: one live line, and a line for each result."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from farandole.errors import RunDirectoryError
from farandole.job.rundir import LineReader, RunDir

WINDOW_S = 10.0
REFRESH_S = 0.1
PLAIN_EVERY_S = 5.0


class Display(Protocol):
    """Shows a job while it runs. Its launcher calls these from its own loop."""

    def start(self) -> None:
        """Begin, before the workers start."""
        ...

    def poll(self) -> None:
        """Show what is new. Does not block; called several times a second."""
        ...

    def stop(self) -> None:
        """Show the rest and give the terminal back. May be called more than once."""
        ...


@dataclass
class Pace:
    """Where a job is and how fast, from the records of its steps. Does no I/O."""

    total_steps: int | None = None
    step: int = 0
    epoch: int = 0
    loss_name: str = ""
    loss: float | None = None
    _window: deque[tuple[float, int, int]] = field(default_factory=deque)
    _since: list[tuple[float, float, int]] = field(default_factory=list)

    def add_step(self, record: Mapping[str, Any]) -> None:
        """Take the record of one committed step into account."""
        self.step, self.epoch = record["step"], record.get("epoch", self.epoch)
        rows, now = record.get("rows", 0), record.get("time", 0.0)
        for name, value in list(record["values"].items())[:1]:
            self.loss_name, self.loss = name, value
            self._since.append((now, value, rows))
        self._window.append((now, self.step, rows))
        while now - self._window[0][0] > WINDOW_S:
            self._window.popleft()

    @property
    def rows_per_s(self) -> float | None:
        """Rows a second over the last ten seconds; None before two steps."""
        seconds = self._window[-1][0] - self._window[0][0] if self._window else 0.0
        if seconds <= 0:
            return None
        return sum(rows for _, _, rows in list(self._window)[1:]) / seconds

    @property
    def left_s(self) -> float | None:
        """Seconds that the remaining steps will take at this pace; None if unknown."""
        if self.total_steps is None or len(self._window) < 2:
            return None
        first, last = self._window[0], self._window[-1]
        if last[1] <= first[1] or last[0] <= first[0]:
            return None
        return max(self.total_steps - self.step, 0) * (last[0] - first[0]) / (last[1] - first[1])

    def take_mean(self) -> float | None:
        """Return the loss's mean over the rows since the last call; None if there were none."""
        rows = sum(rows for _, _, rows in self._since)
        total = sum(value * rows for _, value, rows in self._since)
        self._since.clear()
        return total / rows if rows else None


class Progress:
    """Follows a run directory and shows how the job gets on.

    On a terminal it is one live line; elsewhere a plain line every few seconds. Each epoch's
    and evaluation's result stays as a line of its own. There is no thread: the launcher polls.

    Parameters
    ----------
    run : RunDir
        The job's folder.
    console : rich.console.Console, optional
        Default: standard error.
    clock : callable
        Returns seconds, for the pace of showing.
    """

    def __init__(
        self,
        run: RunDir,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._events = LineReader(run.events_file)
        self._metrics = LineReader(run.metrics_file)
        self._pace = Pace()
        self._workers = 0
        self._live: Live | None = None
        self._shown_at = 0.0
        self._shown_step = -1

    def start(self) -> None:
        """Begin; what an earlier part of a resumed job left is not shown again."""
        for event in self._events.read():
            if event.get("kind") == "plan":
                self._pace.total_steps = event.get("total_steps")
        for record in self._metrics.read():
            if record.get("kind") == "step":
                self._pace.step, self._pace.epoch = record["step"], record.get("epoch", 0)
        self._shown_at = self._clock()
        self._print(f"run directory: {self._run.path}")
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def poll(self) -> None:
        """Show what is new since the last call."""
        now = self._clock()
        if now - self._shown_at < REFRESH_S:
            return
        self._read()
        if self._live is not None:
            self._live.update(self._line(), refresh=True)
            self._shown_at = now
        elif now - self._shown_at >= PLAIN_EVERY_S:
            self._shown_at = now
            if self._pace.step != self._shown_step:
                self._shown_step = self._pace.step
                self._print(" · ".join(self._parts()))

    def stop(self) -> None:
        """Show the rest and give the terminal back."""
        self._read()
        self._print_epoch()
        if self._live is not None:
            self._live.stop()
            self._live = None

    # --- reading --------------------------------------------------------------------------

    def _read(self) -> None:
        for event in self._events.read():
            if event.get("kind") == "plan":
                self._pace.total_steps = event.get("total_steps")
            elif event.get("kind") == "warning":
                self._print(f"warning: {event.get('message', '')}", style="yellow")
        for record in self._metrics.read():
            if record.get("kind") == "step":
                if record.get("epoch", 0) != self._pace.epoch:
                    self._print_epoch()
                self._pace.add_step(record)
            elif record.get("kind") == "evaluation":
                self._print_evaluation(record)
        if not self._workers:
            with contextlib.suppress(RunDirectoryError):
                self._workers = self._run.read_state().workers

    # --- showing --------------------------------------------------------------------------

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _print_epoch(self) -> None:
        """Print the mean loss since the last result, if there were steps."""
        mean = self._pace.take_mean()
        if mean is not None:
            values = {self._pace.loss_name: mean}
            self._print(f"{self._where()} · {_values(values)}{self._speed(' · ')}")

    def _print_evaluation(self, record: Mapping[str, Any]) -> None:
        self._print_epoch()
        self._print(
            f"{self._where()} · {record.get('name', 'evaluation')}: {_values(record['values'])}",
            style="bold",
        )

    def _where(self) -> str:
        return f"epoch {self._pace.epoch + 1} · step {self._pace.step:,}"

    def _speed(self, before: str = "") -> str:
        speed = self._pace.rows_per_s
        return "" if speed is None else f"{before}{speed:,.0f} rows/s"

    def _parts(self) -> list[str]:
        pace = self._pace
        workers = f"{self._workers} worker{'' if self._workers == 1 else 's'}"
        if not pace.step:
            return [f"starting {workers}" if self._workers else "starting"]
        total = "" if pace.total_steps is None else f"/{pace.total_steps:,}"
        parts = [f"step {pace.step:,}{total}", f"epoch {pace.epoch + 1}"]
        if pace.rows_per_s is not None:
            parts.append(self._speed())
        if pace.loss is not None:
            parts.append(_values({pace.loss_name: pace.loss}))
        if self._workers:
            parts.append(workers)
        if pace.left_s is not None:
            parts.append(f"{duration(pace.left_s)} left")
        return parts

    def _line(self) -> Table:
        line = Table.grid(expand=True, padding=(0, 1))
        text = Text(" · ".join(self._parts()), no_wrap=True, overflow="ellipsis")
        if self._pace.total_steps and self._pace.step:
            line.add_column(ratio=1)
            line.add_column()
            bar = ProgressBar(total=self._pace.total_steps, completed=self._pace.step)
            line.add_row(bar, text)
        else:
            line.add_column()
            line.add_row(text)
        return line


def duration(seconds: float) -> str:
    """Return a duration as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
