"""How much is read at once: from sizes alone, so that memory is bounded whatever a file holds.

What decides the order of rows (windows and sections) hangs on the files, never on the columns
that are read or on the memory that a user grants: then adding a column changes no order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from farandole.plan.lanes import DEFAULT_WINDOW_ROWS, MIN_LANES

_WINDOWS_BYTES = 96 << 20
"""For the windows of all lanes, if all columns are read."""
_MIN_WINDOW_ROWS = 128
_GROUPS_BYTES = 128 << 20
"""For the row groups that are read at the same time, if all columns are read."""
_MAX_OPEN_SECTIONS = 16
"""Where row groups are so long that files stay open while they are read."""

BATCH_BYTES = 12 << 20
"""Decoded at once: dictionaries are gone through for each batch, so large ones are cheaper."""
MAX_BATCH_ROWS = 1 << 16
_PAGE_BYTES = 1 << 20


def window_rows(row_bytes: float, num_slots: int) -> int:
    """Return how many rows are permuted together, for the mean size of a row."""
    fits = _WINDOWS_BYTES / (max(MIN_LANES, num_slots) * (row_bytes + 8))
    return int(min(max(fits, _MIN_WINDOW_ROWS), DEFAULT_WINDOW_ROWS))


def max_sections(group_rows: NDArray[np.int64], group_bytes: NDArray[np.float64]) -> int:
    """Return how many places may be read at the same time, for the sizes of row groups.

    Large row groups count for more, by their share of all bytes.
    """
    limit = max(1, int(_GROUPS_BYTES / max(_mean_by_size(group_bytes), 1.0)))
    long = _mean_by_size(group_rows.astype(np.float64)) > MAX_BATCH_ROWS
    return min(limit, _MAX_OPEN_SECTIONS) if long else limit


def _mean_by_size(sizes: NDArray[np.float64]) -> float:
    return float((sizes**2).sum() / max(sizes.sum(), 1.0))


def batch_rows(row_bytes: float, num_rows: int) -> int:
    """Return how many rows of a row group are decoded at once, in batches of equal size."""
    most = int(min(max(BATCH_BYTES / row_bytes, 1), MAX_BATCH_ROWS))
    return -(-num_rows // -(-num_rows // most))


def max_streams(budget_bytes: int, group_bytes: NDArray[np.float64], num_columns: int) -> int:
    """Return how many row groups may be in the middle of being read; at least 1.

    Parameters
    ----------
    budget_bytes : int
        For what they hold: a batch, often the next one, and a page of each column where a
        group is longer than a batch.
    group_bytes : ndarray of float64
        Sizes of the row groups.
    num_columns : int
        Columns that are read.
    """
    largest = max(float(group_bytes.max()), 1.0)
    pages = min(largest, num_columns * _PAGE_BYTES) if largest > BATCH_BYTES else 0.0
    return max(1, int(budget_bytes / (1.5 * min(largest, BATCH_BYTES) + pages)))
