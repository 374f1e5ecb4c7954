from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import farandole as fa
from farandole.data import ArrayDataset, ParquetDataset
from farandole.errors import ColumnError, ConfigError, DataError

sys.path.insert(0, str(Path(__file__).parent.parent / "jobs"))

from inline_job import SLOTS, run_inline, sgd, value_of


def table(num_rows: int, offset: float) -> ArrayDataset:
    values = np.arange(num_rows, dtype=np.float32) + offset
    return ArrayDataset(values[:, None], values, rows_per_shard=7)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, ParquetDataset]:
    made = {}
    for name, num_rows, offset in (("a", 300, 0.0), ("b", 90, 1000.0)):
        values = pa.array(np.arange(num_rows) + offset, pa.float32())
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"x": values, "y": values}), path, row_group_size=40)
        made[name] = ParquetDataset(path, features=["x"], label="y", index_cache=None)
    return made


def blocks_of(dataset, plan, slots, start_step=0):
    blocks = dataset.read(plan, slots, start_step)
    try:
        return list(blocks)
    finally:
        blocks.close()


def test_rows_come_from_where_the_block_says(files):
    both = fa.mix(files, {"a": 3, "b": 1})
    plan = both.epoch_plan(seed=1, epoch=0, batch_size=40, num_slots=4)
    assert plan.num_rows == 360
    blocks = blocks_of(both, plan, range(4))
    assert len(blocks) == 4 * plan.num_steps
    used = Counter()
    for block in blocks:
        expected = block.row_ids + 1000.0 * (block.source == 1)
        assert np.array_equal(block.label, expected)
        assert np.array_equal(block.features[:, 0], expected)
        used.update(zip(block.source.tolist(), block.row_ids.tolist(), strict=True))
    assert used == {(0, row): 1 for _, row in used if _ == 0} | {(1, row): 1 for row in range(90)}
    assert used.total() == 360
    for step in range(plan.num_steps):
        sources = np.concatenate([b.source for b in blocks[4 * step : 4 * step + 4]])
        assert 9 <= (sources == 1).sum() <= 11


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_and_resumes_see_the_same_rows(files, workers):
    both = fa.mix(files, {"a": 1, "b": 2}, stop="all_exhausted")
    plan = both.epoch_plan(seed=1, epoch=2, batch_size=24, num_slots=3, tail="pad")
    whole = blocks_of(both, plan, range(3))
    bounds = [3 * rank // workers for rank in range(workers + 1)]
    for rank in range(workers):
        slots = range(bounds[rank], bounds[rank + 1])
        mine = iter(blocks_of(both, plan, slots, 5))
        for step in range(5, plan.num_steps):
            for slot in slots:
                one, other = next(mine), whole[3 * step + slot]
                assert np.array_equal(one.label, other.label)
                assert np.array_equal(one.source, other.source)
    used = Counter(
        zip(
            *(
                np.concatenate([getattr(b, n) for b in whole]).tolist()
                for n in ("source", "row_ids")
            ),
            strict=True,
        )
    )
    assert {count for (source, _), count in used.items() if source == 0} == {1}
    assert {count for (source, _), count in used.items() if source == 1} <= {6, 7}
    assert len(used) == 390


def test_a_mix_trains_in_a_job_and_outside(tmp_path, files):
    both = fa.mix({"one": table(40, 0), "two": table(60, 1000)}, {"one": 1, "two": 1})
    seen = []

    def train(job: fa.Job) -> None:
        model, optimizer = job.prepare(nn.Linear(1, 1), sgd)
        for _ in job.epochs(2):
            for batch in job.loader(both, batch_size=4 * SLOTS):
                assert torch.equal(batch.label >= 1000, batch.source == 1)
                seen.append(batch.source.float().mean().item())
                job.backward(0 * model(batch.features).mean())
                optimizer.step()

    value_of(run_inline(train, tmp_path))
    assert len(seen) == 2 * 5 * SLOTS
    assert np.mean(seen) == pytest.approx(0.5)
    loader = both.loader(batch_size=16, num_slots=4, as_="numpy")
    batches = list(loader)
    assert sum(len(batch.row_ids) for batch in batches) == 80
    assert len(str(loader.state_dict())) < 250


def test_all_rows_can_be_read_in_order():
    both = fa.mix({"one": table(40, 0), "two": table(60, 1000)})
    assert both.num_rows == 100
    blocks = list(both.read_rows([range(10), range(30, 100)]))
    assert blocks[0].label.tolist() == list(range(10))
    assert blocks[1].label.tolist() == [*range(30, 40), *range(1000, 1060)]
    assert blocks[1].source.tolist() == [0] * 10 + [1] * 60


def test_fingerprints_tell_mixes_apart():
    one, two = table(40, 0), table(60, 1000)
    prints = {
        fa.mix({"a": one, "b": two}, weights, stop=stop).fingerprint
        for weights in ({"a": 1, "b": 1}, {"a": 2, "b": 2}, {"a": 1, "b": 2})
        for stop in ("first_exhausted", "all_exhausted", 500)
    }
    assert len(prints) == 6
    assert fa.mix({"a": one, "b": two}).shares == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (ArrayDataset(np.zeros((9, 2)), np.zeros(9)), r"'features' is float32\[1\] in 'a' and"),
        (ArrayDataset(np.zeros((9, 1)), np.zeros(9, int)), "'label' is float32 in 'a' and int64"),
        (ArrayDataset(np.zeros((9, 1))), "'label' is float32 in 'a' and missing in 'b'"),
        (ArrayDataset(np.zeros((9, 1)), np.zeros(9), z=np.zeros(9)), "'z' is missing in 'a'"),
    ],
)
def test_data_sets_that_do_not_fit_together_are_refused(other, problem):
    both = fa.mix({"a": table(10, 0), "b": other})
    with pytest.raises(ColumnError, match=problem):
        both.epoch_plan(seed=0, epoch=0, batch_size=4, num_slots=2)


@pytest.mark.parametrize(
    ("weights", "stop", "problem"),
    [
        ({"a": 1}, "first_exhausted", "weights are for"),
        ({"a": 1, "b": 0}, "first_exhausted", "positive"),
        (None, "last_exhausted", "stop="),
        (None, 0, "stop=0"),
    ],
)
def test_wrong_options_are_refused(weights, stop, problem):
    with pytest.raises(DataError, match=problem):
        fa.mix({"a": table(10, 0), "b": table(10, 0)}, weights, stop=stop)


def test_sizes_that_do_not_fit_are_refused():
    both = fa.mix({"a": table(10, 0), "b": table(10, 0)})
    with pytest.raises(ConfigError, match="multiple of the 2 slots"):
        both.epoch_plan(seed=0, epoch=0, batch_size=5, num_slots=2)
    with pytest.raises(DataError, match="fill no batch"):
        both.epoch_plan(seed=0, epoch=0, batch_size=22, num_slots=2, tail="drop")
    with pytest.raises(DataError, match="is a mix"):
        fa.mix({"a": both, "b": table(10, 0)}).epoch_plan(
            seed=0, epoch=0, batch_size=4, num_slots=2
        )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([1, None], pa.int32()), pa.array([1, None], pa.int64())),
        (pa.array([[1], [2]], pa.list_(pa.int32())), pa.array([[0.5], []], pa.list_(pa.float32()))),
        (
            pa.array([[[1]], [[2]]], pa.list_(pa.list_(pa.int32()))),
            pa.array([[[1]], [[2]]], pa.list_(pa.list_(pa.int64()))),
        ),
    ],
)
def test_values_within_columns_must_be_of_one_type_too(tmp_path, one, other):
    datasets = {}
    for name, column in (("a", one), ("b", other)):
        pq.write_table(pa.table({"x": column}), tmp_path / f"{name}.parquet")
        datasets[name] = ParquetDataset(tmp_path / f"{name}.parquet", index_cache=None)
    with pytest.raises(ColumnError, match=r"'x' is .*int32 in 'a' and .* in 'b'"):
        fa.mix(datasets).validate()


def test_nulls_in_one_data_set_only_are_mixed_as_the_error_says(tmp_path):
    for name, column in (("a", [1, None]), ("b", [3, 4])):
        pq.write_table(pa.table({"x": column}), tmp_path / f"{name}.parquet")

    def mixed(columns):
        paths = {name: tmp_path / f"{name}.parquet" for name in "ab"}
        made = {n: ParquetDataset(p, columns=columns, index_cache=None) for n, p in paths.items()}
        return fa.mix(made)

    with pytest.raises(ColumnError, match=r"fa\.masked\(\)"):
        mixed(["x"]).validate()
    mixed({"x": fa.masked()}).validate()


def test_what_is_left_out_is_told_once_by_all_that_is_built_upon_it(tmp_path):
    pq.write_table(pa.table({"x": [1, 2, 3, 4], "y": [0, 1, 0, 1]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"no Parquet at all")
    whole = ParquetDataset(tmp_path, label="y", on_bad="skip", index_cache=None)
    (told,) = whole.warnings()
    assert "b.parquet" in told
    for built in (
        fa.balance(whole),
        fa.mix({"a": whole, "b": whole}),
        whole.sample(rows=2),
        whole.split({"all": 1.0})["all"],
    ):
        assert built.warnings() == [told]
