from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.errors import RunDirectoryError, UsageError
from farandole.job import metrics as metrics_module
from farandole.job.metrics import MetricsWriter, StepMetrics, combine
from farandole.plan.slots import slots_of
from farandole.plan.tree import Node, tree_sum

values = st.floats(-1e6, 1e6, allow_subnormal=False)


@st.composite
def logged(draw: st.DrawFn) -> list[tuple[float, float | None]]:
    """Return for every slot the weight of its rows, and what it logged, if anything."""
    rows = draw(st.lists(st.integers(1, 50), min_size=1, max_size=12))
    skipped = draw(st.sets(st.integers(0, len(rows) - 1)))
    return [
        (n / sum(rows), None if slot in skipped else draw(values)) for slot, n in enumerate(rows)
    ]


def combined(slots: list[tuple[float, float | None]], world_size: int) -> dict[str, float]:
    """Log as so many workers would, and combine what went over the wire."""
    summaries = []
    for rank in range(world_size):
        metrics = StepMetrics()
        for slot in slots_of(rank, world_size, len(slots)):
            weight, value = slots[slot]
            if value is not None:
                metrics.begin_batch()
                metrics.add(slot, weight, {"loss": torch.tensor(value, dtype=torch.float64)})
        metrics.set_alike({"lr": 0.25})
        summaries.append(json.loads(json.dumps(metrics.summary())))
    return combine(summaries, len(slots))


@given(logged(), st.data())
def test_any_split_over_ranks_gives_the_same_bits(
    slots: list[tuple[float, float | None]], data: st.DataObject
) -> None:
    world_size = data.draw(st.integers(1, len(slots)))
    alone = combined(slots, 1)
    assert {k: v.hex() for k, v in combined(slots, world_size).items()} == {
        k: v.hex() for k, v in alone.items()
    }
    told = [(weight, value) for weight, value in slots if value is not None]
    assert set(alone) == ({"loss", "lr"} if told else {"lr"})
    if told:
        mean = sum(w * v for w, v in told) / sum(w for w, _ in told)
        assert alone["loss"] == pytest.approx(mean, rel=1e-9, abs=1e-6)


def test_the_sum_is_the_trees() -> None:
    weights = [0.25] * 4
    numbers = [2.0**53, 1.0, 1.0, 1.0]  # one by one, the ones would be lost
    slots: list[tuple[float, float | None]] = list(zip(weights, numbers, strict=True))
    leaves = [
        (Node(0, slot), w * v) for slot, (w, v) in enumerate(zip(weights, numbers, strict=True))
    ]
    assert combined(slots, 2)["loss"] == tree_sum(leaves, 4, lambda a, b: a + b)
    assert combined(slots, 2)["loss"] != sum(value for _, value in leaves)


def test_pieces_of_a_slot_are_added_up() -> None:
    metrics = StepMetrics()
    metrics.add(0, 0.25, {"loss": 1.0})
    metrics.begin_batch()
    metrics.add(0, 0.75, {"loss": torch.tensor([3.0])})
    assert metrics.summary()["slots"] == {0: {"loss": (2.5, 1.0)}}
    assert combine([metrics.summary()], 1) == {"loss": 2.5}


def test_what_some_pieces_of_every_slot_log_is_their_mean() -> None:
    metrics = StepMetrics()
    for slot in range(2):
        metrics.begin_batch()
        metrics.add(slot, 0.25, {"loss": 1.0, "norm": 3.0})
        metrics.begin_batch()
        metrics.add(slot, 0.25, {"loss": 2.0})
    assert combine([metrics.summary()], 2) == {"loss": 1.5, "norm": 3.0}


def test_a_sum_of_weights_that_rounding_moved_is_not_divided_by() -> None:
    weights = [rows / 21 for rows in range(1, 7)]
    leaves = [(Node(0, slot), weight) for slot, weight in enumerate(weights)]
    assert tree_sum(leaves, 6, lambda a, b: a + b) != 1.0
    leaves = [(node, weight * 0.7) for node, weight in leaves]
    slots: list[tuple[float, float | None]] = [(weight, 0.7) for weight in weights]
    assert combined(slots, 3)["loss"] == tree_sum(leaves, 6, lambda a, b: a + b)


def test_a_name_is_logged_once_for_a_batch() -> None:
    metrics = StepMetrics()
    metrics.add(0, 1.0, {"loss": 1.0})
    metrics.add(0, 1.0, {"hits": 1.0})
    with pytest.raises(UsageError, match="'loss' was logged twice for one batch; log it once"):
        metrics.add(0, 1.0, {"loss": 1.0})


def test_tensors_are_kept_without_their_graph() -> None:
    metrics = StepMetrics()
    loss = torch.ones(1, requires_grad=True).sum()
    metrics.add(0, 1.0, {"loss": loss})
    (_, _, _, kept) = metrics._logged[0]
    assert not kept.requires_grad


def test_what_is_alike_is_rank_0s() -> None:
    summaries = [{"slots": {}, "alike": {"lr": 1.0}}, {"slots": {}, "alike": {"lr": 2.0}}]
    assert combine(summaries, 2) == {"lr": 1.0}


@pytest.mark.parametrize(
    ("value", "said"), [(torch.ones(2), r"shape \(2,\)"), ("high", "a str"), (None, "a NoneType")]
)
def test_only_numbers_are_logged(value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=f"'loss' was logged with {said}"):
        StepMetrics().add(0, 1.0, {"loss": value})
    with pytest.raises(UsageError, match=f"'loss' was logged with {said}"):
        StepMetrics().set_alike({"loss": value})


def test_nan_and_infinity_pass_through() -> None:
    slots: list[tuple[float, float | None]] = [(0.5, float("nan")), (0.5, 1.0)]
    assert str(combined(slots, 2)["loss"]) == "nan"
    assert combined([(1.0, float("inf"))], 1)["loss"] == float("inf")


# --- the file -------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_written_in_order_and_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in range(1, 4):
        writer.write("step", step, {"loss": step / 3}, epoch=0)
    writer.write("evaluation", 3, {"loss": 0.5}, name="a")
    writer.close()
    again = MetricsWriter(path)
    again.write("step", 3, {"loss": 9.0})
    again.write("evaluation", 3, {"loss": 9.0}, name="a")
    again.write("evaluation", 3, {"loss": 0.25}, name="b")
    again.write("step", 4, {"loss": 4 / 3})
    again.close()
    found = [(r["kind"], r.get("name"), r["step"], r["values"]["loss"]) for r in lines(path)]
    assert found == [
        ("step", None, 1, 1 / 3),
        ("step", None, 2, 2 / 3),
        ("step", None, 3, 1.0),
        ("evaluation", "a", 3, 0.5),
        ("evaluation", "b", 3, 0.25),
        ("step", None, 4, 4 / 3),
    ]


def test_a_torn_line_is_cut_off_and_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write("step", 1, {"loss": 1.0})
    writer.write("step", 2, {"loss": 2.0})
    writer.close()
    path.write_bytes(path.read_bytes()[:-7])
    again = MetricsWriter(path)
    again.write("step", 1, {"loss": 1.0})
    again.write("step", 2, {"loss": 2.0})
    again.close()
    assert [(r["step"], r["values"]) for r in lines(path)] == [
        (1, {"loss": 1.0}),
        (2, {"loss": 2.0}),
    ]


def test_flushed_lines_are_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "FLUSH_S", 1e6)  # nothing is written unasked
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.flush()
    for step in (1, 2, 3):
        writer.write("step", step, {"loss": 1.0})
        writer.flush()
        writer.flush()
        assert [line["step"] for line in lines(path)] == list(range(1, step + 1))
    writer.close()


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "nowhere" / "metrics.jsonl")
    writer._thread.join()
    for call in (writer.flush, writer.close, lambda: writer.write("step", 1, {"loss": 1.0})):
        with pytest.raises(RunDirectoryError, match=r"nowhere: cannot be written \(No such file"):
            call()


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = threading.active_count()
    MetricsWriter(tmp_path / "metrics.jsonl").close()
    assert threading.active_count() == before
