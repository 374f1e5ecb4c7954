"""`farandole data`: look at data sets, and rewrite them for training."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from farandole.data.progress import Progress

PLAIN_EVERY_S = 5.0

data = typer.Typer(
    help="Look at data sets of Parquet files, and rewrite them for training.",
    no_args_is_help=True,
)

ColumnsOption = Annotated[
    str | None, typer.Option(help="Columns to read, separated by commas. Default: all.")
]
FilterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--filter", metavar="'COLUMN OP VALUE'", help="Rows to read; all must hold; repeatable."
    ),
]


@data.command()
def inspect(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Files, folders, patterns or URLs.")
    ],
    label: Annotated[
        str | None, typer.Option(help="Column by which to judge the order of rows.")
    ] = None,
    columns: ColumnsOption = None,
    filter: FilterOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 1024,
    json_: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say what a data set is like: row groups, order, cost of decoding, and what to do."""
    from farandole.data import ParquetDataset

    dataset = ParquetDataset(paths, columns=_names(columns), label=label, filters=_filters(filter))
    with _progress() as progress:
        found = dataset.inspect(batch_size=batch_size, progress=progress)
    print(json.dumps(found.to_dict()) if json_ else found)


@data.command()
def verify(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Files, folders, patterns or URLs.")
    ],
    columns: ColumnsOption = None,
    threads: Annotated[int, typer.Option(min=1, help="Row groups decoded at once.")] = 4,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> int:
    """Decode everything once, and remember what is damaged: jobs then refuse it or leave it out.

    Ends with 1 if anything is damaged.
    """
    from farandole.data import ParquetDataset

    dataset = ParquetDataset(paths, columns=_names(columns))
    with _progress(show=not quiet) as progress:
        report = dataset.verify(threads=threads, progress=progress)
    print(report)
    return 1 if report.damaged else 0


@data.command()
def rewrite(
    source: Annotated[str, typer.Argument(metavar="IN", help="A file, folder, pattern or URL.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    shuffle: Annotated[bool, typer.Option(help="Shuffle all rows, or keep their order.")] = True,
    seed: Annotated[int, typer.Option(help="Decides the order.")] = 0,
    columns: ColumnsOption = None,
    filter: FilterOption = None,
    partition_by: Annotated[
        str | None,
        typer.Option(metavar="COLUMNS", help="Columns that become folders, as month=3."),
    ] = None,
    row_group_rows: Annotated[
        int | None,
        typer.Option(min=1, help="Default: a 256th of all, within 8,192 to 65,536."),
    ] = None,
    row_group_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of a row group in memory, as 64MB.")
    ] = None,
    compression: Annotated[
        Literal["snappy", "none", "lz4", "zstd"], typer.Option(help="Of pages.")
    ] = "snappy",
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="About what rows may take in memory.")
    ] = "1GiB",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it is there, at the end.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Rewrite a data set for training: shuffled, in good row groups, cheap to decode."""
    from farandole.data.rewriting import rewrite as write

    with _terminated(), _progress(show=not quiet) as progress:
        report = write(
            source,
            out,
            shuffle=shuffle,
            seed=seed,
            columns=_names(columns),
            filters=_filters(filter),
            partition_by=_names(partition_by) or (),
            row_group_rows=row_group_rows,
            row_group_bytes=None if row_group_bytes is None else _bytes(row_group_bytes),
            compression=compression,
            memory_bytes=_bytes(memory),
            overwrite=overwrite,
            progress=progress,
        )
    print(report)


# --- values ------------------------------------------------------------------------------

_OPERATORS = ("<=", ">=", "!=", "==", "=", "<", ">", " not in ", " in ")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", re.IGNORECASE)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


def _filters(texts: list[str] | None) -> list[tuple[str, str, Any]] | None:
    """Return ``month <= 10`` as ``("month", "<=", 10)``; values are read as in TOML or YAML."""
    from farandole.config import parse_value

    filters: list[tuple[str, str, Any]] = []
    for text in texts or ():
        for operator in _OPERATORS:
            name, found, value = text.partition(operator)
            if found and name.strip() and value.strip():
                filters.append((name.strip(), operator.strip(), parse_value(value.strip())))
                break
        else:
            problem = f"{text!r} must be written 'COLUMN OP VALUE', as 'month <= 10'"
            raise typer.BadParameter(problem, param_hint="--filter")
    return filters or None


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no size; write it as 64MB or 1GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


# --- progress and the end ----------------------------------------------------------------


@contextmanager
def _progress(*, show: bool = True) -> Iterator[Progress | None]:
    """Give what shows progress on standard error: a bar on a terminal, else some lines."""
    if not show:
        yield None
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _PlainProgress()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), Remaining())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        yield advance


class _PlainProgress:
    """Prints a line every few seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PLAIN_EVERY_S

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PLAIN_EVERY_S
            print(f"{what}: {done:,} of {total:,}", file=sys.stderr, flush=True)


@contextmanager
def _terminated() -> Iterator[None]:
    """Make SIGTERM end the command as Ctrl-C does, so that nothing is left behind."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
