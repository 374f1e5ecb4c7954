from __future__ import annotations

import itertools
import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.job.randomness import seed_all
from farandole.plan.random import Stream, evaluation_seed, generator, philox_key, slot_seed

numbers = st.integers(0, 2**40)


@given(st.integers(0, 2**63 - 1), numbers, numbers)
def test_seeds_are_what_torch_takes(seed: int, step: int, slot: int) -> None:
    for made in (slot_seed(seed, step, slot), evaluation_seed(seed, step, slot)):
        assert 0 <= made < 2**63
    assert slot_seed(seed, step, slot) != evaluation_seed(seed, step, slot)


def test_every_seed_step_and_slot_has_its_own() -> None:
    places = list(itertools.product(range(3), range(20), range(9)))
    assert len({slot_seed(*place) for place in places}) == len(places)
    assert len({evaluation_seed(*place) for place in places}) == len(places)


def test_streams_differ_and_repeat() -> None:
    first = generator(1, Stream.SHARD_ORDER, 2).integers(1 << 60, size=4)
    assert np.array_equal(first, generator(1, Stream.SHARD_ORDER, 2).integers(1 << 60, size=4))
    for other in ((1, Stream.WINDOW_ORDER, 2), (1, Stream.SHARD_ORDER, 3), (2, Stream.SHARD_ORDER)):
        assert not np.array_equal(first, generator(*other).integers(1 << 60, size=4))


def test_values_are_part_of_every_jobs_bits() -> None:
    assert [stream.value for stream in Stream] == [1, 2, 3, 4, 7, 8, 9, 14]
    assert philox_key(0, Stream.SLOT, 1, 2).dtype == np.uint64
    assert slot_seed(0, 0, 0) == 1942545391962381979
    assert evaluation_seed(5, 7, 9) == 6991285341107854562
    assert generator(3, Stream.SHARD_ORDER, 0).permutation(8).tolist() == [7, 1, 0, 6, 2, 3, 5, 4]


def test_all_generators_are_seeded() -> None:
    def draw() -> tuple[float, float, float, float]:
        dropped = torch.nn.functional.dropout(torch.ones(50)).sum().item()
        return torch.rand(()).item(), dropped, float(np.random.random()), random.random()

    seed = slot_seed(0, 1, 2)  # more than numpy's 32 bits
    seed_all(seed)
    first = draw()
    seed_all(seed)
    assert draw() == first
    seed_all(seed + 1)
    assert all(a != b for a, b in zip(draw()[::2], first[::2], strict=True))
