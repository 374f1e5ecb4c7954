import pytest
import torch

from farandole.comm.layout import ALIGNMENT, check_ready, check_wait, make_layout
from farandole.comm.single import SingleComm
from farandole.errors import UsageError
from farandole.plan.slots import slots_of
from farandole.plan.tree import subtrees
from farandole.protocols import Bucket, Comm, Reducer

CPU = torch.device("cpu")


def bucket(num_elements: int, dtype: torch.dtype = torch.float32, index: int = 0) -> Bucket:
    return Bucket(index, num_elements, dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_elements", [0, 1, 15, 16, 17, 1000, 70_001])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 100])
def test_slices_cover_a_bucket_once_at_cache_lines(
    dtype: torch.dtype, num_elements: int, world_size: int
) -> None:
    one = bucket(num_elements, dtype)
    layout = make_layout([one], world_size, world_size, exact=True)
    end = 0
    for rank in range(world_size):
        part = layout.slice_of(one, rank)
        assert part.start == end
        assert part.start * dtype.itemsize % ALIGNMENT == 0 or part.start == num_elements
        end = part.stop
    assert end == num_elements


@pytest.mark.parametrize("num_slots", range(1, 13))
def test_additions_reduce_all_regions_to_one(num_slots: int) -> None:
    for world_size in range(1, num_slots + 1):
        layout = make_layout([], world_size, num_slots, exact=True)
        held = {
            (rank, region): list(node)
            for rank in range(world_size)
            for region, node in enumerate(slots_under(rank, world_size, num_slots))
        }
        assert layout.num_regions(0) == sum(1 for rank, _ in held if rank == 0)
        for into, other in layout.additions:
            held[into] += held.pop(other)
        assert held == {(0, 0): list(range(num_slots))}


def slots_under(rank: int, world_size: int, num_slots: int) -> list[range]:
    nodes = subtrees(slots_of(rank, world_size, num_slots), num_slots)
    return [
        range(node.index << node.level, min(num_slots, (node.index + 1) << node.level))
        for node in nodes
    ]


def test_fast_has_one_region_per_rank() -> None:
    layout = make_layout([], 3, 8, exact=False)
    assert [layout.num_regions(rank) for rank in range(3)] == [1, 1, 1]
    assert len(layout.additions) == 2


def test_a_rank_without_slots_has_room_for_the_total() -> None:
    layout = make_layout([], 3, 2, exact=True)
    assert layout.num_regions(2) == 1
    assert all(rank < 2 for pair in layout.additions for rank, _ in pair)


def test_description_tells_layouts_apart() -> None:
    layouts = [
        make_layout([bucket(10)], 2, 8, exact=True),
        make_layout([bucket(10)], 2, 8, exact=False),
        make_layout([bucket(10)], 2, 4, exact=True),
        make_layout([bucket(10, torch.float64)], 2, 8, exact=True),
        make_layout([bucket(4), bucket(6, index=1)], 2, 8, exact=True),
        make_layout([bucket(6), bucket(4, index=1)], 2, 8, exact=True),
    ]
    assert len({layout.describe() for layout in layouts}) == len(layouts)


def test_buckets_must_be_numbered() -> None:
    with pytest.raises(ValueError, match="numbered from 0"):
        make_layout([bucket(1, index=1)], 1, 1, exact=True)


def test_checks_name_the_mistake() -> None:
    check_ready(2, 2)
    check_wait(3, 3)
    with pytest.raises(UsageError, match="bucket 2 is announced where 1 is next"):
        check_ready(2, 1)
    with pytest.raises(UsageError, match="1 of 3 buckets are announced"):
        check_wait(1, 3)


def test_single_comm_satisfies_the_protocols() -> None:
    comm = SingleComm()
    reducer = comm.reducer([bucket(10)], 8)
    assert isinstance(comm, Comm)
    assert isinstance(reducer, Reducer)
    with pytest.raises(IndexError):
        reducer.region(0, 1)
