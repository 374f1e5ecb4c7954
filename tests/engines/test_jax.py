"""Batches of JAX arrays, with JAX itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import farandole as fa
from farandole.errors import ColumnError

jax = pytest.importorskip("jax", reason="jax is not installed: group data-peers")


def rows() -> Any:
    columns = {
        "x": np.arange(100, dtype=np.float32),
        "n": pa.array([None if i % 3 == 0 else i for i in range(100)], pa.int16()),
        "lists": pa.array([[i] * (i % 3) for i in range(100)], pa.list_(pa.int32())),
        "y": np.arange(100),
    }
    return pa.table(columns)


def test_batches_go_through_jit() -> None:
    dataset = fa.dataset(rows(), columns=["n", "lists"], features=["x"], label="y")

    @jax.jit
    def total(batch: Any) -> Any:
        numbers = batch.columns["n"]
        masked = jax.numpy.where(numbers.valid, numbers.values, 0).sum()
        return batch.features.sum() + masked + batch.columns["lists"].values.values.sum()

    found, seen = 0.0, []
    for batch in dataset.loader(batch_size=20, as_="jax"):
        assert isinstance(batch.features, jax.Array)
        assert isinstance(batch.label, jax.Array)
        assert batch.row_ids.dtype == np.int64
        assert batch.label.tolist() == batch.row_ids.tolist()
        found += float(total(batch))
        seen += batch.row_ids.tolist()
    assert sorted(seen) == list(range(100))
    expected = sum(range(100)) + sum(i for i in range(100) if i % 3)
    assert found == expected + sum(i * (i % 3) for i in range(100))


def test_integers_that_jax_would_cut_off_are_refused() -> None:
    loader = fa.dataset({"big": np.full(10, 2**40)}).loader(batch_size=10, as_="jax")
    with pytest.raises(ColumnError, match="jax_enable_x64"):
        next(iter(loader))
