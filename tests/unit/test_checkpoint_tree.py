from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from farandole.checkpoint.tree import empty_tensors, flatten, unflatten
from farandole.errors import UsageError

tensors = st.builds(
    lambda shape, dtype: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]),
)
arrays = st.builds(
    lambda n, dtype: np.arange(n).astype(dtype),
    st.integers(0, 4),
    st.sampled_from(["f4", "f8", "i8", "u1", "?"]),
)
keys = st.text(max_size=6) | st.integers() | st.booleans()
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors | arrays
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert torch.equal(left, right)
    elif isinstance(left, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert np.array_equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        assert [type(key) for key in left] == [type(key) for key in right]
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif isinstance(left, float):
        assert math.isnan(left) == math.isnan(right)
        assert math.isnan(left) or left.hex() == right.hex()
    else:
        assert left == right


def round_trip(state: Any) -> Any:
    """Take apart, send the skeleton as JSON, copy the tensors into empty ones, put together."""
    parts, skeleton = flatten(state)
    told = json.loads(json.dumps(skeleton))
    made = empty_tensors(told)
    assert {name: (t.shape, t.dtype) for name, t in made.items()} == {
        name: (t.shape, t.dtype) for name, t in parts.items()
    }
    for name, tensor in made.items():
        tensor.copy_(parts[name])
    return unflatten(made, told)


@given(states)
def test_any_state_comes_back(state: Any) -> None:
    assert_same(round_trip(state), state)


@pytest.mark.parametrize(
    "state",
    [
        Counter({"a": 3, "b": 1}),
        OrderedDict([(2, "x"), (1, "y")]),
        {"inf": math.inf, "minus": -math.inf, "nan": math.nan, "zero": -0.0},
        {1: "one", "1": "text", True and (1, 2): [()]},
        {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        {1: torch.ones(1), "1": torch.zeros(1)},
        {"tensor": 1, "numpy": 2, "tuple": (3,)},
        np.array(3.5),
    ],
    ids=["counter", "ordered", "floats", "keys", "dots", "like keys", "reserved", "scalar"],
)
def test_odd_states_come_back(state: Any) -> None:
    assert_same(round_trip(state), state)


def test_numbers_of_numpy_become_plain() -> None:
    assert_same(round_trip([np.float32(0.5), np.int64(3), np.bool_(True)]), [0.5, 3, True])


def test_a_subclass_of_dict_becomes_a_dict() -> None:
    assert_same(round_trip(defaultdict(int, a=1)), {"a": 1})


def test_state_of_a_model_and_its_optimizer_fits_again() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

    parts = make()
    for _ in range(3):
        parts[0](torch.randn(5, 3)).square().mean().backward()
        parts[1].step()
        parts[2].step()
    states = [part.state_dict() for part in parts]
    others = make()
    for other, state in zip(others, round_trip(states), strict=True):
        other.load_state_dict(state)
    assert isinstance(parts[2].milestones, Counter)
    assert_same([other.state_dict() for other in others], states)


def test_tensors_are_taken_as_they_are() -> None:
    weight = nn.Parameter(torch.ones(2))
    parts, _ = flatten({"w": weight})
    ((_, tensor),) = parts.items()
    assert tensor.data_ptr() == weight.data_ptr()
    assert not tensor.requires_grad


@pytest.mark.parametrize(
    ("state", "path", "kind"),
    [
        ({"a": [1, {2}]}, "a.1", "set"),
        ({"model": {"f": print}}, "model.f", "builtin_function_or_method"),
        (object(), "the top", "object"),
        ([b"bytes"], "0", "bytes"),
        ({"t": np.array(["text"])}, "t", "ndarray"),
        ({"dtype": torch.float32}, "dtype", "dtype"),
        ({"z": 1j}, "z", "complex"),
    ],
)
def test_what_no_checkpoint_can_hold_is_named(state: Any, path: str, kind: str) -> None:
    with pytest.raises(UsageError) as caught:
        flatten(state)
    assert caught.value.problem.startswith(f"state at {path!r} is a {kind}, which cannot be")
