"""State of any nesting, taken apart into named tensors and a JSON skeleton, and put together.

No pickle: what cannot be told in JSON and tensors is refused when it is saved.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from farandole.errors import UsageError

_TENSOR = "tensor"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}


def flatten(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Take state apart.

    Returns
    -------
    tensors : dict of str to Tensor
        By the path at which they stand; not copied.
    skeleton : JSON-able
        Everything else, with shapes and dtypes in the tensors' places.

    Raises
    ------
    UsageError
        State holds something else than tensors, numpy arrays, numbers, strings, None, lists,
        tuples and dicts of those; names the path.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _take_apart(state, "", tensors)


def _take_apart(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        name = path
        while name in tensors:  # {"a.b": …} beside {"a": {"b": …}}
            name += "'"
        tensors[name] = value.detach()
        return {_TENSOR: name, "dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        inside = _take_apart(torch.from_numpy(value), path, tensors)
        return {"numpy": inside}
    if isinstance(value, np.generic) and value.dtype.kind in "fiub":
        return value.item()
    if isinstance(value, Mapping):
        name = next((n for n, cls in _MAPPINGS.items() if type(value) is cls), "dict")
        items = [
            [_take_apart(key, f"{path}.key", tensors), _take_apart(item, f"{path}.{key}", tensors)]
            for key, item in value.items()
        ]
        return {name: items}
    if isinstance(value, list | tuple):
        items = [_take_apart(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    raise UsageError(
        problem=f"state at {path.lstrip('.') or 'the top'!r} is a {type(value).__name__}, which "
        "cannot be checkpointed",
        remedy="let state_dict() return tensors, numbers, strings, lists and dicts only",
    )


def empty_tensors(skeleton: Any) -> dict[str, torch.Tensor]:
    """Return uninitialised tensors of the shapes and dtypes that a skeleton names, on the CPU."""
    found: dict[str, torch.Tensor] = {}

    def visit(value: Any) -> None:
        if isinstance(value, list):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            if _TENSOR in value:
                dtype = _DTYPES[value["dtype"]]
                found[value[_TENSOR]] = torch.empty(value["shape"], dtype=dtype)
            else:
                for item in value.values():
                    visit(item)

    visit(skeleton)
    return found


def unflatten(tensors: Mapping[str, torch.Tensor], skeleton: Any) -> Any:
    """Put state together again."""
    if isinstance(skeleton, list):
        return [unflatten(tensors, item) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if _TENSOR in skeleton:
        return tensors[skeleton[_TENSOR]]
    ((kind, inside),) = skeleton.items()
    if kind == "numpy":
        return unflatten(tensors, inside).numpy()
    if kind == "tuple":
        return tuple(unflatten(tensors, item) for item in inside)
    pairs = [(unflatten(tensors, key), unflatten(tensors, item)) for key, item in inside]
    mapping = dict(pairs)
    return mapping if kind == "dict" else _MAPPINGS[kind](mapping)
