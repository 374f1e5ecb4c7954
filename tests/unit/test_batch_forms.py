"""Batches of columns in every form."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from farandole.data import Masked, Ragged, RowBlock
from farandole.data.block import concatenate
from farandole.data.columns import Chunks
from farandole.job.batch import Batch

CPU = torch.device("cpu")


def block(start: int, stop: int) -> RowBlock:
    ids = np.arange(start, stop)
    sizes = ids % 3
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    elements = np.arange(offsets[-1], dtype=np.int16)
    return RowBlock(
        row_ids=ids,
        columns={
            "plain": ids.astype(np.float16),
            "masked": Masked(ids.astype(np.uint8), ids % 2 == 0),
            "ragged": Ragged(Masked(elements, elements % 2 == 0), offsets),
            "nested": Ragged(
                Ragged(np.arange(2.0 * len(ids)), np.arange(len(ids) + 1) * 2),
                np.arange(len(ids) + 1),
            ),
            "words": pa.array([str(i) for i in ids]),
            "decoded": [f"row {i}" for i in ids],
        },
    )


def same(one: object, other: object) -> bool:
    if isinstance(one, Masked):
        assert isinstance(other, Masked)
        return same(one.values, other.values) and same(one.valid, other.valid)
    if isinstance(one, Ragged):
        assert isinstance(other, Ragged)
        return same(one.values, other.values) and same(one.offsets, other.offsets)
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray)
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one == other


def test_batches_hold_tensors_where_there_are_any() -> None:
    batch = Batch.from_block(block(0, 5), CPU)
    assert batch["plain"].dtype == torch.float16
    assert batch["masked"].values.dtype == torch.uint8
    assert batch["masked"].valid.dtype == torch.bool
    assert batch["ragged"].offsets.tolist() == [0, 0, 1, 3, 3, 4]
    assert batch["ragged"].values.values.dtype == torch.int16
    assert batch["ragged"][2].values.tolist() == [1, 2]
    assert batch["nested"][1].values.tolist() == [2.0, 3.0]
    assert batch["words"].to_pylist() == list("01234")
    assert batch["decoded"][4] == "row 4"


@pytest.mark.parametrize("cut", [0, 1, 3, 6])
def test_cutting_and_joining_give_the_same_rows(cut: int) -> None:
    batch = Batch.from_block(block(0, 6), CPU)
    parts = [batch.slice(0, cut), batch.slice(cut, 6)]
    assert [len(part) for part in parts] == [cut, 6 - cut]
    for part in parts:
        assert {len(column) for column in part.columns.values()} == {len(part)}
    joined = Batch.concatenate(parts)
    for name, column in batch.columns.items():
        assert same(joined[name], column), name


@pytest.mark.parametrize("cut", [0, 2, 6])
def test_blocks_are_taken_cut_and_joined_alike(cut: int) -> None:
    whole = block(0, 6)
    joined = concatenate([whole.slice(0, cut), whole.slice(cut, 6)])
    taken = whole.take(np.arange(6))
    for name, column in whole.columns.items():
        assert same(joined.columns[name], column), name
        assert same(taken.columns[name], column), name
    turned = whole.take(np.array([5, 2, 2]))
    assert turned.columns["masked"].values.tolist() == [5, 2, 2]
    assert turned.columns["ragged"].offsets.tolist() == [0, 2, 4, 6]
    assert turned.columns["ragged"].values.values.tolist() == [4, 5, 1, 2, 1, 2]
    assert turned.columns["words"].to_pylist() == ["5", "2", "2"]
    assert turned.columns["decoded"] == ["row 5", "row 2", "row 2"]


def test_chunks_replace_what_they_overlap() -> None:
    column = Chunks(pa.int64(), 10)
    column.put(0, pa.array(range(6)))
    column.put(6, pa.chunked_array([[6, 7], [], [8, 9]]))
    column.put(3, pa.array([], pa.int64()))
    assert column[:].to_pylist() == list(range(10))
    assert column[5:8].to_pylist() == [5, 6, 7]
    starts, sizes = np.array([9, 2, 4, 0]), np.array([1, 0, 4, 2])
    assert column.gather(starts, sizes).to_pylist() == [9, 4, 5, 6, 7, 0, 1]
    column.put(0, pa.array([-1, -2]))
    column.put(2, pa.array([-3, -4, -5, -6]))
    assert column[:].to_pylist() == [-1, -2, -3, -4, -5, -6, 6, 7, 8, 9]
    assert column[4:4].to_pylist() == []
