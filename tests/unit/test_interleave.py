from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.plan.interleave import Interleave, chairman_word, whole_shares

SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([0.5, 0.5], (1, 1)),
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([3], (1,)),
        ([1 / 3, 2 / 3], (1, 2)),
        ([2, 4, 6], (1, 2, 3)),
        ([1e-9, 1], (1, 999)),
        ([math.sqrt(2), 1], (293, 207)),
    ],
)
def test_weights_become_whole_numbers(weights, expected):
    assert whole_shares(weights) == expected


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30))
def test_rounded_weights_are_close(weights):
    shares = whole_shares(weights)
    total, exact = sum(shares), np.array(weights) / sum(weights)
    assert min(shares) >= 1
    if exact.min() > 1e-3:
        assert np.abs(np.array(shares) / total - exact).max() <= 1e-3


@pytest.mark.parametrize("weights", [[], [0, 1], [-1, 2], [math.nan, 1], [math.inf, 1]])
def test_what_is_no_weight_is_refused(weights):
    with pytest.raises(ValueError, match="positive"):
        whole_shares(weights)


@settings(max_examples=100, deadline=None)
@given(SHARES)
def test_every_prefix_has_its_shares(shares):
    word = chairman_word(shares)
    total = sum(shares)
    counts = np.cumsum(word[:, None] == np.arange(len(shares)), axis=0)
    ideal = np.arange(1, total + 1)[:, None] * np.array(shares) / total
    limit = 1 - 1 / (2 * len(shares) - 2) if len(shares) > 1 else 0
    assert np.abs(counts - ideal).max() <= limit + 1e-9
    assert counts[-1].tolist() == list(shares)


@settings(max_examples=60, deadline=None)
@given(SHARES, st.integers(1, 8), st.data())
def test_slots_take_even_turns_and_every_letter(shares, num_slots, data):
    order = Interleave(shares, num_slots)
    rows = 2 * order.period
    sources = [order.sources_of(0, rows, slot) for slot in range(num_slots)]
    for of_slot in sources:
        assert len(of_slot) == rows // num_slots
        assert Counter(of_slot.tolist()) == {i: 2 * n for i, n in enumerate(shares)}
    row = num_slots * data.draw(st.integers(0, rows // num_slots))
    for source in range(len(shares)):
        given = order.given(source, row)
        before = [int((of_slot[: row // num_slots] == source).sum()) for of_slot in sources]
        assert given.tolist() == before
        nth = int(given.sum())
        at = order.row_of(source, nth)
        assert at >= row
        assert order.given(source, at).sum() == nth
        assert order.given(source, at + 1).sum() == nth + 1


@settings(max_examples=60, deadline=None)
@given(SHARES, st.integers(1, 8), st.integers(0, 50), st.integers(1, 60))
def test_every_batch_has_its_shares(shares, num_slots, first, rounds):
    order = Interleave(shares, num_slots)
    start, stop = first * num_slots, (first + rounds) * num_slots
    for source, share in enumerate(shares):
        count = order.given(source, stop).sum() - order.given(source, start).sum()
        ideal = (stop - start) * share / sum(shares)
        assert abs(count - ideal) <= (1 if len(shares) <= 2 else 2)


def test_epochs_end_when_told():
    order = Interleave((3, 1), 4)
    first = order.epoch_rows([300, 50], "first_exhausted")
    last = order.epoch_rows([300, 50], "all_exhausted")
    assert (first, last) == (200, 400)
    assert order.given(1, first).sum() == 50
    assert order.given(0, last).sum() == 300
    assert order.epoch_rows([300, 50], 1003) == 1000


@settings(max_examples=60, deadline=None)
@given(SHARES, st.integers(1, 8), st.data())
def test_an_epoch_stops_within_a_round_of_exhaustion(shares, num_slots, data):
    sizes = [data.draw(st.integers(num_slots, 80)) for _ in shares]
    order = Interleave(shares, num_slots)
    first = order.epoch_rows(sizes, "first_exhausted")
    last = order.epoch_rows(sizes, "all_exhausted")
    used = [[order.given(i, rows).sum() for i in range(len(sizes))] for rows in (first, last)]
    more = [order.given(i, first + num_slots).sum() for i in range(len(sizes))]
    fewer = [order.given(i, last - num_slots).sum() for i in range(len(sizes))]
    assert all(u <= size for u, size in zip(used[0], sizes, strict=True))
    assert any(m > size for m, size in zip(more, sizes, strict=True))
    assert all(u >= size for u, size in zip(used[1], sizes, strict=True))
    assert any(f < size for f, size in zip(fewer, sizes, strict=True))
