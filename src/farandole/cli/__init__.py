"""The command line. Flags and the environment enter Farandole here, and nowhere else.

The only variable that is read is `FARANDOLE_RUNS`, the folder of the run directories.
What a command needs is imported by it, so that help is shown at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farandole.cli.data import data
from farandole.errors import FarandoleError, JobStoppedError, WorkerFailedError

if TYPE_CHECKING:
    from rich.console import Console

    from farandole.job.launch import Result
    from farandole.job.views import RunSummary

app = typer.Typer(
    name="farandole",
    help="Train models on any number of workers, with the same result on each number.",
    epilog="Exit codes: 0 finished, 1 failed, 2 bad input, 130 Ctrl-C, 143 stopped.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)

app.add_typer(data, name="data")

RunsOption = Annotated[
    Path, typer.Option("--runs", envvar="FARANDOLE_RUNS", help="Folder of the run directories.")
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run directory, or the start of its name.")
]
DEFAULT_RUNS = Path("runs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    A mistake is one line on standard error; only a bug, or ``--debug``, shows a traceback.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in arguments
    try:
        code = app(args=arguments, prog_name="farandole", standalone_mode=False)
    except FarandoleError as error:
        if debug:
            raise
        _print_error(error)
        return error.exit_code
    except _ShownError as shown:
        if debug:
            raise shown.error from None
        return shown.error.exit_code
    except typer.TyperException as error:
        message = " ".join(error.format_message().split())
        if not message:  # no arguments were given, and the help was shown
            return error.exit_code
        print(f"farandole: error: {message}", file=sys.stderr)
        return error.exit_code
    except typer.Abort:
        return 130
    return code if isinstance(code, int) else 0


class _ShownError(Exception):
    """Carries an error that has been printed already, as soon as it was known."""

    def __init__(self, error: FarandoleError) -> None:
        super().__init__(str(error))
        self.error = error


def _print_error(error: FarandoleError) -> None:
    if isinstance(error, WorkerFailedError) and error.traceback:
        print(error.traceback.rstrip(), end="\n\n", file=sys.stderr)
        error = WorkerFailedError(**{**error.fields(), "traceback": None})
    kind = "" if isinstance(error, JobStoppedError) else "error: "
    print(f"farandole: {kind}{error}", file=sys.stderr, flush=True)


def _version(value: bool) -> None:
    if value:
        from farandole import __version__

        print(f"farandole {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of every error.")
    ] = False,
) -> None:
    """Options that stand before any command; `main` and `_version` act on them."""


# --- run ----------------------------------------------------------------------------------


@app.command()
def run(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TRAIN.py[:FUNCTION]",
            help="The training function; FUNCTION is `train` if left out.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", "-w", help="Number of workers. Default: the cores over the threads."
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(help="Equal shares of a batch: the most workers that can be used."),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="What starts the workers.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Configuration, a TOML or YAML file.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("-o", metavar="KEY=VALUE", help="Any configuration key; repeatable."),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("-p", metavar="NAME=VALUE", help="Parameter of the function; repeatable."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="The job's folder. Default: a new one under --runs.")
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(envvar="FARANDOLE_RUNS", help="Folder of the run directories."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Decides the order of rows and all random numbers.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each worker.")] = None,
    reduction: Annotated[
        str | None, typer.Option(help="How gradients are added: exact or fast.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="Of autocast: fp32 or bf16.")] = None,
    require_exact: Annotated[
        bool | None,
        typer.Option(
            "--require-exact/--no-require-exact",
            help="Refuse what may change the bits, as another CPU; else it is a warning.",
        ),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(help="What carries gradients: auto, shared_memory or network."),
    ] = None,
    tracker: Annotated[
        str | None, typer.Option(help="Where to record the job too, as mlflow; none for nowhere.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of --run-dir.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show no progress, only the result.")
    ] = False,
) -> int:
    """Train: run a training function on several workers."""
    flags = {
        "target": target,
        "workers": workers,
        "slots": slots,
        "engine": engine,
        "run_dir": run_dir,
        "runs": runs,
        "seed": seed,
        "threads": threads,
        "reduction": reduction,
        "precision": precision,
        "require_exact": require_exact,
        "transport": transport,
        "tracker.name": tracker,
        "resume": resume or None,
    }
    overrides = _pairs(option or [], "-o") | _pairs(param or [], "-p", prefix="params.")
    overrides |= {key: value for key, value in flags.items() if value is not None}
    return _launch(config, overrides, quiet=quiet)


def _pairs(texts: Sequence[str], flag: str, prefix: str = "") -> dict[str, Any]:
    from farandole.config import parse_value

    values: dict[str, Any] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise typer.BadParameter(f"{text!r} must be written NAME=VALUE", param_hint=flag)
        values[prefix + key.strip()] = parse_value(value.strip())
    return values


def _launch(file: Path | None, overrides: dict[str, Any], *, quiet: bool) -> int:
    from farandole.job.settings import resolve_config

    config = resolve_config(file, overrides)

    from farandole.job.launch import NoDisplay, launch

    shown: list[FarandoleError] = []

    def show(error: FarandoleError) -> None:
        _print_error(error)
        shown.append(error)

    try:
        result = launch(config, display=NoDisplay() if quiet else None, on_error=show)
    except FarandoleError as error:
        if error in shown:
            raise _ShownError(error) from error
        raise
    _print_result(result)
    return result.exit_code


def _print_result(result: Result) -> None:
    path = result.run_dir
    values = ", ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
    print(f"{result.status}{': ' if values else ''}{values}")
    print(f"run directory: {path}")
    for name, file in (("model", path / "model"), ("report", path / "report" / "report.md")):
        if file.exists():
            print(f"{name}: {file}")


# --- looking at jobs ----------------------------------------------------------------------


@app.command()
def runs(runs: RunsOption = DEFAULT_RUNS) -> None:
    """List the jobs in a folder, oldest first."""
    from rich.table import Table

    from farandole.job.views import list_runs

    found = list_runs(runs)
    if not found:
        print(f"no jobs in {runs}")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("name", "status", "started", "workers", "step", "loss", "folder"):
        table.add_column(name, justify="right" if name in ("workers", "step", "loss") else "left")
    for summary in found:
        table.add_row(*_runs_row(summary))
    _console().print(table)


def _runs_row(summary: RunSummary) -> tuple[str, ...]:
    loss = next((f"{value:.4g}" for value in summary.values.values()), "")
    return (
        summary.run.name,
        summary.state.status,
        _when(summary.state.started),
        str(summary.state.workers),
        _step(summary),
        loss,
        str(summary.run.path),
    )


@app.command()
def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run directory, or the start of its name. Default: the newest.",
        ),
    ] = None,
    runs: RunsOption = DEFAULT_RUNS,
) -> None:
    """Show how a job stands."""
    from rich.table import Table

    from farandole.job.progress import duration
    from farandole.job.views import find_run, newest_run, summarize

    summary = summarize(newest_run(runs) if run is None else find_run(run, runs))
    state = summary.state
    rows = [
        ("job", summary.run.name),
        ("status", state.status + (f": {state.message}" if state.message else "")),
        ("started", f"{_when(state.started)} on {state.host}, process {state.pid}"),
        ("time", duration(summary.elapsed_s)),
        ("workers", str(state.workers)),
    ]
    if summary.step is not None:
        epoch = "" if summary.epoch is None else f", epoch {summary.epoch + 1}"
        rows.append(("step", _step(summary) + epoch))
    rows += [(name, f"{value:.5g}") for name, value in summary.values.items()]
    for name, values in summary.evaluations.items():
        rows.append((name, ", ".join(f"{key} {value:.5g}" for key, value in values.items())))
    if state.exit_code is not None:
        rows.append(("exit code", str(state.exit_code)))
    rows.append(("folder", str(summary.run.path)))
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    _console().print(table)


@app.command()
def logs(
    run: RunArgument,
    rank: Annotated[
        int | None, typer.Option(help="Only the log of the worker that was started as this one.")
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="How many of the last lines of each log.")
    ] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")
    ] = False,
    runs: RunsOption = DEFAULT_RUNS,
) -> None:
    """Show what the workers printed."""
    from farandole.job.logs import log_lines
    from farandole.job.views import find_run

    found = log_lines(find_run(run, runs), worker_id=rank, num_lines=lines, follow=follow)
    for worker_id, line in found:
        print(line if rank is not None else f"{worker_id} | {line}", flush=follow)


@app.command()
def stop(
    run: RunArgument,
    now: Annotated[
        bool, typer.Option("--now", help="Kill it: what is not in a checkpoint is lost.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for its end.")] = 60.0,
    runs: RunsOption = DEFAULT_RUNS,
) -> None:
    """Stop a job after its step; it can be resumed."""
    from farandole.job.stop import stop_job
    from farandole.job.views import find_run

    found = find_run(run, runs)
    state = stop_job(found, timeout=timedelta(seconds=timeout), now=now)
    print(f"{found.name}: {state.status}")
    if state.status != "finished":
        print(f"go on with: farandole run --resume --run-dir {found.path}")


@app.command()
def sync(
    run: RunArgument,
    tracker: Annotated[
        str | None, typer.Option(help="Tracker to send to. Default: the job's.")
    ] = None,
    uri: Annotated[str | None, typer.Option(help="Its server. Default: the job's.")] = None,
    runs: RunsOption = DEFAULT_RUNS,
) -> None:
    """Send a job that has ended to its tracker, where that was not possible before."""
    from farandole.job.tracking import sync as send
    from farandole.job.views import find_run

    found = find_run(run, runs)
    config = found.read_config().tracker
    changes = {"name": tracker, "uri": uri}
    given = {key: value for key, value in changes.items() if value is not None}
    run_id = send(found.path, tracker=config.model_copy(update=given) if given else None)
    print(f"{found.name}: sent as run {run_id}")


@app.command()
def doctor(runs: RunsOption = DEFAULT_RUNS) -> int:
    """Say what is installed, what can be used, and what is wrong."""
    from rich.table import Table

    from farandole.job.doctor import diagnose

    colors = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table.grid(padding=(0, 2))
    checks = diagnose(runs)
    for check in checks:
        color = colors[check.status]
        table.add_row(f"[{color}]{check.status}[/{color}]", check.name, _literal(check.detail))
    _console().print(table)
    return 1 if any(check.status == "fail" for check in checks) else 0


# --- details ------------------------------------------------------------------------------


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    # Piped tables must not be cut to the width of a terminal that is not there.
    return console if console.is_terminal else Console(highlight=False, width=240)


def _literal(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _when(time: float) -> str:
    return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S")


def _step(summary: RunSummary) -> str:
    if summary.step is None:
        return ""
    total = "" if summary.total_steps is None else f"/{summary.total_steps:,}"
    return f"{summary.step:,}{total}"
