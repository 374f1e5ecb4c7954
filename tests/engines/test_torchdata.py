"""The state of torchdata's StatefulDataLoader, with the package itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from farandole.data import ArrayDataset

pytest.importorskip("torchdata", reason="torchdata is not installed: group data-peers")

from torchdata.stateful_dataloader import Stateful, StatefulDataLoader

# torchdata 0.11 is older than the PyTorch that says so.
# JAX warns of forks in processes that other tests loaded it into.
pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated:UserWarning",
    "ignore:os.fork:RuntimeWarning",
    "ignore:Exception ignored in.*_at_fork:pytest.PytestUnraisableExceptionWarning",
)


def make_loader(**options: Any) -> Any:
    dataset = ArrayDataset(np.arange(2000.0).reshape(1000, 2), rows_per_shard=77)
    return dataset.loader(batch_size=96, seed=3, **options)


def ids(batches: Iterable[Any]) -> list[list[int]]:
    return [batch.row_ids.tolist() for batch in batches]


def test_loaders_are_stateful() -> None:
    assert isinstance(make_loader(), Stateful)
    assert isinstance(make_loader(as_="numpy"), Stateful)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("num_items", [0, 1, 5])
def test_goes_on_after_the_items_that_were_handed_out(num_workers: int, num_items: int) -> None:
    def stateful() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(make_loader(), batch_size=None, num_workers=num_workers)

    expected = ids(stateful())
    first = stateful()
    steps = iter(first)
    seen = ids(itertools.islice(steps, num_items))
    state = first.state_dict()
    again = stateful()
    again.load_state_dict(state)
    assert seen + ids(again) == expected
    assert sorted(itertools.chain(*expected)) == list(range(1000))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_follow_after_going_on(num_workers: int) -> None:
    loader = make_loader()
    stateful = StatefulDataLoader(loader, batch_size=None, num_workers=num_workers)
    expected = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        expected.append(ids(stateful))
    assert expected[0] != expected[1]
    loader.set_epoch(0)
    steps = iter(stateful)
    seen = ids(itertools.islice(steps, 4))
    state = stateful.state_dict()
    again = make_loader()
    restored = StatefulDataLoader(again, batch_size=None, num_workers=num_workers)
    restored.load_state_dict(state)
    rest = []
    for epoch in range(2):
        again.set_epoch(epoch)
        rest.append(ids(restored))
    assert [seen + rest[0], rest[1]] == expected


def test_a_state_at_the_end_begins_the_next_epoch() -> None:
    stateful = StatefulDataLoader(make_loader(), batch_size=None)
    ids(stateful)
    state = stateful.state_dict()
    again = StatefulDataLoader(make_loader(), batch_size=None)
    again.load_state_dict(state)
    assert ids(again) == ids(make_loader(epoch=1))
