"""Where in its epochs a job stands: with the step number, all that a resume needs of the data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """A place between two steps.

    Attributes
    ----------
    epoch : int
    loader : int
        Which loader of the epoch; the earlier ones are used up.
    row : int
        Rows of that loader's data that committed steps have used.
    data : str or None
        Fingerprint of that loader's data set.
    num_scheduled : int
        Scheduler steps of the epoch so far that were taken outside of loaders.
    """

    epoch: int = 0
    loader: int = 0
    row: int = 0
    data: str | None = None
    num_scheduled: int = 0
