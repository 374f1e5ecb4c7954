"""A data set of Parquet files."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import pyarrow as pa

from farandole.data import budget
from farandole.data.block import RowBlock, Transform, concatenate, transformed
from farandole.data.contents import Contents
from farandole.data.counting import expression_text, filter_columns
from farandole.data.files import PathLike, find_files, given_names
from farandole.data.groups import GroupReader
from farandole.data.index import IndexCache
from farandole.data.inspection import Inspection
from farandole.data.layout import Columns, make_layout
from farandole.data.loader import Loadable
from farandole.data.names import check_names
from farandole.data.plans import make_epoch_plan
from farandole.data.prefetch import Prefetch
from farandole.data.preprocess import Preprocessor
from farandole.data.progress import Progress, no_progress
from farandole.data.reader import LaneReader, read_ranges, shards_of
from farandole.data.remote import DEFAULT_CACHE_BYTES, Storage, split_credentials
from farandole.data.sampling import Samplable
from farandole.data.schema import SchemaReport
from farandole.data.selection import as_expression, select_shards
from farandole.data.shards import ShardSource
from farandole.data.splits import Part, Splittable
from farandole.data.streams import Rows, ShardCache, Streams
from farandole.data.verify import Damage, VerifyReport, damage_error, find_damage, known_damage
from farandole.errors import DamagedFileError, DataError, UsageError
from farandole.plan.lanes import EpochPlan, Piece
from farandole.plan.steps import EpochSettings

_AHEAD_ROWS = 32768
_AHEAD_BYTES = 32 << 20
_MAX_CHUNKS = 64

_logger = logging.getLogger("farandole.data")


class ParquetDataset(Loadable, Samplable, Splittable):
    """Rows of Parquet files, read in an order that does not depend on who reads them.

    The constructor does no I/O: footers are read at first use, or by `validate`.

    Parameters
    ----------
    paths : str, Path or sequence of them
        Files, folders, patterns or URLs. Files are ordered by their paths; in folders, what
        starts with ``.`` or ``_`` is left out.
    columns : sequence of str, or dict of str to choice or None, optional
        Columns given by name; fields of structs by dotted names. `forms` says what they become.
        A dict declares it: ``{"id": None, "tags": fa.padded(16), "name": fa.hashed()}``.
        Choices are `arrow`, `masked`, `filled`, `scaled_int`, `hashed`, `coded`, `padded`,
        `decode` and `npy`; None is the default.
    features : sequence of str, optional
        Numeric columns that become one float32 matrix; null is NaN. With neither `columns`,
        `features` nor `preprocess`, all columns are given by name.
    label : str, optional
        Bools and integers become int64, floats float32. A null is an error.
    filters : list or pyarrow.compute.Expression, optional
        ``[("month", "<=", 10)]`` selects rows for which all conditions hold; a list of such
        lists, rows for which any of them does.
    partitioning : {"hive", None}, default="hive"
        Whether folders ``month=3`` are a column.
    schema : pyarrow.Schema, optional
        Types of some columns, instead of those that all files can be cast to.
    transform : callable, optional
        Takes a `RowBlock` and returns one of as many rows. Called in another thread.
        It must keep no state, and take random numbers from `RowBlock.rng` or
        `RowBlock.uniform` only: those hang on the epoch and the rows, not on who reads them.
    preprocess : Preprocessor, optional
        Fills the features and categories of blocks; instead of `features`.
    buffer_bytes : int, default=256 MiB
        Memory for reading, of each worker. Half of it keeps decoded row groups, if all that are
        needed fit. It is kept whatever the size of row groups; a budget below what the windows
        of the plan take (at most 96 MiB) plus one batch costs speed, and is exceeded by these.
    num_threads : int, default=1
        Threads that decode; one more puts batches together. No number changes what is read.
    on_bad : {"error", "skip"}, default="error"
        Whether files that are no Parquet, and row groups that `verify` found to be damaged, are
        left out of the plan instead of an error.
    index_cache : str, Path or None, default="auto"
        Folder in which footers and the counts of filters are kept, so that later opens read
        only files that are new or have changed: ``index`` in the user's folder for caches, or
        another one, which workers on several hosts may share. None keeps nothing.
    storage_options : mapping, optional
        For a remote store: what the file system that the URL means takes (`pyarrow.fs`'s for
        ``s3://``, ``gs://``, ``abfs://`` and ``hdfs://``, else fsspec's), such as credentials;
        ``num_requests``, how many may be in flight (16); and ``deadline_s``, how long a read may
        fail before it is given up (120). Secrets are never shown, nor saved.
    filesystem : pyarrow.fs.FileSystem or fsspec.AbstractFileSystem, optional
        What `paths` are on, instead of what their URL means.
    cache_dir : str or Path, optional
        Local folder for what was read of a remote store, shared by all processes of the host.
    cache_bytes : int, default=32 GiB
        Limit of that folder; what was used longest ago goes first. At least 64 MiB.

    Notes
    -----
    All methods raise DataError or ColumnError, which name the file or column and the remedy.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        *,
        columns: Columns | None = None,
        features: Sequence[str] | None = None,
        label: str | None = None,
        filters: Any = None,
        partitioning: Literal["hive"] | None = "hive",
        schema: pa.Schema | None = None,
        transform: Transform | None = None,
        preprocess: Preprocessor | None = None,
        buffer_bytes: int = 256 << 20,
        on_bad: Literal["error", "skip"] = "error",
        index_cache: str | Path | None = "auto",
        storage_options: Mapping[str, Any] | None = None,
        filesystem: Any = None,
        cache_dir: str | Path | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        num_threads: int = 1,
    ) -> None:
        for name, value in (("buffer_bytes", buffer_bytes), ("num_threads", num_threads)):
            if value < 1:
                raise UsageError(problem=f"{name}={value!r}", remedy="give a number from 1 up")
        check_names(columns=columns, features=features)
        if features is not None and preprocess is not None:
            raise DataError(
                path=str(paths),
                problem="both features= and preprocess= say what features are",
                remedy="pass one of them",
            )
        self._paths, options = split_credentials(paths, storage_options)
        folder = None if cache_dir is None else Path(cache_dir).expanduser().absolute()
        self._storage = Storage(options, filesystem, folder, cache_bytes)
        self._columns = columns
        self._features = features
        self._label = label
        self._filters = filters
        self._partitioning = partitioning
        self._schema = schema
        self._transform = transform
        self._preprocess = preprocess
        self._buffer_bytes = buffer_bytes
        if on_bad not in ("error", "skip"):
            raise DataError(
                path=str(paths), problem=f"on_bad={on_bad!r}", remedy="pass 'error' or 'skip'"
            )
        self._on_bad: Literal["error", "skip"] = on_bad
        self._index_cache = index_cache
        self._damage: list[Damage] = []
        self._num_threads = num_threads
        self._part: tuple[ParquetDataset, Part] | None = None
        self._made: Contents | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"ParquetDataset({str(self._paths)!r})"

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process reads the footers itself.
        return {**self.__dict__, "_lock": None, "_made": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    # --- what there is --------------------------------------------------------------------

    def validate(self) -> None:
        """Read all footers, and what filters need; raise whatever is wrong. Blocks."""
        self._index()

    @property
    def num_rows(self) -> int:
        """Rows selected. Blocks at first use."""
        return int(self._index().source.starts[-1])

    @property
    def shard_rows(self) -> tuple[int, ...]:
        """Rows selected in each row group, in order, without empty ones."""
        return tuple(shard.num_rows for shard in self._index().shards)

    @property
    def schema(self) -> pa.Schema:
        """Columns with the types that all files are cast to; fields of structs by dotted names."""
        return self._index().reader.schema

    @property
    def forms(self) -> dict[str, str]:
        """What each column given by name becomes in a batch, in words."""
        return {name: form.says for name, form in self._index().layout.columns.items()}

    @property
    def num_features(self) -> int:
        """Width of the feature matrix."""
        return self._index().layout.num_features

    @property
    def fingerprint(self) -> str:
        """Hex digest over files (path below the data set, size, footer), rows, types, filters.

        It does not tell where the data set lies, nor when it was written.
        """
        return self._index().fingerprint

    @property
    def skipped(self) -> tuple[DamagedFileError, ...]:
        """What ``on_bad="skip"`` leaves out: files, and row groups that `verify` found."""
        return self._index().skipped

    def warnings(self) -> list[str]:
        """Return what a job's report must tell of the data: a line for what is left out."""
        skipped = self.skipped
        if not skipped:
            return []
        more = f", and {len(skipped) - 1} more" if len(skipped) > 1 else ""
        return [f"left out of the data: {next(iter(skipped))}{more}"]

    def schema_report(self) -> SchemaReport:
        """Return the schema that files are cast to, and which files differ from it, and how."""
        return self._index().reader.schema_report()

    @property
    def label_name(self) -> str | None:
        """The column of the label, if there is one."""
        return self._label

    def select_part(self, part: Part) -> ParquetDataset:
        """Return the rows of a part, as a data set; see `split`. Does no I/O."""
        chosen = copy.copy(self)
        chosen._part = (self, part)
        return chosen

    def verify(self, *, threads: int = 4, progress: Progress | None = None) -> VerifyReport:
        """Decode all pages of the columns that are used, of all files. Blocks.

        What is damaged is recorded in the index: from then on it is an error before training or,
        with ``on_bad="skip"``, left out. Run it before a job, not in one: its workers must agree
        on what is left out.

        Raises
        ------
        DataError
            If a file cannot be read, which says nothing about what is in it.
        """
        with self._lock:
            reader = self._open("skip")
            names = self._used_columns(reader)
            reader.check_columns(names)
            found = find_damage(reader, names, threads, progress or no_progress)
            self._damage += found
            self._made = None
        damaged = [damage_error(damage) for damage in found]
        num_groups = len(reader.footers.group_rows)
        return VerifyReport(len(reader.files), num_groups, (*reader.skipped, *damaged))

    def inspect(
        self, *, batch_size: int = 1024, seed: int = 0, progress: Progress | None = None
    ) -> Inspection:
        """Look at the data set as training will; the result's `str` is a report. Blocks.

        Reads the footers, the label (if there is one) and a sample of every column. The label
        is held in memory, 4 bytes a row.

        Parameters
        ----------
        batch_size : int, default=1024
            Of the batches whose means are compared with those of a full shuffle.
        seed : int, default=0
            Decides the order of the simulated epoch.
        progress : callable, optional
            Called with (what, done, total).
        """
        from farandole.data.inspect import inspect_dataset  # training does not need it

        index = self._index()
        return inspect_dataset(
            self,
            path=", ".join(given_names(self._paths, self._storage)),
            reader=index.reader,
            layout=index.layout,
            batch_size=batch_size,
            seed=seed,
            progress=progress or no_progress,
        )

    def _index(self) -> Contents:
        with self._lock:
            if self._made is None:
                self._made = self._make_index()
            return self._made

    def _open(self, on_bad: Literal["error", "skip"]) -> GroupReader:
        hive = self._partitioning == "hive"
        filesystem, files = find_files(self._paths, hive=hive, storage=self._storage)
        cache = IndexCache(self._index_cache, given_names(self._paths, self._storage))
        asked = self._asked_columns()
        return GroupReader(
            filesystem, files, self._schema, wanted=asked, cache=cache, on_bad=on_bad
        )

    def _asked_columns(self) -> list[str] | None:
        """Return the columns that were asked for; None stands for all."""
        if self._columns is None and self._features is None and self._preprocess is None:
            return None
        prepared = self._preprocess.columns if self._preprocess else ()
        label = () if self._label is None else (self._label,)
        named = (*(self._columns or ()), *(self._features or ()), *prepared, *label)
        return list(dict.fromkeys(named))

    def _used_columns(self, reader: GroupReader) -> list[str]:
        """Return all columns that are read, those of filters included."""
        asked = self._asked_columns()
        expression = as_expression(self._filters)
        filtered = [] if expression is None else filter_columns(reader, expression)
        return list(dict.fromkeys([*(reader.all_columns() if asked is None else asked), *filtered]))

    def _make_index(self) -> Contents:
        if self._part is not None:
            whole, part = self._part
            return whole._index().of_part(part, self._buffer_bytes // 2)
        filters = as_expression(self._filters)
        reader = self._open(self._on_bad)
        if self._label is not None:
            reader.check_columns([self._label])
        damaged = known_damage(reader, self._used_columns(reader), self._damage)
        if damaged and self._on_bad == "error":
            raise next(iter(damaged.values()))
        skipped = (*reader.skipped, *damaged.values())
        for error in skipped:
            _logger.warning("left out: %s", error)
        shards = select_shards(reader, filters, self._label, damaged)
        groups = np.array([reader.group_number(shard.file, shard.group) for shard in shards])

        def has_nulls(name: str) -> bool:
            return bool(reader.null_counts(name)[groups].any())

        layout = make_layout(
            reader,
            columns=self._columns,
            features=self._features,
            label=self._label,
            preprocess=self._preprocess,
            has_nulls=has_nulls,
        )
        source = ShardSource(reader, shards, layout)
        cache = ShardCache(source, self._buffer_bytes // 2)
        text = str(None) if filters is None else expression_text(filters)
        return Contents(reader, shards, layout, source, cache, text, skipped)

    # --- reading --------------------------------------------------------------------------

    def epoch_plan(self, **settings: Unpack[EpochSettings]) -> EpochPlan:
        """Return the order of an epoch; see `EpochPlan`. Blocks at first use.

        `window_rows` defaults to 8192, or less where the rows of the files are so wide that the
        windows of all lanes would take more than 96 MiB. It hangs on the files alone: which
        columns are read does not change the order.

        Raises
        ------
        ConfigError
            If the batch is too small for the number of slots.
        DataError
            If there are too few rows for a step.
        """
        index = self._index()
        defaults = EpochSettings(
            **{
                "window_rows": budget.window_rows(index.row_bytes, settings["num_slots"]),
                "max_sections": budget.max_sections(index.group_rows, index.group_bytes),
                **settings,
            }
        )
        return make_epoch_plan(index.reader.name, self.shard_rows, defaults)

    def read(self, plan: EpochPlan, slots: range, start_step: int = 0) -> Prefetch[RowBlock]:
        """Read the blocks of `slots` ahead in a thread, in the order of (step, slot).

        Only the row groups that the lanes of `slots` need are decoded. What goes wrong is
        raised where the result is iterated.

        Parameters
        ----------
        plan : EpochPlan
            Made by this data set's `epoch_plan`.
        slots : range
            Slots of this worker.
        start_step : int, default=0
            First step to read.
        """
        share = plan.batch_size * len(slots) // plan.num_slots
        return Prefetch(self._steps(plan, slots, start_step), self._depth(share))

    def read_steps(self, plan: EpochPlan, slots: range) -> Prefetch[RowBlock]:
        """Read one block for each step, all rows of `slots`: what `read` gives, joined.

        With ``tail="pad"``, the last one is not filled up.
        """
        share = plan.batch_size * len(slots) // plan.num_slots
        return Prefetch(self._steps(plan, slots, 0, whole=True), self._depth(share))

    def read_rows(self, ranges: Sequence[range]) -> Prefetch[RowBlock]:
        """Read one block for each range of rows in the order of the data set, in a thread.

        Raises
        ------
        IndexError
            If a range is not within the rows.
        """
        for rows in ranges:
            if rows.step != 1 or not 0 <= rows.start <= rows.stop <= self.num_rows:
                raise IndexError(f"{rows} is not a run of rows in 0 to {self.num_rows}")
        largest = max((len(rows) for rows in ranges), default=1)
        return Prefetch(self._ranges(ranges), self._depth(largest))

    def scan(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield all selected rows of some columns as Arrow batches, in order. Blocks."""
        index = self._index()
        index.reader.check_columns(names)
        for shard in range(len(index.shards)):
            num_rows = index.shards[shard].num_rows
            yield from index.source.batches(shard, 0, num_rows, names)

    def _depth(self, rows: int) -> int:
        """Return how many chunks of so many rows are read ahead."""
        row_bytes = self._index().layout.row_bytes
        ahead = min(_AHEAD_ROWS, _AHEAD_BYTES // row_bytes)
        return min(max(ahead // max(rows, 1), 2), _MAX_CHUNKS)

    def _steps(
        self, plan: EpochPlan, slots: range, start_step: int, *, whole: bool = False
    ) -> Generator[list[RowBlock]]:
        """Yield the blocks of each step: one for each slot, or the whole as one."""
        index = self._index()
        lanes = plan.lanes_of(slots)
        windows = plan.window_rows * len(lanes)
        num_sections = (lanes.stop - 1) // plan.lanes_per_section + 1
        num_sections -= lanes.start // plan.lanes_per_section
        rows = self._rows(shards_of(plan, lanes), plan.section_pieces, num_sections, windows)
        reader = LaneReader(plan, slots, index.layout, rows)
        try:
            for step, block in enumerate(reader.steps(start_step), start_step):
                if whole and self._transform is None:
                    yield [block]
                    continue
                blocks = [transformed(part, self._transform) for part in reader.cut(step, block)]
                yield [concatenate(blocks)] if whole else blocks
        finally:
            reader.close()

    def _rows(
        self,
        shards: Collection[int],
        route: Callable[[int], Sequence[Piece]],
        num_sections: int,
        num_rows: int,
    ) -> Rows:
        """Return where shards are read from, with so many rows held beside."""
        index = self._index()
        if index.cache.holds(shards):
            return index.cache
        left_bytes = self._buffer_bytes - num_rows * index.layout.row_bytes
        group_bytes = index.group_bytes[list(shards)]
        return Streams(
            index.source,
            route,
            num_sections=num_sections,
            num_threads=self._num_threads,
            max_open=budget.max_streams(left_bytes, group_bytes, len(index.layout.names)),
        )

    def _ranges(self, ranges: Sequence[range]) -> Generator[list[RowBlock]]:
        index = self._index()
        route = [Piece(shard, 0, rows) for shard, rows in enumerate(self.shard_rows)]
        rows = self._rows(range(len(route)), lambda section: route, 1, 0)
        try:
            for blocks in read_ranges(ranges, index.source, rows):
                yield [transformed(block, self._transform) for block in blocks]
        finally:
            rows.close()
