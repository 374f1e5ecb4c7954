"""All-reduce on one worker: the fold of slots' gradients, against sums that are written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from farandole.comm.single import SingleComm
from farandole.errors import UsageError
from farandole.strategies import allreduce
from farandole.strategies.allreduce import AllReduce, add_up


def make(model: nn.Module, num_slots: int, *, allow_unused: bool = False) -> AllReduce:
    strategy = AllReduce(
        SingleComm(),
        num_slots=num_slots,
        slots=range(num_slots),
        exact=True,
        bucket_bytes=64,
    )
    strategy.attach(model, allow_unused=allow_unused)
    return strategy


def by_levels(values: list[Any]) -> Any:
    while len(values) > 1:
        pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
        values = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return values[0]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1))


def inputs(slot: int) -> torch.Tensor:
    return torch.randn(4 + slot % 3, 5, generator=torch.Generator().manual_seed(slot))


def run_step(strategy: AllReduce, model: nn.Module, num_slots: int, pieces: int = 1) -> None:
    total = sum(len(inputs(slot)) for slot in range(num_slots))
    for slot in range(num_slots):
        strategy.begin_slot(slot)
        parts = inputs(slot).chunk(pieces)
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            strategy.backward(
                model(part).square().mean(),
                weight=len(part) / total,
                position=slot,
                slot_weight=len(inputs(slot)) / total if last else None,
            )
    assert strategy.exchange(b"record") == [b"record"]


def expected_step(model: nn.Module, num_slots: int, pieces: int = 1) -> list[torch.Tensor]:
    """Take the slots one by one, and write the totals into the buffers; return the gradients."""
    total = sum(len(inputs(slot)) for slot in range(num_slots))
    base = [buffer.clone() for buffer in model.buffers()]
    gradients, changes = [], []
    for slot in range(num_slots):
        for buffer, value in zip(model.buffers(), base, strict=True):
            buffer.copy_(value)
        model.zero_grad()
        for part in inputs(slot).chunk(pieces):
            (model(part).square().mean() * (len(part) / total)).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        weight = len(inputs(slot)) / total
        changes.append([(b - v) * weight for b, v in zip(model.buffers(), base, strict=True)])
    for i, (buffer, value) in enumerate(zip(model.buffers(), base, strict=True)):
        if buffer.is_floating_point() and num_slots > 1:
            buffer.copy_(value + by_levels([change[i] for change in changes]))
    return [by_levels([g[i] for g in gradients]) for i in range(len(gradients[0]))]


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 8])
def test_totals_are_the_trees_to_the_bit(num_slots: int, pieces: int) -> None:
    model, plain = mlp(), mlp()
    strategy = make(model, num_slots)
    for _ in range(2):
        run_step(strategy, model, num_slots, pieces)
        expected = expected_step(plain, num_slots, pieces)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, gradient)
        for buffer, value in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(buffer, value)
    strategy.close()


def test_gradients_of_a_step_can_be_changed_before_the_next() -> None:
    model, plain = mlp(), mlp()
    strategy = make(model, 3)
    run_step(strategy, model, 3)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    run_step(strategy, model, 3)
    expected_step(plain, 3)
    for parameter, gradient in zip(model.parameters(), expected_step(plain, 3), strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
    strategy.close()


def test_a_parameter_used_twice_is_counted_once() -> None:
    weight = nn.Linear(5, 5)
    model = nn.Sequential(weight, nn.Tanh(), weight)
    strategy = make(model, 2)
    run_step(strategy, model, 2)
    assert len(list(model.parameters())) == 2
    totals = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    strategy.close()
    for total, gradient in zip(totals, expected_step(model, 2), strict=True):
        assert torch.equal(total, gradient)


def test_frozen_parameters_stay_out_of_it() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)  # type: ignore[union-attr]
    strategy = make(model, 2)
    run_step(strategy, model, 2)
    assert model[0].weight.grad is None  # type: ignore[union-attr]
    assert model[0].bias.grad is not None  # type: ignore[union-attr]
    strategy.close()


def test_unused_parameters_count_as_zero_if_allowed() -> None:
    model = nn.ModuleDict({"used": nn.Linear(5, 1), "unused": nn.Linear(5, 1)})
    strategy = make(model, 2, allow_unused=True)
    run_step(strategy, model["used"], 2)
    for parameter in model["unused"].parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
    assert model["used"].weight.grad.abs().sum() > 0  # type: ignore[union-attr]
    strategy.close()


def test_an_unused_parameter_is_named() -> None:
    model = nn.ModuleDict({"used": nn.Linear(5, 1), "unused": nn.Linear(5, 1, bias=False)})
    strategy = make(model, 2)
    strategy.begin_slot(0)
    with pytest.raises(UsageError, match=r"no gradient reached unused\.weight;"):
        strategy.backward(model["used"](inputs(0)).mean(), weight=0.5, position=0, slot_weight=0.5)
    strategy.close()


def test_closing_leaves_an_ordinary_model() -> None:
    model, plain = mlp(), mlp()
    strategy = make(model, 2)
    run_step(strategy, model, 2)
    strategy.close()
    strategy.close()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.load_state_dict(plain.state_dict())
    for module in (model, plain):
        module(inputs(0)).mean().backward()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        assert torch.equal(parameter.grad, other.grad)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("num_lefts", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 9])
def test_chunks_change_no_bits(
    rows: int, num_lefts: int, into: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allreduce, "_CHUNK", 8)

    def make_tensor() -> torch.Tensor:
        tensor = torch.randn(2, rows) * 10.0 ** torch.randint(-6, 6, (2, rows))
        return tensor.t() if transposed else tensor

    torch.manual_seed(rows)
    lefts, value = [make_tensor() for _ in range(num_lefts)], make_tensor()
    expected = value
    for left in lefts:
        expected = left + expected
    kept = lefts[-1].clone()
    out = torch.empty(value.shape) if into else None
    result = add_up(lefts, value, out=out)
    assert result is (out if into else lefts[-1])
    assert torch.equal(result, expected)
    assert not into or torch.equal(lefts[-1], kept)
