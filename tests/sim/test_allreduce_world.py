"""All-reduce over worlds of threads: the same bits for every number of workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from farandole.plan.slots import slots_of
from farandole.strategies import allreduce
from farandole.strategies.allreduce import AllReduce
from farandole.testing.worlds import SoloWorld, ThreadWorld, Worker

NUM_STEPS = 3


def make_model() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def train(
    worker: Worker, num_slots: int, exact: bool, bucket_bytes: int
) -> tuple[list[torch.Tensor], list[list[bytes]]]:
    """Take some steps of gradient descent; return the final state and all records seen."""
    comm = worker.comm
    model = make_model()
    slots = slots_of(comm.rank, comm.world_size, num_slots)
    leaves = num_slots if exact else comm.world_size
    mine = list(slots) if exact else [comm.rank]
    strategy = AllReduce(comm, num_slots=leaves, slots=mine, exact=exact, bucket_bytes=bucket_bytes)
    strategy.attach(model, allow_unused=False)
    records = []
    for step in range(NUM_STEPS):
        rows = {slot: rows_of(step, slot) for slot in range(num_slots)}
        total = sum(len(r) for r in rows.values())
        microsteps = [rows[slot] for slot in slots]
        if not exact:
            microsteps = [torch.cat(microsteps)]
        for position, part in enumerate(microsteps):
            strategy.begin_slot(position)
            weight = len(part) / total
            strategy.backward(
                model(part).square().mean(), weight=weight, position=position, slot_weight=weight
            )
        records.append(strategy.exchange(f"{comm.rank} in {step}".encode()))
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
    state = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    strategy.close()
    return state, records


def rows_of(step: int, slot: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + slot)
    return torch.randn(2 + (slot + step) % 3, 6, generator=generator)


def returned(world: Any, size: int, *args: Any) -> list[Any]:
    outcomes = world.run(size, train, *args)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
    return [outcome.value for outcome in outcomes]


@pytest.fixture(scope="module")
def alone() -> Callable[[int], list[torch.Tensor]]:
    return lambda num_slots: returned(SoloWorld(), 1, num_slots, True, 1 << 20)[0][0]


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize(
    ("size", "num_slots"), [(2, 2), (2, 8), (3, 7), (3, 8), (4, 8), (5, 7), (8, 8), (6, 12)]
)
def test_every_world_gives_the_bits_of_one_worker(
    size: int, num_slots: int, bucket_bytes: int, alone: Callable[[int], list[torch.Tensor]]
) -> None:
    expected = alone(num_slots)
    for state, records in returned(ThreadWorld(), size, num_slots, True, bucket_bytes):
        for tensor, other in zip(state, expected, strict=True):
            assert torch.equal(tensor, other)
        assert records == [
            [f"{rank} in {step}".encode() for rank in range(size)] for step in range(NUM_STEPS)
        ]


def test_sums_in_chunks_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, alone: Callable[[int], list[torch.Tensor]]
) -> None:
    expected = alone(8)
    monkeypatch.setattr(allreduce, "_CHUNK", 8)
    for size in (1, 2, 3):
        world = SoloWorld() if size == 1 else ThreadWorld()
        for state, _ in returned(world, size, 8, True, 200):
            for tensor, other in zip(state, expected, strict=True):
                assert torch.equal(tensor, other)


def test_fast_reduction_is_alike_on_all_workers() -> None:
    first, *others = returned(ThreadWorld(), 3, 8, False, 200)
    for other in others:
        for tensor, its in zip(first[0], other[0], strict=True):
            assert torch.equal(tensor, its)


def test_fast_reduction_is_close_to_exact_where_rows_do_not_mix(
    monkeypatch: pytest.MonkeyPatch, alone: Callable[[int], list[torch.Tensor]]
) -> None:
    # Batch statistics are of more rows at once then, so they are left out here.
    model = make_model()
    monkeypatch.setitem(globals(), "make_model", lambda: nn.Sequential(make_of(model)))
    fast = returned(ThreadWorld(), 2, 8, False, 200)[0][0]
    for tensor, other in zip(fast, alone(8), strict=True):
        assert torch.allclose(tensor, other, rtol=1e-5, atol=1e-6)


def make_of(model: nn.Module) -> nn.Module:
    linear = nn.Linear(6, 9)
    linear.load_state_dict(model[0].state_dict())  # type: ignore[index]
    return linear
