"""Several data sets as one, in stated shares."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from farandole.data.block import RowBlock, concatenate
from farandole.data.columns import Masked, Ragged
from farandole.data.loader import Loadable
from farandole.data.plans import check_sizes, shape_of, warnings_of
from farandole.data.prefetch import Prefetch
from farandole.errors import ColumnError, ConfigError, ConfigProblem, DataError
from farandole.plan.interleave import Interleave, Stop, whole_shares
from farandole.plan.mixture import MixPlan, PassPlan
from farandole.plan.steps import EpochSettings
from farandole.protocols import Blocks, Dataset

_STEPS_AHEAD = 2


class MixedDataset(Loadable):
    """Several data sets as one, in stated shares. Made by `mix` and `balance`.

    Attributes
    ----------
    names : tuple of str
        Of the data sets; ``batch.source`` is a place in it.
    shares : dict of str to float
        Of a batch, as they are: see `mix` on rounding.
    """

    def __init__(
        self, datasets: Mapping[str, Dataset], shares: Sequence[int], stop: Stop, name: str
    ) -> None:
        self.names = tuple(datasets)
        self.shares = {n: s / sum(shares) for n, s in zip(datasets, shares, strict=True)}
        self._datasets = tuple(datasets.values())
        self._shares = tuple(shares)
        self._stop: Stop = stop
        self._name = name
        self._is_checked = False

    def __repr__(self) -> str:
        return f"{self._name}({', '.join(self.names)})"

    @property
    def num_rows(self) -> int:
        """Rows of all data sets together, each once."""
        return sum(dataset.num_rows for dataset in self._datasets)

    @property
    def fingerprint(self) -> str:
        """Hex digest of the data sets, their shares and where an epoch ends."""
        prints = [dataset.fingerprint for dataset in self._datasets]
        content = [self.names, prints, self._shares, self._stop]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def validate(self) -> None:
        """Validate all data sets, and compare the columns of a row of each. Blocks.

        Raises
        ------
        ColumnError
            If the data sets do not give the same columns.
        """
        for dataset in self._datasets:
            dataset.validate()
        if not self._is_checked:
            self._check_columns()
            self._is_checked = True

    def warnings(self) -> list[str]:
        """Return what a job's report must tell of the data; see `ParquetDataset.warnings`."""
        return warnings_of(self._datasets)

    def _check_columns(self) -> None:
        kinds = [_kinds(dataset) for dataset in self._datasets]
        for name, other in zip(self.names[1:], kinds[1:], strict=True):
            for column in {**kinds[0], **other}:
                one, two = (found.get(column, "missing") for found in (kinds[0], other))
                if one != two:
                    raise ColumnError(
                        path=repr(self),
                        column=column,
                        problem=f"is {one} in {self.names[0]!r} and {two} in {name!r}; ask all "
                        "data sets for the same columns, with schema= for their types and "
                        "fa.masked() for columns that have nulls in some only",
                    )

    def epoch_plan(self, **settings: Unpack[EpochSettings]) -> MixPlan:
        """Return the order of an epoch; see `MixPlan`. Blocks at first use.

        Raises
        ------
        ConfigError
            If the batch is too small for the slots, or no multiple of them.
        ColumnError, DataError
            If data sets do not fit together, or an epoch has too few rows.
        """
        self.validate()
        num_slots, batch_size = settings["num_slots"], settings["batch_size"]
        if batch_size % num_slots:
            expected = f"a multiple of the {num_slots} slots, as for every mix"
            problem = ConfigProblem(key="batch_size", value=batch_size, expected=expected)
            raise ConfigError(problems=(problem,))
        sources = tuple(shape_of(dataset, settings) for dataset in self._datasets)
        order = Interleave(self._shares, num_slots)
        rows = order.epoch_rows([source.num_rows for source in sources], self._stop)
        check_sizes(f"an epoch of {self!r}", rows, settings)
        return MixPlan(
            sources,
            self._shares,
            rows,
            seed=settings["seed"],
            epoch=settings["epoch"],
            batch_size=batch_size,
            num_slots=num_slots,
            start_row=settings.get("start_row", 0),
            shuffle=settings.get("shuffle", True),
            tail=settings.get("tail", "short"),
        )

    def read(self, plan: MixPlan, slots: range, start_step: int = 0) -> Prefetch[RowBlock]:
        """Read the blocks of `slots` ahead in threads, in the order of (step, slot)."""
        return Prefetch(self._steps(plan, slots, start_step), _STEPS_AHEAD)

    def _steps(self, plan: MixPlan, slots: range, start_step: int) -> Generator[list[RowBlock]]:
        readers = [
            _PassReader(dataset, plan.passes(source, start_step), slots)
            for source, dataset in enumerate(self._datasets)
        ]
        try:
            for step in range(start_step, plan.num_steps):
                parts = [reader.take(step) for reader in readers]
                yield [
                    _merged(plan.step_sources(step, slot), [part[place] for part in parts])
                    for place, slot in enumerate(slots)
                ]
        finally:
            for reader in readers:
                reader.close()

    def read_rows(self, ranges: Sequence[range]) -> Prefetch[RowBlock]:
        """Read one block for each range of rows, the data sets one after another."""
        return Prefetch(self._ranges(ranges), _STEPS_AHEAD)

    def _ranges(self, ranges: Sequence[range]) -> Generator[list[RowBlock]]:
        starts = np.cumsum([0, *(dataset.num_rows for dataset in self._datasets)]).tolist()
        for rows in ranges:
            parts: list[RowBlock] = []
            for source, dataset in enumerate(self._datasets):
                begin, end = max(rows.start, starts[source]), min(rows.stop, starts[source + 1])
                if begin < end:
                    wanted = range(begin - starts[source], end - starts[source])
                    block = _first_block(dataset, wanted)
                    parts.append(replace(block, source=np.full(end - begin, source)))
            yield [concatenate(parts)]


def mix(
    datasets: Mapping[str, Dataset],
    weights: Mapping[str, float] | None = None,
    *,
    stop: Stop = "first_exhausted",
) -> MixedDataset:
    """Return several data sets as one, in which each has a stated share of every batch.

    In an epoch each data set gives a fixed number of rows. If it has that many, no row of it
    comes twice, and the next epochs take other rows as long as there are some; if it has fewer,
    it is read again and again, each time in another order, so that each of its rows comes
    equally often, to one time.

    Parameters
    ----------
    datasets : dict of str to Dataset
        `ParquetDataset` or `ArrayDataset`, or parts of them, which give the same columns.
    weights : dict of str to float, optional
        Positive numbers in the proportions of which rows come; by default they are equal. Where
        no whole number of rows up to 1,000 has them exactly, they are rounded to a thousandth.
    stop : {"first_exhausted", "all_exhausted"} or int, default="first_exhausted"
        When an epoch ends: before a data set would have to begin anew, when every row of each
        has been used, or after so many rows. Rounded to a multiple of the slots: down for the
        first and the last, up for the second.

    Notes
    -----
    A batch has its share of each data set to within one row for two data sets, and to within
    less than two rows for more. ``batch.source`` says from which one each row is.

    Raises
    ------
    DataError
        If weights and data sets do not go together, or a weight is not positive.

    Examples
    --------
    >>> both = fa.mix({"web": web, "books": books}, {"web": 0.7, "books": 0.3})  # doctest: +SKIP
    """
    return _mixed(datasets, weights, stop, "mix")


def _mixed(
    datasets: Mapping[str, Dataset], weights: Mapping[str, float] | None, stop: Stop, name: str
) -> MixedDataset:
    given = dict.fromkeys(datasets, 1.0) if weights is None else weights
    if not datasets or set(given) != set(datasets):
        raise DataError(
            path=name,
            problem=f"weights are for {sorted(given)}, data sets are {sorted(datasets)}",
            remedy="give each data set one weight",
        )
    whole = isinstance(stop, int) and not isinstance(stop, bool) and stop > 0
    if not whole and stop not in ("first_exhausted", "all_exhausted"):
        raise DataError(
            path=name,
            problem=f"stop={stop!r}",
            remedy="pass 'first_exhausted', 'all_exhausted' or a number of rows",
        )
    try:
        shares = whole_shares([given[dataset] for dataset in datasets])
    except ValueError as error:
        raise DataError(path=name, problem=str(error), remedy="leave data sets out") from error
    return MixedDataset(datasets, shares, stop, name)


class _PassReader:
    """Reads a data set pass after pass, and holds those open that a step draws on."""

    def __init__(
        self, dataset: Dataset, passes: Iterator[tuple[int, PassPlan]], slots: range
    ) -> None:
        self._dataset = dataset
        self._passes = passes
        self._next = next(passes, None)
        self._slots = slots
        self._open: list[tuple[PassPlan, Blocks]] = []

    def take(self, step: int) -> list[list[RowBlock]]:
        """Return the blocks of each slot in a step: one for each pass that gives it rows."""
        while self._next is not None and self._next[0] <= step:
            first, plan = self._next
            self._open.append((plan, self._dataset.read(plan, self._slots, first)))
            self._next = next(self._passes, None)
        found: list[list[RowBlock]] = [[] for _ in self._slots]
        for _, blocks in self._open:
            for parts in found:
                block = next(blocks)
                if block.num_rows:
                    parts.append(block)
        for plan, blocks in self._open:
            if plan.num_steps == step + 1:
                blocks.close()
        self._open = [(plan, blocks) for plan, blocks in self._open if plan.num_steps > step + 1]
        return found

    def close(self) -> None:
        """Stop reading."""
        for _, blocks in self._open:
            blocks.close()
        self._open = []


def _merged(sources: np.ndarray[Any, np.dtype[np.int64]], parts: list[list[RowBlock]]) -> RowBlock:
    """Return the rows of all parts (by source, each in order) in the order of `sources`."""
    whole = concatenate([block for blocks in parts for block in blocks])
    places = np.empty(len(sources), np.intp)
    places[np.argsort(sources, kind="stable")] = np.arange(len(sources))
    return replace(whole.take(places), source=sources)


def _first_block(dataset: Dataset, rows: range) -> RowBlock:
    blocks = dataset.read_rows([rows])
    try:
        return next(blocks)
    finally:
        blocks.close()


def _kinds(dataset: Dataset) -> dict[str, str]:
    """Return what a data set gives for each column, as text."""
    block = _first_block(dataset, range(1))
    named = {"features": block.features, "categories": block.categories, "label": block.label}
    columns: dict[str, Any] = {**named, **block.columns}
    return {name: _kind(column) for name, column in columns.items() if column is not None}


def _kind(column: Any) -> str:
    if isinstance(column, np.ndarray):
        return f"{column.dtype}{list(column.shape[1:]) if column.ndim > 1 else ''}"
    if isinstance(column, Masked | Ragged):
        return f"{type(column).__name__} {_kind(column.values)}"
    return f"{type(column).__name__} {getattr(column, 'type', '')}".strip()
