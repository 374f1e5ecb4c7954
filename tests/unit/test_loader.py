from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from farandole import Batch
from farandole.data import ArrayDataset, RowBlock
from farandole.data.loader import BatchLoader
from farandole.errors import (
    ConfigError,
    DataError,
    MissingExtraError,
    PlanStateError,
    UsageError,
)
from farandole.plan.slots import default_slots


def rows(num_rows: int = 1000, *, rows_per_shard: int = 77) -> ArrayDataset:
    features = np.arange(2.0 * num_rows).reshape(num_rows, 2)
    return ArrayDataset(features, np.arange(num_rows), rows_per_shard=rows_per_shard)


def numpy_loader(dataset: ArrayDataset, **options: Any) -> BatchLoader:
    return dataset.loader(as_="numpy", **options)


def ids(batches: Iterable[Any]) -> list[list[int]]:
    return [batch.row_ids.tolist() for batch in batches]


def test_batches_are_tensors_by_default() -> None:
    loader = rows().loader(batch_size=100, seed=1)
    seen = 0
    for batch in loader:
        assert isinstance(batch, Batch)
        assert isinstance(batch.features, torch.Tensor)
        assert batch.features[:, 0].tolist() == [2.0 * i for i in batch.row_ids.tolist()]
        assert batch.label is not None
        assert torch.equal(batch.label, batch.row_ids)
        seen += len(batch)
    assert seen == 1000
    assert isinstance(next(iter(numpy_loader(rows(), batch_size=100))), RowBlock)


@hypothesis.settings(max_examples=15)
@given(
    num_rows=st.integers(60, 200),
    stages=st.lists(
        st.tuples(st.integers(1, 6), st.integers(8, 60), st.integers(0, 4)), max_size=4
    ),
)
def test_every_row_once_whoever_goes_on(num_rows: int, stages: list[tuple[int, int, int]]) -> None:
    """Ranks and batch sizes change in mid-epoch."""
    dataset = rows(num_rows, rows_per_shard=13)
    state = numpy_loader(dataset, batch_size=60, num_slots=6, seed=5, epoch=2).state_dict()
    seen: list[int] = []
    for world_size, batch_size, num_steps in [*stages, (1, 30, num_rows)]:
        if state["epoch"] == 3:
            break
        loaders = [
            numpy_loader(dataset, batch_size=batch_size, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for loader in loaders:
            loader.load_state_dict(state)
        for parts in itertools.islice(zip(*loaders, strict=True), num_steps):
            sizes = [part.num_rows for part in parts]
            assert [loader.step_rows for loader in loaders] == [sum(sizes)] * world_size
            assert min(sizes) > 0
            seen += [row for part in parts for row in part.row_ids.tolist()]
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert (state["epoch"], state["rows"]) == (3, 0)
    assert sorted(seen) == list(range(num_rows))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_a_step_is_the_same_rows_for_any_number_of_ranks(world_size: int) -> None:
    alone = ids(numpy_loader(rows(), batch_size=96, seed=1))
    ranks = [
        ids(numpy_loader(rows(), batch_size=96, seed=1, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)] == alone
    if 8 % world_size == 0:
        assert {len(part) for part in ranks[0][:-1]} == {96 // world_size}


def test_epochs_follow_one_another_in_other_orders() -> None:
    loader = numpy_loader(rows(), batch_size=100)
    first, second = ids(loader), ids(loader)
    assert loader.epoch == 2
    assert first != second
    loader.set_epoch(1)
    assert ids(loader) == second
    assert len(loader) == len(first)
    assert ids(numpy_loader(rows(), batch_size=100, epoch=1)) == second
    assert ids(numpy_loader(rows(), batch_size=100, seed=1)) != first
    in_order = numpy_loader(rows(), batch_size=100, shuffle=False)
    assert ids(in_order) == ids(in_order)


def test_leaving_a_loop_starts_the_epoch_again() -> None:
    loader = numpy_loader(rows(), batch_size=100)
    first = next(iter(loader)).row_ids.tolist()
    assert next(iter(loader)).row_ids.tolist() == first
    assert loader.epoch == 0


def test_epochs_go_on_where_a_state_stands() -> None:
    loader = numpy_loader(rows(), batch_size=100, seed=4)
    expected = {epoch: ids(loader) for epoch in loader.epochs(3)}
    assert list(expected) == [0, 1, 2]
    loader.set_epoch(1)
    steps = iter(loader)
    seen = [next(steps).row_ids.tolist() for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    assert len(json.dumps(state)) < 200
    again = numpy_loader(rows(), batch_size=100)
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.load_state_dict(again.state_dict())
    again.set_epoch(1)  # as loops do that count epochs themselves
    rest = {epoch: ids(again) for epoch in again.epochs(3)}
    assert list(rest) == [1, 2]
    assert seen + rest[1] == expected[1]
    assert rest[2] == expected[2]
    again.load_state_dict(state)
    again.set_epoch(2)
    assert ids(again) == expected[2]


def test_a_state_at_the_end_begins_the_next_epoch() -> None:
    loader = numpy_loader(rows(), batch_size=100)
    ids(loader)
    again = numpy_loader(rows(), batch_size=100)
    again.load_state_dict(loader.state_dict())
    assert list(again.epochs(2)) == [1]
    assert ids(again) == ids(loader)


def test_states_that_do_not_fit_are_refused_and_change_nothing() -> None:
    loader = numpy_loader(rows(), batch_size=96, seed=9)
    before = loader.state_dict()
    with pytest.raises(PlanStateError, match="data"):
        loader.load_state_dict(numpy_loader(rows(999), batch_size=96).state_dict())
    with pytest.raises(PlanStateError, match="fields"):
        loader.load_state_dict({"epoch": 1})
    with pytest.raises(PlanStateError, match="order"):
        loader.load_state_dict({**before, "order": "0"})
    with pytest.raises(ConfigError, match="one row for each slot"):
        loader.load_state_dict({**before, "slots": 97})
    assert loader.state_dict() == before


@pytest.mark.parametrize("world_size", [1, 2])
def test_padded_batches_are_all_of_one_size(world_size: int) -> None:
    seen: list[int] = []
    for rank in range(world_size):
        options = {"tail": "pad", "rank": rank, "world_size": world_size}
        loader = numpy_loader(rows(), batch_size=96, **options)
        for block in loader:
            assert block.num_rows == 96 // world_size
            assert block.mask is not None
            seen += block.row_ids[block.mask].tolist()
        masks = [batch.mask for batch in rows().loader(batch_size=96, **options)]
        assert sum(int(mask.sum()) for mask in masks if mask is not None) == len(seen) // (rank + 1)
    assert sorted(seen) == list(range(1000))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"batch_size": 0}, ConfigError, "batch_size = 0: a whole number from 1 up"),
        ({"batch_size": "8"}, ConfigError, "batch_size = '8'"),
        ({"batch_size": 8, "seed": -1}, ConfigError, "seed = -1"),
        ({"batch_size": 8, "num_slots": 9}, ConfigError, "at least 9"),
        ({"batch_size": 8, "as_": "caffe"}, ConfigError, "one of torch, jax, numpy"),
        ({"batch_size": 8, "rank": 1}, UsageError, "both or neither"),
        ({"batch_size": 8, "rank": 2, "world_size": 2}, ConfigError, "rank < world_size <= 8"),
        ({"batch_size": 8, "rank": 0, "world_size": 9}, ConfigError, "pass more num_slots"),
        ({"batch_size": 2000, "tail": "drop"}, DataError, "fill no batch"),
    ],
)
def test_mistakes(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        list(rows().loader(**options))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_missing_framework_is_named(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("farandole.loaders.torch", "farandole.integrations.jax"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, framework, None)
    with pytest.raises(MissingExtraError, match=rf"farandole\[{framework}\]"):
        rows().loader(batch_size=8, as_=framework)


def test_default_slots() -> None:
    sizes = (1, 2, 10, 53, 64, 100, 256, 768, 1000, 1024)
    assert [default_slots(size) for size in sizes] == [1, 2, 2, 1, 8, 4, 16, 48, 40, 32]
