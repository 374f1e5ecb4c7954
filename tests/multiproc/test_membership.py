"""Workers join, learn of one another, and share the coordinator's store."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from farandole.engines.local import LocalEngine
from farandole.errors import MembershipError, UsageError
from farandole.membership.client import StoreClient, join
from farandole.membership.coordinator import Coordinator
from farandole.plan.quorum import Member
from farandole.protocols import WorkerSpec

SECRET = b"a secret of this job, 32 bytes.."
SOON = timedelta(seconds=20)


def member(worker_id: int) -> Member:
    return Member(worker_id, "host", 1000 + worker_id, f"at-{worker_id}", {"threads": worker_id})


@pytest.fixture
def coordinator():
    """Give a function that starts a coordinator, and check that nothing is left of it."""
    threads = threading.active_count()
    started: list[Coordinator] = []

    def start(expected: int, **options) -> Coordinator:
        started.append(Coordinator(SECRET, expected=expected, **options))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.close()
        with pytest.raises(MembershipError, match="cannot reach the coordinator"):
            StoreClient(one.address, SECRET).check(["x"])
    assert threading.active_count() == threads


@pytest.fixture
def store(coordinator):
    client = StoreClient(coordinator(1).address, SECRET)
    yield client
    client.close()


def test_fifty_members_learn_of_one_another(coordinator):
    address = coordinator(50).address
    ids = [(7 * i) % 50 for i in range(50)]
    with ThreadPoolExecutor(50) as pool:
        joined = list(pool.map(lambda i: join(address, SECRET, member(i), SOON), ids))
    for worker_id, mine in zip(ids, joined, strict=True):
        assert (mine.generation, mine.rank, mine.world_size) == (1, worker_id, 50)
        assert mine.members == tuple(member(i) for i in range(50))
        mine.close()


def test_ranks_follow_ids_with_gaps(coordinator):
    address = coordinator(2).address
    with ThreadPoolExecutor(2) as pool:
        late, early = pool.map(lambda i: join(address, SECRET, member(i), SOON), [40, 7])
    with late, early:
        assert (early.rank, late.rank) == (0, 1)


def test_two_coordinators_do_not_meddle(coordinator):
    one, other = coordinator(1), coordinator(1)
    assert one.address != other.address
    for each in (one, other):
        with join(each.address, SECRET, member(0), SOON) as mine:
            assert mine.world_size == 1


def test_no_address_before_the_start():
    with pytest.raises(UsageError, match="start"):
        _ = Coordinator(SECRET, expected=1).address


def test_a_host_that_is_not_here_is_an_oserror():
    coordinator = Coordinator(SECRET, expected=1, host="192.0.2.1")
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        coordinator.start()
    coordinator.close()


def test_real_workers_join_and_count(coordinator, tmp_path):
    code = (
        "import os, sys; from datetime import timedelta\n"
        "from farandole.membership.client import StoreClient, join\n"
        "from farandole.plan.quorum import Member\n"
        "address, secret, i = sys.argv[1], os.environ['SECRET'].encode(), int(sys.argv[2])\n"
        "with join(address, secret, Member(i, 'h', os.getpid(), ''), timedelta(seconds=20)) as m:\n"
        "    assert m.members[m.rank].pid == os.getpid()\n"
        "    store = StoreClient(address, secret)\n"
        "    store.add('count', i)\n"
        "    store.set(f'done-{i}', b'')\n"
        "    store.wait([f'done-{j.worker_id}' for j in m.members], timedelta(seconds=20))\n"
        "    print(m.rank, m.world_size, store.get('count', timedelta(0)).decode())\n"
    )
    address = coordinator(3).address
    engine = LocalEngine()
    try:
        for i in (5, 6, 9):
            argv = (sys.executable, "-c", code, address, str(i))
            engine.start(WorkerSpec(i, argv, {"SECRET": SECRET.decode()}, tmp_path / f"{i}.log"))
        ends = []
        while len(ends) < 3 and (new := engine.wait(SOON)):
            ends += new
    finally:
        engine.close()
    logs = [(tmp_path / f"{i}.log").read_text() for i in (5, 6, 9)]
    assert logs == ["0 3 20\n", "1 3 20\n", "2 3 20\n"]
    assert sorted(end.exit_code for end in ends) == [0, 0, 0]


# --- the store ----------------------------------------------------------------------------


def test_values_are_any_bytes(store):
    value = bytes(range(256)) * 100
    store.set("key", value)
    assert store.get("key", SOON) == value
    store.set("key", b"")
    assert store.get("key", SOON) == b""


def test_counters_are_readable_as_values(store):
    assert [store.add("n", 2), store.add("n", -5)] == [2, -3]
    assert store.get("n", SOON) == b"-3"


def test_check_and_delete(store):
    store.set("a", b"")
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    assert store.delete("a")
    assert not store.delete("a")
    assert not store.check(["a"])


def test_a_get_that_waits_holds_up_no_other_thread(store):
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(store.get, "late", SOON) for _ in range(3)]
        waiting.append(pool.submit(store.wait, ["late", "n"], SOON))
        store.add("n", 1)
        assert not any(one.done() for one in waiting)
        store.set("late", b"here")
        assert [one.result(20) for one in waiting] == [b"here"] * 3 + [None]


def test_counting_from_many_threads_loses_nothing(store):
    with ThreadPoolExecutor(8) as pool:
        totals = list(pool.map(lambda _: store.add("n", 1), range(400)))
    assert sorted(totals) == list(range(1, 401))


def test_what_is_never_set_is_named_in_time(store):
    with pytest.raises(MembershipError, match=r"absent not set .* within 0\.05 s"):
        store.get("absent", timedelta(seconds=0.05))
    with pytest.raises(MembershipError, match="absent, gone not set"):
        store.wait(["absent", "gone"], timedelta(seconds=0.05))


def test_a_value_has_a_largest_size_and_the_client_goes_on(store):
    with pytest.raises(MembershipError, match="more than 1048576"):
        store.set("large", bytes(1 << 20))
    store.set("small", b"1")
    assert store.get("small", SOON) == b"1"


def test_closing_wakes_who_waits(store):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "never", SOON)
        while not store._busy:
            assert not waiting.done()
        store.close()
        with pytest.raises(MembershipError, match="lost the coordinator"):
            waiting.result(20)
    with pytest.raises(MembershipError, match="closed"):
        store.set("a", b"")


def test_gloo_finds_its_peers_by_the_store(coordinator, tmp_path):
    code = (
        "import os, sys, torch, torch.distributed as dist; from datetime import timedelta\n"
        "from farandole.comm.store import CoordinatorStore\n"
        "from farandole.membership.client import StoreClient\n"
        "client = StoreClient(sys.argv[1], os.environ['SECRET'].encode())\n"
        "store = CoordinatorStore(client, timedelta(seconds=60))\n"
        "rank = int(sys.argv[2])\n"
        "for generation in (1, 2):\n"
        "    prefixed = dist.PrefixStore(f'generation-{generation}', store)\n"
        "    group = dist.ProcessGroupGloo(prefixed, rank, 2, timedelta(seconds=60))\n"
        "    total = torch.full((10,), rank + generation)\n"
        "    group.allreduce([total]).wait()\n"
        "    print(total[0].item())\n"
        "group.barrier().wait()\n"
    )
    address = coordinator(2).address
    engine = LocalEngine()
    try:
        for i in range(2):
            argv = (sys.executable, "-c", code, address, str(i))
            engine.start(WorkerSpec(i, argv, {"SECRET": SECRET.decode()}, tmp_path / f"{i}.log"))
        ends = []
        while len(ends) < 2 and (new := engine.wait(timedelta(seconds=90))):
            ends += new
    finally:
        engine.close()
    assert [(tmp_path / f"{i}.log").read_text() for i in range(2)] == ["3\n5\n"] * 2
