"""The report of a job: a short text always, and one picture where matplotlib is installed."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from farandole.errors import RunDirectoryError
from farandole.job.progress import duration
from farandole.job.rundir import RunDir, write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

MAX_POINTS = 2000
NUM_BINS = 10
MAX_CURVES = 6
MIN_NOISE = 0.01

_INK, _FAINT = "#30343b", "#d9dce1"
_COLORS = ("#2f6db3", "#d9662b", "#3a8f5c", "#8a4fa3", "#b8942a", "#5b6573")

_Series = tuple[list[int], list[float]]


@dataclass
class _Curves:
    """Logged values as series over steps, by name; evaluations by (evaluation, name)."""

    steps: dict[str, _Series] = field(default_factory=dict)
    evaluations: dict[tuple[str, str], _Series] = field(default_factory=dict)
    summary: dict[str, float] = field(default_factory=dict)


def write_report(run: RunDir) -> list[Path]:
    """Write `report/report.md` and, if matplotlib is installed, `report/report.png`.

    The picture has the learning curves and, for an evaluation whose rows have a `score` (a
    probability) and a `label` (0 or 1), its calibration. Blocks; call it in one process.

    Returns
    -------
    list of Path
        The files that were written.

    Raises
    ------
    RunDirectoryError
        The folder cannot be written.
    """
    curves = _read_curves(run)
    scored = _scored_evaluation(run)
    written = [run.report / "report.md"]
    picture = _picture(curves, scored)
    try:
        run.report.mkdir(parents=True, exist_ok=True)
        if picture is not None:
            written.append(run.report / "report.png")
            write_atomic(written[-1], picture)
        text = _text(run, curves, has_picture=picture is not None)
        write_atomic(written[0], text.encode())
    except OSError as error:
        raise RunDirectoryError(
            path=str(run.path),
            problem=f"the report cannot be written ({error.strerror or error})",
            remedy="free some space there",
        ) from error
    return written


# --- reading ------------------------------------------------------------------------------


def _read_curves(run: RunDir) -> _Curves:
    curves = _Curves()
    for record in run.metrics():
        kind, step = record.get("kind"), record.get("step", 0)
        for name, value in record.get("values", {}).items():
            if kind == "step":
                series = curves.steps.setdefault(name, ([], []))
            elif kind == "evaluation":
                key = (record.get("name", "evaluation"), name)
                series = curves.evaluations.setdefault(key, ([], []))
            else:
                curves.summary[name] = value
                continue
            series[0].append(step)
            series[1].append(value)
    return curves


def _scored_evaluation(run: RunDir) -> tuple[str, np.ndarray, np.ndarray] | None:
    """Return name, scores and labels of the first evaluation that has both."""
    for path in sorted(run.evaluations.glob("*.parquet")):
        try:
            if not {"score", "label"} <= set(pq.read_schema(path).names):
                continue
            table = pq.read_table(path, columns=["score", "label"])
            score = table["score"].to_numpy().astype(np.float64)
            label = table["label"].to_numpy().astype(np.float64)
        except (OSError, ValueError, pa.ArrowException):  # a report is no reason to fail
            continue
        known = np.isfinite(score) & np.isfinite(label)
        score, label = score[known], label[known]
        if len(score) and score.min() >= 0 and score.max() <= 1 and set(np.unique(label)) <= {0, 1}:
            return path.stem, score, label
    return None


# --- text ---------------------------------------------------------------------------------


def _text(run: RunDir, curves: _Curves, *, has_picture: bool) -> str:
    config, state = run.read_config(), run.read_state()
    ended = state.ended if state.ended is not None else state.started
    facts = [
        ("function", f"`{config.target}`"),
        ("status", state.status + (f": {state.message}" if state.message else "")),
        ("time", duration(max(ended - state.started, 0))),
        ("workers, slots", f"{state.workers}, {config.slots}"),
        ("engine", config.engine),
        ("reduction, precision", f"{config.reduction}, {config.precision}"),
        ("seed", str(config.seed)),
    ]
    facts += [(f"parameter `{name}`", f"`{value}`") for name, value in config.params.items()]
    lines = [f"# {run.name}", ""]
    if has_picture:
        lines += ["![Learning curves](report.png)", ""]
    lines += _table(("", ""), facts)
    if curves.steps:
        rows = [_curve_row(name, series) for name, series in curves.steps.items()]
        lines += ["", "## Training", "", *_table(("value", "first", "last", "steps"), rows)]
    if curves.evaluations:
        rows = [
            (evaluation, name, _number(values[-1]), f"{steps[-1]:,}")
            for (evaluation, name), (steps, values) in curves.evaluations.items()
        ]
        head = ("evaluation", "value", "last", "at step")
        lines += ["", "## Evaluations", "", *_table(head, rows)]
    if curves.summary:
        rows = [(name, _number(value)) for name, value in curves.summary.items()]
        lines += ["", "## Summary", "", *_table(("value", ""), rows)]
    return "\n".join(lines) + "\n"


def _curve_row(name: str, series: _Series) -> tuple[str, ...]:
    steps, values = series
    return name, _number(values[0]), _number(values[-1]), f"{len(steps):,}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(head), "|" + " --- |" * len(head), *map(line, rows)]


def _number(value: float) -> str:
    return f"{value:.5g}"


# --- picture ------------------------------------------------------------------------------


def _picture(curves: _Curves, scored: tuple[str, np.ndarray, np.ndarray] | None) -> bytes | None:
    """Return a PNG, or None without matplotlib or anything to show."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    panels = _panels(curves)
    num_panels = len(panels) + (scored is not None)
    if not num_panels:
        return None
    num_columns = num_panels if num_panels <= 3 else math.ceil(math.sqrt(num_panels))
    num_rows = math.ceil(num_panels / num_columns)
    figure = Figure(figsize=(5.2 * num_columns, 4.0 * num_rows), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    grid = figure.add_gridspec(num_rows, num_columns, wspace=0.06, hspace=0.06)
    cells = [grid[divmod(position, num_columns)] for position in range(num_panels)]
    for cell, name in zip(cells, panels, strict=False):
        _draw_curve(figure.add_subplot(cell), name, curves)
    if scored is not None:
        _draw_calibration(figure, cells[-1], *scored)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()


def _panels(curves: _Curves) -> list[str]:
    """Return the names that get a panel: logged ones first; one point alone is no curve."""
    names = [name for name, (steps, _) in curves.steps.items() if len(steps) > 1]
    for (_, name), (steps, _) in curves.evaluations.items():
        if len(steps) > 1 and name not in names:
            names.append(name)
    return names[:MAX_CURVES]


def _draw_curve(axes: Axes, name: str, curves: _Curves) -> None:
    _plain(axes)
    axes.set_title(name, loc="left", color=_INK, fontsize=11, fontweight="bold")
    axes.set_xlabel("step", color=_INK)
    if name in curves.steps:
        steps, values = (np.asarray(part, dtype=np.float64) for part in curves.steps[name])
        thin = slice(None, None, max(len(steps) // MAX_POINTS, 1))
        smooth = _smooth(values)
        if smooth is None:
            axes.plot(steps, values, color=_COLORS[0], lw=1.8, label="training")
        else:
            axes.plot(steps[thin], values[thin], color=_COLORS[0], alpha=0.22, lw=0.8)
            axes.plot(steps[thin], smooth[thin], color=_COLORS[0], lw=1.8, label="training")
            _limit(axes, values)
    same = [(key[0], series) for key, series in curves.evaluations.items() if key[1] == name]
    for number, (evaluation, (steps, values)) in enumerate(same, start=1):
        color = _COLORS[number % len(_COLORS)]
        axes.plot(steps, values, "o-", color=color, lw=1.2, ms=5, label=evaluation)
    if same:
        axes.legend(frameon=False, labelcolor=_INK)


def _smooth(values: np.ndarray) -> np.ndarray | None:
    """Return a centred moving mean over a twentieth of a long, noisy series, else None."""
    width = len(values) // 40
    if width < 2 or not np.isfinite(values).all():
        return None
    if np.abs(np.diff(values)).mean() < MIN_NOISE * np.ptp(values):
        return None
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first = np.maximum(index - width, 0)
    last = np.minimum(index + width + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def _limit(axes: Axes, values: np.ndarray) -> None:
    """Keep the first steps' high values from flattening all the rest."""
    low, high = float(values.min()), float(np.quantile(values, 0.995))
    if high > low:
        margin = 0.06 * (high - low)
        axes.set_ylim(low - margin, high + margin)


def _draw_calibration(
    figure: Figure, cell: SubplotSpec, name: str, score: np.ndarray, label: np.ndarray
) -> None:
    """Draw how often the label is 1 among rows of alike score, over how many rows there are."""
    parts = cell.subgridspec(2, 1, height_ratios=(3, 1), hspace=0.04)
    upper = figure.add_subplot(parts[0])
    lower = figure.add_subplot(parts[1], sharex=upper)
    for axes in (upper, lower):
        _plain(axes)
    # Bins of equally many rows: scores are seldom spread evenly.
    order = np.argsort(score, kind="stable")
    bins = [rows for rows in np.array_split(order, NUM_BINS) if len(rows)]
    mean_score = np.array([score[rows].mean() for rows in bins])
    rate = np.array([label[rows].mean() for rows in bins])
    num_rows = np.array([len(rows) for rows in bins])
    error = 1.96 * np.sqrt(rate * (1 - rate) / num_rows)
    upper.plot([0, 1], [0, 1], color=_FAINT, lw=1.4, zorder=0)
    upper.errorbar(mean_score, rate, yerr=error, fmt="o-", color=_COLORS[0], lw=1.6, ms=5)
    upper.axhline(
        label.mean(), color=_COLORS[1], lw=1, ls="--", label=f"base rate {label.mean():.3f}"
    )
    upper.set(xlim=(0, 1), ylim=(0, 1))
    upper.set_title(
        f"calibration on {name}", loc="left", color=_INK, fontsize=11, fontweight="bold"
    )
    upper.set_ylabel("share of label 1", color=_INK)
    upper.tick_params(labelbottom=False)
    upper.legend(frameon=False, labelcolor=_INK, loc="upper left")
    lower.hist(score, bins=40, range=(0, 1), color=_COLORS[0], alpha=0.7)
    lower.set_xlabel("predicted probability", color=_INK)
    lower.set_ylabel("rows", color=_INK)


def _plain(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    axes.grid(True, color=_FAINT, lw=0.6, alpha=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9)
