"""How the tensors of a model are laid out in flat buckets, and views of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from farandole.protocols import Bucket


@dataclass(frozen=True)
class Place:
    """Where one tensor lies: elements ``[offset, offset + numel)`` of a bucket."""

    bucket: int
    offset: int


@dataclass(frozen=True)
class Layout:
    """Buckets, and the place of every tensor in them."""

    buckets: tuple[Bucket, ...]
    places: tuple[Place, ...]

    def members(self) -> list[list[int]]:
        """Return the tensors of each bucket."""
        members: list[list[int]] = [[] for _ in self.buckets]
        for index, place in enumerate(self.places):
            members[place.bucket].append(index)
        return members

    def views(
        self, tensors: Sequence[torch.Tensor], region: Callable[[int], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return a view of a bucket's vector for every tensor, laid out as autograd would."""
        return [
            _like(region(place.bucket)[place.offset : place.offset + tensor.numel()], tensor)
            for tensor, place in zip(tensors, self.places, strict=True)
        ]


def _like(vector: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a vector in a tensor's shape, and in its strides unless these leave gaps.

    A gradient has the strides of its parameter; norms, say, are summed in their order.
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return vector.view(tensor.shape)
        expected *= size
    return vector.as_strided(tensor.shape, tensor.stride(), vector.storage_offset())


def lay_out(
    parameters: Sequence[torch.Tensor], extras: Sequence[torch.Tensor], bucket_bytes: int
) -> Layout:
    """Lay parameters out in the order in which backward reaches them, then the extras.

    Parameters
    ----------
    parameters : sequence of Tensor
        In order of registration: backward reaches about the last first.
    extras : sequence of Tensor
        What is known only after backward (buffers); they get buckets of their own, at the end.
    bucket_bytes : int
        A bucket is closed when the next tensor would exceed this size. A tensor is never split.
    """
    num_parameters = len(parameters)
    order = [*reversed(range(num_parameters)), *range(num_parameters, num_parameters + len(extras))]
    tensors = [*parameters, *extras]
    places: dict[int, Place] = {}
    buckets: list[Bucket] = []
    size = 0
    for index in order:
        tensor = tensors[index]
        last = buckets[-1] if buckets else None
        fits = (
            last is not None
            and index != num_parameters  # the first of the extras
            and (last.dtype, last.device) == (tensor.dtype, tensor.device)
            and (size + tensor.numel()) * tensor.element_size() <= bucket_bytes
        )
        if not fits:
            buckets.append(Bucket(len(buckets), 0, tensor.dtype, tensor.device))
            size = 0
        places[index] = Place(len(buckets) - 1, size)
        size += tensor.numel()
        buckets[-1] = Bucket(len(buckets) - 1, size, tensor.dtype, tensor.device)
    return Layout(tuple(buckets), tuple(places[index] for index in range(len(tensors))))
