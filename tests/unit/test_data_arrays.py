from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.data import ArrayDataset, RowBlock
from farandole.errors import ColumnError, DataError


def test_arrays_are_given_by_the_plan() -> None:
    features = np.arange(200, dtype=np.float64).reshape(100, 2)
    dataset = ArrayDataset(
        features,
        np.arange(100) % 3,
        categories=np.arange(100, dtype=np.int8)[:, None],
        rows_per_shard=30,
        name=np.array([f"n{i}" for i in range(100)], object),
    )
    plan = dataset.epoch_plan(seed=0, epoch=0, batch_size=24, num_slots=3)
    assert plan.shard_rows == (30, 30, 30, 10)
    blocks = dataset.read(plan, range(1, 3), start_step=1)
    for step in range(1, plan.num_steps):
        for slot in (1, 2):
            block = next(blocks)
            ids = plan.slot_row_ids(step, slot)
            assert block.num_rows == len(ids)
            assert np.array_equal(block.row_ids, ids)
            assert block.features is not None
            assert block.features.dtype == np.float32
            assert np.array_equal(block.features, features[ids])
            assert block.categories is not None
            assert np.array_equal(block.categories[:, 0], ids)
            assert block.label is not None
            assert block.label.dtype == np.int64
            assert np.array_equal(block.label, ids % 3)
            assert block.columns["name"].tolist() == [f"n{i}" for i in ids]
    assert next(blocks, None) is None


def test_blocks_are_the_consumers_own() -> None:
    dataset = ArrayDataset(np.zeros((10, 1)), x=np.zeros(10))
    plan = dataset.epoch_plan(seed=0, epoch=0, batch_size=10, num_slots=1)
    for block in [*dataset.read(plan, range(1)), *dataset.read_rows([range(10)])]:
        assert block.features is not None
        block.features[:] = 1
        block.columns["x"][:] = 1
    (block,) = dataset.read_rows([range(10)])
    assert sum(float(array.sum()) for array in block.arrays()[1:]) == 0


def test_a_transform_augments_alike_for_any_reader() -> None:
    """A generator derived from the block's rows does not depend on who reads which slots."""

    def augment(block: RowBlock) -> RowBlock:
        assert block.features is not None
        rng = np.random.default_rng(block.row_ids[:8])
        noise = rng.normal(0, 0.1, block.features.shape).astype(np.float32)
        return replace(block, features=block.features + noise)

    dataset = ArrayDataset(np.zeros((100, 2)), transform=augment)
    plan = dataset.epoch_plan(seed=0, epoch=0, batch_size=40, num_slots=4)
    alone = [block.features for block in dataset.read(plan, range(4))]
    halves = [[b.features for b in dataset.read(plan, slots)] for slots in (range(2), range(2, 4))]
    both = [f for step in range(plan.num_steps) for half in halves for f in half[2 * step :][:2]]
    assert [f.tobytes() for f in alone if f is not None] == [
        f.tobytes() for f in both if f is not None
    ]
    assert len({f.tobytes() for f in alone if f is not None}) == 4 * plan.num_steps


def test_fingerprint_follows_the_values() -> None:
    one = ArrayDataset(np.zeros((10, 1)), np.zeros(10), s=np.array(["a"] * 10, object))
    same = ArrayDataset(np.zeros((10, 1)), np.zeros(10), s=np.array(["a"] * 10, object))
    other = ArrayDataset(np.zeros((10, 1)), np.zeros(10), s=np.array(["b"] * 10, object))
    assert one.fingerprint == same.fingerprint != other.fingerprint
    one.validate()
    assert one.num_rows == 10


def test_labels_are_int64_or_float32() -> None:
    def label(values: Any) -> Any:
        (block,) = ArrayDataset(label=values).read_rows([range(2)])
        return block.label

    assert label([True, False]).dtype == np.int64
    assert label(np.array([1, 2], np.uint8)).dtype == np.int64
    assert label([0.5, 1]).dtype == np.float32


@pytest.mark.parametrize(
    ("arrays", "kind", "message"),
    [
        ({}, DataError, "there is no array"),
        ({"x": []}, DataError, "there are no rows"),
        ({"x": [1], "y": [1, 2]}, DataError, "differ in length: {'x': 1, 'y': 2}"),
        ({"features": [1, 2]}, DataError, r"features has the shape \(2,\)"),
        ({"label": [[1], [2]]}, DataError, r"label has the shape \(2, 1\)"),
        ({"label": ["a", "b"]}, ColumnError, "'label' is <U1, not numeric"),
    ],
)
def test_errors(arrays: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ArrayDataset(**arrays)


def test_scan_names_what_is_missing() -> None:
    with pytest.raises(ColumnError, match="'sort' does not exist; did you mean 'short'"):
        next(ArrayDataset(short=[1]).scan(["sort"]))


@given(st.integers(1, 20), st.integers(0, 20))
def test_a_padded_block_holds_each_row_once_and_copies(num_rows: int, extra: int):
    (block,) = ArrayDataset(label=np.arange(num_rows) * 3).read_rows([range(num_rows)])
    padded = block.padded(num_rows + extra)
    assert padded.num_rows == num_rows + extra
    assert padded.row_ids[padded.mask].tolist() == list(range(num_rows))
    assert np.array_equal(padded.label, padded.row_ids * 3)
