"""The exchanges over a process group, run by threads over Gloo; and what NetworkComm refuses."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farandole.comm.exchange import Collectives, Exchange, PointToPoint
from farandole.comm.layout import make_layout
from farandole.comm.network import NetworkComm
from farandole.errors import PeerLostError, UsageError
from farandole.plan.slots import slots_of
from farandole.plan.tree import Fold, Node
from farandole.protocols import Bucket
from farandole.testing.comm import bits, expected_total, make_buckets, slot_value

TIMEOUT = timedelta(seconds=30)


def make_group(store: Any, rank: int, world_size: int) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def totals(make: Callable[..., Exchange], world_size: int, num_slots: int) -> list[list[bytes]]:
    """Run two steps on every rank; return the bits of the second one's totals."""
    store, buckets = dist.HashStore(), make_buckets()
    layout = make_layout(buckets, world_size, num_slots, exact=True)

    def run(rank: int) -> list[bytes]:
        exchange = make(make_group(store, rank, world_size), layout, rank)
        for step in range(2):
            for bucket in buckets:
                fold: Fold[torch.Tensor] = Fold(num_slots, torch.add)
                for slot in slots_of(rank, world_size, num_slots):
                    fold.put(Node(0, slot), slot_value(bucket, step, slot))
                for position, (_, value) in enumerate(fold.take()):
                    exchange.region(bucket.index, position).copy_(value)
                exchange.start(bucket.index)
            exchange.finish()
        return [bits(exchange.region(bucket.index, 0)) for bucket in buckets]

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


@pytest.mark.parametrize(("world_size", "num_slots"), [(1, 3), (2, 2), (3, 8)])
@pytest.mark.parametrize(
    "make",
    [Collectives, lambda *args: PointToPoint(*args, first_tag=10)],
    ids=["all-to-all", "p2p"],
)
def test_exchange_is_exact(make: Callable[..., Exchange], world_size: int, num_slots: int) -> None:
    expected = [expected_total(bucket, num_slots, 1) for bucket in make_buckets()]
    assert totals(make, world_size, num_slots) == [expected] * world_size


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return dist.FileStore(str(tmp_path / "store"), 1)


def test_devices_out_of_reach_are_refused(store: Any) -> None:
    comm = NetworkComm.connect(store, rank=0, world_size=1, generation=0, timeout=TIMEOUT)
    cpu, meta = (
        Bucket(i, 1, torch.float32, torch.device(kind)) for i, kind in enumerate(["cpu", "meta"])
    )
    with pytest.raises(UsageError, match="on cpu and meta"):
        comm.reducer([cpu, meta], 1)
    with pytest.raises(UsageError, match="gloo backend cannot exchange buckets on cuda"):
        comm.reducer([Bucket(0, 1, torch.float32, torch.device("cuda"))], 1)
    comm.close()


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_a_missing_backend_is_named(store: Any) -> None:
    with pytest.raises(UsageError, match="no NCCL"):
        NetworkComm.connect(
            store, rank=0, world_size=1, generation=0, backend="nccl", timeout=TIMEOUT
        )


def test_a_rank_that_never_comes_is_missed(store: Any) -> None:
    with pytest.raises(PeerLostError) as raised:
        NetworkComm.connect(store, rank=0, world_size=2, generation=0, timeout=timedelta(seconds=1))
    assert raised.value.during == "connect"
