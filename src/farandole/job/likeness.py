"""Whether all workers do the same: train one model, on the same data."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from farandole.errors import MismatchError
from farandole.protocols import Comm


def check_alike(comm: Comm, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compare names, shapes and dtypes over the workers. Blocks; every rank must call it.

    Raises
    ------
    MismatchError
        On every rank, with the first difference.
    """
    lines = _describe(model, optimizer)
    digests = comm.all_gather("model digest", hashlib.sha256("\n".join(lines).encode()).digest())
    if all(digest == digests[0] for digest in digests):
        return
    described = comm.all_gather("model", "\n".join(lines).encode())
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, second = _first_difference(described[0], described[other])
    raise MismatchError(what="the model", rank=0, other_rank=other, mine=first, theirs=second)


def check_options(comm: Comm, optimizer: torch.optim.Optimizer) -> None:
    """Compare the learning rate and the like over the workers. Blocks; every rank must call it."""
    check_same(comm, "the optimizer", "; ".join(_describe_groups(optimizer)))


def check_same(comm: Comm, what: str, mine: str) -> None:
    """Compare one line over the workers. Blocks; every rank must call it.

    Raises
    ------
    MismatchError
        On every rank, with the first that differs from rank 0's.
    """
    lines = [line.decode() for line in comm.all_gather(what, mine.encode())]
    for rank, line in enumerate(lines):
        if line != lines[0]:
            raise MismatchError(what=what, rank=0, other_rank=rank, mine=lines[0], theirs=line)


def _describe(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    lines = [
        f"parameter {name}: {tuple(p.shape)} {p.dtype} trainable={p.requires_grad}"
        for name, p in model.named_parameters()
    ]
    lines += [f"buffer {name}: {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    return [*lines, *_describe_groups(optimizer)]


def _describe_groups(optimizer: torch.optim.Optimizer) -> list[str]:
    lines: list[str] = []
    for number, group in enumerate(optimizer.param_groups):
        options = {name: _rounded(value) for name, value in group.items() if name != "params"}
        what = f"{type(optimizer).__name__} group {number}: {len(group['params'])} parameters"
        lines.append(f"optimizer {what}, {options}")
    return lines


def _rounded(value: Any) -> Any:
    """Return a number without the last digits, in which hosts' libraries may differ."""
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _first_difference(left: bytes, right: bytes) -> tuple[str, str]:
    lines, others = left.decode().splitlines(), right.decode().splitlines()
    for line, other in zip(lines, others, strict=False):
        if line != other:
            return line, other
    longer = max(lines, others, key=len)[min(len(lines), len(others))]
    return (longer, "nothing") if len(lines) > len(others) else ("nothing", longer)
