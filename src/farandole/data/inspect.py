"""Look at a data set as training will: sizes, order, and what reading it costs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt
from numpy.typing import NDArray

from farandole.data.convert import to_float
from farandole.data.groups import GroupReader, leaf_paths
from farandole.data.inspection import Column, Inspection, Label, Sizes, advise
from farandole.data.layout import Layout
from farandole.data.nested import Node, named_nodes, pick
from farandole.data.progress import Progress
from farandole.data.tensors import as_tensor
from farandole.data.writer import Storage, dictionary_columns
from farandole.plan.lanes import EpochPlan

if TYPE_CHECKING:
    from farandole.data.parquet import ParquetDataset

_SAMPLE_ROWS = 131_072
_BATCH_ROWS = 8192
_ROUNDS = 3
_MAX_BATCHES = 500
_SLOTS = 8


@dataclass
class _Stored:
    """What the footers say of one column, over all files."""

    num_nulls: int | None = 0
    size_bytes: int = 0
    chunks: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """How many chunks there are of each encoding and compression."""


@dataclass(frozen=True)
class _Cost:
    decode_ns: float
    rewritten_ns: float
    becomes_tensor: bool


def inspect_dataset(
    dataset: ParquetDataset,
    *,
    path: str,
    reader: GroupReader,
    layout: Layout,
    batch_size: int,
    seed: int,
    progress: Progress,
) -> Inspection:
    """Return what `ParquetDataset.inspect` does."""
    files, label = reader.files, layout.label
    names = dataset.schema.names
    group_rows: list[int] = []
    group_bytes: list[int] = []
    stored: dict[str, _Stored] = {}
    for file in range(len(files)):
        with reader.opened(file) as source:
            nodes = named_nodes(source.schema_arrow)
            for group in range(source.metadata.num_row_groups):
                metadata = source.metadata.row_group(group)
                group_rows.append(metadata.num_rows)
                group_bytes.append(_add_group(stored, metadata, names, nodes))
        progress("reading footers", file + 1, len(files))
    becomes = {name: f"columns: {says}" for name, says in dataset.forms.items()}
    becomes |= dict.fromkeys(layout.features, "features: float32")
    if label is not None:
        becomes[label] = f"label: {layout.label_dtype}"
    largest = max(range(len(files)), key=lambda file: files[file].size_bytes)
    costs = _costs(reader, largest, names, progress)
    columns = tuple(
        _column(name, dataset.schema.field(name).type, becomes, stored.get(name), costs.get(name))
        for name in names
    )
    mixing = None
    if label is not None:
        mixing = _label(dataset, label, min(batch_size, dataset.num_rows), seed, progress)
    return advise(
        Inspection(
            path=path,
            num_rows=dataset.num_rows,
            num_files=len(files),
            file_bytes=Sizes.of([file.size_bytes for file in files]),
            num_row_groups=len(group_rows),
            group_rows=Sizes.of(group_rows),
            group_bytes=Sizes.of(group_bytes),
            columns=columns,
            label=mixing,
        )
    )


# --- footers -----------------------------------------------------------------------------


def _add_group(
    stored: dict[str, _Stored],
    metadata: pq.RowGroupMetaData,
    names: Sequence[str],
    nodes: Mapping[str, Node],
) -> int:
    """Add a row group's columns to what is known; return its stored bytes."""
    total = 0
    for name in names:
        if name not in nodes:
            continue
        known = stored.setdefault(name, _Stored())
        chunks = [metadata.column(leaf) for leaf in nodes[name].leaves]
        for chunk in chunks:
            total += chunk.total_compressed_size
            known.size_bytes += chunk.total_compressed_size
            coded = any("DICTIONARY" in encoding for encoding in chunk.encodings)
            kind = "dictionary" if coded else "plain"
            known.chunks[kind, str(chunk.compression).lower()] += 1
        statistics = chunks[0].statistics if chunks else None
        if pt.is_nested(nodes[name].kind) or statistics is None or not statistics.has_null_count:
            known.num_nulls = None
        elif known.num_nulls is not None:
            known.num_nulls += statistics.null_count
    return total


def _column(
    name: str,
    kind: pa.DataType,
    becomes: Mapping[str, str],
    stored: _Stored | None,
    cost: _Cost | None,
) -> Column:
    if stored is None:  # it comes from the names of folders
        return Column(name, str(kind), becomes.get(name, ""))
    encodings = sorted({encoding for encoding, _ in stored.chunks})
    compressions = sorted({compression for _, compression in stored.chunks})
    return Column(
        name=name,
        type=str(kind),
        becomes=becomes.get(name, ""),
        num_nulls=stored.num_nulls,
        size_bytes=stored.size_bytes,
        encoding=", ".join(encodings),
        compression=", ".join(compressions),
        decode_ns=cost.decode_ns if cost else None,
        rewritten_ns=cost.rewritten_ns if cost else None,
        becomes_tensor=cost.becomes_tensor if cost else False,
    )


# --- what decoding costs -----------------------------------------------------------------


def _costs(
    reader: GroupReader, file: int, names: Sequence[str], progress: Progress
) -> dict[str, _Cost]:
    """Return what each column costs, as stored and as a rewrite would store it.

    Measured on the first rows of a file, with one thread, as the best of some rounds.
    """
    costs: dict[str, _Cost] = {}
    with reader.opened(file) as source:
        nodes = named_nodes(source.schema_arrow)
        present = [name for name in names if name in nodes]
        for done, name in enumerate(present, 1):
            path, leaves = nodes[name].path, leaf_paths(source, nodes[name])
            arrays = [pick(batch.column(path[0]), path[1:]) for batch in _sample(source, leaves)]
            num_rows = sum(map(len, arrays))
            if num_rows:
                place = source.schema_arrow.get_field_index(name)
                metadata = None if place < 0 else source.schema_arrow.field(place).metadata
                field = pa.field(name, arrays[0].type, metadata=metadata)
                tensor = as_tensor(field, arrays)
                table = pa.Table.from_arrays([pa.chunked_array(arrays)], schema=pa.schema([field]))
                again = _rewritten(table, tensor or field)
                both = [(_time(source, leaves), _time(again, None)) for _ in range(_ROUNDS)]
                now, then = (min(times) / num_rows * 1e9 for times in zip(*both, strict=True))
                costs[name] = _Cost(now, then, tensor is not None)
            progress("decoding a sample", done, len(present))
    return costs


def _sample(source: pq.ParquetFile, leaves: list[str] | None) -> Iterator[pa.RecordBatch]:
    left = _SAMPLE_ROWS
    for batch in source.iter_batches(_BATCH_ROWS, columns=leaves, use_threads=False):
        yield batch
        left -= batch.num_rows
        if left <= 0:
            return


def _time(source: pq.ParquetFile, leaves: list[str] | None) -> float:
    start = time.perf_counter()
    for _ in _sample(source, leaves):
        pass
    return time.perf_counter() - start


def _rewritten(table: pa.Table, stored: pa.Field) -> pq.ParquetFile:
    storage = Storage(pa.schema([stored]), "snappy", table.num_rows, dictionary_columns(table))
    sink = pa.BufferOutputStream()
    with storage.open(sink) as writer:
        writer.write_table(storage.packed(table), storage.row_group_rows)
    return pq.ParquetFile(pa.BufferReader(sink.getvalue()))


# --- how batches mix ---------------------------------------------------------------------


def _plan(dataset: ParquetDataset, batch_size: int, seed: int) -> EpochPlan:
    slots = max(1, min(_SLOTS, batch_size))
    return dataset.epoch_plan(seed=seed, epoch=0, batch_size=batch_size, num_slots=slots)


def _label(
    dataset: ParquetDataset, name: str, batch_size: int, seed: int, progress: Progress
) -> Label:
    values = np.empty(dataset.num_rows, np.float32)
    at = 0
    for batch in dataset.scan([name]):
        values[at : at + batch.num_rows] = to_float(batch.column(0))
        at += batch.num_rows
        progress("reading the label", at, len(values))
    return label_of(name, values, _plan(dataset, batch_size, seed), progress)


def label_of(name: str, values: NDArray[np.float32], plan: EpochPlan, progress: Progress) -> Label:
    """Return how a label lies in a data set, and how a plan mixes it.

    Parameters
    ----------
    name : str
    values : ndarray of float32, shape (n,)
        In the order of the data set.
    plan : EpochPlan
        Of as many rows.
    progress : callable
    """
    steps = np.diff(values)
    order = "none"
    if len(steps) and np.isfinite(steps).all():
        order = "ascending" if (steps >= 0).all() else "descending" if (steps <= 0).all() else order
    order = order if steps.any() else "constant"
    deviation = float(values.std(dtype=np.float64))
    centred = values - np.float32(values.mean(dtype=np.float64))
    neighbours = 0.0
    if deviation > 0 and len(values) > 1:
        products = np.einsum("i,i->", centred[1:], centred[:-1], dtype=np.float64)
        neighbours = float(products / len(steps) / deviation**2)
    means = np.array(list(_batch_means(values, plan, progress)))
    left = plan.num_rows - plan.batch_size
    full = deviation * (left / (plan.batch_size * max(plan.num_rows - 1, 1))) ** 0.5
    mean = float(values.mean(dtype=np.float64))
    spread = float(np.sqrt(np.mean((means - mean) ** 2))) if len(means) else None
    return Label(
        name=name,
        order=order,
        neighbours=neighbours,
        batch_size=plan.batch_size,
        num_batches=len(means),
        spread=spread,
        full_spread=full,
    )


def _batch_means(
    values: NDArray[np.float32], plan: EpochPlan, progress: Progress
) -> Iterator[float]:
    """Yield the label's mean in some batches of an epoch, spread over it."""
    num_full = plan.num_rows // plan.batch_size
    steps = np.unique(np.linspace(0, num_full - 1, min(num_full, _MAX_BATCHES)).astype(int))
    for done, step in enumerate(steps.tolist(), 1):
        rows = [plan.slot_row_ids(step, slot) for slot in range(plan.num_slots)]
        yield float(values[np.concatenate(rows)].mean(dtype=np.float64))
        progress("simulating batches", done, len(steps))
