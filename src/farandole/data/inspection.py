"""What is found out about a data set, as text, and what to do about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

_LARGE_GROUP_ROWS = 262_144
_SMALL_GROUP_ROWS = 2048
_MAX_SPREAD = 1.5
_MAX_SKEW = 4.0
_SMALL_FILE_BYTES = 1 << 20
_MIN_GAIN = 1.3


@dataclass(frozen=True)
class Sizes:
    """The smallest, the median and the largest of some sizes, and their sum."""

    min: int
    median: float
    max: int
    total: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Sizes:
        """Return those of a list; zeros if it is empty."""
        given = sizes or [0]
        return cls(min(given), median(given), max(given), sum(given))

    @property
    def skew(self) -> float:
        """The largest over the median."""
        return self.max / self.median if self.median else 1.0


@dataclass(frozen=True)
class Column:
    """A column: what it is, what it becomes, and what it costs.

    Attributes
    ----------
    name, type : str
    becomes : str
        Where it goes in a batch, and as what; empty where it is not read.
    num_nulls : int or None
        None where footers do not say.
    size_bytes : int
        On the disk.
    encoding, compression : str
        Such as ``"dictionary"`` and ``"snappy"``; several where files differ.
    decode_ns : float or None
        Nanoseconds for a row, on one thread.
    rewritten_ns : float or None
        The same if `farandole data rewrite` had written it.
    becomes_tensor : bool
        Whether that would store it as tensors, by the sample.
    """

    name: str
    type: str
    becomes: str
    num_nulls: int | None = None
    size_bytes: int = 0
    encoding: str = "folder"
    compression: str = ""
    decode_ns: float | None = None
    rewritten_ns: float | None = None
    becomes_tensor: bool = False


@dataclass(frozen=True)
class Label:
    """How a label lies in the data set, and how well batches mix it.

    Attributes
    ----------
    name : str
    order : {"ascending", "descending", "constant", "none"}
    neighbours : float
        Correlation of rows that follow one another: 0 in random order, near 1 if sorted.
    batch_size, num_batches : int
        Of the batches that were simulated by the plan.
    spread : float or None
        Root mean square distance of batch means from the mean; None without a full batch.
    full_spread : float
        What it would be after a full shuffle.
    """

    name: str
    order: str
    neighbours: float
    batch_size: int
    num_batches: int
    spread: float | None
    full_spread: float

    @property
    def ratio(self) -> float | None:
        """Spread of batch means over that of a full shuffle: about 1 if rows are mixed well.

        Below 1, batches are more alike than chance would make them, as strata are.
        """
        if self.spread is None or self.full_spread == 0:
            return None
        return self.spread / self.full_spread


@dataclass(frozen=True)
class Inspection:
    """What `ParquetDataset.inspect` has found. `str` gives a report.

    Attributes
    ----------
    path : str
    num_rows : int
        Selected.
    num_files, num_row_groups : int
    file_bytes, group_rows, group_bytes : Sizes
        Sizes of files, and rows and stored bytes of row groups.
    columns : tuple of Column
    label : Label or None
    advice : tuple of str
    """

    path: str
    num_rows: int
    num_files: int
    file_bytes: Sizes
    num_row_groups: int
    group_rows: Sizes
    group_bytes: Sizes
    columns: tuple[Column, ...]
    label: Label | None
    advice: tuple[str, ...] = ()

    @property
    def decode_ns(self) -> float:
        """Nanoseconds to decode all columns of a row."""
        return sum(column.decode_ns or 0.0 for column in self.columns)

    @property
    def rewritten_ns(self) -> float:
        """The same if `farandole data rewrite` had written it."""
        return sum(column.rewritten_ns or 0.0 for column in self.columns)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        result = dataclasses.asdict(self)
        result |= {"decode_ns": self.decode_ns, "rewritten_ns": self.rewritten_ns}
        if self.label is not None:
            result["label"]["ratio"] = self.label.ratio
        return result

    def __str__(self) -> str:
        return "\n".join([*self.summary(), "", *_table(self.column_rows()), "", *self.closing()])

    def summary(self) -> list[str]:
        """Return the lines on rows, files, row groups and the label."""
        rows, sizes = self.group_rows, self.group_bytes
        bytes_ = " / ".join(map(_size, (sizes.min, sizes.median, sizes.max)))
        files = f"{self.num_files:,} file(s), {_size(self.file_bytes.total)}"
        groups = f"{rows.min:,} / {rows.median:,.0f} / {rows.max:,} rows"
        lines = [
            f"{self.path}: {self.num_rows:,} rows in {files}",
            f"row groups (smallest / median / largest): {self.num_row_groups:,} of {groups}",
            f"  stored in {bytes_}; the largest is {rows.skew:.1f} times the median",
        ]
        return lines + ([] if self.label is None else list(_label_lines(self.label)))

    def column_rows(self) -> list[tuple[str, ...]]:
        """Return the table of columns, with its head."""
        head = ("column", "type", "in a batch", "nulls", "size", "stored as", "ns/row", "rewritten")
        rows = [
            (
                column.name,
                column.type,
                column.becomes or "not read",
                "?" if column.num_nulls is None else f"{column.num_nulls:,}",
                _size(column.size_bytes),
                f"{column.encoding} {column.compression}".strip(),
                "" if column.decode_ns is None else f"{column.decode_ns:.1f}",
                "" if column.rewritten_ns is None else f"{column.rewritten_ns:.1f}",
            )
            for column in self.columns
        ]
        return [head, *rows]

    def closing(self) -> list[str]:
        """Return the lines on the cost of decoding, and the advice."""
        cost = (
            f"decoding all columns: {self.decode_ns:,.0f} ns a row on one thread, "
            f"{self.rewritten_ns:,.0f} if rewritten"
        )
        advice = [f"- {line}" for line in self.advice] or ["- nothing: it is in good shape"]
        return [cost, "advice:", *advice]


def advise(found: Inspection) -> Inspection:
    """Return an inspection with the advice that follows from its figures."""
    return dataclasses.replace(found, advice=tuple(_advice(found)))


def _advice(found: Inspection) -> Iterator[str]:
    rows = found.group_rows
    if rows.max > _LARGE_GROUP_ROWS:
        yield (
            f"row groups of up to {rows.max:,} rows: only few can be read at once, so batches "
            "mix fewer places; rewrite with smaller ones"
        )
    if rows.median < _SMALL_GROUP_ROWS and found.num_row_groups > 1:
        yield f"row groups of {rows.median:,.0f} rows cost more to open than to read: rewrite"
    elif found.num_files > 1 and found.file_bytes.median < _SMALL_FILE_BYTES:
        yield f"{found.num_files:,} files of about {_size(found.file_bytes.median)}: rewrite"
    if rows.skew > _MAX_SKEW:
        yield f"the largest row group is {rows.skew:.0f} times the median: rewrite"
    yield from _label_advice(found.label)
    coded = [c for c in found.columns if "dictionary" in c.encoding and c.type in _FLOATS]
    gain = _gain(coded)
    if gain > _MIN_GAIN:
        yield f"dictionary pages for floats cost {gain:.1f}x ({_named(coded)}): rewrite"
    lists = [c for c in found.columns if c.becomes_tensor]
    if (gain := _gain(lists)) > _MIN_GAIN:
        yield f"lists of one length decode {gain:.1f}x faster as tensors ({_named(lists)}): rewrite"
    rest = [c for c in found.columns if c not in coded and c not in lists]
    if (gain := _gain(rest)) > _MIN_GAIN * 1.2:
        yield f"other columns would decode {gain:.1f}x faster if rewritten"


_FLOATS = ("halffloat", "float", "double")


def _label_advice(label: Label | None) -> Iterator[str]:
    if label is None:
        yield "name a label (label=, --label) to learn how well batches mix it"
    elif label.ratio is not None and label.ratio > _MAX_SPREAD:
        how = "sorted" if label.order in ("ascending", "descending") else "clustered"
        yield (
            f"{how} by {label.name}: batch means spread {label.ratio:.1f} times as much as after a "
            "full shuffle; rewrite with a shuffle"
        )


def _label_lines(label: Label) -> Iterator[str]:
    yield (
        f"label {label.name}: order {label.order}, neighbouring rows correlate by "
        f"{label.neighbours:.2f}"
    )
    if label.ratio is not None:
        yield (
            f"batches of {label.batch_size:,}: means spread by {label.spread:.3g}, "
            f"{label.ratio:.2f} times a full shuffle's ({label.num_batches:,} batches simulated)"
        )


def _gain(columns: Sequence[Column]) -> float:
    """Return how many times faster some columns would decode if rewritten."""
    now = sum(column.decode_ns or 0.0 for column in columns)
    then = sum(column.rewritten_ns or 0.0 for column in columns)
    return now / then if then else 1.0


def _named(columns: Sequence[Column]) -> str:
    names = ", ".join(column.name for column in columns[:3])
    return names if len(columns) <= 3 else f"{names} and {len(columns) - 3} more"


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
