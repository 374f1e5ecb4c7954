"""What every comm must do, as tests that any implementation can run.

Subclass `CommSuite` in a test module, give it a world, and let pytest collect it::

    class TestMyComm(CommSuite):
        world = ProcessWorld(connect_my_comm)

See `farandole.testing.worlds` for worlds of threads and of processes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, ClassVar

import pytest
import torch

from farandole.errors import FarandoleError, MismatchError, PeerLostError, UsageError
from farandole.plan.slots import slots_of
from farandole.plan.tree import Fold, Node, tree_sum
from farandole.protocols import Bucket, Comm, Reducer
from farandole.testing.worlds import Worker, World

CPU = torch.device("cpu")
SIZES = {
    torch.float32: (1, 1000, 200_003),
    torch.float64: (1, 1000),
    torch.bfloat16: (1, 1000, 70_001),
}
"""Elements per bucket: fewer than ranks, than a cache line each, and more than a chunk each."""

NUM_STEPS = 3


def make_buckets(dtypes: Iterable[torch.dtype] = SIZES) -> list[Bucket]:
    """Return a bucket of each size and dtype."""
    shapes = [(size, dtype) for dtype in dtypes for size in SIZES[dtype]]
    return [Bucket(i, size, dtype, CPU) for i, (size, dtype) in enumerate(shapes)]


@cache
def _numbers() -> torch.Tensor:
    """Return numbers of many sizes."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(max(map(max, SIZES.values())), generator=random, dtype=torch.float64)
    return values * 10.0 ** torch.randint(-8, 8, values.shape, generator=random)


def slot_value(bucket: Bucket, step: int, slot: int) -> torch.Tensor:
    """Return what a slot contributes to a bucket; some numbers are odd ones."""
    values = _numbers().roll(bucket.index * 1009 + step * 211 + slot * 31)[: bucket.num_elements]
    odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e-40, -1e-310, -0.0])
    values[10 : 10 + len(odd)] = odd[: max(0, bucket.num_elements - 10)]
    return values.to(bucket.dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """Return a vector's memory."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def write_regions(reducer: Reducer, bucket: Bucket, comm: Comm, num_slots: int, step: int) -> None:
    """Fold the slots of this rank, and write the subtrees: in one of three ways, by step."""
    fold: Fold[torch.Tensor] = Fold(num_slots, torch.add)
    for slot in slots_of(comm.rank, comm.world_size, num_slots):
        fold.put(Node(0, slot), slot_value(bucket, step, slot))
    for position, (_, value) in enumerate(fold.take()):
        cut = (0, len(value) // 3, len(value))[step % 3]
        reducer.region(bucket.index, position)[:cut].copy_(value[:cut])
        for start, stop in ((cut, 2 * cut), (2 * cut, len(value))):
            reducer.put(bucket.index, position, start, value[start:stop])


def expected_total(bucket: Bucket, num_slots: int, step: int) -> bytes:
    """Return the bits of the total by the definition of the tree."""
    leaves = [(Node(0, slot), slot_value(bucket, step, slot)) for slot in range(num_slots)]
    return bits(tree_sum(leaves, num_slots, torch.add))


# --- scenarios: run on every rank ---------------------------------------------------------


def _gather(worker: Worker) -> list[list[bytes]]:
    rank = worker.comm.rank
    payloads = [b"", b"rank %d" % rank, bytes([rank]) * (300_000 + rank)]
    return [worker.comm.all_gather(f"round {i}", data) for i, data in enumerate(payloads)]


def _tensors(rank: int) -> list[torch.Tensor]:
    return [
        torch.full((3, 5), 1.5 + rank).T,
        torch.tensor(7 + rank),
        torch.tensor([rank % 2 == 0, True]),
        torch.empty(0, 4),
        torch.full((100_000,), float(rank), dtype=torch.bfloat16, requires_grad=True),
    ]


def _described(tensors: Sequence[torch.Tensor]) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Return dtypes, shapes and values, as what can be sent out of a process that ends."""
    return [(str(t.dtype), tuple(t.shape), bits(t.detach().reshape(-1))) for t in tensors]


def _broadcast(worker: Worker, source: int) -> list[tuple[str, tuple[int, ...], bytes]]:
    tensors = _tensors(worker.comm.rank)
    worker.comm.broadcast("state", tensors, source)
    return _described(tensors)


def _sums(worker: Worker, num_slots: int) -> list[tuple[list[bytes], list[bytes]]]:
    comm, buckets, steps = worker.comm, make_buckets(), []
    reducer = comm.reducer(buckets, num_slots)
    for step in range(NUM_STEPS):
        for bucket in buckets:
            write_regions(reducer, bucket, comm, num_slots, step)
            reducer.ready(bucket.index)
        records = reducer.wait(b"%d " % comm.rank * (500 * step))
        totals = [reducer.region(bucket.index, 0) for bucket in buckets]
        steps.append(([bits(total) for total in totals], records))
        for total in totals:
            total.mul_(0.5)
    reducer.close()
    return steps


def _fast_sums(worker: Worker) -> list[float]:
    comm, buckets, totals = worker.comm, make_buckets(), []
    reducer = comm.reducer(buckets, 2 * comm.world_size, exact=False)
    for step in range(NUM_STEPS):
        for bucket in buckets:
            reducer.region(bucket.index, 0).fill_(step + comm.rank)
            reducer.ready(bucket.index)
        reducer.wait()
        for bucket in buckets:
            totals += [reducer.region(bucket.index, 0)[i].item() for i in (0, -1)]
    return totals


def _interleaved(worker: Worker) -> list[tuple[float, float, list[bytes]]]:
    """Use two reducers and other calls in turn; one of them carries records only."""
    comm, seen = worker.comm, []
    gradients = comm.reducer([Bucket(0, 100, torch.float32, CPU)], comm.world_size)
    flags = comm.reducer([], comm.world_size)
    losses = comm.reducer([Bucket(0, 1, torch.float64, CPU)], comm.world_size)
    for step in range(20):
        for reducer in (gradients, losses):
            reducer.region(0, 0).fill_(step)
            reducer.ready(0)
            reducer.wait()
        records = flags.wait(b"%d" % step)
        comm.all_gather("between", b"")
        values = [reducer.region(0, 0)[0].item() for reducer in (gradients, losses)]
        seen.append((values[0], values[1], records))
    return seen


def _misuse(worker: Worker) -> list[str]:
    reducer = worker.comm.reducer(make_buckets([torch.float32]), 2 * worker.comm.world_size)
    problems = []
    for action in (lambda: reducer.ready(1), reducer.wait):
        try:
            action()
        except UsageError as error:
            problems.append(error.problem)
    return problems


def _call(comm: Comm, call: str) -> None:
    """Make one of the calls that must not be mixed."""
    small = [Bucket(0, 100, torch.float32, CPU)]
    match call:
        case "gather a" | "gather b":
            comm.all_gather(call, b"")
        case "broadcast 1" | "broadcast 2":
            comm.broadcast("x", [torch.zeros(int(call[-1]))])
        case "reducer exact" | "reducer fast":
            comm.reducer(small, 8, exact=call.endswith("exact"))
        case "reducer large":
            comm.reducer(make_buckets(), 8)
        case _:
            raise ValueError(call)


def _mixed(worker: Worker, call: str, other: str) -> str:
    is_last = worker.comm.rank == worker.comm.world_size - 1
    _call(worker.comm, other if is_last else call)
    return "no error"


def _gather_for_exchange(worker: Worker) -> str:
    comm = worker.comm
    reducer = comm.reducer([Bucket(0, 100, torch.float32, CPU)], 8)
    if comm.rank == comm.world_size - 1:
        comm.all_gather("instead", b"")
    reducer.ready(0)
    reducer.wait()
    return "no error"


def _exchange_until_lost(worker: Worker, how: str) -> tuple[FarandoleError, bool]:
    """Exchange in a loop; the last rank ends in the middle. Return the error, and if it stays."""
    comm = worker.comm
    buckets = make_buckets([torch.float32])
    reducer = comm.reducer(buckets, comm.world_size)
    for step in range(10):
        for bucket in buckets:
            if comm.rank == comm.world_size - 1 and step == 5 and bucket.index == 1:
                _end(worker, how)
            try:
                reducer.ready(bucket.index)
            except PeerLostError as error:
                return error, _fails_alike(comm, error)
        try:
            reducer.wait()
        except PeerLostError as error:
            return error, _fails_alike(comm, error)
    raise AssertionError("nobody was lost")


def _end(worker: Worker, how: str) -> None:
    match how:
        case "dies":
            worker.die()
        case "freezes":
            worker.freeze()
        case "closes":
            worker.comm.close()
        case "raises":
            raise RuntimeError("a mistake of the user's")


def _fails_alike(comm: Comm, error: FarandoleError) -> bool:
    try:
        comm.all_gather("afterwards", b"")
    except FarandoleError as again:
        return again is error
    return False


def _abort_while_waiting(worker: Worker) -> FarandoleError:
    comm = worker.comm
    comm.all_gather("start", b"")
    if comm.rank == comm.world_size - 1:
        worker.freeze()
    timer = threading.Timer(0.2, comm.abort, ["the coordinator said so"])
    timer.start()
    try:
        comm.all_gather("never", b"")
    except PeerLostError as error:
        return error
    finally:
        timer.join()
    raise AssertionError("nobody was lost")


# --- the suite ----------------------------------------------------------------------------


def _worlds() -> Iterator[tuple[int, int]]:
    for num_slots in (1, 2, 3, 5, 8):
        for size in range(1, min(num_slots, 4) + 1):
            yield num_slots, size


class CommSuite:
    """The tests. A subclass sets `world`."""

    world: ClassVar[World]

    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4)
    """The sizes of worlds that the comm can have."""

    names_lost_peer: ClassVar[bool] = True
    """Whether the error says which rank was lost."""

    def returned(self, size: int, scenario: Any, *args: Any) -> list[Any]:
        """Run a scenario that must return on every rank; return the values."""
        if size not in self.sizes:
            pytest.skip(f"this comm has no worlds of {size}")
        outcomes = self.world.run(size, scenario, *args)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
            assert outcome.how == "returned"
        return [outcome.value for outcome in outcomes]

    @pytest.mark.parametrize("size", [1, 3])
    def test_gather(self, size: int) -> None:
        """Every rank gets every rank's message, long ones too."""
        for rounds in self.returned(size, _gather):
            assert rounds[0] == [b""] * size
            assert rounds[1] == [b"rank %d" % rank for rank in range(size)]
            assert rounds[2] == [bytes([rank]) * (300_000 + rank) for rank in range(size)]

    @pytest.mark.parametrize(("size", "source"), [(1, 0), (2, 0), (3, 2)])
    def test_broadcast(self, size: int, source: int) -> None:
        """Every rank has the source's tensors, of any dtype, shape and layout."""
        for tensors in self.returned(size, _broadcast, source):
            assert tensors == _described(_tensors(source))

    @pytest.mark.parametrize(("num_slots", "size"), list(_worlds()))
    def test_exact_sums(self, num_slots: int, size: int) -> None:
        """Totals have the bits of the tree's sum on every rank, step after step."""
        ranks = self.returned(size, _sums, num_slots)
        for step in range(NUM_STEPS):
            expected = [expected_total(bucket, num_slots, step) for bucket in make_buckets()]
            expected_records = [b"%d " % rank * (500 * step) for rank in range(size)]
            for totals, records in (steps[step] for steps in ranks):
                assert totals == expected
                assert records == expected_records

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_fast_sums(self, size: int) -> None:
        """Totals are right where every order of additions gives the same bits."""
        expected = [
            float(sum(step + rank for rank in range(size)))
            for step in range(NUM_STEPS)
            for _ in make_buckets()
            for _ in range(2)
        ]
        for totals in self.returned(size, _fast_sums):
            assert totals == expected

    @pytest.mark.parametrize("size", [1, 3])
    def test_calls_in_turn(self, size: int) -> None:
        """Several reducers and other calls do not disturb one another."""
        for seen in self.returned(size, _interleaved):
            assert seen == [(size * s, size * s, [b"%d" % s] * size) for s in range(20)]

    @pytest.mark.parametrize("size", [2])
    def test_misuse(self, size: int) -> None:
        """A bucket out of turn, and a wait too early, are named at once."""
        for problems in self.returned(size, _misuse):
            assert problems == [
                "bucket 1 is announced where 0 is next",
                "0 of 3 buckets are announced",
            ]

    @pytest.mark.parametrize(
        ("call", "other"),
        [
            ("gather a", "gather b"),
            ("broadcast 1", "broadcast 2"),
            ("gather a", "broadcast 1"),
            ("reducer exact", "reducer fast"),
            ("reducer exact", "reducer large"),
        ],
    )
    def test_mismatch(self, call: str, other: str) -> None:
        """Calls that do not match raise on every rank, and name both."""
        self._all_mismatch(_mixed, call, other)

    def test_mismatch_with_exchange(self) -> None:
        """A rank that gathers where its peers exchange is found."""
        self._all_mismatch(_gather_for_exchange)

    @pytest.mark.parametrize("how", ["dies", "closes", "raises"])
    def test_peer_ends(self, how: str) -> None:
        """A peer that ends raises on every other rank, long before the timeout, and stays."""
        self._all_lost(_exchange_until_lost, how)

    def test_peer_freezes(self) -> None:
        """A peer that is silent raises on every other rank after the timeout."""
        timeout = timedelta(seconds=1.5)
        self._all_lost(_exchange_until_lost, "freezes", timeout=timeout, named=False)

    def test_abort(self) -> None:
        """An abort from another thread ends a wait for a frozen peer, and gives the reason."""
        errors = self._all_lost(_abort_while_waiting, named=False)
        assert any(error.reason == "the coordinator said so" for error in errors)

    def _need_peers(self) -> int:
        size = max(self.sizes)
        if size == 1:
            pytest.skip("a world of one has no peers")
        return size

    def _all_mismatch(self, scenario: Any, *args: Any) -> None:
        size = min(self._need_peers(), 3)
        for outcome in self.world.run(size, scenario, *args):
            assert isinstance(outcome.error, MismatchError), outcome
            assert outcome.error.mine != outcome.error.theirs

    def _all_lost(
        self, scenario: Any, *args: Any, named: bool = True, **options: Any
    ) -> list[PeerLostError]:
        size = self._need_peers()
        outcomes = self.world.run(size, scenario, *args, **options)[:-1]
        errors = []
        for outcome in outcomes:
            assert outcome.how == "returned", outcome
            value = outcome.value
            error, stays = value if isinstance(value, tuple) else (value, True)
            assert isinstance(error, PeerLostError)
            assert stays
            if named and self.names_lost_peer:
                assert error.peer == size - 1
            errors.append(error)
        return errors
