"""What all contestants share: they are timed over one epoch, and their rows are counted.

Runs in the peers' own environments, so it needs numpy only. Column 0 of a batch is the number of
the row.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

import numpy as np


def compete(
    package: str,
    epoch: Callable[[Path, Path, int, int], Iterable[np.ndarray]],
    prepare: Callable[[Path, Path], None] | None = None,
) -> None:
    """Time one epoch of `epoch(table, folder, batch_size, seed)`, and print what came out."""
    table, folder = Path(sys.argv[1]), Path(sys.argv[2])
    batch_size, limit_s, seed = int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    if prepare is not None and not folder.exists():
        prepare(table, folder)
    ids: list[np.ndarray] = []
    start, num_rows, first_s = time.perf_counter(), 0, None
    complete = True
    for batch in epoch(table, folder, batch_size, seed):
        now = time.perf_counter() - start
        first_s = now if first_s is None else first_s
        num_rows += len(batch)
        ids.append(np.array(batch if batch.ndim == 1 else batch[:, 0]))
        if now > limit_s:
            complete = False
            break
    elapsed_s = time.perf_counter() - start
    found = np.concatenate(ids).astype(np.int64)
    times = np.bincount(found)
    means = np.array([values.mean() for values in ids if len(values) == batch_size])
    full = found.std() / max(batch_size, 1) ** 0.5
    result = {
        "version": f"{package} {version(package)}",
        "pace": num_rows / elapsed_s,
        "first_s": first_s,
        "num_rows": num_rows,
        "complete": complete,
        "distinct": int(np.count_nonzero(times)),
        "most": int(times.max()),
        "id_sum": int(found.sum()),
        "spread": float(means.std() / full) if len(means) > 1 and full else None,
    }
    print("RESULT " + json.dumps(result), flush=True)
