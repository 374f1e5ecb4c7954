"""A part of a data set in each epoch, another one each time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from numbers import Real
from typing import Any, Unpack

from farandole.data.loader import Loadable
from farandole.data.plans import check_sizes, shape_of, warnings_of
from farandole.errors import DataError
from farandole.plan.mixture import SamplePlan
from farandole.plan.steps import EpochSettings
from farandole.protocols import Blocks, Dataset


class SampledDataset(Loadable):
    """A part of a data set in each epoch. Made by ``dataset.sample(...)``."""

    def __init__(self, dataset: Dataset, *, fraction: float | None, rows: int | None) -> None:
        self._dataset = dataset
        self._fraction = fraction
        self._rows = rows

    def __repr__(self) -> str:
        asked = f"fraction={self._fraction}" if self._rows is None else f"rows={self._rows}"
        return f"{self._dataset!r}.sample({asked})"

    @property
    def num_rows(self) -> int:
        """Rows of the whole data set, which an evaluation reads."""
        return self._dataset.num_rows

    @property
    def sample_rows(self) -> int:
        """Rows of an epoch. Blocks at first use."""
        if self._rows is not None:
            return self._rows
        return max(1, round((self._fraction or 1) * self.num_rows))

    @property
    def fingerprint(self) -> str:
        """Hex digest of the data set and the size of the sample."""
        content = ["sample", self._dataset.fingerprint, self.sample_rows]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def validate(self) -> None:
        """Validate the data set, and that it has so many rows. Blocks."""
        self._dataset.validate()
        if self.sample_rows > self.num_rows:
            raise DataError(
                path=repr(self),
                problem=f"the data set has {self.num_rows} rows",
                remedy="sample at most as many",
            )

    def warnings(self) -> list[str]:
        """Return what a job's report must tell of the data; see `ParquetDataset.warnings`."""
        return warnings_of([self._dataset])

    def epoch_plan(self, **settings: Unpack[EpochSettings]) -> SamplePlan:
        """Return the order of an epoch; see `SamplePlan`. Raises ConfigError and DataError."""
        self.validate()
        check_sizes(repr(self), self.sample_rows, settings)
        return SamplePlan(
            shape_of(self._dataset, settings),
            self.sample_rows,
            seed=settings["seed"],
            epoch=settings["epoch"],
            batch_size=settings["batch_size"],
            num_slots=settings["num_slots"],
            start_row=settings.get("start_row", 0),
            shuffle=settings.get("shuffle", True),
            tail=settings.get("tail", "short"),
        )

    def read(self, plan: SamplePlan, slots: range, start_step: int = 0) -> Blocks:
        """Return the blocks of `slots`, in the order of (step, slot)."""
        return self._dataset.read(plan.part, slots, start_step)

    def read_rows(self, ranges: Sequence[range]) -> Blocks:
        """Return one block for each range of rows of the whole data set."""
        return self._dataset.read_rows(ranges)


class Samplable:
    """What makes samples of a data set. A mix-in."""

    def sample(
        self: Any, *, fraction: float | None = None, rows: int | None = None
    ) -> SampledDataset:
        """Return a data set of which each epoch is another part of this one.

        With `N` rows of which an epoch has `n`, ``k = ceil(N / n)`` epochs in a row, from a
        multiple of `k` on, have every row: once, but for ``k * n - N`` rows, which come twice.
        No epoch has a row twice.

        Parameters
        ----------
        fraction : float, optional
            Of the rows, above 0 and up to 1; the number of rows is rounded.
        rows : int, optional
            Rows of an epoch. Pass one of the two.

        Raises
        ------
        DataError
            If neither or both are given, or one is out of range.
        """
        right = (
            isinstance(rows, int) and rows > 0
            if fraction is None
            else rows is None and isinstance(fraction, Real) and 0 < fraction <= 1
        )
        if not right:
            raise DataError(
                path=repr(self),
                problem=f"sample(fraction={fraction!r}, rows={rows!r})",
                remedy="pass a fraction above 0 and up to 1, or a number of rows",
            )
        return SampledDataset(self, fraction=fraction, rows=rows)
