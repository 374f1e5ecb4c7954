"""Batches as a `tf.data.Dataset`, with TensorFlow itself."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import farandole as fa
from farandole.errors import ColumnError, UsageError

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def test_elements_are_the_loaders_batches() -> None:
    rows = pa.table(
        {
            "x": np.arange(100, dtype=np.float32),
            "n": pa.array([None if i % 3 == 0 else i for i in range(100)], pa.int16()),
            "s": [f"s{i}" for i in range(100)],
            "y": np.arange(100),
        }
    )
    loader = fa.dataset(rows, columns=["n", "s"], features=["x"], label="y").loader(
        batch_size=24, as_="numpy"
    )
    found = loader.to_tf()
    for epoch in range(2):
        seen = []
        for batch in found:
            ids = batch["row_ids"].numpy().tolist()
            assert batch["features"].numpy()[:, 0].tolist() == ids
            assert batch["label"].numpy().tolist() == ids
            assert batch["columns"]["s"].numpy().tolist() == [f"s{i}".encode() for i in ids]
            assert batch["columns"]["n"]["valid"].numpy().tolist() == [i % 3 > 0 for i in ids]
            seen += ids
        loader.set_epoch(epoch)
        expected = [row for block in loader for row in block.row_ids.tolist()]
        assert seen == expected
        assert sorted(seen) == list(range(100))


def test_what_has_no_type_is_named() -> None:
    table = pa.table({"d": [1, 2]})
    with pytest.raises(UsageError, match='as_="numpy"'):
        fa.dataset(table).loader(batch_size=2).to_tf()
    times = fa.dataset({"t": np.array([1, 2], "datetime64[s]")})
    with pytest.raises(ColumnError, match="no type"):
        times.loader(batch_size=2, as_="numpy").to_tf()
