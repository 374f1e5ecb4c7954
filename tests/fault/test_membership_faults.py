"""Strangers, liars, the slow and the dead: each is refused with a reason and disturbs nobody."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta

import pytest

from farandole.engines.local import LocalEngine
from farandole.errors import AuthenticationError, MembershipError
from farandole.membership import wire
from farandole.membership.client import StoreClient, join
from farandole.membership.coordinator import Coordinator
from farandole.plan.quorum import Member
from farandole.protocols import WorkerSpec
from farandole.testing.engine import wait_until

SECRET = b"a secret of this job, 32 bytes.."
OTHER = b"the secret of another job......."
SOON = timedelta(seconds=20)
JOIN = {"op": "join", "timeout_s": 20.0}


def member(worker_id: int) -> Member:
    return Member(worker_id, "host", 1000 + worker_id, f"at-{worker_id}")


@pytest.fixture
def coordinator(caplog):
    """Give a function that starts a coordinator; check that it leaves nothing and fails nowhere."""
    caplog.set_level(logging.DEBUG)
    threads = threading.active_count()
    started: list[Coordinator] = []

    def start(expected: int, **options) -> Coordinator:
        started.append(Coordinator(SECRET, expected=expected, **options))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.close()
    assert threading.active_count() == threads
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "secret of this job" not in caplog.text
    assert SECRET.hex() not in caplog.text


@pytest.fixture
def short_deadlines(monkeypatch):
    monkeypatch.setattr(wire, "PEER_TIMEOUT_S", 0.3)


def dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 20)


def closed_by_peer(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


def join_all(address: str, count: int) -> None:
    with ThreadPoolExecutor(count) as pool:
        for mine in pool.map(lambda i: join(address, SECRET, member(i), SOON), range(count)):
            assert mine.world_size == count
            mine.close()


# --- strangers ----------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, os.urandom(5000)])
def test_two_hundred_strangers_disturb_no_join(coordinator, garbage):
    address = coordinator(3).address
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            sock = stack.enter_context(dial(address))
            with contextlib.suppress(ConnectionError):
                sock.sendall(garbage)
        join_all(address, 3)


def test_a_stranger_is_named_in_the_log(coordinator, caplog):
    with dial(coordinator(1).address) as sock:
        name = "{}:{}".format(*sock.getsockname())
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert closed_by_peer(sock)
    assert f"refused the connection of {name}: not a Farandole worker" in caplog.text


@pytest.mark.parametrize(
    "slow", [b"", b"fara", wire._hello(bytes(32)), wire._hello(bytes(32)) + b"x"]
)
def test_whoever_is_slow_to_authenticate_is_closed(coordinator, short_deadlines, caplog, slow):
    with dial(coordinator(1).address) as sock:
        sock.sendall(slow)
        assert closed_by_peer(sock)
    assert "handshake not finished within 0.3 s" in caplog.text


def test_another_version_is_told_ours(coordinator, caplog, monkeypatch):
    address = coordinator(1).address
    with dial(address) as sock:
        sock.sendall(wire._GREETING.pack(b"farandole", 0))
        assert sock.recv(11, socket.MSG_WAITALL) == wire._GREETING.pack(b"farandole", wire.VERSION)
        assert closed_by_peer(sock)
    assert "speaks version 0 of the protocol, not 1" in caplog.text


# --- secrets ------------------------------------------------------------------------------


def test_a_worker_with_another_secret_is_refused(coordinator, caplog):
    address = coordinator(1).address
    with pytest.raises(AuthenticationError, match="does not accept this worker's secret") as info:
        join(address, OTHER, member(0), SOON)
    assert info.value.peer == address
    wait_until(lambda: "does not know the job's secret" in caplog.text, "refusal logged")
    assert "another job" not in caplog.text + repr(info.value)
    join_all(address, 1)


@contextlib.contextmanager
def impostor(*answers: bytes) -> Iterator[str]:
    """Listen as a coordinator would, and give these answers whatever is asked."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer, contextlib.suppress(ConnectionError):
                for answer in answers:
                    peer.recv(1 << 16)
                    peer.sendall(answer)
                closed_by_peer(peer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield "{}:{}".format(*server.getsockname())
        thread.join(20)
        assert not thread.is_alive()


def test_a_coordinator_with_another_secret_is_refused():
    hello, proof = wire._hello(bytes(32)), wire._proof(OTHER, b"server", bytes(32), bytes(32))
    with (
        impostor(hello, proof) as address,
        pytest.raises(AuthenticationError, match="it does not know the job's secret"),
    ):
        join(address, SECRET, member(0), SOON)


def test_a_proof_cannot_be_sent_back_to_its_maker():
    """An impostor that answers with the worker's own nonce and proof gains nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def mirror() -> None:
            peer, _ = server.accept()
            with peer, contextlib.suppress(ConnectionError):
                while data := peer.recv(1 << 16):
                    peer.sendall(data)

        thread = threading.Thread(target=mirror)
        thread.start()
        with pytest.raises(AuthenticationError, match="does not know"):
            join("{}:{}".format(*server.getsockname()), SECRET, member(0), SOON)
        thread.join(20)


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", AuthenticationError, "no Farandole coordinator"),
        (wire._GREETING.pack(b"farandole", 9), MembershipError, "version 9 .* version 1"),
    ],
)
def test_what_is_no_coordinator_of_ours_is_named(answer, error, text):
    with impostor(answer) as address, pytest.raises(error, match=text):
        join(address, SECRET, member(0), SOON)


def test_a_silent_coordinator_is_given_up():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(MembershipError, match=r"cannot reach the coordinator .*timed out"),
    ):
        join("{}:{}".format(*server.getsockname()), SECRET, member(0), timedelta(seconds=0.2))


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:", "127.0.0.1:99999", "[::1]:x"])
def test_an_address_that_is_none_is_named(address):
    with pytest.raises(MembershipError, match="cannot reach the coordinator at"):
        join(address, SECRET, member(0), SOON)


# --- members that break the protocol ------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ((2 << 20).to_bytes(4) + b"x", "more than 1048576"),
        ((3).to_bytes(4) + b"xyz", "not JSON"),
        (wire.encode({"op": "dance"}), "unknown request 'dance'"),
        (wire.encode({"op": "get", "key": 1, "timeout_s": 1.0}), "unknown request 'get'"),
        (wire.encode({"op": "set", "key": "k", "value": "?"}), "bad value in 'set'"),
        (wire.encode({"op": "check", "keys": [["k"]]}), "bad value in 'check'"),
        (wire.encode({**JOIN, "member": {}}), "not a member's fields"),
        (wire.encode({"op": "join", "member": {}}), "joins without a timeout"),
    ],
)
def test_what_makes_no_sense_ends_only_its_own_connection(coordinator, caplog, data, reason):
    address = coordinator(1).address
    connection = wire.connect(address, SECRET)
    connection._socket.sendall(data)
    assert closed_by_peer(connection._socket)
    connection.close()
    assert reason in caplog.text
    join_all(address, 1)


def test_a_message_must_end_in_time(coordinator, short_deadlines, caplog):
    connection = wire.connect(coordinator(1).address, SECRET, 20)
    connection._socket.sendall((100).to_bytes(4) + b"{")
    assert closed_by_peer(connection._socket)
    connection.close()
    assert "message not finished within 0.3 s" in caplog.text


def test_an_idle_member_is_left_alone(coordinator, short_deadlines):
    store = StoreClient(coordinator(1).address, SECRET)
    store.set("a", b"1")
    time.sleep(0.6)  # twice the deadline of a message: none has begun
    assert store.get("a", SOON) == b"1"
    store.close()


def test_a_member_that_does_not_read_is_let_go(short_deadlines):
    async def flood(writer: asyncio.StreamWriter) -> None:
        while True:
            await wire.send(writer, {"v": "x" * 500_000})

    async def talk_to_a_wall() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            _, writer = await asyncio.open_connection(*server.getsockname())
            with pytest.raises(wire.ProtocolError, match=r"did not read for 0\.3 s"):
                await flood(writer)
            writer.transport.abort()

    asyncio.run(talk_to_a_wall())


# --- joining that goes wrong --------------------------------------------------------------


def waits(coordinator: Coordinator, count: int) -> None:
    wait_until(lambda: len(coordinator._members) == count, f"{count} workers wait")


def test_a_taken_id_and_a_full_gang_are_refused(coordinator, caplog):
    one = coordinator(2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, one.address, SECRET, member(0), SOON)
        waits(one, 1)
        with pytest.raises(MembershipError, match="worker id 0 is taken by pid 1000 on host host"):
            join(one.address, SECRET, member(0), SOON)
        with (
            join(one.address, SECRET, member(1), SOON),
            first.result(20),
            pytest.raises(MembershipError, match="all 2 expected workers have joined already"),
        ):
            join(one.address, SECRET, member(2), SOON)
    assert "refused worker 2" in caplog.text


def test_who_waits_in_vain_learns_how_many_had_joined(coordinator):
    one = coordinator(3)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, one.address, SECRET, member(0), SOON)
        waits(one, 1)
        with pytest.raises(MembershipError, match="worker 1 could not join: 2 of 3 workers have"):
            join(one.address, SECRET, member(1), timedelta(seconds=0.2))
        waits(one, 1)
        one.close()
        with pytest.raises(MembershipError, match="lost the coordinator"):
            first.result(20)


def test_the_coordinator_has_a_start_timeout_of_its_own(coordinator):
    one = coordinator(2, start_timeout=timedelta(seconds=0.2))
    for _ in range(2):
        with pytest.raises(MembershipError, match="1 of 2 workers have joined in the time given"):
            join(one.address, SECRET, member(0), SOON)


def test_a_worker_killed_while_it_waits_is_forgotten(coordinator, tmp_path):
    one = coordinator(2)
    code = (
        "import os, sys; from datetime import timedelta\n"
        "from farandole.membership.client import join\n"
        "from farandole.plan.quorum import Member\n"
        "me = Member(0, 'h', os.getpid(), '')\n"
        "join(sys.argv[1], os.environ['SECRET'].encode(), me, timedelta(seconds=60))\n"
    )
    engine = LocalEngine()
    try:
        argv = (sys.executable, "-c", code, one.address)
        engine.start(WorkerSpec(0, argv, {"SECRET": SECRET.decode()}, tmp_path / "log"))
        waits(one, 1)
        engine.kill(0)
        waits(one, 0)
    finally:
        engine.close()
    join_all(one.address, 2)


def test_a_waiting_worker_that_talks_out_of_turn_is_forgotten(coordinator, caplog):
    one = coordinator(2)
    connection = wire.connect(one.address, SECRET)
    connection._socket.sendall(wire.encode({**JOIN, "member": asdict(member(0))}))
    waits(one, 1)
    connection._socket.sendall(b"\xff" * 100)
    assert closed_by_peer(connection._socket)
    connection.close()
    assert "more than 1048576" in caplog.text
    join_all(one.address, 2)


def test_closing_frees_all_who_wait(coordinator):
    one = coordinator(20)
    with ThreadPoolExecutor(12) as pool:
        waiting = [pool.submit(join, one.address, SECRET, member(i), SOON) for i in range(10)]
        stores = [StoreClient(one.address, SECRET) for _ in range(2)]
        waiting += [pool.submit(store.get, "never", SOON) for store in stores]
        waits(one, 10)
        one.close()
        for each in waiting:
            with pytest.raises(MembershipError, match="coordinator"):
                each.result(20)
        for store in stores:
            store.close()
