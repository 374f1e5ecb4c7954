"""Every seam of Farandole, as small protocols. Adapters live behind them, one each.

Conformance suites for them are in `farandole.testing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack, runtime_checkable

if TYPE_CHECKING:
    import torch

    from farandole.data.block import RowBlock
    from farandole.plan.steps import EpochSettings, Steps

# --- collectives --------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """A flat vector of gradients that is exchanged as one message."""

    index: int
    num_elements: int
    dtype: torch.dtype
    device: torch.device


@runtime_checkable
class Reducer(Protocol):
    """Adds all slots' buckets, once per step, in the tree's order.

    Each rank writes the sums of the subtrees that it holds (`farandole.plan.tree.subtrees` of
    its slots, in that order), announces every bucket in ascending order, then waits.
    """

    def region(self, bucket: int, subtree: int) -> torch.Tensor:
        """Return the vector to write: of one bucket, for the rank's subtree of that position.

        The memory is alike from step to step; between `wait` and the next write,
        region 0 holds the total, and its owner may change it in place.
        """
        ...

    def put(self, bucket: int, subtree: int, offset: int, values: torch.Tensor) -> None:
        """Write values to a region from an element on, perhaps later: before `wait` returns.

        `values` (1-d) must stay as they are until then. Saves a copy where a rank can add
        them from where they are.
        """
        ...

    def ready(self, bucket: int) -> None:
        """Announce that all regions of a bucket are written. Does not block."""
        ...

    def wait(self, record: bytes = b"") -> list[bytes]:
        """Block until region 0 of every bucket holds the total over all slots.

        `record` travels with the exchange: a small message (metrics, a flag) of this rank.
        Returns every rank's, by rank. Raises `PeerLostError` at once when a peer ends, or
        after the collective timeout. Every rank must call it, after `ready` for every bucket.
        """
        ...

    def close(self) -> None:
        """Free the memory."""
        ...


@runtime_checkable
class Comm(Protocol):
    """Collectives of one generation. Every rank must call the same ones in the same order.

    A call that does not match its peers' raises `MismatchError` on every rank; a peer that
    ends raises `PeerLostError` on every other rank at once. Not thread-safe.
    """

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        ...

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        ...

    def all_gather(self, tag: str, payload: bytes) -> list[bytes]:
        """Exchange small messages: return every rank's, by rank. Blocks. `tag` names the use."""
        ...

    def broadcast(self, tag: str, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Overwrite `tensors` with those of rank `source`. Blocks."""
        ...

    def reducer(self, buckets: Sequence[Bucket], num_slots: int, *, exact: bool = True) -> Reducer:
        """Make a reducer for these buckets. Blocks; every rank must pass the same ones.

        With ``exact=False`` each rank writes one region (the sum of its slots), and the
        order of the sum is the backend's.
        """
        ...

    def abort(self, reason: str) -> None:
        """Break the collectives: pending and later calls raise `PeerLostError` at once.

        For a peer that hangs. May be called from any thread; does not block.
        """
        ...

    def close(self) -> None:
        """Leave. Peers that still wait for this rank get `PeerLostError`."""
        ...


# --- engines ------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerSpec:
    """A command that is one worker."""

    worker_id: int
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    """Variables added to those that the engine's processes have anyway."""
    log_path: Path


@dataclass(frozen=True)
class WorkerEnd:
    """How a worker ended."""

    worker_id: int
    exit_code: int | None
    signal: int | None
    time: float
    """Seconds since the epoch at which the end was noticed."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself without an error."""
        return self.exit_code == 0


@runtime_checkable
class Engine(Protocol):
    """Starts commands and reports their ends; nothing more."""

    name: str

    def available_cores(self) -> int:
        """Return the number of cores that workers may use."""
        ...

    def start(self, worker: WorkerSpec) -> None:
        """Start one worker. Returns once it runs; raises OSError if it cannot be started."""
        ...

    def wait(self, timeout: timedelta) -> list[WorkerEnd]:
        """Block until a worker ends or the time is over; return the ends, in order, once each."""
        ...

    def terminate(self, worker_id: int) -> None:
        """Ask a worker to finish its step and leave (SIGTERM). Does not block."""
        ...

    def kill(self, worker_id: int) -> None:
        """End a worker and all its children at once (SIGKILL). Does not block."""
        ...

    def close(self) -> None:
        """Kill whatever still runs and free everything. Blocks until nothing is left."""
        ...


# --- trackers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class MetricPoint:
    """One value of one metric."""

    key: str
    value: float
    step: int
    time: float
    """Seconds since the epoch."""


@runtime_checkable
class Tracker(Protocol):
    """Records a job elsewhere, as exactly one run. Called from one process, never a worker's.

    Made by its entry point's class with the keywords `uri` (str or None), `experiment` (str) and
    `runs` (Path, the folder of the run directories). Every method may block or raise; the caller
    retries. All are idempotent.
    """

    name: str

    def start(self, *, run_name: str, run_id: str | None, tags: Mapping[str, str]) -> str:
        """Open the run `run_id` again, or make one; return its id.

        Without a `run_id`, a run that has the same tag ``farandole.job`` is taken: it was made by
        a call whose answer was lost.
        """
        ...

    def log_params(self, params: Mapping[str, str]) -> None:
        """Record the configuration, as flat keys."""
        ...

    def log_metrics(self, points: Sequence[MetricPoint]) -> None:
        """Record a batch of values."""
        ...

    def log_artifact(self, path: Path, folder: str) -> None:
        """Record a file or a directory under `folder`."""
        ...

    def log_model(self, model_dir: Path) -> None:
        """Record a saved model so that the tracker's own tools can load and serve it."""
        ...

    def finish(self, status: str) -> None:
        """End the run: `finished`, `failed` or `killed`."""
        ...


# --- data ---------------------------------------------------------------------------------


class Blocks(Protocol):
    """Blocks of rows, prefetched; `close` frees threads and files at once."""

    def __iter__(self) -> Iterator[RowBlock]:
        """Return itself."""
        ...

    def __next__(self) -> RowBlock:
        """Return the next block. Blocks until it is read; raises what reading it raised."""
        ...

    def close(self) -> None:
        """Stop reading. Idempotent."""
        ...


class Dataset(Protocol):
    """Rows in a known order, in shards; what is read does not depend on who reads it."""

    @property
    def num_rows(self) -> int:
        """Rows selected. May read footers at the first call."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex digest that changes when the rows do."""
        ...

    def validate(self) -> None:
        """Raise DataError or ColumnError for all that can be known before reading rows."""
        ...

    def epoch_plan(self, **settings: Unpack[EpochSettings]) -> Steps:
        """Return the order of an epoch, or of its rest from `start_row` on."""
        ...

    def read(self, plan: Any, slots: range, start_step: int = 0) -> Blocks:
        """Return the blocks of `slots` by a plan that `epoch_plan` made, by (step, slot)."""
        ...

    def read_rows(self, ranges: Sequence[range]) -> Blocks:
        """Return one block for each range of rows, in the order of the data set."""
        ...


@runtime_checkable
class Warns(Protocol):
    """A data set that may have to tell something which belongs into a job's report."""

    def warnings(self) -> Sequence[str]:
        """Return a line for each thing that is not as one would think, as files left out."""
        ...
