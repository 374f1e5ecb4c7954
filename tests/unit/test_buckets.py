from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.strategies.buckets import Layout, Place, lay_out

shapes = st.lists(st.lists(st.integers(1, 6), max_size=3), max_size=10)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@st.composite
def tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=draw(dtypes)) for shape in draw(shapes)]


def places_by_bucket(
    layout: Layout, all_tensors: list[torch.Tensor]
) -> list[list[tuple[int, int]]]:
    spans: list[list[tuple[int, int]]] = [[] for _ in layout.buckets]
    for place, tensor in zip(layout.places, all_tensors, strict=True):
        spans[place.bucket].append((place.offset, place.offset + tensor.numel()))
    return spans


@given(tensors(), tensors(), st.integers(1, 400))
def test_every_tensor_has_a_place_of_its_own(
    parameters: list[torch.Tensor], extras: list[torch.Tensor], bucket_bytes: int
) -> None:
    layout = lay_out(parameters, extras, bucket_bytes)
    everything = [*parameters, *extras]
    for bucket, spans in zip(layout.buckets, places_by_bucket(layout, everything), strict=True):
        spans.sort()
        assert [start for start, _ in spans] == [0, *(stop for _, stop in spans)][:-1]
        assert spans[-1][1] == bucket.num_elements
        size = bucket.num_elements * bucket.dtype.itemsize
        assert size <= bucket_bytes or len(spans) == 1
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))
    for place, tensor in zip(layout.places, everything, strict=True):
        assert layout.buckets[place.bucket].dtype == tensor.dtype
    assert [sorted(members) for members in layout.members()] == [
        [i for i, place in enumerate(layout.places) if place.bucket == bucket]
        for bucket in range(len(layout.buckets))
    ]


@given(tensors(), tensors(), st.integers(1, 400))
def test_buckets_fill_in_the_order_of_the_backward_pass(
    parameters: list[torch.Tensor], extras: list[torch.Tensor], bucket_bytes: int
) -> None:
    layout = lay_out(parameters, extras, bucket_bytes)
    of_parameters = [place.bucket for place in layout.places[: len(parameters)]]
    of_extras = [place.bucket for place in layout.places[len(parameters) :]]
    assert of_parameters == sorted(of_parameters, reverse=True)
    assert of_extras == sorted(of_extras)
    assert not set(of_parameters) & set(of_extras)


def test_a_layout_as_it_is() -> None:
    parameters = [torch.empty(4), torch.empty(2, 3), torch.empty(5)]
    layout = lay_out(parameters, [torch.empty(2)], bucket_bytes=44)
    assert [bucket.num_elements for bucket in layout.buckets] == [11, 4, 2]
    assert layout.places == (Place(1, 0), Place(0, 5), Place(0, 0), Place(2, 0))


def test_views_share_the_buckets_memory() -> None:
    parameters = [torch.empty(4), torch.empty(2, 3)]
    layout = lay_out(parameters, [], bucket_bytes=1000)
    memory = torch.zeros(10)
    views = layout.views(parameters, lambda bucket: memory)
    views[0].fill_(1)
    views[1].fill_(2)
    assert [view.shape for view in views] == [parameter.shape for parameter in parameters]
    assert memory.tolist() == [2] * 6 + [1] * 4


def test_views_have_the_strides_of_their_parameters() -> None:
    image = torch.empty(4, 3, 5, 5)
    parameters = [
        image.to(memory_format=torch.channels_last),
        image,
        torch.empty(6, 4).t(),
        torch.empty(2, 3, 4).permute(1, 2, 0),
        torch.empty(3, 1, 2),
        torch.empty(()),
    ]
    layout = lay_out(parameters, [], bucket_bytes=100_000)
    memory = torch.arange(float(sum(p.numel() for p in parameters)))
    views = layout.views(parameters, lambda bucket: memory)
    assert [view.stride() for view in views] == [p.stride() for p in parameters]
    assert [view.shape for view in views] == [p.shape for p in parameters]
    # Each covers its own part of the bucket, whole.
    assert sorted(x for view in views for x in view.flatten().tolist()) == memory.tolist()


def test_a_parameter_with_gaps_gets_a_dense_view() -> None:
    parameter = torch.empty(4, 6)[:, :3]
    layout = lay_out([parameter], [], bucket_bytes=1000)
    (view,) = layout.views([parameter], lambda bucket: torch.empty(12))
    assert view.stride() == (3, 1)


def test_nothing_needs_no_bucket() -> None:
    assert lay_out([], [], 100) == Layout((), ())
